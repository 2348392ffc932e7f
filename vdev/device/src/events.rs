//! Events: a bounded queue between what happens and the buffers that the driver posts.
//!
//! Every event gets a number, also one that is dropped for want of room; the first room after a drop goes to an OVERFLOW. Losing events loses
//! no state.
//!
//! Not here: who raises them.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use iommu_addr::{DomainId, EndpointId};
use vdev_wire::{ACCESS_READ, ACCESS_WRITE, Event, EventKind, OWNER_HIDDEN};
use virtio_queue::QueueT;
use zerocopy::{FromZeros, IntoBytes};

use crate::FaultRecord;
use crate::live::Live;
use crate::port::Port;
use crate::queue::Visit;
use crate::sync::lock;

/// The events of a device.
pub(crate) struct Events {
    session: u32,
    /// How many may wait for a buffer.
    limit: Live,
    state: Mutex<State>,
    /// How many wait: a look without the lock.
    waiting: AtomicUsize,
}

#[derive(Default)]
struct State {
    pending: VecDeque<Event>,
    seq: u64,
    dropped: u64,
    /// Drops since the last OVERFLOW.
    overflowed: bool,
}

impl State {
    /// One event more, unless `limit` wait.
    fn push(&mut self, mut event: Event, limit: usize) -> bool {
        self.seq = self.seq.wrapping_add(1);
        event.seq = self.seq.into();
        let fits = self.pending.len() < limit;
        if fits {
            self.pending.push_back(event);
        } else {
            self.dropped = self.dropped.wrapping_add(1);
            self.overflowed = true;
        }
        fits
    }
}

impl Events {
    pub(crate) fn new(session: u32, limit: u32) -> Self {
        Self { session, limit: Live::new(limit), state: Mutex::default(), waiting: AtomicUsize::new(0) }
    }

    /// Those that wait go on waiting.
    pub(crate) fn set_limit(&self, limit: u32) {
        self.limit.set(limit);
    }

    fn blank(&self, kind: EventKind, domain: DomainId) -> Event {
        let mut event = Event::new_zeroed();
        event.kind = (kind as u16).into();
        event.session = self.session.into();
        event.domain = domain.0.into();
        event.accessor = OWNER_HIDDEN.into();
        event.owner = OWNER_HIDDEN.into();
        event
    }

    /// A refusal. False if the event was dropped.
    pub(crate) fn fault(&self, record: &FaultRecord) -> bool {
        let raw = |endpoint: Option<EndpointId>| endpoint.map_or(OWNER_HIDDEN, EndpointId::to_raw);
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        let mut event = self.blank(EventKind::Fault, record.domain);
        event.reason = record.reason as u8;
        event.access = bit(record.access.read, ACCESS_READ) | bit(record.access.write, ACCESS_WRITE);
        event.accessor = raw(record.accessor).into();
        event.owner = raw(record.owner.filter(|_| !record.is_foreign)).into();
        event.stream = record.stream.into();
        event.address = record.address.0.into();
        event.cookie = record.cookie.into();
        event.value = record.value.into();
        self.raise(event)
    }

    /// A user interrupt. False if the event was dropped.
    pub(crate) fn interrupt(&self, domain: DomainId, endpoint: EndpointId, vector: u32) -> bool {
        let mut event = self.blank(EventKind::Interrupt, domain);
        event.accessor = endpoint.to_raw().into();
        event.value = u64::from(vector).into();
        self.raise(event)
    }

    fn raise(&self, event: Event) -> bool {
        let mut state = lock(&self.state);
        let fits = state.push(event, self.limit.count());
        self.waiting.store(state.pending.len(), Ordering::Release);
        fits
    }

    /// Whether events wait for buffers.
    pub(crate) fn are_waiting(&self) -> bool {
        self.waiting.load(Ordering::Acquire) != 0
    }

    /// Drops what waits, which a new driver has no use for; gives how many that were.
    pub(crate) fn clear(&self) -> u64 {
        let mut state = lock(&self.state);
        let waiting = u64::try_from(state.pending.len()).unwrap_or(u64::MAX);
        state.pending.clear();
        state.dropped = state.dropped.wrapping_add(waiting);
        state.overflowed = false;
        self.waiting.store(0, Ordering::Release);
        waiting
    }

    fn take(&self) -> Option<Event> {
        let mut state = lock(&self.state);
        let mut event = state.pending.pop_front()?;
        event.dropped_total = state.dropped.into();
        if state.overflowed && state.pending.len() < self.limit.count() {
            state.overflowed = false;
            let mut overflow = self.blank(EventKind::Overflow, DomainId(0));
            overflow.value = state.dropped.into();
            state.push(overflow, self.limit.count());
        }
        self.waiting.store(state.pending.len(), Ordering::Release);
        Some(event)
    }

    /// Moves waiting events into the driver's buffers, as far as those reach. A buffer that is malformed or too small goes back empty. True if
    /// there may be more to do at once; else the driver was asked to notify, or nothing waits.
    pub(crate) fn deliver(&self, port: &Port) -> bool {
        let mut more = false;
        port.access(|queue, mem| {
            more = true;
            let mut used = false;
            let mut visit = Visit::new(queue, mem);
            // Bounded: the driver may post new buffers all the time.
            for _ in 0..queue.size().max(1) {
                if !self.are_waiting() {
                    more = false;
                    break;
                }
                let Some(popped) = port.pop(queue, &mut visit) else {
                    if port.rest(queue, mem) {
                        continue;
                    }
                    more = false;
                    break;
                };
                used = true;
                let fits = popped.defect.is_none() && popped.writable.len() >= size_of::<Event>();
                let event = if fits { self.take() } else { None };
                if let Some(event) = &event {
                    popped.writable.write(mem, 0, event.as_bytes());
                }
                port.give_back(queue, mem, popped.head, event.map_or(0, |_| size_of::<Event>()));
            }
            used
        });
        more
    }
}
