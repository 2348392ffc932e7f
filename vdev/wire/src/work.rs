//! Submission chains: header, work descriptors, completion records.
//!
//! A chain is: readable [`SubmitHeader`] and `count` [`WorkDescriptor`] slots; then writable room for one [`Completion`] a descriptor.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Size of [`SubmitHeader`] in bytes.
pub const SUBMIT_HEADER_SIZE: usize = 16;
/// Size of a [`WorkDescriptor`] slot in bytes.
pub const DESCRIPTOR_SIZE: usize = 64;
/// Size of a [`Completion`] in bytes.
pub const COMPLETION_SIZE: usize = 32;
/// What the driver puts into a completion record's status before it submits.
pub const COMPLETION_PENDING: u32 = 0xffff_ffff;
/// As an initiator: the device chooses.
pub const INITIATOR_ANY: u32 = 0x0000_ffff;

/// Starts a submission chain. The kernel driver fills it; user space cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SubmitHeader {
    /// [`crate::VERSION`].
    pub version: U16,
    /// Work descriptors in the chain, from 1 to PROBE's `max_batch`.
    pub count: U16,
    /// Domain all of them belong to.
    pub domain: U32,
    /// Zero.
    pub flags: U32,
    /// The session that the driver believes in; a mismatch completes every descriptor as LOST.
    pub session: U32,
}

/// What a work descriptor asks for. Numbers left out are reserved for later versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
#[non_exhaustive]
pub enum WorkOpcode {
    /// Copy `length` bytes from `source` to `destination`.
    Copy = 1,
    /// Fill `length` bytes at `destination` with the 8-byte pattern `operand`.
    Fill = 4,
    /// Change the word of `length` bytes at `destination` and say what was there; `flags` say how.
    Atomic = 7,
    /// Order earlier work of the stream before later observers; `operand` is the scope.
    Fence = 8,
}

impl WorkOpcode {
    /// The opcode a wire number stands for.
    pub fn from_raw(raw: u16) -> Option<Self> {
        [Self::Copy, Self::Fill, Self::Atomic, Self::Fence].into_iter().find(|opcode| *opcode as u16 == raw)
    }
}

/// FENCE scope: observers of the initiator.
pub const FENCE_DEVICE: u64 = 1;
/// FENCE scope: observers of the initiator's peers.
pub const FENCE_PEER: u64 = 2;
/// FENCE scope: every observer.
pub const FENCE_SYSTEM: u64 = 3;
/// Work flag: the completion orders the transfer before every observer, as a system FENCE would.
pub const WORK_SYSTEM: u32 = 1 << 0;
/// Flags of ATOMIC, of which one has to be: add `operand` to the word.
pub const WORK_ATOMIC_ADD: u32 = 1 << 8;
/// Flag of ATOMIC: put `operand` in the word's place.
pub const WORK_ATOMIC_SWAP: u32 = 2 << 8;
/// Flag of ATOMIC: put `operand` in the word's place if the word is `source`.
pub const WORK_ATOMIC_COMPARE_SWAP: u32 = 3 << 8;
/// Bits of those.
pub const WORK_ATOMIC_MASK: u32 = 0xf << 8;

/// One unit of work: a 64-byte slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WorkDescriptor {
    /// [`WorkOpcode`].
    pub opcode: U16,
    /// Extra 64-byte slots that follow; none is defined in version 1.
    pub ext: u8,
    /// Zero.
    pub reserved0: u8,
    /// [`WORK_SYSTEM`]; of ATOMIC one of [`WORK_ATOMIC_MASK`], too.
    pub flags: U32,
    /// Stream of the domain that orders it.
    pub stream: U32,
    /// Endpoint that acts, or [`INITIATOR_ANY`].
    pub initiator: U32,
    /// Handed back in the completion record.
    pub cookie: U64,
    /// I/O virtual address to read; of ATOMIC with [`WORK_ATOMIC_COMPARE_SWAP`] what the word has to be; zero for all else.
    pub source: U64,
    /// I/O virtual address to write, and for ATOMIC to read; zero for FENCE.
    pub destination: U64,
    /// Bytes to move; zero for FENCE.
    pub length: U64,
    /// Deadline in milliseconds from arrival; 0 is PROBE's default.
    pub timeout_ms: U32,
    /// Zero.
    pub reserved1: U32,
    /// Pattern of FILL, operand of ATOMIC, scope of FENCE; zero for COPY.
    pub operand: U64,
}

/// How the bytes went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum TransferPath {
    /// No bytes moved.
    None = 0,
    /// Straight from device to device.
    Direct = 1,
    /// Through host memory, as two copies.
    Staged = 2,
    /// Within one device, or between a device and the guest's memory.
    Local = 3,
}

impl TransferPath {
    /// The path a wire number stands for.
    pub fn from_raw(raw: u8) -> Option<Self> {
        [Self::None, Self::Direct, Self::Staged, Self::Local].into_iter().find(|path| *path as u8 == raw)
    }

    /// The name SPEC.md uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Direct => "direct",
            Self::Staged => "staged",
            Self::Local => "local",
        }
    }
}

/// Why the path was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum PathReason {
    /// Nothing was chosen.
    None = 0,
    /// Both ends belong to one device, or one end is guest memory.
    SameDevice = 1,
    /// The topology lets the two devices reach each other.
    PeerReachable = 2,
    /// The topology does not; the host stages.
    PeerUnreachable = 3,
    /// The operator's policy asks for staging.
    Policy = 4,
    /// The endpoints reach each other, but the initiator's engine cannot make this copy in one hop; the host stages.
    EngineCannot = 5,
    /// The device could not show that the two endpoints see the same bytes; nothing goes between them.
    Unproven = 6,
}

impl PathReason {
    /// The reason a wire number stands for.
    pub fn from_raw(raw: u8) -> Option<Self> {
        let all = [
            Self::None,
            Self::SameDevice,
            Self::PeerReachable,
            Self::PeerUnreachable,
            Self::Policy,
            Self::EngineCannot,
            Self::Unproven,
        ];
        all.into_iter().find(|reason| *reason as u8 == raw)
    }

    /// The name SPEC.md uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::SameDevice => "same-device",
            Self::PeerReachable => "peer-reachable",
            Self::PeerUnreachable => "peer-unreachable",
            Self::Policy => "policy",
            Self::EngineCannot => "engine-cannot",
            Self::Unproven => "unproven",
        }
    }
}

/// Outcome of one work descriptor. `status` is written last, with release semantics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Completion {
    /// The descriptor's cookie.
    pub cookie: U64,
    /// Bytes moved before the end or the error.
    pub bytes: U64,
    /// First address that faulted, with FAULT and DENIED; what the word of an ATOMIC was that ended OK; else zero.
    pub fault_address: U64,
    /// [`TransferPath`].
    pub path: u8,
    /// [`PathReason`].
    pub reason: u8,
    /// [`crate::FaultReason`] with FAULT and DENIED; else zero.
    pub fault_reason: u8,
    /// Zero.
    pub reserved: u8,
    /// [`crate::Status`].
    pub status: U32,
}

const _: () = {
    assert!(size_of::<SubmitHeader>() == SUBMIT_HEADER_SIZE);
    assert!(size_of::<WorkDescriptor>() == DESCRIPTOR_SIZE);
    assert!(size_of::<Completion>() == COMPLETION_SIZE);
};
