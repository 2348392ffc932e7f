//! Domains: ATTACH, DETACH, and how a domain ends.
//!
//! A domain goes in this order: no new work is queued, what waits is cancelled, the virtual IOMMU closes; when the last issued job has ended,
//! every buffer is scrubbed; when the last one is clean, the engines forget the domain, its id and its quotas are free, and whoever asked is
//! answered. Nothing of this blocks.
//!
//! Not here: mappings, buffers one by one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use iommu_addr::{DomainId, EndpointId};
use iommu_core::{AttachError, DetachError};

use crate::RequestError;
use crate::complete::{Body, Completer, finish};
use crate::control::missing_domain;
use crate::device::Device;
use crate::finally::Finally;
use crate::op::StreamKey;
use crate::streams::Streams;
use crate::sync::lock;
use crate::turn::Turn;

/// One I/O address space and what happens in it.
pub(crate) struct Domain {
    pub(crate) id: DomainId,
    /// Never used twice, unlike the id.
    pub(crate) serial: u64,
    pub(crate) space: Arc<iommu_core::Domain>,
    pub(crate) streams: Mutex<Streams>,
    /// Set under the streams' lock.
    closing: AtomicBool,
    /// There has been a CANCEL.
    pub(crate) cancels: AtomicBool,
    /// Held by whatever has to end before the domain is gone.
    end: Mutex<Option<Arc<Finally>>>,
    /// Let go when the domain is gone; `None` from then on.
    waiters: Mutex<Option<Vec<Arc<Finally>>>>,
    /// Held by every request that drains and is not answered yet.
    draining: Mutex<Arc<Finally>>,
}

impl Domain {
    /// Whether it is going away.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Has `answer` let its argument go when every request that drains now has been answered. What drains from now on waits for it in turn.
    pub(crate) fn after_draining(&self, answer: impl FnOnce(Arc<Finally>) -> Arc<Finally>) {
        let next = Finally::idle();
        let earlier = std::mem::replace(&mut *lock(&self.draining), Arc::clone(&next));
        let then = answer(next);
        earlier.set(move || drop(then));
    }
}

impl Device {
    pub(crate) fn attach(&self, id: DomainId, endpoint: EndpointId) -> Result<Body, RequestError> {
        let known = {
            let domains = lock(&self.domains);
            let known = domains.get(&id);
            if known.is_some_and(|domain| domain.is_closing()) {
                return Err(missing_domain(id));
            }
            let limit = self.limits.max_domains.get();
            if known.is_none() && domains.len() >= usize::try_from(limit).unwrap_or(usize::MAX) {
                return Err(RequestError::Limit { what: "domains", limit: u64::from(limit) });
            }
            known.is_some()
        };
        let space = self.iommu.attach(id, endpoint)?;
        if !known {
            self.create(id, space);
        }
        Ok(Body::new())
    }

    fn create(&self, id: DomainId, space: Arc<iommu_core::Domain>) {
        let serial = self.serials.fetch_add(1, Ordering::Relaxed);
        let me = self.me.clone();
        let end = Finally::new(move || {
            if let Some(device) = me.upgrade() {
                device.gone(id, serial);
            }
        });
        let domain = Domain {
            id,
            serial,
            space,
            streams: Mutex::default(),
            closing: AtomicBool::new(false),
            cancels: AtomicBool::new(false),
            end: Mutex::new(Some(end)),
            waiters: Mutex::new(Some(Vec::new())),
            draining: Mutex::new(Finally::idle()),
        };
        lock(&self.domains).insert(id, Arc::new(domain));
    }

    pub(crate) fn detach(
        &self,
        turn: &mut Turn,
        domain: &Arc<Domain>,
        endpoint: Option<EndpointId>,
        completer: Completer,
    ) {
        let is_last = |endpoint| domain.space.endpoints().eq([endpoint]);
        let Some(endpoint) = endpoint.filter(|endpoint| !is_last(*endpoint)) else {
            return self.destroy(turn, domain, Finally::new(move || completer.answer(Ok(Body::new()))));
        };
        match self.iommu.detach(domain.id, endpoint) {
            Err(error) => completer.answer(Err(error.into())),
            Ok(detached) => {
                let then = self.answer_within(domain, Body::new(), completer);
                let buffers = lock(&self.buffers).take_all(domain.serial, Some(endpoint));
                for buffer in buffers {
                    self.release(domain, buffer, Arc::clone(&then));
                }
                detached.progress.then(move || drop(then));
            }
        }
    }

    /// Answers OK when let go; until then the request drains, and the domain is not gone.
    pub(crate) fn answer_within(&self, domain: &Domain, body: Body, completer: Completer) -> Arc<Finally> {
        let draining = Arc::clone(&lock(&domain.draining));
        let end = lock(&domain.end).clone();
        let then = self.answer_holding(draining, body, completer);
        Finally::new(move || {
            drop(then);
            drop(end);
        })
    }

    /// Answers OK when let go, and then lets `held` go.
    pub(crate) fn answer_holding(&self, held: Arc<Finally>, body: Body, completer: Completer) -> Arc<Finally> {
        Finally::new(move || {
            completer.answer(Ok(body));
            drop(held);
        })
    }

    /// Ends a domain; `then` is let go when it is gone. A domain that ends already is only waited for.
    pub(crate) fn destroy(&self, turn: &mut Turn, domain: &Arc<Domain>, then: Arc<Finally>) {
        // Who found the domain just before it was gone has nothing to wait for: nobody would come for what is left here.
        let Some(()) = lock(&domain.waiters).as_mut().map(|waiters| waiters.push(Arc::clone(&then))) else { return };
        drop(then);
        let waiting = {
            let mut streams = lock(&domain.streams);
            if domain.closing.swap(true, Ordering::AcqRel) {
                return;
            }
            streams.reset_all();
            streams.take_all_waiting(StreamKey::is_cancelled_with_its_domain, |_| true)
        };
        self.cancel(turn, waiting.into_iter().map(|(_, op)| op).collect(), RequestError::Cancelled);
        finish(&mut turn.done);
        turn.changed = true;
        let (me, id, domain) = (self.me.clone(), domain.id, Arc::clone(domain));
        let drained = move || {
            if let Some(device) = me.upgrade() {
                device.drained(&domain);
            }
        };
        match self.iommu.detach_all(id) {
            Ok(progress) => progress.then(drained),
            // The virtual IOMMU forgets a domain only after this device did.
            Err(DetachError::NoDomain | DetachError::NotAttached { .. }) => drained(),
        }
    }

    /// The last job of a domain has ended: its buffers are next.
    fn drained(&self, domain: &Arc<Domain>) {
        let end = lock(&domain.end).take();
        let Some(end) = end else { return };
        let buffers = lock(&self.buffers).take_all(domain.serial, None);
        for buffer in buffers {
            self.scrub(domain, buffer, Arc::clone(&end));
        }
    }

    /// Nothing of a domain is left.
    fn gone(&self, id: DomainId, serial: u64) {
        self.engine.forget(id);
        lock(&self.buffers).forget(serial);
        let domain = lock(&self.domains).remove(&id);
        self.gauges();
        if let Some(domain) = domain {
            let waiters = lock(&domain.waiters).take();
            drop(waiters);
        }
    }
}

impl From<AttachError> for RequestError {
    fn from(error: AttachError) -> Self {
        match error {
            AttachError::NoEndpoint { endpoint } => {
                Self::Missing { what: "endpoint", value: u64::from(endpoint.to_raw()) }
            }
            AttachError::Already { .. } => Self::Already,
            AttachError::Draining => Self::Missing { what: "domain", value: 0 },
            AttachError::Quota { limit } => Self::Limit { what: "domains", limit: u64::from(limit) },
        }
    }
}

impl From<DetachError> for RequestError {
    fn from(error: DetachError) -> Self {
        match error {
            DetachError::NoDomain => Self::Missing { what: "domain", value: 0 },
            DetachError::NotAttached { endpoint } => {
                Self::Missing { what: "endpoint", value: u64::from(endpoint.to_raw()) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceSpec, Limits, Reach, Unobserved};
    use hw_engine::{EndpointKind, EndpointSpec};
    use hw_host::{HostEngine, HostMemory};
    use std::time::Duration;

    #[test]
    fn whoever_ends_a_domain_that_is_gone_does_not_wait() {
        let endpoint = EndpointSpec {
            id: EndpointId::local(0),
            kind: EndpointKind::Gpu,
            name: "g".into(),
            memory_len: 0,
            registers_len: 0,
            granularity: 0x1000,
            engines: 1,
        };
        let (limits, reach, linger) = (Limits::default(), Reach::all(), Duration::ZERO);
        let spec = DeviceSpec { endpoints: vec![endpoint], limits, reach, session: 1, submit_queues: 1, linger };
        let memory = Arc::new(HostMemory::new());
        let engine = Arc::new(HostEngine::new(memory.clone()));
        let device = Device::new(spec, engine, memory, Arc::new(Unobserved)).expect("a sensible device");
        device.attach(DomainId(1), EndpointId::local(0)).expect("within the limits");
        // As a queue's thread remembers it, or HELLO has just found it.
        let domain = device.domain(DomainId(1)).expect("attached");
        let ends = Arc::new(Mutex::new(0));
        let mut turn = Turn::new();
        for done in 1..=2 {
            let ends_here = Arc::clone(&ends);
            device.destroy(&mut turn, &domain, Finally::new(move || *lock(&ends_here) += 1));
            assert_eq!(*lock(&ends), done);
        }
    }
}
