//! What the Rust side says: every structure, constant and ioctl number, under its name in C.
//!
//! Written out by hand on purpose: a name in either header or in either crate that is not here, or here and gone there, is a difference.

use crate::value::{ToValue, Value};

/// One field: where it lies and how long it is.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name, the same in both languages.
    pub name: &'static str,
    /// Bytes from the start of the structure.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
}

/// One structure.
#[derive(Clone, Debug)]
pub struct Structure {
    /// Name in C, without `struct`.
    pub c: &'static str,
    /// Path in Rust.
    pub rust: &'static str,
    /// Bytes.
    pub size: usize,
    /// Every field.
    pub fields: Vec<Field>,
}

/// One constant.
#[derive(Clone, Debug)]
pub struct Constant {
    /// Name in C.
    pub c: &'static str,
    /// Path in Rust.
    pub rust: &'static str,
    /// Its value in Rust.
    pub value: Value,
}

/// One ioctl.
#[derive(Clone, Copy, Debug)]
pub struct Ioctl {
    /// Name in C.
    pub c: &'static str,
    /// Path in Rust.
    pub rust: &'static str,
    /// Its number in Rust.
    pub number: u32,
    /// Size of the structure it takes, in Rust.
    pub size: usize,
}

fn size_of_field<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// A structure with all its fields: one that is left out does not compile, for the pattern has no `..`.
macro_rules! structure {
    ($c:ident = $rust:path { $($field:ident),* $(,)? }) => {{
        let _complete = |value: $rust| { let $rust { $($field: _),* } = value; };
        Structure {
            c: stringify!($c),
            rust: stringify!($rust),
            size: size_of::<$rust>(),
            fields: vec![$(Field {
                name: stringify!($field),
                offset: std::mem::offset_of!($rust, $field),
                size: size_of_field(|value: &$rust| &value.$field),
            }),*],
        }
    }};
}

macro_rules! constant {
    ($c:ident = $rust:path) => {
        Constant { c: stringify!($c), rust: stringify!($rust), value: $rust.to_value() }
    };
}

macro_rules! ioctl {
    ($c:ident = $rust:path: $takes:path) => {
        Ioctl { c: stringify!($c), rust: stringify!($rust), number: $rust, size: size_of::<$takes>() }
    };
}

/// Every structure of both headers.
pub fn structures() -> Vec<Structure> {
    vec![
        structure!(
            virtio_peergate_config = vdev_wire::Config {
                magic,
                version,
                version_min,
                session,
                features,
                submit_queues,
                endpoints,
                max_batch,
                reserved0,
                reserved
            }
        ),
        structure!(virtio_peergate_control = vdev_wire::ControlHeader { opcode, flags, domain, session, reserved }),
        structure!(virtio_peergate_reply = vdev_wire::ControlReply { status, length, detail }),
        structure!(virtio_peergate_hello = vdev_wire::Hello { version, reserved0, reserved, features }),
        structure!(virtio_peergate_hello_reply = vdev_wire::HelloReply { version, reserved0, session, features }),
        structure!(
            virtio_peergate_probe_reply = vdev_wire::ProbeReply {
                iova_start,
                iova_last,
                page_size_mask,
                max_domains,
                max_mappings,
                max_segments,
                max_buffers,
                stream_credits,
                max_in_flight,
                max_streams,
                default_timeout_ms,
                max_timeout_ms,
                max_batch,
                endpoint_count,
                reserved
            }
        ),
        structure!(
            virtio_peergate_endpoint = vdev_wire::EndpointInfo {
                endpoint,
                kind,
                engines,
                memory_len,
                memory_free,
                registers_len,
                granularity,
                name
            }
        ),
        structure!(virtio_peergate_attach = vdev_wire::Attach { endpoint, flags }),
        structure!(virtio_peergate_map = vdev_wire::Map { iova, flags, segment_count }),
        structure!(virtio_peergate_map_segment = vdev_wire::MapSegment { gpa, len }),
        structure!(virtio_peergate_unmap = vdev_wire::Unmap { iova_start, iova_last }),
        structure!(virtio_peergate_flush = vdev_wire::Flush { reserved }),
        structure!(virtio_peergate_alloc = vdev_wire::Alloc { endpoint, flags, iova, len }),
        structure!(virtio_peergate_alloc_reply = vdev_wire::AllocReply { handle }),
        structure!(virtio_peergate_free = vdev_wire::Free { handle }),
        structure!(virtio_peergate_peer = vdev_wire::Peer { accessor, owner, rights, reserved }),
        structure!(virtio_peergate_peer_reply = vdev_wire::PeerReply { rights, path, reason }),
        structure!(virtio_peergate_stream_reset = vdev_wire::StreamReset { stream, reserved }),
        structure!(virtio_peergate_cancel = vdev_wire::Cancel { stream, flags, cookie }),
        structure!(virtio_peergate_cancel_reply = vdev_wire::CancelReply { cancelled, running }),
        structure!(virtio_peergate_submit = vdev_wire::SubmitHeader { version, count, domain, flags, session }),
        structure!(
            virtio_peergate_work = vdev_wire::WorkDescriptor {
                opcode,
                ext,
                reserved0,
                flags,
                stream,
                initiator,
                cookie,
                source,
                destination,
                length,
                timeout_ms,
                reserved1,
                operand
            }
        ),
        structure!(
            virtio_peergate_completion =
                vdev_wire::Completion { cookie, bytes, fault_address, path, reason, fault_reason, reserved, status }
        ),
        structure!(
            virtio_peergate_event = vdev_wire::Event {
                kind,
                reason,
                access,
                session,
                seq,
                dropped_total,
                domain,
                accessor,
                owner,
                stream,
                address,
                cookie,
                value
            }
        ),
        structure!(
            peergate_info = peergate_uapi::Info {
                size,
                flags,
                version,
                session,
                domain,
                interrupt,
                iova_start,
                iova_last,
                page_size,
                max_batch,
                endpoints,
                stream_credits,
                max_in_flight,
                max_streams,
                default_timeout_ms,
                max_timeout_ms,
                submit_queues,
                pinned_bytes,
                max_domains,
                max_mappings
            }
        ),
        structure!(
            peergate_endpoint = peergate_uapi::Endpoint {
                size,
                index,
                endpoint,
                kind,
                engines,
                memory_len,
                memory_free,
                registers_len,
                granularity,
                name
            }
        ),
        structure!(peergate_map = peergate_uapi::Map { size, flags, address, length, iova }),
        structure!(peergate_unmap = peergate_uapi::Unmap { size, flags, iova, length }),
        structure!(peergate_alloc = peergate_uapi::Alloc { size, flags, endpoint, reserved, length, handle, iova }),
        structure!(peergate_free = peergate_uapi::Free { size, flags, handle }),
        structure!(peergate_peer = peergate_uapi::Peer { size, op, accessor, owner, rights, path, reason }),
        structure!(
            peergate_work = peergate_uapi::Work {
                opcode,
                reserved0,
                flags,
                stream,
                initiator,
                cookie,
                source,
                destination,
                length,
                timeout_ms,
                reserved,
                operand
            }
        ),
        structure!(peergate_submit = peergate_uapi::Submit { size, flags, work, count, queue }),
        structure!(
            peergate_completion = peergate_uapi::Completion {
                cookie,
                bytes,
                fault_address,
                path,
                reason,
                fault_reason,
                reserved,
                status
            }
        ),
        structure!(
            peergate_ring = peergate_uapi::Ring { tail, reserved0, head, reserved1, mask, entry_offset, reserved2 }
        ),
        structure!(peergate_ring_setup = peergate_uapi::RingSetup { size, flags, entries, reserved, length }),
        structure!(peergate_wait = peergate_uapi::Wait { size, flags, count, reserved, deadline_ns }),
        structure!(peergate_stream = peergate_uapi::Stream { size, op, stream, flags, cookie, cancelled, running }),
        structure!(
            peergate_event = peergate_uapi::Event {
                kind,
                reason,
                access,
                session,
                seq,
                dropped_total,
                accessor,
                owner,
                stream,
                reserved,
                address,
                cookie,
                value
            }
        ),
    ]
}

/// Every constant of both headers, ioctl numbers apart.
pub fn constants() -> Vec<Constant> {
    vec![
        constant!(VIRTIO_ID_PEERGATE = vdev_wire::DEFAULT_DEVICE_ID),
        constant!(VIRTIO_PEERGATE_MAGIC = vdev_wire::CONFIG_MAGIC),
        constant!(VIRTIO_PEERGATE_VERSION = vdev_wire::VERSION),
        constant!(VIRTIO_PEERGATE_PAGE_SIZE = vdev_wire::PAGE_SIZE),
        constant!(VIRTIO_PEERGATE_MAX_CHAIN = vdev_wire::MAX_CHAIN),
        constant!(VIRTIO_PEERGATE_VQ_CONTROL = vdev_wire::CONTROL_QUEUE),
        constant!(VIRTIO_PEERGATE_VQ_EVENT = vdev_wire::EVENT_QUEUE),
        constant!(VIRTIO_PEERGATE_VQ_SUBMIT = vdev_wire::FIRST_SUBMIT_QUEUE),
        constant!(VIRTIO_PEERGATE_S_OK = vdev_wire::Status::Ok),
        constant!(VIRTIO_PEERGATE_S_IOERR = vdev_wire::Status::IoErr),
        constant!(VIRTIO_PEERGATE_S_UNSUPP = vdev_wire::Status::Unsupp),
        constant!(VIRTIO_PEERGATE_S_DEVERR = vdev_wire::Status::DevErr),
        constant!(VIRTIO_PEERGATE_S_INVAL = vdev_wire::Status::Inval),
        constant!(VIRTIO_PEERGATE_S_RANGE = vdev_wire::Status::Range),
        constant!(VIRTIO_PEERGATE_S_NOENT = vdev_wire::Status::NoEnt),
        constant!(VIRTIO_PEERGATE_S_FAULT = vdev_wire::Status::Fault),
        constant!(VIRTIO_PEERGATE_S_NOMEM = vdev_wire::Status::NoMem),
        constant!(VIRTIO_PEERGATE_S_QUOTA = vdev_wire::Status::Quota),
        constant!(VIRTIO_PEERGATE_S_STALE = vdev_wire::Status::Stale),
        constant!(VIRTIO_PEERGATE_S_REVOKED = vdev_wire::Status::Revoked),
        constant!(VIRTIO_PEERGATE_S_CANCELLED = vdev_wire::Status::Cancelled),
        constant!(VIRTIO_PEERGATE_S_TIMEOUT = vdev_wire::Status::Timeout),
        constant!(VIRTIO_PEERGATE_S_DEADLOCK = vdev_wire::Status::Deadlock),
        constant!(VIRTIO_PEERGATE_S_POISONED = vdev_wire::Status::Poisoned),
        constant!(VIRTIO_PEERGATE_S_LOST = vdev_wire::Status::Lost),
        constant!(VIRTIO_PEERGATE_S_NO_APERTURE = vdev_wire::Status::NoAperture),
        constant!(VIRTIO_PEERGATE_S_BUSY = vdev_wire::Status::Busy),
        constant!(VIRTIO_PEERGATE_S_ALREADY = vdev_wire::Status::Already),
        constant!(VIRTIO_PEERGATE_S_DENIED = vdev_wire::Status::Denied),
        constant!(VIRTIO_PEERGATE_S_PENDING = vdev_wire::COMPLETION_PENDING),
        constant!(VIRTIO_PEERGATE_OP_HELLO = vdev_wire::Opcode::Hello),
        constant!(VIRTIO_PEERGATE_OP_PROBE = vdev_wire::Opcode::Probe),
        constant!(VIRTIO_PEERGATE_OP_ATTACH = vdev_wire::Opcode::Attach),
        constant!(VIRTIO_PEERGATE_OP_DETACH = vdev_wire::Opcode::Detach),
        constant!(VIRTIO_PEERGATE_OP_MAP = vdev_wire::Opcode::Map),
        constant!(VIRTIO_PEERGATE_OP_UNMAP = vdev_wire::Opcode::Unmap),
        constant!(VIRTIO_PEERGATE_OP_FLUSH = vdev_wire::Opcode::Flush),
        constant!(VIRTIO_PEERGATE_OP_ALLOC = vdev_wire::Opcode::Alloc),
        constant!(VIRTIO_PEERGATE_OP_FREE = vdev_wire::Opcode::Free),
        constant!(VIRTIO_PEERGATE_OP_PEER_ENABLE = vdev_wire::Opcode::PeerEnable),
        constant!(VIRTIO_PEERGATE_OP_PEER_DISABLE = vdev_wire::Opcode::PeerDisable),
        constant!(VIRTIO_PEERGATE_OP_PEER_QUERY = vdev_wire::Opcode::PeerQuery),
        constant!(VIRTIO_PEERGATE_OP_STREAM_RESET = vdev_wire::Opcode::StreamReset),
        constant!(VIRTIO_PEERGATE_OP_CANCEL = vdev_wire::Opcode::Cancel),
        constant!(VIRTIO_PEERGATE_KIND_GPU = vdev_wire::EndpointKind::Gpu),
        constant!(VIRTIO_PEERGATE_KIND_FPGA = vdev_wire::EndpointKind::Fpga),
        constant!(VIRTIO_PEERGATE_KIND_STORAGE = vdev_wire::EndpointKind::Storage),
        constant!(VIRTIO_PEERGATE_KIND_MEMORY = vdev_wire::EndpointKind::Memory),
        constant!(VIRTIO_PEERGATE_KIND_ENGINE = vdev_wire::EndpointKind::Engine),
        constant!(VIRTIO_PEERGATE_ENDPOINT_ALL = vdev_wire::ENDPOINT_ALL),
        constant!(VIRTIO_PEERGATE_MAP_READ = vdev_wire::MAP_READ),
        constant!(VIRTIO_PEERGATE_MAP_WRITE = vdev_wire::MAP_WRITE),
        constant!(VIRTIO_PEERGATE_ALLOC_WINDOWABLE = vdev_wire::ALLOC_WINDOWABLE),
        constant!(VIRTIO_PEERGATE_ALLOC_REGISTERS = vdev_wire::ALLOC_REGISTERS),
        constant!(VIRTIO_PEERGATE_PEER_READ = vdev_wire::PEER_READ),
        constant!(VIRTIO_PEERGATE_PEER_WRITE = vdev_wire::PEER_WRITE),
        constant!(VIRTIO_PEERGATE_CANCEL_STREAM = vdev_wire::CANCEL_STREAM),
        constant!(VIRTIO_PEERGATE_WORK_COPY = vdev_wire::WorkOpcode::Copy),
        constant!(VIRTIO_PEERGATE_WORK_FILL = vdev_wire::WorkOpcode::Fill),
        constant!(VIRTIO_PEERGATE_WORK_ATOMIC = vdev_wire::WorkOpcode::Atomic),
        constant!(VIRTIO_PEERGATE_WORK_FENCE = vdev_wire::WorkOpcode::Fence),
        constant!(VIRTIO_PEERGATE_FENCE_DEVICE = vdev_wire::FENCE_DEVICE),
        constant!(VIRTIO_PEERGATE_FENCE_PEER = vdev_wire::FENCE_PEER),
        constant!(VIRTIO_PEERGATE_FENCE_SYSTEM = vdev_wire::FENCE_SYSTEM),
        constant!(VIRTIO_PEERGATE_WORK_SYSTEM = vdev_wire::WORK_SYSTEM),
        constant!(VIRTIO_PEERGATE_WORK_ATOMIC_ADD = vdev_wire::WORK_ATOMIC_ADD),
        constant!(VIRTIO_PEERGATE_WORK_ATOMIC_SWAP = vdev_wire::WORK_ATOMIC_SWAP),
        constant!(VIRTIO_PEERGATE_WORK_ATOMIC_COMPARE_SWAP = vdev_wire::WORK_ATOMIC_COMPARE_SWAP),
        constant!(VIRTIO_PEERGATE_WORK_ATOMIC_MASK = vdev_wire::WORK_ATOMIC_MASK),
        constant!(VIRTIO_PEERGATE_INITIATOR_ANY = vdev_wire::INITIATOR_ANY),
        constant!(VIRTIO_PEERGATE_PATH_NONE = vdev_wire::TransferPath::None),
        constant!(VIRTIO_PEERGATE_PATH_DIRECT = vdev_wire::TransferPath::Direct),
        constant!(VIRTIO_PEERGATE_PATH_STAGED = vdev_wire::TransferPath::Staged),
        constant!(VIRTIO_PEERGATE_PATH_LOCAL = vdev_wire::TransferPath::Local),
        constant!(VIRTIO_PEERGATE_REASON_NONE = vdev_wire::PathReason::None),
        constant!(VIRTIO_PEERGATE_REASON_SAME_DEVICE = vdev_wire::PathReason::SameDevice),
        constant!(VIRTIO_PEERGATE_REASON_REACHABLE = vdev_wire::PathReason::PeerReachable),
        constant!(VIRTIO_PEERGATE_REASON_UNREACHABLE = vdev_wire::PathReason::PeerUnreachable),
        constant!(VIRTIO_PEERGATE_REASON_POLICY = vdev_wire::PathReason::Policy),
        constant!(VIRTIO_PEERGATE_REASON_ENGINE_CANNOT = vdev_wire::PathReason::EngineCannot),
        constant!(VIRTIO_PEERGATE_REASON_UNPROVEN = vdev_wire::PathReason::Unproven),
        constant!(VIRTIO_PEERGATE_EVENT_FAULT = vdev_wire::EventKind::Fault),
        constant!(VIRTIO_PEERGATE_EVENT_OVERFLOW = vdev_wire::EventKind::Overflow),
        constant!(VIRTIO_PEERGATE_EVENT_INTERRUPT = vdev_wire::EventKind::Interrupt),
        constant!(VIRTIO_PEERGATE_FAULT_DOMAIN = vdev_wire::FaultReason::Domain),
        constant!(VIRTIO_PEERGATE_FAULT_MAPPING = vdev_wire::FaultReason::Mapping),
        constant!(VIRTIO_PEERGATE_FAULT_PERMISSION = vdev_wire::FaultReason::Permission),
        constant!(VIRTIO_PEERGATE_FAULT_PEER = vdev_wire::FaultReason::Peer),
        constant!(VIRTIO_PEERGATE_FAULT_STALE = vdev_wire::FaultReason::Stale),
        constant!(VIRTIO_PEERGATE_FAULT_DRAINING = vdev_wire::FaultReason::Draining),
        constant!(VIRTIO_PEERGATE_FAULT_ACCESS = vdev_wire::FaultReason::Access),
        constant!(VIRTIO_PEERGATE_ACCESS_READ = vdev_wire::ACCESS_READ),
        constant!(VIRTIO_PEERGATE_ACCESS_WRITE = vdev_wire::ACCESS_WRITE),
        constant!(VIRTIO_PEERGATE_OWNER_HIDDEN = vdev_wire::OWNER_HIDDEN),
        constant!(PEERGATE_TYPE = peergate_uapi::TYPE),
        constant!(PEERGATE_READ = peergate_uapi::READ),
        constant!(PEERGATE_WRITE = peergate_uapi::WRITE),
        constant!(PEERGATE_INTERRUPT_INTX = peergate_uapi::INTERRUPT_INTX),
        constant!(PEERGATE_INTERRUPT_MSIX = peergate_uapi::INTERRUPT_MSIX),
        constant!(PEERGATE_KIND_GPU = peergate_uapi::KIND_GPU),
        constant!(PEERGATE_KIND_FPGA = peergate_uapi::KIND_FPGA),
        constant!(PEERGATE_KIND_STORAGE = peergate_uapi::KIND_STORAGE),
        constant!(PEERGATE_KIND_MEMORY = peergate_uapi::KIND_MEMORY),
        constant!(PEERGATE_KIND_ENGINE = peergate_uapi::KIND_ENGINE),
        constant!(PEERGATE_ALLOC_REGISTERS = peergate_uapi::ALLOC_REGISTERS),
        constant!(PEERGATE_PEER_ENABLE = peergate_uapi::PEER_ENABLE),
        constant!(PEERGATE_PEER_DISABLE = peergate_uapi::PEER_DISABLE),
        constant!(PEERGATE_PEER_QUERY = peergate_uapi::PEER_QUERY),
        constant!(PEERGATE_WORK_COPY = peergate_uapi::WORK_COPY),
        constant!(PEERGATE_WORK_FILL = peergate_uapi::WORK_FILL),
        constant!(PEERGATE_WORK_ATOMIC = peergate_uapi::WORK_ATOMIC),
        constant!(PEERGATE_WORK_FENCE = peergate_uapi::WORK_FENCE),
        constant!(PEERGATE_WORK_SYSTEM = peergate_uapi::WORK_SYSTEM),
        constant!(PEERGATE_WORK_ATOMIC_ADD = peergate_uapi::WORK_ATOMIC_ADD),
        constant!(PEERGATE_WORK_ATOMIC_SWAP = peergate_uapi::WORK_ATOMIC_SWAP),
        constant!(PEERGATE_WORK_ATOMIC_COMPARE_SWAP = peergate_uapi::WORK_ATOMIC_COMPARE_SWAP),
        constant!(PEERGATE_INITIATOR_ANY = peergate_uapi::INITIATOR_ANY),
        constant!(PEERGATE_MMAP_RING = peergate_uapi::MMAP_RING),
        constant!(PEERGATE_STREAM_RESET = peergate_uapi::STREAM_RESET),
        constant!(PEERGATE_STREAM_CANCEL = peergate_uapi::STREAM_CANCEL),
        constant!(PEERGATE_CANCEL_ALL = peergate_uapi::CANCEL_ALL),
        constant!(PEERGATE_PATH_NONE = peergate_uapi::PATH_NONE),
        constant!(PEERGATE_PATH_DIRECT = peergate_uapi::PATH_DIRECT),
        constant!(PEERGATE_PATH_STAGED = peergate_uapi::PATH_STAGED),
        constant!(PEERGATE_PATH_LOCAL = peergate_uapi::PATH_LOCAL),
        constant!(PEERGATE_EVENT_FAULT = peergate_uapi::EVENT_FAULT),
        constant!(PEERGATE_EVENT_OVERFLOW = peergate_uapi::EVENT_OVERFLOW),
        constant!(PEERGATE_EVENT_INTERRUPT = peergate_uapi::EVENT_INTERRUPT),
    ]
}

/// Every ioctl.
pub fn ioctls() -> Vec<Ioctl> {
    vec![
        ioctl!(PEERGATE_INFO = peergate_uapi::IOCTL_INFO: peergate_uapi::Info),
        ioctl!(PEERGATE_ENDPOINT = peergate_uapi::IOCTL_ENDPOINT: peergate_uapi::Endpoint),
        ioctl!(PEERGATE_RING = peergate_uapi::IOCTL_RING: peergate_uapi::RingSetup),
        ioctl!(PEERGATE_MAP = peergate_uapi::IOCTL_MAP: peergate_uapi::Map),
        ioctl!(PEERGATE_UNMAP = peergate_uapi::IOCTL_UNMAP: peergate_uapi::Unmap),
        ioctl!(PEERGATE_ALLOC = peergate_uapi::IOCTL_ALLOC: peergate_uapi::Alloc),
        ioctl!(PEERGATE_FREE = peergate_uapi::IOCTL_FREE: peergate_uapi::Free),
        ioctl!(PEERGATE_PEER = peergate_uapi::IOCTL_PEER: peergate_uapi::Peer),
        ioctl!(PEERGATE_SUBMIT = peergate_uapi::IOCTL_SUBMIT: peergate_uapi::Submit),
        ioctl!(PEERGATE_WAIT = peergate_uapi::IOCTL_WAIT: peergate_uapi::Wait),
        ioctl!(PEERGATE_STREAM = peergate_uapi::IOCTL_STREAM: peergate_uapi::Stream),
    ]
}
