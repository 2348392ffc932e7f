//! The IOMMU domain that a tenant's functions share (type1).
//!
//! The crate behind this maps everything for reading and writing; here what is only read is mapped for reading only, so the ioctls are our own.
//!
//! Not here: which memory, and for how long.

use std::any::Any;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hw_engine::Place;
use iommu_addr::{Access, BusAddr, Range};
use vfio_bindings::bindings::vfio;
use vfio_ioctls::VfioContainer;

use crate::VfioError;
use crate::bus::{Bus, PAGE};

/// Room for the domain's properties.
const INFO_WORDS: usize = 512;

/// One IOMMU domain, and the bus addresses in it.
pub struct Host(Arc<Inner>);

struct Inner {
    container: Arc<VfioContainer>,
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
    /// A domain without a function.
    ///
    /// # Errors
    /// When the host has no VFIO, or none for this user.
    pub fn new() -> Result<Self, VfioError> {
        let container = VfioContainer::new(None).map_err(|source| VfioError::Container { source })?;
        Ok(Self(Arc::new(Inner { container: Arc::new(container), bus: Mutex::new(None) })))
    }

    pub(crate) fn container(&self) -> Arc<VfioContainer> {
        Arc::clone(&self.0.container)
    }

    /// A function has joined the domain.
    pub(crate) fn joined(&self) -> Result<(), VfioError> {
        let mut bus = self.0.bus();
        if bus.is_none() {
            *bus = Some(Bus::new(&self.0.usable().map_err(|source| VfioError::Start { source })?));
        }
        Ok(())
    }
}

impl Inner {
    /// The bus addresses that the domain can map, as first and last.
    fn usable(&self) -> io::Result<Vec<(u64, u64)>> {
        let mut words = [0_u64; INFO_WORDS];
        // `argsz`, and `flags` 0.
        words[0] = size_of_val(&words) as u64;
        // SAFETY: the request writes `argsz` bytes at most.
        unsafe { ioctl(&self.container, request(vfio::VFIO_BASE + 12), words.as_mut_ptr()) }?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(usable_ranges(&bytes))
    }

    fn bus(&self) -> MutexGuard<'_, Option<Bus>> {
        self.bus.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unmap(&self, at: Range<BusAddr>) -> io::Result<()> {
        let mut ask = vfio::vfio_iommu_type1_dma_unmap {
            argsz: size_of_u32::<vfio::vfio_iommu_type1_dma_unmap>(),
            flags: 0,
            iova: at.start().0,
            size: at.last().0 - at.start().0 + 1,
            ..Default::default()
        };
        // SAFETY: the structure is what the request takes.
        unsafe { ioctl(&self.container, request(vfio::VFIO_BASE + 14), &raw mut ask) }
    }
}

impl MapSink for Host {
    fn map(&self, place: &Place, access: Access, mask: u64) -> Result<Mapped, VfioError> {
        let lead = place.address & (PAGE - 1);
        let bytes = (lead + place.len).next_multiple_of(PAGE);
        let at = self.0.bus().as_mut().and_then(|bus| bus.take(bytes, mask));
        let at = at.ok_or(VfioError::Addresses { bytes, mask })?;
        let mut mapping = Mapping { host: Arc::clone(&self.0), at, live: false, _hold: Arc::clone(&place.hold) };
        let right = |has: bool, flag: u32| if has { flag } else { 0 };
        let mut ask = vfio::vfio_iommu_type1_dma_map {
            argsz: size_of_u32::<vfio::vfio_iommu_type1_dma_map>(),
            flags: right(access.read, vfio::VFIO_DMA_MAP_FLAG_READ)
                | right(access.write, vfio::VFIO_DMA_MAP_FLAG_WRITE),
            vaddr: place.address - lead,
            iova: at.start().0,
            size: bytes,
        };
        // SAFETY: the structure is what the request takes, and `_hold` keeps the memory mapped until after it is unmapped from the IOMMU.
        unsafe { ioctl(&self.0.container, request(vfio::VFIO_BASE + 13), &raw mut ask) }
            .map_err(|source| VfioError::Map { at, source })?;
        mapping.live = true;
        Ok(Mapped { first: BusAddr(at.start().0 + lead), len: place.len, guard: Box::new(mapping) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.live
            && let Err(source) = self.host.unmap(self.at)
        {
            // The kernel refuses only what was never mapped. Its addresses are not used again.
            return tracing::error!("{:#}", chain(&VfioError::Unmap { at: self.at, source }));
        }
        if let Some(bus) = self.host.bus().as_mut() {
            bus.give(self.at);
        }
    }
}

/// The ranges in what VFIO_IOMMU_GET_INFO answers: behind `argsz`, `flags`, `iova_pgsizes` and `cap_offset` a chain of capabilities, of which one has them.
fn usable_ranges(info: &[u8]) -> Vec<(u64, u64)> {
    let word = |at: usize| info.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
    let long = |at: usize| info.get(at..)?.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes));
    let mut ranges = Vec::new();
    let mut next = word(16).unwrap_or(0) as usize;
    // A chain goes forward.
    while next != 0 {
        let (Some(id), Some(after)) = (word(next), word(next + 4)) else { break };
        if id & 0xffff == vfio::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE {
            let count = word(next + 8).unwrap_or(0) as usize;
            let range = |n: usize| Some((long(next + 16 + 16 * n)?, long(next + 24 + 16 * n)?));
            ranges.extend((0..count.min(info.len())).map_while(range));
        }
        let after = after as usize;
        next = if after > next { after } else { 0 };
    }
    ranges
}

/// An error and its causes on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source()).map(|cause| format!(": {cause}"));
    std::iter::once(error.to_string()).chain(causes).collect()
}

/// Number of a VFIO request (`include/uapi/linux/vfio.h`: `_IO(VFIO_TYPE, number)`).
fn request(number: u32) -> libc::Ioctl {
    libc::Ioctl::from(u32::from(vfio::VFIO_TYPE) << 8 | number)
}

fn size_of_u32<T>() -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX)
}

/// # Safety
/// `argument` is what the request takes, and nothing that it names may be used in a way that the request rules out.
unsafe fn ioctl<T>(container: &VfioContainer, request: libc::Ioctl, argument: *mut T) -> io::Result<()> {
    // SAFETY: the caller's promise.
    match unsafe { libc::ioctl(container.as_raw_fd(), request, argument) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A capability: id and version, where the next one is, and what is in it.
    fn info(capabilities: &[(u32, u32, &[u64])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        [0_u32, 0, 0, 0, 24, 0].iter().for_each(|word| bytes.extend(word.to_ne_bytes()));
        for (id, next, content) in capabilities {
            bytes.extend(id.to_ne_bytes());
            bytes.extend(next.to_ne_bytes());
            content.iter().for_each(|word| bytes.extend(word.to_ne_bytes()));
        }
        bytes
    }

    #[test]
    fn the_ranges_are_found_behind_other_capabilities() {
        let bytes = info(&[(2 | 1 << 16, 40, &[7]), (1 | 1 << 16, 0, &[2, 0, 99, 100, 200])]);
        assert_eq!(usable_ranges(&bytes), [(0, 99), (100, 200)]);
    }

    #[test]
    fn what_is_cut_short_or_goes_round_ends() {
        let whole = info(&[(2 | 1 << 16, 40, &[7]), (1 | 1 << 16, 24, &[2, 0, 99, 100, 200])]);
        for len in 0..whole.len() {
            assert!(usable_ranges(&whole[..len]).len() < 2, "{len}");
        }
        assert_eq!(usable_ranges(&whole).len(), 2);
        assert!(usable_ranges(&info(&[(1, 24, &[u64::MAX])])).is_empty());
    }
}
