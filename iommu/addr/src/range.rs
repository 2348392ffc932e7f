//! A non-empty range of one address space, with an inclusive last address.

use core::fmt;

/// An address of one space: a 64-bit number that only checked functions may change.
pub trait Addr: Copy + Ord + fmt::Debug {
    /// The number itself, for tables and the wire.
    fn raw(self) -> u64;
    /// Gives a number the meaning of this space.
    fn from_raw(raw: u64) -> Self;
    /// The address `bytes` further on, or `None` past the end of the 64-bit space.
    fn checked_add(self, bytes: u64) -> Option<Self> {
        self.raw().checked_add(bytes).map(Self::from_raw)
    }
    /// How many bytes lie between `origin` and `self`, or `None` if `self` lies before it.
    fn offset_from(self, origin: Self) -> Option<u64> {
        self.raw().checked_sub(origin.raw())
    }
}

/// Addresses `start..=last`; never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Range<A> {
    start: A,
    last: A,
}

impl<A: Addr> Range<A> {
    /// `start..=last`, or `None` if `last` lies before `start`.
    pub fn new(start: A, last: A) -> Option<Self> {
        (start <= last).then_some(Self { start, last })
    }

    /// `len` bytes from `start`, or `None` if `len` is 0 or the range would pass the end of the 64-bit space.
    pub fn with_len(start: A, len: u64) -> Option<Self> {
        let last = start.checked_add(len.checked_sub(1)?)?;
        Some(Self { start, last })
    }

    /// The whole 64-bit space.
    pub fn all() -> Self {
        Self { start: A::from_raw(0), last: A::from_raw(u64::MAX) }
    }

    /// First address.
    pub fn start(self) -> A {
        self.start
    }

    /// Last address, itself part of the range.
    pub fn last(self) -> A {
        self.last
    }

    /// Length in bytes, or `None` for the whole 64-bit space, whose length is 2^64.
    pub fn len(self) -> Option<u64> {
        self.span().checked_add(1)
    }

    /// Always false: a range holds at least one address.
    pub fn is_empty(self) -> bool {
        false
    }

    /// Length in bytes less one: always representable.
    pub fn span(self) -> u64 {
        self.last.raw().wrapping_sub(self.start.raw())
    }

    /// Whether `at` lies in the range.
    pub fn holds(self, at: A) -> bool {
        self.start <= at && at <= self.last
    }

    /// Whether all of `other` lies in the range.
    pub fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.last <= self.last
    }

    /// Whether the two ranges share an address.
    pub fn overlaps(self, other: Self) -> bool {
        self.start <= other.last && other.start <= self.last
    }

    /// The addresses both ranges hold.
    pub fn intersection(self, other: Self) -> Option<Self> {
        Self::new(self.start.max(other.start), self.last.min(other.last))
    }

    /// Whether both ends lie on multiples of `align`, a power of two.
    pub fn is_aligned(self, align: u64) -> bool {
        let mask = align.wrapping_sub(1);
        self.start.raw() & mask == 0 && self.last.raw() & mask == mask
    }
}

impl<A: Addr> fmt::Display for Range<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..={:#x}", self.start.raw(), self.last.raw())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Iova;
    use proptest::prelude::*;

    fn r(start: u64, last: u64) -> Range<Iova> {
        Range::new(Iova(start), Iova(last)).expect("start <= last")
    }

    #[test]
    fn last_page_of_the_space_is_a_range() {
        let top = Range::with_len(Iova(u64::MAX - 0xfff), 0x1000).expect("ends at the last address");
        assert_eq!(top.last(), Iova(u64::MAX));
        assert_eq!(top.len(), Some(0x1000));
        assert!(top.is_aligned(0x1000));
    }

    #[test]
    fn empty_and_wrapping_ranges_do_not_exist() {
        assert_eq!(Range::with_len(Iova(5), 0), None);
        assert_eq!(Range::with_len(Iova(u64::MAX), 2), None);
        assert_eq!(Range::new(Iova(6), Iova(5)), None);
    }

    #[test]
    fn whole_space_has_no_64_bit_length() {
        assert_eq!(Range::<Iova>::all().len(), None);
        assert_eq!(Range::<Iova>::all().span(), u64::MAX);
    }

    proptest! {
        #[test]
        fn overlap_is_a_shared_address(a in 0u64..40, b in 0u64..40, c in 0u64..40, d in 0u64..40) {
            let (x, y) = (r(a.min(b), a.max(b)), r(c.min(d), c.max(d)));
            let shared = (0..40).any(|i| x.holds(Iova(i)) && y.holds(Iova(i)));
            prop_assert_eq!(x.overlaps(y), shared);
            prop_assert_eq!(x.intersection(y).is_some(), shared);
            prop_assert_eq!(x.contains(y), (c.min(d)..=c.max(d)).all(|i| x.holds(Iova(i))));
        }
    }
}
