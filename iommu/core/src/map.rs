//! Mapping: all of a request or nothing.
//!
//! Everything that can be refused is checked before anything is written; quotas are taken first and given back if the request fails.
//!
//! Not here: whether the memory exists (the device knows guest memory and endpoints).

use crate::domain::Domain;
use crate::fault::MappingKind;
use crate::index;
use crate::limits::{PAGE_SHIFT, PAGE_SIZE};
use crate::record::{Owner, Run};
use crate::sync::{Ordering, lock};
use crate::table::{Made, Origin};
use crate::tenant::Pool;
use iommu_addr::{Access, Addr, EndpointId, Iova, Location, Range, Segment};
use smallvec::SmallVec;
use thiserror::Error;

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
    /// The tenant has as many mappings, segments or pages as it may have.
    #[error("The tenant may have {limit} {what}: unmap something first")]
    Quota {
        /// "mappings", "segments" or "pages".
        what: &'static str,
        /// How many it may have.
        limit: u32,
    },
}

impl Domain {
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
        let pages = if origin == Origin::Guest { pages(range) } else { 0 };
        let quotas = &self.tenant.quotas;
        let taken = [
            (&quotas.mappings, 1, "mappings"),
            (&quotas.segments, wanted, "segments"),
            (&quotas.pages, pages, "pages"),
        ];
        for (nth, (quota, count, what)) in taken.into_iter().enumerate() {
            if !quota.take(count) {
                taken.iter().take(nth).for_each(|(quota, count, _)| quota.give(*count));
                return Err(MapError::Quota { what, limit: quota.limit() });
            }
        }
        let mapped = self.map_checked(range, segments, count, access, origin);
        mapped.inspect_err(|_| taken.iter().for_each(|(quota, count, _)| quota.give(*count)))
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
        pool.made = pool.made.wrapping_add(1);
        let made = Made { request: pool.made, kind: kind(origin, segments), access };
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
        table.insert(range, &places, origin, made);
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

fn kind(origin: Origin, segments: &[Segment]) -> MappingKind {
    match origin {
        Origin::Guest => MappingKind::Guest,
        Origin::Buffer(_) if segments.iter().any(|segment| segment.at.is_registers()) => MappingKind::Registers,
        Origin::Buffer(_) => MappingKind::Buffer,
    }
}

fn offset(at: Location) -> u64 {
    match at {
        Location::Ram(gpa) => gpa.raw(),
        Location::Aperture { offset, .. } => offset.raw(),
    }
}

/// Pages of a range; as many as no limit allows if the number is beyond every limit.
pub(crate) fn pages(range: Range<Iova>) -> u32 {
    u32::try_from((range.span() >> PAGE_SHIFT).saturating_add(1)).unwrap_or(u32::MAX)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Iommu, Limits};
    use iommu_addr::{DomainId, Gpa};

    #[test]
    fn nothing_is_left_in_the_index_of_what_was_unmapped() {
        let (mappings, segments) = (64, 64);
        let limits = Limits { domains: 1, mappings, segments, pieces: 0, pages: u32::MAX, iova: Range::all() };
        let endpoint = EndpointId::local(1);
        let iommu = Iommu::new(limits, [endpoint]).expect("sensible limits");
        let domain = iommu.attach(DomainId(1), endpoint).expect("within the limits");
        let indexed = || lock(&domain.tenant.pool).indexed;
        for pages in [1, 7, 8, 63, 64, 1 << 9, 1 << 18, (1 << 18) + 5] {
            let len = pages << 12;
            let range = Range::with_len(Iova(3 << 12), len).expect("in the space");
            let segment = Segment { at: Location::Ram(Gpa(0)), len };
            domain.map(range, &[segment], Access::RW, Origin::Guest).expect("nothing is mapped");
            assert!((1..=9).contains(&indexed()), "{} entries for {pages} pages", indexed());
            assert!(domain.unmap(range).expect("all of it").is_done());
            assert_eq!(indexed(), 0, "{pages} pages");
        }
    }
}
