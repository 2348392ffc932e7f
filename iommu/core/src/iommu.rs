//! The domains of one tenant.
//!
//! A domain comes with the first endpoint attached to it and goes with the last one detached; its id is free again when all of it has drained.
//!
//! Not here: several tenants (each has an `Iommu` of its own and shares nothing).

use crate::domain::Domain;
use crate::drain::{Latch, Progress};
use crate::limits::{Limits, MAX_ENDPOINTS, MAX_SEGMENTS, PAGE_SIZE, Usage};
use crate::peers::Attach;
use crate::sync::{read, serial, write};
use crate::tenant::Tenant;
use iommu_addr::{DomainId, EndpointId};
use std::collections::btree_map::Entry;
use std::sync::Arc;
use thiserror::Error;

/// Why there is no IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LimitsError {
    /// The ends of the address range are not page-aligned.
    #[error("The address range must begin and end at a multiple of {PAGE_SIZE:#x}")]
    Misaligned,
    /// Too many segments.
    #[error("The segment limit must be at most {MAX_SEGMENTS}")]
    Segments,
    /// Too many endpoints.
    #[error("A tenant may have at most {MAX_ENDPOINTS} endpoints")]
    Endpoints,
}

/// Why an endpoint was not attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AttachError {
    /// The tenant has no such endpoint.
    #[error("The tenant has no endpoint {endpoint}")]
    NoEndpoint {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// It is attached to the domain.
    #[error("Endpoint {endpoint} is attached already")]
    Already {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// The domain, or the endpoint's attachment to it, still drains.
    #[error("The domain is still draining: wait for the answer to the detach request")]
    Draining,
    /// The tenant has as many domains as it may have.
    #[error("The tenant may have {limit} domains: detach one first")]
    Quota {
        /// How many it may have.
        limit: u32,
    },
}

/// Why an endpoint was not detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DetachError {
    /// There is no such domain, or it is being destroyed.
    #[error("There is no such domain")]
    NoDomain,
    /// The endpoint is not attached to it.
    #[error("Endpoint {endpoint} is not attached to the domain")]
    NotAttached {
        /// The endpoint.
        endpoint: EndpointId,
    },
}

/// What detaching did.
#[derive(Debug)]
#[must_use = "the answer may have to wait"]
pub struct Detached {
    /// It was the last endpoint: the domain goes, with everything in it.
    pub destroyed: bool,
    /// Whether jobs still run that rely on what went.
    pub progress: Progress,
}

/// The virtual IOMMU of one tenant, shared by its threads. Nothing here blocks on jobs.
#[derive(Debug)]
pub struct Iommu(Arc<Tenant>);

impl Iommu {
    /// An IOMMU without domains, for a tenant with these endpoints. Takes 16 to 32 bytes of memory for each segment of the limit.
    ///
    /// # Errors
    /// See [`LimitsError`].
    pub fn new(limits: Limits, endpoints: impl IntoIterator<Item = EndpointId>) -> Result<Self, LimitsError> {
        let mut endpoints: Vec<_> = endpoints.into_iter().take(MAX_ENDPOINTS.saturating_add(1)).collect();
        endpoints.sort_unstable();
        endpoints.dedup();
        if !limits.iova.is_aligned(PAGE_SIZE) {
            return Err(LimitsError::Misaligned);
        }
        if limits.segments > MAX_SEGMENTS {
            return Err(LimitsError::Segments);
        }
        if endpoints.len() > MAX_ENDPOINTS {
            return Err(LimitsError::Endpoints);
        }
        Ok(Self(Arc::new(Tenant::new(limits, endpoints.into()))))
    }

    /// What the tenant may have, as it was made.
    pub fn limits(&self) -> Limits {
        self.0.limits
    }

    /// Changes what the tenant may have, while it has it: whoever has more keeps it and gets no more. Two things stay as they were made: `segments`
    /// is never more than there are records for, and `iova` is what it was.
    pub fn set_limits(&self, limits: &Limits) {
        self.0.quotas.set(limits, self.0.limits.segments);
    }

    /// What the tenant has.
    pub fn usage(&self) -> Usage {
        self.0.quotas.usage()
    }

    /// The domain with this id, unless it is being destroyed.
    pub fn domain(&self, id: DomainId) -> Option<Arc<Domain>> {
        let domain = read(&self.0.registry).get(&id).map(Arc::clone);
        domain.filter(|domain| !domain.is_closing())
    }

    /// Attaches an endpoint to a domain, which comes into being with its first one.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn attach(&self, id: DomainId, endpoint: EndpointId) -> Result<Arc<Domain>, AttachError> {
        if !self.0.endpoints.contains(&endpoint) {
            return Err(AttachError::NoEndpoint { endpoint });
        }
        let mut registry = write(&self.0.registry);
        let domain = match registry.entry(id) {
            Entry::Occupied(domain) => domain.into_mut(),
            Entry::Vacant(place) => {
                let domains = &self.0.quotas.domains;
                if !domains.take(1) {
                    return Err(AttachError::Quota { limit: domains.limit() });
                }
                // Never a used number, whatever the tenant: no remembered translation is taken for another domain's.
                place.insert(Arc::new(Domain::new(id, serial(), Arc::clone(&self.0))))
            }
        };
        match domain.attach(endpoint) {
            Attach::Done => Ok(Arc::clone(domain)),
            Attach::Already => Err(AttachError::Already { endpoint }),
            Attach::Draining => Err(AttachError::Draining),
            Attach::Unknown => Err(AttachError::NoEndpoint { endpoint }),
        }
    }

    /// Detaches an endpoint from a domain, and with the last one destroys the domain. From the return on the endpoint gets no access.
    ///
    /// # Errors
    /// See [`DetachError`].
    pub fn detach(&self, id: DomainId, endpoint: EndpointId) -> Result<Detached, DetachError> {
        let registry = write(&self.0.registry);
        let domain = registry.get(&id).filter(|domain| !domain.is_closing()).ok_or(DetachError::NoDomain)?;
        let domain = Arc::clone(domain);
        if !domain.is_attached(endpoint) {
            return Err(DetachError::NotAttached { endpoint });
        }
        let destroyed = domain.endpoints().all(|attached| attached == endpoint);
        if destroyed {
            domain.begin_closing();
            drop(registry);
            return Ok(Detached { destroyed, progress: domain.close() });
        }
        let latch = Latch::new();
        domain.detach(endpoint, &latch);
        drop(registry);
        Ok(Detached { destroyed, progress: latch.release() })
    }

    /// Detaches every endpoint from a domain and destroys it.
    ///
    /// # Errors
    /// [`DetachError::NoDomain`].
    pub fn detach_all(&self, id: DomainId) -> Result<Progress, DetachError> {
        let registry = write(&self.0.registry);
        let domain = registry.get(&id).filter(|domain| domain.begin_closing()).ok_or(DetachError::NoDomain)?;
        let domain = Arc::clone(domain);
        drop(registry);
        Ok(domain.close())
    }

    /// Destroys every domain; waits also for those that are being destroyed.
    pub fn reset(&self) -> Progress {
        let domains: Vec<_> = read(&self.0.registry).values().map(Arc::clone).collect();
        let latch = Latch::new();
        for domain in domains {
            let counted = latch.add();
            let progress = if domain.begin_closing() { domain.close() } else { domain.closed() };
            progress.then(move || counted.arrive());
        }
        latch.release()
    }
}

impl Drop for Iommu {
    /// Domains keep what they share with the tenant, and the registry must not keep them.
    fn drop(&mut self) {
        write(&self.0.registry).clear();
    }
}
