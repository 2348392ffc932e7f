//! Completions and events with their numbers given meaning.
//!
//! A number that this library does not know (a newer device) becomes the nearest thing that is not success: DEVERR for a status, none for a
//! path or a reason.
//!
//! Not here: waiting for them.

use std::time::Duration;

use iommu_addr::Access;
use peergate_uapi::{Completion, Event};
use vdev_wire::{EventKind, FaultReason, OWNER_HIDDEN, PathReason, Status, TransferPath};

use crate::Error;

/// How a work descriptor ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Success or why not.
    pub status: Status,
    /// Bytes moved before the end or the error.
    pub bytes: u64,
    /// How they went.
    pub path: TransferPath,
    /// Why they went so.
    pub reason: PathReason,
    /// What was refused, with FAULT and DENIED.
    pub fault: Option<FaultAt>,
    /// What the word of an atomic operation was, if that ended well; else 0.
    pub value: u64,
    /// The descriptor's cookie; the fault event of the same work carries it too.
    pub cookie: u64,
}

/// A refused address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultAt {
    /// First address that was refused.
    pub address: u64,
    /// Why.
    pub reason: FaultReason,
}

impl Outcome {
    /// The outcome that a completion record tells of.
    pub fn from_completion(completion: &Completion) -> Self {
        let fault = FaultReason::from_raw(completion.fault_reason)
            .map(|reason| FaultAt { address: completion.fault_address, reason });
        Self {
            status: Status::from_raw(completion.status).unwrap_or(Status::DevErr),
            bytes: completion.bytes,
            path: TransferPath::from_raw(completion.path).unwrap_or(TransferPath::None),
            reason: PathReason::from_raw(completion.reason).unwrap_or(PathReason::None),
            fault,
            value: if fault.is_none() { completion.fault_address } else { 0 },
            cookie: completion.cookie,
        }
    }

    /// The outcome if it is success.
    ///
    /// # Errors
    /// [`Error::Transfer`] with the outcome if it is not.
    pub fn ok(self) -> Result<Self, Error> {
        if self.status == Status::Ok { Ok(self) } else { Err(Error::Transfer { outcome: self }) }
    }
}

/// An event of this session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    /// What happened; none if this library does not know the kind.
    pub kind: Option<EventKind>,
    /// Why, of a fault.
    pub reason: Option<FaultReason>,
    /// What the accessor wanted, of a fault.
    pub access: Access,
    /// Session of the device.
    pub session: u32,
    /// Counts the device's events.
    pub seq: u64,
    /// Events lost so far.
    pub dropped_total: u64,
    /// Endpoint that acted, if it is known.
    pub accessor: Option<u32>,
    /// Endpoint whose memory it was, if it is known.
    pub owner: Option<u32>,
    /// Stream of the work.
    pub stream: u32,
    /// First address refused.
    pub address: u64,
    /// Cookie of the work, 0 if none.
    pub cookie: u64,
    /// Vector of an interrupt, handle of a stale buffer.
    pub value: u64,
}

impl Notice {
    /// The notice that an event record tells of.
    pub fn from_event(event: &Event) -> Self {
        let known = |endpoint: u32| (endpoint != OWNER_HIDDEN).then_some(endpoint);
        Self {
            kind: EventKind::from_raw(event.kind),
            reason: FaultReason::from_raw(event.reason),
            access: access_from_bits(event.access.into()),
            session: event.session,
            seq: event.seq,
            dropped_total: event.dropped_total,
            accessor: known(event.accessor),
            owner: known(event.owner),
            stream: event.stream,
            address: event.address,
            cookie: event.cookie,
            value: event.value,
        }
    }
}

/// Rights as the user interface's bits.
pub(crate) fn access_bits(access: Access) -> u32 {
    let bit = |set, bit| if set { bit } else { 0 };
    bit(access.read, peergate_uapi::READ) | bit(access.write, peergate_uapi::WRITE)
}

/// Rights from the user interface's bits.
pub(crate) fn access_from_bits(bits: u32) -> Access {
    Access { read: bits & peergate_uapi::READ != 0, write: bits & peergate_uapi::WRITE != 0 }
}

/// Bytes moved and how long it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Bytes.
    pub bytes: u64,
    /// From the first submission to the last completion.
    pub elapsed: Duration,
    /// The path of the last piece.
    pub path: TransferPath,
    /// Why it was taken.
    pub reason: PathReason,
    /// How another piece went, and why, if not all went the same way.
    pub other: Option<(TransferPath, PathReason)>,
}

impl Moved {
    /// Gigabytes (10^9 bytes) a second; 0 if no time passed.
    #[allow(clippy::cast_precision_loss, reason = "a rate for people to read")]
    pub fn gb_per_s(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 { self.bytes as f64 / seconds / 1e9 } else { 0.0 }
    }
}
