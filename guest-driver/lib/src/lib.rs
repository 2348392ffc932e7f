//! Peer-to-peer DMA for programs in a guest: the safe way to a Peergate device.
//!
//! Two storeys. Below, [`Driver`] and [`Channel`]: the calls of the user interface, without policy; [`KernelDriver`] makes them to
//! `/dev/peergateN`. Above, [`Session`]: an open device whose [`Buffer`]s, [`HostBuffer`]s and [`Stream`]s own what they stand for, wait for
//! what they start, and report errors as [`Error`].
//!
//! ```no_run
//! use peergate_guest::{Access, KernelDriver, Session, copy_all};
//!
//! # fn main() -> Result<(), peergate_guest::Error> {
//! let session = Session::open(&KernelDriver::new("/dev/peergate0"))?;
//! let (gpu, fpga) = (session.endpoint("gpu0")?, session.endpoint("fpga0")?);
//! let source = session.alloc(gpu.number, 64 << 20, Access::RW)?;
//! let destination = session.alloc(fpga.number, 64 << 20, Access::RW)?;
//! session.peer_enable(gpu.number, fpga.number, Access::WRITE)?;
//! let moved = copy_all(&session.stream(), destination.iova(), source.iova(), 64 << 20, &mut |_| {})?;
//! println!("{:.1} GB/s, {}", moved.gb_per_s(), moved.path.name());
//! # Ok(())
//! # }
//! ```
//!
//! Not here: any knowledge of how the device works inside, and of what an endpoint's registers mean.

mod buffer;
mod driver;
mod error;
mod kernel;
mod outcome;
mod session;
mod stream;
mod transfer;

pub use buffer::{Buffer, HostBuffer, Registers};
pub use driver::{Channel, Driver, HostMemory};
pub use error::Error;
pub use iommu_addr::Access;
pub use kernel::KernelDriver;
pub use outcome::{FaultAt, Moved, Notice, Outcome};
pub use peergate_uapi as uapi;
pub use session::{EndpointInfo, PeerRight, Session, Ticket};
pub use stream::{AtomicOp, Cancelled, Scope, Stream, Width};
pub use transfer::{Progress, copy_all, download, fill_all, upload};
pub use vdev_wire::{EndpointKind, EventKind, FaultReason, PathReason, Status, TransferPath};
