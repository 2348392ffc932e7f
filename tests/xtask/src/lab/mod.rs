//! The lab: a whole host in one QEMU, with an IOMMU, PCIe root ports, DMA engines and memory behind BARs.

pub mod topology;

pub use topology::Topology;
