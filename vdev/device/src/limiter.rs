//! Keeps a guest from filling the log: so many lines at once, then one a while.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Lines that may come at once.
const BURST: u64 = 16;
/// How long one line takes to come back.
const REFILL: Duration = Duration::from_secs(1);

/// A token bucket without a lock, in one number: when the bucket would be full again.
#[derive(Debug)]
pub(crate) struct Limiter {
    epoch: Instant,
    full_at: AtomicU64,
}

impl Limiter {
    pub(crate) fn new(now: Instant) -> Self {
        Self { epoch: now, full_at: AtomicU64::new(0) }
    }

    /// Whether a line may be written now.
    pub(crate) fn allow(&self, now: Instant) -> bool {
        let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let (now, refill) = (nanos(now.saturating_duration_since(self.epoch)), nanos(REFILL));
        let step = |full_at: u64| {
            let next = full_at.max(now).saturating_add(refill);
            (next <= now.saturating_add(refill.saturating_mul(BURST))).then_some(next)
        };
        self.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_then_one_a_second() {
        let start = Instant::now();
        let limiter = Limiter::new(start);
        assert_eq!((0..100).filter(|_| limiter.allow(start)).count(), BURST as usize);
        assert!(!limiter.allow(start + Duration::from_millis(900)));
        assert!(limiter.allow(start + Duration::from_millis(1100)));
        assert!(!limiter.allow(start + Duration::from_millis(1200)));
    }
}
