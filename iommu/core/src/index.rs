//! The index: from an address to its record with two or three memory accesses, read by every thread without a lock.
//!
//! One hash table for all domains of a tenant. A run of 8^k to 8^(k+1) pages is of **class** k and is entered once for each block of 8^k pages that it
//! touches, so at most nine times, whatever its size: there are no entries for single pages of large runs, nothing to split or merge, and memory is
//! in proportion to the number of runs. A block has room for at most two runs of its class. A lookup asks once for each class that its domain uses.
//!
//! The index is only a **hint**. What it finds is checked against the record and then by the pin; what it does not find is looked for in the table,
//! under its lock. So entries may be missing (a full neighbourhood, an entry that moves while it is looked for) or stale, and writers need not wait for
//! readers. All loops are bounded, and the hash is keyed, so that a guest cannot choose addresses which collide.
//!
//! Slots are linear-probed and deletion moves later entries back, so that there are no tombstones. Four blocks that follow one another have homes
//! that follow one another, so that whoever walks through memory meets a new cache line only now and then.
//!
//! Not here: what is true ([`crate::table`]).

use crate::limits::PAGE_SHIFT;
use crate::record::Run;
use crate::slab::Slab;
use crate::sync::{AtomicU64, Ordering};
use iommu_addr::{Addr, Iova, Range};
#[cfg(not(loom))]
use std::hash::{BuildHasher, RandomState};
use std::hint::black_box;

/// Classes that exist: the whole space is 2^52 pages.
pub(crate) const CLASSES: usize = 18;
/// Slots a lookup tries for one class.
const PROBES: usize = 64;
/// Blocks that follow one another and have homes that do, as a power of two.
const RUN_SHIFT: u32 = 2;
const RUN_MASK: u32 = (1 << RUN_SHIFT) - 1;
/// Addresses in a group of [`Index::guess`].
pub(crate) const GROUP: usize = 32;
/// Slots of the smallest index.
const MIN_SLOTS: usize = if cfg!(loom) { 4 } else { 64 };

/// The class of a run of addresses.
pub(crate) fn class(range: Range<Iova>) -> u32 {
    let pages = (range.span() >> PAGE_SHIFT).saturating_add(1);
    pages.ilog2() / 3
}

/// The numbers of the blocks that a run of `class` touches.
fn blocks(range: Range<Iova>, class: u32) -> std::ops::RangeInclusive<u64> {
    block(range.start(), class)..=block(range.last(), class)
}

fn block(at: Iova, class: u32) -> u64 {
    let shift = class.saturating_mul(3).saturating_add(PAGE_SHIFT);
    at.raw().checked_shr(shift).unwrap_or(0)
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Index {
    slots: Box<[AtomicU64]>,
    /// 32 minus the number of bits in a slot's number.
    shift: u32,
    secret: [u64; 2],
}

impl Index {
    /// An index for `segments` runs, twice as large.
    pub(crate) fn new(segments: u32) -> Self {
        let len = (segments as usize).saturating_mul(2).next_power_of_two().max(MIN_SLOTS);
        Self {
            slots: (0..len).map(|_| AtomicU64::new(0)).collect(),
            shift: 32_u32.saturating_sub(len.ilog2()),
            secret: secret(),
        }
    }

    /// The most entries it takes: at three quarters, runs of entries stay short.
    pub(crate) fn room(&self) -> usize {
        self.slots.len().saturating_sub(self.slots.len() / 4)
    }

    /// Looks for the run that holds `at` of `domain`, in the classes whose bit is set.
    #[inline]
    pub(crate) fn find(&self, slab: &Slab, domain: u64, classes: u32, at: Iova) -> Option<Run> {
        let mut left = classes;
        while left != 0 {
            let hash = self.hash_block(domain, left.trailing_zeros(), block(at, left.trailing_zeros()));
            left &= left.wrapping_sub(1);
            if let Some(run) = self.places(hash).find_map(|place| slab.at(place).read_if(domain, at)) {
                return Some(run);
            }
        }
        None
    }

    /// Where records entered under `hash` may be.
    #[inline]
    fn places(&self, hash: u32) -> impl Iterator<Item = u32> + '_ {
        let home = self.home(hash);
        let entries = (0..PROBES).map(move |step| self.slot(home.wrapping_add(step)).load(Ordering::Acquire));
        let present = entries.take_while(|entry| *entry != 0);
        present.filter(move |entry| hash_of(*entry) == hash).map(place_of)
    }

    /// For each of up to [`GROUP`] addresses the likely place of its record, right for nearly all addresses of the smallest class that the domain has.
    /// Each kind of work in a loop of its own: the memory accesses of one loop do not depend on one another, and as many as can be are under way at
    /// a time.
    #[inline]
    pub(crate) fn guess(&self, domain: u64, classes: u32, at: &[Iova]) -> [u32; GROUP] {
        let class = classes.trailing_zeros();
        let (mut hashes, mut places) = ([0; GROUP], [0; GROUP]);
        for (hash, at) in hashes.iter_mut().zip(at) {
            *hash = self.hash_block(domain, class, block(*at, class));
        }
        let slots = hashes.iter().zip(at).map(|(hash, _)| self.slot(self.home(*hash)).load(Ordering::Relaxed));
        black_box(slots.fold(0, |touched, entry| touched ^ entry));
        for (place, (hash, _)) in places.iter_mut().zip(hashes.iter().zip(at)) {
            *place = self.places(*hash).next().unwrap_or(u32::MAX);
        }
        places
    }

    /// Enters the run at `place`. `used` counts entries; only one writer at a time.
    pub(crate) fn insert(&self, used: &mut usize, domain: u64, range: Range<Iova>, place: u32) {
        let class = class(range);
        for block in blocks(range, class) {
            let hash = self.hash_block(domain, class, block);
            let slots = (0..PROBES).map(|step| self.slot(self.home(hash).wrapping_add(step)));
            let mut free = slots.filter(|slot| slot.load(Ordering::Relaxed) == 0);
            if *used < self.room()
                && let Some(slot) = free.next()
            {
                slot.store(entry(hash, place), Ordering::Release);
                *used = used.saturating_add(1);
            }
        }
    }

    /// Removes what `insert` entered with the same arguments.
    pub(crate) fn remove(&self, used: &mut usize, domain: u64, range: Range<Iova>, place: u32) {
        let class = class(range);
        for block in blocks(range, class) {
            let hash = self.hash_block(domain, class, block);
            let mut steps = (0..PROBES).map(|step| self.home(hash).wrapping_add(step));
            if let Some(at) = steps.find(|at| self.slot(*at).load(Ordering::Relaxed) == entry(hash, place)) {
                self.close_gap(at);
                *used = used.saturating_sub(1);
            }
        }
    }

    /// Empties slot `gap`, moving entries back that were pushed on by it.
    fn close_gap(&self, mut gap: usize) {
        let mut next = gap;
        for _ in 0..self.slots.len() {
            next = next.wrapping_add(1);
            let entry = self.slot(next).load(Ordering::Relaxed);
            let ahead = next.wrapping_sub(gap);
            if entry == 0 || ahead >= PROBES {
                break;
            }
            if next.wrapping_sub(self.home(hash_of(entry))) & self.mask() >= ahead {
                self.slot(gap).store(entry, Ordering::Release);
                gap = next;
            }
        }
        self.slot(gap).store(0, Ordering::Release);
    }

    fn mask(&self) -> usize {
        self.slots.len().wrapping_sub(1)
    }

    #[inline]
    #[allow(clippy::indexing_slicing, reason = "masked by the length, a power of two")]
    fn slot(&self, number: usize) -> &AtomicU64 {
        &self.slots[number & self.mask()]
    }

    #[inline]
    fn home(&self, hash: u32) -> usize {
        hash.checked_shr(self.shift).unwrap_or(0) as usize
    }

    /// Two keyed 64x64 -> 128 bit multiplications, each folded, and a last mix: blocks that follow one another differ by a constant after the
    /// multiplications, and would fill one neighbourhood if that constant is an unlucky one.
    #[inline]
    fn hash_block(&self, domain: u64, class: u32, block: u64) -> u32 {
        let [a, b] = self.secret;
        let key = fold(domain.rotate_left(8) ^ u64::from(class) ^ b, a);
        let hash = fold(block >> RUN_SHIFT ^ key, b);
        let hash = upper_half((hash ^ hash >> 32).wrapping_mul(0x9fb2_1c65_1e98_df25));
        let within = RUN_MASK.wrapping_shl(self.shift);
        hash & !within | low_half(block).wrapping_shl(self.shift) & within
    }
}

#[inline]
#[allow(clippy::cast_possible_truncation, reason = "halves of a 128-bit product")]
fn fold(x: u64, y: u64) -> u64 {
    let product = u128::from(x).wrapping_mul(u128::from(y));
    (product >> 64) as u64 ^ product as u64
}

#[allow(clippy::cast_possible_truncation, reason = "32 bits are left")]
fn upper_half(word: u64) -> u32 {
    (word >> 32) as u32
}

/// A slot: the hash, and the place plus one. 0 is an empty slot.
fn entry(hash: u32, place: u32) -> u64 {
    u64::from(hash) << 32 | u64::from(place).saturating_add(1)
}

fn hash_of(entry: u64) -> u32 {
    upper_half(entry)
}

#[allow(clippy::cast_possible_truncation, reason = "the low half is what is asked for")]
fn low_half(word: u64) -> u32 {
    word as u32
}

fn place_of(entry: u64) -> u32 {
    low_half(entry).wrapping_sub(1)
}

#[cfg(not(loom))]
fn secret() -> [u64; 2] {
    [RandomState::new().hash_one(0_u8) | 1, RandomState::new().hash_one(1_u8) | 1]
}

/// The model checker wants the same run every time.
#[cfg(loom)]
fn secret() -> [u64; 2] {
    [0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03]
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::record::Owner;
    use crate::slab::FreeList;
    use iommu_addr::{Access, Gpa, Location};
    use proptest::prelude::*;

    #[test]
    fn every_run_has_a_class_and_at_most_nine_blocks() {
        for (start, last) in [
            (0, 0xfff),
            (u64::MAX - 0xfff, u64::MAX),
            (0, u64::MAX),
            (0x1000, u64::MAX),
            (0x7000, 0x7000 + (511 << 12) - 1),
            (0x1000, 0x1000 + (1 << 30) - 1),
            (1 << 30, (2 << 30) - 1),
        ] {
            let range = Range::new(Iova(start), Iova(last)).expect("start <= last");
            let class = class(range);
            assert!((class as usize) < CLASSES);
            assert!(blocks(range, class).count() <= 9, "{range}");
        }
        let gib = Range::new(Iova(1 << 30), Iova((2 << 30) - 1)).expect("start <= last");
        assert_eq!(blocks(gib, class(gib)).count(), 1, "one entry for an aligned GiB");
    }

    #[test]
    fn regular_addresses_spread_whatever_the_secret() {
        for stride in [1, 2, 8, 511, 512, 1 << 18, 0x9e37_79b9] {
            for _ in 0..8 {
                let (index, mut used) = (Index::new(4096), 0);
                for page in 0..4096_u64 {
                    let range = Range::with_len(Iova((page * stride) << 12), 0x1000).expect("in the space");
                    index.insert(&mut used, 1, range, 0);
                }
                assert!(used > 4060, "{} of 4096 entries found no place at stride {stride}", 4096 - used);
            }
        }
    }

    proptest! {
        /// No false miss as long as nothing is full: what is entered is found, what was removed is not, whatever the order of both.
        #[test]
        fn index_agrees_with_a_set(steps in prop::collection::vec((0u64..200, any::<bool>()), 1..400)) {
            let (slab, index) = (Slab::new(256), Index::new(256));
            let (mut free, mut used) = (FreeList::default(), 0);
            let mut held = std::collections::BTreeMap::new();
            for (page, add) in steps {
                let range = Range::with_len(Iova(page << 12), 0x1000).expect("in the space");
                if add && !held.contains_key(&page) {
                    let place = slab.allocate(&mut free).expect("room");
                    let owner = Owner { head: place, generation: 0 };
                    let to = Location::Ram(Gpa(page));
                    slab.at(place).write(&Run { domain: 1, range, to, access: Access::RW, owner });
                    index.insert(&mut used, 1, range, place);
                    held.insert(page, place);
                } else if !add && let Some(place) = held.remove(&page) {
                    index.remove(&mut used, 1, range, place);
                    slab.free(&mut free, place);
                }
                prop_assert_eq!(used, held.len());
            }
            for page in 0..200 {
                let found = index.find(&slab, 1, 1, Iova(page << 12)).map(|run| run.owner.head);
                prop_assert_eq!(found, held.get(&page).copied());
            }
        }
    }
}
