//! The guest's memory and the window: a sealed file each, mapped and shared, as VMMs share them with devices.
//!
//! Bytes are only copied in and out, never borrowed: the guest writes them at the same time. Not here: what lies where.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::MicroVmError;
use crate::program::{WINDOW, WINDOW_LEN};

/// A file of `len` zero bytes at `at` in the guest, mapped.
pub(crate) fn shared(name: &str, at: u64, len: usize) -> Result<(GuestMemoryMmap, Arc<File>), MicroVmError> {
    let make = || -> std::io::Result<File> {
        let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.set_len(len as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file)
    };
    let file = Arc::new(make().map_err(MicroVmError::host("make a memory file"))?);
    let backing = FileOffset::from_arc(Arc::clone(&file), 0);
    let memory = GuestMemoryMmap::from_ranges_with_files([(GuestAddress(at), len, Some(backing))])
        .map_err(|error| MicroVmError::Host { what: "map a memory file", source: std::io::Error::other(error) })?;
    Ok((memory, file))
}

/// What the window shows, as whoever else has its file sees it.
#[derive(Debug)]
pub struct Window {
    pub(crate) memory: GuestMemoryMmap,
    file: Arc<File>,
}

impl Window {
    pub(crate) fn new() -> Result<Self, MicroVmError> {
        let (memory, file) = shared("microvm-window", WINDOW, WINDOW_LEN)?;
        Ok(Self { memory, file })
    }

    /// The word at `offset`, read from the file and not through the mapping that the guest has.
    pub fn word(&self, offset: u16) -> Result<u16, MicroVmError> {
        let mut bytes = [0; 2];
        self.file.read_exact_at(&mut bytes, offset.into()).map_err(MicroVmError::host("read the window's file"))?;
        Ok(u16::from_le_bytes(bytes))
    }

    /// Every byte.
    pub fn bytes(&self) -> Result<Vec<u8>, MicroVmError> {
        let mut bytes = vec![0; WINDOW_LEN];
        self.file.read_exact_at(&mut bytes, 0).map_err(MicroVmError::host("read the window's file"))?;
        Ok(bytes)
    }
}

/// The address that this process has a guest's address at.
pub(crate) fn host_address(memory: &GuestMemoryMmap, at: u64) -> Result<u64, MicroVmError> {
    Ok(memory.get_host_address(GuestAddress(at))? as u64)
}
