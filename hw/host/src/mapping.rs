//! A file mapped into this process, and raw access to its bytes.
//!
//! [`Mapping`] owns the pages; [`Span`] is a run of bytes inside one, which cannot outlive it. Other processes, and other threads of this
//! one, read and write the same bytes at the same time: every access is a raw copy without a Rust reference, and a racing reader sees a
//! mixture of old and new bytes. Not here: which address means which mapping.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

use hw_engine::Atomic;
use rustix::fs::FileType;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::device;

/// Bytes of pattern that one step of a fill writes; a multiple of 8.
const TILE: usize = 256;
/// Bytes that a copy to or from memory of a device moves at a time.
const STEP: usize = 4096;

/// Why a file cannot serve as memory.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// No bytes, or more than this machine can address.
    #[error("{len} bytes of memory cannot be mapped; give at least 1 and fewer than the address space holds")]
    Length {
        /// Length wanted, in bytes.
        len: u64,
    },
    /// The file ends too early: touching the rest would be the end of this process.
    #[error("The file has {have} bytes where {want} are needed; make it longer (and seal it against shrinking)")]
    Short {
        /// The file's length in bytes.
        have: u64,
        /// Length needed, in bytes.
        want: u64,
    },
    /// The kernel said no.
    #[error("The file cannot be mapped; it must be open for reading and writing and allow shared mappings")]
    Map {
        /// The kernel's answer.
        source: io::Error,
    },
}

impl From<rustix::io::Errno> for FileError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Map { source: errno.into() }
    }
}

impl FileError {
    pub(crate) fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Length { .. } | Self::Short { .. } => io::ErrorKind::InvalidInput,
            Self::Map { source } => source.kind(),
        }
    }
}

/// What makes two mappings the same: the same bytes of the same file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    device: u64,
    inode: u64,
    offset: u64,
    len: u64,
}

impl Key {
    /// The key that [`Mapping::new`] would give a mapping.
    pub(crate) fn of(file: &File, offset: u64, len: u64) -> Result<Self, FileError> {
        let stat = rustix::fs::fstat(file)?;
        Ok(Self { device: stat.st_dev, inode: stat.st_ino, offset, len })
    }
}

/// `len` bytes of a file, mapped shared for reading and writing for as long as this lives.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// First byte that was asked for.
    first: NonNull<u8>,
    len: usize,
    key: Key,
    /// Memory of a device, which is not cached: every access of it is as wide as it can be and aligned, and none is repeated or left out.
    is_device: bool,
    /// What the kernel was asked for: whole pages of the file around those bytes.
    pages: NonNull<c_void>,
    pages_len: usize,
}

// SAFETY: A mapping belongs to the process, not to a thread; nothing in it changes after `new`.
unsafe impl Send for Mapping {}
// SAFETY: As above; the bytes are only reached by raw copies, which assume that others write at the same time.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset`, which need not lie on a page boundary.
    pub(crate) fn new(file: &File, offset: u64, len: u64) -> Result<Self, FileError> {
        Self::map(file, offset, len, false)
    }

    /// The same of memory of a device.
    pub(crate) fn of_device(file: &File, offset: u64, len: u64) -> Result<Self, FileError> {
        Self::map(file, offset, len, true)
    }

    fn map(file: &File, offset: u64, len: u64, is_device: bool) -> Result<Self, FileError> {
        let stat = rustix::fs::fstat(file)?;
        let wrong = FileError::Length { len };
        let end = offset.checked_add(len).filter(|_| len > 0);
        let Some(end) = end else { return Err(wrong) };
        let have = u64::try_from(stat.st_size).unwrap_or(0);
        if FileType::from_raw_mode(stat.st_mode).is_file() && have < end {
            return Err(FileError::Short { have, want: end });
        }
        // A file of huge pages can only be mapped and unmapped in those; its block size says how large they are.
        let page = rustix::param::page_size() as u64;
        let granule =
            u64::try_from(stat.st_blksize).ok().filter(|size| size.is_power_of_two()).unwrap_or(page).max(page);
        let from = offset & !(granule - 1);
        let Some(to) = end.checked_next_multiple_of(granule) else { return Err(wrong) };
        let (Ok(pages_len), Ok(lead), Ok(len)) =
            (usize::try_from(to - from), usize::try_from(offset - from), usize::try_from(len))
        else {
            return Err(wrong);
        };
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: A null address lets the kernel choose a place, so no memory of this process is replaced.
        let pages = unsafe { rustix::mm::mmap(ptr::null_mut(), pages_len, rights, flags, file.as_fd(), from) }?;
        let pages = NonNull::new(pages).ok_or(wrong)?;
        // SAFETY: `lead` is below `pages_len`, the length of the mapping that starts at `pages`.
        let first = unsafe { pages.cast::<u8>().add(lead) };
        let key = Key { device: stat.st_dev, inode: stat.st_ino, offset, len: len as u64 };
        let mapping = Self { first, len, key, is_device, pages, pages_len };
        // A child must not hold a guest's memory, nor a core file show it. From here on a failure unmaps.
        mapping.advise(Advice::LinuxDontFork)?;
        mapping.advise(Advice::LinuxDontDump)?;
        Ok(mapping)
    }

    pub(crate) fn len(&self) -> u64 {
        self.len as u64
    }

    pub(crate) fn is_device(&self) -> bool {
        self.is_device
    }

    /// Where it is in this process.
    pub(crate) fn addresses(&self) -> Range<u64> {
        let first = self.first.as_ptr() as u64;
        first..first + self.len()
    }

    pub(crate) fn key(&self) -> Key {
        self.key
    }

    /// The bytes from `offset` on, at most `most`; `None` past the end.
    pub(crate) fn span(&self, offset: u64, most: u64) -> Option<Span<'_>> {
        let offset = usize::try_from(offset).ok().filter(|&offset| offset < self.len)?;
        let len = usize::try_from(most).unwrap_or(usize::MAX).min(self.len - offset);
        // SAFETY: `offset` is below `len`, the number of mapped bytes from `first` on.
        let first = unsafe { self.first.add(offset) };
        Some(Span { first, len, is_device: self.is_device, mapping: PhantomData })
    }

    fn advise(&self, advice: Advice) -> Result<(), FileError> {
        // SAFETY: The range is this mapping's own, and neither advice changes what this process reads there.
        Ok(unsafe { rustix::mm::madvise(self.pages.as_ptr(), self.pages_len, advice) }?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: The range is what `mmap` gave, and every `Span` into it borrows this mapping, so none is left.
        let unmapped = unsafe { rustix::mm::munmap(self.pages.as_ptr(), self.pages_len) };
        debug_assert_eq!(unmapped, Ok(()), "the range was mapped as it is unmapped");
    }
}

/// Bytes inside a mapping that lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span<'a> {
    first: NonNull<u8>,
    len: usize,
    is_device: bool,
    mapping: PhantomData<&'a Mapping>,
}

impl Span<'_> {
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// Address of the first byte.
    pub(crate) fn address(self) -> usize {
        self.first.as_ptr().addr()
    }

    /// Copies as many bytes as the shorter span has, as if through a buffer.
    pub(crate) fn copy_from(self, src: Span<'_>) {
        if self.is_device || src.is_device {
            return self.copy_by_device(src);
        }
        // SAFETY: Both spans lie inside mappings that live as long as the spans; the count is within both; `copy` allows overlap.
        unsafe { ptr::copy(src.first.as_ptr(), self.first.as_ptr(), self.len.min(src.len)) }
    }

    /// As [`Span::copy_from`] where one is memory of a device, in steps of a buffer.
    fn copy_by_device(self, src: Span<'_>) {
        let len = self.len.min(src.len);
        let mut buffer = [0; STEP];
        let mut step = |at: usize| {
            let bytes = &mut buffer[..STEP.min(len - at)];
            src.part(at).read(bytes);
            self.write_at(at, bytes);
        };
        // Against overlap: towards higher addresses the last bytes go first.
        if self.address() > src.address() {
            (0..len).step_by(STEP).rev().for_each(&mut step);
        } else {
            (0..len).step_by(STEP).for_each(&mut step);
        }
    }

    /// The bytes from `at` on, which is at most `len`.
    fn part(self, at: usize) -> Self {
        let at = at.min(self.len);
        // SAFETY: `at` is inside the span or just behind it.
        let first = unsafe { self.first.add(at) };
        Span { first, len: self.len - at, ..self }
    }

    /// Makes an atomic operation on the span, which is a word of its length. `None` if it is none, is not aligned, or is memory of a device.
    pub(crate) fn atomic(self, atomic: Atomic) -> Option<u64> {
        if self.is_device || self.len as u64 != atomic.len || !(self.address() as u64).is_multiple_of(atomic.len) {
            return None;
        }
        match atomic.len {
            // SAFETY: The span is that long, aligned, and lies inside a living mapping. What others do to the same bytes, guests, devices and
            // copies by threads of this process, is as for every access here: no Rust reference is to them, and what is read then is some mixture.
            4 => Some(atomic.on_u32(unsafe { AtomicU32::from_ptr(self.first.as_ptr().cast()) })),
            // SAFETY: As above.
            8 => Some(atomic.on_u64(unsafe { AtomicU64::from_ptr(self.first.as_ptr().cast()) })),
            _ => None,
        }
    }

    /// Reads as many bytes as fit.
    pub(crate) fn read(self, into: &mut [u8]) {
        if self.is_device {
            let count = self.len.min(into.len());
            return device::read(self.first, &mut into[..count]);
        }
        // SAFETY: The span lies inside a living mapping and `into` is private memory of this process, so they cannot overlap; the count is
        // within both.
        unsafe { ptr::copy_nonoverlapping(self.first.as_ptr(), into.as_mut_ptr(), self.len.min(into.len())) }
    }

    /// Writes as many bytes as fit.
    pub(crate) fn write(self, from: &[u8]) {
        self.write_at(0, from);
    }

    /// Fills the span with the little-endian bytes of `pattern`, repeated.
    pub(crate) fn fill(self, pattern: u64) {
        let bytes = pattern.to_le_bytes();
        if !self.is_device && bytes == [bytes[0]; 8] {
            // SAFETY: The span lies inside a living mapping.
            unsafe { ptr::write_bytes(self.first.as_ptr(), bytes[0], self.len) }
            return;
        }
        let mut tile = [0; TILE];
        tile.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&bytes));
        // A tile is a whole number of patterns, so each starts at the pattern's first byte.
        for at in (0..self.len).step_by(TILE) {
            self.write_at(at, &tile);
        }
    }

    /// Writes as many bytes as fit from `at` on; `at` is at most `len`.
    fn write_at(self, at: usize, from: &[u8]) {
        let count = self.len.saturating_sub(at).min(from.len());
        // SAFETY: `at + count` is at most `len`, so `at` is inside the span or just behind it.
        let to = unsafe { self.first.add(at.min(self.len)) };
        if self.is_device {
            return device::write(to, &from[..count]);
        }
        // SAFETY: The span lies inside a living mapping and `from` is private memory of this process, so they cannot overlap; the count is
        // within both.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), count) }
    }
}
