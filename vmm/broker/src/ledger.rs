//! The credit of the host's links, drawn by every tenant's worker from one page.
//!
//! The page says of each link and direction until when it is booked, and who wants it; [`crate::share`] says whose turn it is. No process stands
//! between the drawers: each looks for itself, and books for itself. Times are nanoseconds of `CLOCK_MONOTONIC`.
//!
//! Credit is cooperation, not isolation: a hostile worker can take a link for itself, and hold others up for as long as that module says.
//! Bandwidths are not in the page; each process has them from its own set-up.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hw_engine::{Booking, Crossing, Direction, LinkId, LinkLedger};
use rustix::time::{ClockId, clock_gettime};

use crate::share::{Drawer, MAX_WEIGHT, Rate, WAY_WORDS, Way};
use crate::words::{SharedError, SharedWords};

/// Links that the page has room for: twice as many as a host has devices, so that one that changes can get another number.
const LINKS: usize = 128;
/// Weight of a tenant whose operator says nothing.
const DEFAULT_WEIGHT: u32 = 100;

/// Time of `CLOCK_MONOTONIC`, the clock that every process of the host shares: what [`LinkTable`] takes as `now`.
pub fn monotonic_now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    // The monotonic clock is never negative and its nanoseconds are below a second.
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Credit of links, numbered from 0, for one tenant.
#[derive(Debug)]
pub struct LinkTable {
    page: SharedWords,
    rates: Box<[Option<Rate>]>,
    place: usize,
    weight: AtomicU32,
    /// What the tenant remembers of each direction.
    drawers: Mutex<Box<[Drawer]>>,
}

impl LinkTable {
    /// Makes the page, as the tenant with place 0 sees it. `bandwidths` are in bytes a second each way; 0 is as fast as memory, and so are links
    /// beyond the 128th.
    pub fn create(bandwidths: &[u64]) -> Result<Self, SharedError> {
        Ok(Self::over(SharedWords::create("peergate-links", LINKS * 2 * WAY_WORDS)?, bandwidths, 0))
    }

    /// Maps the page of another process, for the tenant with this place, of which there are 128.
    pub fn open(page: OwnedFd, bandwidths: &[u64], place: u16) -> Result<Self, SharedError> {
        Ok(Self::over(SharedWords::open(page, LINKS * 2 * WAY_WORDS)?, bandwidths, place))
    }

    fn over(page: SharedWords, bandwidths: &[u64], place: u16) -> Self {
        let rates: Box<[_]> = bandwidths.iter().take(LINKS).map(|bandwidth| Rate::new(*bandwidth)).collect();
        let drawers = (0..rates.len() * 2).map(|_| Drawer::default()).collect();
        let (place, weight, drawers) = (place.into(), AtomicU32::new(DEFAULT_WEIGHT), Mutex::new(drawers));
        Self { page, rates, place, weight, drawers }
    }

    /// The page, to hand to another process.
    pub fn page(&self) -> BorrowedFd<'_> {
        self.page.file()
    }

    /// The tenant's weight from now on, from 1 to 10000; `None` is 100.
    pub fn set_weight(&self, weight: Option<u32>) {
        self.weight.store(weight.unwrap_or(DEFAULT_WEIGHT).clamp(1, MAX_WEIGHT), Ordering::Relaxed);
    }

    fn drawers(&self) -> MutexGuard<'_, Box<[Drawer]>> {
        self.drawers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A direction that has a bandwidth, and what is remembered of it.
    fn way<'a>(
        &'a self,
        drawers: &'a mut [Drawer],
        link: LinkId,
        direction: Direction,
    ) -> Option<(Way<'a>, &'a mut Drawer)> {
        let rate = (*self.rates.get(usize::from(link.0))?)?;
        let index = usize::from(link.0) * 2 + usize::from(direction == Direction::In);
        let words = self.page.words().get(index * WAY_WORDS..)?;
        let way = Way::new(words, rate, self.place, self.weight.load(Ordering::Relaxed))?;
        Some((way, drawers.get_mut(index)?))
    }
}

impl LinkLedger for LinkTable {
    fn piece(&self, link: LinkId) -> Option<u64> {
        (*self.rates.get(usize::from(link.0))?).map(|rate| rate.piece)
    }

    fn reserve(&self, piece: &[Crossing], ready: Duration, now: Duration) -> Booking {
        let mut drawers = self.drawers();
        let now = nanos(now);
        // Since when it could have been under way.
        let mut begin = nanos(ready).min(now);
        let mut later = None;
        for Crossing { link, direction, .. } in piece {
            let Some((way, drawer)) = self.way(&mut drawers, *link, *direction) else { continue };
            begin = begin.max(way.look(drawer, now).min(now));
            later = later.max(Way::turned_away(drawer));
        }
        if let Some(later) = later {
            for Crossing { link, direction, .. } in piece {
                let Some((way, drawer)) = self.way(&mut drawers, *link, *direction) else { continue };
                way.wait(drawer, now);
            }
            return Booking::Later(Duration::from_nanos(later.max(now.saturating_add(1))));
        }
        let mut through = begin;
        for Crossing { link, direction, bytes, more } in piece {
            let Some((way, drawer)) = self.way(&mut drawers, *link, *direction) else { continue };
            through = through.max(way.book(drawer, *bytes, *more, begin, now));
        }
        Booking::Through(Duration::from_nanos(through))
    }

    fn leave(&self, link: LinkId, direction: Direction) {
        if let Some((way, drawer)) = self.way(&mut self.drawers(), link, direction) {
            way.leave(drawer);
        }
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
    const NOW: Duration = Duration::from_secs(100);

    fn views<const N: usize>(bandwidths: &[u64]) -> [LinkTable; N] {
        let table = LinkTable::create(bandwidths).unwrap();
        std::array::from_fn(|place| {
            let page = table.page().try_clone_to_owned().unwrap();
            LinkTable::open(page, bandwidths, u16::try_from(place).unwrap()).unwrap()
        })
    }

    fn crossing(link: LinkId, direction: Direction, bytes: u64) -> Crossing {
        Crossing { link, direction, bytes, more: false }
    }

    /// Books something that has just come, which must be its turn.
    fn draw(table: &LinkTable, piece: &[Crossing], now: Duration) -> Duration {
        match table.reserve(piece, now, now) {
            Booking::Through(through) => through,
            Booking::Later(later) => panic!("turned away until {later:?}"),
        }
    }

    fn micros(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    #[test]
    fn who_draws_later_waits_for_who_drew_before_in_another_process() {
        let [one, other] = views(&[0, GB]);
        let piece = [crossing(LINK, Direction::Out, 1000)];
        assert_eq!(draw(&one, &piece, NOW), NOW + micros(1));
        assert_eq!(draw(&other, &piece, NOW), NOW + micros(2));
        let later = NOW + Duration::from_secs(1);
        assert_eq!(draw(&one, &piece, later), later + micros(1), "idle time is lost");
    }

    #[test]
    fn the_two_directions_and_other_links_do_not_wait_for_each_other() {
        let [one, other] = views(&[GB, GB]);
        draw(&one, &[crossing(LINK, Direction::Out, 40_000)], NOW);
        assert_eq!(draw(&other, &[crossing(LINK, Direction::In, 1000)], NOW), NOW + micros(1));
        assert_eq!(draw(&other, &[crossing(LinkId(0), Direction::Out, 1000)], NOW), NOW + micros(1));
    }

    #[test]
    fn a_piece_that_crosses_several_links_is_through_when_the_slowest_is() {
        let [one, other] = views(&[GB, GB / 10]);
        let both = [crossing(LinkId(0), Direction::Out, 1000), crossing(LINK, Direction::In, 1000)];
        assert_eq!(draw(&one, &both, NOW), NOW + micros(10));
        assert_eq!(draw(&other, &both[..1], NOW), NOW + micros(2), "only its own time on each");
        assert_eq!(draw(&other, &both[1..], NOW), NOW + micros(20));
    }

    #[test]
    fn who_has_had_more_waits_until_the_others_have_caught_up() {
        let [one, other] = views(&[0, GB]);
        let mut piece = [Crossing { more: true, ..crossing(LINK, Direction::Out, one.piece(LINK).unwrap()) }];
        let mut booked = [0, 0];
        let mut now = NOW;
        for _ in 0..100 {
            // One asks as long as it may, the other only once.
            while let Booking::Through(_) = one.reserve(&piece, NOW, now) {
                booked[0] += 1;
            }
            booked[1] += usize::from(matches!(other.reserve(&piece, NOW, now), Booking::Through(_)));
            now += micros(50);
        }
        assert!(booked[0].abs_diff(booked[1]) <= 3, "{booked:?}");
        assert!(booked[0] + booked[1] >= 99, "{booked:?}");
        piece[0].more = false;
        other.leave(LINK, Direction::Out);
        assert_eq!(one.reserve(&piece, NOW, now + micros(200)), Booking::Through(now + micros(50 + 50)), "{booked:?}");
    }

    #[test]
    fn links_without_a_bandwidth_and_unknown_links_are_never_booked() {
        let [one] = views(&[0]);
        for link in [LinkId(0), LinkId(1), LinkId(u16::MAX)] {
            assert_eq!(one.piece(link), None);
            assert_eq!(draw(&one, &[crossing(link, Direction::In, u64::MAX)], NOW), NOW);
            one.leave(link, Direction::In);
        }
    }

    #[test]
    fn pieces_are_as_long_as_their_time_allows() {
        let [one] = views(&[1, GB / 10, GB, 100 * GB, u64::MAX]);
        let pieces: Vec<_> = (0..5).map(|link| one.piece(LinkId(link)).unwrap()).collect();
        assert_eq!(pieces, [4096, 5000, 50_000, 65536, 65536]);
    }

    /// Fills every word of the direction out of the link with the same number.
    fn spoil(table: &LinkTable, word: u64) {
        let words = table.page.words().iter().skip(usize::from(LINK.0) * 2 * WAY_WORDS).take(WAY_WORDS);
        words.for_each(|spoilt| spoilt.store(word, Ordering::Relaxed));
    }

    #[test]
    fn a_corrupt_page_delays_nobody_for_long() {
        let piece = [crossing(LINK, Direction::Out, 1000)];
        let lease = (nanos(NOW) / 1000 + 500) << 14 | 1;
        for corrupt in [u64::MAX, 1, 1 << 63, nanos(NOW) * 2, nanos(NOW) + 1_000_000, lease, lease + 9_999] {
            let [one] = views(&[0, GB]);
            spoil(&one, corrupt);
            let mut now = NOW;
            let through = loop {
                match one.reserve(&piece, NOW, now) {
                    Booking::Through(through) => break through,
                    Booking::Later(later) => now = later,
                }
                // Whoever spoils the page goes on doing it.
                spoil(&one, corrupt.saturating_add(nanos(now - NOW)));
                assert!(now < NOW + Duration::from_secs(11), "{corrupt:#x}");
            };
            assert!(through < now + micros(10_000), "{corrupt:#x}: {:?}", through - now);
        }
    }

    #[test]
    fn absurd_sizes_and_times_do_not_overflow() {
        let [one, other] = views(&[1]);
        let piece = [Crossing { more: true, ..crossing(LinkId(0), Direction::Out, u64::MAX) }];
        for table in [&one, &other, &one, &other] {
            for now in [Duration::ZERO, Duration::MAX] {
                let _ = table.reserve(&piece, Duration::MAX, now);
                let _ = table.reserve(&piece, Duration::ZERO, now);
            }
        }
        one.set_weight(Some(0));
        let _ = one.reserve(&piece, Duration::ZERO, NOW);
        one.set_weight(Some(u32::MAX));
        let _ = one.reserve(&piece, Duration::ZERO, NOW);
    }

    #[test]
    fn contending_drawers_get_disjoint_times_and_every_byte_is_charged() {
        const EACH: usize = 5_000;
        let tables: [LinkTable; 4] = views(&[0, GB]);
        let piece = [crossing(LINK, Direction::In, 10)];
        let work = |table: &LinkTable| -> Vec<Duration> { (0..EACH).map(|_| draw(table, &piece, NOW)).collect() };
        let mut ends = std::thread::scope(|scope| {
            let handles: Vec<_> = tables.iter().map(|table| scope.spawn(|| work(table))).collect();
            handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect::<Vec<_>>()
        });
        ends.sort_unstable();
        let expected: Vec<_> = (1..=4 * EACH as u64).map(|turn| NOW + Duration::from_nanos(10 * turn)).collect();
        assert_eq!(ends, expected);
    }
}
