//! The memory of one slice of a device: one sealed memory file.
//!
//! Whoever holds the descriptor may use the memory; nobody can resize the file. Not here: who may hold it, and mapping it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, fallocate};

use crate::words::{SharedError, sealed_memfd};

/// A memory file of fixed size.
#[derive(Debug)]
pub struct MemoryFile {
    file: OwnedFd,
    len: u64,
}

impl MemoryFile {
    /// Makes a file of `len` zero bytes; memory is taken when it is first written. `name` shows up in `/proc/PID/maps`.
    pub fn create(name: &str, len: u64) -> Result<Self, SharedError> {
        Ok(Self { file: sealed_memfd(name, len)?, len })
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file has no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Gives every byte back to the host: whoever looks next, through an old mapping or a new one, sees zeros.
    ///
    /// Blocks while the kernel frees the pages: some 50 ms a GiB. Only call it when nobody writes the file any more.
    pub fn scrub(&self) -> Result<(), SharedError> {
        if self.len == 0 {
            return Ok(());
        }
        fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, self.len)
            .map_err(|error| SharedError::Io { operation: "scrub", source: error.into() })
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{SealFlags, fcntl_add_seals, fstat, ftruncate};
    use rustix::io::{pread, pwrite};

    use super::*;

    #[test]
    fn scrubbing_leaves_zeros_and_the_size_and_frees_the_memory() {
        let memory = MemoryFile::create("test", 64 << 10).unwrap();
        assert_eq!(pwrite(&memory, &[0xaa; 4096], 60 << 10).unwrap(), 4096);
        assert!(fstat(&memory).unwrap().st_blocks > 0);
        memory.scrub().unwrap();
        let mut read = [0xff_u8; 4096];
        assert_eq!(pread(&memory, &mut read, 60 << 10).unwrap(), 4096);
        assert_eq!(read, [0; 4096]);
        let stat = fstat(&memory).unwrap();
        assert_eq!((stat.st_size, stat.st_blocks), (64 << 10, 0));
    }

    #[test]
    fn a_holder_can_neither_resize_the_file_nor_seal_it_against_scrubbing() {
        let memory = MemoryFile::create("test", 4096).unwrap();
        assert!(ftruncate(&memory, 0).is_err());
        assert!(fcntl_add_seals(&memory, SealFlags::FUTURE_WRITE).is_err());
        memory.scrub().unwrap();
    }
}
