//! What the tests share: a guest with a driver's rings, a device over real memory, short names.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    unused_imports,
    reason = "each test uses some of it"
)]

pub mod crash;
pub mod engine;
pub mod ring;
pub mod words;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hw_engine::{DmaEngine, EndpointKind, EndpointSpec, Memory, RamMap, RamRegion};
use hw_host::{HostEngine, HostMemory};
use iommu_addr::{ApertureOffset, EndpointId, Gpa, Location, Range};
use vdev_device::{Counter, Device, DeviceSpec, FaultRecord, Gauge, Limits, Observer, Reach};
use vdev_wire::{
    Alloc, Attach, COMPLETION_PENDING, Cancel, Completion, ControlHeader, ControlReply, ENDPOINT_ALL, Event, Free,
    Hello, INITIATOR_ANY, Map, MapSegment, Opcode, Peer, Status, StreamReset, SubmitHeader, Unmap, WorkDescriptor,
    WorkOpcode,
};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

pub use engine::{Mode, ScriptEngine};
pub use ring::DriverRing;
pub use words::*;

pub const PAGE: u64 = 4096;
pub const GPU: EndpointId = EndpointId::local(0);
pub const FPGA: EndpointId = EndpointId::local(1);
pub const NIC: EndpointId = EndpointId::local(2);
pub const SESSION: u32 = 7;
/// Guest memory: requests and records below `DATA`.
pub const RAM_LEN: u64 = 128 << 20;
pub const DATA: u64 = 16 << 20;
pub const VRAM: u64 = 1 << 20;
pub const RW: u32 = vdev_wire::MAP_READ | vdev_wire::MAP_WRITE;
/// Where `map` maps guest memory: the address is this and the guest-physical one.
pub const IOVA: u64 = 1 << 32;

/// What the operator saw.
#[derive(Default)]
pub struct Seen {
    pub counts: Mutex<HashMap<Counter, u64>>,
    pub gauges: Mutex<BTreeMap<Gauge, u64>>,
    pub faults: Mutex<Vec<FaultRecord>>,
    /// Takes long to count.
    pub counts_slowly: AtomicBool,
    /// Takes long to note that something is in flight.
    pub gauges_slowly: AtomicBool,
}

impl Observer for Seen {
    fn fault(&self, record: &FaultRecord) {
        self.faults.lock().unwrap().push(*record);
    }
    fn count(&self, counter: Counter, by: u64) {
        if self.counts_slowly.load(Ordering::Relaxed) {
            (0..100).for_each(|_| std::thread::yield_now());
        }
        *self.counts.lock().unwrap().entry(counter).or_default() += by;
    }
    fn gauge(&self, gauge: Gauge, value: u64) {
        if gauge == Gauge::InFlight && value > 0 && self.gauges_slowly.load(Ordering::Relaxed) {
            (0..100).for_each(|_| std::thread::yield_now());
        }
        self.gauges.lock().unwrap().insert(gauge, value);
    }
}

impl Seen {
    pub fn count_of(&self, counter: Counter) -> u64 {
        self.counts.lock().unwrap().get(&counter).copied().unwrap_or(0)
    }
    pub fn gauge_of(&self, gauge: Gauge) -> u64 {
        self.gauges.lock().unwrap().get(&gauge).copied().unwrap_or(0)
    }
}

/// An answered control request.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: Status,
    pub detail: u64,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn read<T: FromBytes>(&self) -> T {
        T::read_from_prefix(&self.body).expect("a whole body").0
    }
}

/// A control request under way.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    head: u16,
    reply: u64,
    room: u32,
}

/// A submission under way.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    pub queue: usize,
    pub head: u16,
    records: u64,
    count: usize,
}

/// The device and its guest.
pub struct Bed {
    pub device: Arc<Device>,
    pub engine: Arc<ScriptEngine>,
    pub memory: Arc<HostMemory>,
    pub mem: GuestMemoryMmap,
    pub seen: Arc<Seen>,
    /// Control, events, then submission queues.
    pub rings: Vec<DriverRing>,
    /// What the driver believes in.
    pub session: u32,
    pub process: Arc<crash::Process>,
    pub journal: Arc<Vec<AtomicU64>>,
    spec: DeviceSpec,
    next: u64,
    /// Used chains that nobody asked for yet, by queue and head.
    used: HashMap<(usize, u16), u32>,
    /// Where event buffers lie, by head.
    events: HashMap<u16, u64>,
}

pub fn endpoint(id: EndpointId, kind: EndpointKind, registers_len: u64) -> EndpointSpec {
    let name = format!("{kind}-{id}");
    EndpointSpec { id, kind, name, memory_len: VRAM, registers_len, granularity: PAGE, engines: 2 }
}

pub fn spec() -> DeviceSpec {
    DeviceSpec {
        linger: std::time::Duration::ZERO,
        endpoints: vec![
            endpoint(GPU, EndpointKind::Gpu, 0),
            endpoint(FPGA, EndpointKind::Fpga, PAGE),
            endpoint(NIC, EndpointKind::Gpu, 0),
        ],
        limits: Limits { max_mappings: 1024, max_total_segments: 4096, ..Limits::default() },
        reach: Reach::all(),
        session: SESSION,
        submit_queues: 2,
    }
}

fn file(len: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(len).unwrap();
    file
}

impl Bed {
    pub fn new() -> Self {
        Self::with(spec())
    }

    pub fn with(spec: DeviceSpec) -> Self {
        Self::build(spec, |memory| Arc::new(HostEngine::new(memory)), 1 << 20)
    }

    /// A device over a scripted engine over this one, which executes at once.
    pub fn build(
        spec: DeviceSpec,
        engine: impl FnOnce(Arc<dyn Memory>) -> Arc<dyn DmaEngine>,
        max_transfer: u64,
    ) -> Self {
        Self::assemble(spec, |memory| {
            let script = ScriptEngine::new(engine(memory), max_transfer);
            (script.clone(), script)
        })
    }

    /// A device over this very engine. The scripted one is there and does nothing.
    pub fn over(spec: DeviceSpec, engine: impl FnOnce(Arc<dyn Memory>) -> Arc<dyn DmaEngine>) -> Self {
        Self::assemble(spec, |memory| {
            let idle = ScriptEngine::new(Arc::new(HostEngine::new(memory.clone())), 1 << 20);
            (engine(memory), idle)
        })
    }

    fn assemble(
        spec: DeviceSpec,
        engines: impl FnOnce(Arc<dyn Memory>) -> (Arc<dyn DmaEngine>, Arc<ScriptEngine>),
    ) -> Self {
        let ram = file(RAM_LEN);
        let at = FileOffset::new(ram.try_clone().unwrap(), 0);
        let ranges = [(GuestAddress(0), RAM_LEN as usize, Some(at))];
        let mem = GuestMemoryMmap::from_ranges_with_files(ranges).unwrap();
        let memory = Arc::new(HostMemory::new());
        let gpa = Range::with_len(Gpa(0), RAM_LEN).unwrap();
        memory.replace(&[RamRegion { gpa, file: Arc::new(ram), offset: 0 }]).unwrap();
        for endpoint in spec.endpoints.iter().filter(|endpoint| endpoint.memory_len > 0) {
            memory.add_aperture(endpoint.id, &file(VRAM), VRAM).unwrap();
        }
        let (inner, engine) = engines(memory.clone());
        let seen = Arc::new(Seen::default());
        let device = Device::new(spec.clone(), inner, memory.clone(), seen.clone()).unwrap();
        let queues = u64::from(device.num_queues());
        let rings = (0..queues).map(|queue| DriverRing::new(&mem, 0x10_0000 + 0x4000 * queue, 64)).collect();
        let (used, events) = (HashMap::new(), HashMap::new());
        let (process, session, journal) = (Arc::default(), spec.session, crash::journal_words());
        let next = 0x20_0000;
        let mut bed =
            Self { device, engine, memory, mem, seen, rings, session, process, journal, spec, next, used, events };
        assert!(bed.begin(None));
        bed
    }

    /// A device that a driver has said HELLO to, with GPU and FPGA attached to domain 1 and all data memory mapped.
    pub fn ready() -> Self {
        Self::with(spec()).prepared()
    }

    pub fn prepared(mut self) -> Self {
        self.hello();
        self.attach(1, GPU);
        self.attach(1, FPGA);
        self.map(1, DATA, 1 << 20);
        self
    }

    /// Guest memory for requests, used round and round.
    pub fn room(&mut self, len: u64) -> u64 {
        if self.next + len > DATA {
            self.next = 0x20_0000;
        }
        let at = self.next;
        self.next += len.next_multiple_of(64);
        at
    }

    pub fn put(&mut self, bytes: &[u8]) -> u64 {
        let at = self.room(bytes.len() as u64);
        self.mem.write_slice(bytes, GuestAddress(at)).unwrap();
        at
    }

    pub fn ram(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    pub fn set_ram(&self, at: u64, bytes: &[u8]) {
        self.mem.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    /// Bytes of an endpoint's memory.
    pub fn vram(&self, endpoint: EndpointId, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let at = Location::Aperture { endpoint, offset: ApertureOffset(offset) };
        self.memory.read(at, &mut bytes).unwrap();
        bytes
    }

    /// Lets every queue and the timekeeper do all they can now.
    pub fn drain(&self) {
        loop {
            let mut more = false;
            for queue in 0..self.device.num_queues() {
                more |= self.device.drain(queue);
            }
            if !more && self.device.poll() != Some(Duration::ZERO) {
                return;
            }
        }
    }

    /// Drains until something is so. Gives up after a long time, which only a defect needs.
    pub fn until(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        loop {
            self.drain();
            if is_so(self) {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "never came: {what}");
            std::thread::yield_now();
        }
    }

    fn collect(&mut self) {
        for (queue, ring) in self.rings.iter_mut().enumerate() {
            if queue != 1 {
                self.used.extend(ring.take_used().into_iter().map(|(head, len)| ((queue, head), len)));
            }
        }
    }

    /// The length a chain was used with, once it is.
    pub fn used(&mut self, queue: usize, head: u16) -> Option<u32> {
        self.collect();
        self.used.remove(&(queue, head))
    }

    // Control requests.

    pub fn start_raw(&mut self, bytes: &[u8], room: u32) -> Call {
        let at = self.put(bytes);
        let reply = self.put(&vec![0xee; room as usize]);
        let head = self.rings[0].push(&[(at, bytes.len() as u32)], &[(reply, room)]);
        Call { head, reply, room }
    }

    pub fn start(&mut self, opcode: Opcode, domain: u32, body: &[u8]) -> Call {
        let header = ControlHeader {
            opcode: (opcode as u16).into(),
            flags: 0.into(),
            domain: domain.into(),
            session: self.session.into(),
            reserved: 0.into(),
        };
        self.start_raw(&[header.as_bytes(), body].concat(), 512)
    }

    /// The answer, if it is there after draining.
    pub fn answer(&mut self, call: Call) -> Option<Answer> {
        self.drain();
        self.answered(call)
    }

    /// The answer, if it is there.
    pub fn answered(&mut self, call: Call) -> Option<Answer> {
        let len = self.used(0, call.head)?;
        assert!(len >= 16 && len <= call.room, "{len} bytes were used");
        let reply = ControlReply::read_from_bytes(&self.ram(call.reply, 16)).unwrap();
        assert_eq!(reply.length.get() + 16, len, "the used length is what was written");
        let status = Status::from_raw(reply.status.get()).expect("a status");
        let body = self.ram(call.reply + 16, reply.length.get() as usize);
        Some(Answer { status, detail: reply.detail.get(), body })
    }

    pub fn call(&mut self, opcode: Opcode, domain: u32, body: &[u8]) -> Answer {
        let call = self.start(opcode, domain, body);
        self.answer(call).expect("an answer at once")
    }

    pub fn ok(&mut self, opcode: Opcode, domain: u32, body: &[u8]) -> Answer {
        let answer = self.call(opcode, domain, body);
        assert_eq!(answer.status, Status::Ok, "{opcode:?}: {answer:?}");
        answer
    }

    pub fn hello(&mut self) -> Answer {
        let hello = Hello { version: 1.into(), ..Hello::new_zeroed() };
        self.ok(Opcode::Hello, 0, hello.as_bytes())
    }

    pub fn attach(&mut self, domain: u32, endpoint: EndpointId) {
        self.ok(Opcode::Attach, domain, attach(endpoint).as_bytes());
    }

    pub fn detach_all(&mut self, domain: u32) -> Answer {
        let all = Attach { endpoint: ENDPOINT_ALL.into(), flags: 0.into() };
        self.call(Opcode::Detach, domain, all.as_bytes())
    }

    /// Maps guest memory at its address plus `IOVA`.
    pub fn map(&mut self, domain: u32, gpa: u64, len: u64) {
        self.ok(Opcode::Map, domain, &map_bytes(IOVA + gpa, RW, &[(gpa, len)]));
    }

    pub fn unmap(&mut self, domain: u32, start: u64, last: u64) -> Answer {
        self.call(Opcode::Unmap, domain, unmap(start, last).as_bytes())
    }

    pub fn alloc(&mut self, domain: u32, endpoint: EndpointId, iova: u64, len: u64) -> u64 {
        let answer = self.ok(Opcode::Alloc, domain, alloc(endpoint, RW, iova, len).as_bytes());
        answer.read::<vdev_wire::AllocReply>().handle.get()
    }

    pub fn free(&mut self, domain: u32, handle: u64) -> Answer {
        self.call(Opcode::Free, domain, Free { handle: handle.into() }.as_bytes())
    }

    pub fn enable(&mut self, domain: u32, accessor: EndpointId, owner: EndpointId, rights: u32) {
        self.ok(Opcode::PeerEnable, domain, peer(accessor, owner, rights).as_bytes());
    }

    pub fn reset_stream(&mut self, domain: u32, stream: u32) {
        self.ok(Opcode::StreamReset, domain, StreamReset { stream: stream.into(), reserved: 0.into() }.as_bytes());
    }

    pub fn cancel(&mut self, domain: u32, stream: u32, cookie: Option<u64>) -> (u32, u32) {
        let body = Cancel {
            stream: stream.into(),
            flags: u32::from(cookie.is_none()).into(),
            cookie: cookie.unwrap_or(0).into(),
        };
        let reply: vdev_wire::CancelReply = self.ok(Opcode::Cancel, domain, body.as_bytes()).read();
        (reply.cancelled.get(), reply.running.get())
    }

    // Work.

    pub fn submit_raw(&mut self, queue: usize, bytes: &[u8], count: usize) -> Batch {
        let at = self.put(bytes);
        let mut pending = Completion::new_zeroed();
        pending.status = COMPLETION_PENDING.into();
        let records = self.put(&pending.as_bytes().repeat(count));
        let head = self.rings[queue].push(&[(at, bytes.len() as u32)], &[(records, 32 * count as u32)]);
        Batch { queue, head, records, count }
    }

    pub fn submit_on(&mut self, queue: usize, domain: u32, works: &[WorkDescriptor]) -> Batch {
        let header = SubmitHeader { session: self.session.into(), ..batch_header(domain, works.len()) };
        let bytes = [header.as_bytes(), works.as_bytes()].concat();
        self.submit_raw(queue, &bytes, works.len())
    }

    pub fn submit(&mut self, domain: u32, works: &[WorkDescriptor]) -> Batch {
        self.submit_on(2, domain, works)
    }

    pub fn record_at(&self, batch: Batch, index: u64) -> u64 {
        batch.records + 32 * index
    }

    /// The records as they are now, used or not.
    pub fn records(&self, batch: Batch) -> Vec<Completion> {
        let bytes = self.ram(batch.records, 32 * batch.count);
        bytes.chunks_exact(32).map(|record| Completion::read_from_bytes(record).unwrap()).collect()
    }

    /// The statuses as they are now; `None` is pending.
    pub fn statuses(&self, batch: Batch) -> Vec<Option<Status>> {
        self.records(batch).iter().map(|record| Status::from_raw(record.status.get())).collect()
    }

    pub fn is_used(&mut self, batch: Batch) -> bool {
        let len = self.used(batch.queue, batch.head);
        if let Some(len) = len {
            assert_eq!(len as usize, 32 * batch.count, "every record was written");
        }
        len.is_some()
    }

    /// Submits, drains, and gives the records of a batch that is over.
    pub fn run(&mut self, domain: u32, works: &[WorkDescriptor]) -> Vec<Completion> {
        let batch = self.submit(domain, works);
        self.drain();
        assert!(self.is_used(batch), "the batch is over: {:?}", self.statuses(batch));
        self.records(batch)
    }

    pub fn run_one(&mut self, domain: u32, work: WorkDescriptor) -> Completion {
        self.run(domain, &[work])[0]
    }

    // Events.

    pub fn post_events(&mut self, count: usize) {
        for _ in 0..count {
            let at = self.room(64);
            let head = self.rings[1].push(&[], &[(at, 64)]);
            self.events.insert(head, at);
        }
    }

    /// Events delivered since the last call. Buffers are not posted again.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.drain();
        let used = self.rings[1].take_used();
        used.into_iter()
            .map(|(head, len)| {
                assert_eq!(len, 64);
                let at = self.events.remove(&head).unwrap();
                Event::read_from_bytes(&self.ram(at, 64)).unwrap()
            })
            .collect()
    }

    /// Everything that a tenant can hold is given back.
    pub fn assert_empty(&self) {
        for gauge in Gauge::ALL {
            assert_eq!(self.seen.gauge_of(*gauge), 0, "{}", gauge.name());
        }
    }
}
