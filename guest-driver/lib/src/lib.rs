//! Peer-to-peer DMA for programs in a guest: the safe way to a Peergate device.
//!
//! Not here: any knowledge of how the device works inside.

mod driver;
mod error;

pub use driver::{Channel, Driver, HostMemory};
pub use error::Error;
pub use peergate_uapi as uapi;
pub use vdev_wire::{EndpointKind, EventKind, FaultReason, PathReason, Status, TransferPath};
