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

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::fd::OwnedFd;
    use std::sync::Mutex;

    use iommu_addr::{BusAddr, Range};

    use super::*;
    use crate::host::Domain;

    /// Knows what is mapped: where it is in this process.
    struct Table(Arc<Mutex<Vec<u64>>>);

    impl Domain for Table {
        fn open(&self, _address: &str) -> Result<OwnedFd, VfioError> {
            unreachable!("there are no functions")
        }

        fn usable(&self) -> io::Result<Vec<(u64, u64)>> {
            Ok(vec![(0, u64::MAX)])
        }

        unsafe fn map(&self, _at: Range<BusAddr>, pages: &Place, _access: Access) -> io::Result<()> {
            self.0.lock().unwrap().push(pages.address);
            Ok(())
        }

        fn unmap(&self, _at: Range<BusAddr>) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_hole_has_addresses_and_is_not_mapped() {
        let mapped = Arc::<Mutex<Vec<u64>>>::default();
        let host = Host::of(Table(Arc::clone(&mapped)));
        host.joined().unwrap();
        let place = |address, len| Place::new(address, len, Arc::new(()));
        let sink = Hole::new(Arc::new(host), vec![place(0x5000, 0x2000)]);
        let guards = [(0x4000, 0x1000), (0x4000, 0x1001), (0x5010, 1), (0x6fff, 2), (0x7000, 8), (0x4000, 0x9000)]
            .map(|(address, len)| sink.map(&place(address, len), Access::RW, u64::MAX).unwrap());
        assert_eq!(*mapped.lock().unwrap(), [0x4000, 0x7000]);
        let mut first: Vec<_> = guards.iter().map(|mapped| mapped.first).collect();
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), guards.len());
    }
}
