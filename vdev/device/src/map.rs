//! MAP, UNMAP and FLUSH.

use hw_engine::Segments;
use iommu_addr::{Access, Addr, Gpa, Iova, Location, Range, Segment};
use iommu_core::{MapError, Origin, UnmapError};
use vdev_wire::{MapSegment, PAGE_SIZE};

use crate::RequestError;
use crate::complete::{Body, Completer};
use crate::device::Device;
use crate::domain::Domain;
use crate::request::field;

impl Device {
    pub(crate) fn map(
        &self,
        domain: &Domain,
        iova: Iova,
        access: Access,
        count: u32,
        segments: &[MapSegment],
    ) -> Result<Body, RequestError> {
        let limit = self.limits.max_segments.get();
        if count > limit {
            return Err(RequestError::Limit { what: "segments", limit: u64::from(limit) });
        }
        let mut total = 0_u64;
        let mut places = Segments::with_capacity(segments.len());
        for segment in segments {
            let (gpa, len) = (segment.gpa.get(), segment.len.get());
            if len == 0 {
                return Err(field("len", len));
            }
            aligned(gpa)?;
            aligned(len)?;
            let range = Range::with_len(Gpa(gpa), len).filter(|range| self.ram.contains(*range));
            range.ok_or(RequestError::OutOfRange { value: gpa })?;
            total = total.checked_add(len).ok_or(RequestError::OutOfRange { value: len })?;
            places.push(Segment { at: Location::Ram(Gpa(gpa)), len });
        }
        aligned(iova.raw())?;
        let range = Range::with_len(iova, total).ok_or(RequestError::OutOfRange { value: iova.raw() })?;
        domain.space.map(range, &places, access, Origin::Guest)?;
        Ok(Body::new())
    }

    pub(crate) fn unmap(&self, domain: &Domain, range: Range<Iova>, completer: Completer) {
        match domain.space.unmap(range) {
            Ok(progress) => {
                let then = self.answer_within(domain, Body::new(), completer);
                progress.then(move || drop(then));
            }
            Err(error) => completer.answer(Err(error.into())),
        }
    }

    /// Answers when everything of the domain that drains now has been answered.
    pub(crate) fn flush(&self, domain: &Domain, completer: Completer) {
        domain.after_draining(|then| self.answer_holding(then, Body::new(), completer));
    }
}

/// What is off the granule is out of range, as in virtio-iommu.
fn aligned(value: u64) -> Result<(), RequestError> {
    if value.is_multiple_of(PAGE_SIZE) { Ok(()) } else { Err(RequestError::OutOfRange { value }) }
}

impl From<MapError> for RequestError {
    fn from(error: MapError) -> Self {
        match error {
            MapError::Closing => Self::Missing { what: "domain", value: 0 },
            MapError::Misaligned { value } => Self::OutOfRange { value },
            MapError::OutOfRange { allowed } => Self::OutOfRange { value: allowed.last().raw() },
            MapError::Segments => Self::State { what: "the segments do not add up" },
            MapError::NoAccess => field("flags", 0),
            MapError::Overlap { .. } => Self::State { what: "the range overlaps another mapping" },
            MapError::NotAttached { endpoint } => {
                Self::Missing { what: "endpoint", value: u64::from(endpoint.to_raw()) }
            }
            MapError::Quota { what, limit } => Self::Limit { what, limit: u64::from(limit) },
        }
    }
}

impl From<UnmapError> for RequestError {
    fn from(error: UnmapError) -> Self {
        match error {
            UnmapError::Split { at } => Self::OutOfRange { value: at.start().raw() },
            UnmapError::Buffer { .. } => Self::State { what: "the range holds a buffer" },
            UnmapError::NotMapped => Self::State { what: "the buffer is not mapped" },
        }
    }
}
