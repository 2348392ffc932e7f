//! The credit of the host's links, drawn by every tenant's worker from one page.
//!
//! One word a link and direction says until when it is busy, in nanoseconds of `CLOCK_MONOTONIC`. Drawing credit moves the word on by the
//! time the bytes take, from now or from where the last one left it. Two tenants whose transfers cross one link so share its bandwidth,
//! whatever process they are in.
//!
//! Credit is cooperation, not isolation: a hostile worker can spoil a word, and then delays others by [`LONGEST_WAIT`] at most. Bandwidths
//! are not in the page; each process has them from its own set-up.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use hw_engine::{Direction, LinkId, LinkLedger};
use rustix::time::{ClockId, clock_gettime};

use crate::words::{SharedError, SharedWords};

/// Longest time that a booking waits for earlier ones; a word further in the future is corrupt, or a queue nobody should join.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
const NANOS: u128 = 1_000_000_000;

/// Time of `CLOCK_MONOTONIC`, the clock that every process of the host shares: what [`LinkTable`] takes as `now`.
pub fn monotonic_now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    // The monotonic clock is never negative and its nanoseconds are below a second.
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Credit of links, numbered from 0.
#[derive(Debug)]
pub struct LinkTable {
    busy: SharedWords,
    bandwidths: Box<[u64]>,
}

impl LinkTable {
    /// Makes the page. `bandwidths` are in bytes a second each way; 0 is as fast as memory.
    pub fn create(bandwidths: &[u64]) -> Result<Self, SharedError> {
        let busy = SharedWords::create("peergate-links", words(bandwidths))?;
        Ok(Self { busy, bandwidths: bandwidths.into() })
    }

    /// Maps the page of another process that made it with the same `bandwidths`.
    pub fn open(page: OwnedFd, bandwidths: &[u64]) -> Result<Self, SharedError> {
        let busy = SharedWords::open(page, words(bandwidths))?;
        Ok(Self { busy, bandwidths: bandwidths.into() })
    }

    /// The page, to hand to another process.
    pub fn page(&self) -> BorrowedFd<'_> {
        self.busy.file()
    }
}

/// Two a link, and never an empty page.
fn words(bandwidths: &[u64]) -> usize {
    bandwidths.len().max(1).saturating_mul(2)
}

impl LinkLedger for LinkTable {
    fn reserve(&self, link: LinkId, direction: Direction, bytes: u64, now: Duration) -> Duration {
        let index = usize::from(link.0);
        let bandwidth = self.bandwidths.get(index).copied().unwrap_or(0);
        let word = self.busy.words().get(index * 2 + usize::from(direction == Direction::In));
        let (Some(word), 1..) = (word, bandwidth) else {
            return now;
        };
        let cost = (u128::from(bytes) * NANOS).div_ceil(u128::from(bandwidth));
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        let now = nanos(now);
        let latest = now.saturating_add(nanos(LONGEST_WAIT));
        let finish = |busy: u64| busy.clamp(now, latest).saturating_add(cost);
        let before = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |busy| Some(finish(busy)));
        // The closure never declines, so both arms hold the word before.
        let (Ok(busy) | Err(busy)) = before;
        Duration::from_nanos(finish(busy))
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;
    const LINK: LinkId = LinkId(1);

    fn two_views(bandwidths: &[u64]) -> (LinkTable, LinkTable) {
        let table = LinkTable::create(bandwidths).unwrap();
        let other = LinkTable::open(table.page().try_clone_to_owned().unwrap(), bandwidths).unwrap();
        (table, other)
    }

    #[test]
    fn who_draws_later_waits_for_who_drew_before_in_another_process() {
        let (one, other) = two_views(&[0, GB]);
        let now = Duration::from_secs(100);
        assert_eq!(one.reserve(LINK, Direction::Out, 1000, now), now + Duration::from_micros(1));
        assert_eq!(other.reserve(LINK, Direction::Out, 1000, now), now + Duration::from_micros(2));
        let later = now + Duration::from_secs(1);
        assert_eq!(
            one.reserve(LINK, Direction::Out, 1000, later),
            later + Duration::from_micros(1),
            "idle time is lost"
        );
    }

    #[test]
    fn the_two_directions_and_other_links_do_not_wait_for_each_other() {
        let (one, other) = two_views(&[GB, GB]);
        let now = Duration::from_secs(5);
        one.reserve(LINK, Direction::Out, GB, now);
        let alone = now + Duration::from_micros(1);
        assert_eq!(other.reserve(LINK, Direction::In, 1000, now), alone);
        assert_eq!(other.reserve(LinkId(0), Direction::Out, 1000, now), alone);
    }

    #[test]
    fn links_without_a_bandwidth_and_unknown_links_are_done_at_once() {
        let (one, _) = two_views(&[0]);
        let now = Duration::from_secs(5);
        assert_eq!(one.reserve(LinkId(0), Direction::In, u64::MAX, now), now);
        assert_eq!(one.reserve(LinkId(u16::MAX), Direction::In, 1, now), now);
    }

    #[test]
    fn a_corrupt_word_delays_by_ten_seconds_at_most() {
        let (one, other) = two_views(&[0, GB]);
        let now = Duration::from_secs(5);
        for corrupt in [u64::MAX, nanos(now + LONGEST_WAIT) + 1] {
            one.busy.words()[2].store(corrupt, Ordering::Relaxed);
            let finish = other.reserve(LINK, Direction::Out, GB, now);
            assert_eq!(finish, now + LONGEST_WAIT + Duration::from_secs(1));
        }
        one.busy.words()[2].store(0, Ordering::Relaxed);
        assert_eq!(other.reserve(LINK, Direction::Out, GB, now), now + Duration::from_secs(1));
    }

    #[test]
    fn absurd_sizes_and_times_do_not_overflow() {
        let (one, _) = two_views(&[1]);
        let finish = one.reserve(LinkId(0), Direction::Out, u64::MAX, Duration::MAX);
        assert_eq!(finish, Duration::from_nanos(u64::MAX));
    }

    #[test]
    fn contending_drawers_get_disjoint_times_and_every_byte_is_charged() {
        const EACH: usize = 5_000;
        let (one, other) = two_views(&[0, GB]);
        let now = Duration::from_secs(5);
        let draw = |table: &LinkTable| -> Vec<Duration> {
            (0..EACH).map(|_| table.reserve(LINK, Direction::In, 10, now)).collect()
        };
        let mut finishes = std::thread::scope(|scope| {
            let handles: Vec<_> = [&one, &other, &one, &other].map(|table| scope.spawn(|| draw(table))).into();
            handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect::<Vec<_>>()
        });
        finishes.sort_unstable();
        let expected: Vec<_> = (1..=4 * EACH as u64).map(|turn| now + Duration::from_nanos(10 * turn)).collect();
        assert_eq!(finishes, expected);
    }
}
