//! HELLO and PROBE.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hw_engine::EndpointSpec;
use vdev_wire::{EndpointInfo, EndpointKind, HelloReply, PAGE_SIZE, ProbeReply, VERSION};
use zerocopy::{FromZeros, IntoBytes};

use crate::RequestError;
use crate::complete::{Body, Completer};
use crate::device::Device;
use crate::finally::Finally;
use crate::observer::Counter;
use crate::sync::lock;
use crate::turn::Turn;

impl Device {
    /// A driver begins: every domain of an earlier one goes, and only then is it answered.
    pub(crate) fn hello(&self, turn: &mut Turn, version: u16, features: u64, completer: Completer) {
        if version != VERSION || features != 0 {
            return completer.answer(Err(RequestError::Version { newest: VERSION }));
        }
        turn.tally.add(Counter::EventsDropped, self.events.clear());
        let mut reply = HelloReply::new_zeroed();
        reply.version = VERSION.into();
        reply.session = self.spec.session.into();
        let me = self.me.clone();
        let then = Finally::new(move || {
            if let Some(device) = me.upgrade() {
                device.greeted.store(true, Ordering::Release);
            }
            completer.answer(Ok(Body::from_slice(reply.as_bytes())));
        });
        let domains: Vec<_> = lock(&self.domains).values().map(Arc::clone).collect();
        for domain in domains {
            self.destroy(turn, &domain, Arc::clone(&then));
        }
    }

    /// Limits, and as many endpoints as `room` bytes hold.
    pub(crate) fn probe(&self, room: usize) -> Body {
        let (limits, fixed) = (&self.limits, &self.spec.limits);
        let mut reply = ProbeReply::new_zeroed();
        reply.iova_start = fixed.iova.start().0.into();
        reply.iova_last = fixed.iova.last().0.into();
        reply.page_size_mask = (!(PAGE_SIZE.wrapping_sub(1))).into();
        reply.max_domains = limits.max_domains.get().into();
        reply.max_mappings = limits.max_mappings.get().into();
        reply.max_segments = limits.max_segments.get().into();
        reply.max_buffers = limits.max_buffers.get().into();
        reply.stream_credits = limits.stream_credits.get().into();
        reply.max_in_flight = limits.max_in_flight.get().into();
        reply.max_streams = limits.max_streams.get().into();
        reply.default_timeout_ms = limits.default_timeout_ms.get().into();
        reply.max_timeout_ms = limits.max_timeout_ms.get().into();
        reply.max_batch = fixed.max_batch.into();
        reply.endpoint_count = u16::try_from(self.spec.endpoints.len()).unwrap_or(u16::MAX).into();
        let mut body = Body::from_slice(reply.as_bytes());
        let count = room.saturating_sub(body.len()).checked_div(size_of::<EndpointInfo>()).unwrap_or(0);
        let buffers = lock(&self.buffers);
        for spec in self.spec.endpoints.iter().take(count) {
            body.extend_from_slice(endpoint_info(spec, buffers.free_len(spec.id)).as_bytes());
        }
        body
    }
}

fn endpoint_info(spec: &EndpointSpec, free: u64) -> EndpointInfo {
    let mut info = EndpointInfo::new_zeroed();
    let kind = match spec.kind {
        hw_engine::EndpointKind::Gpu => EndpointKind::Gpu,
        hw_engine::EndpointKind::Fpga => EndpointKind::Fpga,
        hw_engine::EndpointKind::Storage => EndpointKind::Storage,
        hw_engine::EndpointKind::Memory => EndpointKind::Memory,
        hw_engine::EndpointKind::Engine => EndpointKind::Engine,
    };
    info.endpoint = spec.id.to_raw().into();
    info.kind = (kind as u16).into();
    info.engines = spec.engines.into();
    info.memory_len = spec.memory_len.into();
    info.memory_free = free.into();
    info.registers_len = spec.registers_len.into();
    info.granularity = spec.granularity.into();
    for (to, from) in info.name.iter_mut().zip(spec.name.as_bytes()) {
        *to = *from;
    }
    info
}
