//! One unit of work on its way: what it is, where its end is reported, and what it holds once it was issued.
//!
//! Not here: order (streams), issuing, engines.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use hw_engine::Initiated;
use iommu_addr::{EndpointId, StreamId};
use vdev_wire::Completion;

use crate::RequestError;
use crate::buffers::Buffer;
use crate::complete::{Slot, refusal};
use crate::finally::Finally;
use crate::issue::Issued;
use crate::live::Live;
use crate::plan::Plan;
use crate::work::Work;

/// What a stream is called within its domain: a guest's number, or one of the device's own beyond them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StreamKey(pub(crate) u64);

const KERNELS: u64 = 1 << 32;
const SCRUBS: u64 = 2 << 32;

impl StreamKey {
    pub(crate) fn guest(stream: StreamId) -> Self {
        Self(u64::from(stream.0))
    }

    /// Kernels that an endpoint's own logic starts.
    pub(crate) fn kernels(endpoint: EndpointId) -> Self {
        Self(KERNELS | u64::from(endpoint.id))
    }

    /// Scrubbing of an endpoint's memory.
    pub(crate) fn scrubs(endpoint: EndpointId) -> Self {
        Self(SCRUBS | u64::from(endpoint.id))
    }

    /// Whether it is a guest's: limits and errors concern only those.
    pub(crate) fn is_guest(self) -> bool {
        self.0 < KERNELS
    }

    /// Whether what waits in it is cancelled when its domain goes: all but scrubbing, which is part of the going.
    pub(crate) fn is_cancelled_with_its_domain(self) -> bool {
        self.0 < SCRUBS
    }

    /// The guest's number, 0 for the device's own.
    pub(crate) fn number(self) -> u32 {
        if self.is_guest() { u32::try_from(self.0).unwrap_or(0) } else { 0 }
    }
}

/// How many descriptors wait or run in the whole device.
#[derive(Debug)]
pub(crate) struct Credits {
    used: AtomicU32,
    limit: Live,
}

impl Credits {
    pub(crate) fn new(limit: u32) -> Arc<Self> {
        Arc::new(Self { used: AtomicU32::new(0), limit: Live::new(limit) })
    }

    pub(crate) fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn set_limit(&self, limit: u32) {
        self.limit.set(limit);
    }

    /// One credit, unless all are out.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Credit> {
        let more = |used: u32| (used < self.limit.get()).then(|| used.saturating_add(1));
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Credit(Arc::clone(self)))
    }
}

/// One descriptor's share of the device; comes back when dropped.
#[derive(Debug)]
pub(crate) struct Credit(Arc<Credits>);

impl Drop for Credit {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A guest's descriptor that could not end at once.
pub(crate) struct GuestWork {
    /// What it asks for, or why its bytes are refused when its turn comes.
    pub(crate) work: Result<Work, RequestError>,
    pub(crate) cookie: u64,
    pub(crate) slot: Slot,
    pub(crate) _credit: Credit,
}

/// What there is to do, and who waits for it.
pub(crate) enum Task {
    Guest(GuestWork),
    /// A device's own logic waits for it, through its engine.
    Kernel(Initiated),
    /// Zeroes a freed buffer, releases it and then lets go of `then`.
    Scrub {
        buffer: Buffer,
        then: Arc<Finally>,
    },
}

/// One unit of work in a stream's queue or in flight.
pub(crate) struct Op {
    pub(crate) task: Task,
    pub(crate) deadline: Instant,
    /// What it holds, from when it is issued.
    pub(crate) issued: Option<Box<Issued>>,
    /// Why the engine was asked to abort it.
    pub(crate) aborted: Option<RequestError>,
}

impl Op {
    /// Notes why it is to end. False if that was noted before.
    pub(crate) fn abort(&mut self, reason: RequestError) -> bool {
        let is_new = self.aborted.is_none();
        self.aborted.get_or_insert(reason);
        is_new
    }

    /// The guest's name for it; `None` for the device's own.
    pub(crate) fn cookie(&self) -> Option<u64> {
        match &self.task {
            Task::Guest(guest) => Some(guest.cookie),
            Task::Kernel(_) | Task::Scrub { .. } => None,
        }
    }
}

/// How a unit of work ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    pub(crate) error: Option<RequestError>,
    pub(crate) bytes: u64,
    pub(crate) plan: Option<Plan>,
    /// An engine had it and has said so.
    pub(crate) ran: bool,
    /// What an atomic operation found.
    pub(crate) value: u64,
}

impl Outcome {
    /// Refused or given up before anything moved.
    pub(crate) fn refused(error: RequestError) -> Self {
        Self { error: Some(error), bytes: 0, plan: None, ran: false, value: 0 }
    }

    /// There was nothing to do.
    pub(crate) fn nothing() -> Self {
        Self { error: None, bytes: 0, plan: None, ran: false, value: 0 }
    }

    /// The record that tells the guest.
    pub(crate) fn record(&self, cookie: u64) -> Completion {
        let mut record = match &self.error {
            None => Completion { cookie: cookie.into(), fault_address: self.value.into(), ..zeroed() },
            Some(error) => refusal(cookie, error),
        };
        record.bytes = self.bytes.into();
        if let Some(plan) = self.plan {
            record.path = plan.path() as u8;
            record.reason = plan.reason() as u8;
        }
        record
    }
}

fn zeroed() -> Completion {
    zerocopy::FromZeros::new_zeroed()
}
