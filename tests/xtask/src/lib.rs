//! The project's own tasks as a library: the kit (QEMU, guest kernel, module compiler) and the guests booted with it.
//!
//! The binary `xtask` is a thin command line over it; end-to-end tests may use it too. It knows nothing of the device.
#![forbid(unsafe_code)]

pub mod demo;
pub mod guest;
pub mod kit;
pub mod lab;
pub mod work;
