//! Work descriptors: 64 bytes to [`Work`], purely.
//!
//! Not here: whether the addresses are mapped, who may act, limits of the tenant.

use hw_engine::{Atomic, AtomicOp};
use iommu_addr::{DomainId, EndpointId, Iova, Range, StreamId};
use vdev_wire::{
    COMPLETION_SIZE, DESCRIPTOR_SIZE, FENCE_DEVICE, FENCE_SYSTEM, INITIATOR_ANY, SUBMIT_HEADER_SIZE, SubmitHeader,
    VERSION, WORK_ATOMIC_ADD, WORK_ATOMIC_COMPARE_SWAP, WORK_ATOMIC_MASK, WORK_ATOMIC_SWAP, WORK_SYSTEM,
    WorkDescriptor, WorkOpcode,
};
use zerocopy::{FromBytes, transmute_ref};

use crate::RequestError;
use crate::request::{field, zero};

/// One unit of work whose bytes are in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// What to do.
    pub operation: Operation,
    /// Which endpoint acts; `None` leaves it to the device.
    pub initiator: Option<EndpointId>,
    /// Order the transfer before every observer.
    pub system: bool,
}

/// What work does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Copy `src` to `dst`, which have the same length.
    Copy {
        /// To read.
        src: Range<Iova>,
        /// To write.
        dst: Range<Iova>,
    },
    /// Fill `dst` with eight bytes.
    Fill {
        /// To write.
        dst: Range<Iova>,
        /// The bytes, little-endian.
        pattern: u64,
    },
    /// Change a word and say what was there.
    Atomic {
        /// To read and write.
        at: Range<Iova>,
        /// How.
        atomic: Atomic,
    },
    /// Order what came before.
    Fence,
}

impl Operation {
    /// Bytes to write.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Copy { dst, .. } | Self::Fill { dst, .. } => dst.len().unwrap_or(u64::MAX),
            Self::Atomic { atomic, .. } => atomic.len,
            Self::Fence => 0,
        }
    }
}

/// What of a descriptor is needed whether it is in order or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// Which stream orders it.
    pub stream: StreamId,
    /// Goes into its completion record.
    pub cookie: u64,
    /// Deadline in milliseconds, 0 for the default.
    pub timeout_ms: u32,
}

impl Default for Tag {
    fn default() -> Self {
        Self { stream: StreamId(0), cookie: 0, timeout_ms: 0 }
    }
}

/// Parses a work descriptor.
///
/// # Errors
/// INVAL, UNSUPP and RANGE ones only.
pub fn parse_work(bytes: &[u8; DESCRIPTOR_SIZE]) -> (Tag, Result<Work, RequestError>) {
    let descriptor: &WorkDescriptor = transmute_ref!(bytes);
    let tag = Tag {
        stream: StreamId(descriptor.stream.get()),
        cookie: descriptor.cookie.get(),
        timeout_ms: descriptor.timeout_ms.get(),
    };
    (tag, parse(descriptor))
}

fn parse(descriptor: &WorkDescriptor) -> Result<Work, RequestError> {
    let flags = descriptor.flags.get();
    if descriptor.ext != 0 || descriptor.reserved0 != 0 || descriptor.reserved1.get() != 0 {
        return Err(field("reserved", 1));
    }
    let raw = descriptor.opcode.get();
    let known = if WorkOpcode::from_raw(raw) == Some(WorkOpcode::Atomic) {
        WORK_SYSTEM | WORK_ATOMIC_MASK
    } else {
        WORK_SYSTEM
    };
    if flags & !known != 0 {
        return Err(field("flags", u64::from(flags)));
    }
    let (source, destination) = (descriptor.source.get(), descriptor.destination.get());
    let (length, operand) = (descriptor.length.get(), descriptor.operand.get());
    let operation = match WorkOpcode::from_raw(raw) {
        Some(WorkOpcode::Copy) => {
            zero("operand", operand)?;
            Operation::Copy { src: range(source, length)?, dst: range(destination, length)? }
        }
        Some(WorkOpcode::Fill) => {
            zero("source", source)?;
            Operation::Fill { dst: range(destination, length)?, pattern: operand }
        }
        Some(WorkOpcode::Atomic) => atomic(flags, source, destination, length, operand)?,
        Some(WorkOpcode::Fence) => {
            zero("source", source)?;
            zero("destination", destination)?;
            zero("length", length)?;
            if !(FENCE_DEVICE..=FENCE_SYSTEM).contains(&operand) {
                return Err(field("operand", operand));
            }
            Operation::Fence
        }
        _ => return Err(RequestError::Unknown { what: "work opcode", value: u64::from(raw) }),
    };
    let initiator = descriptor.initiator.get();
    Ok(Work {
        operation,
        initiator: (initiator != INITIATOR_ANY).then(|| EndpointId::from_raw(initiator)),
        system: flags & WORK_SYSTEM != 0,
    })
}

/// ATOMIC: a word of 4 or 8 bytes, naturally aligned, so that it has one place.
fn atomic(flags: u32, source: u64, destination: u64, len: u64, operand: u64) -> Result<Operation, RequestError> {
    let op = match flags & WORK_ATOMIC_MASK {
        WORK_ATOMIC_ADD => AtomicOp::Add,
        WORK_ATOMIC_SWAP => AtomicOp::Swap,
        WORK_ATOMIC_COMPARE_SWAP => AtomicOp::CompareSwap { compare: source },
        _ => return Err(field("flags", u64::from(flags))),
    };
    if op == AtomicOp::Add || op == AtomicOp::Swap {
        zero("source", source)?;
    }
    if !matches!(len, 4 | 8) {
        return Err(field("length", len));
    }
    if !destination.is_multiple_of(len) {
        return Err(field("destination", destination));
    }
    Ok(Operation::Atomic { at: range(destination, len)?, atomic: Atomic { op, len, operand } })
}

fn range(start: u64, len: u64) -> Result<Range<Iova>, RequestError> {
    if len == 0 {
        return Err(field("length", 0));
    }
    Range::with_len(Iova(start), len).ok_or(RequestError::OutOfRange { value: start })
}

/// A submission chain whose header is in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) domain: DomainId,
    pub(crate) session: u32,
}

/// A submission chain that is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadBatch {
    /// Records that the answer fills; 0 if the chain cannot be answered.
    pub(crate) records: u16,
    pub(crate) error: RequestError,
}

/// Parses a submission chain's header and checks the chain's byte counts against it. `front` is all of `len` readable bytes, or those of the
/// header if they are too many; `room` is the room for records. Gives the descriptors too.
pub(crate) fn parse_batch(
    front: &[u8],
    len: usize,
    room: usize,
    max_batch: u16,
) -> Result<(Batch, &[[u8; DESCRIPTOR_SIZE]]), BadBatch> {
    let silent = |what| BadBatch { records: 0, error: RequestError::Malformed { what } };
    let (header, rest) = SubmitHeader::ref_from_prefix(front).ok().ok_or(silent("it is shorter than its header"))?;
    let count = header.count.get();
    if count == 0 || usize::from(count).checked_mul(COMPLETION_SIZE) != Some(room) {
        return Err(silent("its room does not match the count of descriptors"));
    }
    let descriptors = check_batch(header, len, max_batch).map(|()| rest.as_chunks().0);
    let descriptors = descriptors.map_err(|error| BadBatch { records: count, error })?;
    Ok((Batch { domain: DomainId(header.domain.get()), session: header.session.get() }, descriptors))
}

fn check_batch(header: &SubmitHeader, len: usize, max_batch: u16) -> Result<(), RequestError> {
    let (version, count) = (header.version.get(), header.count.get());
    if version != VERSION {
        return Err(field("version", u64::from(version)));
    }
    zero("flags", u64::from(header.flags.get()))?;
    if count > max_batch {
        return Err(field("count", u64::from(count)));
    }
    let wanted = usize::from(count).checked_mul(DESCRIPTOR_SIZE);
    if len.checked_sub(SUBMIT_HEADER_SIZE) != wanted {
        return Err(RequestError::Malformed { what: "its bytes do not match the count of descriptors" });
    }
    Ok(())
}
