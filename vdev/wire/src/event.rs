//! Events: what the device says without being asked.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What happened. Numbers left out are reserved for later versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
#[non_exhaustive]
pub enum EventKind {
    /// A translation or a right failed.
    Fault = 1,
    /// Events were dropped since the last one delivered.
    Overflow = 7,
    /// The endpoint's own logic raised its user interrupt; `value` is the vector.
    Interrupt = 8,
}

impl EventKind {
    /// The kind a wire number stands for.
    pub fn from_raw(raw: u16) -> Option<Self> {
        [Self::Fault, Self::Overflow, Self::Interrupt].into_iter().find(|kind| *kind as u16 == raw)
    }
}

/// Why an access was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum FaultReason {
    /// The domain does not exist, or the accessor is not attached to it.
    Domain = 1,
    /// No mapping holds the address.
    Mapping = 2,
    /// The mapping does not allow the access.
    Permission = 3,
    /// The accessor has no peer right to the owner's memory.
    Peer = 4,
    /// The handle names a freed object.
    Stale = 5,
    /// The mapping is going away.
    Draining = 6,
    /// The device cannot access the address so: registers need one aligned access of 4 or 8 bytes.
    Access = 7,
}

impl FaultReason {
    /// Every reason.
    pub const ALL: [Self; 7] =
        [Self::Domain, Self::Mapping, Self::Permission, Self::Peer, Self::Stale, Self::Draining, Self::Access];

    /// The reason a wire number stands for.
    pub fn from_raw(raw: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| *reason as u8 == raw)
    }

    /// The name SPEC.md uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Domain => "DOMAIN",
            Self::Mapping => "MAPPING",
            Self::Permission => "PERMISSION",
            Self::Peer => "PEER",
            Self::Stale => "STALE",
            Self::Draining => "DRAINING",
            Self::Access => "ACCESS",
        }
    }
}

/// Event access bit: the accessor wanted to read.
pub const ACCESS_READ: u8 = 1 << 0;
/// Event access bit: the accessor wanted to write.
pub const ACCESS_WRITE: u8 = 1 << 1;
/// As an owner or accessor: unknown, or not the guest's to know.
pub const OWNER_HIDDEN: u32 = 0xffff_ffff;

/// One event: fills one writable buffer of the event queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Event {
    /// [`EventKind`].
    pub kind: U16,
    /// [`FaultReason`] of a FAULT; else zero.
    pub reason: u8,
    /// [`ACCESS_READ`] and [`ACCESS_WRITE`] of a FAULT; else zero.
    pub access: u8,
    /// Session in force.
    pub session: U32,
    /// Counts every event of the session, delivered or dropped, from 1.
    pub seq: U64,
    /// Events of the session dropped so far.
    pub dropped_total: U64,
    /// Domain concerned.
    pub domain: U32,
    /// Endpoint that acted, or [`OWNER_HIDDEN`].
    pub accessor: U32,
    /// Endpoint whose memory it was, or [`OWNER_HIDDEN`].
    pub owner: U32,
    /// Stream of the work concerned; zero if none.
    pub stream: U32,
    /// First address that was refused.
    pub address: U64,
    /// Cookie of the work concerned; zero if none.
    pub cookie: U64,
    /// Kind-specific: the handle of a STALE fault, the vector of an interrupt, the drop count of an overflow.
    pub value: U64,
}

const _: () = assert!(size_of::<Event>() == 64);
