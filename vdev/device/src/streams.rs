//! The streams of one domain: order, credits, errors. Data only; whoever owns a stream's turn moves it.
//!
//! A stream exists while it has work or an error. It is **busy** while somebody owns its turn: the thread that executes its work, the engine
//! that has it in flight, or a list that will come back to it. The owner alone takes work from the front.
//!
//! Not here: what the work is, who runs it.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Instant;

use crate::RequestError;
use crate::op::{Op, StreamKey};

/// Streams of one domain.
#[derive(Default)]
pub(crate) struct Streams {
    map: HashMap<StreamKey, Stream, BuildHasherDefault<KeyHasher>>,
    /// Streams that the guest named.
    guests: usize,
}

#[derive(Default)]
struct Stream {
    queue: VecDeque<Op>,
    busy: bool,
    /// What the turn's owner has taken from the front.
    hand: Option<Hand>,
    failed: bool,
    /// Descriptors that wait or run.
    count: usize,
}

/// Work in the hands of a turn's owner: a thread, or an engine.
struct Hand {
    cookie: Option<u64>,
    /// It is to end before it goes on.
    cancelled: bool,
}

impl Stream {
    fn take(&mut self, cookie: Option<u64>) {
        self.hand = Some(Hand { cookie, cancelled: false });
    }

    fn cancel_issued(&mut self, which: impl Fn(&Op) -> bool) -> usize {
        let issued = self.queue.iter_mut().filter(|op| op.issued.is_some() && which(op));
        issued.map(|op| op.abort(RequestError::Cancelled)).count()
    }
}

/// Whether work may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// The caller owns the stream's turn, and one descriptor counts.
    Yours,
    /// Somebody else has it: queue behind.
    Busy,
    /// The stream is in error.
    Failed,
    /// The domain has no room for one more stream.
    TooMany,
}

/// Whose work goes on when a turn ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The stream has more work; its turn is still owned and must go on.
    More,
    /// Nobody owns the turn any more.
    Idle,
}

impl Streams {
    /// Takes the turn of a stream that is idle or new, for the guest's work of this name.
    pub(crate) fn claim(&mut self, key: StreamKey, cookie: u64, max_streams: usize) -> Claim {
        match self.map.entry(key) {
            Entry::Occupied(mut entry) => {
                let stream = entry.get_mut();
                if stream.failed {
                    Claim::Failed
                } else if stream.busy {
                    Claim::Busy
                } else {
                    stream.busy = true;
                    stream.take(Some(cookie));
                    stream.count = stream.count.saturating_add(1);
                    Claim::Yours
                }
            }
            Entry::Vacant(entry) => {
                if key.is_guest() {
                    if self.guests >= max_streams {
                        return Claim::TooMany;
                    }
                    self.guests = self.guests.saturating_add(1);
                }
                entry.insert(Stream { busy: true, count: 1, ..Stream::default() }).take(Some(cookie));
                Claim::Yours
            }
        }
    }

    /// Whether somebody owns a stream's turn.
    pub(crate) fn is_busy(&self, key: StreamKey) -> bool {
        self.map.get(&key).is_some_and(|stream| stream.busy)
    }

    /// Whether a stream is in error.
    pub(crate) fn is_failed(&self, key: StreamKey) -> bool {
        self.map.get(&key).is_some_and(|stream| stream.failed)
    }

    /// Descriptors that wait or run in a stream.
    pub(crate) fn count(&self, key: StreamKey) -> usize {
        self.map.get(&key).map_or(0, |stream| stream.count)
    }

    /// Queues work behind what the stream has; `Next::More` if the stream was idle and the caller owns its turn now.
    pub(crate) fn push(&mut self, key: StreamKey, op: Op) -> Next {
        let guest = usize::from(key.is_guest());
        let stream = self.map.entry(key).or_insert_with(|| {
            self.guests = self.guests.saturating_add(guest);
            Stream::default()
        });
        stream.queue.push_back(op);
        stream.count = stream.count.saturating_add(1);
        if std::mem::replace(&mut stream.busy, true) { Next::Idle } else { Next::More }
    }

    /// Takes the work at the front, for the owner of the turn. Without work the turn ends.
    pub(crate) fn pop(&mut self, key: StreamKey) -> Option<Op> {
        let stream = self.map.get_mut(&key)?;
        let op = stream.queue.pop_front();
        match &op {
            Some(op) => stream.take(op.cookie()),
            None => self.end_turn(key),
        }
        op
    }

    /// The owner of the turn has other work in its hands now than what it took.
    pub(crate) fn retake(&mut self, key: StreamKey, cookie: u64) {
        if let Some(stream) = self.map.get_mut(&key) {
            stream.take(Some(cookie));
        }
    }

    /// Puts work back to the front, for the owner of the turn, who keeps it.
    pub(crate) fn put_back(&mut self, key: StreamKey, mut op: Op) {
        if let Some(stream) = self.map.get_mut(&key) {
            if stream.hand.take().is_some_and(|hand| hand.cancelled) {
                op.abort(RequestError::Cancelled);
            }
            stream.queue.push_front(op);
        }
    }

    /// Cancels what the owner of the turn has in its hands, if it has this name. False if there is no such.
    pub(crate) fn cancel_taken(&mut self, key: StreamKey, cookie: Option<u64>) -> bool {
        let hand = self.map.get_mut(&key).and_then(|stream| stream.hand.as_mut());
        let meant = hand.filter(|hand| cookie.is_none() || hand.cookie == cookie);
        meant.map(|hand| hand.cancelled = true).is_some()
    }

    /// Whether what the owner of the turn has in its hands was cancelled.
    pub(crate) fn is_taken_cancelled(&self, key: StreamKey) -> bool {
        self.map.get(&key).and_then(|stream| stream.hand.as_ref()).is_some_and(|hand| hand.cancelled)
    }

    /// One descriptor of the turn's owner has ended.
    pub(crate) fn ended(&mut self, key: StreamKey) -> Next {
        let Some(stream) = self.map.get_mut(&key) else { return Next::Idle };
        stream.hand = None;
        stream.count = stream.count.saturating_sub(1);
        if stream.queue.is_empty() {
            self.end_turn(key);
            return Next::Idle;
        }
        Next::More
    }

    fn end_turn(&mut self, key: StreamKey) {
        if let Some(stream) = self.map.get_mut(&key) {
            stream.busy = false;
            self.remove_if_idle(key);
        }
    }

    fn remove_if_idle(&mut self, key: StreamKey) {
        let idle = |stream: &Stream| !stream.busy && !stream.failed && stream.queue.is_empty();
        if self.map.get(&key).is_some_and(idle) {
            self.map.remove(&key);
            self.guests = self.guests.saturating_sub(usize::from(key.is_guest()));
        }
    }

    /// Puts a guest's stream into error and gives the work that waits in it.
    pub(crate) fn fail(&mut self, key: StreamKey) -> Vec<Op> {
        if !key.is_guest() {
            return Vec::new();
        }
        if let Some(stream) = self.map.get_mut(&key) {
            stream.failed = true;
        }
        self.take_waiting(key, |_| true)
    }

    /// Ends a stream's error, whatever it holds.
    pub(crate) fn reset(&mut self, key: StreamKey) {
        if let Some(stream) = self.map.get_mut(&key) {
            stream.failed = false;
            self.remove_if_idle(key);
        }
    }

    /// Takes work out of a stream's queue that was not issued and satisfies `which`.
    pub(crate) fn take_waiting(&mut self, key: StreamKey, mut which: impl FnMut(&Op) -> bool) -> Vec<Op> {
        let Some(stream) = self.map.get_mut(&key) else { return Vec::new() };
        let mut taken = Vec::new();
        let mut kept = VecDeque::new();
        for op in std::mem::take(&mut stream.queue) {
            if op.issued.is_none() && which(&op) { taken.push(op) } else { kept.push_back(op) }
        }
        stream.queue = kept;
        stream.count = stream.count.saturating_sub(taken.len());
        taken
    }

    /// As [`Streams::take_waiting`], of every stream that satisfies `of`.
    pub(crate) fn take_all_waiting(
        &mut self,
        of: impl Fn(StreamKey) -> bool,
        which: impl Fn(&Op) -> bool,
    ) -> Vec<(StreamKey, Op)> {
        let keys: Vec<_> = self.map.keys().copied().filter(|key| of(*key)).collect();
        let mut taken = Vec::new();
        for key in keys {
            taken.extend(self.take_waiting(key, &which).into_iter().map(|op| (key, op)));
        }
        taken
    }

    /// Whether anything that waits satisfies `which`.
    pub(crate) fn any(&self, which: impl Fn(&Op) -> bool) -> bool {
        self.map.values().flat_map(|stream| &stream.queue).any(which)
    }

    /// Forgets errors and idle streams: the domain is going.
    pub(crate) fn reset_all(&mut self) {
        let keys: Vec<_> = self.map.keys().copied().collect();
        keys.into_iter().for_each(|key| self.reset(key));
    }

    /// The earliest deadline of what waits.
    pub(crate) fn earliest_deadline(&self) -> Option<Instant> {
        self.map.values().flat_map(|stream| &stream.queue).map(|op| op.deadline).min()
    }

    /// Marks work in a stream's queue that was issued and satisfies `which` as cancelled, and says how much that is.
    pub(crate) fn cancel_issued(&mut self, key: StreamKey, which: impl Fn(&Op) -> bool) -> usize {
        let Some(stream) = self.map.get_mut(&key) else { return 0 };
        stream.cancel_issued(which)
    }

    /// As [`Streams::cancel_issued`], of every stream.
    pub(crate) fn cancel_all_issued(&mut self, which: impl Fn(&Op) -> bool) {
        for stream in self.map.values_mut() {
            stream.cancel_issued(&which);
        }
    }
}

/// One multiplication: keys are few and bounded by a limit, so that a guest gains nothing from choosing them.
#[derive(Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }
}
