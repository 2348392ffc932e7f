//! What is true of one domain: its mappings in order of address, and what drains.
//!
//! An ordered map of mappings, each a small entry however large the mapping is; mappings of several runs keep the list of their records beside it. The
//! table is kept under the domain's lock and holds a mapping until its drain has **ended**, so that a new mapping cannot take the place of one that
//! somebody may still use.
//!
//! Not here: pin words, quotas, the index; the domain does those under the same lock.

use crate::drain::Latch;
use crate::index::CLASSES;
use crate::slab::Slab;
use iommu_addr::{BufferId, Iova, Range};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;

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
    pub(crate) is_buffer: bool,
    pub(crate) is_draining: bool,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    last: Iova,
    head: u32,
    is_buffer: bool,
    is_draining: bool,
}

impl Entry {
    fn mapping(self, start: Iova) -> Option<Mapping> {
        let Self { last, head, is_buffer, is_draining } = self;
        Some(Mapping { range: Range::new(start, last)?, head, is_buffer, is_draining })
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
    pub(crate) fn insert(&mut self, range: Range<Iova>, records: &[u32], origin: Origin) {
        let Some(head) = records.first().copied() else { return };
        if records.len() > 1 {
            self.scattered.insert(range.start(), records.into());
        }
        if let Origin::Buffer(buffer) = origin {
            self.buffers.insert(range.start(), buffer);
        }
        let is_buffer = origin != Origin::Guest;
        let entry = Entry { last: range.last(), head, is_buffer, is_draining: false };
        self.mappings.insert(range.start(), entry);
    }

    /// Removes a mapping; what is left of it is its records.
    pub(crate) fn remove(&mut self, mapping: &Mapping) -> Box<[u32]> {
        let start = mapping.range.start();
        self.mappings.remove(&start);
        if mapping.is_buffer {
            self.buffers.remove(&start);
        }
        self.scattered.remove(&start).unwrap_or_else(|| Box::new([mapping.head]))
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
