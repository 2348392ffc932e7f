//! The user interface of the Peergate kernel driver: what a program and `/dev/peergateN` say to each other.
//!
//! The Rust mirror of `include/linux/peergate.h` beside it: the same structures in native byte order, the same constants without their
//! `PEERGATE_` prefix, and the same ioctl numbers; a test compares the two. What a field means is said once, in the header.
//!
//! Shape: structures that cross the boundary, each starting with its own size where an ioctl takes it; constants; ioctl numbers.
//!
//! Not here: the calls themselves (`peergate_guest` makes them) and the wire to the device (`vdev_wire`).
#![no_std]
#![forbid(unsafe_code)]

mod ioctl;
mod types;

pub use ioctl::{
    IOCTL_ALLOC, IOCTL_ENDPOINT, IOCTL_FREE, IOCTL_INFO, IOCTL_MAP, IOCTL_PEER, IOCTL_RING, IOCTL_STREAM, IOCTL_SUBMIT,
    IOCTL_UNMAP, IOCTL_WAIT, TYPE,
};
pub use types::{
    Alloc, Completion, Endpoint, Event, Free, Info, Map, Peer, Ring, RingSetup, Stream, Submit, Unmap, Wait, Work,
};

/// Rights and access: an endpoint may read.
pub const READ: u32 = 1 << 0;
/// Rights and access: an endpoint may write.
pub const WRITE: u32 = 1 << 1;

/// [`Info::interrupt`]: one interrupt line for every queue.
pub const INTERRUPT_INTX: u32 = 1;
/// [`Info::interrupt`]: message-signalled interrupts.
pub const INTERRUPT_MSIX: u32 = 2;

/// [`Endpoint::kind`]: a GPU.
pub const KIND_GPU: u16 = 1;
/// [`Endpoint::kind`]: an FPGA.
pub const KIND_FPGA: u16 = 2;
/// [`Endpoint::kind`]: blocks of a storage device's namespace as memory.
pub const KIND_STORAGE: u16 = 3;
/// [`Endpoint::kind`]: memory behind a BAR, without an engine.
pub const KIND_MEMORY: u16 = 4;
/// [`Endpoint::kind`]: a DMA engine without memory of its own.
pub const KIND_ENGINE: u16 = 5;

/// [`Alloc::flags`]: the endpoint's register page in place of memory; length 0 means all of it.
pub const ALLOC_REGISTERS: u32 = 1 << 3;

/// [`Peer::op`]: grant the rights.
pub const PEER_ENABLE: u32 = 1;
/// [`Peer::op`]: withdraw them.
pub const PEER_DISABLE: u32 = 2;
/// [`Peer::op`]: ask for them.
pub const PEER_QUERY: u32 = 3;

/// [`Work::opcode`]: copy `length` bytes from `source` to `destination`.
pub const WORK_COPY: u16 = 1;
/// [`Work::opcode`]: fill `length` bytes at `destination` with the 8-byte pattern `operand`.
pub const WORK_FILL: u16 = 4;
/// [`Work::opcode`]: change the word of `length` bytes (4 or 8, and naturally aligned) at `destination`; the completion says what it was.
pub const WORK_ATOMIC: u16 = 7;
/// [`Work::opcode`]: order earlier work of the stream before later observers.
pub const WORK_FENCE: u16 = 8;
/// [`Work::flags`]: the completion orders the transfer before every observer.
pub const WORK_SYSTEM: u32 = 1 << 0;
/// [`Work::flags`] of [`WORK_ATOMIC`], of which one has to be: add `operand`.
pub const WORK_ATOMIC_ADD: u32 = 1 << 8;
/// [`Work::flags`] of [`WORK_ATOMIC`]: put `operand` there.
pub const WORK_ATOMIC_SWAP: u32 = 2 << 8;
/// [`Work::flags`] of [`WORK_ATOMIC`]: put `operand` there if the word is `source`.
pub const WORK_ATOMIC_COMPARE_SWAP: u32 = 3 << 8;
/// [`Work::initiator`]: the device chooses who acts.
pub const INITIATOR_ANY: u32 = 0x0000_ffff;

/// Where to mmap the completion ring.
pub const MMAP_RING: u64 = 0;

/// [`Stream::op`]: clear the stream's error.
pub const STREAM_RESET: u32 = 1;
/// [`Stream::op`]: cancel work that is not finished.
pub const STREAM_CANCEL: u32 = 2;
/// [`Stream::flags`]: cancel everything in the stream, whatever its cookie.
pub const CANCEL_ALL: u32 = 1 << 0;

/// Path: no bytes moved.
pub const PATH_NONE: u16 = 0;
/// Path: straight from device to device.
pub const PATH_DIRECT: u16 = 1;
/// Path: through host memory.
pub const PATH_STAGED: u16 = 2;
/// Path: within one device, or between a device and the caller's memory.
pub const PATH_LOCAL: u16 = 3;

/// [`Event::kind`]: a translation or a right failed.
pub const EVENT_FAULT: u16 = 1;
/// [`Event::kind`]: events were lost.
pub const EVENT_OVERFLOW: u16 = 7;
/// [`Event::kind`]: an endpoint raised its user interrupt.
pub const EVENT_INTERRUPT: u16 = 8;
