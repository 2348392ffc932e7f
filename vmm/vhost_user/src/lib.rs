//! The vhost-user side of one virtual device: a socket that a VMM connects to, the guest's memory table, rings, kicks and interrupts.
//!
//! [`serve()`] takes one connection from accept to hang-up. Inside:
//! - `backend` answers the VMM's messages and runs the queues: queues 0 and 1 share a thread, each submission queue has its own;
//! - `vring` accepts only event counters as kicks and interrupts, and never blocks on them;
//! - `ring` is a started queue as the device sees it;
//! - `memory` checks every region of a memory table before a byte of it is touched;
//! - `timekeeper` is the thread that collects finished work and expires deadlines.
//!
//! A guest cannot end a thread or the process. A front-end that breaks the protocol loses its connection, and nothing else.
//!
//! Absent on purpose: windows (SHMEM is not offered, and no request is sent to the front-end), CONFIGURE_MEM_SLOTS (QEMU 11.1 crashes at
//! a reboot once windows exist), INFLIGHT, STATUS, GPA_ADDRESSES, packed rings, ACCESS_PLATFORM (the device has an IOMMU of its own), dirty
//! logging, a second connection. What a queue or a request means is `vdev_device`'s.

mod backend;
mod memory;
mod ring;
mod serve;
mod timekeeper;
mod vring;

pub use memory::UnsealedPolicy;
pub use serve::{Options, ServeError, ThreadClass, serve};

/// Longest queue a VMM may ask for, in entries.
pub const MAX_QUEUE_SIZE: u16 = 1024;
/// Most queues of a device: the transport keeps sets of queues in 64-bit masks.
pub const MAX_QUEUES: u16 = 64;
