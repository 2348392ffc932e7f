//! [`Pinned`]: a few pages of this process that GPUs may reach for as long as it lives.
//!
//! Not here: memory of others.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{MapFlags, ProtFlags};

use crate::driver::CudaError;
use crate::gpu::Gpu;

/// Memory for words and for bytes on their way.
#[derive(Debug)]
pub(crate) struct Pinned {
    gpu: Arc<Gpu>,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to the process, not to a thread.
unsafe impl Send for Pinned {}
// SAFETY: shared, it gives out atomic words and an address; its bytes are reached through `&mut` alone.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `len` bytes, whole pages, that are zero.
    pub(crate) fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Self, CudaError> {
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a null address lets the kernel choose a place, so no memory of this process is replaced.
        let at =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags) };
        let failed = |source: std::io::Error| CudaError::Host { step: "make memory for a GPU's engine", source };
        let at = at.map_err(|errno| failed(errno.into()))?.cast::<u8>();
        let at = NonNull::new(at).ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let start = at.as_ptr() as u64;
        // SAFETY: the memory is unmapped only after it is unregistered, in `drop`.
        if let Err(error) = unsafe { gpu.register(start..start + len as u64, false) } {
            // SAFETY: nobody has it.
            let _ = unsafe { rustix::mm::munmap(at.as_ptr().cast(), len) };
            return Err(error);
        }
        Ok(Self { gpu: Arc::clone(gpu), at, len })
    }

    pub(crate) fn address(&self) -> u64 {
        self.at.as_ptr() as u64
    }

    /// The `index`th word.
    pub(crate) fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < self.len / size_of::<AtomicU32>(), "a word is inside");
        // SAFETY: the word is inside, as was just checked.
        let word = unsafe { self.at.cast::<AtomicU32>().add(index) };
        // SAFETY: it is aligned, as pages are, and lives as long as `self`; every access of it is atomic.
        unsafe { word.as_ref() }
    }

    /// The `index`th number of eight bytes.
    pub(crate) fn number(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.len / size_of::<AtomicU64>(), "a number is inside");
        // SAFETY: the number is inside, as was just checked.
        let number = unsafe { self.at.cast::<AtomicU64>().add(index) };
        // SAFETY: as for a word.
        unsafe { number.as_ref() }
    }

    /// Its bytes, while no engine has them.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: all are mapped and initialised, and the exclusive borrow keeps others of this process out.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // That of a broken context stays: it is not dropped.
        let _ = self.gpu.unregister(self.address());
        // SAFETY: whoever has it going to or from an engine holds `self`.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), self.len) };
    }
}
