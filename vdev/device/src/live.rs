//! Limits that change while the device works.
//!
//! Each is one number that is compared with what there is, so a new one counts from the next comparison on. Whoever has more than a new limit keeps
//! it and gets no more.
//!
//! Not here: what the virtual IOMMU, the buffers, the events and the credits count; they have numbers of their own.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::spec::{Limits, millis};

/// One number.
#[derive(Debug, Default)]
pub(crate) struct Live(AtomicU32);

impl Live {
    pub(crate) fn new(value: u32) -> Self {
        Self(AtomicU32::new(value))
    }

    pub(crate) fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// As a count of things in memory.
    pub(crate) fn count(&self) -> usize {
        usize::try_from(self.get()).unwrap_or(usize::MAX)
    }

    pub(crate) fn set(&self, value: u32) {
        self.0.store(value, Ordering::Relaxed);
    }
}

/// The numbers in force. Their meaning is that of the fields of [`Limits`].
#[derive(Debug, Default)]
pub(crate) struct LiveLimits {
    pub(crate) max_domains: Live,
    pub(crate) max_mappings: Live,
    pub(crate) max_segments: Live,
    pub(crate) max_buffers: Live,
    pub(crate) stream_credits: Live,
    pub(crate) max_in_flight: Live,
    pub(crate) max_streams: Live,
    pub(crate) default_timeout_ms: Live,
    pub(crate) max_timeout_ms: Live,
}

impl LiveLimits {
    pub(crate) fn new(limits: &Limits) -> Self {
        let live = Self::default();
        live.set(limits);
        live
    }

    pub(crate) fn set(&self, limits: &Limits) {
        self.max_domains.set(limits.max_domains);
        self.max_mappings.set(limits.max_mappings);
        self.max_segments.set(limits.max_segments);
        self.max_buffers.set(limits.max_buffers);
        self.stream_credits.set(limits.stream_credits);
        self.max_in_flight.set(limits.max_in_flight);
        self.max_streams.set(limits.max_streams);
        self.default_timeout_ms.set(millis(limits.default_timeout));
        self.max_timeout_ms.set(millis(limits.max_timeout));
    }

    /// The deadline of work that names none.
    pub(crate) fn default_timeout(&self) -> Duration {
        Duration::from_millis(self.default_timeout_ms.get().into())
    }

    /// The longest deadline.
    pub(crate) fn max_timeout(&self) -> Duration {
        Duration::from_millis(self.max_timeout_ms.get().into())
    }
}
