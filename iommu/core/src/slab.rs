//! Where records live: a tenant's numbered places, reachable without a lock and never moved.
//!
//! A fixed directory of chunks; a chunk comes into being when its first place is needed and stays as long as the tenant. Free places form a list
//! through the records themselves. Because all domains of a tenant draw from one slab, the memory is bounded by the tenant's segment limit however
//! domains come and go, and a place that served one domain may next serve another: a record says whom it serves.
//!
//! Not here: what a record means, when it is free.

use crate::record::Record;
use std::sync::OnceLock;

#[cfg(not(loom))]
const CHUNK_SHIFT: u32 = 12;
#[cfg(loom)]
const CHUNK_SHIFT: u32 = 1;
const CHUNK: u32 = 1 << CHUNK_SHIFT;
/// Places beyond the limit, for those that were used up: a place that has seen every generation serves no more.
const SPARE: u32 = CHUNK;

/// The places.
#[derive(Debug)]
pub(crate) struct Slab {
    chunks: Box<[OnceLock<Box<[Record]>>]>,
    nowhere: Record,
}

/// Which places are free. Kept beside the slab, under a lock.
#[derive(Debug, Default)]
pub(crate) struct FreeList {
    /// First free place, plus one; 0 if none.
    first: u64,
    /// Places from here on were never used.
    fresh: u32,
}

impl Slab {
    /// Room for `limit` records.
    pub(crate) fn new(limit: u32) -> Self {
        let chunks = limit.saturating_add(SPARE).div_ceil(CHUNK);
        Self { chunks: (0..chunks).map(|_| OnceLock::new()).collect(), nowhere: Record::new() }
    }

    /// The record at `place`; for a place that was never handed out one that holds nothing.
    #[inline]
    pub(crate) fn at(&self, place: u32) -> &Record {
        let chunk = self.chunks.get((place >> CHUNK_SHIFT) as usize).and_then(OnceLock::get);
        chunk.and_then(|records| records.get((place & (CHUNK - 1)) as usize)).unwrap_or(&self.nowhere)
    }

    /// A free place, or `None` if every place is taken or used up.
    pub(crate) fn allocate(&self, free: &mut FreeList) -> Option<u32> {
        if let Some(place) = free.first.checked_sub(1).and_then(|place| u32::try_from(place).ok()) {
            free.first = self.at(place).link();
            return Some(place);
        }
        let place = free.fresh;
        let chunk = self.chunks.get((place >> CHUNK_SHIFT) as usize)?;
        chunk.get_or_init(|| (0..CHUNK).map(|_| Record::new()).collect());
        free.fresh = place.checked_add(1)?;
        Some(place)
    }

    /// Takes a place back, whose word must be free. The generation has moved on; when there is none left the place is used up.
    pub(crate) fn free(&self, free: &mut FreeList, place: u32) {
        let record = self.at(place);
        if record.word.generation() < u32::MAX {
            record.set_link(free.first);
            free.first = u64::from(place).saturating_add(1);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn places_are_distinct_reused_and_end_at_the_limit() {
        let slab = Slab::new(3);
        let mut free = FreeList::default();
        let all: Vec<u32> = std::iter::from_fn(|| slab.allocate(&mut free)).collect();
        assert_eq!(all.len(), 2 * CHUNK as usize, "whole chunks");
        assert!(all.iter().enumerate().all(|(i, place)| i == *place as usize));
        slab.free(&mut free, 7);
        slab.free(&mut free, 4099);
        assert_eq!(slab.allocate(&mut free), Some(4099));
        assert_eq!(slab.allocate(&mut free), Some(7));
        assert_eq!(slab.allocate(&mut free), None);
    }

    #[test]
    fn place_that_has_seen_every_generation_serves_no_more() {
        let slab = Slab::new(1);
        let mut free = FreeList::default();
        let place = slab.allocate(&mut free).expect("room");
        slab.at(place).word.set_generation(u32::MAX - 1);
        slab.at(place).word.open();
        assert!(slab.at(place).word.close());
        slab.free(&mut free, place);
        assert_ne!(slab.allocate(&mut free), Some(place));
    }
}
