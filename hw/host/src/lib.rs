//! Memory of this host, and the engine that moves bytes on the CPU: the fallback that is always there.
//!
//! - [`HostMemory`] maps the guest's memory and the endpoints' slices, each once, and moves bytes between any two places of them.
//! - [`HostEngine`] is a [`hw_engine::DmaEngine`] that does every transfer on the caller's thread.
//!
//! All `unsafe` of the crate is in `mapping` and `device`: a mapping's life, and raw copies inside its bounds. No Rust reference into shared memory ever
//! exists, since a guest may change the bytes at any time.
//!
//! Not here: rights, translation, registers, time, other processes' view of the memory.

mod device;
mod engine;
mod mapping;
mod memory;
mod table;

pub use engine::HostEngine;
pub use mapping::FileError;
pub use memory::{DeviceArea, HostMemory, MapError};
