//! Waiting without blocking: the end of a drain as a value.
//!
//! A [`Latch`] counts things that drain. Whoever starts the drain holds one count itself until it has counted everything, so the latch cannot open
//! too early. What is to happen then runs exactly once, with no lock of this crate held, on the thread that let the last thing go.
//!
//! Not here: blocking, deadlines (every pin belongs to a job that has one).

use crate::sync::{Mutex, lock};
use std::fmt;
use std::sync::Arc;

type Action = Box<dyn FnOnce() + Send>;

/// Whether something that may have to wait for pins is done.
#[derive(Debug)]
#[must_use = "the answer may have to wait"]
pub enum Progress {
    /// It is done: nobody has access, and nobody gets it again.
    Done,
    /// Nobody gets access any more, but somebody still has it.
    Draining(Drain),
}

impl Progress {
    /// Runs `action` exactly once: now if it is done, else when the drain ends, on the thread that ends it. That can be any thread that drops
    /// [`crate::Pins`], or one whose attempt to pin came too late, so `action` must not take a lock under which somebody drops or takes pins. It
    /// should be short and must not panic.
    pub fn then(self, action: impl FnOnce() + Send + 'static) {
        match self {
            Self::Done => action(),
            Self::Draining(drain) => drain.then(action),
        }
    }

    /// Whether nobody has access any more.
    pub fn is_done(&self) -> bool {
        match self {
            Self::Done => true,
            Self::Draining(drain) => drain.is_done(),
        }
    }
}

/// A drain that was under way when it was made.
pub struct Drain(Arc<Latch>);

impl Drain {
    /// As [`Progress::then`].
    pub fn then(self, action: impl FnOnce() + Send + 'static) {
        let mut state = lock(&self.0.0);
        if state.done {
            drop(state);
            action();
        } else {
            state.last.push(Box::new(action));
        }
    }

    /// Whether the drain has ended.
    pub fn is_done(&self) -> bool {
        lock(&self.0.0).done
    }
}

impl fmt::Debug for Drain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drain").field("done", &self.is_done()).finish()
    }
}

struct State {
    /// Things that still drain, and one more until the starter has counted all.
    left: u64,
    /// Everything has drained and `first` has run.
    done: bool,
    /// Runs first: the crate's own business.
    first: Option<Action>,
    /// Runs after `done`: the caller's.
    last: Vec<Action>,
}

/// Counts what drains; see the module.
pub(crate) struct Latch(Mutex<State>);

impl Latch {
    /// A latch that its maker holds.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { left: 1, done: false, first: None, last: Vec::new() })))
    }

    /// As `new`; `first` runs when everything has drained, before what the waiter asked for.
    pub(crate) fn with_first(first: impl FnOnce() + Send + 'static) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { left: 1, done: false, first: Some(Box::new(first)), last: Vec::new() })))
    }

    /// Counts one more thing that drains. Only while the latch is held.
    pub(crate) fn add(self: &Arc<Self>) -> Arc<Self> {
        let mut state = lock(&self.0);
        state.left = state.left.saturating_add(1);
        Arc::clone(self)
    }

    /// One thing has drained. No lock of this crate may be held.
    pub(crate) fn arrive(&self) {
        let mut state = lock(&self.0);
        state.left = state.left.saturating_sub(1);
        if state.left > 0 {
            return;
        }
        let first = state.first.take();
        drop(state);
        if let Some(first) = first {
            first();
        }
        let mut state = lock(&self.0);
        state.done = true;
        let last = std::mem::take(&mut state.last);
        drop(state);
        last.into_iter().for_each(|action| action());
    }

    /// The maker has counted everything and lets go. No lock of this crate may be held.
    pub(crate) fn release(self: Arc<Self>) -> Progress {
        self.arrive();
        self.progress()
    }

    /// How far it is.
    pub(crate) fn progress(self: Arc<Self>) -> Progress {
        let drain = Drain(self);
        if drain.is_done() { Progress::Done } else { Progress::Draining(drain) }
    }
}
