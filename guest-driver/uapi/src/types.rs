//! The structures of `peergate.h`, in native byte order, without their `peergate_` prefix.
//!
//! Plain layout: every bit pattern is a value, none has padding.
//!
//! Not here: meaning beyond one line a field (the header has it), checks, the ring's protocol.

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// What the device offers ([`crate::IOCTL_INFO`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Info {
    /// Size of this structure.
    pub size: u32,
    /// Zero.
    pub flags: u32,
    /// Out: version of the wire in force.
    pub version: u32,
    /// Out: changes when the device loses its state.
    pub session: u32,
    /// Out: number of this file's domain, for reports only.
    pub domain: u32,
    /// Out: [`crate::INTERRUPT_INTX`] or [`crate::INTERRUPT_MSIX`].
    pub interrupt: u32,
    /// Out: first address that may be mapped.
    pub iova_start: u64,
    /// Out: last address that may be mapped.
    pub iova_last: u64,
    /// Out: granule of [`Map`] in bytes.
    pub page_size: u64,
    /// Out: most work descriptors the driver puts into one chain.
    pub max_batch: u32,
    /// Out: how many endpoints there are.
    pub endpoints: u32,
    /// Out: descriptors that one stream may hold.
    pub stream_credits: u32,
    /// Out: descriptors that all streams may hold.
    pub max_in_flight: u32,
    /// Out: streams a file may use.
    pub max_streams: u32,
    /// Out: deadline of a descriptor with timeout 0.
    pub default_timeout_ms: u32,
    /// Out: longest deadline.
    pub max_timeout_ms: u32,
    /// Out: submission queues of the device.
    pub submit_queues: u32,
    /// Out: bytes this file has pinned.
    pub pinned_bytes: u64,
    /// Out: files that can be open at a time.
    pub max_domains: u32,
    /// Out: mappings all files can hold.
    pub max_mappings: u32,
}

/// One endpoint ([`crate::IOCTL_ENDPOINT`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Endpoint {
    /// Size of this structure.
    pub size: u32,
    /// In: 0 to [`Info::endpoints`] - 1.
    pub index: u32,
    /// Out: its number in every other call.
    pub endpoint: u32,
    /// Out: [`crate::KIND_GPU`] or another `KIND_`.
    pub kind: u16,
    /// Out: copy engines that work side by side.
    pub engines: u16,
    /// Out: memory in bytes, 0 if there is none.
    pub memory_len: u64,
    /// Out: bytes that are not allocated.
    pub memory_free: u64,
    /// Out: size of the register page, 0 if there is none.
    pub registers_len: u64,
    /// Out: granule of [`Alloc`] in bytes.
    pub granularity: u64,
    /// Out: UTF-8, zero-terminated.
    pub name: [u8; 40],
}

/// Pin memory of the caller and map it ([`crate::IOCTL_MAP`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Map {
    /// Size of this structure.
    pub size: u32,
    /// [`crate::READ`], [`crate::WRITE`]: what endpoints may do.
    pub flags: u32,
    /// In: address in the caller's memory, a multiple of the page size.
    pub address: u64,
    /// In: bytes, a multiple of the page size.
    pub length: u64,
    /// Out: where endpoints see it.
    pub iova: u64,
}

/// Unmap and unpin one mapping ([`crate::IOCTL_UNMAP`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Unmap {
    /// Size of this structure.
    pub size: u32,
    /// Zero.
    pub flags: u32,
    /// In: from [`Map`].
    pub iova: u64,
    /// In: the length given to [`Map`].
    pub length: u64,
}

/// Allocate endpoint memory and map it ([`crate::IOCTL_ALLOC`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Alloc {
    /// Size of this structure.
    pub size: u32,
    /// [`crate::READ`], [`crate::WRITE`], [`crate::ALLOC_REGISTERS`].
    pub flags: u32,
    /// In: whose memory.
    pub endpoint: u32,
    /// Zero.
    pub reserved: u32,
    /// In: bytes, rounded up to the granularity; out: bytes allocated.
    pub length: u64,
    /// Out: names the buffer.
    pub handle: u64,
    /// Out: where every endpoint of this file sees it.
    pub iova: u64,
}

/// Free a buffer ([`crate::IOCTL_FREE`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Free {
    /// Size of this structure.
    pub size: u32,
    /// Zero.
    pub flags: u32,
    /// In: from [`Alloc`].
    pub handle: u64,
}

/// Peer right ([`crate::IOCTL_PEER`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Peer {
    /// Size of this structure.
    pub size: u32,
    /// [`crate::PEER_ENABLE`], [`crate::PEER_DISABLE`] or [`crate::PEER_QUERY`].
    pub op: u32,
    /// In: endpoint that reaches out.
    pub accessor: u32,
    /// In: endpoint whose memory is reached.
    pub owner: u32,
    /// In: bits to enable or disable; out: bits in force.
    pub rights: u32,
    /// Out: path ([`crate::PATH_DIRECT`], ...) that a transfer would take.
    pub path: u16,
    /// Out: why, numbered as on the wire.
    pub reason: u16,
}

/// One unit of work for [`Submit`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Work {
    /// [`crate::WORK_COPY`], [`crate::WORK_FILL`], [`crate::WORK_ATOMIC`] or [`crate::WORK_FENCE`].
    pub opcode: u16,
    /// Zero.
    pub reserved0: u16,
    /// [`crate::WORK_SYSTEM`], and what an atomic operation does.
    pub flags: u32,
    /// Order within this file.
    pub stream: u32,
    /// Endpoint that acts, or [`crate::INITIATOR_ANY`].
    pub initiator: u32,
    /// Handed back in the completion.
    pub cookie: u64,
    /// Address to read; what is compared by [`crate::WORK_ATOMIC_COMPARE_SWAP`].
    pub source: u64,
    /// Address to write.
    pub destination: u64,
    /// Bytes to move.
    pub length: u64,
    /// Deadline from arrival at the device; 0 is the default.
    pub timeout_ms: u32,
    /// Zero.
    pub reserved: u32,
    /// Pattern of a fill, what an atomic operation adds or puts there, scope of a fence.
    pub operand: u64,
}

/// Submit an array of work ([`crate::IOCTL_SUBMIT`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Submit {
    /// Size of this structure.
    pub size: u32,
    /// Zero.
    pub flags: u32,
    /// In: pointer to an array of [`Work`].
    pub work: u64,
    /// In: how many; out: how many were taken.
    pub count: u32,
    /// In: submission queue, 0 to [`Info::submit_queues`] - 1.
    pub queue: u32,
}

/// One entry of the completion ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Completion {
    /// Cookie of the work.
    pub cookie: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// First address refused, if the status is FAULT or DENIED; what the word of an atomic operation was, if that ended well.
    pub fault_address: u64,
    /// Path that the bytes took.
    pub path: u8,
    /// Why that path, numbered as on the wire.
    pub reason: u8,
    /// Why it was refused, numbered as on the wire; 0 if it was not.
    pub fault_reason: u8,
    /// Zero.
    pub reserved: u8,
    /// Status of the device, 0 is success (numbered as on the wire).
    pub status: u32,
}

/// Head of the completion ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Ring {
    /// Written by the kernel (release): entries produced so far, modulo 2^32.
    pub tail: u32,
    /// Zero.
    pub reserved0: [u32; 15],
    /// Written by the program (release): entries consumed so far.
    pub head: u32,
    /// Zero.
    pub reserved1: [u32; 15],
    /// Entries - 1; entries is a power of two.
    pub mask: u32,
    /// Bytes from the start of the mapping to entry 0.
    pub entry_offset: u32,
    /// Zero.
    pub reserved2: [u32; 14],
}

/// Create the completion ring ([`crate::IOCTL_RING`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RingSetup {
    /// Size of this structure.
    pub size: u32,
    /// Zero.
    pub flags: u32,
    /// In: power of two, 64 to 65536.
    pub entries: u32,
    /// Zero.
    pub reserved: u32,
    /// Out: bytes to mmap.
    pub length: u64,
}

/// Wait for completions ([`crate::IOCTL_WAIT`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Wait {
    /// Size of this structure.
    pub size: u32,
    /// Zero.
    pub flags: u32,
    /// In: return when this many entries are in the ring.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
    /// In: absolute CLOCK_MONOTONIC; 0 returns at once.
    pub deadline_ns: u64,
}

/// Reset a stream or cancel work ([`crate::IOCTL_STREAM`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Stream {
    /// Size of this structure.
    pub size: u32,
    /// [`crate::STREAM_RESET`] or [`crate::STREAM_CANCEL`].
    pub op: u32,
    /// In: the stream.
    pub stream: u32,
    /// In: [`crate::CANCEL_ALL`].
    pub flags: u32,
    /// In: cookie of the work to cancel; zero with [`crate::CANCEL_ALL`].
    pub cookie: u64,
    /// Out: descriptors that end as CANCELLED.
    pub cancelled: u32,
    /// Out: descriptors that were running and end as they do.
    pub running: u32,
}

/// What `read()` of the file returns, one or more whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Event {
    /// [`crate::EVENT_FAULT`], [`crate::EVENT_OVERFLOW`] or [`crate::EVENT_INTERRUPT`].
    pub kind: u16,
    /// Fault reason, numbered as on the wire.
    pub reason: u8,
    /// [`crate::READ`], [`crate::WRITE`].
    pub access: u8,
    /// Session of the device.
    pub session: u32,
    /// Counts the device's events.
    pub seq: u64,
    /// Events lost, by the device or because this file did not read.
    pub dropped_total: u64,
    /// Endpoint that acted, 0xffffffff if unknown.
    pub accessor: u32,
    /// Endpoint whose memory it was, 0xffffffff if unknown.
    pub owner: u32,
    /// Stream of the work.
    pub stream: u32,
    /// Zero.
    pub reserved: u32,
    /// First address refused.
    pub address: u64,
    /// Cookie of the work.
    pub cookie: u64,
    /// Vector of an interrupt, handle of a stale buffer.
    pub value: u64,
}

impl Default for Endpoint {
    fn default() -> Self {
        Self::new_zeroed()
    }
}
