//! How fast control requests are taken: a token bucket, and the time when its queue is to be looked at again.
//!
//! What comes faster stays in the ring, where it costs the device nothing. Nobody is woken by it there, so the timekeeper comes for it.
//!
//! Not here: taking requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vdev_wire::CONTROL_QUEUE;

use crate::device::Device;
use crate::live::Live;

const SECOND: u64 = 1_000_000_000;
/// Requests that may come at once, at least.
const BURST: u64 = 64;
/// How much longer than for one request the queue rests, so that several are taken at a time.
const REST: Duration = Duration::from_millis(1);
/// Requests that are worth no longer rest.
const WORTH: u64 = 16;
const NEVER: u64 = u64::MAX;

/// See the module. Used by one thread at a time, but for the rate and for looking when it is due.
#[derive(Debug)]
pub(crate) struct Pace {
    epoch: Instant,
    /// Requests in a second; 0 is no bound.
    rate: Live,
    /// When the bucket would be full again.
    full_at: AtomicU64,
    /// When to look again.
    due: AtomicU64,
}

impl Pace {
    pub(crate) fn new(now: Instant, rate: u32) -> Self {
        Self { epoch: now, rate: Live::new(rate), full_at: AtomicU64::new(0), due: AtomicU64::new(NEVER) }
    }

    /// The rate from now on, with a full bucket. What waits is due.
    pub(crate) fn set_rate(&self, rate: u32) {
        self.rate.set(rate);
        self.full_at.store(0, Ordering::Relaxed);
        let waits = |due: u64| (due != NEVER).then_some(0);
        let _ = self.due.fetch_update(Ordering::AcqRel, Ordering::Relaxed, waits);
    }

    /// Whether one more request may be taken.
    ///
    /// # Errors
    /// If not; the queue is due later, and whoever watches that does not know of it if this is true.
    pub(crate) fn allow(&self, now: Instant) -> Result<(), bool> {
        let Some(token) = self.token() else { return Ok(()) };
        let now = self.nanos(now);
        let burst = u64::from(self.rate.get()).checked_div(10).unwrap_or(0).max(BURST);
        let next = self.full_at.load(Ordering::Relaxed).max(now).saturating_add(token);
        let missing = next.saturating_sub(now.saturating_add(token.saturating_mul(burst)));
        if missing == 0 {
            return Ok(());
        }
        let rest = token.saturating_mul(WORTH).min(nanos(REST));
        let due = now.saturating_add(missing).saturating_add(rest);
        Err(self.due.swap(due, Ordering::AcqRel) == NEVER)
    }

    /// One request was taken.
    pub(crate) fn spend(&self, now: Instant) {
        if let Some(token) = self.token() {
            let next = self.full_at.load(Ordering::Relaxed).max(self.nanos(now)).saturating_add(token);
            self.full_at.store(next, Ordering::Relaxed);
        }
    }

    /// Whether the queue is due. Then it is not any more.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        let now = self.nanos(now);
        self.due.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |due| (due <= now).then_some(NEVER)).is_ok()
    }

    /// How long until the queue is due; `None` if it is not going to be.
    pub(crate) fn until_due(&self, now: Instant) -> Option<Duration> {
        let due = self.due.load(Ordering::Acquire);
        (due != NEVER).then(|| Duration::from_nanos(due.saturating_sub(self.nanos(now))))
    }

    /// Nanoseconds that one request takes to come back; `None` if there is no bound.
    fn token(&self) -> Option<u64> {
        SECOND.checked_div(u64::from(self.rate.get()))
    }

    fn nanos(&self, at: Instant) -> u64 {
        nanos(at.saturating_duration_since(self.epoch))
    }
}

impl Device {
    /// On the timekeeper's thread: takes control requests that had to wait. Answers how long the next ones have to.
    pub(crate) fn take_paced(&self) -> Option<Duration> {
        let now = Instant::now();
        if self.pace.is_due(now) && self.drain(CONTROL_QUEUE) {
            return Some(Duration::ZERO);
        }
        self.pace.until_due(now)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests that are taken in `span`, looked for every `step`.
    fn taken(pace: &Pace, start: Instant, span: Duration, step: Duration) -> u64 {
        let mut taken = 0;
        let mut now = start;
        while now < start + span {
            while pace.allow(now).is_ok() && taken < 1_000_000 {
                pace.spend(now);
                taken += 1;
            }
            now += step;
        }
        taken
    }

    #[test]
    fn a_burst_and_then_the_rate() {
        let start = Instant::now();
        for (rate, burst) in [(1, 64), (500, 64), (10_000, 1000)] {
            let pace = Pace::new(start, rate);
            let got = taken(&pace, start, Duration::from_secs(10), Duration::from_micros(100));
            let want = burst + 10 * u64::from(rate);
            assert!((want - 2..=want + 1).contains(&got), "{got} of {want}");
        }
    }

    #[test]
    fn without_a_rate_nothing_waits() {
        let start = Instant::now();
        let pace = Pace::new(start, 0);
        assert!((0..100_000).all(|_| {
            pace.spend(start);
            pace.allow(start).is_ok()
        }));
        assert_eq!(pace.until_due(start), None);
    }

    #[test]
    fn what_is_not_allowed_is_due_when_it_is() {
        let start = Instant::now();
        let pace = Pace::new(start, 1000);
        assert_eq!(taken(&pace, start, Duration::from_nanos(1), Duration::from_nanos(1)), 100);
        assert_eq!(pace.allow(start), Err(false), "that is known");
        assert!(!pace.is_due(start));
        let rest = pace.until_due(start).expect("somebody was turned away");
        assert!(rest <= Duration::from_millis(2), "{rest:?}");
        let later = start + rest;
        assert!(pace.is_due(later) && !pace.is_due(later), "once");
        assert_eq!(pace.allow(later), Ok(()));
    }

    #[test]
    fn a_new_rate_holds_at_once() {
        let start = Instant::now();
        let pace = Pace::new(start, 1);
        assert_eq!(taken(&pace, start, Duration::from_nanos(1), Duration::from_nanos(1)), 64);
        pace.set_rate(0);
        assert!(pace.is_due(start) && pace.allow(start).is_ok());
        pace.set_rate(1);
        assert!(!pace.is_due(start), "nothing waits");
        assert_eq!(taken(&pace, start, Duration::from_nanos(1), Duration::from_nanos(1)), 64);
    }
}
