//! A device in a page of code, for tests of what stands on the driver's traits: one GPU, one FPGA, a DMA engine, no threads, no time.
//!
//! Work ends inside `submit`; a call that submits more than a stream's credits at once gets BUSY for the rest. A [`Sabotage`] makes it do one
//! thing wrong, so that tests can show that they would notice. It proves nothing about the real device.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test uses the part it needs")]
#![allow(clippy::unwrap_used, reason = "a panic is how a fake device fails its test")]

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use peergate_guest::uapi::{self, Alloc, Completion, Endpoint, Event, Info, Peer, Stream, Work};
use peergate_guest::{Channel, Driver, Error, FaultReason, HostMemory, Status};

mod kernel;

pub const GPU: u32 = 1;
pub const FPGA: u32 = 2;
pub const ENGINE: u32 = 3;
pub const PAGE: u64 = 4096;
pub const CREDITS: usize = 64;
const MEMORY: u64 = 256 << 20;
const MAPPINGS: u32 = 1024;

/// The one thing that the device does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    None,
    PeerUnchecked,
    PeerBothWays,
    RightsForgotten,
    AddressOfPage,
    EventOfOtherAccess,
    DirtyMemory,
    WriteBeforeFault,
    CorruptCopies,
    StagedPath,
    FirstPieceDetours,
    FreeOfForeign,
    StaleIsUnknown,
    SharedAddresses,
    ErrorsForgotten,
    CompletionTwice,
    BusyUnlimited,
    KernelUnchecked,
    ZeroLengthFine,
    RegistersAnySize,
    AlreadyFine,
    AnyEndpoint,
    NoQuota,
    AtomicsTellTheNew,
    AtomicsForget,
    AtomicsAnywhere,
}

type Bytes = Arc<Mutex<Vec<u8>>>;

#[derive(Clone)]
struct Mapping {
    len: u64,
    flags: u32,
    owner: Option<u32>,
    registers: bool,
    bytes: Bytes,
}

#[derive(Default)]
struct Domain {
    next: u64,
    mappings: BTreeMap<u64, Mapping>,
    peers: HashMap<(u32, u32), u32>,
    errors: HashSet<u32>,
    completions: VecDeque<Completion>,
    events: VecDeque<Event>,
    registers: HashMap<u64, u64>,
}

#[derive(Default)]
struct State {
    domains: HashMap<u32, Domain>,
    next_domain: u32,
    handles: HashMap<u64, (u32, u64)>,
    freed: HashSet<u64>,
    next_handle: u64,
    used: HashMap<u32, u64>,
    seq: u64,
    pool: Vec<Vec<u8>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    sabotage: Sabotage,
}

/// Opens the device.
#[derive(Clone)]
pub struct Fake(Arc<Shared>);

fn memory_len(endpoint: u32) -> u64 {
    if endpoint == ENGINE { 0 } else { MEMORY }
}

impl Fake {
    pub fn new(sabotage: Sabotage) -> Self {
        Self(Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), sabotage }))
    }

    /// Bytes of `endpoint`'s memory in use.
    pub fn used(&self, endpoint: u32) -> u64 {
        self.0.state.lock().unwrap().used.get(&endpoint).copied().unwrap_or(0)
    }

    /// Mappings of all domains.
    pub fn mappings(&self) -> usize {
        self.0.state.lock().unwrap().domains.values().map(|domain| domain.mappings.len()).sum()
    }

    /// Domains that are open.
    pub fn domains(&self) -> usize {
        self.0.state.lock().unwrap().domains.len()
    }
}

impl Driver for Fake {
    fn open(&self) -> Result<Box<dyn Channel>, Error> {
        let mut state = self.0.state.lock().unwrap();
        state.next_domain += 1;
        let domain = state.next_domain;
        state.domains.insert(domain, Domain { next: 0x10_0000, ..Domain::default() });
        Ok(Box::new(FakeChannel { shared: Arc::clone(&self.0), domain }))
    }
}

struct FakeChannel {
    shared: Arc<Shared>,
    domain: u32,
}

impl Drop for FakeChannel {
    fn drop(&mut self) {
        let state = &mut *self.shared.state.lock().unwrap();
        let domain = state.domains.remove(&self.domain).expect("open");
        for mapping in domain.mappings.into_values() {
            give_back(state, &mapping);
        }
    }
}

fn give_back(state: &mut State, mapping: &Mapping) {
    if let Some(owner) = mapping.owner.filter(|_| !mapping.registers) {
        let used = state.used.entry(owner).or_default();
        *used = used.saturating_sub(mapping.len);
        state.pool.push(std::mem::take(&mut *mapping.bytes.lock().unwrap()));
    }
}

struct Host {
    iova: u64,
    bytes: Bytes,
}

fn slice(len: usize, offset: u64, want: usize) -> Result<std::ops::Range<usize>, Error> {
    let start = usize::try_from(offset).unwrap();
    if start + want > len {
        return Err(Error::Bounds { offset, len: want as u64, size: len as u64 });
    }
    Ok(start..start + want)
}

impl HostMemory for Host {
    fn iova(&self) -> u64 {
        self.iova
    }
    fn len(&self) -> u64 {
        self.bytes.lock().unwrap().len() as u64
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let bytes = self.bytes.lock().unwrap();
        into.copy_from_slice(&bytes[slice(bytes.len(), offset, into.len())?]);
        Ok(())
    }
    fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), Error> {
        let mut bytes = self.bytes.lock().unwrap();
        let range = slice(bytes.len(), offset, from.len())?;
        bytes[range].copy_from_slice(from);
        Ok(())
    }
}

fn refused<T>(call: &'static str, status: Status) -> Result<T, Error> {
    Err(Error::Refused { call, status })
}

impl FakeChannel {
    fn insert(&self, state: &mut State, mapping: Mapping) -> u64 {
        let domain = state.domains.get_mut(&self.domain).unwrap();
        let iova = domain.next;
        domain.next += mapping.len;
        domain.mappings.insert(iova, mapping);
        iova
    }

    fn event(&self, state: &mut State, event: Event) {
        state.seq += 1;
        let event = Event { seq: state.seq, ..event };
        state.domains.get_mut(&self.domain).unwrap().events.push_back(event);
        self.shared.changed.notify_all();
    }
}

impl Channel for FakeChannel {
    fn info(&self) -> Result<Info, Error> {
        Ok(Info {
            version: 1,
            session: 1,
            domain: self.domain,
            interrupt: uapi::INTERRUPT_MSIX,
            iova_start: PAGE,
            iova_last: (1 << 48) - 1,
            page_size: PAGE,
            max_batch: 16,
            endpoints: 3,
            stream_credits: u32::try_from(CREDITS).unwrap(),
            max_in_flight: 1024,
            max_streams: 64,
            default_timeout_ms: 1000,
            max_timeout_ms: 1000,
            submit_queues: 1,
            max_domains: 16,
            max_mappings: MAPPINGS,
            ..Info::default()
        })
    }

    fn endpoint(&self, index: u32) -> Result<Endpoint, Error> {
        let (endpoint, kind, text, registers_len) = match index {
            0 => (GPU, uapi::KIND_GPU, "gpu0", 0),
            1 => (FPGA, uapi::KIND_FPGA, "fpga0", PAGE),
            2 => (ENGINE, uapi::KIND_ENGINE, "dma0", 0),
            _ => return refused("ENDPOINT", Status::NoEnt),
        };
        let mut name = [0; 40];
        name[..text.len()].copy_from_slice(text.as_bytes());
        let used = self.shared.state.lock().unwrap().used.get(&endpoint).copied().unwrap_or(0);
        Ok(Endpoint {
            index,
            endpoint,
            kind,
            engines: 1,
            memory_len: memory_len(endpoint),
            memory_free: memory_len(endpoint) - used,
            registers_len,
            granularity: PAGE,
            name,
            ..Endpoint::default()
        })
    }

    fn map(&self, len: u64, flags: u32) -> Result<Box<dyn HostMemory>, Error> {
        if len == 0 || !len.is_multiple_of(PAGE) || flags == 0 || flags > 3 {
            return refused("MAP", Status::Inval);
        }
        let state = &mut *self.shared.state.lock().unwrap();
        let bytes: Bytes = Arc::new(Mutex::new(vec![0; usize::try_from(len).unwrap()]));
        let mapping = Mapping { len, flags, owner: None, registers: false, bytes: Arc::clone(&bytes) };
        let iova = self.insert(state, mapping);
        Ok(Box::new(Host { iova, bytes }))
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), Error> {
        let state = &mut *self.shared.state.lock().unwrap();
        let mappings = &mut state.domains.get_mut(&self.domain).unwrap().mappings;
        match mappings.get(&iova) {
            Some(mapping) if mapping.len == len => mappings.remove(&iova),
            _ => return refused("UNMAP", Status::NoEnt),
        };
        Ok(())
    }

    fn alloc(&self, request: Alloc) -> Result<Alloc, Error> {
        let state = &mut *self.shared.state.lock().unwrap();
        let registers = request.flags & uapi::ALLOC_REGISTERS != 0;
        let len = if registers { PAGE } else { request.length.next_multiple_of(PAGE) };
        if ![GPU, FPGA, ENGINE].contains(&request.endpoint) {
            return refused("ALLOC", Status::NoEnt);
        }
        let count: usize = state.domains.values().map(|domain| domain.mappings.len()).sum();
        if count >= MAPPINGS as usize && self.shared.sabotage != Sabotage::NoQuota {
            return refused("ALLOC", Status::Quota);
        }
        let used = state.used.entry(request.endpoint).or_default();
        if !registers {
            if len == 0 || *used + len > memory_len(request.endpoint) {
                return refused("ALLOC", if len == 0 { Status::Inval } else { Status::NoMem });
            }
            *used += len;
        }
        let mut bytes = state.pool.pop().unwrap_or_default();
        if self.shared.sabotage != Sabotage::DirtyMemory {
            bytes.clear();
        }
        bytes.resize(usize::try_from(len).unwrap(), 0);
        let bytes = Arc::new(Mutex::new(bytes));
        let mapping = Mapping { len, flags: request.flags & 3, owner: Some(request.endpoint), registers, bytes };
        let iova = self.insert(state, mapping.clone());
        if self.shared.sabotage == Sabotage::SharedAddresses {
            for domain in state.domains.values_mut() {
                domain.mappings.entry(iova).or_insert_with(|| mapping.clone());
            }
        }
        state.next_handle += 1;
        let handle = state.next_handle;
        state.handles.insert(handle, (self.domain, iova));
        Ok(Alloc { handle, iova, length: len, ..request })
    }

    fn free(&self, handle: u64) -> Result<(), Error> {
        let state = &mut *self.shared.state.lock().unwrap();
        let fault = |reason| Event {
            kind: uapi::EVENT_FAULT,
            reason: reason as u8,
            accessor: u32::MAX,
            owner: u32::MAX,
            value: handle,
            ..Event::default()
        };
        match state.handles.get(&handle).copied() {
            Some((owner, iova)) if owner == self.domain || self.shared.sabotage == Sabotage::FreeOfForeign => {
                state.handles.remove(&handle);
                state.freed.insert(handle);
                let mapping = state.domains.get_mut(&owner).and_then(|domain| domain.mappings.remove(&iova));
                if let Some(mapping) = mapping {
                    give_back(state, &mapping);
                }
                Ok(())
            }
            None if state.freed.contains(&handle) && self.shared.sabotage != Sabotage::StaleIsUnknown => {
                self.event(state, fault(FaultReason::Stale));
                refused("FREE", Status::Stale)
            }
            _ => {
                self.event(state, fault(FaultReason::Domain));
                refused("FREE", Status::NoEnt)
            }
        }
    }

    fn peer(&self, request: Peer) -> Result<Peer, Error> {
        let state = &mut *self.shared.state.lock().unwrap();
        let peers = &mut state.domains.get_mut(&self.domain).unwrap().peers;
        let rights = peers.entry((request.accessor, request.owner)).or_default();
        match request.op {
            uapi::PEER_ENABLE => {
                if *rights & request.rights == request.rights && self.shared.sabotage != Sabotage::AlreadyFine {
                    return refused("PEER", Status::Already);
                }
                *rights |= request.rights;
            }
            uapi::PEER_DISABLE if self.shared.sabotage != Sabotage::RightsForgotten => *rights &= !request.rights,
            _ => {}
        }
        let rights = *rights;
        if self.shared.sabotage == Sabotage::PeerBothWays {
            peers.insert((request.owner, request.accessor), rights);
        }
        Ok(Peer { rights, path: uapi::PATH_DIRECT, reason: 2, ..request })
    }

    fn submit(&self, _queue: u32, work: &[Work]) -> Result<usize, Error> {
        let state = &mut *self.shared.state.lock().unwrap();
        let mut in_stream: HashMap<u32, usize> = HashMap::new();
        for item in work {
            let held = in_stream.entry(item.stream).or_default();
            *held += 1;
            let busy = *held > CREDITS && self.shared.sabotage != Sabotage::BusyUnlimited;
            let mut completion = if busy { ended(item, Status::Busy) } else { self.execute(state, item) };
            completion.cookie = item.cookie;
            let domain = state.domains.get_mut(&self.domain).unwrap();
            domain.completions.push_back(completion);
            if busy && self.shared.sabotage == Sabotage::CompletionTwice {
                domain.completions.push_back(completion);
            }
        }
        self.shared.changed.notify_all();
        Ok(work.len())
    }

    fn completions(&self, into: &mut [Completion], at_least: usize, deadline: Instant) -> Result<usize, Error> {
        let mut state = self.shared.state.lock().unwrap();
        let mut taken = 0;
        loop {
            let queue = &mut state.domains.get_mut(&self.domain).unwrap().completions;
            while let Some(slot) = into.get_mut(taken)
                && let Some(completion) = queue.pop_front()
            {
                *slot = completion;
                taken += 1;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if taken >= at_least.min(into.len()) || left.is_zero() {
                return Ok(taken);
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap().0;
        }
    }

    fn stream(&self, request: Stream) -> Result<Stream, Error> {
        let state = &mut *self.shared.state.lock().unwrap();
        let known = state.domains.get_mut(&self.domain).unwrap().errors.remove(&request.stream);
        if known { Ok(request) } else { refused("STREAM", Status::NoEnt) }
    }

    fn event(&self, deadline: Instant) -> Result<Option<Event>, Error> {
        let mut state = self.shared.state.lock().unwrap();
        loop {
            let event = state.domains.get_mut(&self.domain).unwrap().events.pop_front();
            let left = deadline.saturating_duration_since(Instant::now());
            if event.is_some() || left.is_zero() {
                return Ok(event);
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap().0;
        }
    }
}

fn ended(work: &Work, status: Status) -> Completion {
    Completion { cookie: work.cookie, status: status.to_raw(), ..Completion::default() }
}
