//! What the domains of one tenant share: records, index, quotas, and who is who.
//!
//! Lock order: registry, then a domain's table, then the pool; a latch is let go with none of them held.
//!
//! Not here: what a domain maps.

use crate::domain::Domain;
use crate::index::Index;
use crate::limits::{Limits, Quotas};
use crate::record::Owner;
use crate::slab::{FreeList, Slab};
use crate::sync::{Mutex, RwLock, read, write};
use crate::word::Pin;
use iommu_addr::{DomainId, EndpointId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// See the module.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) limits: Limits,
    /// The tenant's endpoints; an endpoint's place here is its number in a domain's rights.
    pub(crate) endpoints: Box<[EndpointId]>,
    pub(crate) quotas: Quotas,
    pub(crate) slab: Slab,
    pub(crate) index: Index,
    /// Who may allocate records and write the index.
    pub(crate) pool: Mutex<Pool>,
    /// Every domain that is not wholly gone.
    pub(crate) registry: RwLock<BTreeMap<DomainId, Arc<Domain>>>,
}

/// State of the slab and of the index that only writers need, and how many mappings there were.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    pub(crate) free: FreeList,
    /// Entries in the index.
    pub(crate) indexed: usize,
    /// Mappings made so far.
    pub(crate) made: u64,
}

impl Tenant {
    pub(crate) fn new(limits: Limits, endpoints: Box<[EndpointId]>) -> Self {
        Self {
            limits,
            endpoints,
            quotas: Quotas::new(&limits),
            slab: Slab::new(limits.segments),
            index: Index::new(limits.segments),
            pool: Mutex::new(Pool::default()),
            registry: RwLock::new(BTreeMap::new()),
        }
    }

    /// Pins a mapping if it is still the one that `owner` names. May end a drain, so no lock of this crate may be held.
    #[inline]
    pub(crate) fn pin(&self, owner: Owner) -> bool {
        match self.slab.at(owner.head).word.pin(owner.generation) {
            Pin::Held => true,
            Pin::Refused => false,
            Pin::RefusedAndClaimed => {
                self.end_drain(owner.head);
                false
            }
        }
    }

    /// A domain is gone: its id is free.
    pub(crate) fn forget(&self, id: DomainId) {
        write(&self.registry).remove(&id);
        self.quotas.domains.give(1);
    }

    /// Ends the drain of a mapping whose end was claimed by somebody who does not know whose mapping it is: a remembered place may by now serve
    /// another domain.
    #[cold]
    fn end_drain(&self, head: u32) {
        let serial = self.slab.at(head).domain();
        let domain = read(&self.registry).values().find(|domain| domain.serial() == serial).map(Arc::clone);
        if let Some(domain) = domain {
            domain.end_mapping_drain(head);
        }
    }
}
