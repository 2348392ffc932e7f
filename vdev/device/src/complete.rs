//! The ways back to the driver: one [`Completer`] a control request, one [`Slot`] a work descriptor.
//!
//! Either is consumed by its answer; one that is dropped instead answers IOERR, so no chain is ever lost. Completions of many slots are
//! written together ([`finish`]): one visit to each ring, every record's status last, then the used ring, then at most one interrupt.
//!
//! Not here: what the answers are.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use hw_engine::EngineError;
use smallvec::SmallVec;
use vdev_wire::{COMPLETION_SIZE, Completion, ControlReply, FaultReason, SUBMIT_HEADER_SIZE, Status};
use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;
use zerocopy::{FromZeros, IntoBytes, transmute};

use crate::RequestError;
use crate::observer::{Counter, Observer};
use crate::port::Port;
use crate::queue::{Area, Popped, Records};
use crate::work::parse_work;

/// Body of an answer.
pub(crate) type Body = SmallVec<[u8; 32]>;

/// Answers one control request.
pub(crate) struct Completer {
    port: Arc<Port>,
    head: u16,
    writable: Area,
    observer: Arc<dyn Observer>,
    answered: bool,
}

impl Completer {
    pub(crate) fn new(port: &Arc<Port>, popped: Popped, observer: &Arc<dyn Observer>) -> Self {
        let Popped { head, writable, .. } = popped;
        Self { port: Arc::clone(port), head, writable, observer: Arc::clone(observer), answered: false }
    }

    /// Room for the body of an answer, in bytes.
    pub(crate) fn room(&self) -> usize {
        self.writable.len().saturating_sub(size_of::<ControlReply>())
    }

    /// Room for a whole answer, in bytes.
    pub(crate) fn room_with_header(&self) -> usize {
        self.writable.len()
    }

    /// Answers and gives the chain back.
    pub(crate) fn answer(mut self, result: Result<Body, RequestError>) {
        match result {
            Ok(body) => self.send(Status::Ok, 0, &body),
            Err(error) => self.send(error.status(), error.detail(), &[]),
        }
    }

    fn send(&mut self, status: Status, detail: u64, body: &[u8]) {
        self.answered = true;
        self.observer.count(Counter::ControlRequests, 1);
        if status != Status::Ok {
            self.observer.count(Counter::ControlErrors, 1);
        }
        let body = body.get(..self.room()).unwrap_or(body);
        let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
        let reply = ControlReply { status: status.to_raw().into(), length: length.into(), detail: detail.into() };
        let header = if self.writable.len() < size_of::<ControlReply>() { &[] } else { reply.as_bytes() };
        self.port.access(|queue, mem| {
            self.writable.write(mem, header.len(), body);
            self.writable.write(mem, 0, header);
            self.port.give_back(queue, mem, self.head, header.len().saturating_add(body.len()));
            true
        });
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        if !self.answered {
            self.send(RequestError::Dropped.status(), 0, &[]);
        }
    }
}

/// A submission chain that has left the ring and outlives its turn.
pub(crate) struct Chain {
    port: Arc<Port>,
    head: u16,
    records: Area,
    /// Records not yet written.
    left: AtomicU32,
}

impl Chain {
    /// A chain whose `count` records are all to be written by others.
    pub(crate) fn new(port: &Arc<Port>, head: u16, records: Area, count: u32) -> Arc<Self> {
        Arc::new(Self { port: Arc::clone(port), head, records, left: AtomicU32::new(count) })
    }

    /// Whether the chain came through this port.
    pub(crate) fn came_through(&self, port: &Arc<Port>) -> bool {
        Arc::ptr_eq(&self.port, port)
    }

    /// Says that `count` records are written. True if these were the last ones. Within an access to the chain's port.
    pub(crate) fn written(&self, queue: &mut Queue, mem: &GuestMemoryMmap, count: u32) -> bool {
        let last = self.left.fetch_sub(count, Ordering::AcqRel) == count;
        if last {
            self.port.give_back(queue, mem, self.head, self.records.len());
        }
        last
    }
}

/// Where one completion record goes.
pub(crate) struct Slot {
    chain: Option<Arc<Chain>>,
    index: u16,
    cookie: u64,
}

impl Slot {
    /// The `index`th record of `chain`.
    pub(crate) fn new(chain: &Arc<Chain>, index: u16, cookie: u64) -> Self {
        Self { chain: Some(Arc::clone(chain)), index, cookie }
    }

    /// Whether the slot's chain came through this port.
    pub(crate) fn came_through(&self, port: &Arc<Port>) -> bool {
        self.chain.as_ref().is_some_and(|chain| chain.came_through(port))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(chain) = self.chain.take() {
            let record = refusal(self.cookie, &RequestError::Dropped);
            finish(&mut vec![(Self { chain: Some(chain), index: self.index, cookie: self.cookie }, record)]);
        }
    }
}

/// Writes the records of many slots and gives back the chains that are complete. Leaves the list empty. No lock of the device may be held.
pub(crate) fn finish(done: &mut Vec<(Slot, Completion)>) {
    let key = |slot: &Slot| slot.chain.as_ref().map(|chain| Arc::as_ptr(&chain.port) as usize);
    if done.len() > 1 {
        done.sort_by_key(|(slot, _)| key(slot));
    }
    for group in done.chunk_by_mut(|(a, _), (b, _)| key(a) == key(b)) {
        let Some(port) = group.first().and_then(|(slot, _)| slot.chain.as_ref().map(|chain| Arc::clone(&chain.port)))
        else {
            continue;
        };
        port.access(|queue, mem| {
            let mut used = false;
            for (slot, record) in group.iter() {
                if let Some(chain) = &slot.chain {
                    write_record(&Records::new(mem, &chain.records), slot.index, record);
                    used |= chain.written(queue, mem, 1);
                }
            }
            used
        });
        for (slot, _) in group {
            slot.chain = None;
        }
    }
    done.clear();
}

/// Writes the `index`th record of a chain.
pub(crate) fn write_record(records: &Records<'_>, index: u16, record: &Completion) {
    let bytes: [u8; COMPLETION_SIZE] = transmute!(*record);
    records.write(usize::from(index).saturating_mul(COMPLETION_SIZE), &bytes);
}

/// The record of work that was refused before anything moved.
pub(crate) fn refusal(cookie: u64, error: &RequestError) -> Completion {
    let mut record = Completion::new_zeroed();
    record.cookie = cookie.into();
    record.status = error.status().to_raw().into();
    match error {
        RequestError::Access { address, reason } => {
            record.fault_address = address.0.into();
            record.fault_reason = *reason as u8;
        }
        RequestError::Engine(EngineError::RegisterAccess) => record.fault_reason = FaultReason::Access as u8,
        _ => {}
    }
    record
}

/// Answers a submission chain that is not executed: `count` records, with the cookies of those descriptors that `bytes`, what was read of the
/// chain, has. Gives the bytes written.
pub(crate) fn write_refusals(
    mem: &GuestMemoryMmap,
    records: &Area,
    count: u16,
    bytes: &[u8],
    error: &RequestError,
) -> usize {
    let writer = Records::new(mem, records);
    let (descriptors, _) = bytes.get(SUBMIT_HEADER_SIZE..).unwrap_or_default().as_chunks();
    let mut cookies = descriptors.iter().map(|descriptor| parse_work(descriptor).0.cookie);
    for index in 0..count {
        write_record(&writer, index, &refusal(cookies.next().unwrap_or(0), error));
    }
    usize::from(count).saturating_mul(COMPLETION_SIZE)
}
