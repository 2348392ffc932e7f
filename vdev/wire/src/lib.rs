//! The bytes of the virtual P2P DMA device: configuration space, control requests, work descriptors, completion records and events.
//!
//! Layout only. `SPEC.md` beside this crate says what each field means and what driver and device must do; the C header
//! `guest-driver/uapi/include/linux/virtio_peergate.h` says the same to the kernel driver, and a test compares the two. All integers are
//! little-endian; every structure is a multiple of eight bytes with explicit padding.
//!
//! Not here: parsing beyond layout, checks, behaviour.
#![no_std]
#![forbid(unsafe_code)]

mod config;
mod control;
mod event;
mod status;
mod work;

pub use config::{CONFIG_MAGIC, CONFIG_SIZE, Config, VERSION};
pub use control::{
    ALLOC_REGISTERS, ALLOC_WINDOWABLE, Alloc, AllocReply, Attach, CANCEL_STREAM, Cancel, CancelReply, ControlHeader,
    ControlReply, ENDPOINT_ALL, EndpointInfo, EndpointKind, Flush, Free, Hello, HelloReply, MAP_READ, MAP_WRITE, Map,
    MapSegment, Opcode, PEER_READ, PEER_WRITE, Peer, PeerReply, ProbeReply, StreamReset, Unmap,
};
pub use event::{ACCESS_READ, ACCESS_WRITE, Event, EventKind, FaultReason, OWNER_HIDDEN};
pub use status::Status;
pub use work::{
    COMPLETION_PENDING, COMPLETION_SIZE, Completion, DESCRIPTOR_SIZE, FENCE_DEVICE, FENCE_PEER, FENCE_SYSTEM,
    INITIATOR_ANY, PathReason, SUBMIT_HEADER_SIZE, SubmitHeader, TransferPath, WORK_ATOMIC_ADD,
    WORK_ATOMIC_COMPARE_SWAP, WORK_ATOMIC_MASK, WORK_ATOMIC_SWAP, WORK_SYSTEM, WorkDescriptor, WorkOpcode,
};

/// The virtio device id used unless the operator sets another (37 has no Linux driver and is accepted by QEMU 11.1).
pub const DEFAULT_DEVICE_ID: u32 = 37;
/// Queue that carries control requests.
pub const CONTROL_QUEUE: u16 = 0;
/// Queue on which the driver posts room for events.
pub const EVENT_QUEUE: u16 = 1;
/// First of the submission queues.
pub const FIRST_SUBMIT_QUEUE: u16 = 2;
/// Most descriptors in one chain, indirect ones counted, indirect tables not.
pub const MAX_CHAIN: usize = 64;
/// Granule of every mapping, in bytes.
pub const PAGE_SIZE: u64 = 4096;
