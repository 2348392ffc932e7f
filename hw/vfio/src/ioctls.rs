//! The requests of VFIO (`include/uapi/linux/vfio.h`, Linux 6.1 to 7.3) over descriptors, as safe functions.
//!
//! `vfio-ioctls` opens groups by their paths, looks into sysfs again when a device goes, and maps everything for reading and writing. A worker has
//! descriptors and no paths, and a source must not be writable: so what a group's device needs is asked for here.
//!
//! Not here: what the answers are used for.

use std::ffi::CString;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use iommu_addr::{Access, BusAddr, Range};
use vfio_bindings::bindings::vfio;

use crate::Area;

/// Room for what a container says of its IOMMU, and for the areas of a region.
const INFO_WORDS: usize = 512;

/// Numbers of requests.
mod number {
    use vfio_bindings::bindings::vfio::VFIO_BASE;

    pub(super) const GET_API_VERSION: u32 = VFIO_BASE;
    pub(super) const CHECK_EXTENSION: u32 = VFIO_BASE + 1;
    pub(super) const SET_IOMMU: u32 = VFIO_BASE + 2;
    pub(super) const GROUP_GET_STATUS: u32 = VFIO_BASE + 3;
    pub(super) const GROUP_SET_CONTAINER: u32 = VFIO_BASE + 4;
    pub(super) const GROUP_UNSET_CONTAINER: u32 = VFIO_BASE + 5;
    pub(super) const GROUP_GET_DEVICE_FD: u32 = VFIO_BASE + 6;
    pub(super) const DEVICE_GET_INFO: u32 = VFIO_BASE + 7;
    pub(super) const DEVICE_GET_REGION_INFO: u32 = VFIO_BASE + 8;
    pub(super) const DEVICE_GET_IRQ_INFO: u32 = VFIO_BASE + 9;
    pub(super) const DEVICE_SET_IRQS: u32 = VFIO_BASE + 10;
    pub(super) const DEVICE_RESET: u32 = VFIO_BASE + 11;
    pub(super) const IOMMU_GET_INFO: u32 = VFIO_BASE + 12;
    pub(super) const IOMMU_MAP_DMA: u32 = VFIO_BASE + 13;
    pub(super) const IOMMU_UNMAP_DMA: u32 = VFIO_BASE + 14;
    pub(super) const DEVICE_FEATURE: u32 = VFIO_BASE + 17;
    pub(super) const DEVICE_BIND_IOMMUFD: u32 = VFIO_BASE + 18;
    pub(super) const DEVICE_ATTACH_IOMMUFD_PT: u32 = VFIO_BASE + 19;
}

fn request(number: u32) -> libc::Ioctl {
    libc::Ioctl::from(u32::from(vfio::VFIO_TYPE) << 8 | number)
}

fn answer(answer: libc::c_int) -> io::Result<u32> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer.unsigned_abs()) }
}

/// A request that takes a number.
fn plain(fd: BorrowedFd<'_>, number: u32, value: u32) -> io::Result<u32> {
    // SAFETY: the requests that this is for take a number, and no memory.
    answer(unsafe { libc::ioctl(fd.as_raw_fd(), request(number), libc::c_ulong::from(value)) })
}

/// A request that takes a structure, which says itself how long it is.
pub(crate) fn ask<T>(fd: BorrowedFd<'_>, number: u32, structure: &mut T) -> io::Result<u32> {
    // SAFETY: each caller gives the structure of its request, and room for what the kernel writes behind a pointer in it. What makes the kernel use memory later (mapping) asks its own callers to keep it.
    answer(unsafe { libc::ioctl(fd.as_raw_fd(), request(number), &raw mut *structure) })
}

pub(crate) fn size<T>() -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX)
}

/// A group joins a container, which is then one IOMMU domain (type1, version 2).
pub(crate) fn join(container: BorrowedFd<'_>, group: BorrowedFd<'_>) -> io::Result<()> {
    if plain(container, number::GET_API_VERSION, 0)? != vfio::VFIO_API_VERSION
        || plain(container, number::CHECK_EXTENSION, vfio::VFIO_TYPE1v2_IOMMU)? != 1
    {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let status = status(group)?;
    if status & vfio::VFIO_GROUP_FLAGS_VIABLE == 0 {
        return Err(io::Error::other("other devices of its IOMMU group are in use by the host"));
    }
    if status & vfio::VFIO_GROUP_FLAGS_CONTAINER_SET == 0 {
        let mut fd: RawFd = container.as_raw_fd();
        ask(group, number::GROUP_SET_CONTAINER, &mut fd)?;
    }
    match plain(container, number::SET_IOMMU, vfio::VFIO_TYPE1v2_IOMMU) {
        // Set by the group before this one.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => other.map(drop),
    }
}

fn status(group: BorrowedFd<'_>) -> io::Result<u32> {
    let mut status = vfio::vfio_group_status { argsz: size::<vfio::vfio_group_status>(), flags: 0 };
    ask(group, number::GROUP_GET_STATUS, &mut status)?;
    Ok(status.flags)
}

/// A group leaves its container, if it is in one. Refused while a function of it is open.
pub(crate) fn leave(group: BorrowedFd<'_>) -> io::Result<()> {
    if status(group)? & vfio::VFIO_GROUP_FLAGS_CONTAINER_SET != 0 {
        plain(group, number::GROUP_UNSET_CONTAINER, 0)?;
    }
    Ok(())
}

/// Puts a function that was opened by its own file into an address space of an iommufd.
pub(crate) fn attach(iommufd: BorrowedFd<'_>, ioas: u32, device: BorrowedFd<'_>) -> io::Result<()> {
    type Bind = vfio::vfio_device_bind_iommufd;
    type Attach = vfio::vfio_device_attach_iommufd_pt;
    let mut bind = Bind { argsz: size::<Bind>(), iommufd: iommufd.as_raw_fd(), ..Default::default() };
    ask(device, number::DEVICE_BIND_IOMMUFD, &mut bind)?;
    let mut attach = Attach { argsz: size::<Attach>(), pt_id: ioas, ..Default::default() };
    ask(device, number::DEVICE_ATTACH_IOMMUFD_PT, &mut attach).map(drop)
}

/// Opens a function of a group that is in a container.
pub(crate) fn device(group: BorrowedFd<'_>, address: &str) -> io::Result<OwnedFd> {
    let mut name = CString::new(address)?.into_bytes_with_nul();
    // The request takes a name that ends with a zero, and reads no further.
    // SAFETY: the name ends with a zero and outlives the call.
    let fd =
        answer(unsafe { libc::ioctl(group.as_raw_fd(), request(number::GROUP_GET_DEVICE_FD), name.as_mut_ptr()) })?;
    opened(fd)
}

/// Whether it is a PCI function that can be reset.
pub(crate) fn is_pci(device: BorrowedFd<'_>) -> io::Result<bool> {
    let mut info = vfio::vfio_device_info { argsz: size::<vfio::vfio_device_info>(), ..Default::default() };
    ask(device, number::DEVICE_GET_INFO, &mut info)?;
    Ok(info.flags & vfio::VFIO_DEVICE_FLAGS_PCI != 0)
}

/// A BAR, or the configuration space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Region {
    /// Length in bytes; 0 if there is none.
    pub(crate) len: u64,
    /// Where it begins in the device's descriptor.
    pub(crate) offset: u64,
    /// The runs of it that may be mapped.
    pub(crate) areas: Vec<Area>,
}

/// What the kernel says of a region.
pub(crate) fn region(device: BorrowedFd<'_>, index: u32) -> io::Result<Region> {
    let mut words = [0_u64; INFO_WORDS];
    let bytes = u32::try_from(size_of_val(&words)).unwrap_or(0);
    // `argsz` and `flags`, then `index` and `cap_offset`.
    (words[0], words[1]) = (pair(bytes, 0), pair(index, 0));
    ask(device, number::DEVICE_GET_REGION_INFO, &mut words)?;
    Ok(region_of(&words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>()))
}

fn pair(low: u32, high: u32) -> u64 {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&low.to_ne_bytes());
    bytes[4..].copy_from_slice(&high.to_ne_bytes());
    u64::from_ne_bytes(bytes)
}

fn region_of(info: &[u8]) -> Region {
    type Info = vfio::vfio_region_info;
    let flags = word(info, offset_of!(Info, flags));
    let (len, offset) = (long(info, offset_of!(Info, size)), long(info, offset_of!(Info, offset)));
    let mut areas = Vec::new();
    if flags & vfio::VFIO_REGION_INFO_FLAG_MMAP != 0 {
        let first =
            if flags & vfio::VFIO_REGION_INFO_FLAG_CAPS != 0 { word(info, offset_of!(Info, cap_offset)) } else { 0 };
        let sparse = capability(info, first, vfio::VFIO_REGION_INFO_CAP_SPARSE_MMAP);
        match sparse {
            // Behind the head: how many areas, a reserved word, and then each one's offset and size.
            Some(at) => {
                let count = (word(info, at + 8) as usize).min(info.len());
                let area = |n: usize| Area { start: long(info, at + 16 + 16 * n), len: long(info, at + 24 + 16 * n) };
                areas.extend((0..count).map(area).filter(|area| area.len > 0));
            }
            None => areas.push(Area { start: 0, len }),
        }
    }
    Region { len, offset, areas }
}

/// Where a capability is in a chain of them, each with id, version, and where the next one is. The chain goes forward.
fn capability(info: &[u8], first: u32, wanted: u32) -> Option<usize> {
    let mut next = first as usize;
    while next != 0 && next < info.len() {
        if word(info, next) & 0xffff == wanted {
            return Some(next);
        }
        let after = word(info, next + 4) as usize;
        next = if after > next { after } else { 0 };
    }
    None
}

/// The four bytes at `at`; 0 beyond the end.
fn word(info: &[u8], at: usize) -> u32 {
    info.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

/// The eight bytes at `at`; 0 beyond the end.
fn long(info: &[u8], at: usize) -> u64 {
    info.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

/// Makes a dma-buf of a run of a BAR.
pub(crate) fn export(device: BorrowedFd<'_>, bar: u32, area: Area) -> io::Result<OwnedFd> {
    /// The head of a feature, what is asked, and one range.
    #[repr(C)]
    struct Export {
        argsz: u32,
        flags: u32,
        bar: u32,
        open_flags: u32,
        buffer_flags: u32,
        ranges: u32,
        start: u64,
        len: u64,
    }
    let flags = vfio::VFIO_DEVICE_FEATURE_GET | vfio::VFIO_DEVICE_FEATURE_DMA_BUF;
    let open_flags = (libc::O_RDWR | libc::O_CLOEXEC).cast_unsigned();
    let Area { start, len } = area;
    let mut export = Export { argsz: size::<Export>(), flags, bar, open_flags, buffer_flags: 0, ranges: 1, start, len };
    opened(ask(device, number::DEVICE_FEATURE, &mut export)?)
}

/// The descriptor that a request has answered.
fn opened(answer: u32) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(answer).map_err(io::Error::other)?;
    // SAFETY: the kernel made the descriptor for us, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// How many interrupts of a kind there are.
pub(crate) fn interrupts(device: BorrowedFd<'_>, index: u32) -> u32 {
    let mut info = vfio::vfio_irq_info { argsz: size::<vfio::vfio_irq_info>(), flags: 0, index, count: 0 };
    // A kind that the function does not have is refused.
    ask(device, number::DEVICE_GET_IRQ_INFO, &mut info).map_or(0, |_| info.count)
}

/// Has the first interrupt of a kind count up `counter`.
pub(crate) fn enable_interrupt(device: BorrowedFd<'_>, index: u32, counter: RawFd) -> io::Result<()> {
    #[repr(C)]
    struct Set {
        argsz: u32,
        flags: u32,
        index: u32,
        start: u32,
        count: u32,
        counter: RawFd,
    }
    let flags = vfio::VFIO_IRQ_SET_DATA_EVENTFD | vfio::VFIO_IRQ_SET_ACTION_TRIGGER;
    let mut set = Set { argsz: size::<Set>(), flags, index, start: 0, count: 1, counter };
    ask(device, number::DEVICE_SET_IRQS, &mut set).map(drop)
}

/// Resets a function. Blocks until it is done.
pub(crate) fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    plain(device, number::DEVICE_RESET, 0).map(drop)
}

/// The bus addresses that a container can map, as first and last.
pub(crate) fn usable(container: BorrowedFd<'_>) -> io::Result<Vec<(u64, u64)>> {
    let mut words = [0_u64; INFO_WORDS];
    words[0] = pair(u32::try_from(size_of_val(&words)).unwrap_or(0), 0);
    ask(container, number::IOMMU_GET_INFO, &mut words)?;
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    Ok(usable_ranges(&bytes))
}

/// Behind `argsz`, `flags`, `iova_pgsizes` and `cap_offset` comes a chain of capabilities, of which one has the ranges.
fn usable_ranges(info: &[u8]) -> Vec<(u64, u64)> {
    let Some(at) = capability(info, word(info, 16), vfio::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE) else {
        return Vec::new();
    };
    let count = (word(info, at + 8) as usize).min(info.len());
    let range = |n: usize| {
        let end = at + 32 + 16 * n;
        (end <= info.len()).then(|| (long(info, end - 16), long(info, end - 8)))
    };
    (0..count).map_while(range).collect()
}

/// Maps memory of this process into a container's domain, for no more than `access`.
///
/// # Safety
/// The memory stays mapped in this process until [`unmap`] or until the container is gone, and is only used in ways that allow for a device that
/// reads and writes it.
pub(crate) unsafe fn map(container: BorrowedFd<'_>, at: Range<BusAddr>, from: u64, access: Access) -> io::Result<()> {
    let right = |has: bool, flag: u32| if has { flag } else { 0 };
    let mut map = vfio::vfio_iommu_type1_dma_map {
        argsz: size::<vfio::vfio_iommu_type1_dma_map>(),
        flags: right(access.read, vfio::VFIO_DMA_MAP_FLAG_READ) | right(access.write, vfio::VFIO_DMA_MAP_FLAG_WRITE),
        vaddr: from,
        iova: at.start().0,
        size: at.last().0 - at.start().0 + 1,
    };
    ask(container, number::IOMMU_MAP_DMA, &mut map).map(drop)
}

/// Takes a mapping out of a container's domain: when it returns, no device reaches the memory any more.
pub(crate) fn unmap(container: BorrowedFd<'_>, at: Range<BusAddr>) -> io::Result<()> {
    let mut unmap = vfio::vfio_iommu_type1_dma_unmap {
        argsz: size::<vfio::vfio_iommu_type1_dma_unmap>(),
        flags: 0,
        iova: at.start().0,
        size: at.last().0 - at.start().0 + 1,
        ..Default::default()
    };
    ask(container, number::IOMMU_UNMAP_DMA, &mut unmap).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four words, `cap_offset` in the fifth, and capabilities: id and version, where the next one is, and what is in it.
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

    #[test]
    fn a_region_is_mapped_as_a_whole_or_in_the_areas_that_the_kernel_names() {
        let region = |flags: u32, capabilities: &[u64]| {
            let mut words = vec![pair(0, flags), pair(2, 32), 0x4000, 7 << 40];
            words.extend(capabilities);
            region_of(&words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>())
        };
        let (mmap, caps) = (vfio::VFIO_REGION_INFO_FLAG_MMAP, vfio::VFIO_REGION_INFO_FLAG_CAPS);
        let sparse = [pair(1 | 1 << 16, 0), pair(2, 0), 0, 0x1000, 0x3000, 0x1000];
        assert_eq!(region(mmap, &sparse).areas, [Area { start: 0, len: 0x4000 }]);
        let areas = [Area { start: 0, len: 0x1000 }, Area { start: 0x3000, len: 0x1000 }];
        assert_eq!(region(mmap | caps, &sparse), Region { len: 0x4000, offset: 7 << 40, areas: areas.to_vec() });
        assert!(region(caps, &sparse).areas.is_empty(), "it cannot be mapped at all");
        // More areas than there are.
        assert_eq!(region(mmap | caps, &[pair(1, 0), pair(u32::MAX, 0), 0, 0x1000]).areas.len(), 1);
    }
}
