//! How long to wait before the next worker.
//!
//! Not here: clocks, workers.

use std::time::Duration;

/// Pause after the second failure in a row; it doubles with each further one. The first one costs a VM's work no pause.
const FIRST: Duration = Duration::from_millis(100);
/// Longest pause.
const LONGEST: Duration = Duration::from_secs(5);
/// A worker that lived this long had no trouble starting.
const HEALTHY: Duration = Duration::from_secs(1);
/// Least time from one worker's start to the next one's, so that a VMM that connects and hangs up in a loop costs little.
const SPACING: Duration = Duration::from_millis(50);

/// Failures in a row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// How long to wait after a worker that lived `lived` and failed or not.
    pub(crate) fn after(&mut self, failed: bool, lived: Duration) -> Duration {
        if !failed {
            self.failures = 0;
            return SPACING.saturating_sub(lived);
        }
        if lived >= HEALTHY {
            self.failures = 0;
        }
        let doublings = self.failures.checked_sub(1);
        self.failures = self.failures.saturating_add(1);
        doublings.map_or(Duration::ZERO, |times| FIRST.saturating_mul(1 << times.min(16)).min(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_start_again_after_a_good_end() {
        let mut backoff = Backoff::default();
        let pauses: Vec<_> = (0..8).map(|_| backoff.after(true, Duration::ZERO).as_millis()).collect();
        assert_eq!(pauses, [0, 100, 200, 400, 800, 1600, 3200, 5000]);
        assert_eq!(backoff.after(false, Duration::from_secs(1)), Duration::ZERO);
        assert_eq!(backoff.after(true, Duration::ZERO), Duration::ZERO);
        assert_eq!(backoff.after(true, Duration::ZERO), FIRST);
        assert_eq!(backoff.after(true, HEALTHY), Duration::ZERO, "a long life forgives");
        for _ in 0..100 {
            backoff.after(true, Duration::ZERO);
        }
        assert_eq!(backoff.after(true, Duration::ZERO), LONGEST);
    }

    #[test]
    fn good_ends_in_quick_succession_are_spaced() {
        let mut backoff = Backoff::default();
        assert_eq!(backoff.after(false, Duration::from_millis(20)), Duration::from_millis(30));
        assert_eq!(backoff.after(false, Duration::from_millis(80)), Duration::ZERO);
    }
}
