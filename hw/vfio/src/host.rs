//! The IOMMU domain that a tenant's functions share.
//!
//! What is only read is mapped for reading only. The domain is a *container* (type1), which groups of functions join ([`claim`]), or an address space
//! of iommufd; who has its descriptor and those of its functions has all that it takes to drive them.
//!
//! Not here: which memory, and for how long; the ways of iommufd (`iommufd`).

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hw_engine::{Buffer, Place};
use iommu_addr::{Access, BusAddr, Range};

use crate::bus::{Bus, PAGE};
use crate::iommufd::Ioas;
use crate::{VfioError, ioctls};

/// Mappings that a container of type1 holds, unless the module's parameter `dma_entry_limit` says otherwise (Linux, `vfio_iommu_type1.c`: U16_MAX).
pub(crate) const MAX_MAPPINGS: u32 = 65_535;

/// One IOMMU domain, and the bus addresses in it.
pub struct Host(Arc<Inner>);

struct Inner {
    domain: Box<dyn Domain>,
    /// `None` until the first function is there: then the kernel knows what its IOMMU can do.
    bus: Mutex<Option<Bus>>,
}

/// A way that the kernel has of IOMMU domains.
pub(crate) trait Domain: Send + Sync {
    /// Opens the host's function with this address, and puts it into the domain. For a process that has paths.
    fn open(&self, address: &str) -> Result<OwnedFd, VfioError>;

    /// The bus addresses that the domain can map, as first and last; known when a function is in it.
    fn usable(&self) -> io::Result<Vec<(u64, u64)>>;

    /// Maps whole pages, for no more than `access`.
    ///
    /// # Safety
    /// The memory stays mapped in this process until [`Domain::unmap`] or until the domain is gone, and is only used in ways that allow for a device
    /// that reads and writes it.
    unsafe fn map(&self, at: Range<BusAddr>, pages: &Place, access: Access) -> io::Result<()>;

    /// Takes a mapping out: when it returns, no device reaches the memory any more.
    fn unmap(&self, at: Range<BusAddr>) -> io::Result<()>;
}

/// A container, as type1 has them.
struct Container(OwnedFd);

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

    /// Lets go of all that nobody has: the engine in front of it has had nothing to do for a while.
    fn rest(&self) {}
}

/// What a [`Host`] has mapped.
struct Mapping {
    host: Arc<Inner>,
    at: Range<BusAddr>,
    /// The IOMMU holds it.
    live: bool,
    pages: Place,
}

impl Host {
    /// A domain over a container, which functions may have joined already.
    pub fn new(container: OwnedFd) -> Self {
        Self::of(Container(container))
    }

    /// A domain over a new address space of `/dev/iommu` ([`open_iommufd`](crate::open_iommufd)).
    ///
    /// # Errors
    /// When the kernel gives no more of them.
    pub fn of_iommufd(iommufd: OwnedFd) -> Result<Self, VfioError> {
        Ok(Self::of(Ioas::new(iommufd)?))
    }

    pub(crate) fn of(domain: impl Domain + 'static) -> Self {
        Self(Arc::new(Inner { domain: Box::new(domain), bus: Mutex::new(None) }))
    }

    pub(crate) fn open(&self, address: &str) -> Result<OwnedFd, VfioError> {
        self.0.domain.open(address)
    }

    /// A function is in the domain: now the kernel knows what its IOMMU can do.
    pub(crate) fn joined(&self) -> Result<(), VfioError> {
        let mut bus = self.0.bus();
        if bus.is_none() {
            let usable = self.0.domain.usable().map_err(|source| VfioError::Start { source })?;
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

/// Number of the IOMMU group of the function with this address (`0000:01:00.0`).
///
/// # Errors
/// When there is no such function, or no IOMMU before it.
pub fn group_of(address: &str) -> Result<u32, VfioError> {
    let group = Path::new("/sys/bus/pci/devices").join(address).join("iommu_group").read_link();
    let number = group.and_then(|group| {
        let name = group.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.parse().map_err(io::Error::other)
    });
    number.map_err(|source| VfioError::Open { address: address.to_owned(), source })
}

/// Opens an IOMMU group, that of the function with this address. As long as it is open, nobody else gets it.
///
/// # Errors
/// When the function is not bound to vfio-pci, or when somebody else has its group.
pub fn open_group(group: u32, address: &str) -> Result<OwnedFd, VfioError> {
    let file = File::options().read(true).write(true).open(Path::new("/dev/vfio").join(group.to_string()));
    file.map(OwnedFd::from).map_err(|source| VfioError::Open { address: address.to_owned(), source })
}

/// Takes a group out of the container that it is in, if it is in one.
///
/// # Errors
/// When a function of it is still open.
pub fn leave(group: BorrowedFd<'_>) -> io::Result<()> {
    ioctls::leave(group)
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

impl Domain for Container {
    fn open(&self, address: &str) -> Result<OwnedFd, VfioError> {
        claim(self.0.as_fd(), open_group(group_of(address)?, address)?.as_fd(), address)
    }

    fn usable(&self) -> io::Result<Vec<(u64, u64)>> {
        ioctls::usable(self.0.as_fd())
    }

    unsafe fn map(&self, at: Range<BusAddr>, pages: &Place, access: Access) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { ioctls::map(self.0.as_fd(), at, pages.address, access) }
    }

    fn unmap(&self, at: Range<BusAddr>) -> io::Result<()> {
        ioctls::unmap(self.0.as_fd(), at)
    }
}

impl Inner {
    fn bus(&self) -> MutexGuard<'_, Option<Bus>> {
        self.bus.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Host {
    /// Addresses as [`MapSink::map`] gives them, at which nothing is.
    pub(crate) fn reserve(&self, place: &Place, mask: u64) -> Result<Mapped, VfioError> {
        let (mapping, first) = self.addresses(place, mask)?;
        Ok(Mapped { first, len: place.len, guard: Box::new(mapping) })
    }

    fn addresses(&self, place: &Place, mask: u64) -> Result<(Mapping, BusAddr), VfioError> {
        let pages = pages(place);
        let bytes = pages.len;
        let at = self.0.bus().as_mut().and_then(|bus| bus.take(bytes, mask));
        let at = at.ok_or(VfioError::Addresses { bytes, mask })?;
        let first = BusAddr(at.start().0 + (place.address & (PAGE - 1)));
        Ok((Mapping { host: Arc::clone(&self.0), at, live: false, pages }, first))
    }
}

impl MapSink for Host {
    fn map(&self, place: &Place, access: Access, mask: u64) -> Result<Mapped, VfioError> {
        let (mut mapping, first) = self.addresses(place, mask)?;
        let at = mapping.at;
        // SAFETY: the mapping's `pages` keep the memory mapped until after it is unmapped from the IOMMU, and whoever has it knows that devices use it.
        unsafe { self.0.domain.map(at, &mapping.pages, access) }.map_err(|source| VfioError::Map { at, source })?;
        mapping.live = true;
        Ok(Mapped { first, len: place.len, guard: Box::new(mapping) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.live
            && let Err(source) = self.host.domain.unmap(self.at)
        {
            // The kernel refuses only what was never mapped. Its addresses are not used again.
            return tracing::error!("{:#}", chain(&VfioError::Unmap { at: self.at, source }));
        }
        if let Some(bus) = self.host.bus().as_mut() {
            bus.give(self.at);
        }
    }
}

/// The whole pages around a place. A dma-buf in which they are not whole pages is left out.
pub(crate) fn pages(place: &Place) -> Place {
    let lead = place.address & (PAGE - 1);
    let buffer = place.buffer.as_ref().filter(|buffer| buffer.offset & (PAGE - 1) == lead);
    Place {
        address: place.address - lead,
        len: (lead + place.len).next_multiple_of(PAGE),
        buffer: buffer.map(|buffer| Buffer { offset: buffer.offset - lead, ..buffer.clone() }),
        ..place.clone()
    }
}

/// An error and its causes on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source()).map(|cause| format!(": {cause}"));
    std::iter::once(error.to_string()).chain(causes).collect()
}
