//! What tests drive the device with.
//!
//! - [`ram`] and [`virtqueue`]: guest memory and the driver's side of a split virtqueue, with hooks to write what no driver should;
//! - [`frontend`]: the VMM's side of the vhost-user socket, in QEMU's order;
//! - [`raw`]: the same without manners;
//! - [`rig`]: a device in this process to connect to;
//! - [`local`]: a device without a socket, and [`fuzz`]: what the fuzz targets do with it;
//! - [`daemon`]: the real daemon, started and ended;
//! - [`guest`]: a guest's driver over it, behind the traits of `peergate_guest`.
//!
//! Not here: tests. Everything waits for what it needs with a deadline, never for time to pass.

pub mod daemon;
mod frames;
pub mod frontend;
pub mod fuzz;
pub mod guest;
pub mod local;
pub mod ram;
pub mod raw;
pub mod rig;
pub mod virtqueue;

pub use daemon::{Binaries, Daemon};
pub use frontend::FrontEnd;
pub use guest::{DriverOptions, InProcessDriver};
pub use ram::GuestRam;
pub use raw::RawGuest;
pub use rig::{Rig, RigOptions};
pub use virtqueue::Virtqueue;
