//! Credit of the host's links.

use std::time::Duration;

/// A link between a device and the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u16);

/// Which way bytes cross a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Out of the device.
    Out,
    /// Into the device.
    In,
}

/// Bytes of one piece that cross one direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crossing {
    /// Which link.
    pub link: LinkId,
    /// Which way.
    pub direction: Direction,
    /// How many; at most [`LinkLedger::piece`].
    pub bytes: u64,
    /// Whether the drawer has more for this direction behind this piece.
    pub more: bool,
}

/// What became of a booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Booking {
    /// It is booked; this is when the last byte is through, which may be in the past.
    Through(Duration),
    /// Nothing is booked: it is not the drawer's turn. Worth asking again from this time on, which is later than now.
    Later(Duration),
}

/// Host-wide link credit, drawn a piece at a time by everyone whose bytes cross a link, whatever process they are in. Each drawer has a ledger of
/// its own, which says when it is the drawer's turn. Times are since an epoch of the host's choice.
pub trait LinkLedger: Send + Sync {
    /// Longest piece in bytes that may cross the link at a time; `None` for a link that is as fast as memory, which is never booked.
    fn piece(&self, link: LinkId) -> Option<u64>;

    /// Books one piece, which crosses all these directions at the same time, each of them once. It has been there to be moved since `ready`: a
    /// drawer that comes late is given the time since then as far as nobody else has used it.
    fn reserve(&self, piece: &[Crossing], ready: Duration, now: Duration) -> Booking;

    /// The drawer has given up what it wanted to move in this direction.
    fn leave(&self, link: LinkId, direction: Direction);
}

/// Links as fast as memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unlimited;

impl LinkLedger for Unlimited {
    fn piece(&self, _link: LinkId) -> Option<u64> {
        None
    }

    fn reserve(&self, _piece: &[Crossing], _ready: Duration, now: Duration) -> Booking {
        Booking::Through(now)
    }

    fn leave(&self, _link: LinkId, _direction: Direction) {}
}
