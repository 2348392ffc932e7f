//! [`ByJob`]: what is kept of transfers under way, in parts, so that threads that submit seldom meet.
//!
//! Not here: what is kept.

use crate::JobId;

/// Names of transfers that belong together: whoever submits takes as many at a time.
pub const BLOCK: u64 = 256;
const PARTS: usize = 16;

/// Away from its neighbours: processors fetch cache lines of 64 bytes in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Apart<T>(pub T);

/// Some of a kind, one of which is for a transfer. Transfers of a block of names have the same.
#[derive(Debug, Default)]
pub struct ByJob<T>([Apart<T>; PARTS]);

impl<T> ByJob<T> {
    /// The one for a transfer.
    pub fn of(&self, job: JobId) -> &T {
        let part = (job.0 / BLOCK) % PARTS as u64;
        // It is less than `PARTS`.
        let Apart(of) = &self.0[part as usize];
        of
    }

    /// Each of them, in the same order always.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|Apart(of)| of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_one_part_and_neighbours_have_others() {
        let parts = ByJob::<u8>::default();
        let at = |job| std::ptr::from_ref(parts.of(JobId(job))) as usize;
        for job in (0..PARTS as u64).map(|block| block * BLOCK).chain([u64::MAX - (BLOCK - 1)]) {
            assert_eq!(at(job), at(job + (BLOCK - 1)));
        }
        assert!(at(0).abs_diff(at(BLOCK)) >= 128);
        let all: Vec<_> = (0..PARTS as u64).map(|block| at(block * BLOCK)).collect();
        assert_eq!(parts.iter().map(|part| std::ptr::from_ref(part) as usize).collect::<Vec<_>>(), all);
    }
}
