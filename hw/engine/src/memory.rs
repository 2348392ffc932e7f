//! Bytes at a location, and where the guest's memory comes from.

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;

use iommu_addr::{Gpa, Location, Range};

use crate::Atomic;

/// Memory that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("No memory of {len} bytes at {at:?}; the guest's memory or the slice ends before it")]
pub struct MemoryError {
    /// First byte wanted.
    pub at: Location,
    /// How many.
    pub len: u64,
}

/// Access to guest memory and to endpoints' memory. Nothing is checked here but that the bytes exist: rights were checked before.
/// A call that fails has moved nothing.
///
/// Guests and devices write the same bytes at the same time; what a reader sees then is some mixture, never undefined behaviour.
pub trait Memory: Send + Sync {
    /// Copies `len` bytes. Overlapping ranges come out as if through a buffer.
    fn copy(&self, dst: Location, src: Location, len: u64) -> Result<(), MemoryError>;

    /// Fills `len` bytes with the little-endian bytes of `pattern`, repeated from the first byte on.
    fn fill(&self, dst: Location, len: u64, pattern: u64) -> Result<(), MemoryError>;

    /// Reads `into.len()` bytes.
    fn read(&self, src: Location, into: &mut [u8]) -> Result<(), MemoryError>;

    /// Writes `from.len()` bytes.
    fn write(&self, dst: Location, from: &[u8]) -> Result<(), MemoryError>;

    /// Makes an atomic operation on the word at `at`, and answers what was there. Not of memory of a device, whose own accesses would come in between.
    fn atomic(&self, at: Location, atomic: Atomic) -> Result<u64, MemoryError> {
        Err(MemoryError { at, len: atomic.len })
    }

    /// Where this process has the bytes at `at` mapped, as far as they lie together, at most `most`: what hardware is told of. `None` if there are
    /// none, or if they are not mapped.
    fn place(&self, at: Location, most: u64) -> Option<Place> {
        let _ = (at, most);
        None
    }

    /// Whether there is a place for the byte at `at`.
    fn has_place(&self, at: Location) -> bool {
        self.place(at, 1).is_some()
    }
}

/// Whether the processor's atomic operations on a byte of this memory are atomic: it is mapped here, and no device's.
pub fn is_ordinary(memory: &dyn Memory, at: Location) -> bool {
    memory.place(at, 1).is_some_and(|place| !place.is_device)
}

/// Bytes in this process's address space, which stay mapped as long as this lives.
#[derive(Clone)]
pub struct Place {
    /// Address of the first one.
    pub address: u64,
    /// How many, never 0.
    pub len: u64,
    /// What keeps them mapped.
    pub hold: Arc<dyn Any + Send + Sync>,
    /// Addresses of all that is mapped, and stays so, together with them.
    pub mapping: std::ops::Range<u64>,
    /// Memory of a device, which is not cached.
    pub is_device: bool,
    /// The dma-buf that has them, if one does: there are IOMMUs that memory of a device is only mapped into by that.
    pub buffer: Option<Buffer>,
}

impl Place {
    /// Ordinary memory that is mapped by itself.
    pub fn new(address: u64, len: u64, hold: Arc<dyn Any + Send + Sync>) -> Self {
        let mapping = address..address.saturating_add(len);
        Self { address, len, hold, mapping, is_device: false, buffer: None }
    }
}

/// A place in a dma-buf.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// The dma-buf.
    pub file: Arc<File>,
    /// Where in it the first byte is.
    pub offset: u64,
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.len, self.address)
    }
}

/// A run of guest memory, backed by a file.
#[derive(Clone, Debug)]
pub struct RamRegion {
    /// Guest-physical addresses.
    pub gpa: Range<Gpa>,
    /// The file that holds the bytes; whoever made the region checked that it is long enough.
    pub file: Arc<File>,
    /// Where in the file the region begins, in bytes.
    pub offset: u64,
}

/// The guest's memory, as the transport learns of it.
pub trait RamMap: Send + Sync {
    /// Puts a new table in place of the old one. A region with the same file (device and inode), offset and length as one that is mapped
    /// keeps its mapping. On an error the old table stays. Copies that run on a region that went end before its memory is unmapped.
    fn replace(&self, regions: &[RamRegion]) -> io::Result<()>;

    /// Whether every byte of the range is guest memory. A range may span regions that touch.
    fn contains(&self, range: Range<Gpa>) -> bool;
}
