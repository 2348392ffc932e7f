//! Memory that the IOMMU is never told of, so that an operator can see what becomes of a transfer that it stops.
//!
//! Not here: which memory.

use std::sync::Arc;

use hw_engine::Place;
use iommu_addr::Access;

use crate::VfioError;
use crate::host::{Host, MapSink, Mapped};

/// A [`Host`] that gives some memory of this process addresses, but does not map it.
pub struct Hole {
    host: Arc<Host>,
    places: Vec<Place>,
}

impl Hole {
    /// With holes at these places.
    pub fn new(host: Arc<Host>, places: Vec<Place>) -> Self {
        Self { host, places }
    }
}

impl MapSink for Hole {
    fn map(&self, place: &Place, access: Access, mask: u64) -> Result<Mapped, VfioError> {
        let touches = |hole: &Place| {
            place.address < hole.address.saturating_add(hole.len)
                && hole.address < place.address.saturating_add(place.len)
        };
        if self.places.iter().any(touches) {
            self.host.reserve(place, mask)
        } else {
            self.host.map(place, access, mask)
        }
    }
}
