//! One I/O address space: mapping, unmapping, and what an address means.
//!
//! The truth is the [`Table`] under the domain's lock; the way to it without a lock is the tenant's index, and the last word has the mapping's pin.
//! Everything that removes works the same way: **close** the pin word, so that nobody gets in; if nobody is in, remove; else leave the mapping in the
//! table, where it keeps its addresses and its quota, and let a latch wait. Whoever lets the last pin go removes it and then lets the latch go.
//!
//! Attached endpoints and peer rights are [`crate::peers`]; translation is [`crate::pins`].
//!
//! Not here: who may ask (the device checks requests), what is at the addresses, blocking.

use crate::drain::{Latch, Progress};
use crate::fault::{Fault, FaultReason};
use crate::index;
use crate::iotlb::Iotlb;
use crate::limits::{PAGE_SIZE, Quota};
use crate::peers::Gates;
use crate::record::{Owner, Run};
use crate::sync::{AtomicU32, Mutex, Ordering, lock};
use crate::table::{Draining, Mapping, Origin, Table};
use crate::tenant::{Pool, Tenant};
use iommu_addr::{Access, Addr, BufferId, DomainId, EndpointId, Iova, Location, Range, Segment};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// Addresses whose lookups overlap in [`Domain::prefetch`].
const OVERLAP: usize = 32;

/// Why nothing was mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MapError {
    /// The domain is being destroyed.
    #[error("The domain is being destroyed: attach an endpoint to another one")]
    Closing,
    /// An address or a length is not a multiple of the page size.
    #[error("Address or length {value:#x} is not a multiple of the page size, {PAGE_SIZE:#x}")]
    Misaligned {
        /// Which number.
        value: u64,
    },
    /// The range leaves what the tenant may map.
    #[error("The range must lie within {allowed}")]
    OutOfRange {
        /// Where mappings may lie.
        allowed: Range<Iova>,
    },
    /// No segment, an empty one, one past the end of its space, or segments that do not add up to the range.
    #[error("The segments must not be empty and must add up to the range")]
    Segments,
    /// Neither read nor write.
    #[error("A mapping must allow reading or writing")]
    NoAccess,
    /// Another mapping, perhaps a draining one, has some of the addresses.
    #[error("The range overlaps the mapping at {at}: unmap that first")]
    Overlap {
        /// That mapping.
        at: Range<Iova>,
    },
    /// A segment lies in the memory of an endpoint that is not attached to the domain.
    #[error("Endpoint {endpoint} is not attached to the domain")]
    NotAttached {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// The tenant has as many mappings or segments as it may have.
    #[error("The tenant may have {limit} {what}: unmap something first")]
    Quota {
        /// "mappings" or "segments".
        what: &'static str,
        /// How many it may have.
        limit: u32,
    },
}

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

/// One I/O address space of a tenant, shared by threads. Made and destroyed by [`crate::Iommu`].
pub struct Domain {
    id: DomainId,
    /// Never used twice in this process, unlike the id.
    serial: u64,
    pub(crate) tenant: Arc<Tenant>,
    /// Classes of runs that the domain has, for the index.
    classes: AtomicU32,
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

    /// Maps `range` to `segments` laid end to end, as one mapping: all of it or, on an error, nothing. Blocks on the domain's lock only.
    ///
    /// # Errors
    /// See [`MapError`].
    pub fn map(
        &self,
        range: Range<Iova>,
        segments: &[Segment],
        access: Access,
        origin: Origin,
    ) -> Result<(), MapError> {
        self.check_shape(range, segments, access)?;
        let count = runs(segments).count();
        let wanted = u32::try_from(count).unwrap_or(u32::MAX);
        let quotas = &self.tenant.quotas;
        take(&quotas.mappings, 1, "mappings")?;
        let mapped = take(&quotas.segments, wanted, "segments").and_then(|()| {
            let mapped = self.map_checked(range, segments, count, access, origin);
            mapped.inspect_err(|_| quotas.segments.give(wanted))
        });
        mapped.inspect_err(|_| quotas.mappings.give(1))
    }

    fn check_shape(&self, range: Range<Iova>, segments: &[Segment], access: Access) -> Result<(), MapError> {
        let numbers = segments.iter().flat_map(|segment| [offset(segment.at), segment.len]);
        let ends = [range.start().raw(), range.last().raw().wrapping_add(1)];
        if let Some(value) = ends.into_iter().chain(numbers).find(|number| number & (PAGE_SIZE - 1) != 0) {
            return Err(MapError::Misaligned { value });
        }
        let allowed = self.tenant.limits.iova;
        if !allowed.contains(range) {
            return Err(MapError::OutOfRange { allowed });
        }
        let ends = |segment: &Segment| segment.at.checked_add(segment.len.checked_sub(1)?);
        let total = segments.iter().try_fold(0_u128, |sum, segment| {
            ends(segment)?;
            sum.checked_add(u128::from(segment.len))
        });
        if total != u128::from(range.span()).checked_add(1) {
            return Err(MapError::Segments);
        }
        if access.is_none() { Err(MapError::NoAccess) } else { Ok(()) }
    }

    fn map_checked(
        &self,
        range: Range<Iova>,
        segments: &[Segment],
        count: usize,
        access: Access,
        origin: Origin,
    ) -> Result<(), MapError> {
        let mut table = lock(&self.table);
        if self.is_closing() {
            return Err(MapError::Closing);
        }
        let owners = segments.iter().filter_map(|segment| segment.at.owner());
        if let Some(endpoint) = { owners }.find(|owner| !self.is_attached(*owner)) {
            return Err(MapError::NotAttached { endpoint });
        }
        if let Some(mapping) = table.last_in(range) {
            return Err(MapError::Overlap { at: mapping.range });
        }
        let mut pool = lock(&self.tenant.pool);
        let places = self.allocate(&mut pool, count)?;
        let (slab, index) = (&self.tenant.slab, &self.tenant.index);
        let Some(head) = places.first().copied() else { return Err(MapError::Segments) };
        let owner = Owner { head, generation: slab.at(head).word.generation() };
        let mut at = range.start();
        let mut classes = 0;
        for (place, run) in places.iter().zip(runs(segments)) {
            let Some(range) = Range::with_len(at, run.len) else { break };
            slab.at(*place).write(&Run { domain: self.serial, range, to: run.at, access, owner });
            index.insert(&mut pool.indexed, self.serial, range, *place);
            classes = table.count(index::class(range), true);
            at = range.last().checked_add(1).unwrap_or(at);
        }
        drop(pool);
        self.classes.store(classes, Ordering::Relaxed);
        table.insert(range, &places, origin);
        slab.at(head).word.open();
        Ok(())
    }

    fn allocate(&self, pool: &mut Pool, count: usize) -> Result<SmallVec<[u32; 4]>, MapError> {
        let mut places = SmallVec::with_capacity(count);
        while places.len() < count {
            let Some(place) = self.tenant.slab.allocate(&mut pool.free) else {
                for place in places {
                    self.tenant.slab.free(&mut pool.free, place);
                }
                let limit = self.tenant.limits.segments;
                return Err(MapError::Quota { what: "segments", limit });
            };
            places.push(place);
        }
        Ok(places)
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
        if let Some(mapping) = { table.all_in(range) }.find(|mapping| mapping.is_buffer) {
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
    pub(crate) fn find_exactly(
        &self,
        iotlb: &mut Iotlb,
        at: Iova,
        held: Option<Owner>,
    ) -> Result<Run, (FaultReason, Option<EndpointId>)> {
        let table = lock(&self.table);
        let slab = &self.tenant.slab;
        let mapping = table.at(at).ok_or((FaultReason::Mapping, None))?;
        let place = table.record_at(slab, &mapping, at);
        let run = slab.at(place).read_if(self.serial, at).ok_or((FaultReason::Mapping, None))?;
        // Open under the lock: only an absurd number of pins refuses, and then nothing was owed.
        if held != Some(run.owner) && (mapping.is_draining || !self.tenant.pin(run.owner)) {
            return Err((FaultReason::Draining, run.to.owner()));
        }
        iotlb.fill(at, &run);
        Ok(run)
    }

    /// Brings what is needed to translate each address of `at` into `iotlb`, at the price of about one memory access for all of them: their lookups
    /// overlap, which those of one translation after another do not. A hint that decides nothing.
    pub fn prefetch(&self, iotlb: &mut Iotlb, at: &[Iova]) {
        let (slab, index) = (&self.tenant.slab, &self.tenant.index);
        let classes = self.classes.load(Ordering::Relaxed);
        for group in at.chunks(OVERLAP) {
            let mut entries: SmallVec<[u64; OVERLAP]> = SmallVec::new();
            entries.extend(group.iter().map(|at| index.touch(self.serial, classes, *at)));
            let touched = entries.iter().fold(0, |sum, entry| sum ^ index::Index::touch_record(slab, *entry));
            std::hint::black_box(touched);
            for at in group {
                if iotlb.find(self.serial, *at).is_none() {
                    self.find(iotlb, *at);
                }
            }
        }
    }

    pub(crate) fn fault(
        &self,
        accessor: EndpointId,
        owner: Option<EndpointId>,
        iova: Iova,
        access: Access,
        reason: FaultReason,
    ) -> Fault {
        Fault { accessor, owner, domain: self.id, iova, access, reason }
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain").field("id", &self.id).field("serial", &self.serial).finish_non_exhaustive()
    }
}

/// The segments, with those that follow one another in memory as one.
fn runs(segments: &[Segment]) -> impl Iterator<Item = Segment> + '_ {
    let mut left = segments.iter().copied().peekable();
    std::iter::from_fn(move || {
        let mut run = left.next()?;
        while let Some(len) = left.peek().and_then(|next| {
            let follows = run.at.checked_add(run.len) == Some(next.at);
            run.len.checked_add(next.len).filter(|_| follows)
        }) {
            run.len = len;
            left.next();
        }
        Some(run)
    })
}

fn offset(at: Location) -> u64 {
    match at {
        Location::Ram(gpa) => gpa.raw(),
        Location::Aperture { offset, .. } => offset.raw(),
    }
}

fn take(quota: &Quota, count: u32, what: &'static str) -> Result<(), MapError> {
    if quota.take(count) { Ok(()) } else { Err(MapError::Quota { what, limit: quota.limit() }) }
}
