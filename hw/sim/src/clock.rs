//! Where the engine's time comes from.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Time since an epoch that the link ledger shares.
#[derive(Clone, Debug)]
pub enum Clock {
    /// `CLOCK_MONOTONIC`: one time for every process of this host.
    Monotonic,
    /// Time that somebody moves by hand. Work then happens in `poll` alone.
    Manual(Arc<ManualClock>),
}

impl Clock {
    pub(crate) fn now(&self) -> Duration {
        match self {
            Self::Monotonic => {
                let now = clock_gettime(ClockId::Monotonic);
                let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
                Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0))
            }
            Self::Manual(clock) => clock.now(),
        }
    }

    pub(crate) fn is_manual(&self) -> bool {
        matches!(self, Self::Manual(_))
    }
}

/// A clock that stands still until [`ManualClock::advance`]. Counts nanoseconds from 0 and holds five centuries of them.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock at 0.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Moves the clock on.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX), Ordering::AcqRel);
    }

    /// What the clock shows.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Acquire))
    }
}
