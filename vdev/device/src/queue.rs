//! Virtqueues: what the transport provides, and how a chain is taken from one.
//!
//! The walk over descriptors is this module's own, because `virtio_queue` silently shortens a malformed chain. A chain that is malformed
//! keeps the writable room found before the defect, so that it can be answered and always goes back to the driver.
//!
//! Not here: what the bytes mean, who answers.

use std::sync::atomic::{Ordering, fence};

use smallvec::SmallVec;
use vdev_wire::MAX_CHAIN;
use virtio_bindings::bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryMmap, Permissions, VolatileSlice};

/// One virtqueue as the transport gives it.
pub trait Ring: Send + Sync {
    /// Runs `f` on the queue and the guest memory in force, under the queue's lock. False, with `f` not run, once the queue is stopped.
    /// The device calls nothing of its own but guest memory accesses from within `f`, and takes no lock that waits for another thread's
    /// `with`.
    fn with(&self, f: &mut dyn FnMut(&mut Queue, &GuestMemoryMmap)) -> bool;
    /// Interrupts the driver. Called outside `with`, after [`QueueT::needs_notification`] said so inside it.
    fn signal(&self);
}

const DESCRIPTOR: usize = 16;
/// Bytes before the entries of the available ring.
const AVAIL_HEADER: usize = 4;
const NEXT: u32 = VRING_DESC_F_NEXT;
const WRITE: u32 = VRING_DESC_F_WRITE;
const INDIRECT: u32 = VRING_DESC_F_INDIRECT;

/// Half of a chain: guest buffers laid end to end, all of one direction.
#[derive(Clone, Debug, Default)]
pub(crate) struct Area {
    buffers: SmallVec<[(GuestAddress, u32); 2]>,
    len: u32,
}

impl Area {
    /// Bytes in all buffers.
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    fn push(&mut self, at: GuestAddress, len: u32) -> bool {
        let Some(sum) = self.len.checked_add(len) else { return false };
        self.len = sum;
        self.buffers.push((at, len));
        true
    }

    /// Replaces what `into` holds by the first `len` bytes of the area. False if some memory is gone.
    pub(crate) fn read_front(&self, mem: &GuestMemoryMmap, into: &mut Vec<u8>, len: usize) -> bool {
        into.resize(len, 0);
        let mut ok = true;
        self.places(0, len, |at, done, len| {
            let part = into.get_mut(done..done.saturating_add(len));
            ok &= part.is_some_and(|part| mem.read_slice(part, at).is_ok());
        });
        ok
    }

    /// Calls `f` with the places of `len` bytes from `offset` on; stops where the area ends.
    fn places(&self, offset: usize, len: usize, mut f: impl FnMut(GuestAddress, usize, usize)) {
        let (mut skip, mut done) = (offset, 0_usize);
        for (at, size) in &self.buffers {
            let size = *size as usize;
            if skip >= size {
                skip = skip.saturating_sub(size);
                continue;
            }
            let part = size.saturating_sub(skip).min(len.saturating_sub(done));
            if part == 0 {
                return;
            }
            f(GuestAddress(at.0.wrapping_add(skip as u64)), done, part);
            done = done.saturating_add(part);
            skip = 0;
        }
    }

    /// Writes `bytes` from `offset` on, as far as the area and the memory reach.
    pub(crate) fn write(&self, mem: &GuestMemoryMmap, offset: usize, bytes: &[u8]) {
        self.places(offset, bytes.len(), |at, done, len| {
            if let Some(part) = bytes.get(done..done.saturating_add(len)) {
                // Memory that the front-end took away has no reader left.
                let _ = mem.write_slice(part, at);
            }
        });
    }

    /// The four bytes at `offset`, as a number of this machine; `None` if they are not all there.
    fn read_word(&self, mem: &GuestMemoryMmap, offset: usize) -> Option<u32> {
        let (mut word, mut read) = ([0; 4], 0_usize);
        self.places(offset, word.len(), |at, done, len| {
            let part = word.get_mut(done..done.saturating_add(len));
            read = read.saturating_add(part.map_or(0, |part| mem.read_slice(part, at).map_or(0, |()| len)));
        });
        (read == word.len()).then_some(u32::from_ne_bytes(word))
    }

    /// The area as one run of memory, if it is one.
    fn run<'m>(&self, mem: &'m GuestMemoryMmap) -> Option<VolatileSlice<'m>> {
        let [(at, len)] = self.buffers.as_slice() else { return None };
        GuestMemoryBackend::get_slice(mem, *at, *len as usize).ok()
    }
}

/// A writer of records of `N` bytes, which the driver may look at while they are written: the last four bytes come last, with release ordering.
pub(crate) struct Records<'m> {
    mem: &'m GuestMemoryMmap,
    area: &'m Area,
    run: Option<VolatileSlice<'m>>,
}

impl<'m> Records<'m> {
    pub(crate) fn new(mem: &'m GuestMemoryMmap, area: &'m Area) -> Self {
        Self { mem, area, run: area.run(mem) }
    }

    /// Writes the record at `offset`.
    pub(crate) fn write<const N: usize>(&self, offset: usize, record: &[u8; N]) {
        let Some((body, status)) = record.split_last_chunk::<4>() else { return };
        let (status, status_at) = (u32::from_ne_bytes(*status), offset.saturating_add(body.len()));
        if let Some(run) = &self.run
            && run.write_slice(body, offset).is_ok()
            && run.store(status, status_at, Ordering::Release).is_ok()
        {
            return;
        }
        self.area.write(self.mem, offset, body);
        fence(Ordering::Release);
        self.area.write(self.mem, status_at, &status.to_ne_bytes());
    }

    /// Last four bytes of the record of `N` bytes at `offset`.
    pub(crate) fn status<const N: usize>(&self, offset: usize) -> Option<u32> {
        self.area.read_word(self.mem, offset.checked_add(N)?.checked_sub(4)?).map(u32::from_le)
    }
}

/// A chain that was taken and must go back exactly once.
#[derive(Debug)]
pub(crate) struct Popped {
    /// What the used ring calls it.
    pub(crate) head: u16,
    /// What the driver wrote.
    pub(crate) readable: Area,
    /// Where answers go.
    pub(crate) writable: Area,
    /// Set if the chain breaks the rules of virtqueues: what is wrong with it.
    pub(crate) defect: Option<&'static str>,
}

/// What the ring had.
#[derive(Debug)]
pub(crate) enum Pop {
    /// A chain.
    Chain(Popped),
    /// Nothing new.
    Empty,
    /// The ring itself makes no sense: its index runs away, or names a head that does not exist. Nothing was taken.
    Broken,
}

/// A run of guest memory, found once; piece by piece if it is not in one region.
struct Window<'m> {
    mem: &'m GuestMemoryMmap,
    at: u64,
    run: Option<VolatileSlice<'m>>,
}

impl<'m> Window<'m> {
    fn new(mem: &'m GuestMemoryMmap, at: u64, len: usize) -> Self {
        Self { mem, at, run: GuestMemoryBackend::get_slice(mem, GuestAddress(at), len).ok() }
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Option<()> {
        if let Some(run) = &self.run {
            return run.read_slice(into, offset).ok();
        }
        self.mem.read_slice(into, GuestAddress(self.at.checked_add(offset as u64)?)).ok()
    }

    fn load(&self, offset: usize, order: Ordering) -> Option<u16> {
        let raw: Option<u16> = match &self.run {
            Some(run) => run.load(offset, order).ok(),
            None => self.mem.load(GuestAddress(self.at.checked_add(offset as u64)?), order).ok(),
        };
        raw.map(u16::from_le)
    }
}

/// The driver's part of a ring during one visit to it.
pub(crate) struct Visit<'m> {
    mem: &'m GuestMemoryMmap,
    size: u16,
    table: Window<'m>,
    avail: Window<'m>,
    /// The available index as it was last read.
    index: Option<u16>,
}

impl<'m> Visit<'m> {
    pub(crate) fn new(queue: &Queue, mem: &'m GuestMemoryMmap) -> Self {
        let size = queue.size();
        let table = usize::from(size).saturating_mul(DESCRIPTOR);
        let avail = usize::from(size).saturating_mul(2).saturating_add(AVAIL_HEADER);
        let (table, avail) = (Window::new(mem, queue.desc_table(), table), Window::new(mem, queue.avail_ring(), avail));
        Self { mem, size, table, avail, index: None }
    }

    /// Takes the next chain. `mark` learns its head before anything else is done with it.
    pub(crate) fn pop(&mut self, queue: &mut Queue, mark: impl FnOnce(u16)) -> Pop {
        let next = queue.next_avail();
        if self.index.is_none_or(|index| index == next) {
            self.index = self.available();
        }
        // Memory that is not there may come back: the front-end is changing its table.
        let Some(index) = self.index.filter(|_| queue.ready()) else { return Pop::Empty };
        match index.wrapping_sub(next) {
            0 => return Pop::Empty,
            ahead if ahead > self.size => return Pop::Broken,
            _ => {}
        }
        let slot = usize::from(next.checked_rem(self.size).unwrap_or(0));
        let head = self.avail.load(slot.saturating_mul(2).saturating_add(AVAIL_HEADER), Ordering::Relaxed);
        let Some(head) = head.filter(|head| *head < self.size) else { return Pop::Broken };
        mark(head);
        queue.set_next_avail(next.wrapping_add(1));
        Pop::Chain(self.walk(head))
    }

    /// The available index.
    pub(crate) fn available(&self) -> Option<u16> {
        self.avail.load(2, Ordering::Acquire)
    }

    /// The chain that begins at `head`.
    pub(crate) fn walk(&self, head: u16) -> Popped {
        let mut popped = Popped { head, readable: Area::default(), writable: Area::default(), defect: None };
        popped.defect = self.follow(&mut popped).err();
        popped
    }

    fn follow(&self, into: &mut Popped) -> Result<(), &'static str> {
        let (mut index, mut seen, mut indirect) = (into.head, 0_usize, None::<Indirect>);
        loop {
            let descriptor = match &indirect {
                None => self.descriptor(index),
                Some(table) => table.get(index),
            };
            let descriptor = descriptor.ok_or("a descriptor lies outside its table")?;
            if descriptor.flags & INDIRECT != 0 {
                if indirect.is_some() || descriptor.flags & NEXT != 0 {
                    return Err("an indirect table is chained or nested");
                }
                indirect = Some(Indirect::read(self.mem, descriptor)?);
                index = 0;
                continue;
            }
            seen = seen.saturating_add(1);
            if seen > MAX_CHAIN {
                return Err("the chain is longer than 64 descriptors");
            }
            self.take(descriptor, into)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
        }
    }

    fn descriptor(&self, index: u16) -> Option<Descriptor> {
        if index >= self.size {
            return None;
        }
        let mut bytes = [0; DESCRIPTOR];
        self.table.read(usize::from(index).checked_mul(DESCRIPTOR)?, &mut bytes)?;
        Descriptor::parse(&bytes)
    }

    fn take(&self, descriptor: Descriptor, into: &mut Popped) -> Result<(), &'static str> {
        let Descriptor { at, len, flags, .. } = descriptor;
        if len == 0 {
            return Err("a buffer is empty");
        }
        let write = flags & WRITE != 0;
        if !write && into.writable.len() != 0 {
            return Err("a readable buffer follows a writable one");
        }
        // A readable buffer shows whether it is there when it is read.
        if write && !GuestMemory::check_range(self.mem, at, len as usize, Permissions::Write) {
            return Err("a buffer is not in guest memory");
        }
        let area = if write { &mut into.writable } else { &mut into.readable };
        if area.push(at, len) { Ok(()) } else { Err("the buffers are longer than 4 GiB together") }
    }
}

#[derive(Clone, Copy)]
struct Descriptor {
    at: GuestAddress,
    len: u32,
    flags: u32,
    next: u16,
}

impl Descriptor {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (at, rest) = bytes.split_first_chunk::<8>()?;
        let (len, rest) = rest.split_first_chunk::<4>()?;
        let (flags, rest) = rest.split_first_chunk::<2>()?;
        let (next, _) = rest.split_first_chunk::<2>()?;
        Some(Self {
            at: GuestAddress(u64::from_le_bytes(*at)),
            len: u32::from_le_bytes(*len),
            flags: u32::from(u16::from_le_bytes(*flags)),
            next: u16::from_le_bytes(*next),
        })
    }
}

/// An indirect table, copied once.
struct Indirect(SmallVec<[u8; 4 * DESCRIPTOR]>);

impl Indirect {
    fn read(mem: &GuestMemoryMmap, descriptor: Descriptor) -> Result<Self, &'static str> {
        let len = descriptor.len as usize;
        if len == 0 || !len.is_multiple_of(DESCRIPTOR) || len > MAX_CHAIN * DESCRIPTOR {
            return Err("the size of the indirect table is not 1 to 64 descriptors");
        }
        let mut bytes = SmallVec::from_elem(0, len);
        match mem.read_slice(&mut bytes, descriptor.at) {
            Ok(()) => Ok(Self(bytes)),
            Err(_) => Err("the indirect table is not in guest memory"),
        }
    }

    fn get(&self, index: u16) -> Option<Descriptor> {
        let offset = usize::from(index).checked_mul(DESCRIPTOR)?;
        Descriptor::parse(self.0.get(offset..offset.checked_add(DESCRIPTOR)?)?)
    }
}
