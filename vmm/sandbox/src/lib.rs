//! What a process or thread gives up before it touches anything from outside.
//!
//! - [`Sandbox`] holds one seccomp filter a [`Class`] of threads, compiled from `configs/seccomp/*.json`, which are part of the binary.
//!   Filters only tighten: a process applies its own before it starts threads, and each thread then applies the one of its class.
//! - [`process`] ties a worker's life to its supervisor's and keeps a guest's memory out of core dumps.
//! - [`Signals`] turns the signals that end a daemon into a descriptor.
//!
//! Not here: namespaces, Landlock, who runs which thread.

mod filters;
pub mod process;
mod signals;

pub use filters::{Class, Mode, Sandbox, SandboxError, UnknownMode};
pub use signals::Signals;
