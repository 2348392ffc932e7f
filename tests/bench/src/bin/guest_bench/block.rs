//! Reads from a block device past the page cache, through io_uring.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use io_uring::{IoUring, opcode, types};

use super::{Rival, SIZE};

/// Reads of one call of [`Rival::some`].
const SOME: u64 = 128;

pub(super) struct Block {
    ring: IoUring,
    file: File,
    /// One more than there are reads at a time, so that each can begin at a multiple of the size.
    bytes: Vec<u8>,
    depth: usize,
}

impl Block {
    pub(super) fn open(path: &Path, depth: usize) -> Result<Self> {
        let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path);
        let file = file.with_context(|| format!("Cannot open {}", path.display()))?;
        let ring = IoUring::new(64).context("Cannot make an io_uring")?;
        Ok(Self { ring, file, bytes: vec![0; SIZE as usize * (depth + 1)], depth })
    }
}

impl Rival for Block {
    fn some(&mut self) -> Result<u64> {
        let skip = self.bytes.as_ptr().align_offset(SIZE as usize);
        let (mut sent, mut done) = (0_u64, 0_u64);
        while done < SOME {
            while sent < SOME && sent - done < self.depth as u64 {
                let place = usize::try_from(sent)? % self.depth;
                let buffer = self.bytes[skip + place * SIZE as usize..].as_mut_ptr();
                let read = opcode::Read::new(types::Fd(self.file.as_raw_fd()), buffer, SIZE)
                    .offset(sent % 1024 * u64::from(SIZE))
                    .build();
                // SAFETY: the file and the bytes live as long as the ring, which this function leaves only with every read ended or with the whole
                // program; nobody looks at the bytes.
                unsafe { self.ring.submission().push(&read) }.context("The ring has room for every read")?;
                sent += 1;
            }
            self.ring.submit_and_wait(1)?;
            for ended in self.ring.completion() {
                ensure!(ended.result() == i32::try_from(SIZE)?, "A read ended with {}", ended.result());
                done += 1;
            }
        }
        Ok(done)
    }
}
