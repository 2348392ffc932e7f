//! A thread's own cache of translations.
//!
//! Direct-mapped, one cache line an entry; runs of at least 2 MiB are filed by 2 MiB block, smaller ones by page, and a lookup looks at both places.
//! Nothing ever invalidates an entry: an entry is only a proposal of which pin to take, and the pin fails once the mapping is going or gone. So threads
//! share nothing here, and an UNMAP need not reach other threads.
//!
//! Not here: pins, domains.

use crate::limits::PAGE_SHIFT;
use crate::record::Run;
use iommu_addr::{Addr, Iova};

const LARGE_SHIFT: u32 = 21;

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Entry(Option<Run>);

const _: () = assert!(size_of::<Entry>() == 64);

/// See the module. One for each thread that translates; serves any number of domains.
#[derive(Debug)]
pub struct Iotlb {
    entries: Box<[Entry]>,
    hits: u64,
    misses: u64,
}

impl Iotlb {
    /// Entries of [`Iotlb::default`].
    pub const DEFAULT_ENTRIES: usize = 1024;

    /// At least `entries` entries of 64 bytes, rounded up to a power of two, at most 2^20.
    pub fn new(entries: usize) -> Self {
        let len = entries.clamp(1, 1 << 20).next_power_of_two();
        Self { entries: vec![Entry(None); len].into_boxed_slice(), hits: 0, misses: 0 }
    }

    /// Lookups that were answered from here.
    pub fn hits(&self) -> u64 {
        self.hits
    }

    /// Lookups that were not.
    pub fn misses(&self) -> u64 {
        self.misses
    }

    /// A remembered run that holds `at` of `domain`; still to be pinned.
    #[inline]
    pub(crate) fn find(&self, domain: u64, at: Iova) -> Option<&Run> {
        let fits = |run: &&Run| run.domain == domain && run.range.holds(at);
        let small = self.entry(domain, at, PAGE_SHIFT).0.as_ref().filter(fits);
        small.or_else(|| self.entry(domain, at, LARGE_SHIFT).0.as_ref().filter(fits))
    }

    /// Remembers a run for lookups at and near `at`.
    pub(crate) fn fill(&mut self, at: Iova, run: &Run) {
        let shift = if run.range.span() >> LARGE_SHIFT == 0 { PAGE_SHIFT } else { LARGE_SHIFT };
        let slot = self.slot(run.domain, at, shift);
        if let Some(entry) = self.entries.get_mut(slot) {
            *entry = Entry(Some(*run));
        }
    }

    #[inline]
    pub(crate) fn count_hit(&mut self) {
        self.hits = self.hits.wrapping_add(1);
    }

    pub(crate) fn count_miss(&mut self) {
        self.misses = self.misses.wrapping_add(1);
    }

    #[inline]
    #[allow(clippy::indexing_slicing, reason = "masked by the length, a power of two")]
    fn entry(&self, domain: u64, at: Iova, shift: u32) -> &Entry {
        &self.entries[self.slot(domain, at, shift)]
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "masked anyway")]
    fn slot(&self, domain: u64, at: Iova, shift: u32) -> usize {
        let key = at.raw().checked_shr(shift).unwrap_or(0) ^ domain.rotate_right(12) ^ u64::from(shift);
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize & self.entries.len().wrapping_sub(1)
    }
}

impl Default for Iotlb {
    fn default() -> Self {
        Self::new(Self::DEFAULT_ENTRIES)
    }
}
