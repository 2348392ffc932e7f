//! Memory of this process that GPUs may reach: guests' memory, and other owners' apertures.
//!
//! Registering costs up to half a millisecond a MiB, so it is done once: in chunks of a mapping, when a chunk is first used. A mapping is one file's bytes,
//! mapped once ([`hw_engine::Place`] says so), so its address stands for the file's device, inode and offset.
//!
//! A registration keeps its mapping mapped. When nothing else does any more, because the guest's memory table has changed, [`Registry::sweep`] gives it up;
//! one that a transfer still uses goes when that has ended. Who else uses a mapping when the table changes, such as another engine, keeps it a little longer: so
//! it is looked for some seconds whether more can go ([`Registry::look`]). When there are too many, the one that was used least lately goes.
//!
//! The kernel pins a registration's pages. A VMM that discards some of them all the same (balloon, free page reporting) gives its guest other ones, and GPUs go on
//! with those that were there before: nobody tells a device of that.
//!
//! Not here: which addresses a transfer needs.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hw_engine::Place;

use crate::driver::CudaError;
use crate::gpu::Gpu;

/// Bytes of a chunk: few enough to be registered in the time of a transfer of 1 MiB or so if they are touched, and as many as a long copy needs to be fast.
pub(crate) const CHUNK: u64 = 64 << 20;
/// Most chunks: 64 GiB.
pub(crate) const MAX_CHUNKS: usize = 1024;

/// How many nanoseconds after a change of the table mappings may go yet: longer than any other engine has a command, or keeps what it may use again.
const LATE: u64 = 10_000_000_000;
/// How often that is looked for.
const LOOK: u64 = 250_000_000;
const NEVER: u64 = u64::MAX;

/// A part of a mapping that GPUs may reach.
#[derive(Debug)]
pub(crate) struct Registration {
    gpu: Arc<Gpu>,
    at: Range<u64>,
    /// Keeps it mapped; one for all registrations of a mapping.
    _mapping: Arc<Hold>,
}

struct Hold(Arc<dyn Any + Send + Sync>);

impl std::fmt::Debug for Hold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hold")
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Err(error) = self.gpu.unregister(self.at.start) {
            // A broken context lets go of it when the process ends; no transfer uses it.
            tracing::debug!("Cannot give memory back: {error}");
        }
    }
}

struct Chunk {
    registration: Arc<Registration>,
    used: u64,
}

struct Mapping {
    hold: Arc<Hold>,
    /// By number: a chunk begins at a multiple of [`CHUNK`] of this process's addresses.
    chunks: BTreeMap<u64, Chunk>,
}

#[derive(Default)]
struct State {
    /// By the address of their first byte.
    mappings: BTreeMap<u64, Mapping>,
    count: usize,
    clock: u64,
}

/// Every registration of an engine.
pub(crate) struct Registry {
    gpu: Arc<Gpu>,
    limit: usize,
    state: Mutex<State>,
    adding: Mutex<()>,
    epoch: Instant,
    /// Until when, and when next, it is looked what can go yet.
    until: AtomicU64,
    next: AtomicU64,
}

impl Registry {
    pub(crate) fn new(gpu: &Arc<Gpu>, limit: usize) -> Self {
        let (state, adding, epoch) = (Mutex::default(), Mutex::default(), Instant::now());
        let (until, next) = (AtomicU64::new(0), AtomicU64::new(NEVER));
        Self { gpu: Arc::clone(gpu), limit, state, adding, epoch, until, next }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The registration that a place begins in, and how many bytes of the place are in it. `None` if there is none yet.
    pub(crate) fn find(&self, place: &Place) -> Option<(Arc<Registration>, u64)> {
        let state = &mut *self.lock();
        state.clock += 1;
        let chunk = state.mappings.get_mut(&place.mapping.start)?.chunks.get_mut(&(place.address / CHUNK))?;
        chunk.used = state.clock;
        Some((Arc::clone(&chunk.registration), within(&chunk.registration.at, place)))
    }

    /// As [`Registry::find`]; registers what is not. May block for as long as the kernel needs to give the memory pages.
    pub(crate) fn require(&self, place: &Place) -> Result<(Arc<Registration>, u64), CudaError> {
        // Two that register the same chunk would be one too many.
        let _one_at_a_time = self.adding.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = self.find(place) {
            return Ok(found);
        }
        let known = self.lock().mappings.get(&place.mapping.start).map(|mapping| Arc::clone(&mapping.hold));
        let hold = known.unwrap_or_else(|| Arc::new(Hold(Arc::clone(&place.hold))));
        self.make_room();
        let number = place.address / CHUNK;
        let start = (number * CHUNK).max(place.mapping.start);
        let at = start..number.saturating_add(1).saturating_mul(CHUNK).min(place.mapping.end);
        // SAFETY: the registration holds the mapping.
        unsafe { self.gpu.register(at.clone(), place.is_device) }?;
        let registration = Arc::new(Registration { gpu: Arc::clone(&self.gpu), at, _mapping: Arc::clone(&hold) });
        let len = within(&registration.at, place);
        let state = &mut *self.lock();
        let chunk = Chunk { registration: Arc::clone(&registration), used: state.clock };
        let fresh = || Mapping { hold, chunks: BTreeMap::new() };
        state.mappings.entry(place.mapping.start).or_insert_with(fresh).chunks.insert(number, chunk);
        state.count += 1;
        Ok((registration, len))
    }

    /// Gives up what was used least lately, until there is room for one more, but nothing that a transfer uses: it would be registered again.
    fn make_room(&self) {
        let oldest = || {
            let mut state = self.lock();
            if state.count < self.limit { None } else { state.remove_oldest() }
        };
        // Given back without the lock: it takes a moment.
        while let Some(oldest) = oldest() {
            drop(oldest);
        }
    }

    /// The guest's memory table has changed.
    pub(crate) fn changed(&self) {
        let now = self.now();
        self.until.store(now.saturating_add(LATE), Ordering::Relaxed);
        self.next.store(now.saturating_add(LOOK), Ordering::Relaxed);
        self.sweep();
    }

    /// Gives up what could not go when the table changed, and says when to look again, if that is worth it.
    pub(crate) fn look(&self) -> Option<Duration> {
        let next = self.next.load(Ordering::Relaxed);
        if next == NEVER {
            return None;
        }
        let now = self.now();
        if now < next {
            return Some(Duration::from_nanos(next - now));
        }
        let after = if now < self.until.load(Ordering::Relaxed) { now.saturating_add(LOOK) } else { NEVER };
        if self.next.compare_exchange(next, after, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.sweep();
        }
        (after != NEVER).then_some(Duration::from_nanos(LOOK))
    }

    /// In nanoseconds since it was made.
    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(NEVER)
    }

    /// Gives up what nobody else has mapped any more.
    pub(crate) fn sweep(&self) {
        let mut state = self.lock();
        let is_gone = |mapping: &Mapping| Arc::strong_count(&mapping.hold.0) == 1;
        let gone: Vec<_> = state.mappings.iter().filter(|(_, mapping)| is_gone(mapping)).map(|(at, _)| *at).collect();
        let gone: Vec<_> = gone.into_iter().filter_map(|at| state.remove(at)).collect();
        // Without the lock: it takes a moment.
        drop(state);
        drop(gone);
    }
}

/// Bytes of a place that are in a registration which has its first one.
fn within(at: &Range<u64>, place: &Place) -> u64 {
    place.len.min(at.end - place.address)
}

impl State {
    fn remove(&mut self, start: u64) -> Option<Mapping> {
        let mapping = self.mappings.remove(&start)?;
        self.count -= mapping.chunks.len();
        Some(mapping)
    }

    /// Takes out the one that was used least lately, of those that no transfer uses.
    fn remove_oldest(&mut self) -> Option<Chunk> {
        let all = self.mappings.iter().flat_map(|(at, of)| of.chunks.iter().map(move |(n, chunk)| (*at, *n, chunk)));
        let idle = all.filter(|(_, _, chunk)| Arc::strong_count(&chunk.registration) == 1);
        let (at, number, _) = idle.min_by_key(|(_, _, chunk)| chunk.used)?;
        let mapping = self.mappings.get_mut(&at)?;
        let chunk = mapping.chunks.remove(&number)?;
        if mapping.chunks.is_empty() {
            self.mappings.remove(&at);
        }
        self.count -= 1;
        Some(chunk)
    }
}
