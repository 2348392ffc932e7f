//! I/O addresses of one domain.

use std::collections::BTreeMap;

/// Ranges in use, by first address, with their last address. Searches on from the last range given out.
#[derive(Debug)]
pub(super) struct IovaSpace {
    first: u64,
    last: u64,
    cursor: u64,
    used: BTreeMap<u64, u64>,
}

impl IovaSpace {
    pub(super) fn new(first: u64, last: u64) -> Self {
        Self { first, last, cursor: first, used: BTreeMap::new() }
    }

    /// Takes `len` bytes, aligned to `align`, a power of two.
    pub(super) fn take(&mut self, len: u64, align: u64) -> Option<u64> {
        let start = self.search(self.cursor, len, align).or_else(|| self.search(self.first, len, align))?;
        let last = start + (len - 1);
        self.used.insert(start, last);
        self.cursor = last.saturating_add(1);
        Some(start)
    }

    pub(super) fn give(&mut self, start: u64) {
        self.used.remove(&start);
    }

    fn search(&self, from: u64, len: u64, align: u64) -> Option<u64> {
        let span = len.checked_sub(1)?;
        let mut start = from.checked_next_multiple_of(align)?;
        if let Some((_, last)) = self.used.range(..=start).next_back()
            && *last >= start
        {
            start = last.checked_add(1)?.checked_next_multiple_of(align)?;
        }
        for (&next, &last) in self.used.range(start..) {
            if start.checked_add(span)? < next {
                break;
            }
            start = last.checked_add(1)?.checked_next_multiple_of(align)?;
        }
        (start.checked_add(span)? <= self.last).then_some(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_never_overlap_and_freed_ones_are_found_again() {
        let mut space = IovaSpace::new(0x1000, 0x8fff);
        let all: Vec<_> = std::iter::from_fn(|| space.take(0x1000, 0x1000)).collect();
        assert_eq!(all, (1..9).map(|page| page * 0x1000).collect::<Vec<_>>());
        space.give(0x3000);
        space.give(0x5000);
        assert_eq!(space.take(0x2000, 0x1000), None);
        assert_eq!(space.take(0x1000, 0x1000), Some(0x3000));
        space.give(0x4000);
        assert_eq!(space.take(0x2000, 0x1000), Some(0x4000));
    }

    #[test]
    fn alignment_and_the_end_of_the_space_are_kept() {
        let mut space = IovaSpace::new(0x1000, u64::MAX);
        assert_eq!(space.take(0x1000, 0x10_0000), Some(0x10_0000));
        assert_eq!(space.take(u64::MAX, 0x1000), None);
        assert_eq!(space.take(0x1000, 0x1000), Some(0x10_1000));
    }
}
