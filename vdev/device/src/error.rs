//! Why a request or a work descriptor is refused, and the one place where that becomes a [`Status`].
//!
//! Not here: who is told besides the guest (events, the operator).

use hw_engine::EngineError;
use iommu_addr::{Access, EndpointId, Iova};
use iommu_core::Provenance;
use vdev_wire::{FaultReason, Status};

/// A refused access: who, where, why, and the mapping that it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) accessor: Option<EndpointId>,
    pub(crate) owner: Option<EndpointId>,
    pub(crate) address: Iova,
    pub(crate) access: Access,
    pub(crate) reason: FaultReason,
    pub(crate) mapping: Option<Provenance>,
}

/// Everything that a guest can be refused for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Chain or byte counts are wrong.
    #[error("The chain is malformed: {what}")]
    Malformed {
        /// The defect.
        what: &'static str,
    },
    /// A field has a value that is never valid.
    #[error("The field {field} has the invalid value {value:#x}")]
    Field {
        /// Name of the field in `vdev_wire`.
        field: &'static str,
        /// What the guest wrote.
        value: u64,
    },
    /// HELLO has to come first.
    #[error("The driver has not said HELLO")]
    BeforeHello,
    /// An opcode or flag that this device does not know.
    #[error("The device does not know {what} {value:#x}")]
    Unknown {
        /// Which field.
        what: &'static str,
        /// What the guest wrote.
        value: u64,
    },
    /// A version or an optional feature that this device does not have.
    #[error("The device speaks version {newest}, without optional features")]
    Version {
        /// Newest version it speaks.
        newest: u16,
    },
    /// The driver believes in another session.
    #[error("The session is {session}, not the driver's")]
    Session {
        /// The session in force.
        session: u32,
    },
    /// No such object, or not the caller's.
    #[error("There is no {what} {value:#x} here")]
    Missing {
        /// Kind of object.
        what: &'static str,
        /// Its name.
        value: u64,
    },
    /// An address or length outside what the device offers.
    #[error("The address or length {value:#x} is out of range")]
    OutOfRange {
        /// The offender.
        value: u64,
    },
    /// A limit of the tenant is reached.
    #[error("The limit of {limit} {what} is reached")]
    Limit {
        /// Of what.
        what: &'static str,
        /// How many there may be.
        limit: u64,
    },
    /// The endpoint's memory is full.
    #[error("The endpoint has no {len:#x} bytes of memory in one piece left")]
    Memory {
        /// How much was wanted.
        len: u64,
    },
    /// The handle's buffer was freed.
    #[error("The buffer {handle:#x} was freed")]
    FreedHandle {
        /// The handle.
        handle: u64,
    },
    /// Nothing to change.
    #[error("It is so already")]
    Already,
    /// The state forbids it.
    #[error("The state forbids it: {what}")]
    State {
        /// Why.
        what: &'static str,
    },
    /// A translation or a peer right failed.
    #[error("The access was refused at {:#x}: {reason:?}", address.0)]
    Access {
        /// First address refused.
        address: Iova,
        /// Why.
        reason: FaultReason,
    },
    /// A right between endpoints that are no peers.
    #[error("Endpoint {accessor} is not proved to be a peer of endpoint {owner}; the worker's log says why")]
    Unproven {
        /// Who would reach out.
        accessor: EndpointId,
        /// Whose memory it would reach.
        owner: EndpointId,
    },
    /// Out of credits, or the stream still holds work.
    #[error("The stream or the tenant has too much work for this")]
    Busy,
    /// Cancelled by request, behind an error, or with its domain.
    #[error("The work was cancelled")]
    Cancelled,
    /// In flight, or on its way, when the session changed.
    #[error("The device lost its state")]
    Lost,
    /// The deadline passed.
    #[error("The deadline passed")]
    Timeout,
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Dropped by the device before it could end.
    #[error("The device was reset or failed")]
    Dropped,
}

impl RequestError {
    /// What the guest is answered. The only place that decides this.
    pub fn status(&self) -> Status {
        match self {
            Self::Malformed { .. } | Self::Field { .. } | Self::BeforeHello | Self::State { .. } => Status::Inval,
            Self::Unknown { .. } | Self::Version { .. } => Status::Unsupp,
            Self::Session { .. } | Self::FreedHandle { .. } => Status::Stale,
            Self::Missing { .. } => Status::NoEnt,
            Self::OutOfRange { .. } => Status::Range,
            Self::Limit { .. } => Status::Quota,
            Self::Memory { .. } => Status::NoMem,
            Self::Already => Status::Already,
            Self::Access { reason: FaultReason::Peer, .. } | Self::Unproven { .. } => Status::Denied,
            Self::Access { .. } | Self::Engine(EngineError::RegisterAccess) => Status::Fault,
            Self::Busy | Self::Engine(EngineError::Busy) => Status::Busy,
            Self::Cancelled => Status::Cancelled,
            Self::Lost => Status::Lost,
            Self::Timeout => Status::Timeout,
            Self::Engine(_) | Self::Dropped => Status::IoErr,
        }
    }

    /// The address, count or limit that the answer is about; 0 if none.
    pub fn detail(&self) -> u64 {
        match self {
            Self::Field { value, .. } | Self::Unknown { value, .. } | Self::Missing { value, .. } => *value,
            Self::OutOfRange { value } => *value,
            Self::Version { newest } => u64::from(*newest),
            Self::Session { session } => u64::from(*session),
            Self::Limit { limit, .. } => *limit,
            Self::Memory { len } => *len,
            Self::FreedHandle { handle } => *handle,
            Self::Access { address, .. } => address.0,
            _ => 0,
        }
    }
}
