//! Transfers on their way over links, cut into pieces.
//!
//! A piece is booked when its turn comes: the ledger says when the tenant's is, and this module which of the tenant's transfers has it. Transfers
//! that cross the same links stand in one lane. A lane takes turns between those that have just come and those that have had a piece, and the
//! latter go round: so a small transfer waits for one piece of a large one, not for all of it, and however many small ones come, the large ones have
//! every other piece. Shortest first would be quicker for small ones, but could leave a large one without anything for as long as they come.
//!
//! Pure state: who looks, and when, is the caller's.

use std::collections::VecDeque;
use std::time::Duration;

use hw_engine::{Booking, Crossing, Direction, LinkId, LinkLedger, Route};
use iommu_addr::EndpointId;
use smallvec::SmallVec;

use crate::agenda::Seq;
use crate::fabric::Crossings;

/// How much later than it may be a piece is booked that is not a transfer's first. It loses nothing by that, as it still gets the time that has
/// passed; and who is woken less often gets more done.
const SLACK: Duration = Duration::from_micros(50);

/// A transfer, or what is left of it.
pub(crate) struct Trip {
    pub(crate) seq: Seq,
    pub(crate) initiator: EndpointId,
    pub(crate) route: Route,
    /// Links that are crossed at the same time; one leg after another.
    legs: VecDeque<Crossings>,
    /// Bytes of the first leg that are booked.
    done: u64,
    /// Since when the first leg may be under way.
    ready: Duration,
    /// When what was booked of it is through.
    through: Duration,
}

impl Trip {
    /// A transfer that crosses these links, at least one: straight all at the same time, staged one after another.
    pub(crate) fn new(seq: Seq, initiator: EndpointId, route: Route, crossings: Crossings, now: Duration) -> Self {
        let legs = match route {
            Route::Direct => VecDeque::from([crossings]),
            Route::Staged => crossings.into_iter().map(|crossing| Crossings::from_iter([crossing])).collect(),
        };
        Self { seq, initiator, route, legs, done: 0, ready: now, through: now }
    }

    fn path(&self) -> Path {
        self.legs.iter().take(1).flatten().map(|(link, direction, _)| (*link, *direction)).collect()
    }

    /// The next piece, and where it ends.
    fn piece(&self, ledger: &dyn LinkLedger) -> (Piece, u64) {
        let Some(leg) = self.legs.front() else { return (Piece::new(), 0) };
        let len = leg.iter().map(|(_, _, bytes)| *bytes).max().unwrap_or(0);
        let most = leg.iter().filter_map(|(link, _, _)| ledger.piece(*link)).min().unwrap_or(len);
        let end = self.done.saturating_add(most.max(1)).min(len);
        let piece = leg.iter().map(|(link, direction, bytes)| {
            // Its share of the piece; all shares add up to all bytes.
            let before = |at: u64| u128::from(*bytes) * u128::from(at) / u128::from(len.max(1));
            let bytes = u64::try_from(before(end).saturating_sub(before(self.done))).unwrap_or(u64::MAX);
            Crossing { link: *link, direction: *direction, bytes, more: end < len }
        });
        (piece.collect(), end)
    }

    /// Takes in that everything up to `end` is booked. True if that is the whole leg.
    fn booked(&mut self, end: u64, through: Duration) -> bool {
        self.done = end;
        self.through = self.through.max(through);
        let len = self.legs.front().and_then(|leg| leg.iter().map(|(_, _, bytes)| *bytes).max());
        if len.is_some_and(|len| end < len) {
            return false;
        }
        self.legs.pop_front();
        (self.done, self.ready) = (0, self.through);
        true
    }
}

type Path = SmallVec<[(LinkId, Direction); 4]>;
type Piece = SmallVec<[Crossing; 4]>;

/// Transfers whose next piece crosses the same links.
struct Lane {
    path: Path,
    /// Those that have had no piece.
    new: VecDeque<Trip>,
    /// Those that have, in the order in which they get the next one.
    old: VecDeque<Trip>,
    /// Whether the next piece is one of `old`, if there is any.
    turn: bool,
    /// Until when the ledger has turned it away.
    until: Duration,
}

impl Lane {
    fn is_empty(&self) -> bool {
        self.new.is_empty() && self.old.is_empty()
    }

    fn take(&mut self) -> Option<Trip> {
        let (first, second) = if self.turn { (&mut self.old, &mut self.new) } else { (&mut self.new, &mut self.old) };
        first.pop_front().or_else(|| second.pop_front())
    }

    /// When it is worth a look.
    fn due(&self) -> Duration {
        if self.new.is_empty() { self.until.saturating_add(SLACK) } else { self.until }
    }
}

/// Every transfer of a tenant that is on its way.
#[derive(Default)]
pub(crate) struct Traffic {
    lanes: Vec<Lane>,
    /// Transfers between one leg and the next.
    later: Vec<Trip>,
    /// The lane that is asked first.
    turn: usize,
}

impl Traffic {
    pub(crate) fn is_empty(&self) -> bool {
        self.lanes.is_empty() && self.later.is_empty()
    }

    /// Takes a transfer.
    pub(crate) fn add(&mut self, trip: Trip) {
        let path = trip.path();
        match self.lanes.iter_mut().find(|lane| lane.path == path) {
            Some(lane) => lane.new.push_back(trip),
            None => {
                let new = VecDeque::from([trip]);
                self.lanes.push(Lane { path, new, old: VecDeque::new(), turn: false, until: Duration::ZERO });
            }
        }
    }

    /// Books every piece whose turn it is. Answers the transfers that are wholly booked, and when they are through.
    pub(crate) fn advance(&mut self, ledger: &dyn LinkLedger, now: Duration) -> SmallVec<[(Trip, Duration); 4]> {
        let mut over = SmallVec::new();
        loop {
            self.take_up(now);
            let mut booked = false;
            for _ in 0..self.lanes.len() {
                booked |= self.next_lane(ledger, now, &mut over);
            }
            self.lanes.retain(|lane| !lane.is_empty());
            if !booked {
                return over;
            }
        }
    }

    /// Transfers whose next leg may begin.
    fn take_up(&mut self, now: Duration) {
        while let Some(index) = self.later.iter().position(|trip| trip.ready <= now) {
            let trip = self.later.swap_remove(index);
            self.add(trip);
        }
    }

    /// Asks the ledger for one piece of the next lane. True if it was booked.
    fn next_lane(
        &mut self,
        ledger: &dyn LinkLedger,
        now: Duration,
        over: &mut SmallVec<[(Trip, Duration); 4]>,
    ) -> bool {
        let index = self.turn % self.lanes.len().max(1);
        self.turn = index.wrapping_add(1);
        let Some(mut trip) = self.lanes.get_mut(index).filter(|lane| lane.until <= now).and_then(Lane::take) else {
            return false;
        };
        let (mut piece, end) = trip.piece(ledger);
        for crossing in &mut piece {
            crossing.more |= self.wants(crossing.link, crossing.direction);
        }
        let booking = ledger.reserve(&piece, trip.ready, now);
        let Some(lane) = self.lanes.get_mut(index) else { return false };
        let is_new = trip.done == 0;
        match booking {
            Booking::Later(until) => {
                lane.until = until;
                (if is_new { &mut lane.new } else { &mut lane.old }).push_front(trip);
                false
            }
            Booking::Through(through) => {
                lane.turn = is_new;
                if !trip.booked(end, through) {
                    lane.old.push_back(trip);
                } else if trip.legs.is_empty() {
                    let through = trip.through;
                    over.push((trip, through));
                } else {
                    self.later.push(trip);
                }
                true
            }
        }
    }

    /// Whether anything waits for this direction.
    fn wants(&self, link: LinkId, direction: Direction) -> bool {
        self.lanes.iter().any(|lane| !lane.is_empty() && lane.path.contains(&(link, direction)))
    }

    /// When [`Traffic::advance`] may have something to do.
    pub(crate) fn due(&self) -> Option<Duration> {
        let lanes = self.lanes.iter().filter(|lane| !lane.is_empty()).map(Lane::due);
        lanes.chain(self.later.iter().map(|trip| trip.ready)).min()
    }

    /// Forgets the transfers that have been given up.
    pub(crate) fn retain(&mut self, ledger: &dyn LinkLedger, which: impl Fn(Seq) -> bool) {
        self.later.retain(|trip| which(trip.seq));
        let mut left = Path::new();
        for lane in &mut self.lanes {
            lane.new.retain(|trip| which(trip.seq));
            lane.old.retain(|trip| which(trip.seq));
            if lane.is_empty() {
                left.extend(lane.path.iter().copied());
            }
        }
        self.lanes.retain(|lane| !lane.is_empty());
        for (link, direction) in left {
            if !self.wants(link, direction) {
                ledger.leave(link, direction);
            }
        }
    }
}
