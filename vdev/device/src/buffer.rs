//! ALLOC and FREE: buffers in endpoints' memory, from reservation to scrubbing.
//!
//! Not here: the table of buffers, which memory is free.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use iommu_addr::{Access, Addr, ApertureOffset, EndpointId, Iova, Location, REGISTERS, Range, Segment};
use iommu_core::Origin;
use vdev_wire::{AllocReply, FaultReason, PAGE_SIZE};
use zerocopy::IntoBytes;

use crate::RequestError;
use crate::buffers::Buffer;
use crate::complete::{Body, Completer};
use crate::device::Device;
use crate::domain::Domain;
use crate::finally::Finally;
use crate::observer::FaultRecord;
use crate::op::{Op, StreamKey, Task};
use crate::request::field;
use crate::sync::lock;
use crate::turn::Turn;

impl Device {
    pub(crate) fn alloc(
        &self,
        domain: &Domain,
        endpoint: EndpointId,
        access: Access,
        registers: bool,
        (iova, len): (Iova, u64),
    ) -> Result<Body, RequestError> {
        let missing = RequestError::Missing { what: "endpoint", value: u64::from(endpoint.to_raw()) };
        let spec = self.spec.endpoints.iter().find(|spec| spec.id == endpoint).ok_or(missing)?;
        if !domain.space.is_attached(endpoint) {
            return Err(missing);
        }
        let granule = if registers { PAGE_SIZE } else { spec.granularity };
        if registers && len != spec.registers_len {
            return Err(field("len", len));
        }
        if let Some(value) = [len, iova.raw()].into_iter().find(|value| !value.is_multiple_of(granule)) {
            return Err(RequestError::OutOfRange { value });
        }
        let range = Range::with_len(iova, len).ok_or(RequestError::OutOfRange { value: iova.raw() })?;
        let buffer = lock(&self.buffers).alloc(domain.serial, endpoint, range, registers)?;
        let offset = buffer.offset.map_or(REGISTERS, ApertureOffset);
        let segment = Segment { at: Location::Aperture { endpoint, offset }, len };
        if let Err(error) = domain.space.map(range, &[segment], access, Origin::Buffer(buffer.id)) {
            // Nobody has seen the memory: it is as clean as before.
            lock(&self.buffers).release(&buffer, true);
            return Err(error.into());
        }
        let reply = AllocReply { handle: buffer.id.to_raw().into() };
        Ok(Body::from_slice(reply.as_bytes()))
    }

    pub(crate) fn free(&self, turn: &mut Turn, domain: &Arc<Domain>, handle: u64, completer: Completer) {
        let taken = lock(&self.buffers).take(domain.serial, handle);
        match taken {
            Ok(buffer) => {
                let then = self.answer_within(domain, Body::new(), completer);
                self.release(domain, buffer, then);
            }
            Err(error) => {
                let is_stale = matches!(error, RequestError::FreedHandle { .. });
                let owner = lock(&self.buffers).owner(handle);
                self.report(
                    turn,
                    &FaultRecord {
                        domain: domain.id,
                        accessor: None,
                        owner,
                        address: Iova(0),
                        access: Access::NONE,
                        reason: if is_stale { FaultReason::Stale } else { FaultReason::Domain },
                        stream: 0,
                        cookie: 0,
                        status: error.status(),
                        value: handle,
                        mapping: None,
                        is_foreign: true,
                    },
                );
                completer.answer(Err(error));
            }
        }
    }

    /// Unmaps a buffer; when nobody uses it any more, scrubs it and lets go of `then`.
    pub(crate) fn release(&self, domain: &Arc<Domain>, buffer: Buffer, then: Arc<Finally>) {
        let (me, held) = (self.me.clone(), Arc::clone(domain));
        let drained = move || {
            if let Some(device) = me.upgrade() {
                device.scrub(&held, buffer, then);
            }
        };
        match domain.space.unmap_buffer(buffer.id, buffer.range) {
            Ok(progress) => progress.then(drained),
            Err(error) => {
                tracing::error!(?error, buffer = buffer.id.to_raw(), "A live buffer was not mapped");
                drained();
            }
        }
    }

    /// Zeroes a buffer's memory, gives it back and lets go of `then`.
    pub(crate) fn scrub(&self, domain: &Arc<Domain>, buffer: Buffer, then: Arc<Finally>) {
        if buffer.offset.is_none() || self.is_down() {
            self.scrubbed(&buffer, None);
            return;
        }
        let now = Instant::now();
        let deadline = now.checked_add(self.limits.max_timeout()).unwrap_or(now);
        let op = Op { task: Task::Scrub { buffer, then }, deadline, issued: None, aborted: None };
        self.scrubs.fetch_add(1, Ordering::AcqRel);
        self.enqueue(domain, StreamKey::scrubs(buffer.endpoint), op);
    }

    /// A buffer's memory is zero, or can never be used again.
    pub(crate) fn scrubbed(&self, buffer: &Buffer, error: Option<RequestError>) {
        // Once the connection is over, whoever owns the memory scrubs it.
        let error = error.filter(|_| !self.is_down());
        if let Some(error) = &error
            && self.limiter.allow(Instant::now())
        {
            let endpoint = buffer.endpoint.id;
            tracing::error!(%error, endpoint, len = buffer.len, "Freed memory could not be zeroed and is out of use");
        }
        lock(&self.buffers).release(buffer, error.is_none());
        self.gauges();
    }
}
