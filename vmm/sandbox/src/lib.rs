//! What a process or thread gives up before it touches anything from outside.
//!
//! - [`Launcher`] starts this program in a role, in namespaces of its own, to end with its supervisor.
//! - [`confine()`] is what a role does first: an empty root directory, no capabilities, and Landlock that denies everything.
//! - [`Sandbox`] holds one seccomp filter a [`Class`] of threads, compiled from `configs/seccomp/*.json`, which are part of the binary.
//!   Filters only tighten: a process applies its own before it starts threads, and each thread then applies the one of its class.
//! - [`process`] keeps a guest's memory out of core dumps, and descriptors from being inherited.
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

pub use confine::{ConfineError, Confinement, check_landlock, confine, drop_privileges, see_own_processes};
pub use fence::{Fence, UnknownFence};
pub use filters::{Class, Mode, Sandbox, SandboxError, UnknownMode};
pub use launch::{LaunchError, Launcher, Started};
pub use signals::Signals;
