//! Walking two segment lists side by side.

use iommu_addr::{Location, Segment};

use crate::{Memory, MemoryError};

/// An error after some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Memory failed after {bytes} bytes")]
pub struct CopyError {
    /// Bytes moved before.
    pub bytes: u64,
    /// What failed.
    pub source: MemoryError,
}

/// Bytes in a list; saturates, which no list of real memory can reach.
pub fn total_len(segments: &[Segment]) -> u64 {
    segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.len))
}

/// Copies `src` to `dst`, straight. Answers the bytes moved: the shorter total of the two.
pub fn copy_segments(memory: &dyn Memory, dst: &[Segment], src: &[Segment]) -> Result<u64, CopyError> {
    walk(dst, src, |to, from, len| memory.copy(to, from, len))
}

/// Copies `src` to `dst` through `bounce`, which must not be empty. Answers the bytes moved.
pub fn stage_segments(
    memory: &dyn Memory,
    dst: &[Segment],
    src: &[Segment],
    bounce: &mut [u8],
) -> Result<u64, CopyError> {
    walk(dst, src, |to, from, len| {
        let mut done = 0;
        while done < len {
            let step = usize::try_from(len - done).unwrap_or(usize::MAX).min(bounce.len());
            let part = &mut bounce[..step];
            memory.read(offset(from, done, len)?, part)?;
            memory.write(offset(to, done, len)?, part)?;
            done += step as u64;
        }
        Ok(())
    })
}

/// Fills `dst`; the pattern runs on across segments. Answers the bytes filled.
pub fn fill_segments(memory: &dyn Memory, dst: &[Segment], pattern: u64) -> Result<u64, CopyError> {
    let mut bytes = 0;
    for segment in dst {
        // The pattern's phase at this segment: as many bytes in as were filled before it.
        let turned = pattern.rotate_right(u32::try_from(bytes % 8 * 8).unwrap_or(0));
        memory.fill(segment.at, segment.len, turned).map_err(|source| CopyError { bytes, source })?;
        bytes = bytes.saturating_add(segment.len);
    }
    Ok(bytes)
}

fn walk(
    dst: &[Segment],
    src: &[Segment],
    mut step: impl FnMut(Location, Location, u64) -> Result<(), MemoryError>,
) -> Result<u64, CopyError> {
    let (mut to, mut from) = (Cursor::new(dst), Cursor::new(src));
    let mut bytes = 0;
    while let (Some((to_at, to_left)), Some((from_at, from_left))) = (to.peek(), from.peek()) {
        let len = to_left.min(from_left);
        step(to_at, from_at, len).map_err(|source| CopyError { bytes, source })?;
        bytes += len;
        to.advance(len);
        from.advance(len);
    }
    Ok(bytes)
}

fn offset(at: Location, bytes: u64, len: u64) -> Result<Location, MemoryError> {
    at.checked_add(bytes).ok_or(MemoryError { at, len })
}

struct Cursor<'a> {
    segments: &'a [Segment],
    index: usize,
    done: u64,
}

impl<'a> Cursor<'a> {
    fn new(segments: &'a [Segment]) -> Self {
        Self { segments, index: 0, done: 0 }
    }

    fn peek(&self) -> Option<(Location, u64)> {
        let segment = self.segments.get(self.index)?;
        Some((segment.at.checked_add(self.done)?, segment.len - self.done))
    }

    fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        if self.segments.get(self.index).is_some_and(|segment| segment.len == self.done) {
            self.index += 1;
            self.done = 0;
        }
    }
}
