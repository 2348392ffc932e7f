//! An IOMMU domain by iommufd (`include/uapi/linux/iommufd.h`, Linux 7.3): an address space (IOAS) of `/dev/iommu`, to which functions are attached one
//! by one, each opened by a file of its own, without a group.
//!
//! Memory behind a BAR cannot be mapped here by its address, only by a dma-buf of it ([`Place::buffer`]). When its function stops answering to memory
//! accesses, by a reset or by a write to its command register, the kernel takes it out of every domain, and accesses to it are stopped. It does not
//! come back by itself: a mapping that lived then is dead until it is dropped, one that is made later lives, and while the function does not answer none
//! can be made. So a mapping is to be held for a command, as the engine does, and no longer. A command that runs when the memory goes is stopped as by any
//! fault, of which its device may say nothing.
//!
//! Not here: which bus addresses are free; when a function is reset.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use hw_engine::Place;
use iommu_addr::{Access, BusAddr, Range};
use iommufd_bindings as uapi;

use crate::VfioError;
use crate::host::Domain;
use crate::ioctls::{self, ask, size};

/// Most runs of usable bus addresses; a host has three or so.
const RUNS: usize = 256;

/// An address space, and the descriptor that it is a part of.
pub(crate) struct Ioas {
    iommufd: OwnedFd,
    id: u32,
}

/// Opens an iommufd: room for domains that no function is in.
///
/// # Errors
/// When the host has none, or none for this user.
pub fn open_iommufd() -> Result<OwnedFd, VfioError> {
    let file = File::options().read(true).write(true).open("/dev/iommu");
    file.map(OwnedFd::from).map_err(|source| VfioError::Iommufd { source })
}

impl Ioas {
    pub(crate) fn new(iommufd: OwnedFd) -> Result<Self, VfioError> {
        let mut asked = uapi::iommu_ioas_alloc { size: size::<uapi::iommu_ioas_alloc>(), flags: 0, out_ioas_id: 0 };
        ask(iommufd.as_fd(), uapi::IOMMUFD_CMD_IOAS_ALLOC, &mut asked)
            .map_err(|source| VfioError::Iommufd { source })?;
        Ok(Self { iommufd, id: asked.out_ioas_id })
    }
}

impl Domain for Ioas {
    fn open(&self, address: &str) -> Result<OwnedFd, VfioError> {
        let opened = open_device(address)
            .and_then(|device| ioctls::attach(self.iommufd.as_fd(), self.id, device.as_fd()).map(|()| device));
        opened.map_err(|source| VfioError::Open { address: address.to_owned(), source })
    }

    fn usable(&self) -> io::Result<Vec<(u64, u64)>> {
        let mut runs = [uapi::iommu_iova_range::default(); RUNS];
        let mut asked = uapi::iommu_ioas_iova_ranges {
            size: size::<uapi::iommu_ioas_iova_ranges>(),
            ioas_id: self.id,
            num_iovas: u32::try_from(RUNS).unwrap_or(0),
            allowed_iovas: runs.as_mut_ptr().expose_provenance() as u64,
            ..Default::default()
        };
        // The kernel writes no more than the runs that there is room for.
        ask(self.iommufd.as_fd(), uapi::IOMMUFD_CMD_IOAS_IOVA_RANGES, &mut asked)?;
        Ok(runs.iter().take(asked.num_iovas as usize).map(|run| (run.start, run.last)).collect())
    }

    unsafe fn map(&self, at: Range<BusAddr>, pages: &Place, access: Access) -> io::Result<()> {
        let (length, iova) = (pages.len, at.start().0);
        let right = |has: bool, flag: u32| if has { flag } else { 0 };
        let flags = uapi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA
            | right(access.read, uapi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE)
            | right(access.write, uapi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE);
        let iommufd = self.iommufd.as_fd();
        if let Some(buffer) = &pages.buffer {
            let mut asked = uapi::iommu_ioas_map_file {
                size: size::<uapi::iommu_ioas_map_file>(),
                flags,
                ioas_id: self.id,
                fd: buffer.file.as_raw_fd(),
                start: buffer.offset,
                length,
                iova,
            };
            return ask(iommufd, uapi::IOMMUFD_CMD_IOAS_MAP_FILE, &mut asked).map(drop);
        }
        let mut asked = uapi::iommu_ioas_map {
            size: size::<uapi::iommu_ioas_map>(),
            flags,
            ioas_id: self.id,
            user_va: pages.address,
            length,
            iova,
            ..Default::default()
        };
        ask(iommufd, uapi::IOMMUFD_CMD_IOAS_MAP, &mut asked).map(drop)
    }

    fn unmap(&self, at: Range<BusAddr>) -> io::Result<()> {
        let mut asked = uapi::iommu_ioas_unmap {
            size: size::<uapi::iommu_ioas_unmap>(),
            ioas_id: self.id,
            iova: at.start().0,
            length: at.last().0 - at.start().0 + 1,
        };
        ask(self.iommufd.as_fd(), uapi::IOMMUFD_CMD_IOAS_UNMAP, &mut asked).map(drop)
    }
}

/// Opens a function's own file.
fn open_device(address: &str) -> io::Result<OwnedFd> {
    let folder = Path::new("/sys/bus/pci/devices").join(address).join("vfio-dev");
    let entry = folder.read_dir()?.next().ok_or(io::ErrorKind::NotFound)??;
    let file = File::options().read(true).write(true).open(Path::new("/dev/vfio/devices").join(entry.file_name()))?;
    Ok(file.into())
}
