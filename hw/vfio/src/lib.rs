//! Engines that are real PCI functions, driven through VFIO.
//!
//! - [`Host`] is what a tenant's functions share: one IOMMU domain, and the bus addresses in it.
//! - [`Function`] is a function of a device: its BARs, its interrupts, its reset.
//! - [`Driver`] is the registers of one kind of DMA engine; [`drivers`] has them all. A further one is one file and one line there.
//! - [`VfioEngine`] is a [`hw_engine::DmaEngine`] over a driver. It maps what a command needs for as long as the command runs, so that the IOMMU holds
//!   what the plan says: a source can be read and not written, and what no command runs on cannot be reached at all.
//! - [`Lazy`] gives some of that up: what a command has needed stays mapped for a moment, for the next one.
//!
//! All addresses that a function is told are [`BusAddr`](iommu_addr::BusAddr)s of this crate's choice, never a guest's.
//!
//! Not here: whose device it is, rights, which way a transfer goes.

mod bounce;
mod bus;
mod dma;
pub mod drivers;
mod engine;
mod error;
mod flight;
mod function;
mod hole;
mod host;
mod ioctls;
mod iommufd;
mod lazy;
mod mover;
mod reach;
mod watch;

pub use drivers::{Command, Driver, Kind, Shape};
pub use engine::{Slice, VfioEngine};
pub use error::VfioError;
pub use function::{Area, Function, Registers};
pub use hole::Hole;
pub use host::{Host, MapSink, Mapped, claim, group_of, leave, open_container, open_group};
pub use iommufd::open_iommufd;
pub use lazy::Lazy;
pub use watch::{FaultWatch, Unwatched, has_lost, is_same, said, stopped};
