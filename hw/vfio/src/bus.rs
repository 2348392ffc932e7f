//! Bus addresses: which are free.
//!
//! First fit in runs of whole pages. An engine has few mappings at a time, so nothing better is needed. Not here: what is mapped at them.

use std::collections::BTreeMap;

use iommu_addr::{BusAddr, Range};

/// What the IOMMU maps at a time, at least, in bytes.
pub(crate) const PAGE: u64 = 4096;

/// Where message-signalled interrupts are written on x86 (Intel SDM 3A, 12.11): no memory can be mapped there.
const INTERRUPTS: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);

/// The free addresses.
#[derive(Debug)]
pub(crate) struct Bus {
    /// First to last, of each run; never adjacent.
    free: BTreeMap<u64, u64>,
}

impl Bus {
    /// Everything in `usable`, which the kernel says, but for the first MiB, where an address of 0 would be taken for none, and for interrupts.
    pub(crate) fn new(usable: &[(u64, u64)]) -> Self {
        let mut free = BTreeMap::new();
        for &(first, last) in usable {
            let first = first.max(1 << 20).next_multiple_of(PAGE);
            let last = (last.saturating_add(1) & !(PAGE - 1)).saturating_sub(1);
            for (first, last) in [(first, last.min(INTERRUPTS.0 - 1)), (first.max(INTERRUPTS.1 + 1), last)] {
                if first < last {
                    free.insert(first, last);
                }
            }
        }
        Self { free }
    }

    /// Takes addresses for `bytes`, which are whole pages, none above `mask`.
    pub(crate) fn take(&mut self, bytes: u64, mask: u64) -> Option<Range<BusAddr>> {
        let fits = |first: u64, last: u64| first.checked_add(bytes - 1).filter(|end| *end <= last.min(mask));
        let (first, last, end) =
            self.free.iter().find_map(|(first, last)| Some((*first, *last, fits(*first, *last)?)))?;
        self.free.remove(&first);
        if end < last {
            self.free.insert(end + 1, last);
        }
        Range::new(BusAddr(first), BusAddr(end))
    }

    /// Gives them back.
    pub(crate) fn give(&mut self, range: Range<BusAddr>) {
        let (mut first, mut last) = (range.start().0, range.last().0);
        if let Some((before, end)) = self.free.range(..first).next_back().map(|(before, end)| (*before, *end))
            && end + 1 == first
        {
            self.free.remove(&before);
            first = before;
        }
        if let Some(end) = last.checked_add(1).and_then(|next| self.free.remove(&next)) {
            last = end;
        }
        self.free.insert(first, last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bus() -> Bus {
        Bus::new(&[(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)])
    }

    #[test]
    fn nothing_is_taken_twice_and_what_is_given_back_is_whole_again() {
        let mut bus = bus();
        let before = format!("{bus:?}");
        let mut taken: Vec<_> = (1..200).map(|pages| bus.take(pages * PAGE, u64::MAX).unwrap()).collect();
        for (n, one) in taken.iter().enumerate() {
            assert!(taken.iter().skip(n + 1).all(|other| !one.overlaps(*other)), "{one}");
        }
        // In no order.
        while !taken.is_empty() {
            let range = taken.swap_remove(taken.len() * 7 / 11);
            bus.give(range);
        }
        assert_eq!(format!("{bus:?}"), before);
    }

    #[test]
    fn a_function_that_cannot_name_high_addresses_gets_low_ones_or_none() {
        let mut bus = bus();
        let mask = (1 << 28) - 1;
        let most = (1 << 28) - (1 << 20);
        assert!(bus.take(most + PAGE, mask).is_none());
        assert_eq!(bus.take(most, mask).unwrap().last().0, mask);
        assert!(bus.take(PAGE, mask).is_none());
        assert!(bus.take(PAGE, u64::MAX).unwrap().start().0 > mask);
    }

    #[test]
    fn neither_the_first_megabyte_nor_the_interrupts_are_given() {
        let mut bus = Bus::new(&[(0, u64::MAX)]);
        let all: Vec<_> = std::iter::from_fn(|| bus.take(1 << 20, 0xffff_ffff)).collect();
        let touches = |at: u64| all.iter().any(|range| range.holds(BusAddr(at)));
        assert_eq!(all.len(), 4096 - 2);
        assert!(!touches(0) && !touches(0xfee0_0000) && !touches(0xfeef_ffff));
        assert!(touches(1 << 20) && touches(0xfedf_ffff) && touches(0xfef0_0000));
    }
}
