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
        lock(&domain.streams).reset(StreamKey::guest(stream));
        Ok(Body::new())
    }

    /// Cancels what was not issued; what was runs on.
    pub(crate) fn cancel_work(
        &self,
        turn: &mut Turn,
        domain: &Arc<Domain>,
        stream: StreamId,
        cookie: Option<u64>,
    ) -> Body {
        let key = StreamKey::guest(stream);
        let which = |op: &Op| cookie.is_none() || op.cookie() == cookie;
        let (cancelled, paused) = {
            let mut streams = lock(&domain.streams);
            (streams.take_waiting(key, which), streams.issued_in_queue(key, which))
        };
        let in_flight =
            self.flights.count(|flight| flight.key == key && Arc::ptr_eq(&flight.domain, domain) && which(&flight.op));
        let reply = CancelReply {
            cancelled: u32::try_from(cancelled.len()).unwrap_or(u32::MAX).into(),
            running: u32::try_from(in_flight.saturating_add(paused)).unwrap_or(u32::MAX).into(),
        };
        self.cancel(turn, cancelled, RequestError::Cancelled);
        Body::from_slice(reply.as_bytes())
    }
}
