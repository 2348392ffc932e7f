//! What an engine reaches, and what of it in one hop.
//!
//! One hop is between the engine's own memory and anything else in whole blocks, or through the buffer of an engine without memory of its own. Not here:
//! carrying it out.

use std::sync::Arc;

use hw_engine::{Memory, MemoryError, Pair, Pairs, Place};
use iommu_addr::{Location, Segment};

use crate::{Shape, Slice};

pub(crate) struct Reach {
    pub(crate) shape: Shape,
    /// What the engine's own memory is.
    pub(crate) own: Option<Slice>,
    pub(crate) memory: Arc<dyn Memory>,
}

/// One end of a piece.
#[derive(Clone, Copy)]
pub(crate) enum End {
    /// Offset in the engine's own memory.
    Own(u64),
    Other(Location),
}

impl Reach {
    /// Where a piece's end is, if all of it is there.
    pub(crate) fn end(&self, at: Location, len: u64) -> Result<End, MemoryError> {
        let missing = MemoryError { at, len };
        if let Location::Aperture { endpoint, offset } = at
            && let Some(own) = self.own.filter(|own| own.endpoint == endpoint)
        {
            return own.place(offset.0, len).map(End::Own).ok_or(missing);
        }
        let mut done = 0;
        while done < len {
            let place = at.checked_add(done).and_then(|at| self.memory.place(at, len - done));
            done += place.ok_or(missing)?.len;
        }
        Ok(End::Other(at))
    }

    /// The runs of `at`, none longer than a command, that go to or from the engine's own memory in whole blocks; `None` if they do not.
    pub(crate) fn straight(&self, own: u64, at: Location, len: u64) -> Result<Option<Vec<Place>>, MemoryError> {
        let shape = &self.shape;
        if !own.is_multiple_of(shape.granule) || !len.is_multiple_of(shape.granule) {
            return Ok(None);
        }
        let mut places = Vec::new();
        let mut done = 0;
        while done < len {
            let most = (len - done).min(shape.most);
            let place = at.checked_add(done).and_then(|at| self.memory.place(at, most));
            let place = place.ok_or(MemoryError { at, len })?;
            if !place.len.is_multiple_of(shape.granule) || !place.address.is_multiple_of(shape.alignment) {
                return Ok(None);
            }
            done += place.len;
            places.push(place);
        }
        Ok(Some(places))
    }

    /// Whether the engine copies these places without a stop in memory of this process.
    pub(crate) fn in_one_hop(&self, dst: &[Segment], src: &[Segment]) -> bool {
        let is_straight = |own, at, len| matches!(self.straight(own, at, len), Ok(Some(_)));
        Pairs::new(dst, src).all(|Pair { dst, src, len }| match (self.end(dst, len), self.end(src, len)) {
            (Ok(End::Own(own)), Ok(End::Other(at))) | (Ok(End::Other(at)), Ok(End::Own(own))) => {
                is_straight(own, at, len)
            }
            (Ok(End::Other(to)), Ok(End::Other(from))) => {
                self.shape.is_buffer && is_straight(0, to, len) && is_straight(0, from, len)
            }
            _ => false,
        })
    }
}
