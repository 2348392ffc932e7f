//! A virtual machine of a few dozen bytes of code, no operating system in it: what a host's KVM does with a guest's stores, doorbells and interrupts,
//! and a device behind a vhost-user socket that is driven by a guest.
//!
//! [`MicroVm`] has one processor and 64 KiB of memory, a *window* (a second memory file that the guest stores into, as a device's memory is mapped
//! into a VM, until it is revoked), a doorbell (a port that is an event counter, without an exit) and an interrupt that is raised by another event
//! counter. Inside:
//! - `program` is what the guest does: real-mode code, byte by byte, so simple that a KVM in software runs it too;
//! - `memory` is the files behind the guest's memory and the window;
//! - `vm` is slots, doorbell and interrupt; `run` is the thread of the processor, which can always be stopped;
//! - `front_end` gives a device the guest's memory, a queue, and doorbell and interrupt as that queue's kick and call;
//! - [`proof`] is what has to be true on a host, each proof in a VM of its own. `peergate selftest` and the tests run the same ones.
//!
//! The guest's code is for x86-64 hosts. Not here: an operating system, PCI, more than one processor, who starts a device.

mod error;
mod front_end;
mod memory;
mod program;
pub mod proof;
mod run;
mod vm;

pub use error::MicroVmError;
pub use memory::Window;
pub use program::{Program, WINDOW, WINDOW_LEN};
pub use run::{Exit, Running};
pub use vm::{Host, MicroVm};

/// How long a guest, a device or a kernel may take for anything.
pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(20);
