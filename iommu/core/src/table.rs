//! What is true of one domain: its mappings in order of address, and what drains.
//!
//! An ordered map of mappings, each a small entry however large the mapping is; mappings of several runs keep the list of their records beside it. The
//! table is kept under the domain's lock and holds a mapping until its drain has **ended**, so that a new mapping cannot take the place of one that
//! somebody may still use.
//!
//! Not here: pin words, quotas, the index; the domain does those under the same lock.

use crate::drain::Latch;
use crate::fault::{MappingKind, Provenance, Relation};
use crate::index::CLASSES;
use crate::slab::Slab;
use iommu_addr::{Access, Addr, BufferId, Iova, Range};
use smallvec::SmallVec;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Removed mappings that a domain remembers, for whoever is told of a fault.
const REMEMBERED: usize = 64;

/// Whose a mapping is, which says how it may be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The guest mapped it and unmaps it.
    Guest,
    /// It is a buffer's, and goes when the buffer goes.
    Buffer(BufferId),
}

/// One mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) range: Range<Iova>,
    /// Place of the first record.
    pub(crate) head: u32,
    pub(crate) is_draining: bool,
    pub(crate) made: Made,
}

/// How a mapping was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Made {
    /// As [`Provenance::request`].
    pub(crate) request: u64,
    pub(crate) kind: MappingKind,
    pub(crate) access: Access,
}

impl Mapping {
    pub(crate) fn is_buffer(&self) -> bool {
        self.made.kind != MappingKind::Guest
    }

    fn provenance(&self, relation: Relation) -> Provenance {
        let Self { range, is_draining, made: Made { request, kind, access }, .. } = *self;
        Provenance { relation, kind, range, access, request, is_draining }
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    last: Iova,
    head: u32,
    is_draining: bool,
    made: Made,
}

impl Entry {
    fn mapping(self, start: Iova) -> Option<Mapping> {
        let Self { last, head, is_draining, made } = self;
        Some(Mapping { range: Range::new(start, last)?, head, is_draining, made })
    }
}

/// Something that can drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Draining {
    /// The mapping with this head.
    Mapping(u32),
    /// The right with this number.
    Gate(usize),
}

/// Who waits for one thing.
pub(crate) type Waiters = SmallVec<[Arc<Latch>; 1]>;

/// See the module.
#[derive(Default)]
pub(crate) struct Table {
    mappings: BTreeMap<Iova, Entry>,
    /// Records of mappings that have more than one, in order of address, by the mapping's start.
    scattered: BTreeMap<Iova, Box<[u32]>>,
    /// Which buffer a buffer's mapping is, by its start.
    buffers: BTreeMap<Iova, BufferId>,
    draining: BTreeMap<Draining, Waiters>,
    /// Runs of each class.
    population: [u32; CLASSES],
    /// What was removed last, oldest first.
    removed: VecDeque<Mapping>,
}

impl Table {
    /// The mapping that holds an address of `range` and starts last.
    pub(crate) fn last_in(&self, range: Range<Iova>) -> Option<Mapping> {
        let (start, entry) = self.mappings.range(..=range.last()).next_back()?;
        entry.mapping(*start).filter(|mapping| mapping.range.overlaps(range))
    }

    /// The mapping that holds `at`.
    pub(crate) fn at(&self, at: Iova) -> Option<Mapping> {
        self.last_in(Range::new(at, at)?)
    }

    /// The first mapping that starts in `range`.
    pub(crate) fn first_in(&self, range: Range<Iova>) -> Option<Mapping> {
        self.all_in(range).next()
    }

    /// Every mapping that starts in `range`, in order.
    pub(crate) fn all_in(&self, range: Range<Iova>) -> impl Iterator<Item = Mapping> + '_ {
        let entries = self.mappings.range(range.start()..=range.last());
        entries.filter_map(|(start, entry)| entry.mapping(*start))
    }

    /// A mapping that holds addresses on both sides of an end of `range`, so that unmapping `range` would split it.
    pub(crate) fn split_by(&self, range: Range<Iova>) -> Option<Mapping> {
        let reaches_out = |mapping: &Mapping| mapping.range.overlaps(range) && !range.contains(mapping.range);
        let first = self.at(range.start()).filter(reaches_out);
        first.or_else(|| self.last_in(range).filter(reaches_out))
    }

    /// Which buffer the mapping that starts at `start` is.
    pub(crate) fn buffer(&self, start: Iova) -> Option<BufferId> {
        self.buffers.get(&start).copied()
    }

    /// Adds a mapping that overlaps none. `records` are in order of address, at least one.
    pub(crate) fn insert(&mut self, range: Range<Iova>, records: &[u32], origin: Origin, made: Made) {
        let Some(head) = records.first().copied() else { return };
        if records.len() > 1 {
            self.scattered.insert(range.start(), records.into());
        }
        if let Origin::Buffer(buffer) = origin {
            self.buffers.insert(range.start(), buffer);
        }
        self.mappings.insert(range.start(), Entry { last: range.last(), head, is_draining: false, made });
    }

    /// Removes a mapping; what is left of it is its records, and a memory of it.
    pub(crate) fn remove(&mut self, mapping: &Mapping) -> Box<[u32]> {
        let start = mapping.range.start();
        self.mappings.remove(&start);
        if mapping.is_buffer() {
            self.buffers.remove(&start);
        }
        if self.removed.len() >= REMEMBERED {
            self.removed.pop_front();
        }
        self.removed.push_back(Mapping { is_draining: false, ..*mapping });
        self.scattered.remove(&start).unwrap_or_else(|| Box::new([mapping.head]))
    }

    /// The mapping that a refusal at `at` is about.
    pub(crate) fn provenance(&self, at: Iova) -> Option<Provenance> {
        if let Some(mapping) = self.at(at) {
            return Some(mapping.provenance(Relation::Holds));
        }
        if let Some(mapping) = self.removed.iter().rev().find(|mapping| mapping.range.holds(at)) {
            return Some(mapping.provenance(Relation::Held));
        }
        let below = self.mappings.range(..at).next_back().and_then(|(start, entry)| entry.mapping(*start));
        let above = self.mappings.range(at..).next().and_then(|(start, entry)| entry.mapping(*start));
        let distance = |mapping: &Mapping| {
            at.raw()
                .checked_sub(mapping.range.last().raw())
                .unwrap_or(mapping.range.start().raw().wrapping_sub(at.raw()))
        };
        // The one below if both are as far: running on beyond an end is the commoner mistake.
        let nearest = below.into_iter().chain(above).min_by_key(distance)?;
        Some(nearest.provenance(Relation::Nearest))
    }

    /// The record of `mapping` that holds `at`.
    pub(crate) fn record_at(&self, slab: &Slab, mapping: &Mapping, at: Iova) -> u32 {
        let Some(records) = self.scattered.get(&mapping.range.start()) else { return mapping.head };
        let starts_by = |place: &u32| slab.at(*place).range().is_some_and(|range| range.start() <= at);
        let next = records.partition_point(starts_by);
        next.checked_sub(1).and_then(|last| records.get(last)).copied().unwrap_or(mapping.head)
    }

    /// Notes that `mapping` drains and that `latch` waits for it; if it drains already, only the latter.
    pub(crate) fn wait_for_mapping(&mut self, mapping: &Mapping, latch: &Arc<Latch>) {
        if let Some(entry) = self.mappings.get_mut(&mapping.range.start()) {
            entry.is_draining = true;
        }
        self.wait_for(Draining::Mapping(mapping.head), latch);
    }

    /// Notes that `latch` waits for something that drains.
    pub(crate) fn wait_for(&mut self, what: Draining, latch: &Arc<Latch>) {
        self.draining.entry(what).or_default().push(latch.add());
    }

    /// Notes that `latch` waits for all that drains now.
    pub(crate) fn wait_for_all(&mut self, latch: &Arc<Latch>) {
        for waiters in self.draining.values_mut() {
            waiters.push(latch.add());
        }
    }

    /// Whether `what` drains.
    pub(crate) fn drains(&self, what: Draining) -> bool {
        self.draining.contains_key(&what)
    }

    /// Who waited for `what`, whose drain has ended.
    pub(crate) fn take_waiters(&mut self, what: Draining) -> Waiters {
        self.draining.remove(&what).unwrap_or_default()
    }

    /// Counts a run of `class` more or less; gives the classes in use, one bit each.
    pub(crate) fn count(&mut self, class: u32, more: bool) -> u32 {
        if let Some(count) = self.population.get_mut(class as usize) {
            *count = if more { count.saturating_add(1) } else { count.saturating_sub(1) };
        }
        (0..).zip(&self.population).fold(0, |bits, (class, count)| bits | u32::from(*count > 0) << class)
    }
}
