//! The FPGA's kernel: a ChaCha20 stream over memory, a bounded step at a time.
//!
//! The stream is that of RFC 8439 with the block counter starting at 0. Source and destination may be the same bytes; ranges that overlap
//! only in part come out in the order of the steps. Not here: registers, and who may read or write what.

use chacha20::ChaCha20;
use chacha20::cipher::{KeyIvInit, StreamCipher};
use hw_engine::{CopyError, EngineError, Finished, JobId, Memory, Pairs, Segments};

/// Bytes between one read and its write.
const CHUNK: usize = 4096;

/// Bytes that one step goes on for at most, so that other transfers get their turn.
pub(crate) const STEP: u64 = 64 << 10;

/// The longest stream: the block counter has 32 bits, a block 64 bytes.
pub(crate) const LONGEST: u64 = 1 << 38;

/// What the stream is made from.
#[derive(Clone, Copy)]
pub(crate) struct Seed {
    pub(crate) key: [u64; 4],
    pub(crate) nonce: u64,
}

/// A kernel that runs.
pub(crate) struct Kernel {
    cipher: ChaCha20,
    src: Segments,
    dst: Segments,
    done: u64,
}

impl Kernel {
    pub(crate) fn new(seed: Seed, src: &Segments, dst: &Segments) -> Self {
        let mut key = [0; 32];
        for (bytes, word) in key.chunks_exact_mut(8).zip(seed.key) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&seed.nonce.to_le_bytes());
        Self { cipher: ChaCha20::new(&key.into(), &nonce.into()), src: src.clone(), dst: dst.clone(), done: 0 }
    }

    /// Bytes that are through.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    /// Goes on for at most [`STEP`] bytes. `None`: there is more to do.
    pub(crate) fn step(&mut self, memory: &dyn Memory, job: JobId) -> Option<Finished> {
        let mut left = STEP;
        let mut buffer = [0; CHUNK];
        for pair in Pairs::new(&self.dst, &self.src).skip_bytes(self.done).at_most(CHUNK as u64) {
            if pair.len > left {
                return None;
            }
            let bytes = &mut buffer[..usize::try_from(pair.len).unwrap_or(CHUNK)];
            if let Err(source) = memory.read(pair.src, bytes) {
                return Some(Finished::moved(job, Err(CopyError { bytes: self.done, source })));
            }
            if self.cipher.try_apply_keystream(bytes).is_err() {
                let result = Err(EngineError::Device { code: crate::engine::code::STREAM_ENDED });
                return Some(Finished { job, bytes: self.done, result, raised: false, value: 0 });
            }
            if let Err(source) = memory.write(pair.dst, bytes) {
                return Some(Finished::moved(job, Err(CopyError { bytes: self.done, source })));
            }
            self.done = self.done.saturating_add(pair.len);
            left -= pair.len;
        }
        Some(Finished::moved(job, Ok(self.done)))
    }
}
