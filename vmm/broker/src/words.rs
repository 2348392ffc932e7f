//! A page of 64-bit words that several processes see.
//!
//! The file is a memfd, sealed against shrinking and growing before anybody maps it: no process that holds it can make another one fault.
//! Every word is an [`AtomicU64`]; there is no other access.
//!
//! This is the crate's only unsafe code. Not here: what the words mean.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Most words in one page: 8 MiB.
const MAX_WORDS: usize = 1 << 20;
const WORD: usize = size_of::<AtomicU64>();

/// Shared memory that could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum SharedError {
    /// A page is empty or larger than 8 MiB.
    #[error("A shared page cannot have {words} words; it has between 1 and {max}", max = MAX_WORDS)]
    Words {
        /// How many were asked for.
        words: usize,
    },
    /// The kernel did not give the file.
    #[error("Cannot make a memory file of {len} bytes named {name:?}; check the memory limit of the process")]
    Create {
        /// Name in `/proc/PID/maps`.
        name: String,
        /// Size in bytes.
        len: u64,
        /// Why.
        source: io::Error,
    },
    /// The file is not what was announced.
    #[error("The shared page has {actual} bytes in place of {wanted}")]
    Size {
        /// Announced.
        wanted: u64,
        /// Found.
        actual: i64,
    },
    /// Somebody could truncate the file and make the reader fault.
    #[error("The shared page is not sealed against shrinking")]
    NotSealed,
    /// The kernel refused an operation on the file.
    #[error("Cannot {operation} the shared page")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// Words that live in a memory file. The mapping ends with the value; the file lives while any process holds it.
#[derive(Debug)]
pub struct SharedWords {
    file: OwnedFd,
    first: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is only handed out as `&AtomicU64`.
unsafe impl Send for SharedWords {}
// SAFETY: as above; atomics may be used from every thread.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Makes a page of `words` zero words. `name` shows up in `/proc/PID/maps`.
    pub fn create(name: &str, words: usize) -> Result<Self, SharedError> {
        let len = byte_len(words)?;
        Self::map(sealed_memfd(name, len)?, words)
    }

    /// Maps a page that another process made, after checking that it has exactly `words` words and cannot shrink.
    pub fn open(file: OwnedFd, words: usize) -> Result<Self, SharedError> {
        let wanted = byte_len(words)?;
        let stat = fstat(&file).map_err(|error| SharedError::Io { operation: "examine", source: error.into() })?;
        if u64::try_from(stat.st_size).ok() != Some(wanted) {
            return Err(SharedError::Size { wanted, actual: stat.st_size });
        }
        let seals = fcntl_get_seals(&file)
            .map_err(|error| SharedError::Io { operation: "read the seals of", source: error.into() })?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(SharedError::NotSealed);
        }
        Self::map(file, words)
    }

    fn map(file: OwnedFd, words: usize) -> Result<Self, SharedError> {
        // SAFETY: the kernel chooses the place, so no memory in use is replaced. The file has at least `words * WORD` bytes and its seals
        // keep it so: no access can fault. Other processes write the bytes, which is why they are only seen as atomics.
        let at = unsafe {
            mmap(std::ptr::null_mut(), words * WORD, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
        }
        .map_err(|error| SharedError::Io { operation: "map", source: error.into() })?;
        let first = NonNull::new(at.cast()).ok_or(SharedError::Words { words })?;
        Ok(Self { file, first, words })
    }

    /// The words.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, holds `words` words while `self` lives, and any bytes are valid atomics.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.words) }
    }

    /// The file, to hand to another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: `map` mapped exactly these bytes, and no reference outlives `self`.
        let unmapped = unsafe { munmap(self.first.as_ptr().cast(), self.words * WORD) };
        debug_assert!(unmapped.is_ok(), "a mapping of ours can be unmapped");
    }
}

/// A memory file of `len` zero bytes that nobody can resize.
pub(crate) fn sealed_memfd(name: &str, len: u64) -> Result<OwnedFd, SharedError> {
    let failed = |error: rustix::io::Errno| SharedError::Create { name: name.to_owned(), len, source: error.into() };
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed)?;
    ftruncate(&file, len).map_err(failed)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(failed)?;
    Ok(file)
}

fn byte_len(words: usize) -> Result<u64, SharedError> {
    if words == 0 || words > MAX_WORDS {
        return Err(SharedError::Words { words });
    }
    Ok((words * WORD) as u64)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    fn second_view(page: &SharedWords) -> SharedWords {
        SharedWords::open(page.file().try_clone_to_owned().unwrap(), page.words().len()).unwrap()
    }

    #[test]
    fn what_one_mapping_stores_another_loads() {
        let page = SharedWords::create("test", 4).unwrap();
        let other = second_view(&page);
        page.words()[3].store(77, Ordering::Relaxed);
        assert_eq!(other.words()[3].load(Ordering::Relaxed), 77);
        assert_eq!(other.words().len(), 4);
    }

    #[test]
    fn counting_through_two_mappings_loses_nothing() {
        let page = SharedWords::create("test", 1).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let view = second_view(&page);
                scope.spawn(move || {
                    for _ in 0..10_000 {
                        view.words()[0].fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(page.words()[0].load(Ordering::Relaxed), 40_000);
    }

    #[test]
    fn a_page_can_be_neither_shrunk_nor_grown_nor_unsealed() {
        let page = SharedWords::create("test", 512).unwrap();
        assert!(ftruncate(page.file(), 0).is_err());
        assert!(ftruncate(page.file(), 1 << 20).is_err());
        assert!(fcntl_add_seals(page.file(), SealFlags::WRITE).is_err());
    }

    #[test]
    fn a_file_of_another_size_is_refused() {
        let page = SharedWords::create("test", 512).unwrap();
        let file = page.file().try_clone_to_owned().unwrap();
        assert!(matches!(SharedWords::open(file, 513), Err(SharedError::Size { wanted: 4104, actual: 4096 })));
    }

    #[test]
    fn a_file_that_can_shrink_is_refused() {
        let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, 8).unwrap();
        assert!(matches!(SharedWords::open(file, 1), Err(SharedError::NotSealed)));
    }

    #[test]
    fn a_socket_in_place_of_a_file_is_refused() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(SharedWords::open(one.into(), 1).is_err());
    }

    #[test]
    fn pages_of_absurd_size_are_refused() {
        assert!(matches!(SharedWords::create("test", 0), Err(SharedError::Words { words: 0 })));
        assert!(matches!(SharedWords::create("test", usize::MAX), Err(SharedError::Words { .. })));
    }
}
