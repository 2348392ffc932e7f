//! A pause: submission queues take no more chains, and everything else goes on.
//!
//! What was taken before ends as it would have; the driver's later chains wait in its rings, and nothing of them is lost. Control requests are
//! served, events delivered.
//!
//! Not here: who pauses a device and why.

use std::sync::TryLockError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vdev_wire::FIRST_SUBMIT_QUEUE;

use crate::device::Device;
use crate::sync::lock;

/// Whether submission queues rest.
#[derive(Default)]
pub(crate) struct Pause {
    paused: AtomicBool,
    /// There may be chains that nobody will tell of again.
    resumed: AtomicBool,
}

impl Pause {
    pub(crate) fn is_on(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }
}

impl Device {
    /// Takes no more chains from submission queues. Turns that have begun may take some yet: see [`Device::is_quiet`].
    pub fn pause(&self) {
        self.pause.paused.store(true, Ordering::Release);
    }

    /// Takes chains again, those that came meanwhile first.
    pub fn unpause(&self) {
        if self.pause.paused.swap(false, Ordering::AcqRel) {
            self.pause.resumed.store(true, Ordering::Release);
            self.wake();
        }
    }

    /// Whether a paused device has nothing left of what it took: every chain of the submission queues is back and no engine moves anything for it.
    /// True for good, until [`Device::unpause`], except for work that a device's own logic starts. Never waits. The observer may not have heard of all of it
    /// yet: see [`Device::await_turns`].
    pub fn is_quiet(&self) -> bool {
        if !self.pause.is_on() {
            return false;
        }
        let mut queues = FIRST_SUBMIT_QUEUE..self.num_queues();
        let rests = |index| self.is_between_turns(index) && self.port(index).is_none_or(|port| port.is_idle());
        // What the timekeeper has in hand is in no list: of a paused device that is scrubbing, or what a device's own logic has started.
        let scrubs = self.scrubs.load(Ordering::Acquire) > 0;
        queues.all(rests) && !scrubs && self.ready.is_empty() && self.starved.is_empty() && self.flights.is_empty()
    }

    /// Waits until every turn that has begun is over. A turn tells the observer at its end what it did, when the driver may know already.
    pub fn await_turns(&self) {
        for state in (0..self.num_queues()).filter_map(|index| self.queue_state(index)) {
            drop(lock(state));
        }
        drop(lock(&self.timekeeper));
    }

    /// On the timekeeper's thread: takes up what came during a pause. `Some` if there is more at once.
    pub(crate) fn take_up(&self) -> Option<Duration> {
        if !self.pause.resumed.swap(false, Ordering::AcqRel) {
            return None;
        }
        let mut more = false;
        for index in FIRST_SUBMIT_QUEUE..self.num_queues() {
            more |= self.drain(index);
        }
        if more {
            self.pause.resumed.store(true, Ordering::Release);
        }
        more.then_some(Duration::ZERO)
    }

    /// A turn that has begun may not have seen the pause; one that begins later does.
    fn is_between_turns(&self, index: u16) -> bool {
        self.queue_state(index).is_none_or(|state| !matches!(state.try_lock(), Err(TryLockError::WouldBlock)))
    }
}
