//! What an engine needs to know of the registers of a DMA engine, and every kind there is.
//!
//! A driver moves bytes between memory of its own and bus addresses. Memory of its own is what it stores (blocks of an NVMe namespace, which are an
//! endpoint's memory), or a buffer through which it copies. A further kind is one file here and one line in [`open`].
//!
//! Not here: which bytes, in which order, mapping memory, waiting.

pub mod edu;
pub mod nvme;

use iommu_addr::BusAddr;
use vmm_sys_util::eventfd::EventFd;

use crate::{Function, VfioError};

/// Constant properties of a driver's engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of its own memory.
    pub own_len: u64,
    /// Its own memory is a buffer of the engine's, and no endpoint's.
    pub is_buffer: bool,
    /// Offsets in its own memory and lengths are multiples of this.
    pub granule: u64,
    /// Bus addresses are multiples of this, at least.
    pub alignment: u64,
    /// Most bytes of a command.
    pub most: u64,
    /// Commands at a time.
    pub depth: usize,
    /// Highest bus address.
    pub mask: u64,
    /// Most bytes of its own memory that one [`Command::Zero`] takes; 0 if it knows none.
    pub zeroes: u64,
    /// Whether it says so when the IOMMU stops it.
    pub reports_faults: bool,
}

/// One command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// From bus addresses to its own memory.
    In {
        /// Offset in its own memory.
        own: u64,
        /// First bus address.
        bus: BusAddr,
        /// Length in bytes.
        len: u64,
    },
    /// From its own memory to bus addresses.
    Out {
        /// Offset in its own memory.
        own: u64,
        /// First bus address.
        bus: BusAddr,
        /// Length in bytes.
        len: u64,
    },
    /// Make its own memory zero.
    Zero {
        /// Offset in its own memory.
        own: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Make what was written last.
    Flush,
}

/// Registers and queues of one engine. Nothing waits but [`Driver::reset`] and [`Driver::stop`].
pub trait Driver: Send {
    /// What it can do.
    fn shape(&self) -> Shape;

    /// Begins a command, which fits [`Driver::shape`], in a slot below `depth` that is free.
    fn start(&mut self, slot: usize, command: Command);

    /// Appends the slots whose commands have ended, with the device's own word if it was an error.
    fn poll(&mut self, ended: &mut Vec<(usize, Result<(), u32>)>);

    /// Forgets every command; when it returns, none touches memory any more. Waits for the device.
    ///
    /// # Errors
    /// When the device is lost.
    fn reset(&mut self) -> Result<(), VfioError>;

    /// Stops the device for good: no command touches memory any more.
    fn stop(&mut self);
}

/// Kinds of engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An NVMe controller, with one of its namespaces.
    Nvme {
        /// Number of the namespace.
        namespace: u32,
    },
    /// QEMU's `edu`: 4 KiB at a time.
    Edu,
}

/// Opens a driver on a function; its interrupts count up `interrupt`.
///
/// # Errors
/// When the function is not such an engine, or does not come up.
pub fn open(kind: Kind, function: Function, interrupt: &EventFd) -> Result<Box<dyn Driver>, VfioError> {
    Ok(match kind {
        Kind::Nvme { namespace } => Box::new(nvme::Nvme::open(function, namespace, interrupt)?),
        Kind::Edu => Box::new(edu::Edu::open(function, interrupt)?),
    })
}
