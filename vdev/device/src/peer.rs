//! PEER_ENABLE, PEER_DISABLE and PEER_QUERY.

use iommu_addr::{Access, EndpointId};
use iommu_core::PeerError;
use vdev_wire::{PEER_READ, PEER_WRITE, PeerReply, TransferPath};
use zerocopy::IntoBytes;

use crate::RequestError;
use crate::complete::{Body, Completer};
use crate::device::Device;
use crate::domain::Domain;
use crate::request::{PeerChange, field};

impl Device {
    pub(crate) fn peer(
        &self,
        domain: &Domain,
        change: PeerChange,
        (accessor, owner): (EndpointId, EndpointId),
        rights: Access,
        completer: Completer,
    ) {
        let (path, reason) = self.spec.reach.verdict(accessor, owner);
        let body = move |rights: Access| {
            let bit = |set: bool, bit: u32| if set { bit } else { 0 };
            let raw = bit(rights.read, PEER_READ) | bit(rights.write, PEER_WRITE);
            let (path, reason) = (u16::from(path as u8), u16::from(reason as u8));
            let reply = PeerReply { rights: raw.into(), path: path.into(), reason: reason.into() };
            Body::from_slice(reply.as_bytes())
        };
        let space = &domain.space;
        let answer = match change {
            // A right would be taken for a promise that bytes arrive.
            PeerChange::Enable if path == TransferPath::None => {
                let known = space.peer_query(accessor, owner).map_err(RequestError::from);
                return completer.answer(known.and(Err(RequestError::Unproven { accessor, owner })));
            }
            PeerChange::Enable => space.peer_enable(accessor, owner, rights),
            PeerChange::Query => space.peer_query(accessor, owner),
            PeerChange::Disable => match space.peer_disable(accessor, owner, rights) {
                Ok((left, progress)) => {
                    let then = self.answer_within(domain, body(left), completer);
                    return progress.then(move || drop(then));
                }
                Err(error) => Err(error),
            },
        };
        completer.answer(answer.map(body).map_err(RequestError::from));
    }
}

impl From<PeerError> for RequestError {
    fn from(error: PeerError) -> Self {
        match error {
            PeerError::NotAttached { endpoint } => {
                Self::Missing { what: "endpoint", value: u64::from(endpoint.to_raw()) }
            }
            PeerError::SameEndpoint => field("owner", 0),
            PeerError::Already { .. } => Self::Already,
            PeerError::Draining => Self::State { what: "the right is being withdrawn" },
        }
    }
}
