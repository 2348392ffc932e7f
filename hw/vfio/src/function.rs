//! A PCI function: its configuration space, its BARs, its interrupts.
//!
//! Not here: what its registers mean.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use vfio_bindings::bindings::vfio;
use vmm_sys_util::eventfd::EventFd;

use crate::ioctls::{self, Region};
use crate::{Host, VfioError};

/// COMMAND of the configuration space, and its bits (PCI 3.0, 6.2.2): answer to memory accesses, make them.
const COMMAND: u64 = 4;
const MEMORY: u16 = 1 << 1;
const MASTER: u16 = 1 << 2;

/// A run of a BAR that may be mapped: where it begins in the BAR, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// First byte, from the beginning of the BAR.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

/// An open function. It is reset when it is opened and when it goes.
pub struct Function {
    address: String,
    device: File,
    config: Region,
    host: Arc<Host>,
}

impl Function {
    /// A function that has joined the domain ([`claim`](crate::claim)). It is reset, and may then use the bus. `address` is for messages.
    ///
    /// # Errors
    /// When it is none that can be used.
    pub fn new(host: &Arc<Host>, device: OwnedFd, address: &str) -> Result<Self, VfioError> {
        let open = |source| VfioError::Open { address: address.to_owned(), source };
        if !ioctls::is_pci(device.as_fd()).map_err(open)? {
            return Err(VfioError::Unfit { what: "is none of PCI" });
        }
        let config = ioctls::region(device.as_fd(), vfio::VFIO_PCI_CONFIG_REGION_INDEX).map_err(open)?;
        host.joined()?;
        let function = Self { address: address.to_owned(), device: device.into(), config, host: Arc::clone(host) };
        function.reset();
        Ok(function)
    }

    /// The same for one of the host's functions, by its address (`0000:01:00.0`). For a process that has paths.
    ///
    /// # Errors
    /// When it is not there or not ours.
    pub fn open(host: &Arc<Host>, address: &str) -> Result<Self, VfioError> {
        Self::new(host, host.open(address)?, address)
    }

    /// The domain that it is in.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// Its PCI address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Resets it: whatever it did, it does no more.
    pub fn reset(&self) {
        self.stop();
        self.set_command(MEMORY | MASTER, 0);
    }

    /// Resets it, and leaves it so: it makes no accesses any more.
    pub fn stop(&self) {
        // First of all the bus: a function without a reset of its own ends there.
        self.set_command(0, MASTER);
        if let Err(error) = ioctls::reset(self.device.as_fd()) {
            tracing::debug!("Function {} cannot be reset; it is off the bus: {error}", self.address);
        }
    }

    fn set_command(&self, set: u16, clear: u16) {
        let (mut command, at) = ([0; 2], self.config.offset + COMMAND);
        let done = self.device.read_exact_at(&mut command, at).and_then(|()| {
            let command = u16::from_le_bytes(command) & !clear | set;
            self.device.write_all_at(&command.to_le_bytes(), at)
        });
        if let Err(error) = done {
            tracing::error!("The command register of function {} cannot be written: {error}", self.address);
        }
    }

    /// Length of a BAR in bytes; 0 if there is none.
    pub fn bar_len(&self, bar: u32) -> u64 {
        self.bar(bar).len
    }

    fn bar(&self, bar: u32) -> Region {
        ioctls::region(self.device.as_fd(), bar).unwrap_or_default()
    }

    /// The runs of a BAR that may be mapped; none if it cannot be.
    pub fn areas(&self, bar: u32) -> Vec<Area> {
        self.bar(bar).areas
    }

    /// What maps a BAR: a descriptor, and where the BAR begins in it.
    ///
    /// # Errors
    /// When there are no more descriptors.
    pub fn bar_file(&self, bar: u32) -> io::Result<(File, u64)> {
        Ok((self.device.try_clone()?, self.bar(bar).offset))
    }

    /// Makes a dma-buf of a run of a BAR: what memory of a device is given to an IOMMU by, in a domain of iommufd.
    ///
    /// # Errors
    /// When the kernel makes none, or of no such run.
    pub fn bar_buffer(&self, bar: u32, area: Area) -> Result<File, VfioError> {
        let made = ioctls::export(self.device.as_fd(), bar, area);
        made.map(File::from).map_err(|source| VfioError::MapBar { address: self.address.clone(), bar, source })
    }

    /// Maps the registers in a BAR, which must have `len` bytes of them at least.
    ///
    /// # Errors
    /// When it has not, or when they cannot be mapped.
    pub fn registers(&self, bar: u32, len: u64) -> Result<Registers, VfioError> {
        let wrong = |what| VfioError::Bar { address: self.address.clone(), bar, what };
        let area = self.areas(bar).into_iter().find(|area| area.start == 0).ok_or_else(|| wrong("cannot be mapped"))?;
        if area.len < len {
            return Err(wrong("is too small"));
        }
        let map = |source| VfioError::MapBar { address: self.address.clone(), bar, source };
        let (file, offset) = self.bar_file(bar).map_err(map)?;
        Registers::map(&file, offset, area.len).map_err(map)
    }

    /// Has the first message-signalled interrupt count up `counter`, by MSI-X or MSI, whichever there is.
    ///
    /// # Errors
    /// When there is neither.
    pub fn interrupt(&self, counter: &EventFd) -> Result<(), VfioError> {
        let kinds = [vfio::VFIO_PCI_MSIX_IRQ_INDEX, vfio::VFIO_PCI_MSI_IRQ_INDEX];
        let has = |index: &u32| ioctls::interrupts(self.device.as_fd(), *index) > 0;
        let index = kinds.into_iter().find(has).unwrap_or(vfio::VFIO_PCI_MSI_IRQ_INDEX);
        let enabled = ioctls::enable_interrupt(self.device.as_fd(), index, counter.as_raw_fd());
        enabled.map_err(|source| VfioError::Interrupt { address: self.address.clone(), source })
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Registers of a function, mapped. Each access is one on the bus, of the width that it says.
pub struct Registers {
    first: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; accesses are single loads and stores.
unsafe impl Send for Registers {}
// SAFETY: as above.
unsafe impl Sync for Registers {}

impl Registers {
    fn map(file: &File, offset: u64, len: u64) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(io::Error::other)?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null address lets the kernel choose a place, so no memory of this process is replaced.
        let first = unsafe { mmap(ptr::null_mut(), len, rights, MapFlags::SHARED, file, offset) }?;
        let first = NonNull::new(first.cast()).ok_or(io::ErrorKind::InvalidData)?;
        let registers = Self { first, len };
        // SAFETY: the range is this mapping's own; the advice keeps it from children.
        unsafe { madvise(registers.first.as_ptr().cast(), len, Advice::LinuxDontFork) }?;
        Ok(registers)
    }

    /// Where a register is.
    ///
    /// # Panics
    /// When it is not in the BAR, or not aligned: a driver's mistake.
    fn place<T>(&self, at: usize) -> NonNull<T> {
        let fits = at.checked_add(size_of::<T>()).is_some_and(|end| end <= self.len);
        assert!(fits && at.is_multiple_of(align_of::<T>()), "register {at:#x} is none of {:#x} bytes", self.len);
        // SAFETY: the assertion has found it inside the mapping.
        unsafe { self.first.add(at) }.cast()
    }

    /// Reads four bytes.
    pub fn read32(&self, at: usize) -> u32 {
        // SAFETY: `place` has found it mapped and aligned.
        u32::from_le(unsafe { self.place::<u32>(at).as_ptr().read_volatile() })
    }

    /// Writes four bytes.
    pub fn write32(&self, at: usize, value: u32) {
        // SAFETY: as for `read32`.
        unsafe { self.place::<u32>(at).as_ptr().write_volatile(value.to_le()) }
    }

    /// Reads eight bytes.
    pub fn read64(&self, at: usize) -> u64 {
        // SAFETY: as for `read32`.
        u64::from_le(unsafe { self.place::<u64>(at).as_ptr().read_volatile() })
    }

    /// Writes eight bytes.
    pub fn write64(&self, at: usize, value: u64) {
        // SAFETY: as for `read32`.
        unsafe { self.place::<u64>(at).as_ptr().write_volatile(value.to_le()) }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: the range is what `mmap` gave, and nothing borrows from it beyond a call.
        let unmapped = unsafe { munmap(self.first.as_ptr().cast(), self.len) };
        debug_assert_eq!(unmapped, Ok(()), "the range was mapped as it is unmapped");
    }
}
