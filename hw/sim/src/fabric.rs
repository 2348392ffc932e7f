//! Which links the bytes of a transfer cross.
//!
//! Bytes leave the source's device by its link and enter the destination's by its own; the two directions of a link do not contend. Within
//! a device no link is crossed, and guest memory has none. Bytes of a fill, and of a kernel, come from the initiator; bytes between two
//! places in guest memory cross the initiator's link in and out. Links that are as fast as memory do not count.
//!
//! Not here: when they do (`traffic`).

use std::sync::Arc;

use hw_engine::{Direction, LinkId, LinkLedger, Pairs, Route, Transfer, Work};
use iommu_addr::EndpointId;
use smallvec::SmallVec;

use crate::{ConfigError, SimConfig, SimEndpoint};

/// Bytes in one direction of a link. Each link and direction is there once.
pub(crate) type Crossings = SmallVec<[(LinkId, Direction, u64); 4]>;

pub(crate) struct Fabric {
    endpoints: Vec<SimEndpoint>,
    /// Whether any endpoint has a link.
    linked: bool,
    pub(crate) ledger: Arc<dyn LinkLedger>,
}

impl Fabric {
    pub(crate) fn new(config: &SimConfig, ledger: Arc<dyn LinkLedger>) -> Result<Self, ConfigError> {
        config.check()?;
        let linked = config.endpoints.iter().any(|endpoint| endpoint.link.is_some());
        Ok(Self { endpoints: config.endpoints.clone(), linked, ledger })
    }

    /// Whether no transfer takes any time.
    pub(crate) fn is_instant(&self) -> bool {
        let is_instant = |endpoint: &SimEndpoint| {
            let link = endpoint.link.and_then(|link| self.ledger.piece(link));
            endpoint.latency.is_zero() && link.is_none()
        };
        self.endpoints.iter().all(is_instant)
    }

    pub(crate) fn endpoint(&self, id: EndpointId) -> Option<&SimEndpoint> {
        self.endpoints.iter().find(|endpoint| endpoint.spec.id == id)
    }

    /// The links that a transfer crosses, in the order in which a staged one does.
    pub(crate) fn crossings(&self, transfer: &Transfer) -> Crossings {
        let mut found = Crossings::new();
        if !self.linked {
            return found;
        }
        let device = Some(transfer.initiator);
        let mut hop = |from, to, bytes| self.hop(&mut found, from, to, bytes);
        match &transfer.work {
            Work::Copy { src, dst, .. } => {
                for pair in Pairs::new(dst, src) {
                    match (pair.src.owner(), pair.dst.owner()) {
                        (None, None) => {
                            hop(None, device, pair.len);
                            hop(device, None, pair.len);
                        }
                        (from, to) => hop(from, to, pair.len),
                    }
                }
            }
            Work::Fill { dst, .. } => dst.iter().for_each(|to| hop(device, to.at.owner(), to.len)),
            Work::Kernel { src, dst } => {
                src.iter().for_each(|from| hop(from.at.owner(), device, from.len));
                dst.iter().for_each(|to| hop(device, to.at.owner(), to.len));
            }
            // A number goes there, and what was there comes back.
            Work::Atomic { at, atomic } => {
                hop(device, at.owner(), atomic.len);
                hop(at.owner(), device, atomic.len);
            }
            Work::Flush => {}
        }
        found
    }

    fn hop(&self, found: &mut Crossings, from: Option<EndpointId>, to: Option<EndpointId>, bytes: u64) {
        let link = |end: Option<EndpointId>| end.and_then(|id| self.endpoint(id)?.link);
        let (out, into) = (link(from), link(to));
        if out == into {
            return;
        }
        for (link, direction) in [(out, Direction::Out), (into, Direction::In)] {
            let Some(link) = link.filter(|link| self.ledger.piece(*link).is_some()) else { continue };
            match found.iter_mut().find(|(held, way, _)| (*held, *way) == (link, direction)) {
                Some((_, _, sum)) => *sum = sum.saturating_add(bytes),
                None => found.push((link, direction, bytes)),
            }
        }
    }
}

/// The way of a transfer that has one; everything else goes straight.
pub(crate) fn route(work: &Work) -> Route {
    match work {
        Work::Copy { route, .. } => *route,
        Work::Fill { .. } | Work::Kernel { .. } | Work::Atomic { .. } | Work::Flush => Route::Direct,
    }
}
