//! What a thread carries through one turn of work, and keeps for the next one.
//!
//! Not here: what is done in a turn.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use hw_engine::Finished;
use iommu_addr::DomainId;
use iommu_core::Iotlb;
use vdev_wire::Completion;

use crate::complete::Slot;
use crate::domain::Domain;
use crate::flight::Flight;
use crate::observer::Tally;

/// Bytes that a turn may move itself before others get theirs: some tens of microseconds.
pub(crate) const BYTES: u64 = 256 << 10;

/// State of one thread's turns.
pub(crate) struct Turn {
    /// When the turn began.
    pub(crate) now: Instant,
    pub(crate) iotlb: Iotlb,
    pub(crate) tally: Tally,
    /// Work that ended and whose chains outlive their turns.
    pub(crate) done: Vec<(Slot, Completion)>,
    /// Work whose end was reported before it was known to be in flight.
    pub(crate) landed: Vec<(Flight, Finished)>,
    /// The engine has something from a device's own logic.
    pub(crate) raised: bool,
    /// The thread whose turn it is looks for ends itself, until it rests.
    pub(crate) glances: bool,
    /// The engine was given something.
    pub(crate) submitted: bool,
    /// The timekeeper has to look: something is in flight, or is due earlier than it thinks.
    pub(crate) wake: bool,
    /// Something is no longer as the gauges say.
    pub(crate) changed: bool,
    /// Names for transfers.
    pub(crate) jobs: Range<u64>,
    /// Bytes that may still be moved in this turn.
    budget: u64,
    cached: Option<Arc<Domain>>,
}

impl Turn {
    pub(crate) fn new() -> Self {
        Self {
            now: Instant::now(),
            iotlb: Iotlb::default(),
            tally: Tally::default(),
            done: Vec::new(),
            landed: Vec::new(),
            raised: false,
            glances: false,
            submitted: false,
            wake: false,
            changed: false,
            jobs: 0..0,
            budget: BYTES,
            cached: None,
        }
    }

    /// A turn begins.
    pub(crate) fn begin(&mut self) {
        self.now = Instant::now();
        self.budget = BYTES;
    }

    /// What comes next may move as much again.
    pub(crate) fn renew(&mut self) {
        self.budget = BYTES;
    }

    /// Counts bytes that this thread has moved.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.budget = self.budget.saturating_sub(bytes);
    }

    /// Whether others should get their turn now.
    pub(crate) fn is_spent(&self) -> bool {
        self.budget == 0
    }

    /// The domain that was looked up last, if it is this one and not going away.
    pub(crate) fn cached(&self, id: DomainId) -> Option<&Arc<Domain>> {
        self.cached.as_ref().filter(|domain| domain.id == id && !domain.is_closing())
    }

    /// Remembers a domain, or forgets it.
    pub(crate) fn cache(&mut self, domain: Option<Arc<Domain>>) {
        self.cached = domain;
    }
}
