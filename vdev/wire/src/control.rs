//! Control requests and their answers.
//!
//! A request is one chain: readable [`ControlHeader`], body and, for MAP, its segments; then writable [`ControlReply`] and reply body.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What a control request asks for. Numbers left out are reserved for requests of later versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
#[non_exhaustive]
pub enum Opcode {
    /// Choose version and features, forget every domain. First request of a driver.
    Hello = 0x01,
    /// Limits and endpoints.
    Probe = 0x02,
    /// Give an endpoint a domain; creates the domain.
    Attach = 0x10,
    /// Take it away; the last one destroys the domain.
    Detach = 0x11,
    /// Map guest memory.
    Map = 0x12,
    /// Unmap whole mappings.
    Unmap = 0x13,
    /// Wait until every earlier unmap of the domain has taken effect.
    Flush = 0x14,
    /// Allocate endpoint memory and map it.
    Alloc = 0x20,
    /// Unmap and free it.
    Free = 0x21,
    /// Grant a peer right.
    PeerEnable = 0x30,
    /// Withdraw it.
    PeerDisable = 0x31,
    /// Ask for it.
    PeerQuery = 0x32,
    /// Clear a stream's error.
    StreamReset = 0x40,
    /// Cancel work that is not finished.
    Cancel = 0x41,
}

impl Opcode {
    /// Every opcode of version 1.
    pub const ALL: [Self; 14] = [
        Self::Hello,
        Self::Probe,
        Self::Attach,
        Self::Detach,
        Self::Map,
        Self::Unmap,
        Self::Flush,
        Self::Alloc,
        Self::Free,
        Self::PeerEnable,
        Self::PeerDisable,
        Self::PeerQuery,
        Self::StreamReset,
        Self::Cancel,
    ];

    /// The opcode a wire number stands for.
    pub fn from_raw(raw: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|opcode| *opcode as u16 == raw)
    }
}

/// Starts every control request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ControlHeader {
    /// [`Opcode`].
    pub opcode: U16,
    /// Zero.
    pub flags: U16,
    /// The domain that the request acts on; zero for HELLO and PROBE.
    pub domain: U32,
    /// The session that the driver believes in; ignored by HELLO, else a mismatch answers STALE.
    pub session: U32,
    /// Zero.
    pub reserved: U32,
}

/// Starts every answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ControlReply {
    /// [`crate::Status`].
    pub status: U32,
    /// Bytes of reply body that follow.
    pub length: U32,
    /// The address, count or limit the status is about; zero if none.
    pub detail: U64,
}

/// Body of HELLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Hello {
    /// Version the driver will speak.
    pub version: U16,
    /// Zero.
    pub reserved0: U16,
    /// Zero.
    pub reserved: U32,
    /// Features the driver will use.
    pub features: U64,
}

/// Answer to HELLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct HelloReply {
    /// Version in force.
    pub version: U16,
    /// Zero.
    pub reserved0: U16,
    /// The session that begins.
    pub session: U32,
    /// Features in force.
    pub features: U64,
}

/// Answer to PROBE; `endpoint_count` [`EndpointInfo`] follow, as many as fit in the room the driver gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ProbeReply {
    /// First I/O virtual address the driver may use.
    pub iova_start: U64,
    /// Last one, inclusive.
    pub iova_last: U64,
    /// Bit n set: mappings may be aligned to 2^n bytes; the lowest bit is the granule.
    pub page_size_mask: U64,
    /// Most domains at a time.
    pub max_domains: U32,
    /// Most mappings (MAP and ALLOC together) at a time, all domains together.
    pub max_mappings: U32,
    /// Most segments in one MAP.
    pub max_segments: U32,
    /// Most buffers at a time.
    pub max_buffers: U32,
    /// Descriptors that may wait or run in one stream; one more answers BUSY.
    pub stream_credits: U32,
    /// Descriptors that may wait or run in all streams together.
    pub max_in_flight: U32,
    /// Streams that may exist in one domain.
    pub max_streams: U32,
    /// Deadline of a descriptor whose timeout is 0, in milliseconds.
    pub default_timeout_ms: U32,
    /// Longest timeout, in milliseconds.
    pub max_timeout_ms: U32,
    /// Most work descriptors in one chain.
    pub max_batch: U16,
    /// Endpoints in all.
    pub endpoint_count: U16,
    /// Zero.
    pub reserved: [U64; 3],
}

/// What kind of device an endpoint is a slice of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
#[non_exhaustive]
pub enum EndpointKind {
    /// A GPU.
    Gpu = 1,
    /// An FPGA.
    Fpga = 2,
    /// Blocks of a storage device's namespace as memory.
    Storage = 3,
    /// Memory behind a BAR, without an engine.
    Memory = 4,
    /// A DMA engine without memory of its own.
    Engine = 5,
}

impl EndpointKind {
    /// The kind a wire number stands for.
    pub fn from_raw(raw: u16) -> Option<Self> {
        [Self::Gpu, Self::Fpga, Self::Storage, Self::Memory, Self::Engine].into_iter().find(|kind| *kind as u16 == raw)
    }

    /// The name SPEC.md uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::Fpga => "FPGA",
            Self::Storage => "storage",
            Self::Memory => "memory",
            Self::Engine => "engine",
        }
    }
}

/// One endpoint in PROBE's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct EndpointInfo {
    /// The endpoint.
    pub endpoint: U32,
    /// [`EndpointKind`].
    pub kind: U16,
    /// Copy engines that work side by side.
    pub engines: U16,
    /// Memory of the slice in bytes; 0 if the endpoint has none.
    pub memory_len: U64,
    /// Bytes of it that are not allocated.
    pub memory_free: U64,
    /// Size of the register page in bytes; 0 if the endpoint has none.
    pub registers_len: U64,
    /// Granule of ALLOC in bytes.
    pub granularity: U64,
    /// UTF-8, zero-padded; the operator's name for the slice.
    pub name: [u8; 32],
}

/// As the endpoint of DETACH: every endpoint of the domain.
pub const ENDPOINT_ALL: u32 = 0xffff_ffff;

/// Body of ATTACH and DETACH.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Attach {
    /// The endpoint; [`ENDPOINT_ALL`] is allowed in DETACH only.
    pub endpoint: U32,
    /// Zero.
    pub flags: U32,
}

/// MAP: endpoints may read through the mapping.
pub const MAP_READ: u32 = 1 << 0;
/// MAP: endpoints may write through the mapping.
pub const MAP_WRITE: u32 = 1 << 1;

/// Body of MAP; `segment_count` [`MapSegment`] follow. The segments are mapped one after another from `iova` on, as one mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Map {
    /// First I/O virtual address, a multiple of the page size.
    pub iova: U64,
    /// [`MAP_READ`] and [`MAP_WRITE`], at least one of them.
    pub flags: U32,
    /// How many segments follow, at least one.
    pub segment_count: U32,
}

/// A run of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MapSegment {
    /// First guest-physical address, a multiple of the page size.
    pub gpa: U64,
    /// Length in bytes, a multiple of the page size, not 0.
    pub len: U64,
}

/// Body of UNMAP: every mapping within the range goes; none may reach out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Unmap {
    /// First I/O virtual address.
    pub iova_start: U64,
    /// Last one, inclusive.
    pub iova_last: U64,
}

/// Body of FLUSH.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Flush {
    /// Zero.
    pub reserved: U64,
}

/// ALLOC: the buffer may get a window. Reserved: version 1 answers UNSUPP.
pub const ALLOC_WINDOWABLE: u32 = 1 << 2;
/// ALLOC: the endpoint's register page in place of memory.
pub const ALLOC_REGISTERS: u32 = 1 << 3;

/// Body of ALLOC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Alloc {
    /// Whose memory.
    pub endpoint: U32,
    /// [`MAP_READ`], [`MAP_WRITE`], [`ALLOC_REGISTERS`].
    pub flags: U32,
    /// Where to map it, a multiple of the endpoint's granularity.
    pub iova: U64,
    /// Length in bytes, a multiple of the endpoint's granularity, not 0; for the registers their length.
    pub len: U64,
}

/// Answer to ALLOC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AllocReply {
    /// Names the buffer until it is freed, and never another one.
    pub handle: U64,
}

/// Body of FREE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Free {
    /// From ALLOC.
    pub handle: U64,
}

/// Peer right: the accessor may read the owner's memory.
pub const PEER_READ: u32 = 1 << 0;
/// Peer right: the accessor may write the owner's memory.
pub const PEER_WRITE: u32 = 1 << 1;

/// Body of PEER_ENABLE, PEER_DISABLE and PEER_QUERY.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Peer {
    /// Who reaches out.
    pub accessor: U32,
    /// Whose memory it reaches.
    pub owner: U32,
    /// [`PEER_READ`] and [`PEER_WRITE`]; zero in PEER_QUERY.
    pub rights: U32,
    /// Zero.
    pub reserved: U32,
}

/// Answer to PEER_ENABLE, PEER_DISABLE and PEER_QUERY.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PeerReply {
    /// Rights in force after the request.
    pub rights: U32,
    /// [`crate::TransferPath`] that a transfer between the two would take.
    pub path: U16,
    /// [`crate::PathReason`] of that choice.
    pub reason: U16,
}

/// Body of STREAM_RESET.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct StreamReset {
    /// The stream.
    pub stream: U32,
    /// Zero.
    pub reserved: U32,
}

/// CANCEL: every descriptor of the stream, whatever its cookie.
pub const CANCEL_STREAM: u32 = 1 << 0;

/// Body of CANCEL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Cancel {
    /// The stream.
    pub stream: U32,
    /// [`CANCEL_STREAM`] or zero.
    pub flags: U32,
    /// Which descriptor; zero with [`CANCEL_STREAM`].
    pub cookie: U64,
}

/// Answer to CANCEL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CancelReply {
    /// Descriptors that will complete as CANCELLED.
    pub cancelled: U32,
    /// Descriptors that were already issued and complete as they end.
    pub running: U32,
}

const _: () = {
    assert!(size_of::<ControlHeader>() == 16);
    assert!(size_of::<ControlReply>() == 16);
    assert!(size_of::<Hello>() == 16);
    assert!(size_of::<HelloReply>() == 16);
    assert!(size_of::<ProbeReply>() == 88);
    assert!(size_of::<EndpointInfo>() == 72);
    assert!(size_of::<Attach>() == 8);
    assert!(size_of::<Map>() == 16);
    assert!(size_of::<MapSegment>() == 16);
    assert!(size_of::<Unmap>() == 16);
    assert!(size_of::<Flush>() == 8);
    assert!(size_of::<Alloc>() == 24);
    assert!(size_of::<AllocReply>() == 8);
    assert!(size_of::<Free>() == 8);
    assert!(size_of::<Peer>() == 16);
    assert!(size_of::<PeerReply>() == 8);
    assert!(size_of::<StreamReset>() == 8);
    assert!(size_of::<Cancel>() == 16);
    assert!(size_of::<CancelReply>() == 8);
};
