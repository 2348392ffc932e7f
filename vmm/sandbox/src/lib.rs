//! What a process or thread gives up before it touches anything from outside.
//!
//! - [`Sandbox`] holds one seccomp filter a [`Class`] of threads, compiled from `configs/seccomp/*.json`, which are part of the binary.
//!   Filters only tighten: a process applies its own before it starts threads, and each thread then applies the one of its class.
//! - [`process`] ties a worker's life to its supervisor's and keeps a guest's memory out of core dumps.
//! - [`Signals`] turns the signals that end a daemon into a descriptor.
//!
//! Not here: who runs which thread.

mod confine;
mod fence;
mod filters;
mod launch;
pub mod process;
mod root;
mod signals;

pub use confine::{ConfineError, Confinement, check_landlock, confine};
pub use fence::{Fence, UnknownFence};
pub use filters::{Class, Mode, Sandbox, SandboxError, UnknownMode};
pub use launch::{LaunchError, Launcher, Started};
pub use signals::Signals;
