//! What is recorded when an access is refused: who wanted what, where, why not, and which mapping it is about.
//!
//! Not here: which work descriptor it was (the device adds that), who is told, what a guest may see of it.

use iommu_addr::{Access, DomainId, EndpointId, Iova, Range};
use thiserror::Error;

/// Why an access was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultReason {
    /// The accessor is not attached to the domain, or the domain does not exist.
    Domain,
    /// No mapping holds the address.
    Mapping,
    /// The mapping does not allow the access.
    Permission,
    /// The accessor has no peer right to the owner's memory.
    Peer,
    /// The handle names a freed object. Never found here: for the device's use of this type.
    Stale,
    /// The mapping is going away.
    Draining,
    /// The device cannot access the address so. Never found here: for the device's use of this type.
    Access,
}

/// What a mapping is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MappingKind {
    /// Memory that the guest mapped.
    Guest = 1,
    /// A buffer in an endpoint's memory.
    Buffer = 2,
    /// An endpoint's registers.
    Registers = 3,
}

impl MappingKind {
    /// The kind that `raw` is the number of.
    pub fn from_raw(raw: u8) -> Option<Self> {
        [Self::Guest, Self::Buffer, Self::Registers].into_iter().find(|kind| *kind as u8 == raw)
    }
}

/// How a mapping and a refused address lie to one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Relation {
    /// The mapping holds the address.
    Holds = 1,
    /// Nothing holds the address; this mapping was the last that did, as far as is remembered.
    Held = 2,
    /// Nothing holds the address or is remembered to have; no mapping lies nearer.
    Nearest = 3,
}

impl Relation {
    /// The relation that `raw` is the number of.
    pub fn from_raw(raw: u8) -> Option<Self> {
        [Self::Holds, Self::Held, Self::Nearest].into_iter().find(|relation| *relation as u8 == raw)
    }
}

/// Where a mapping comes from: what an operator needs to find the request behind a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Provenance {
    /// How it lies to the refused address.
    pub relation: Relation,
    /// What it is of.
    pub kind: MappingKind,
    /// Its addresses.
    pub range: Range<Iova>,
    /// What it allows, or allowed.
    pub access: Access,
    /// Which of the tenant's mappings it is, counted from 1 as they were made, over all domains.
    pub request: u64,
    /// It is being removed, and somebody still uses it.
    pub is_draining: bool,
}

/// One refused access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[error("Endpoint {accessor} was refused at {:#x} in domain {}: {reason:?}", iova.0, domain.0)]
pub struct Fault {
    /// Who wanted to access.
    pub accessor: EndpointId,
    /// Whose memory it is, where that is known and is not the guest's own.
    pub owner: Option<EndpointId>,
    /// In which address space.
    pub domain: DomainId,
    /// First address refused.
    pub iova: Iova,
    /// What was wanted.
    pub access: Access,
    /// Why not.
    pub reason: FaultReason,
    /// The mapping that this is about; `None` if no address was asked for, or the domain has none.
    pub mapping: Option<Provenance>,
}

/// A translation that was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// The access is not allowed.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The range is scattered over more pieces than the tenant may hold now; may succeed when other work has ended.
    #[error(
        "The tenant's running translations would hold more than {limit} pieces: wait for other work or use larger pages"
    )]
    Pieces {
        /// Pieces the tenant may hold.
        limit: u32,
    },
}
