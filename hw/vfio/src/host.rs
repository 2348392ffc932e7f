//! The IOMMU domain that a tenant's functions share (type1).
//!
//! What is only read is mapped for reading only. The domain is a *container*, which groups of functions join ([`claim`]); who has its descriptor and
//! those of its functions has all that it takes to drive them.
//!
//! Not here: which memory, and for how long.

use std::any::Any;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hw_engine::Place;
use iommu_addr::{Access, BusAddr, Range};

use crate::bus::{Bus, PAGE};
use crate::{VfioError, ioctls};

/// One IOMMU domain, and the bus addresses in it.
pub struct Host(Arc<Inner>);

struct Inner {
    container: OwnedFd,
    /// `None` until the first function is there: then the kernel knows what its IOMMU can do.
    bus: Mutex<Option<Bus>>,
}

/// Memory as a function sees it, until it is dropped.
pub struct Mapped {
    /// Where the first byte that was asked for is.
    pub first: BusAddr,
    /// Bytes that were asked for.
    pub len: u64,
    /// Unmaps it, and then lets go of the memory.
    pub guard: Box<dyn Any + Send>,
}

/// An IOMMU that a function is behind. What it answers is what the function is told: the caller has no say in the address.
pub trait MapSink: Send + Sync {
    /// Maps the pages around a place, at addresses up to `mask`, and for no more than `access`.
    ///
    /// # Errors
    /// When there are no addresses, or when the IOMMU does not take them.
    fn map(&self, place: &Place, access: Access, mask: u64) -> Result<Mapped, VfioError>;
}

/// What a [`Host`] has mapped.
struct Mapping {
    host: Arc<Inner>,
    at: Range<BusAddr>,
    /// The IOMMU holds it.
    live: bool,
    _hold: Arc<dyn Any + Send + Sync>,
}

impl Host {
    /// A domain over a container, which functions may have joined already.
    pub fn new(container: OwnedFd) -> Self {
        Self(Arc::new(Inner { container, bus: Mutex::new(None) }))
    }

    pub(crate) fn container(&self) -> BorrowedFd<'_> {
        self.0.container.as_fd()
    }

    /// A function is in the domain: now the kernel knows what its IOMMU can do.
    pub(crate) fn joined(&self) -> Result<(), VfioError> {
        let mut bus = self.0.bus();
        if bus.is_none() {
            let usable = ioctls::usable(self.0.container.as_fd()).map_err(|source| VfioError::Start { source })?;
            *bus = Some(Bus::new(&usable));
        }
        Ok(())
    }
}

/// Opens a container: a domain that no function is in.
///
/// # Errors
/// When the host has no VFIO, or none for this user.
pub fn open_container() -> Result<OwnedFd, VfioError> {
    let file = File::options().read(true).write(true).open("/dev/vfio/vfio");
    file.map(OwnedFd::from).map_err(|source| VfioError::Container { source })
}

/// Opens the IOMMU group of the function with this address (`0000:01:00.0`). As long as it is open, nobody else gets it.
///
/// # Errors
/// When there is no such function, when it is not bound to vfio-pci, or when somebody else has its group.
pub fn open_group(address: &str) -> Result<OwnedFd, VfioError> {
    let open = |source| VfioError::Open { address: address.to_owned(), source };
    let group = Path::new("/sys/bus/pci/devices").join(address).join("iommu_group").read_link().map_err(open)?;
    let number = group.file_name().unwrap_or_default();
    let file = File::options().read(true).write(true).open(Path::new("/dev/vfio").join(number));
    file.map(OwnedFd::from).map_err(open)
}

/// Puts a group into a container and opens its function with this address. Needs nothing but the descriptors.
///
/// # Errors
/// When the group is in another container, or has no such function.
pub fn claim(container: BorrowedFd<'_>, group: BorrowedFd<'_>, address: &str) -> Result<OwnedFd, VfioError> {
    let open = |source| VfioError::Open { address: address.to_owned(), source };
    ioctls::join(container, group).map_err(open)?;
    ioctls::device(group, address).map_err(open)
}

impl Inner {
    fn bus(&self) -> MutexGuard<'_, Option<Bus>> {
        self.bus.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MapSink for Host {
    fn map(&self, place: &Place, access: Access, mask: u64) -> Result<Mapped, VfioError> {
        let lead = place.address & (PAGE - 1);
        let bytes = (lead + place.len).next_multiple_of(PAGE);
        let at = self.0.bus().as_mut().and_then(|bus| bus.take(bytes, mask));
        let at = at.ok_or(VfioError::Addresses { bytes, mask })?;
        let mut mapping = Mapping { host: Arc::clone(&self.0), at, live: false, _hold: Arc::clone(&place.hold) };
        // SAFETY: `_hold` keeps the memory mapped until after it is unmapped from the IOMMU, and whoever has it knows that devices use it.
        unsafe { ioctls::map(self.0.container.as_fd(), at, place.address - lead, access) }
            .map_err(|source| VfioError::Map { at, source })?;
        mapping.live = true;
        Ok(Mapped { first: BusAddr(at.start().0 + lead), len: place.len, guard: Box::new(mapping) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.live
            && let Err(source) = ioctls::unmap(self.host.container.as_fd(), self.at)
        {
            // The kernel refuses only what was never mapped. Its addresses are not used again.
            return tracing::error!("{:#}", chain(&VfioError::Unmap { at: self.at, source }));
        }
        if let Some(bus) = self.host.bus().as_mut() {
            bus.give(self.at);
        }
    }
}

/// An error and its causes on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source()).map(|cause| format!(": {cause}"));
    std::iter::once(error.to_string()).chain(causes).collect()
}
