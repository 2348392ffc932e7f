//! What can be wrong with a function or with the host's VFIO.

use std::io;

use iommu_addr::{BusAddr, Range};

/// A function that cannot be used, or memory that cannot be given to one.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// The host has no VFIO for us.
    #[error("VFIO cannot be used; load vfio-pci, turn the IOMMU on and let this user open /dev/vfio/vfio")]
    Container {
        /// Why.
        source: io::Error,
    },
    /// The host has no iommufd for us.
    #[error(
        "iommufd cannot be used; take a kernel with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV and let this user open /dev/iommu"
    )]
    Iommufd {
        /// Why.
        source: io::Error,
    },
    /// The function cannot be opened.
    #[error("Function {address} cannot be opened; bind it, and all of its IOMMU group, to vfio-pci")]
    Open {
        /// Its PCI address.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// A region that is not what the driver needs.
    #[error("BAR {bar} of function {address} {what}; is this the device that the configuration says?")]
    Bar {
        /// PCI address of the function.
        address: String,
        /// Which BAR.
        bar: u32,
        /// What is wrong.
        what: &'static str,
    },
    /// The kernel maps no registers or memory.
    #[error("BAR {bar} of function {address} cannot be mapped")]
    MapBar {
        /// PCI address of the function.
        address: String,
        /// Which BAR.
        bar: u32,
        /// Why.
        source: io::Error,
    },
    /// No interrupt.
    #[error("The interrupt of function {address} cannot be had")]
    Interrupt {
        /// PCI address of the function.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// The IOMMU was not programmed.
    #[error(
        "The IOMMU does not map {at}; check the limit on locked memory, the number of mappings (65535 at most), and that memory behind a BAR answers"
    )]
    Map {
        /// Which bus addresses.
        at: Range<BusAddr>,
        /// Why.
        source: io::Error,
    },
    /// The IOMMU still holds what it should not.
    #[error("The IOMMU does not unmap {at}; the function is not given any more work")]
    Unmap {
        /// Which bus addresses.
        at: Range<BusAddr>,
        /// Why.
        source: io::Error,
    },
    /// No bus addresses are left.
    #[error("There are no {bytes} free bus addresses below {mask:#x}")]
    Addresses {
        /// How many were wanted.
        bytes: u64,
        /// The highest address that the function can name.
        mask: u64,
    },
    /// The function does not do what its specification says.
    #[error("The function did not {what} within {millis} ms; reset it")]
    Stuck {
        /// What it was to do.
        what: &'static str,
        /// How long it had.
        millis: u64,
    },
    /// The function refuses.
    #[error("The function refuses to {what} with status {status:#x}")]
    Refused {
        /// What it was to do.
        what: &'static str,
        /// Its own word.
        status: u32,
    },
    /// The function is of no use.
    #[error("The function {what}; give the tenant another one")]
    Unfit {
        /// Why.
        what: &'static str,
    },
    /// The host has no memory or no thread for the engine.
    #[error("The engine cannot be started; check the limits on memory, threads and descriptors")]
    Start {
        /// Why.
        source: io::Error,
    },
}
