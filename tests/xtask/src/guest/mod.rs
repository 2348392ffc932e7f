//! Guests: a root file system in memory, and a QEMU that boots the kit's kernel on it.
//!
//! [`Initramfs`] lists what the guest finds, [`GuestSpec`] says what machine it gets, [`boot`] runs it to its end and hands over every
//! console line; [`Guest`] is the same, driven step by step by a caller with something else to do meanwhile. Whether the host's KVM
//! or QEMU's translator runs it is decided once by trying (`accel`). Nothing here knows what a guest is for.

pub mod accel;
pub mod initramfs;
pub mod qemu;

pub use accel::{Accel, Choice};
pub use initramfs::Initramfs;
pub use qemu::{Guest, GuestSpec, Outcome, Said, boot};
