//! Which parts of an endpoint's memory are free: extents, best fit, merged when they touch again.
//!
//! Not here: whose the rest is.

use std::collections::BTreeMap;

/// Free extents of one endpoint's memory.
#[derive(Debug)]
pub(crate) struct Extents {
    /// Offset to length; no two touch.
    free: BTreeMap<u64, u64>,
}

impl Extents {
    /// All of `len` bytes is free.
    pub(crate) fn new(len: u64) -> Self {
        Self { free: (len > 0).then_some((0, len)).into_iter().collect() }
    }

    /// Bytes free.
    pub(crate) fn free_len(&self) -> u64 {
        self.free.values().fold(0, |sum, len| sum.saturating_add(*len))
    }

    /// Takes `len` bytes in one piece, from the smallest extent that has them. `len` is a multiple of the granule.
    pub(crate) fn alloc(&mut self, len: u64) -> Option<u64> {
        let (&offset, &size) = self.free.iter().filter(|(_, size)| **size >= len).min_by_key(|(_, size)| **size)?;
        self.free.remove(&offset);
        let rest = size.saturating_sub(len);
        if rest > 0 {
            self.free.insert(offset.checked_add(len)?, rest);
        }
        Some(offset)
    }

    /// Gives back what [`Extents::alloc`] gave.
    pub(crate) fn release(&mut self, mut offset: u64, mut len: u64) {
        if let Some((&before, &size)) = self.free.range(..offset).next_back()
            && before.checked_add(size) == Some(offset)
        {
            self.free.remove(&before);
            offset = before;
            len = len.saturating_add(size);
        }
        if let Some(end) = offset.checked_add(len)
            && let Some(size) = self.free.remove(&end)
        {
            len = len.saturating_add(size);
        }
        self.free.insert(offset, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn smallest_hole_that_fits_is_taken() {
        let mut extents = Extents::new(10);
        let (a, _b, c, _d) = (extents.alloc(3), extents.alloc(1), extents.alloc(2), extents.alloc(1));
        extents.release(a.expect("fits"), 3);
        extents.release(c.expect("fits"), 2);
        assert_eq!(extents.alloc(2), c);
        assert_eq!(extents.alloc(4), None, "nothing that long in one piece");
        assert_eq!(extents.alloc(3), a);
        assert_eq!(extents.free_len(), 3);
    }

    proptest! {
        #[test]
        fn never_gives_twice_and_everything_comes_back(steps in proptest::collection::vec((0u64..9, any::<bool>()), 1..80)) {
            let mut extents = Extents::new(64);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (number, take) in steps {
                if take {
                    let len = number + 1;
                    if let Some(at) = extents.alloc(len) {
                        prop_assert!(at + len <= 64);
                        prop_assert!(held.iter().all(|(other, size)| at + len <= *other || other + size <= at));
                        held.push((at, len));
                    }
                } else if !held.is_empty() {
                    let (at, len) = held.swap_remove(number as usize % held.len());
                    extents.release(at, len);
                }
                prop_assert_eq!(extents.free_len() + held.iter().map(|(_, len)| len).sum::<u64>(), 64);
            }
            for (at, len) in held {
                extents.release(at, len);
            }
            prop_assert_eq!(extents.alloc(64), Some(0), "one extent again");
        }
    }
}
