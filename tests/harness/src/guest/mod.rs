//! A guest in the test's own process: what `peergate.ko` does, over a real vhost-user socket.
//!
//! [`InProcessDriver`] implements the seam of `peergate_guest`, so that whatever runs over the kernel driver runs over this. One channel is one
//! domain with every endpoint attached; the driver chooses domain numbers and I/O addresses, fills the header of every chain, and hands
//! completions and events to the channel of their domain. One thread plays the interrupt handler. In polling mode completions are looked for
//! by the thread that wants them, without interrupts.

mod channel;
mod control;
mod core;
mod events;
mod iova;
mod options;
mod submit;

pub use self::core::InProcessDriver;
pub use control::{Reply, exchange, request};
pub use options::DriverOptions;
