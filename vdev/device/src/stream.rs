//! STREAM_RESET and CANCEL.

use std::sync::Arc;

use iommu_addr::StreamId;
use vdev_wire::CancelReply;
use zerocopy::IntoBytes;

use crate::RequestError;
use crate::complete::Body;
use crate::device::Device;
use crate::domain::Domain;
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
        let (cancelled, mut running) = {
            let mut streams = lock(&domain.streams);
            (streams.take_waiting(key, which), streams.cancel_issued(key, which))
        };
        let jobs = self.flights.mark(|flight| {
            let is_meant = flight.key == key && Arc::ptr_eq(&flight.domain, domain) && which(&flight.op);
            running = running.saturating_add(usize::from(is_meant));
            let is_new = is_meant && flight.op.aborted.is_none();
            if is_new {
                flight.op.aborted = Some(RequestError::Cancelled);
            }
            is_new
        });
        jobs.into_iter().for_each(|job| self.engine.abort(job));
        let reply = CancelReply {
            cancelled: u32::try_from(cancelled.len()).unwrap_or(u32::MAX).into(),
            running: u32::try_from(running).unwrap_or(u32::MAX).into(),
        };
        self.cancel(turn, cancelled, RequestError::Cancelled);
        Body::from_slice(reply.as_bytes())
    }
}
