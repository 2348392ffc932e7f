//! NVIDIA GPUs: slices of their memory, and the copy engines that reach it, through the CUDA driver's own interface.
//!
//! - [`Driver`] is the driver's library, loaded when it is needed: nothing here is linked to it.
//! - [`Gpu`] is a device with a context of this process's on it. What breaks a context is this process's trouble alone.
//! - [`Slice`] is zeroed memory of a GPU, which other processes can be handed.
//! - [`CudaEngine`] is a [`hw_engine::DmaEngine`] over the slices of one tenant.
//! - [`Nvml`] says what a GPU draws, and what is between two of them.
//!
//! A GPU reaches memory of this process that is mapped by other owners too: a guest's, or an aperture of an FPGA. A copy there is one by the GPU's copy
//! engine into the host's memory, or into a device's BAR where that is what is mapped; it is a peer-to-peer copy over PCIe only in the second case.
//!
//! `unsafe` is in `driver`, `gpu`, `peer`, `nvml`, `slice`, `pinned`, and wherever an address is handed to a GPU: `registry`, `lane`, `ways`, `side`, `shared`, `engine`,
//! `atomic`.
//!
//! Not here: translation, rights, a guest's kernels, copies through the processor.

mod atomic;
mod book;
mod driver;
mod engine;
mod gpu;
mod lane;
mod nvml;
mod peer;
mod pinned;
mod reach;
mod registry;
mod shared;
mod side;
mod slice;
mod ways;

pub use driver::{CudaError, Driver, GpuInfo};
pub use engine::{CudaEngine, Settings};
pub use gpu::Gpu;
pub use nvml::{Link, Meter, Nvml, NvmlError, PciePath};
pub use peer::Peer;
pub use slice::Slice;
