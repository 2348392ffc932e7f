//! Token buckets in shared words: something may happen so often at once and then so often a second, whichever process asks.
//!
//! A bucket is one number, when it would be full again on the host's monotonic clock. It outlives whoever takes from it, and whoever takes may
//! be hostile: a number beyond what an honest process can have written counts as an empty bucket, so that it holds up what comes after it for
//! the time of one burst and no longer.
//!
//! Not here: clocks, what is left out.

use std::sync::atomic::{AtomicU64, Ordering};

/// How often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rate {
    /// How many at once.
    pub(crate) burst: u64,
    /// Nanoseconds until one more may.
    pub(crate) refill: u64,
}

impl Rate {
    /// Takes one out of a bucket, if it is not empty. `now` is in nanoseconds.
    pub(crate) fn take(self, full_at: &AtomicU64, now: u64) -> bool {
        let empty = now.saturating_add(self.refill.saturating_mul(self.burst));
        let step = |full_at: u64| full_at.max(now).checked_add(self.refill).filter(|next| *next <= empty);
        match full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step) {
            Ok(_) => true,
            Err(found) if found <= empty => false,
            Err(found) => {
                // If another has written in the meantime, the next look mends it.
                let _ = full_at.compare_exchange(found, empty, Ordering::Relaxed, Ordering::Relaxed);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { burst: 4, refill: 10 };

    fn takes(bucket: &AtomicU64, now: u64) -> usize {
        (0..100).filter(|_| RATE.take(bucket, now)).count()
    }

    #[test]
    fn burst_comes_at_once_and_then_one_a_refill_and_no_more_than_a_burst_is_saved_up() {
        let bucket = AtomicU64::new(0);
        assert_eq!(
            [takes(&bucket, 1000), takes(&bucket, 1009), takes(&bucket, 1010), takes(&bucket, 1025)],
            [4, 0, 1, 1]
        );
        assert_eq!(takes(&bucket, 1 << 40), 4);
    }

    #[test]
    fn number_that_nobody_honest_wrote_holds_up_for_one_burst_only() {
        for hostile in [u64::MAX, u64::MAX - 5, 1 << 60] {
            let bucket = AtomicU64::new(hostile);
            assert_eq!([takes(&bucket, 1000), takes(&bucket, 1010), takes(&bucket, 1080)], [0, 1, 4], "{hostile:#x}");
        }
        let end = AtomicU64::new(0);
        assert_eq!(takes(&end, u64::MAX), 0, "the clock's end is no panic");
    }

    #[test]
    fn threads_take_no_more_than_there_is() {
        let bucket = AtomicU64::new(0);
        let taken: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| takes(&bucket, 7))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(taken, 4);
    }
}
