//! Mappings that outlive the commands that needed them: for the next command over the same memory the kernel is asked for nothing.
//!
//! Each engine has its own [`Lazy`]. What is given up for the time saved: a function that misbehaves reaches memory that one of its commands used a moment
//! ago, with the rights that the command had, also when an UNMAP of the guest has been answered since; and guest memory that goes stays pinned until then.
//! It ends with the first command that is over after a second, when the engine has had nothing to do for a second, when newer mappings need the room, or
//! with the engine.
//!
//! Not here: who wants that.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use hw_engine::{Place, queue};
use iommu_addr::{Access, BusAddr};

use crate::VfioError;
use crate::host::{MapSink, Mapped, pages};

/// A [`MapSink`] over another one that keeps what it has mapped for a while.
pub struct Lazy {
    sink: Arc<dyn MapSink>,
    kept: Arc<Mutex<Kept>>,
    linger: Duration,
}

/// What no command uses. What one uses is not here, so it cannot be unmapped.
#[derive(Default)]
struct Kept {
    /// By what they are good for, and when they were let go.
    mappings: BTreeMap<(Key, u64), Mapped>,
    by_age: BTreeMap<u64, (Key, Instant)>,
    bytes: u64,
    turn: u64,
}

/// What a mapping is good for: whole pages, as read from or written to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// Which memory: what keeps it mapped, which a kept mapping does not let go, so its address stands for it.
    hold: usize,
    address: u64,
    len: u64,
    rights: (bool, bool),
}

/// A mapping that a command uses.
struct Lent {
    kept: Weak<Mutex<Kept>>,
    key: Key,
    mapped: Option<Mapped>,
    linger: Duration,
}

impl Lazy {
    /// Most mappings that are kept: a container holds 65,535, and 32 engines of a tenant that all keep as many leave half of them to commands.
    pub const MAX_KEPT: usize = 1024;
    /// Most bytes that are kept, because what is mapped is pinned: enough for all buffers that a guest has in flight with one device.
    pub const MAX_KEPT_BYTES: u64 = 64 << 20;

    /// How long a mapping is kept.
    pub const LINGER: Duration = queue::REST;

    /// Keeps what `sink` maps, for so long, or until it is told to rest.
    pub fn new(sink: Arc<dyn MapSink>, linger: Duration) -> Self {
        Self { sink, kept: Arc::default(), linger }
    }

    fn map_anew(&self, pages: &Place, access: Access, mask: u64) -> Result<Mapped, VfioError> {
        self.sink.map(pages, access, mask).or_else(|_full| {
            // What is kept may be in the way.
            self.rest();
            self.sink.map(pages, access, mask)
        })
    }
}

impl MapSink for Lazy {
    fn map(&self, place: &Place, access: Access, mask: u64) -> Result<Mapped, VfioError> {
        let pages = pages(place);
        let hold = Arc::as_ptr(&pages.hold).cast::<()>().addr();
        let key = Key { hold, address: pages.address, len: pages.len, rights: (access.read, access.write) };
        let kept = lock(&self.kept).take(key, mask);
        let mapped = kept.map_or_else(|| self.map_anew(&pages, access, mask), Ok)?;
        let first = BusAddr(mapped.first.0 + (place.address - pages.address));
        let guard = Lent { kept: Arc::downgrade(&self.kept), key, mapped: Some(mapped), linger: self.linger };
        Ok(Mapped { first, len: place.len, guard: Box::new(guard) })
    }

    fn rest(&self) {
        // Unmapped outside the lock.
        drop(std::mem::take(&mut *lock(&self.kept)));
        self.sink.rest();
    }
}

impl Kept {
    /// A mapping that is good for this, at addresses up to `mask`.
    fn take(&mut self, key: Key, mask: u64) -> Option<Mapped> {
        let is_below = |mapped: &Mapped| mapped.first.0.checked_add(key.len - 1).is_some_and(|last| last <= mask);
        let mut fit = self.mappings.range((key, 0)..=(key, u64::MAX)).filter(|(_, mapped)| is_below(mapped));
        let turn = fit.next().map(|((_, turn), _)| *turn)?;
        self.remove(turn)
    }

    /// Keeps one more. Answers what goes: what is older than `linger`, and if there is too much, the older half.
    fn put(&mut self, key: Key, mapped: Mapped, linger: Duration) -> Vec<Mapped> {
        let now = Instant::now();
        self.turn += 1;
        self.bytes += key.len;
        self.by_age.insert(self.turn, (key, now));
        self.mappings.insert((key, self.turn), mapped);
        let is_full = !self.is_within(1);
        let mut old = Vec::new();
        while let Some((oldest, (_, let_go))) = self.by_age.first_key_value()
            && (now.duration_since(*let_go) >= linger || is_full && !self.is_within(2))
        {
            let oldest = *oldest;
            old.extend(self.remove(oldest));
        }
        old
    }

    /// Whether no more is kept than that part of what may be.
    fn is_within(&self, part: u8) -> bool {
        self.mappings.len() <= Lazy::MAX_KEPT / usize::from(part)
            && self.bytes <= Lazy::MAX_KEPT_BYTES / u64::from(part)
    }

    fn remove(&mut self, turn: u64) -> Option<Mapped> {
        let (key, _) = self.by_age.remove(&turn)?;
        self.bytes -= key.len;
        self.mappings.remove(&(key, turn))
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // Without anybody to keep it, it is unmapped.
        if let (Some(kept), Some(mapped)) = (self.kept.upgrade(), self.mapped.take()) {
            let old = lock(&kept).put(self.key, mapped, self.linger);
            // Outside the lock.
            drop(old);
        }
    }
}

fn lock(kept: &Mutex<Kept>) -> MutexGuard<'_, Kept> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}
