//! What is recorded when an access is refused: who wanted what, where, and why not.
//!
//! Not here: which work descriptor it was (the device adds that), who is told, what a guest may see of it.

use iommu_addr::{Access, DomainId, EndpointId, Iova};
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
