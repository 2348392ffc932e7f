//! One direction of a link, shared by weight: start-time fair queueing without a queue.
//!
//! A drawer says in the page how much of the direction it has had: its *tag*, nanoseconds of the link multiplied by [`MAX_WEIGHT`] and divided by
//! its weight. The one that has had least may book the next piece; one that is more than a piece ahead of it waits. Tags are counted on one clock,
//! which is the least tag at the last booking: a drawer that comes anew begins there, and so neither owes nor is owed for the time when it did not
//! want anything.
//!
//! - **Shares.** Any two that go on wanting the direction have had as much as each other by weight, but for three pieces.
//! - **Waiting.** A drawer books a piece only while the direction is booked for [`AHEAD`] at most. One that comes anew books its first piece at
//!   once, and so waits for that time and one piece at most; one piece more for each drawer that books at the very same moment.
//! - **Nothing is wasted.** A drawer that is alone waits for nobody. One that oversleeps its turn may book time that has passed. Others go ahead
//!   of it once the direction has been idle for [`GRACE`]; what it has missed it is given later, up to [`LATE`].
//!
//! Everything in the page may have been written by a hostile worker: tags count only near the clock, a word that says that the direction is
//! booked for longer than all drawers could have booked it says nothing, and a drawer that was turned away for [`LONGEST_WAIT`] books all the same.
//!
//! Not here: which link it is, pieces that cross several.

use std::sync::atomic::{AtomicU64, Ordering};

/// Tenants that a link tells apart at a time.
pub const PLACES: usize = 128;
/// When it is free, the clock, and two words a drawer: its tag, and its weight with the time until which it wants the direction.
pub(crate) const WAY_WORDS: usize = 2 + 2 * PLACES;
/// Largest weight.
pub(crate) const MAX_WEIGHT: u32 = 10_000;

const MICRO: u64 = 1_000;
const SECOND: u64 = 1_000_000_000;
/// For how long a direction may be booked when one more piece is. All times are in nanoseconds.
pub(crate) const AHEAD: u64 = 50 * MICRO;
/// The same for the first piece's worth of a drawer that comes anew, which so need not be there at the right moment.
const FRESH_AHEAD: u64 = 4 * AHEAD;
/// Longest time that a piece of more than [`LEAST_PIECE`] bytes takes.
const PIECE_TIME: u64 = 50 * MICRO;
const LEAST_PIECE: u64 = 4 << 10;
const MOST_PIECE: u64 = 64 << 10;
/// How long a direction is idle before it is not left to those whose turn it is.
const GRACE: u64 = 250 * MICRO;
/// How much late drawers catch up, and others stay behind for having gone ahead of them.
const LATE: u64 = 20_000 * MICRO;
/// How long after the time at which he is to come back a drawer still counts.
const LEASE: u64 = 20_000 * MICRO;
/// Between two looks, at least.
const STEP: u64 = 5 * MICRO;
/// Longest time that a drawer waits for others, whatever they say.
const LONGEST_WAIT: u64 = 10 * SECOND;

const WEIGHT_BITS: u32 = 14;

/// How fast a direction is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    bandwidth: u64,
    /// Longest piece in bytes, and the time it takes.
    pub(crate) piece: u64,
    piece_time: u64,
}

impl Rate {
    /// `None` if it is as fast as memory.
    pub(crate) fn new(bandwidth: u64) -> Option<Self> {
        let bytes = u128::from(bandwidth) * u128::from(PIECE_TIME) / u128::from(SECOND);
        let piece = u64::try_from(bytes).unwrap_or(u64::MAX).clamp(LEAST_PIECE, MOST_PIECE);
        let rate = Self { bandwidth, piece, piece_time: 0 };
        (bandwidth > 0).then(|| Self { piece_time: rate.time(piece), ..rate })
    }

    /// How long bytes take.
    pub(crate) fn time(&self, bytes: u64) -> u64 {
        let time = (u128::from(bytes) * u128::from(SECOND)).div_ceil(u128::from(self.bandwidth.max(1)));
        u64::try_from(time).unwrap_or(u64::MAX)
    }

    /// When a direction is booked for later than that, nobody has booked it.
    fn latest(&self, now: u64) -> u64 {
        now.saturating_add(AHEAD + LATE).saturating_add(self.piece_time.saturating_mul(PLACES as u64))
    }

    /// How far a tag may be from the clock.
    fn reach(&self, weight: u32) -> i64 {
        let time = self.piece_time.saturating_mul(2).saturating_add(LATE);
        i64::try_from(weighed(time, weight)).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
    }
}

/// What time of the link is for a drawer of this weight.
fn weighed(time: u64, weight: u32) -> u64 {
    let tag = u128::from(time) * u128::from(MAX_WEIGHT) / u128::from(weight.clamp(1, MAX_WEIGHT));
    u64::try_from(tag).unwrap_or(u64::MAX)
}

/// How far a tag is ahead of another one. Tags wrap.
fn ahead(tag: u64, of: u64) -> i64 {
    tag.wrapping_sub(of).cast_signed()
}

/// What a drawer remembers of a direction.
#[derive(Debug, Default)]
pub(crate) struct Drawer {
    /// How much it has had, once it has had something.
    tag: Option<u64>,
    /// Whether the page says that it wants the direction.
    wants: bool,
    /// Bytes that it may yet book as one that comes anew.
    fresh: u64,
    /// Since when it has been turned away.
    since: Option<u64>,
    /// Until when it has been.
    until: u64,
    /// What it saw last.
    look: Look,
}

/// What a drawer sees when it asks.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    clock: u64,
    /// Its own tag.
    tag: u64,
    /// When the direction is free.
    free: u64,
    /// How far the one who has had least is ahead of the clock, if there are others.
    least: Option<i64>,
    /// How long the others take until they have had as much.
    behind: u64,
    /// Whether it has had no more than its share.
    has_turn: bool,
    /// When to ask again, if it may book nothing now.
    later: Option<u64>,
}

/// One direction as one drawer sees it.
pub(crate) struct Way<'a> {
    pub(crate) rate: Rate,
    pub(crate) weight: u32,
    free: &'a AtomicU64,
    clock: &'a AtomicU64,
    slots: &'a [AtomicU64],
    place: usize,
}

impl<'a> Way<'a> {
    /// Over [`WAY_WORDS`] words; `None` if there are fewer.
    pub(crate) fn new(words: &'a [AtomicU64], rate: Rate, place: usize, weight: u32) -> Option<Self> {
        let [free, clock, slots @ ..] = words.get(..WAY_WORDS)? else { return None };
        Some(Self { rate, weight, free, clock, slots, place: place % PLACES })
    }

    /// Looks whether it is the drawer's turn. Answers since when the direction has been free, if it is.
    pub(crate) fn look(&self, drawer: &mut Drawer, now: u64) -> u64 {
        let clock = self.clock.load(Ordering::Relaxed);
        let free = self.rate_limited(self.free.load(Ordering::Relaxed), now);
        let (reach, slack) = (self.rate.reach(self.weight), self.slack());
        if !drawer.wants {
            drawer.fresh = self.rate.piece;
        }
        let mine = match drawer.tag {
            None => 0,
            Some(tag) => ahead(tag, clock).clamp(if drawer.wants { -reach } else { 0 }, reach),
        };
        let mut look = Look { clock, tag: clock.wrapping_add_signed(mine), free, ..Look::default() };
        for (weight, tag) in self.others(clock, now) {
            look.least = Some(look.least.map_or(tag, |least| least.min(tag)));
            let lead = u128::try_from(mine.saturating_sub(tag)).unwrap_or(0);
            let time = lead * u128::from(weight) / u128::from(MAX_WEIGHT);
            look.behind = look.behind.saturating_add(u64::try_from(time).unwrap_or(u64::MAX));
        }
        // One that comes anew and owes nothing is not kept waiting by those that are late.
        let is_due = drawer.fresh > 0 && mine <= 0;
        let is_mine = is_due || look.least.is_none_or(|least| mine <= least.saturating_add(slack));
        let patient = drawer.since.is_none_or(|since| now.saturating_sub(since) < LONGEST_WAIT);
        look.later = self.later(&look, drawer.fresh > 0, is_mine, now).filter(|_| patient);
        look.has_turn = is_mine;
        drawer.look = look;
        free
    }

    /// When to ask again, if not now.
    fn later(&self, look: &Look, is_fresh: bool, is_mine: bool, now: u64) -> Option<u64> {
        let room = look.free.saturating_sub(if is_fresh { FRESH_AHEAD } else { AHEAD });
        let idle = look.free.saturating_add(GRACE);
        if room <= now && (is_mine || idle <= now) {
            return None;
        }
        // When the others have caught up it is certainly its turn; sooner, somebody else is often quicker.
        let turn = if is_fresh && is_mine { room } else { room.max(now).saturating_add(look.behind) };
        Some(turn.min(idle).max(room).max(now.saturating_add(STEP)))
    }

    /// Says in the page that the drawer, which was turned away, waits; or that it does not, if another direction turned it away.
    pub(crate) fn wait(&self, drawer: &mut Drawer, now: u64) {
        let Some(later) = drawer.look.later else {
            // Another piece of its own may wait here.
            if drawer.until < now {
                self.leave(drawer);
            }
            return;
        };
        drawer.since.get_or_insert(now);
        drawer.until = later;
        self.enter(drawer, drawer.look.tag, later);
    }

    /// Why the drawer is to ask again later, and when.
    pub(crate) fn turned_away(drawer: &Drawer) -> Option<u64> {
        drawer.look.later
    }

    /// Books time from `begin` on, or from when the direction is free. Answers when it is over. Only after a look.
    pub(crate) fn book(&self, drawer: &mut Drawer, bytes: u64, more: bool, begin: u64, now: u64) -> u64 {
        let look = drawer.look;
        let time = self.rate.time(bytes);
        // As long as others want the direction it is never idle, whatever they have booked yet. Who goes ahead of them takes none of their time.
        let from = if look.least.is_some() && look.has_turn { now.saturating_sub(LATE) } else { begin };
        let over = |free: u64| self.rate_limited(free, now).max(from).saturating_add(time);
        let before = self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| Some(over(free)));
        // The closure never declines, so both arms hold the word before.
        let (Ok(free) | Err(free)) = before;
        let mine = ahead(look.tag, look.clock);
        let least = look.clock.wrapping_add_signed(look.least.map_or(mine, |least| least.min(mine)));
        let later = |clock: u64| (ahead(least, clock) > 0).then_some(least);
        let _ = self.clock.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
        let tag = look.tag.wrapping_add(weighed(time, self.weight));
        drawer.tag = Some(tag);
        drawer.since = None;
        drawer.fresh = drawer.fresh.saturating_sub(bytes);
        if more {
            self.enter(drawer, tag, over(free));
        } else {
            self.leave(drawer);
        }
        over(free).max(begin.saturating_add(time))
    }

    /// The page says no more that the drawer wants the direction.
    pub(crate) fn leave(&self, drawer: &mut Drawer) {
        drawer.wants = false;
        drawer.since = None;
        if let Some((_, lease)) = self.slot(self.place) {
            lease.store(0, Ordering::Relaxed);
        }
    }

    /// The page says that the drawer wants the direction and comes back at `back`.
    fn enter(&self, drawer: &mut Drawer, tag: u64, back: u64) {
        drawer.wants = true;
        drawer.tag = Some(tag);
        if let Some((word, lease)) = self.slot(self.place) {
            word.store(tag, Ordering::Relaxed);
            let until = back.saturating_add(LEASE) / MICRO;
            lease.store(until << WEIGHT_BITS | u64::from(self.weight.clamp(1, MAX_WEIGHT)), Ordering::Relaxed);
        }
    }

    /// Who else wants the direction: weights, and how far their tags are ahead of the clock.
    fn others(&self, clock: u64, now: u64) -> impl Iterator<Item = (u32, i64)> {
        let longest = self.rate.latest(now).saturating_add(GRACE + LEASE) / MICRO;
        let now = now / MICRO;
        let slots = self.slots.chunks_exact(2).enumerate().filter(|(place, _)| *place != self.place);
        slots.filter_map(move |(_, slot)| {
            let [tag, lease] = slot else { return None };
            let lease = lease.load(Ordering::Relaxed);
            let until = lease >> WEIGHT_BITS;
            if until < now || until > longest {
                return None;
            }
            let weight = u32::try_from(lease & ((1 << WEIGHT_BITS) - 1)).unwrap_or(0).clamp(1, MAX_WEIGHT);
            let reach = self.rate.reach(weight);
            Some((weight, ahead(tag.load(Ordering::Relaxed), clock).clamp(-reach, reach)))
        })
    }

    fn slot(&self, place: usize) -> Option<(&'a AtomicU64, &'a AtomicU64)> {
        match self.slots.get(place * 2..place * 2 + 2)? {
            [tag, lease] => Some((tag, lease)),
            _ => None,
        }
    }

    /// How far ahead of the one who has had least the drawer may be: a piece.
    fn slack(&self) -> i64 {
        i64::try_from(weighed(self.rate.piece_time, self.weight)).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
    }

    /// A word that says more than anybody can have booked says nothing.
    fn rate_limited(&self, free: u64, now: u64) -> u64 {
        if free > self.rate.latest(now) { now } else { free }
    }
}
