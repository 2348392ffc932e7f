//! [`Side`]: what the engine does for its owner's sake, and waits for: bytes read and written by the processor, and fills with more
//! than one byte.
//!
//! Not here: transfers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use crate::driver::CudaError;
use crate::gpu::{Gpu, Piece, Stream};
use crate::pinned::Pinned;
use crate::slice::Slice;

/// Bytes that are moved at a time.
const BOUNCE: usize = 1 << 20;
/// In front of them: the word that says how far the stream is.
const FRONT: usize = 4096;
/// How often it is asked whether the context is still good.
const LOOK: Duration = Duration::from_millis(1);

/// A stream with a little memory on both sides of it.
#[derive(Debug)]
pub(crate) struct Side {
    stream: Stream,
    pinned: Pinned,
    /// Patterns, on the GPU: there they are copied from to anywhere.
    scratch: Slice,
    issued: u32,
}

impl Side {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let scratch = Slice::new(gpu, Slice::GRANULE)?;
        Ok(Self { stream: Stream::new(gpu)?, pinned: Pinned::new(gpu, FRONT + BOUNCE)?, scratch, issued: 0 })
    }

    fn bounce(&self) -> u64 {
        self.pinned.address() + FRONT as u64
    }

    fn bytes(&mut self, len: usize) -> &mut [u8] {
        &mut self.pinned.bytes()[FRONT..FRONT + len]
    }

    /// Does something. After an error see [`Side::is_quiet`].
    pub(crate) fn run(&mut self, what: impl FnOnce(&mut Self) -> Result<(), CudaError>) -> Result<(), CudaError> {
        what(self).inspect_err(|_| drop(self.wait()))
    }

    /// Whether nothing is under way.
    pub(crate) fn is_quiet(&self) -> bool {
        self.pinned.word(0).load(Ordering::Acquire) == self.issued || matches!(self.stream.query(), Ok(true))
    }

    /// Waits until everything has ended.
    fn wait(&mut self) -> Result<(), CudaError> {
        self.issued = self.issued.wrapping_add(1);
        let word: *const AtomicU32 = self.pinned.word(0);
        // SAFETY: the word is registered, and lives as long as the stream.
        unsafe { self.stream.write(word, self.issued) }?;
        let mut looked = Instant::now();
        while self.pinned.word(0).load(Ordering::Acquire) != self.issued {
            if looked.elapsed() > LOOK {
                self.stream.query()?;
                looked = Instant::now();
            }
            yield_now();
        }
        Ok(())
    }

    /// Reads memory of a GPU.
    ///
    /// # Safety
    /// It stays memory of a GPU that this one reaches.
    pub(crate) unsafe fn read(&mut self, from: u64, into: &mut [u8]) -> Result<(), CudaError> {
        for (at, part) in (from..).step_by(BOUNCE).zip(into.chunks_mut(BOUNCE)) {
            let piece = Piece { dst: self.bounce(), src: at, len: part.len() as u64 };
            // SAFETY: as the caller promises; the other end is this side's.
            unsafe { self.stream.copy(piece) }?;
            self.wait()?;
            part.copy_from_slice(self.bytes(part.len()));
        }
        Ok(())
    }

    /// Writes memory of a GPU.
    ///
    /// # Safety
    /// As for [`Side::read`].
    pub(crate) unsafe fn write(&mut self, to: u64, from: &[u8]) -> Result<(), CudaError> {
        for (at, part) in (to..).step_by(BOUNCE).zip(from.chunks(BOUNCE)) {
            self.bytes(part.len()).copy_from_slice(part);
            let piece = Piece { dst: at, src: self.bounce(), len: part.len() as u64 };
            // SAFETY: as the caller promises; the other end is this side's.
            piece.parts().try_for_each(|(part, _)| unsafe { self.stream.copy_in(part) })?;
            self.wait()?;
        }
        Ok(())
    }

    /// Copies between places that overlap, as if through a buffer.
    ///
    /// # Safety
    /// As for [`Side::read`], for both.
    pub(crate) unsafe fn shift(&mut self, Piece { dst, src, len }: Piece) -> Result<(), CudaError> {
        let step = BOUNCE as u64;
        let count = len.div_ceil(step);
        for n in 0..count {
            // Towards higher addresses the last bytes go first.
            let at = step * if dst > src { count - 1 - n } else { n };
            let (bounce, now) = (self.bounce(), step.min(len - at));
            // SAFETY: as the caller promises; the other end is this side's.
            unsafe { self.stream.copy(Piece { dst: bounce, src: src + at, len: now }) }?;
            // SAFETY: as above.
            unsafe { self.stream.copy(Piece { dst: dst + at, src: bounce, len: now }) }?;
        }
        self.wait()
    }

    /// Fills places with a pattern that runs on from one to the next.
    ///
    /// # Safety
    /// They stay memory of a GPU that this one reaches, or registered memory of this process.
    pub(crate) unsafe fn fill(&mut self, places: &[(u64, u64)], pattern: u64) -> Result<(), CudaError> {
        let longest = places.iter().map(|(_, len)| *len).max().unwrap_or(0);
        // One word more than is copied at once, to begin at any byte of the pattern.
        let len = (longest.min((BOUNCE - 8) as u64).next_multiple_of(8) + 8).min(BOUNCE as u64);
        let bytes = usize::try_from(len).unwrap_or(BOUNCE);
        self.bytes(bytes).chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&pattern.to_le_bytes()));
        // SAFETY: both ends are this side's.
        unsafe { self.stream.copy_in(Piece { dst: self.scratch.base(), src: self.bounce(), len }) }?;
        let mut phase = 0;
        for (start, of) in places {
            let mut done = 0;
            while done < *of {
                let now = (of - done).min(len - 8);
                let piece = Piece { dst: start + done, src: self.scratch.base() + phase, len: now };
                // SAFETY: as the caller promises; the other end is this side's.
                unsafe { self.stream.copy(piece) }?;
                done += now;
                phase = (phase + now) % 8;
            }
        }
        self.wait()
    }
}
