//! The completion ring: the kernel produces, this side consumes, no system call between.
//!
//! `tail` is loaded with acquire before an entry is read; `head` is stored with release once it was. The kernel never overwrites an entry
//! that was not consumed, so what lies between the two is this side's alone.
//!
//! Not here: waiting.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use peergate_uapi::{Completion, MMAP_RING, Ring};
use rustix::mm::{MapFlags, ProtFlags};

use crate::Error;

/// The mapped ring, consumed by one thread at a time.
pub(super) struct CompletionRing {
    shared: Mapping,
    mask: u32,
    entry_offset: usize,
    /// Entries consumed so far, modulo 2^32.
    head: u32,
}

impl CompletionRing {
    /// Maps the ring of `file`, `length` bytes as RING answered.
    pub(super) fn map(file: &File, length: u64) -> Result<Self, Error> {
        Self::over(Mapping::new(file, length)?)
    }

    /// Reads the ring's geometry once and checks it: what follows relies on it.
    fn over(shared: Mapping) -> Result<Self, Error> {
        let broken = || Error::System {
            call: "Mapping the completion ring",
            source: io::Error::new(
                io::ErrorKind::InvalidData,
                "the kernel describes a ring that does not fit its mapping",
            ),
        };
        if shared.len < size_of::<Ring>() {
            return Err(broken());
        }
        let mask = shared.word(offset_of!(Ring, mask)).load(Ordering::Relaxed);
        let entry_offset = shared.word(offset_of!(Ring, entry_offset)).load(Ordering::Relaxed) as usize;
        let entries = mask as usize + 1;
        let end = entries.checked_mul(size_of::<Completion>()).and_then(|bytes| bytes.checked_add(entry_offset));
        let fits = end.is_some_and(|end| end <= shared.len);
        if !entries.is_power_of_two() || !entry_offset.is_multiple_of(align_of::<Completion>()) || !fits {
            return Err(broken());
        }
        let head = shared.word(offset_of!(Ring, head)).load(Ordering::Relaxed);
        Ok(Self { shared, mask, entry_offset, head })
    }

    /// Moves what is there to the front of `into`, oldest first, and answers how many.
    pub(super) fn take(&mut self, into: &mut [Completion]) -> usize {
        let tail = self.shared.word(offset_of!(Ring, tail)).load(Ordering::Acquire);
        let there = tail.wrapping_sub(self.head).min(self.mask.saturating_add(1)) as usize;
        let taken = there.min(into.len());
        for slot in &mut into[..taken] {
            *slot = self.entry(self.head & self.mask);
            self.head = self.head.wrapping_add(1);
        }
        if taken > 0 {
            self.shared.word(offset_of!(Ring, head)).store(self.head, Ordering::Release);
        }
        taken
    }

    fn entry(&self, index: u32) -> Completion {
        let offset = self.entry_offset + index as usize * size_of::<Completion>();
        let at = self.shared.base.as_ptr().wrapping_add(offset).cast::<Completion>();
        // SAFETY: `index` is masked, and `over` checked that every entry lies in the mapping, aligned; any bit pattern is a completion.
        // The producer's release of `tail` came before, and it leaves the entry alone until `head` passes it.
        unsafe { at.read() }
    }
}

/// Memory shared with the producer.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to no thread.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(file: &File, length: u64) -> Result<Self, Error> {
        let failed = |source| Error::System { call: "Mapping the completion ring", source };
        let len = usize::try_from(length).map_err(|error| failed(io::Error::other(error)))?;
        let (rights, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory in use.
        let mapped = unsafe { rustix::mm::mmap(ptr::null_mut(), len, rights, shared, file, MMAP_RING) };
        let base = mapped.map_err(|errno| failed(errno.into()))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| failed(io::ErrorKind::OutOfMemory.into()))?;
        Ok(Self { base, len })
    }

    /// The word at `offset` of the ring's head.
    fn word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset + size_of::<u32>() <= size_of::<Ring>(), "only words of the head are shared words");
        let at = self.base.as_ptr().wrapping_add(offset).cast::<u32>();
        // SAFETY: `over` checked that the head lies in the mapping; the mapping is page-aligned and the head's fields are aligned in it;
        // both sides access them atomically.
        unsafe { AtomicU32::from_ptr(at) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's alone and nothing refers into it.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping of our own: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::thread;
    use zerocopy::{FromZeros, IntoBytes};

    /// A file laid out as the kernel lays out the ring, mapped a second time for the producer.
    struct Kernel {
        ring: Mapping,
        entries: u32,
    }

    fn file(head: &Ring, entries: usize) -> File {
        let fd = rustix::fs::memfd_create("ring", rustix::fs::MemfdFlags::CLOEXEC).expect("a memory file");
        let mut file = File::from(fd);
        file.write_all(head.as_bytes()).expect("the head fits");
        file.set_len((size_of::<Ring>() + entries * size_of::<Completion>()) as u64).expect("the entries fit");
        file
    }

    fn pair(entries: u32, start: u32) -> (CompletionRing, Kernel) {
        let head = Ring {
            tail: start,
            head: start,
            mask: entries - 1,
            entry_offset: u32::try_from(size_of::<Ring>()).expect("small"),
            ..Ring::new_zeroed()
        };
        let file = file(&head, entries as usize);
        let length = file.metadata().expect("a size").len();
        let ring = CompletionRing::map(&file, length).expect("a sound ring");
        (ring, Kernel { ring: Mapping::new(&file, length).expect("a second mapping"), entries })
    }

    impl Kernel {
        /// Produces one entry if there is room.
        fn push(&self, cookie: u64) -> bool {
            let tail = self.ring.word(offset_of!(Ring, tail)).load(Ordering::Relaxed);
            let head = self.ring.word(offset_of!(Ring, head)).load(Ordering::Acquire);
            if tail.wrapping_sub(head) == self.entries {
                return false;
            }
            let slot = (tail & (self.entries - 1)) as usize;
            let at = self.ring.base.as_ptr().wrapping_add(size_of::<Ring>() + slot * size_of::<Completion>());
            // SAFETY: the slot lies in the mapping, and the consumer leaves it alone until `tail` passes it.
            unsafe { at.cast::<Completion>().write(Completion { cookie, bytes: !cookie, ..Completion::new_zeroed() }) };
            self.ring.word(offset_of!(Ring, tail)).store(tail.wrapping_add(1), Ordering::Release);
            true
        }
    }

    #[test]
    fn entries_come_out_once_and_in_order_across_the_wrap_of_the_counters() {
        let (mut ring, kernel) = pair(4, u32::MAX - 1);
        let mut into = [Completion::default(); 8];
        assert_eq!(ring.take(&mut into), 0);
        for round in 0..5u64 {
            assert!((0..4).all(|i| kernel.push(round * 4 + i)));
            assert!(!kernel.push(99), "a full ring takes no more");
            assert_eq!(ring.take(&mut into[..3]), 3);
            assert_eq!(ring.take(&mut into[3..]), 1);
            let cookies: Vec<u64> = into[..4].iter().map(|entry| entry.cookie).collect();
            assert_eq!(cookies, (round * 4..round * 4 + 4).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_producer_on_another_thread_is_seen_whole() {
        const COUNT: u64 = 20_000;
        let (mut ring, kernel) = pair(64, 0);
        let producer = thread::spawn(move || {
            for cookie in 0..COUNT {
                while !kernel.push(cookie) {
                    thread::yield_now();
                }
            }
        });
        let mut expected = 0;
        let mut into = [Completion::default(); 16];
        while expected < COUNT {
            let taken = ring.take(&mut into);
            for entry in &into[..taken] {
                assert_eq!((entry.cookie, entry.bytes), (expected, !expected));
                expected += 1;
            }
            if taken == 0 {
                thread::yield_now();
            }
        }
        producer.join().expect("the producer ends");
    }

    #[test]
    fn a_ring_that_does_not_fit_its_mapping_is_refused() {
        let sound = Ring { mask: 3, entry_offset: 192, ..Ring::new_zeroed() };
        for broken in [
            Ring { mask: 7, ..sound },
            Ring { mask: 4, ..sound },
            Ring { mask: u32::MAX, ..sound },
            Ring { entry_offset: 193, ..sound },
            Ring { entry_offset: 200, ..sound },
        ] {
            let file = file(&broken, 4);
            let length = file.metadata().expect("a size").len();
            assert!(CompletionRing::map(&file, length).is_err(), "mask {} offset {}", broken.mask, broken.entry_offset);
        }
        assert!(CompletionRing::map(&file(&sound, 4), 64).is_err());
    }
}
