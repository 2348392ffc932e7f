//! One submission queue: chains of header, descriptors and completion records in slots that are laid out once. A chain holds one stream only,
//! so that a stream that waits holds back no completion of another.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use peergate_guest::uapi::{Completion, Work};
use vdev_wire::{
    COMPLETION_PENDING, COMPLETION_SIZE, DESCRIPTOR_SIZE, SUBMIT_HEADER_SIZE, Status, SubmitHeader, VERSION,
    WorkDescriptor,
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::channel::Inbox;
use crate::ram::{GuestRam, Pages};
use crate::virtqueue::{Buffer, Virtqueue};

#[derive(Debug)]
pub(super) struct SubmitQueue {
    ram: Arc<GuestRam>,
    state: Mutex<State>,
    polling: bool,
}

#[derive(Debug)]
struct State {
    queue: Virtqueue,
    slots: Pages,
    batch: usize,
    free: Vec<u32>,
    /// By head: who gets the completions of which slot.
    sent: Vec<Option<Sent>>,
    bytes: Vec<u8>,
}

#[derive(Debug)]
struct Sent {
    slot: u32,
    inbox: Arc<Inbox>,
    cookies: Vec<u64>,
}

impl SubmitQueue {
    /// A queue whose chains carry up to `batch` descriptors.
    pub(super) fn new(ram: &Arc<GuestRam>, mut queue: Virtqueue, batch: usize, polling: bool) -> Result<Self> {
        let slots = ram.alloc(slot_len(batch) * u64::from(queue.size()))?;
        if polling {
            queue.no_interrupt()?;
        }
        let state = State {
            slots,
            batch,
            free: (0..u32::from(queue.size())).rev().collect(),
            sent: (0..queue.size()).map(|_| None).collect(),
            bytes: Vec::new(),
            queue,
        };
        Ok(Self { ram: Arc::clone(ram), state: Mutex::new(state), polling })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends as much of `work` as there is room for, and answers how much that was.
    pub(super) fn send(&self, inbox: &Arc<Inbox>, domain: u32, session: u32, work: &[Work]) -> Result<usize> {
        let mut state = self.lock();
        let mut taken = 0;
        let most = state.batch;
        let batches = work.chunk_by(|one, next| one.stream == next.stream).flat_map(|stream| stream.chunks(most));
        for batch in batches {
            if !state.send(&self.ram, inbox, domain, session, batch)? {
                break;
            }
            taken += batch.len();
        }
        state.queue.publish()?;
        Ok(taken)
    }

    /// Hands out what has completed.
    pub(super) fn reap(&self) -> Result<()> {
        let mut state = self.lock();
        loop {
            let mut some = false;
            while let Some(used) = state.queue.pop()? {
                state.receive(&self.ram, used.head)?;
                some = true;
            }
            if self.polling {
                return if some { state.queue.no_interrupt() } else { Ok(()) };
            }
            if !state.queue.want_interrupt()? {
                return Ok(());
            }
        }
    }

    /// The queue itself, while nobody uses it.
    pub(super) fn hold(&self) -> impl Deref<Target = Virtqueue> + '_ {
        Held(self.lock())
    }

    /// The descriptor of the interrupt.
    pub(super) fn call_fd(&self) -> Result<vmm_sys_util::eventfd::EventFd> {
        Ok(self.lock().queue.call_fd().try_clone()?)
    }
}

struct Held<'a>(MutexGuard<'a, State>);

impl Deref for Held<'_> {
    type Target = Virtqueue;

    fn deref(&self) -> &Virtqueue {
        &self.0.queue
    }
}

impl State {
    fn send(&mut self, ram: &GuestRam, inbox: &Arc<Inbox>, domain: u32, session: u32, batch: &[Work]) -> Result<bool> {
        if self.queue.room() < 2 {
            return Ok(false);
        }
        let Some(slot) = self.free.pop() else { return Ok(false) };
        let header = SubmitHeader {
            version: VERSION.into(),
            count: u16::try_from(batch.len())?.into(),
            domain: domain.into(),
            flags: 0.into(),
            session: session.into(),
        };
        self.bytes.clear();
        self.bytes.extend_from_slice(header.as_bytes());
        batch.iter().for_each(|work| self.bytes.extend_from_slice(descriptor(work).as_bytes()));
        let read = self.bytes.len();
        let pending =
            vdev_wire::Completion { status: COMPLETION_PENDING.into(), ..vdev_wire::Completion::new_zeroed() };
        batch.iter().for_each(|_| self.bytes.extend_from_slice(pending.as_bytes()));
        let at = self.slots.gpa() + u64::from(slot) * slot_len(self.batch);
        ram.write(at, &self.bytes)?;
        let written = u32::try_from(batch.len() * COMPLETION_SIZE)?;
        let buffers = [Buffer::readable(at, read.try_into()?), Buffer::writable(at + read as u64, written)];
        let head = self.queue.add(&buffers)?.context("There was room")?;
        let cookies = batch.iter().map(|work| work.cookie).collect();
        self.sent[usize::from(head)] = Some(Sent { slot, inbox: Arc::clone(inbox), cookies });
        Ok(true)
    }

    fn receive(&mut self, ram: &GuestRam, head: u16) -> Result<()> {
        let sent = self.sent[usize::from(head)].take().context("The chain was sent")?;
        let count = sent.cookies.len();
        let at = self.slots.gpa()
            + u64::from(sent.slot) * slot_len(self.batch)
            + (SUBMIT_HEADER_SIZE + count * DESCRIPTOR_SIZE) as u64;
        self.bytes.resize(count * COMPLETION_SIZE, 0);
        ram.read(at, &mut self.bytes)?;
        let records = self.bytes.chunks_exact(COMPLETION_SIZE).zip(&sent.cookies);
        sent.inbox.deliver(records.map(|(bytes, cookie)| record(bytes, *cookie)));
        self.free.push(sent.slot);
        Ok(())
    }
}

fn slot_len(batch: usize) -> u64 {
    ((SUBMIT_HEADER_SIZE + batch * (DESCRIPTOR_SIZE + COMPLETION_SIZE)) as u64).next_multiple_of(64)
}

fn descriptor(work: &Work) -> WorkDescriptor {
    WorkDescriptor {
        opcode: work.opcode.into(),
        ext: 0,
        reserved0: 0,
        flags: work.flags.into(),
        stream: work.stream.into(),
        initiator: work.initiator.into(),
        cookie: work.cookie.into(),
        source: work.source.into(),
        destination: work.destination.into(),
        length: work.length.into(),
        timeout_ms: work.timeout_ms.into(),
        reserved1: 0.into(),
        operand: work.operand.into(),
    }
}

/// A completion record as a program sees it. One that the device left alone, or wrote for other work, is an error of the device.
fn record(bytes: &[u8], cookie: u64) -> Completion {
    match vdev_wire::Completion::read_from_bytes(bytes) {
        Ok(record) if record.cookie.get() == cookie && record.status.get() != COMPLETION_PENDING => Completion {
            cookie,
            bytes: record.bytes.get(),
            fault_address: record.fault_address.get(),
            path: record.path,
            reason: record.reason,
            fault_reason: record.fault_reason,
            reserved: 0,
            status: record.status.get(),
        },
        _ => Completion { cookie, status: Status::IoErr.to_raw(), ..Completion::default() },
    }
}
