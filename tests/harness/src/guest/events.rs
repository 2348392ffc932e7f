//! The event queue: buffers that the device fills.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use peergate_guest::uapi::Event as GuestEvent;
use vdev_wire::Event;
use zerocopy::FromBytes;

use crate::ram::{GuestRam, Pages};
use crate::virtqueue::{Buffer, Virtqueue};

/// The event queue with its buffers.
#[derive(Debug)]
pub(super) struct EventQueue {
    ram: Arc<GuestRam>,
    pub(super) queue: Virtqueue,
    buffers: Pages,
    /// By head: which buffer.
    posted: Vec<u16>,
}

const EVENT_SIZE: u32 = 64;
const _: () = assert!(size_of::<Event>() == EVENT_SIZE as usize);

impl EventQueue {
    pub(super) fn new(ram: &Arc<GuestRam>, queue: Virtqueue) -> Result<Self> {
        let buffers = ram.alloc(u64::from(queue.size()) * u64::from(EVENT_SIZE))?;
        let posted = vec![0; usize::from(queue.size())];
        let mut events = Self { ram: Arc::clone(ram), buffers, posted, queue };
        for buffer in 0..events.queue.size() {
            events.post(buffer)?;
        }
        events.queue.publish()?;
        Ok(events)
    }

    fn at(&self, buffer: u16) -> u64 {
        self.buffers.gpa() + u64::from(buffer) * u64::from(EVENT_SIZE)
    }

    fn post(&mut self, buffer: u16) -> Result<()> {
        let head =
            self.queue.add(&[Buffer::writable(self.at(buffer), EVENT_SIZE)])?.context("The event queue is full")?;
        self.posted[usize::from(head)] = buffer;
        Ok(())
    }

    /// Hands out what has come, and makes room for more.
    pub(super) fn take(&mut self, mut each: impl FnMut(&Event)) -> Result<()> {
        loop {
            while let Some(used) = self.queue.pop()? {
                let buffer = self.posted[usize::from(used.head)];
                if used.len == EVENT_SIZE {
                    let mut bytes = [0; EVENT_SIZE as usize];
                    self.ram.read(self.at(buffer), &mut bytes)?;
                    each(&Event::read_from_bytes(&bytes).ok().context("An event has a size")?);
                } else {
                    // A chain that the device gave back without an event, as at a reset.
                    ensure!(used.len == 0, "The device wrote an event of {} bytes", used.len);
                }
                self.post(buffer)?;
            }
            self.queue.publish()?;
            if !self.queue.want_interrupt()? {
                return Ok(());
            }
        }
    }
}

/// An event as a program sees it.
pub(super) fn guest_event(event: &Event) -> GuestEvent {
    GuestEvent {
        kind: event.kind.get(),
        reason: event.reason,
        access: event.access,
        session: event.session.get(),
        seq: event.seq.get(),
        dropped_total: event.dropped_total.get(),
        accessor: event.accessor.get(),
        owner: event.owner.get(),
        stream: event.stream.get(),
        reserved: 0,
        address: event.address.get(),
        cookie: event.cookie.get(),
        value: event.value.get(),
    }
}
