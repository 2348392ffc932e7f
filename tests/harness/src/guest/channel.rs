//! One open of the device: a domain, its mappings, its completions and its events.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use peergate_guest::uapi::{self, Alloc, Completion, Endpoint, Event, Info, Peer, Stream, Work};
use peergate_guest::{Channel, Error, HostMemory, Status};
use vdev_wire::{
    AllocReply, Attach, Cancel, CancelReply, ENDPOINT_ALL, EndpointInfo, Free, Map, MapSegment, Opcode, PeerReply,
    StreamReset, Unmap,
};
use zerocopy::{Immutable, IntoBytes};

use super::control::Reply;
use super::core::{Core, bit};
use super::iova::IovaSpace;
use crate::ram::{PAGE, Pages};

/// Completions a channel may hold or expect: the size of the ring that a program would map.
const RING: usize = 4096;
/// Events a channel holds before it drops some.
const EVENTS: usize = 1024;

/// Where completions and events of a domain arrive.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    state: Mutex<InboxState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct InboxState {
    completions: VecDeque<Completion>,
    /// Completions in the ring or to come.
    claimed: usize,
    events: VecDeque<Event>,
    dropped: u64,
    gone: bool,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn deliver(&self, completions: impl Iterator<Item = Completion>) {
        self.lock().completions.extend(completions);
        self.changed.notify_all();
    }

    pub(super) fn event(&self, mut event: Event) {
        let mut state = self.lock();
        if state.events.len() == EVENTS {
            state.dropped += 1;
        } else {
            event.dropped_total += state.dropped;
            state.events.push_back(event);
        }
        drop(state);
        self.changed.notify_all();
    }

    pub(super) fn gone(&self) {
        self.lock().gone = true;
        self.changed.notify_all();
    }

    /// Claims room for as many of `wanted` completions as there is.
    fn claim(&self, wanted: usize) -> usize {
        let mut state = self.lock();
        let claimed = wanted.min(RING - state.claimed);
        state.claimed += claimed;
        claimed
    }

    fn unclaim(&self, count: usize) {
        self.lock().claimed -= count;
    }

    fn take(state: &mut InboxState, into: &mut [Completion]) -> usize {
        let count = into.len().min(state.completions.len());
        into.iter_mut().zip(state.completions.drain(..count)).for_each(|(slot, completion)| *slot = completion);
        state.claimed -= count;
        count
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, InboxState>, deadline: Instant) -> Option<MutexGuard<'a, InboxState>> {
        let left = deadline.saturating_duration_since(Instant::now());
        (!left.is_zero()).then(|| self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0)
    }
}

/// A channel; [`Channel`] says what it does.
#[derive(Debug)]
pub(super) struct DomainChannel {
    core: Arc<Core>,
    /// Of the device when the channel was opened.
    session: u32,
    domain: u32,
    inbox: Arc<Inbox>,
    /// Bits of the queues that it has submitted to: who polls leaves the others to those whose they are.
    queues: AtomicU64,
    space: Mutex<IovaSpace>,
    /// Mapped guest memory by address: the device may use it, so it is kept.
    mapped: Mutex<HashMap<u64, Arc<Pages>>>,
    /// Addresses of buffers by handle.
    buffers: Mutex<HashMap<u64, u64>>,
    pinned: AtomicU64,
}

impl DomainChannel {
    /// Creates the domain with every endpoint attached.
    pub(super) fn open(core: &Arc<Core>) -> Result<Self, Error> {
        let inbox = Arc::new(Inbox::default());
        let limits = core.limits();
        let channel = Self {
            core: Arc::clone(core),
            session: core.session(),
            domain: core.enter(&inbox),
            inbox,
            queues: AtomicU64::new(0),
            space: Mutex::new(IovaSpace::new(limits.iova_start.get(), limits.iova_last.get())),
            mapped: Mutex::default(),
            buffers: Mutex::default(),
            pinned: AtomicU64::new(0),
        };
        for endpoint in core.endpoints() {
            let body = Attach { endpoint: endpoint.endpoint, flags: 0.into() };
            channel.request("ATTACH", Opcode::Attach, &body, 0)?;
        }
        Ok(channel)
    }

    fn request(
        &self,
        call: &'static str,
        opcode: Opcode,
        body: &(impl IntoBytes + Immutable + ?Sized),
        room: usize,
    ) -> Result<Reply, Error> {
        self.core.request(call, opcode, (self.domain, self.session), body, room)
    }

    fn claim_range(&self, call: &'static str, len: u64, align: u64) -> Result<u64, Error> {
        let taken = lock(&self.space).take(len, align);
        taken.ok_or(Error::Refused { call, status: Status::NoMem })
    }

    fn find_endpoint(&self, call: &'static str, endpoint: u32) -> Result<EndpointInfo, Error> {
        let found = self.core.endpoints().iter().find(|info| info.endpoint.get() == endpoint).copied();
        found.ok_or(Error::Refused { call, status: Status::NoEnt })
    }
}

impl Channel for DomainChannel {
    fn info(&self) -> Result<Info, Error> {
        let limits = self.core.limits();
        Ok(Info {
            size: size_of::<Info>().try_into().unwrap_or(0),
            flags: 0,
            version: vdev_wire::VERSION.into(),
            session: self.session,
            domain: self.domain,
            interrupt: uapi::INTERRUPT_MSIX,
            iova_start: limits.iova_start.get(),
            iova_last: limits.iova_last.get(),
            page_size: PAGE,
            max_batch: limits.max_batch.get().into(),
            endpoints: self.core.endpoints().len().try_into().unwrap_or(0),
            stream_credits: limits.stream_credits.get(),
            max_in_flight: limits.max_in_flight.get(),
            max_streams: limits.max_streams.get(),
            default_timeout_ms: limits.default_timeout_ms.get(),
            max_timeout_ms: limits.max_timeout_ms.get(),
            submit_queues: self.core.submit_queues().try_into().unwrap_or(0),
            pinned_bytes: self.pinned.load(Ordering::Relaxed),
            max_domains: limits.max_domains.get(),
            max_mappings: limits.max_mappings.get(),
        })
    }

    fn endpoint(&self, index: u32) -> Result<Endpoint, Error> {
        let refused = Error::Refused { call: "ENDPOINT", status: Status::NoEnt };
        let (_, endpoints) = self.core.probe()?;
        let info = endpoints.get(index as usize).ok_or(refused)?;
        let mut name = [0; 40];
        name[..info.name.len()].copy_from_slice(&info.name);
        Ok(Endpoint {
            size: size_of::<Endpoint>().try_into().unwrap_or(0),
            index,
            endpoint: info.endpoint.get(),
            kind: info.kind.get(),
            engines: info.engines.get(),
            memory_len: info.memory_len.get(),
            memory_free: info.memory_free.get(),
            registers_len: info.registers_len.get(),
            granularity: info.granularity.get(),
            name,
        })
    }

    fn map(&self, len: u64, flags: u32) -> Result<Box<dyn HostMemory>, Error> {
        if len == 0 || !len.is_multiple_of(PAGE) || flags & !(uapi::READ | uapi::WRITE) != 0 || flags == 0 {
            return Err(Error::Refused { call: "MAP", status: Status::Inval });
        }
        let pages = Arc::new(self.core.alloc(len).map_err(|error| system("MAP", &error))?);
        let iova = self.claim_range("MAP", len, PAGE)?;
        let body = Map {
            iova: iova.into(),
            flags: flags.into(),
            segment_count: u32::try_from(pages.runs().len()).unwrap_or(u32::MAX).into(),
        };
        let segments = pages.runs().iter().map(|(gpa, len)| MapSegment { gpa: (*gpa).into(), len: (*len).into() });
        let mut bytes = body.as_bytes().to_vec();
        segments.for_each(|segment| bytes.extend_from_slice(segment.as_bytes()));
        if let Err(error) = self.request("MAP", Opcode::Map, bytes.as_slice(), 0) {
            lock(&self.space).give(iova);
            return Err(error);
        }
        lock(&self.mapped).insert(iova, Arc::clone(&pages));
        self.pinned.fetch_add(len, Ordering::Relaxed);
        Ok(Box::new(MappedMemory { iova, pages }))
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), Error> {
        // A kernel knows what it mapped and passes nothing else on.
        let known = lock(&self.mapped).get(&iova).map(|pages| pages.len());
        if known != Some(len) {
            return Err(Error::Refused { call: "UNMAP", status: Status::NoEnt });
        }
        let body = Unmap { iova_start: iova.into(), iova_last: (iova + (len - 1)).into() };
        self.request("UNMAP", Opcode::Unmap, &body, 0)?;
        lock(&self.mapped).remove(&iova);
        lock(&self.space).give(iova);
        self.pinned.fetch_sub(len, Ordering::Relaxed);
        Ok(())
    }

    fn alloc(&self, request: Alloc) -> Result<Alloc, Error> {
        let info = self.find_endpoint("ALLOC", request.endpoint)?;
        let (len, align) = if request.flags & uapi::ALLOC_REGISTERS != 0 {
            (if request.length == 0 { info.registers_len.get() } else { request.length }, PAGE)
        } else {
            let granularity = info.granularity.get();
            let len = request.length.checked_next_multiple_of(granularity);
            (len.ok_or(Error::Refused { call: "ALLOC", status: Status::Range })?, granularity)
        };
        if len == 0 {
            return Err(Error::Refused { call: "ALLOC", status: Status::Inval });
        }
        let iova = self.claim_range("ALLOC", len, align)?;
        let body = vdev_wire::Alloc {
            endpoint: request.endpoint.into(),
            flags: request.flags.into(),
            iova: iova.into(),
            len: len.into(),
        };
        let answer = self.request("ALLOC", Opcode::Alloc, &body, size_of::<AllocReply>());
        let handle = match answer.and_then(|reply| parse::<AllocReply>("ALLOC", &reply)) {
            Ok(reply) => reply.handle.get(),
            Err(error) => {
                lock(&self.space).give(iova);
                return Err(error);
            }
        };
        lock(&self.buffers).insert(handle, iova);
        Ok(Alloc { length: len, handle, iova, ..request })
    }

    fn free(&self, handle: u64) -> Result<(), Error> {
        self.request("FREE", Opcode::Free, &Free { handle: handle.into() }, 0)?;
        let iova = lock(&self.buffers).remove(&handle);
        if let Some(iova) = iova {
            lock(&self.space).give(iova);
        }
        Ok(())
    }

    fn peer(&self, request: Peer) -> Result<Peer, Error> {
        let (call, opcode) = match request.op {
            uapi::PEER_ENABLE => ("PEER_ENABLE", Opcode::PeerEnable),
            uapi::PEER_DISABLE => ("PEER_DISABLE", Opcode::PeerDisable),
            uapi::PEER_QUERY => ("PEER_QUERY", Opcode::PeerQuery),
            _ => return Err(Error::Refused { call: "PEER", status: Status::Inval }),
        };
        let query = request.op == uapi::PEER_QUERY;
        let body = vdev_wire::Peer {
            accessor: request.accessor.into(),
            owner: request.owner.into(),
            rights: if query { 0 } else { request.rights }.into(),
            reserved: 0.into(),
        };
        let reply = self.request(call, opcode, &body, size_of::<PeerReply>())?;
        let reply: PeerReply = parse(call, &reply)?;
        Ok(Peer { rights: reply.rights.get(), path: reply.path.get(), reason: reply.reason.get(), ..request })
    }

    fn submit(&self, queue: u32, work: &[Work]) -> Result<usize, Error> {
        self.core.check()?;
        self.queues.fetch_or(bit(queue), Ordering::Relaxed);
        let claimed = self.inbox.claim(work.len());
        let sent = self.core.submit(queue, &self.inbox, (self.domain, self.session), &work[..claimed]);
        self.inbox.unclaim(claimed - *sent.as_ref().unwrap_or(&0));
        match sent? {
            0 => {
                // What others left there, who look at the queue no more, may be all that it has.
                if self.core.polling() {
                    self.core.reap(bit(queue))?;
                }
                Err(Error::Refused { call: "SUBMIT", status: Status::Busy })
            }
            taken => Ok(taken),
        }
    }

    fn completions(&self, into: &mut [Completion], at_least: usize, deadline: Instant) -> Result<usize, Error> {
        let wanted = at_least.min(into.len());
        if self.core.polling() {
            return self.poll(into, wanted, deadline);
        }
        let mut state = self.inbox.lock();
        while state.completions.len() < wanted && !state.gone {
            let Some(next) = self.inbox.wait(state, deadline) else {
                state = self.inbox.lock();
                break;
            };
            state = next;
        }
        if state.gone && state.completions.is_empty() {
            return Err(Error::Gone);
        }
        Ok(Inbox::take(&mut state, into))
    }

    fn stream(&self, request: Stream) -> Result<Stream, Error> {
        match request.op {
            uapi::STREAM_RESET => {
                let body = StreamReset { stream: request.stream.into(), reserved: 0.into() };
                self.request("STREAM_RESET", Opcode::StreamReset, &body, 0)?;
                Ok(Stream { cancelled: 0, running: 0, ..request })
            }
            uapi::STREAM_CANCEL => {
                let body = Cancel {
                    stream: request.stream.into(),
                    flags: request.flags.into(),
                    cookie: request.cookie.into(),
                };
                let reply = self.request("CANCEL", Opcode::Cancel, &body, size_of::<CancelReply>())?;
                let reply: CancelReply = parse("CANCEL", &reply)?;
                Ok(Stream { cancelled: reply.cancelled.get(), running: reply.running.get(), ..request })
            }
            _ => Err(Error::Refused { call: "STREAM", status: Status::Inval }),
        }
    }

    fn event(&self, deadline: Instant) -> Result<Option<Event>, Error> {
        let mut state = self.inbox.lock();
        loop {
            if let Some(event) = state.events.pop_front() {
                return Ok(Some(event));
            }
            if state.gone {
                return Err(Error::Gone);
            }
            let Some(next) = self.inbox.wait(state, deadline) else { return Ok(None) };
            state = next;
        }
    }
}

impl DomainChannel {
    fn poll(&self, into: &mut [Completion], wanted: usize, deadline: Instant) -> Result<usize, Error> {
        let mut turns = 0u32;
        loop {
            self.core.reap(self.queues.load(Ordering::Relaxed))?;
            let mut state = self.inbox.lock();
            turns = turns.wrapping_add(1);
            // The clock costs more than a look at the rings.
            let late = turns.is_multiple_of(64) && (state.gone || Instant::now() >= deadline);
            if state.completions.len() >= wanted || late {
                return Ok(Inbox::take(&mut state, into));
            }
            drop(state);
            std::hint::spin_loop();
        }
    }
}

impl Drop for DomainChannel {
    fn drop(&mut self) {
        let body = Attach { endpoint: ENDPOINT_ALL.into(), flags: 0.into() };
        // A device that is gone has forgotten the domain already.
        let ended = self.request("DETACH", Opcode::Detach, &body, 0);
        self.core.leave(self.domain);
        if !matches!(ended, Ok(_) | Err(Error::Gone | Error::Refused { .. })) {
            // Nobody can say whether the device still writes: the pages are lost, as they would be to a kernel.
            std::mem::forget(std::mem::take(&mut *lock(&self.mapped)));
        }
    }
}

/// Guest memory that is or was mapped.
#[derive(Debug)]
struct MappedMemory {
    iova: u64,
    pages: Arc<Pages>,
}

impl MappedMemory {
    fn check(&self, offset: u64, len: usize) -> Result<(), Error> {
        let fits = u64::try_from(len).ok().and_then(|len| offset.checked_add(len)).is_some_and(|end| end <= self.len());
        if fits { Ok(()) } else { Err(Error::Bounds { offset, len: len as u64, size: self.len() }) }
    }
}

impl HostMemory for MappedMemory {
    fn iova(&self) -> u64 {
        self.iova
    }

    fn len(&self) -> u64 {
        self.pages.len()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        self.check(offset, into.len())?;
        self.pages.read(offset, into).map_err(|error| system("read", &error))
    }

    fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), Error> {
        self.check(offset, from.len())?;
        self.pages.write(offset, from).map_err(|error| system("write", &error))
    }
}

fn parse<T: zerocopy::FromBytes>(call: &'static str, reply: &Reply) -> Result<T, Error> {
    reply.parse().map_err(|error| system(call, &error))
}

/// What the harness itself could not do.
pub(super) fn system(call: &'static str, error: &anyhow::Error) -> Error {
    Error::System { call, source: io::Error::other(format!("{error:#}")) }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
