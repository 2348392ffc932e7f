//! Whatever a guest does in whatever order, the device answers all of it and gives everything back.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use common::*;
use hw_engine::EngineError;
use proptest::prelude::*;
use vdev_device::Gauge;
use vdev_wire::{Attach, Cancel, ENDPOINT_ALL, Free, Hello, Opcode, Status, StreamReset, WorkDescriptor};
use zerocopy::{FromZeros, IntoBytes};

const BASE: u64 = 0x10_0000;

/// What a guest, an engine or a transport may do.
#[derive(Clone, Debug)]
enum Step {
    Attach(u32, u16),
    Detach(u32, Option<u16>),
    Hello,
    Map(u32, u64, u64),
    Unmap(u32, u64, u64),
    Flush(u32),
    Alloc(u32, u16, u64, u64),
    Free(u32, usize),
    Peer(u32, u16, u16, u32, bool),
    Reset(u32, u32),
    Cancel(u32, u32),
    Submit(usize, u32, Vec<Task>),
    Engine(u8),
    Release(usize),
    FailOne(usize),
    Restart(usize),
    Drain,
}

#[derive(Clone, Debug)]
struct Task {
    kind: u8,
    stream: u32,
    src: u64,
    dst: u64,
    len: u64,
    by: Option<u16>,
}

/// Addresses of a small window, so that steps meet each other.
fn page() -> impl Strategy<Value = u64> {
    (0u64..12).prop_map(|page| BASE + page * PAGE)
}

fn task() -> impl Strategy<Value = Task> {
    let offset = prop_oneof![Just(0), Just(8), Just(PAGE - 8)];
    let len = prop_oneof![1 => Just(0), 6 => Just(8), 6 => Just(64), 2 => Just(2 * PAGE), 1 => Just(40 * PAGE)];
    (0u8..8, 0u32..4, page(), page(), offset, len, proptest::option::weighted(0.3, 0u16..4))
        .prop_map(|(kind, stream, src, dst, offset, len, by)| Task { kind, stream, src: src + offset, dst, len, by })
}

fn step() -> impl Strategy<Value = Step> {
    let domain = || 1u32..4;
    let endpoint = || 0u16..4;
    prop_oneof![
        4 => (domain(), endpoint()).prop_map(|(d, e)| Step::Attach(d, e)),
        2 => (domain(), proptest::option::of(endpoint())).prop_map(|(d, e)| Step::Detach(d, e)),
        1 => Just(Step::Hello),
        4 => (domain(), page(), 1u64..5).prop_map(|(d, at, pages)| Step::Map(d, at, pages)),
        2 => (domain(), page(), 1u64..20).prop_map(|(d, at, pages)| Step::Unmap(d, at, pages)),
        1 => domain().prop_map(Step::Flush),
        4 => (domain(), endpoint(), page(), 1u64..5).prop_map(|(d, e, at, pages)| Step::Alloc(d, e, at, pages)),
        2 => (domain(), 0usize..8).prop_map(|(d, index)| Step::Free(d, index)),
        3 => (domain(), endpoint(), endpoint(), 0u32..4, any::<bool>())
            .prop_map(|(d, a, o, rights, on)| Step::Peer(d, a, o, rights, on)),
        2 => (domain(), 0u32..4).prop_map(|(d, s)| Step::Reset(d, s)),
        1 => (domain(), 0u32..4).prop_map(|(d, s)| Step::Cancel(d, s)),
        10 => (2usize..4, domain(), proptest::collection::vec(task(), 1..6))
            .prop_map(|(queue, d, tasks)| Step::Submit(queue, d, tasks)),
        3 => (0u8..4).prop_map(Step::Engine),
        4 => (0usize..8).prop_map(Step::Release),
        1 => (0usize..8).prop_map(Step::FailOne),
        1 => (2usize..4).prop_map(Step::Restart),
        6 => Just(Step::Drain),
    ]
}

struct World {
    bed: Bed,
    calls: Vec<Call>,
    batches: Vec<Batch>,
    handles: Vec<u64>,
    allocs: Vec<Call>,
}

impl World {
    fn new() -> Self {
        let mut spec = spec();
        spec.limits.stream_credits = 6;
        spec.limits.max_in_flight = 12;
        spec.limits.max_streams = 3;
        spec.limits.max_domains = 2;
        spec.limits.max_mappings = 12;
        spec.limits.max_buffers = 5;
        let memory = |memory| -> std::sync::Arc<dyn hw_engine::DmaEngine> {
            std::sync::Arc::new(hw_host::HostEngine::new(memory))
        };
        let mut bed = Bed::build(spec, memory, 16 * PAGE);
        bed.hello();
        bed.post_events(16);
        // Something to begin with: buffers of two endpoints, guest memory, rights.
        for endpoint in [GPU, FPGA] {
            bed.attach(1, endpoint);
        }
        bed.alloc(1, GPU, BASE, 2 * PAGE);
        bed.alloc(1, FPGA, BASE + 3 * PAGE, 2 * PAGE);
        bed.ok(Opcode::Map, 1, &map_bytes(BASE + 6 * PAGE, RW, &[(DATA, 3 * PAGE)]));
        bed.enable(1, GPU, FPGA, RW);
        Self { bed, calls: vec![], batches: vec![], handles: vec![], allocs: vec![] }
    }

    fn start(&mut self, opcode: Opcode, domain: u32, body: &[u8]) -> Call {
        // Rings have 64 heads; let some come back.
        if self.calls.len() + self.allocs.len() > 20 {
            self.settle();
        }
        self.bed.start(opcode, domain, body)
    }

    fn call(&mut self, opcode: Opcode, domain: u32, body: &[u8]) {
        let call = self.start(opcode, domain, body);
        self.calls.push(call);
    }

    /// Lets everything end.
    fn settle(&mut self) {
        self.bed.engine.set(Mode::Inline);
        loop {
            self.bed.drain();
            if self.bed.engine.held() == 0 {
                break;
            }
            self.bed.engine.release_all();
        }
        self.bed.drain();
        self.look();
        assert!(self.calls.is_empty() && self.allocs.is_empty(), "every request is answered");
        assert!(self.batches.is_empty(), "every batch is over");
        assert_eq!(self.bed.seen.gauge_of(Gauge::InFlight), 0);
    }

    fn look(&mut self) {
        let bed = &mut self.bed;
        self.calls.retain(|call| bed.answer(*call).is_none());
        let handles = &mut self.handles;
        self.allocs.retain(|call| {
            let answer = bed.answer(*call);
            if let Some(answer) = &answer
                && answer.status == Status::Ok
            {
                handles.push(answer.read::<vdev_wire::AllocReply>().handle.get());
            }
            answer.is_none()
        });
        self.batches.retain(|batch| {
            let over = bed.is_used(*batch);
            assert!(!over || bed.statuses(*batch).iter().all(Option::is_some), "a batch that is over has all records");
            !over
        });
    }

    fn submit(&mut self, queue: usize, domain: u32, tasks: &[Task]) {
        if self.batches.len() > 20 {
            self.settle();
        }
        let works: Vec<WorkDescriptor> = tasks
            .iter()
            .map(|task| {
                let work = match task.kind {
                    0 => fence(),
                    1 | 2 => fill(task.dst, task.len, !0),
                    3 => WorkDescriptor::new_zeroed(),
                    _ => copy(task.src, task.dst, task.len),
                };
                let work = work.stream(task.stream);
                task.by.map_or(work, |by| work.by(iommu_addr::EndpointId::local(by)))
            })
            .collect();
        let batch = self.bed.submit_on(queue, domain, &works);
        self.batches.push(batch);
    }

    fn take(&mut self, step: Step) {
        let local = iommu_addr::EndpointId::local;
        match step {
            Step::Attach(d, e) => self.call(Opcode::Attach, d, attach(local(e)).as_bytes()),
            Step::Detach(d, e) => {
                let endpoint = e.map_or(ENDPOINT_ALL, |e| local(e).to_raw());
                self.call(Opcode::Detach, d, Attach { endpoint: endpoint.into(), flags: 0.into() }.as_bytes());
            }
            Step::Hello => {
                let hello = Hello { version: 1.into(), ..Hello::new_zeroed() };
                self.call(Opcode::Hello, 0, hello.as_bytes());
            }
            Step::Map(d, at, pages) => {
                self.call(Opcode::Map, d, &map_bytes(at, RW, &[(DATA + at, PAGE), (DATA + 2 * at, pages * PAGE)]));
            }
            Step::Unmap(d, at, pages) => self.call(Opcode::Unmap, d, unmap(at, at + pages * PAGE - 1).as_bytes()),
            Step::Flush(d) => self.call(Opcode::Flush, d, &[0; 8]),
            Step::Alloc(d, e, at, pages) => {
                let call = self.start(Opcode::Alloc, d, alloc(local(e), RW, at, pages * PAGE).as_bytes());
                self.allocs.push(call);
            }
            Step::Free(d, index) => {
                let handle = self.handles.get(index).copied().unwrap_or(index as u64);
                self.call(Opcode::Free, d, Free { handle: handle.into() }.as_bytes());
            }
            Step::Peer(d, a, o, rights, on) => {
                let opcode = if on { Opcode::PeerEnable } else { Opcode::PeerDisable };
                self.call(opcode, d, peer(local(a), local(o), rights).as_bytes());
            }
            Step::Reset(d, s) => {
                self.call(Opcode::StreamReset, d, StreamReset { stream: s.into(), reserved: 0.into() }.as_bytes());
            }
            Step::Cancel(d, s) => {
                let cancel = Cancel { stream: s.into(), flags: 1.into(), cookie: 0.into() };
                self.call(Opcode::Cancel, d, cancel.as_bytes());
            }
            Step::Submit(queue, d, tasks) => self.submit(queue, d, &tasks),
            Step::Engine(mode) => {
                self.bed.engine.set([Mode::Inline, Mode::Hold, Mode::Full, Mode::Fail(0)][usize::from(mode)]);
            }
            Step::Release(index) if index < self.bed.engine.held() => self.bed.engine.release(index),
            Step::FailOne(index) if index < self.bed.engine.held() => {
                self.bed.engine.fail(index, 0, EngineError::Device { code: 3 });
            }
            Step::Restart(queue) if self.bed.engine.held() == 0 => {
                self.settle();
                self.bed.device.stop_queue(queue as u16);
                self.bed.device.start_queue(queue as u16, self.bed.rings[queue].ring.clone());
            }
            Step::Release(_) | Step::FailOne(_) | Step::Restart(_) => {}
            Step::Drain => {
                self.bed.drain();
                self.look();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn everything_is_answered_and_given_back(steps in proptest::collection::vec(step(), 1..80)) {
        let mut world = World::new();
        for step in steps {
            world.take(step);
        }
        world.settle();
        for domain in 1..4 {
            world.bed.detach_all(domain);
        }
        world.bed.drain();
        let bytes = world.bed.seen.gauge_of(Gauge::BufferBytes);
        for gauge in Gauge::ALL.iter().filter(|gauge| **gauge != Gauge::BufferBytes) {
            prop_assert_eq!(world.bed.seen.gauge_of(*gauge), 0, "{}", gauge.name());
        }
        // Only memory that an engine failed to zero stays out of use; what is free reads zero.
        world.bed.attach(1, GPU);
        let free = VRAM - bytes;
        let mut dirty = 0;
        for endpoint in [GPU, FPGA, NIC] {
            let memory = world.bed.vram(endpoint, 0, VRAM as usize);
            dirty += memory.chunks(PAGE as usize).filter(|page| page.iter().any(|byte| *byte != 0)).count() as u64;
        }
        prop_assert!(dirty * PAGE <= bytes, "{} dirty pages, {} bytes out of use, {} free", dirty, bytes, free);
    }
}
