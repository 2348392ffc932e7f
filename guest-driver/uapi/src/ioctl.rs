//! Ioctl numbers, composed as `asm-generic/ioctl.h` does (x86, Arm and RISC-V): direction, size of the structure, type, number.
//!
//! Not here: architectures that compose them otherwise (MIPS, PowerPC, SPARC, Alpha).

use crate::{Alloc, Endpoint, Free, Info, Map, Peer, RingSetup, Stream, Submit, Unmap, Wait};

/// Type of every ioctl of the driver.
pub const TYPE: u32 = 0xb7;

const WRITE: u32 = 1;
const READ: u32 = 2;

/// Number of an ioctl that takes a `T`.
const fn number<T>(direction: u32, index: u32) -> u32 {
    let size = size_of::<T>();
    assert!(size < 1 << 14, "an ioctl number has 14 bits for the size");
    #[allow(clippy::cast_possible_truncation, reason = "asserted above")]
    let size = size as u32;
    direction << 30 | size << 16 | TYPE << 8 | index
}

/// Fills an [`Info`].
pub const IOCTL_INFO: u32 = number::<Info>(READ | WRITE, 0x00);
/// Fills an [`Endpoint`].
pub const IOCTL_ENDPOINT: u32 = number::<Endpoint>(READ | WRITE, 0x01);
/// Creates the completion ring; takes a [`RingSetup`].
pub const IOCTL_RING: u32 = number::<RingSetup>(READ | WRITE, 0x02);
/// Pins and maps memory of the caller; takes a [`Map`].
pub const IOCTL_MAP: u32 = number::<Map>(READ | WRITE, 0x10);
/// Unmaps and unpins; takes an [`Unmap`]; waits until no endpoint uses the memory.
pub const IOCTL_UNMAP: u32 = number::<Unmap>(WRITE, 0x11);
/// Allocates and maps endpoint memory; takes an [`Alloc`].
pub const IOCTL_ALLOC: u32 = number::<Alloc>(READ | WRITE, 0x20);
/// Unmaps and frees it; takes a [`Free`]; waits until no transfer uses it.
pub const IOCTL_FREE: u32 = number::<Free>(WRITE, 0x21);
/// Changes or asks for a peer right; takes a [`Peer`].
pub const IOCTL_PEER: u32 = number::<Peer>(READ | WRITE, 0x30);
/// Submits an array of [`crate::Work`]; takes a [`Submit`]; does not wait.
pub const IOCTL_SUBMIT: u32 = number::<Submit>(READ | WRITE, 0x40);
/// Waits for completions; takes a [`Wait`].
pub const IOCTL_WAIT: u32 = number::<Wait>(WRITE, 0x41);
/// Resets a stream or cancels work; takes a [`Stream`].
pub const IOCTL_STREAM: u32 = number::<Stream>(READ | WRITE, 0x42);
