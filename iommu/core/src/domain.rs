//! One I/O address space: its life, unmapping, and what an address means.
//!
//! The truth is the [`Table`] under the domain's lock; the way to it without a lock is the tenant's index, and the last word has the mapping's pin.
//! Everything that removes works the same way: **close** the pin word, so that nobody gets in; if nobody is in, remove; else leave the mapping in the
//! table, where it keeps its addresses and its quota, and let a latch wait. Whoever lets the last pin go removes it and then lets the latch go.
//!
//! Mapping is [`crate::map`]; attached endpoints and peer rights are [`crate::peers`]; translation is [`crate::pins`].
//!
//! Not here: who may ask (the device checks requests), what is at the addresses, blocking.

use crate::drain::{Latch, Progress};
use crate::fault::{Fault, FaultReason, Provenance};
use crate::index::{self, GROUP};
use crate::iotlb::Iotlb;
use crate::map::pages;
use crate::peers::Gates;
use crate::record::{Owner, Run};
use crate::sync::{AtomicU32, Mutex, Ordering, lock};
use crate::table::{Draining, Mapping, Table};
use crate::tenant::Tenant;
use iommu_addr::{Access, Addr, BufferId, DomainId, EndpointId, Iova, Range};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// Why nothing was unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UnmapError {
    /// A mapping reaches out of the range.
    #[error("The mapping at {at} reaches out of the range: unmap all of it")]
    Split {
        /// That mapping.
        at: Range<Iova>,
    },
    /// A mapping in the range is a buffer's.
    #[error("The mapping at {at} is a buffer's: free the buffer")]
    Buffer {
        /// That mapping.
        at: Range<Iova>,
    },
    /// The buffer is not mapped at that range.
    #[error("The buffer is not mapped there")]
    NotMapped,
}

/// Why an address was not translated, and whose memory it was, where that is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blame {
    pub(crate) reason: FaultReason,
    pub(crate) owner: Option<EndpointId>,
    pub(crate) mapping: Option<Provenance>,
}

/// One I/O address space of a tenant, shared by threads. Made and destroyed by [`crate::Iommu`].
pub struct Domain {
    id: DomainId,
    /// Never used twice in this process, unlike the id.
    pub(crate) serial: u64,
    pub(crate) tenant: Arc<Tenant>,
    /// Classes of runs that the domain has, for the index.
    pub(crate) classes: AtomicU32,
    pub(crate) gates: Gates,
    /// 1 from the beginning of its end on; set under the table's lock.
    closing: AtomicU32,
    /// Opens when the domain is gone. The domain holds it until it has closed everything.
    end: Arc<Latch>,
    pub(crate) table: Mutex<Table>,
}

impl Domain {
    pub(crate) fn new(id: DomainId, serial: u64, tenant: Arc<Tenant>) -> Self {
        let shared = Arc::clone(&tenant);
        Self {
            id,
            serial,
            classes: AtomicU32::new(0),
            gates: Gates::new(tenant.endpoints.len()),
            closing: AtomicU32::new(0),
            end: Latch::with_first(move || shared.forget(id)),
            table: Mutex::new(Table::default()),
            tenant,
        }
    }

    /// The id it was attached under.
    pub fn id(&self) -> DomainId {
        self.id
    }

    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    /// Unmaps every mapping within `range`, as virtio-iommu does (virtio 1.3, 5.13.6.6): addresses without a mapping do not matter, and a mapping
    /// that reaches out of the range is an error that leaves everything as it was. From the return on nobody gets access any more; the answer says
    /// whether somebody still has it. A mapping that drains already is waited for again.
    ///
    /// # Errors
    /// [`UnmapError::Split`]; [`UnmapError::Buffer`] if the range holds a buffer's mapping.
    pub fn unmap(&self, range: Range<Iova>) -> Result<Progress, UnmapError> {
        let mut table = lock(&self.table);
        if let Some(mapping) = table.split_by(range) {
            return Err(UnmapError::Split { at: mapping.range });
        }
        if let Some(mapping) = { table.all_in(range) }.find(Mapping::is_buffer) {
            return Err(UnmapError::Buffer { at: mapping.range });
        }
        let latch = Latch::new();
        self.close_all(&mut table, range, &latch);
        drop(table);
        Ok(latch.release())
    }

    /// Unmaps a buffer's mapping, which must have just this range. As [`Domain::unmap`] otherwise.
    ///
    /// # Errors
    /// [`UnmapError::NotMapped`].
    pub fn unmap_buffer(&self, buffer: BufferId, range: Range<Iova>) -> Result<Progress, UnmapError> {
        let mut table = lock(&self.table);
        let mapping = table.at(range.start()).filter(|mapping| mapping.range == range);
        if mapping.is_none() || table.buffer(range.start()) != Some(buffer) {
            return Err(UnmapError::NotMapped);
        }
        let latch = Latch::new();
        self.close_all(&mut table, range, &latch);
        drop(table);
        Ok(latch.release())
    }

    /// Waits for whatever drains now, in mappings and rights.
    pub fn flush(&self) -> Progress {
        let latch = Latch::new();
        lock(&self.table).wait_for_all(&latch);
        latch.release()
    }

    /// Whether the end has begun: nothing new comes into the domain any more.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire) != 0
    }

    /// Begins the end. True for the one call that did, which owes a [`Domain::close`].
    pub(crate) fn begin_closing(&self) -> bool {
        let _table = lock(&self.table);
        self.closing.swap(1, Ordering::AcqRel) == 0
    }

    /// Closes everything: no attached endpoint, no right, no mapping is left.
    pub(crate) fn close(&self) -> Progress {
        let mut table = lock(&self.table);
        self.close_gates(&mut table, self.gates.all(), &self.end);
        self.close_all(&mut table, Range::all(), &self.end);
        drop(table);
        Arc::clone(&self.end).release()
    }

    /// Whether the domain is gone.
    pub(crate) fn closed(&self) -> Progress {
        Arc::clone(&self.end).progress()
    }

    /// Closes every mapping within `range`; none reaches out of it.
    fn close_all(&self, table: &mut Table, range: Range<Iova>, latch: &Arc<Latch>) {
        let mut left = Some(range);
        while let Some(mapping) = left.and_then(|left| table.first_in(left)) {
            left = mapping.range.last().checked_add(1).and_then(|next| Range::new(next, range.last()));
            if !mapping.is_draining && self.tenant.slab.at(mapping.head).word.close() {
                self.remove(table, &mapping);
            } else {
                table.wait_for_mapping(&mapping, latch);
            }
        }
    }

    /// Removes a mapping whose drain has ended and gives its quota back.
    fn remove(&self, table: &mut Table, mapping: &Mapping) {
        let places = table.remove(mapping);
        let mut classes = self.classes.load(Ordering::Relaxed);
        let mut pool = lock(&self.tenant.pool);
        for place in &places {
            if let Some(range) = self.tenant.slab.at(*place).range() {
                self.tenant.index.remove(&mut pool.indexed, self.serial, range, *place);
                classes = table.count(index::class(range), false);
            }
            self.tenant.slab.free(&mut pool.free, *place);
        }
        drop(pool);
        self.classes.store(classes, Ordering::Relaxed);
        self.tenant.quotas.segments.give(u32::try_from(places.len()).unwrap_or(u32::MAX));
        self.tenant.quotas.pages.give(if mapping.is_buffer() { 0 } else { pages(mapping.range) });
        self.tenant.quotas.mappings.give(1);
    }

    /// What whoever claimed the end of a mapping's drain owes. No lock of this crate may be held.
    #[cold]
    pub(crate) fn end_mapping_drain(&self, head: u32) {
        let mut table = lock(&self.table);
        let start = self.tenant.slab.at(head).range().map(Range::start);
        if let Some(mapping) = start.and_then(|start| table.at(start)) {
            self.remove(&mut table, &mapping);
        }
        let waiters = table.take_waiters(Draining::Mapping(head));
        drop(table);
        waiters.iter().for_each(|latch| latch.arrive());
    }

    /// Finds the run that holds `at` through the index and remembers it.
    pub(crate) fn find(&self, iotlb: &mut Iotlb, at: Iova) -> Option<Run> {
        let classes = self.classes.load(Ordering::Relaxed);
        let run = self.tenant.index.find(&self.tenant.slab, self.serial, classes, at)?;
        iotlb.fill(at, &run);
        Some(run)
    }

    /// Finds the run that holds `at` in the table and **pins** it, unless it is of the mapping `held`, or says why not: what this says is so.
    #[cold]
    pub(crate) fn find_exactly(&self, iotlb: &mut Iotlb, at: Iova, held: Option<Owner>) -> Result<Run, Blame> {
        let table = lock(&self.table);
        let slab = &self.tenant.slab;
        let blame = |reason, owner| Blame { reason, owner, mapping: table.provenance(at) };
        let mapping = table.at(at).ok_or_else(|| blame(FaultReason::Mapping, None))?;
        let place = table.record_at(slab, &mapping, at);
        let run = slab.at(place).read_if(self.serial, at).ok_or_else(|| blame(FaultReason::Mapping, None))?;
        // Open under the lock: only an absurd number of pins refuses, and then nothing was owed.
        if held != Some(run.owner) && (mapping.is_draining || !self.tenant.pin(run.owner)) {
            return Err(blame(FaultReason::Draining, run.to.owner()));
        }
        iotlb.fill(at, &run);
        Ok(run)
    }

    /// Brings what is needed to translate each address of `at` into `iotlb`, at the price of about one memory access for all of them: their lookups
    /// overlap, which those of one translation after another do not. A hint that decides nothing.
    pub fn prefetch(&self, iotlb: &mut Iotlb, at: &[Iova]) {
        let (slab, index) = (&self.tenant.slab, &self.tenant.index);
        let classes = self.classes.load(Ordering::Relaxed);
        for group in at.chunks(GROUP) {
            let is_miss = |at: &Iova| iotlb.find(self.serial, *at).is_none();
            let misses: SmallVec<[Iova; GROUP]> = group.iter().copied().filter(is_miss).collect();
            let places = index.guess(self.serial, classes, &misses);
            let touched = misses.iter().zip(places).fold(0, |sum, (_, place)| sum ^ slab.at(place).touch());
            std::hint::black_box(touched);
            for (at, place) in misses.iter().zip(places) {
                if let Some(run) = slab.at(place).read_if(self.serial, *at) {
                    iotlb.fill(*at, &run);
                } else {
                    self.find(iotlb, *at);
                }
            }
        }
    }

    /// The mapping that a refusal at `at` is about; exact where the caller has `at` pinned.
    pub fn provenance(&self, at: Iova) -> Option<Provenance> {
        lock(&self.table).provenance(at)
    }

    /// That `accessor` is not attached.
    pub(crate) fn not_attached(&self, accessor: EndpointId) -> Fault {
        let (iova, access, reason) = (Iova(0), Access::NONE, FaultReason::Domain);
        Fault { accessor, owner: None, domain: self.id, iova, access, reason, mapping: None }
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain").field("id", &self.id).field("serial", &self.serial).finish_non_exhaustive()
    }
}
