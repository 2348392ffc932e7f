//! Memory of this process that a function reads and writes: queues, and what does not fit a command.
//!
//! Not here: memory of guests.

use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use hw_engine::Place;
use iommu_addr::{Access, BusAddr};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::VfioError;
use crate::host::{MapSink, Mapped};

/// Zeroed pages that a function may read and write as long as this lives.
pub(crate) struct DmaMemory {
    // First, so that the IOMMU lets go of the pages before the process does.
    mapped: Mapped,
    pages: Arc<Pages>,
}

struct Pages {
    first: NonNull<u8>,
    len: usize,
}

// SAFETY: pages belong to the process, not to a thread; they are only reached by volatile accesses.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl DmaMemory {
    /// `len` bytes, whole pages, at bus addresses up to `mask`.
    pub(crate) fn new(host: &dyn MapSink, len: usize, mask: u64) -> Result<Self, VfioError> {
        let pages = Arc::new(Pages::new(len).map_err(|source| VfioError::Start { source })?);
        let address = pages.first.as_ptr().addr() as u64;
        let place = Place::new(address, len as u64, pages.clone());
        Ok(Self { mapped: host.map(&place, Access::RW, mask)?, pages })
    }

    /// Where the function finds the byte at `at`.
    pub(crate) fn bus(&self, at: usize) -> BusAddr {
        BusAddr(self.mapped.first.0 + at as u64)
    }

    fn place<T>(&self, at: usize) -> NonNull<T> {
        let fits = at.checked_add(size_of::<T>()).is_some_and(|end| end <= self.pages.len);
        assert!(fits && at.is_multiple_of(align_of::<T>()), "{at:#x} is none of {:#x} bytes", self.pages.len);
        // SAFETY: the assertion has found it inside the pages.
        unsafe { self.pages.first.add(at) }.cast()
    }

    pub(crate) fn read32(&self, at: usize) -> u32 {
        // SAFETY: `place` has found it mapped and aligned.
        u32::from_le(unsafe { self.place::<u32>(at).as_ptr().read_volatile() })
    }

    pub(crate) fn write32(&self, at: usize, value: u32) {
        // SAFETY: as for `read32`.
        unsafe { self.place::<u32>(at).as_ptr().write_volatile(value.to_le()) }
    }

    pub(crate) fn write64(&self, at: usize, value: u64) {
        // SAFETY: as for `read32`.
        unsafe { self.place::<u64>(at).as_ptr().write_volatile(value.to_le()) }
    }

    /// Bytes that no command is about.
    pub(crate) fn read(&self, at: usize, into: &mut [u8]) {
        for (n, byte) in into.iter_mut().enumerate() {
            // SAFETY: as for `read32`.
            *byte = unsafe { self.place::<u8>(at + n).as_ptr().read_volatile() };
        }
    }

    /// Bytes that no command is about.
    pub(crate) fn write(&self, at: usize, from: &[u8]) {
        for (n, byte) in from.iter().enumerate() {
            // SAFETY: as for `read32`.
            unsafe { self.place::<u8>(at + n).as_ptr().write_volatile(*byte) }
        }
    }
}

impl Pages {
    fn new(len: usize) -> io::Result<Self> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null address lets the kernel choose a place, so no memory of this process is replaced.
        let first = unsafe { mmap_anonymous(ptr::null_mut(), len, rights, MapFlags::PRIVATE) }?;
        Ok(Self { first: NonNull::new(first.cast()).ok_or(io::ErrorKind::OutOfMemory)?, len })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the range is what `mmap_anonymous` gave, and nobody else has it.
        let unmapped = unsafe { munmap(self.first.as_ptr().cast(), self.len) };
        debug_assert_eq!(unmapped, Ok(()), "the range was mapped as it is unmapped");
    }
}
