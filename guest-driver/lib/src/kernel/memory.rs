//! Anonymous memory that endpoints see.
//!
//! Endpoints may write it at any moment, so there is never a reference into it: bytes go in and out by volatile copies of whole words.
//!
//! Not here: the MAP call, which pins the pages; the kernel keeps them as long as it needs them, whatever happens to this mapping.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags};

use crate::{Error, HostMemory};

const WORD: usize = size_of::<u64>();

/// Page-aligned memory of this process.
pub(super) struct Pages {
    base: NonNull<u8>,
    len: usize,
    iova: u64,
}

// SAFETY: the memory belongs to no thread, and is only copied to and from by volatile accesses.
unsafe impl Send for Pages {}
// SAFETY: as above; a torn word is what memory shared with a device may always yield.
unsafe impl Sync for Pages {}

impl Pages {
    /// Zeroed memory.
    pub(super) fn new(len: u64) -> Result<Self, Error> {
        let failed = |source| Error::System { call: "Allocating memory", source };
        let len = usize::try_from(len).map_err(|error| failed(std::io::Error::other(error)))?;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory in use.
        let mapped = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let base = mapped.map_err(|errno| failed(errno.into()))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        Ok(Self { base, len, iova: 0 })
    }

    /// Where the memory is in this process.
    pub(super) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Notes where endpoints see it.
    pub(super) fn mapped_at(mut self, iova: u64) -> Self {
        self.iova = iova;
        self
    }

    /// The place of `len` bytes at `offset`, if they all lie in the memory.
    fn place(&self, offset: u64, len: usize) -> Result<*mut u8, Error> {
        let size = self.len as u64;
        let outside = || Error::Bounds { offset, len: len as u64, size };
        let end = offset.checked_add(len as u64).filter(|end| *end <= size).ok_or_else(outside)?;
        let start = usize::try_from(end - len as u64).ok().ok_or_else(outside)?;
        Ok(self.base.as_ptr().wrapping_add(start))
    }
}

impl HostMemory for Pages {
    fn iova(&self) -> u64 {
        self.iova
    }

    fn len(&self) -> u64 {
        self.len as u64
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let from = self.place(offset, into.len())?;
        // SAFETY: `place` made sure that `into.len()` bytes from there lie in the mapping, which lives as long as `self`.
        unsafe { copy_out(from, into) };
        Ok(())
    }

    fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), Error> {
        let to = self.place(offset, from.len())?;
        // SAFETY: as in `read_at`; no reference into the mapping exists.
        unsafe { copy_in(to, from) };
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's alone and nothing refers into it.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping of our own: {unmapped:?}");
    }
}

/// How many bytes from `at` to the next whole word, at most `len`.
fn to_next_word(at: *const u8, len: usize) -> usize {
    at.align_offset(WORD).min(len)
}

/// Copies from shared memory.
///
/// # Safety
/// `from` is readable for `into.len()` bytes.
unsafe fn copy_out(from: *const u8, into: &mut [u8]) {
    let (head, rest) = into.split_at_mut(to_next_word(from, into.len()));
    let (words, tail) = rest.as_chunks_mut::<WORD>();
    let after_head = from.wrapping_add(head.len());
    let after_words = after_head.wrapping_add(words.len() * WORD);
    for (i, byte) in head.iter_mut().enumerate() {
        // SAFETY: byte `i` of the first part of the caller's range.
        *byte = unsafe { from.wrapping_add(i).read_volatile() };
    }
    for (i, word) in words.iter_mut().enumerate() {
        // SAFETY: word `i` of the middle part, which starts at a whole word.
        *word = unsafe { after_head.cast::<u64>().wrapping_add(i).read_volatile() }.to_ne_bytes();
    }
    for (i, byte) in tail.iter_mut().enumerate() {
        // SAFETY: byte `i` of the last part.
        *byte = unsafe { after_words.wrapping_add(i).read_volatile() };
    }
}

/// Copies into shared memory.
///
/// # Safety
/// `to` is writable for `from.len()` bytes.
unsafe fn copy_in(to: *mut u8, from: &[u8]) {
    let (head, rest) = from.split_at(to_next_word(to, from.len()));
    let (words, tail) = rest.as_chunks::<WORD>();
    let after_head = to.wrapping_add(head.len());
    let after_words = after_head.wrapping_add(words.len() * WORD);
    for (i, byte) in head.iter().enumerate() {
        // SAFETY: byte `i` of the first part of the caller's range.
        unsafe { to.wrapping_add(i).write_volatile(*byte) };
    }
    for (i, word) in words.iter().enumerate() {
        // SAFETY: word `i` of the middle part, which starts at a whole word.
        unsafe { after_head.cast::<u64>().wrapping_add(i).write_volatile(u64::from_ne_bytes(*word)) };
    }
    for (i, byte) in tail.iter().enumerate() {
        // SAFETY: byte `i` of the last part.
        unsafe { after_words.wrapping_add(i).write_volatile(*byte) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_every_alignment_and_length_round_trip() {
        let pages = Pages::new(4096).expect("one page");
        let bytes: Vec<u8> = (1..=64).collect();
        for offset in 0..17 {
            for len in 0..40 {
                pages.write_at(0, &[0xee; 128]).expect("in bounds");
                pages.write_at(offset, &bytes[..len]).expect("in bounds");
                let mut around = [0; 128];
                pages.read_at(0, &mut around).expect("in bounds");
                let start = usize::try_from(offset).expect("small");
                assert_eq!(around[start..start + len], bytes[..len]);
                assert!(around[..start].iter().chain(&around[start + len..]).all(|byte| *byte == 0xee));
                let mut back = vec![0; len];
                pages.read_at(offset, &mut back).expect("in bounds");
                assert_eq!(back, bytes[..len]);
            }
        }
    }

    #[test]
    fn bytes_past_the_end_are_refused() {
        let pages = Pages::new(4096).expect("one page");
        assert!(matches!(pages.read_at(4095, &mut [0; 2]), Err(Error::Bounds { offset: 4095, len: 2, size: 4096 })));
        assert!(pages.write_at(u64::MAX, &[0]).is_err());
        assert!(pages.write_at(4096, &[]).is_ok());
        assert!(pages.read_at(4095, &mut [0; 1]).is_ok());
    }
}
