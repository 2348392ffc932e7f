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
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryMmap, Permissions};

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

    /// Replaces what `into` holds by every byte of the area. False if some memory is gone.
    pub(crate) fn read(&self, mem: &GuestMemoryMmap, into: &mut Vec<u8>) -> bool {
        self.read_front(mem, into, self.len())
    }

    /// As [`Area::read`], of the first `len` bytes.
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

    /// Writes `record` at `offset`, its last four bytes last and with release ordering.
    pub(crate) fn write_record(&self, mem: &GuestMemoryMmap, offset: usize, record: &[u8; 32]) {
        let [body @ .., a, b, c, d] = record;
        let status = u32::from_ne_bytes([*a, *b, *c, *d]);
        if let Some(at) = self.contiguous(offset, record.len())
            && let Ok(slice) = GuestMemoryBackend::get_slice(mem, at, record.len())
            && slice.write_slice(body, 0).is_ok()
            && slice.store(status, body.len(), Ordering::Release).is_ok()
        {
            return;
        }
        self.write(mem, offset, body);
        fence(Ordering::Release);
        self.write(mem, offset.saturating_add(body.len()), &status.to_ne_bytes());
    }

    fn contiguous(&self, offset: usize, len: usize) -> Option<GuestAddress> {
        let (at, size) = self.buffers.first()?;
        (offset.checked_add(len)? <= *size as usize).then(|| GuestAddress(at.0.wrapping_add(offset as u64)))
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

/// Takes the next chain.
pub(crate) fn pop(queue: &mut Queue, mem: &GuestMemoryMmap) -> Pop {
    let (table, size) = (GuestAddress(queue.desc_table()), queue.size());
    let head = match queue.iter(mem) {
        Ok(mut heads) => heads.next().map(|chain| chain.head_index()),
        Err(_) => return Pop::Broken,
    };
    match head {
        None => Pop::Empty,
        Some(head) if head >= size => Pop::Broken,
        Some(head) => Pop::Chain(walk(mem, table, size, head)),
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

/// Where descriptors come from: the queue's table, or an indirect one that was copied once.
enum Table<'a> {
    Queue { mem: &'a GuestMemoryMmap, at: GuestAddress, size: u16 },
    Indirect(SmallVec<[u8; 4 * DESCRIPTOR]>),
}

impl Table<'_> {
    fn get(&self, index: u16) -> Option<Descriptor> {
        let offset = usize::from(index).checked_mul(DESCRIPTOR)?;
        let end = offset.checked_add(DESCRIPTOR)?;
        match self {
            Self::Queue { mem, at, size } => {
                if index >= *size {
                    return None;
                }
                let mut bytes = [0; DESCRIPTOR];
                mem.read_slice(&mut bytes, GuestAddress(at.0.checked_add(offset as u64)?)).ok()?;
                Descriptor::parse(&bytes)
            }
            Self::Indirect(bytes) => Descriptor::parse(bytes.get(offset..end)?),
        }
    }

    fn indirect(mem: &GuestMemoryMmap, descriptor: Descriptor) -> Result<Self, &'static str> {
        let len = descriptor.len as usize;
        if len == 0 || !len.is_multiple_of(DESCRIPTOR) || len > MAX_CHAIN * DESCRIPTOR {
            return Err("the size of the indirect table is not 1 to 64 descriptors");
        }
        let mut bytes = SmallVec::from_elem(0, len);
        match mem.read_slice(&mut bytes, descriptor.at) {
            Ok(()) => Ok(Self::Indirect(bytes)),
            Err(_) => Err("the indirect table is not in guest memory"),
        }
    }
}

fn walk(mem: &GuestMemoryMmap, table: GuestAddress, size: u16, head: u16) -> Popped {
    let mut popped = Popped { head, readable: Area::default(), writable: Area::default(), defect: None };
    popped.defect = follow(mem, Table::Queue { mem, at: table, size }, &mut popped).err();
    popped
}

fn follow<'a>(mem: &'a GuestMemoryMmap, mut table: Table<'a>, into: &mut Popped) -> Result<(), &'static str> {
    let (mut index, mut seen) = (into.head, 0_usize);
    loop {
        let descriptor = table.get(index).ok_or("a descriptor lies outside its table")?;
        if descriptor.flags & INDIRECT != 0 {
            if matches!(table, Table::Indirect(_)) || descriptor.flags & NEXT != 0 {
                return Err("an indirect table is chained or nested");
            }
            table = Table::indirect(mem, descriptor)?;
            index = 0;
            continue;
        }
        seen = seen.saturating_add(1);
        if seen > MAX_CHAIN {
            return Err("the chain is longer than 64 descriptors");
        }
        take(mem, descriptor, into)?;
        if descriptor.flags & NEXT == 0 {
            return Ok(());
        }
        index = descriptor.next;
    }
}

fn take(mem: &GuestMemoryMmap, descriptor: Descriptor, into: &mut Popped) -> Result<(), &'static str> {
    let Descriptor { at, len, flags, .. } = descriptor;
    if len == 0 {
        return Err("a buffer is empty");
    }
    let write = flags & WRITE != 0;
    if !write && into.writable.len() != 0 {
        return Err("a readable buffer follows a writable one");
    }
    if !GuestMemory::check_range(mem, at, len as usize, if write { Permissions::Write } else { Permissions::Read }) {
        return Err("a buffer is not in guest memory");
    }
    let area = if write { &mut into.writable } else { &mut into.readable };
    if area.push(at, len) { Ok(()) } else { Err("the buffers are longer than 4 GiB together") }
}
