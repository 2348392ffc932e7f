//! Which address means which mapping: one unchanging picture, replaced as a whole.

use std::sync::Arc;

use hw_engine::{Buffer, MemoryError, Place};
use iommu_addr::{Addr, EndpointId, Gpa, Location, Range};

use crate::mapping::{Mapping, Span};

/// A run of guest memory.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) gpa: Range<Gpa>,
    pub(crate) mapping: Arc<Mapping>,
}

/// Everything that is mapped.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    /// In the order of their addresses; none overlaps another.
    pub(crate) ram: Vec<Region>,
    pub(crate) apertures: Vec<Aperture>,
}

/// A run of an endpoint's memory.
#[derive(Clone, Debug)]
pub(crate) struct Aperture {
    pub(crate) endpoint: EndpointId,
    /// Where it begins in the endpoint's memory.
    pub(crate) start: u64,
    pub(crate) mapping: Arc<Mapping>,
    /// The dma-buf that has it too.
    pub(crate) buffer: Option<Buffer>,
}

impl Table {
    #[inline(always)]
    /// The bytes at `at` as far as they are contiguous here, at most `most`; `None` if there are none.
    pub(crate) fn span(&self, at: Location, most: u64) -> Option<Span<'_>> {
        match at {
            Location::Ram(gpa) => {
                let region = self.region(gpa)?;
                region.mapping.span(gpa.offset_from(region.gpa.start())?, most)
            }
            Location::Aperture { endpoint, offset } => {
                let (run, offset) = self.aperture(endpoint, offset.0)?;
                run.mapping.span(offset, most)
            }
        }
    }

    /// As [`Table::span`], to be kept.
    pub(crate) fn place(&self, at: Location, most: u64) -> Option<Place> {
        let (mapping, offset, buffer) = match at {
            Location::Ram(gpa) => {
                let region = self.region(gpa)?;
                (&region.mapping, gpa.offset_from(region.gpa.start())?, None)
            }
            Location::Aperture { endpoint, offset } => {
                let (run, offset) = self.aperture(endpoint, offset.0)?;
                (&run.mapping, offset, run.buffer.as_ref())
            }
        };
        let span = mapping.span(offset, most)?;
        let buffer = buffer.map(|run| Buffer { offset: run.offset.saturating_add(offset), ..run.clone() });
        let (address, len) = (span.address() as u64, span.len() as u64);
        let (all, is_device) = (mapping.addresses(), mapping.is_device());
        Some(Place { address, len, hold: Arc::clone(mapping) as _, mapping: all, is_device, buffer })
    }

    #[inline(always)]
    /// The `len` bytes at `at` if they are contiguous here.
    pub(crate) fn whole(&self, at: Location, len: u64) -> Option<Span<'_>> {
        self.span(at, len).filter(|span| span.len() as u64 == len)
    }

    /// The `len` bytes at `at`, piece by piece. All of them exist, or this is an error.
    pub(crate) fn pieces(&self, at: Location, len: u64) -> Result<Vec<Span<'_>>, MemoryError> {
        let mut pieces = Vec::new();
        let mut done: u64 = 0;
        while done < len {
            let span = at.checked_add(done).and_then(|next| self.span(next, len - done));
            let span = span.ok_or(MemoryError { at, len })?;
            done += span.len() as u64;
            pieces.push(span);
        }
        Ok(pieces)
    }

    /// Whether guest memory holds the whole range.
    pub(crate) fn holds(&self, range: Range<Gpa>) -> bool {
        let mut at = range.start();
        while let Some(region) = self.region(at) {
            if region.gpa.holds(range.last()) {
                return true;
            }
            match region.gpa.last().checked_add(1) {
                Some(next) => at = next,
                None => return false,
            }
        }
        false
    }

    /// The run of an endpoint's memory that holds a byte of it, and where it is in the run.
    fn aperture(&self, endpoint: EndpointId, offset: u64) -> Option<(&Aperture, u64)> {
        let runs = self.apertures.iter().filter(|run| run.endpoint == endpoint);
        let mut runs = runs.filter_map(|run| Some((run, offset.checked_sub(run.start)?)));
        runs.find(|(run, offset)| *offset < run.mapping.len())
    }

    fn region(&self, gpa: Gpa) -> Option<&Region> {
        let next = self.ram.partition_point(|region| region.gpa.start() <= gpa);
        self.ram.get(next.checked_sub(1)?).filter(|region| region.gpa.holds(gpa))
    }
}
