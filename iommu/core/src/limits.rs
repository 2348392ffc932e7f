//! How much one tenant may have, and exact counts of what it has.
//!
//! Counts are taken before the thing exists and given back when its drain has ended, so the memory behind this crate is bounded by the limits at
//! every moment: a segment costs 64 bytes of record, kept for the tenant's next one, a mapping about 60 more, a piece 32 bytes, a domain 64 bytes for
//! each right that a pair of the tenant's endpoints can have and 2.5 KiB to remember what was removed. The index takes 16 to 32 bytes for each segment of
//! the limit from the start.
//!
//! Not here: whose limits these are, where they are configured.

use crate::sync::{AtomicU32, Ordering};
use iommu_addr::{Iova, Range};
// Not one of the model checker's: what a limit is changes nothing that it is to check.
use std::sync::atomic::AtomicU32 as Bound;

/// Bytes of the smallest mapping; every mapping is a multiple of it in place and size.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;
pub(crate) const PAGE_SHIFT: u32 = 12;
/// Most segments that [`Limits`] may ask for.
pub const MAX_SEGMENTS: u32 = 1 << 28;
/// Most endpoints a tenant may have.
pub const MAX_ENDPOINTS: usize = 64;

/// What one tenant may have at a time, all its domains together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Domains, draining ones included.
    pub domains: u32,
    /// Mappings, draining ones included.
    pub mappings: u32,
    /// Runs of consecutive memory in those mappings, at most [`MAX_SEGMENTS`]. Segments of one mapping that follow one another in memory count once.
    pub segments: u32,
    /// Runs held by running translations, beyond the first two of each translation, which are free.
    pub pieces: u32,
    /// Pages in mappings that are no buffer's, each counted as often as it is mapped.
    pub pages: u32,
    /// Where mappings may lie; page-aligned. May be the whole space.
    pub iova: Range<Iova>,
}

/// What one tenant has now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Domains, draining ones included.
    pub domains: u32,
    /// Mappings, draining ones included.
    pub mappings: u32,
    /// Segments of those mappings.
    pub segments: u32,
    /// Pieces of running translations.
    pub pieces: u32,
    /// Pages of mappings that are no buffer's.
    pub pages: u32,
}

/// One counted thing.
#[derive(Debug)]
pub(crate) struct Quota {
    limit: Bound,
    used: AtomicU32,
}

impl Quota {
    pub(crate) fn new(limit: u32) -> Self {
        Self { limit: Bound::new(limit), used: AtomicU32::new(0) }
    }

    pub(crate) fn limit(&self) -> u32 {
        self.limit.load(Ordering::Relaxed)
    }

    /// From now on no more than `limit`; what is beyond it already stays.
    pub(crate) fn set_limit(&self, limit: u32) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    pub(crate) fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes `count`, all or nothing.
    pub(crate) fn take(&self, count: u32) -> bool {
        let more = |used: u32| used.checked_add(count).filter(|sum| *sum <= self.limit());
        self.used.fetch_update(Ordering::AcqRel, Ordering::Relaxed, more).is_ok()
    }

    /// Gives back `count` that were taken.
    pub(crate) fn give(&self, count: u32) {
        self.used.fetch_sub(count, Ordering::AcqRel);
    }
}

/// Every counted thing of a tenant.
#[derive(Debug)]
pub(crate) struct Quotas {
    pub(crate) domains: Quota,
    pub(crate) mappings: Quota,
    pub(crate) segments: Quota,
    pub(crate) pieces: Quota,
    pub(crate) pages: Quota,
}

impl Quotas {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            domains: Quota::new(limits.domains),
            mappings: Quota::new(limits.mappings),
            segments: Quota::new(limits.segments),
            pieces: Quota::new(limits.pieces),
            pages: Quota::new(limits.pages),
        }
    }

    /// `most_segments` is what there are records for.
    pub(crate) fn set(&self, limits: &Limits, most_segments: u32) {
        let Limits { domains, mappings, segments, pieces, pages, iova: _ } = *limits;
        self.domains.set_limit(domains);
        self.mappings.set_limit(mappings);
        self.segments.set_limit(segments.min(most_segments));
        self.pieces.set_limit(pieces);
        self.pages.set_limit(pages);
    }

    pub(crate) fn usage(&self) -> Usage {
        Usage {
            domains: self.domains.used(),
            mappings: self.mappings.used(),
            segments: self.segments.used(),
            pieces: self.pieces.used(),
            pages: self.pages.used(),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn quota_is_all_or_nothing_up_to_the_limit() {
        let quota = Quota::new(3);
        assert!(quota.take(2));
        assert!(!quota.take(2));
        assert!(!quota.take(u32::MAX), "the sum would wrap");
        assert!(quota.take(1));
        assert!(!quota.take(1));
        quota.give(3);
        assert_eq!(quota.used(), 0);
    }

    #[test]
    fn a_lower_limit_takes_nothing_away() {
        let quota = Quota::new(3);
        assert!(quota.take(3));
        quota.set_limit(1);
        assert!(!quota.take(1));
        quota.give(2);
        assert_eq!(quota.used(), 1);
        assert!(!quota.take(1));
        quota.set_limit(2);
        assert!(quota.take(1));
    }
}
