//! The driver's side of a split virtqueue, in guest memory, with its kick and its interrupt.
//!
//! Well-behaved by default ([`Virtqueue::add`], [`Virtqueue::publish`], [`Virtqueue::pop`]); the `raw_` methods write what no driver should,
//! for hostile tests. One thread at a time.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsRawFd, BorrowedFd};
use vmm_sys_util::eventfd::EventFd;

use crate::ram::{GuestRam, Pages};

/// Descriptor flag: another one follows.
pub const NEXT: u16 = 1;
/// Descriptor flag: the device writes it.
pub const WRITE: u16 = 2;
/// Descriptor flag: a table of descriptors.
pub const INDIRECT: u16 = 4;

const DESCRIPTOR: u64 = 16;
/// Most descriptors of an indirect table.
const TABLE: u64 = vdev_wire::MAX_CHAIN as u64;

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Guest-physical address.
    pub gpa: u64,
    /// Length in bytes.
    pub len: u32,
    /// The device writes it.
    pub writable: bool,
}

impl Buffer {
    /// For the device to read.
    pub fn readable(gpa: u64, len: u32) -> Self {
        Self { gpa, len, writable: false }
    }

    /// For the device to write.
    pub fn writable(gpa: u64, len: u32) -> Self {
        Self { gpa, len, writable: true }
    }
}

/// A descriptor as it lies in memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct RawDescriptor {
    /// Guest-physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// [`NEXT`], [`WRITE`], [`INDIRECT`].
    pub flags: u16,
    /// Index of the next one.
    pub next: u16,
}

impl RawDescriptor {
    /// Its sixteen bytes.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// What was negotiated for a queue.
#[derive(Clone, Copy, Debug)]
pub struct Negotiated {
    /// Both sides say at which index they want to be told.
    pub event_idx: bool,
    /// A chain may be one table elsewhere.
    pub indirect: bool,
}

/// A chain that the device has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// As [`Virtqueue::add`] returned it.
    pub head: u16,
    /// Bytes the device says it wrote.
    pub len: u32,
}

/// One queue.
#[derive(Debug)]
pub struct Virtqueue {
    ram: Arc<GuestRam>,
    size: u16,
    rules: Negotiated,
    rings: Pages,
    avail: u64,
    used: u64,
    tables: Option<Pages>,
    free: Vec<u16>,
    /// Descriptors of the table that a chain holds, by its head; 0 if the device does not have it.
    held: Vec<u16>,
    /// The descriptor that follows in a chain.
    links: Vec<u16>,
    outstanding: usize,
    next_avail: u16,
    published: u16,
    next_used: u16,
    kick: EventFd,
    call: EventFd,
}

impl Virtqueue {
    /// Lays out an empty queue of `size` entries, a power of two.
    pub fn new(ram: &Arc<GuestRam>, size: u16, rules: Negotiated) -> Result<Self> {
        ensure!(size.is_power_of_two(), "A queue's size is a power of two");
        let entries = u64::from(size);
        let avail = entries * DESCRIPTOR;
        let used = (avail + 6 + 2 * entries).next_multiple_of(64);
        let rings = ram.alloc(used + 6 + 8 * entries)?;
        let tables = rules.indirect.then(|| ram.alloc(entries * TABLE * DESCRIPTOR)).transpose()?;
        let (avail, used) = (rings.gpa() + avail, rings.gpa() + used);
        Ok(Self {
            ram: Arc::clone(ram),
            size,
            rules,
            rings,
            avail,
            used,
            tables,
            free: (0..size).rev().collect(),
            held: vec![0; usize::from(size)],
            links: vec![0; usize::from(size)],
            outstanding: 0,
            next_avail: 0,
            published: 0,
            next_used: 0,
            kick: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            call: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
        })
    }

    /// Entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Guest-physical addresses of descriptor table, available ring and used ring.
    pub fn addresses(&self) -> [u64; 3] {
        [self.rings.gpa(), self.avail, self.used]
    }

    /// Chains that the device has been shown so far, modulo 2^16.
    pub fn published(&self) -> u16 {
        self.published
    }

    /// What the driver writes to.
    pub fn kick_fd(&self) -> &EventFd {
        &self.kick
    }

    /// What the device writes to.
    pub fn call_fd(&self) -> &EventFd {
        &self.call
    }

    /// Descriptors that are not in use.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Chains that the device has.
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Makes a chain available, not yet published; through an indirect table where that was negotiated. `None` if there is no room.
    pub fn add(&mut self, buffers: &[Buffer]) -> Result<Option<u16>> {
        ensure!(!buffers.is_empty(), "A chain has a buffer");
        let needed = if self.tables.is_some() { 1 } else { buffers.len() };
        if self.free.len() < needed {
            return Ok(None);
        }
        let head = if self.tables.is_some() { self.add_table(buffers)? } else { self.add_direct(buffers)? };
        self.held[usize::from(head)] = u16::try_from(needed)?;
        self.outstanding += 1;
        self.raw_avail(self.next_avail, head)?;
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(head))
    }

    fn add_table(&mut self, buffers: &[Buffer]) -> Result<u16> {
        ensure!(buffers.len() as u64 <= TABLE, "A table has {TABLE} descriptors");
        let (Some(tables), Some(head)) = (&self.tables, self.free.pop()) else { bail!("No room for a table") };
        let table = tables.gpa() + u64::from(head) * TABLE * DESCRIPTOR;
        for (index, buffer) in (0u16..).zip(buffers) {
            let more = usize::from(index) + 1 < buffers.len();
            self.ram.write(
                table + u64::from(index) * DESCRIPTOR,
                &describe(buffer, more.then_some(index + 1)).to_bytes(),
            )?;
        }
        let len = u32::try_from(buffers.len() as u64 * DESCRIPTOR)?;
        self.raw_descriptor(head, RawDescriptor { addr: table, len, flags: INDIRECT, next: 0 })?;
        Ok(head)
    }

    fn add_direct(&mut self, buffers: &[Buffer]) -> Result<u16> {
        let mut next = None;
        for buffer in buffers.iter().rev() {
            let Some(index) = self.free.pop() else { bail!("No room for a chain") };
            self.raw_descriptor(index, describe(buffer, next))?;
            self.links[usize::from(index)] = next.unwrap_or(0);
            next = Some(index);
        }
        next.context("A chain has a buffer")
    }

    /// Shows the device what was added and kicks it if it wants to be.
    pub fn publish(&mut self) -> Result<()> {
        let old = self.published;
        if old == self.next_avail {
            return Ok(());
        }
        self.raw_avail_index(self.next_avail)?;
        self.published = self.next_avail;
        fence(Ordering::SeqCst);
        let wanted = if self.rules.event_idx {
            let event = u16::from_le(self.ram.load(self.used + 4 + 8 * u64::from(self.size), Ordering::Relaxed)?);
            crossed(event, self.published, old)
        } else {
            u16::from_le(self.ram.load(self.used, Ordering::Relaxed)?) & 1 == 0
        };
        if wanted { self.raw_kick() } else { Ok(()) }
    }

    /// The next used chain, if there is one. An error is the device's: an index or a head that cannot be.
    pub fn pop(&mut self) -> Result<Option<Used>> {
        let index = u16::from_le(self.ram.load(self.used + 2, Ordering::Acquire)?);
        if index == self.next_used {
            return Ok(None);
        }
        let ahead = usize::from(index.wrapping_sub(self.next_used));
        ensure!(ahead <= self.outstanding(), "The device used {ahead} chains but has {}", self.outstanding());
        let at = self.used + 4 + 8 * u64::from(self.next_used % self.size);
        let mut element = [0; 8];
        self.ram.read(at, &mut element)?;
        let (id, len) = element.split_at(4);
        let id = u32::from_le_bytes(id.try_into()?);
        let head = u16::try_from(id).with_context(|| format!("The device used chain {id}"))?;
        let held = self.held.get_mut(usize::from(head)).map(std::mem::take).unwrap_or(0);
        ensure!(held > 0, "The device used chain {head}, which it does not have");
        let mut index = head;
        for _ in 0..held {
            self.free.push(index);
            index = self.links[usize::from(index)];
        }
        self.outstanding -= 1;
        self.next_used = self.next_used.wrapping_add(1);
        Ok(Some(Used { head, len: u32::from_le_bytes(len.try_into()?) }))
    }

    /// Asks for an interrupt at the next used chain. True if one is there already.
    pub fn want_interrupt(&mut self) -> Result<bool> {
        if self.rules.event_idx {
            self.ram.store(self.used_event(), self.next_used.to_le(), Ordering::Relaxed)?;
        } else {
            self.ram.store(self.avail, 0u16, Ordering::Relaxed)?;
        }
        fence(Ordering::SeqCst);
        Ok(u16::from_le(self.ram.load(self.used + 2, Ordering::Acquire)?) != self.next_used)
    }

    /// Asks for no interrupt; to be repeated now and then.
    pub fn no_interrupt(&mut self) -> Result<()> {
        if self.rules.event_idx {
            self.ram.store(self.used_event(), self.next_used.wrapping_sub(1).to_le(), Ordering::Relaxed)
        } else {
            self.ram.store(self.avail, 1u16.to_le(), Ordering::Relaxed)
        }
    }

    /// The next used chain; sleeps until it comes. `None` once `deadline` has passed.
    pub fn wait(&mut self, deadline: Instant) -> Result<Option<Used>> {
        self.wait_beside(&[], deadline)
    }

    /// The same, and `None` also once one of `others` can be read and no chain is used.
    pub fn wait_beside(&mut self, others: &[&dyn AsRawFd], deadline: Instant) -> Result<Option<Used>> {
        loop {
            if let Some(used) = self.pop()? {
                return Ok(Some(used));
            }
            if self.want_interrupt()? {
                continue;
            }
            let fds: Vec<&dyn AsRawFd> =
                [&self.call as &dyn AsRawFd].into_iter().chain(others.iter().copied()).collect();
            match wait_any(&fds, deadline)? {
                // Empty when the interrupt was for what was popped before.
                Some(0) => drop(self.call.read()),
                _ => return self.pop(),
            }
        }
    }

    fn used_event(&self) -> u64 {
        self.avail + 4 + 2 * u64::from(self.size)
    }

    /// Writes a descriptor of the table.
    pub fn raw_descriptor(&self, index: u16, descriptor: RawDescriptor) -> Result<()> {
        self.ram.write(self.rings.gpa() + u64::from(index) * DESCRIPTOR, &descriptor.to_bytes())
    }

    /// Makes descriptor `head` of the table available as it is, whatever it holds, and kicks. Its chain is one descriptor to this queue;
    /// the others that it names must be ones that [`Virtqueue::add`] does not get to.
    pub fn raw_submit(&mut self, head: u16) -> Result<()> {
        let index = usize::from(head);
        ensure!(self.held[index] == 0, "Descriptor {head} is in use");
        self.free.retain(|free| *free != head);
        self.held[index] = 1;
        self.outstanding += 1;
        self.raw_avail(self.next_avail, head)?;
        self.next_avail = self.next_avail.wrapping_add(1);
        self.publish()?;
        self.raw_kick()
    }

    /// Writes an entry of the available ring.
    pub fn raw_avail(&self, slot: u16, head: u16) -> Result<()> {
        self.ram.store(self.avail + 4 + 2 * u64::from(slot % self.size), head.to_le(), Ordering::Relaxed)
    }

    /// Writes the available index.
    pub fn raw_avail_index(&self, index: u16) -> Result<()> {
        self.ram.store(self.avail + 2, index.to_le(), Ordering::Release)
    }

    /// Kicks whether the device wants it or not.
    pub fn raw_kick(&self) -> Result<()> {
        Ok(self.kick.write(1)?)
    }

    /// The device's used index.
    pub fn raw_used_index(&self) -> Result<u16> {
        Ok(u16::from_le(self.ram.load(self.used + 2, Ordering::Acquire)?))
    }
}

/// Whether an index that moved from `old` to `new` passed `event`.
fn crossed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

fn describe(buffer: &Buffer, next: Option<u16>) -> RawDescriptor {
    let flags = if next.is_some() { NEXT } else { 0 } | if buffer.writable { WRITE } else { 0 };
    RawDescriptor { addr: buffer.gpa, len: buffer.len, flags, next: next.unwrap_or(0) }
}

/// Waits for a descriptor to be readable or hung up. False once `deadline` has passed.
pub(crate) fn wait_readable(fd: &impl AsRawFd, deadline: Instant) -> Result<bool> {
    Ok(wait_any(&[fd], deadline)?.is_some())
}

/// Waits for one of several descriptors, and says which; the first one if there are more. `None` once `deadline` has passed.
fn wait_any(fds: &[&dyn AsRawFd], deadline: Instant) -> Result<Option<usize>> {
    // SAFETY: each descriptor is borrowed from a living owner for the time of this call.
    let borrow = |fd: &&dyn AsRawFd| unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
    let fds: Vec<_> = fds.iter().map(borrow).collect();
    let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs().try_into()?, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) => return Ok(polled.iter().position(|fd| !fd.revents().is_empty())),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use virtio_queue::{Queue, QueueOwnedT, QueueT};
    use vm_memory::GuestAddress;

    /// The device's side of the same rings.
    fn device(queue: &Virtqueue) -> Queue {
        let [table, avail, used] = queue.addresses();
        let mut device = Queue::new(queue.size()).unwrap();
        device.set_event_idx(queue.rules.event_idx);
        device.try_set_desc_table_address(GuestAddress(table)).unwrap();
        device.try_set_avail_ring_address(GuestAddress(avail)).unwrap();
        device.try_set_used_ring_address(GuestAddress(used)).unwrap();
        device.set_ready(true);
        device
    }

    fn round_trips(rules: Negotiated) {
        let ram = GuestRam::new(1 << 20).unwrap();
        let mut queue = Virtqueue::new(&ram, 8, rules).unwrap();
        let mut device = device(&queue);
        assert!(device.is_valid(ram.memory()));
        let buffers = [Buffer::readable(0x1000, 10), Buffer::readable(0x2000, 20), Buffer::writable(0x3000, 30)];
        for round in 0..70_000u32 {
            let head = queue.add(&buffers).unwrap().expect("the queue is empty");
            queue.publish().unwrap();
            let chain = device.iter(ram.memory()).unwrap().next().expect("it was published");
            assert_eq!(chain.head_index(), head);
            let seen: Vec<_> = chain.map(|d| (d.addr().0, d.len(), d.is_write_only())).collect();
            assert_eq!(seen, buffers.map(|b| (b.gpa, b.len, b.writable)));
            assert_eq!(queue.pop().unwrap(), None);
            device.add_used(ram.memory(), head, round).unwrap();
            assert_eq!(queue.pop().unwrap(), Some(Used { head, len: round }));
        }
        assert_eq!(queue.room(), 8);
    }

    #[test]
    fn chains_survive_the_round_trip_past_the_index_wrap() {
        for (event_idx, indirect) in [(false, false), (false, true), (true, false), (true, true)] {
            round_trips(Negotiated { event_idx, indirect });
        }
    }

    #[test]
    fn kick_is_sent_only_where_the_device_asked_for_it() {
        let ram = GuestRam::new(1 << 20).unwrap();
        let mut queue = Virtqueue::new(&ram, 8, Negotiated { event_idx: true, indirect: false }).unwrap();
        let mut device = device(&queue);
        let add = |queue: &mut Virtqueue| {
            queue.add(&[Buffer::writable(0x1000, 1)]).unwrap();
            queue.publish().unwrap();
            queue.kick_fd().read().is_ok()
        };
        assert!(add(&mut queue), "the first index is asked for from the start");
        assert!(!add(&mut queue));
        device.iter(ram.memory()).unwrap().for_each(drop);
        assert!(!device.enable_notification(ram.memory()).unwrap());
        assert!(add(&mut queue));
    }

    #[test]
    fn interrupt_is_asked_for_at_the_next_chain_only() {
        let ram = GuestRam::new(1 << 20).unwrap();
        let mut queue = Virtqueue::new(&ram, 8, Negotiated { event_idx: true, indirect: true }).unwrap();
        let mut device = device(&queue);
        let mut turn = |queue: &mut Virtqueue| {
            let head = queue.add(&[Buffer::writable(0x1000, 1)]).unwrap().unwrap();
            queue.publish().unwrap();
            device.iter(ram.memory()).unwrap().for_each(drop);
            device.add_used(ram.memory(), head, 1).unwrap();
            let told = device.needs_notification(ram.memory()).unwrap();
            queue.pop().unwrap().unwrap();
            told
        };
        assert!(turn(&mut queue));
        assert!(!turn(&mut queue));
        assert!(!queue.want_interrupt().unwrap());
        assert!(turn(&mut queue));
        queue.no_interrupt().unwrap();
        assert!(!turn(&mut queue));
    }

    #[test]
    fn device_that_uses_what_it_does_not_have_is_found_out() {
        let ram = GuestRam::new(1 << 20).unwrap();
        let mut queue = Virtqueue::new(&ram, 8, Negotiated { event_idx: false, indirect: false }).unwrap();
        queue.add(&[Buffer::writable(0x1000, 1)]).unwrap();
        queue.publish().unwrap();
        device(&queue).add_used(ram.memory(), 5, 0).unwrap();
        assert!(queue.pop().is_err());
    }
}
