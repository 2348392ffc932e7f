//! STREAM_RESET and CANCEL.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use iommu_addr::StreamId;
use vdev_wire::CancelReply;
use zerocopy::IntoBytes;

use crate::RequestError;
use crate::complete::Body;
use crate::device::Device;
use crate::domain::Domain;
use crate::flight::Flight;
use crate::op::{Op, StreamKey};
use crate::sync::lock;
use crate::turn::Turn;

impl Device {
    pub(crate) fn stream_reset(&self, domain: &Domain, stream: StreamId) -> Result<Body, RequestError> {
        let key = StreamKey::guest(stream);
        let mut streams = lock(&domain.streams);
        if streams.count(key) > 0 {
            return Err(RequestError::Busy);
        }
        streams.reset(key);
        Ok(Body::new())
    }

    /// Cancels what was not issued, and asks what was to stop.
    pub(crate) fn cancel_work(
        &self,
        turn: &mut Turn,
        domain: &Arc<Domain>,
        stream: StreamId,
        cookie: Option<u64>,
    ) -> Body {
        let key = StreamKey::guest(stream);
        let which = |op: &Op| cookie.is_none() || op.cookie() == cookie;
        // Before it is looked for, so that whoever has it in hand and gives it to an engine afterwards knows: see `settle_went`.
        domain.cancels.store(true, Ordering::Relaxed);
        let (cancelled, running) = {
            let mut streams = lock(&domain.streams);
            let taken = usize::from(streams.cancel_taken(key, cookie));
            (streams.take_waiting(key, which), streams.cancel_issued(key, which).saturating_add(taken))
        };
        let is_meant = |flight: &Flight| flight.key == key && Arc::ptr_eq(&flight.domain, domain) && which(&flight.op);
        self.abort(is_meant, RequestError::Cancelled);
        let reply = CancelReply {
            cancelled: u32::try_from(cancelled.len()).unwrap_or(u32::MAX).into(),
            running: u32::try_from(running).unwrap_or(u32::MAX).into(),
        };
        self.cancel(turn, cancelled, RequestError::Cancelled);
        Body::from_slice(reply.as_bytes())
    }
}
