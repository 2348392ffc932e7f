//! Credit of the host's links.

use std::time::Duration;

/// A link between a device and the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u16);

/// Which way bytes cross a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Out of the device.
    Out,
    /// Into the device.
    In,
}

/// Host-wide link credit: who draws later waits for who drew before, whatever process they are in.
pub trait LinkLedger: Send + Sync {
    /// Books `bytes` on one direction of a link, from `now` (time since an epoch of the host's choice) on, and answers when the last
    /// byte has crossed. A link without a bandwidth answers `now`.
    fn reserve(&self, link: LinkId, direction: Direction, bytes: u64, now: Duration) -> Duration;
}

/// Links as fast as memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unlimited;

impl LinkLedger for Unlimited {
    fn reserve(&self, _link: LinkId, _direction: Direction, _bytes: u64, now: Duration) -> Duration {
        now
    }
}
