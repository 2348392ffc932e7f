//! Regions of the guest's memory, checked before use.
//!
//! The front-end names a file, an offset and a length. Touching a page beyond the file's end, now or after the front-end cut it off, is a
//! SIGBUS that no handler can turn into an answer. So every region's file must be regular, long enough, and sealed against shrinking; the
//! operator may accept an unsealed one (a plain file or hugetlbfs cannot be sealed), since the process serves this one VM alone.

use std::os::fd::AsFd;
use std::sync::Arc;

use hw_engine::RamRegion;
use iommu_addr::{Gpa, Range};
use rustix::fs::{FileType, SealFlags};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

/// What to do with guest memory whose file could be cut off while it is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnsealedPolicy {
    /// Use it and say so in the log.
    #[default]
    Warn,
    /// Close the connection.
    Refuse,
}

/// Why a region is not used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegionError {
    #[error("The region at {gpa:#x} has no file; start the VM with shared memory")]
    NoFile { gpa: u64 },
    #[error("The region at {gpa:#x} leaves the 64-bit space or is empty")]
    Shape { gpa: u64 },
    #[error("Cannot ask about the file behind the region at {gpa:#x}")]
    Stat { gpa: u64, source: rustix::io::Errno },
    #[error("The file behind the region at {gpa:#x} is a {kind:?}, not a regular file")]
    NotRegular { gpa: u64, kind: FileType },
    #[error("The file behind the region at {gpa:#x} has {have} bytes, but the region needs {need}")]
    TooShort { gpa: u64, have: u64, need: u64 },
    #[error(
        "The file behind the region at {gpa:#x} is not sealed against shrinking; use a memfd backend with seal=on, or allow unsealed memory"
    )]
    Unsealed { gpa: u64 },
}

/// A memory table that passed.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) regions: Vec<RamRegion>,
    /// Guest addresses of the regions that are not sealed.
    pub(crate) unsealed: Vec<u64>,
}

/// Checks every region of a table.
pub(crate) fn check(table: &GuestMemoryMmap, policy: UnsealedPolicy) -> Result<Checked, RegionError> {
    let mut checked = Checked { regions: Vec::new(), unsealed: Vec::new() };
    for region in table.iter() {
        let (ram, sealed) = check_region(region)?;
        let gpa = region.start_addr().raw_value();
        if !sealed {
            if policy == UnsealedPolicy::Refuse {
                return Err(RegionError::Unsealed { gpa });
            }
            checked.unsealed.push(gpa);
        }
        checked.regions.push(ram);
    }
    Ok(checked)
}

fn check_region(region: &GuestRegionMmap) -> Result<(RamRegion, bool), RegionError> {
    let gpa = region.start_addr().raw_value();
    let backing = region.file_offset().ok_or(RegionError::NoFile { gpa })?;
    let range = Range::with_len(Gpa(gpa), region.len()).ok_or(RegionError::Shape { gpa })?;
    let stat = rustix::fs::fstat(backing.file().as_fd()).map_err(|source| RegionError::Stat { gpa, source })?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind != FileType::RegularFile {
        return Err(RegionError::NotRegular { gpa, kind });
    }
    let need = backing.start().checked_add(region.len()).ok_or(RegionError::Shape { gpa })?;
    let have = u64::try_from(stat.st_size).unwrap_or(0);
    if have < need {
        return Err(RegionError::TooShort { gpa, have, need });
    }
    // Only memory files have seals; asking anything else is an error.
    let sealed = rustix::fs::fcntl_get_seals(backing.file()).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    Ok((RamRegion { gpa: range, file: Arc::clone(backing.arc()), offset: backing.start() }, sealed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};
    use std::fs::File;
    use vm_memory::{FileOffset, GuestAddress};

    fn memfd(len: u64, seals: SealFlags) -> File {
        let file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
        file.set_len(len).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    }

    fn table(file: File, offset: u64, len: usize) -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0x10_0000), len, Some(FileOffset::new(file, offset)))])
            .unwrap()
    }

    #[test]
    fn sealed_region_passes_and_keeps_file_and_offset() {
        let table = table(memfd(0x4000, SealFlags::SHRINK), 0x1000, 0x3000);
        let checked = check(&table, UnsealedPolicy::Refuse).unwrap();
        assert!(checked.unsealed.is_empty());
        assert_eq!(checked.regions.len(), 1);
        assert_eq!(checked.regions[0].gpa, Range::with_len(Gpa(0x10_0000), 0x3000).unwrap());
        assert_eq!(checked.regions[0].offset, 0x1000);
    }

    #[test]
    fn region_longer_than_its_file_is_refused() {
        let table = table(memfd(0x4000, SealFlags::SHRINK), 0x2000, 0x3000);
        let error = check(&table, UnsealedPolicy::Warn).unwrap_err();
        assert!(matches!(error, RegionError::TooShort { have: 0x4000, need: 0x5000, .. }), "{error}");
    }

    #[test]
    fn unsealed_region_follows_the_policy() {
        let table = table(memfd(0x4000, SealFlags::GROW), 0, 0x4000);
        assert_eq!(check(&table, UnsealedPolicy::Warn).unwrap().unsealed, [0x10_0000]);
        let error = check(&table, UnsealedPolicy::Refuse).unwrap_err();
        assert!(matches!(error, RegionError::Unsealed { gpa: 0x10_0000 }), "{error}");
    }

    #[test]
    fn device_file_is_refused() {
        let zero = File::options().read(true).write(true).open("/dev/zero").unwrap();
        let error = check(&table(zero, 0, 0x1000), UnsealedPolicy::Warn).unwrap_err();
        assert!(matches!(error, RegionError::NotRegular { .. }), "{error}");
    }

    #[test]
    fn memory_without_a_file_is_refused() {
        let table = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        assert!(matches!(check(&table, UnsealedPolicy::Warn), Err(RegionError::NoFile { gpa: 0 })));
    }
}
