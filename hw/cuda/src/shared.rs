//! What all threads of a [`CudaEngine`](crate::CudaEngine) share: lanes, the book of what is under way, and how a transfer begins and ends.
//!
//! Not here: the engine's face.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use hw_engine::{EngineError, Finished, JobId, MemoryError, Route, Transfer, Work};
use iommu_addr::{ApertureOffset, EndpointId, Location, Segment};

use crate::driver::CudaError;
use crate::engine::Settings;
use crate::lane::{Load, Ride, device_error};
use crate::reach::{Reach, Ready, Unready, Way};
use crate::side::Side;
use crate::ways::Ways;

/// How often the driver is asked whether the context is still good, while something is under way.
const CHECK: Duration = Duration::from_millis(1);
/// Shortest pause between two looks, and the longest one for what should have ended already.
pub(crate) const LOOK: (Duration, Duration) = (Duration::from_micros(5), Duration::from_micros(200));

pub(crate) type Wake = Box<dyn Fn() + Send + Sync>;
pub(crate) type Tell = Box<dyn Fn(&CudaError) + Send + Sync>;

pub(crate) struct Shared {
    /// Of each GPU. First named, first gone: by then nothing is under way in them.
    pub(crate) ways: Vec<Ways>,
    /// One for each GPU, too.
    pub(crate) sides: Vec<Mutex<Side>>,
    pub(crate) reach: Reach,
    pub(crate) settings: Settings,
    pub(crate) book: Mutex<Book>,
    /// There is something for the engine's own thread, or it is over.
    pub(crate) more: Condvar,
    pub(crate) epoch: Instant,
    /// When the contexts were last asked after, in nanoseconds since the epoch.
    pub(crate) checked: AtomicU64,
    pub(crate) lost: OnceLock<CudaError>,
    pub(crate) wake: OnceLock<Wake>,
    pub(crate) tell: Mutex<Option<Tell>>,
}

#[derive(Default)]
pub(crate) struct Book {
    pub(crate) next: u64,
    /// Serial numbers of what is under way.
    pub(crate) running: BTreeSet<u64>,
    /// Flushes that wait for everything before them, by their serial numbers: two threads may note theirs in another order.
    pub(crate) flushes: BTreeMap<u64, JobId>,
    /// What waits for the engine's own thread, by serial numbers.
    pub(crate) waiting: BTreeMap<u64, Transfer>,
    /// That thread ends when nothing waits any more.
    pub(crate) over: bool,
    /// What ended where nobody collects.
    pub(crate) ended: Vec<Finished>,
}

impl Book {
    /// Takes out the flushes that have nothing before them any more.
    fn take_due(&mut self) -> Vec<JobId> {
        let mut due = Vec::new();
        while let Some(first) = self.flushes.first_entry()
            && self.running.first() == Some(first.key())
        {
            self.running.remove(first.key());
            due.push(first.remove());
        }
        due
    }

    /// Takes out what has not begun. False if nothing of that name waits.
    fn give_up(&mut self, job: JobId) -> bool {
        let waiting = self.waiting.iter().map(|(serial, transfer)| (*serial, transfer.job));
        let mut all = waiting.chain(self.flushes.iter().map(|(serial, job)| (*serial, *job)));
        let Some((serial, _)) = all.find(|(_, waits)| *waits == job) else { return false };
        self.waiting.remove(&serial);
        self.flushes.remove(&serial);
        self.running.remove(&serial);
        self.ended.push(Finished::failed(job, EngineError::Aborted));
        true
    }
}

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Which GPU has bytes of a slice, and where.
    pub(crate) fn own_bytes(&self, endpoint: EndpointId, offset: u64, len: usize) -> Result<(usize, u64), EngineError> {
        let at = Location::Aperture { endpoint, offset: ApertureOffset(offset) };
        let missing = MemoryError { at, len: len as u64 };
        let own = self.reach.own(endpoint).ok_or(missing)?;
        let end = offset.checked_add(len as u64).ok_or(missing)?;
        if end > own.slice.len() { Err(missing.into()) } else { Ok((own.gpu, own.slice.base() + offset)) }
    }

    /// Has a GPU's side do something, and waits for it.
    pub(crate) fn on_side(
        &self,
        gpu: usize,
        what: impl FnOnce(&mut Side) -> Result<(), CudaError>,
    ) -> Result<(), EngineError> {
        if self.lost.get().is_some() {
            return Err(EngineError::LOST);
        }
        let answer = lock(&self.sides[gpu]).run(what);
        answer.map_err(|error| {
            let told = device_error(&error);
            self.check(true);
            told
        })
    }

    /// Begins a transfer, or says that it has to wait for the engine's thread.
    pub(crate) fn begin(&self, transfer: &Transfer, serial: u64, may_block: bool) -> Result<(), Unready> {
        match &transfer.work {
            Work::Copy { src, dst, route: Route::Direct } => {
                let ready = self.reach.copy(transfer.initiator, dst, src, may_block)?;
                match ready.overlaps() {
                    false => self.begin_copy(transfer.job, serial, ready),
                    true if may_block => self.shift(transfer.job, serial, ready)?,
                    true => return Err(Unready::Unregistered),
                }
                Ok(())
            }
            Work::Copy { route: Route::Staged, .. } => Err(Unready::Error(EngineError::Device { code: u32::MAX })),
            Work::Fill { dst, pattern } => self.begin_fill(transfer, dst, *pattern, serial, may_block),
            Work::Kernel { .. } => Err(Unready::Error(EngineError::NO_KERNELS)),
            Work::Atomic { .. } if !may_block => Err(Unready::Unregistered),
            Work::Atomic { at, atomic } => self.atomic(transfer, *at, *atomic, serial),
            Work::Flush => {
                lock(&self.book).flushes.insert(serial, transfer.job);
                Ok(())
            }
        }
    }

    fn begin_copy(&self, job: JobId, serial: u64, ready: Ready) {
        let Ready { pieces, holds, way, gpu, len } = ready;
        let (ways, way) = (&self.ways[gpu], way.unwrap_or(Way::Local));
        let ride = Ride { job, serial, bytes: len, result: Ok(()), _holds: holds };
        // SAFETY: `Reach` gave out addresses of slices that the GPU reaches, which live as long as the engine, and of what the ride holds.
        if let Err(error) = unsafe { ways.begin(way, ride, Load::Copies(pieces)) } {
            self.lose(gpu, error);
        }
    }

    /// Makes a copy whose ends overlap.
    fn shift(&self, job: JobId, serial: u64, Ready { pieces, gpu, len, .. }: Ready) -> Result<(), Unready> {
        for piece in pieces {
            // SAFETY: as in `begin_copy`; it has ended when this returns.
            self.on_side(gpu, |side| unsafe { side.shift(piece) }).map_err(Unready::Error)?;
        }
        self.end_now(serial, Finished { job, bytes: len, result: Ok(()), raised: false, value: 0 });
        Ok(())
    }

    fn begin_fill(
        &self,
        transfer: &Transfer,
        dst: &[Segment],
        pattern: u64,
        serial: u64,
        may_block: bool,
    ) -> Result<(), Unready> {
        let [byte, rest @ ..] = pattern.to_le_bytes();
        let is_one_byte = rest.iter().all(|other| *other == byte);
        if !is_one_byte && !may_block {
            return Err(Unready::Unregistered);
        }
        let Some(gpu) = self.reach.filler(transfer.initiator, dst) else {
            return if may_block {
                self.fill_apart(transfer, dst, pattern, serial)
            } else {
                Err(Unready::Unregistered)
            };
        };
        let (ready, places) = self.reach.places(gpu, dst, may_block)?;
        let Ready { holds, len, .. } = ready;
        if is_one_byte {
            let ride = Ride { job: transfer.job, serial, bytes: len, result: Ok(()), _holds: holds };
            // SAFETY: as in `begin_copy`.
            if let Err(error) = unsafe { self.ways[gpu].begin(Way::Local, ride, Load::Set { byte, places }) } {
                self.lose(gpu, error);
            }
            return Ok(());
        }
        // SAFETY: as in `begin_copy`, with `holds` kept until it has ended.
        self.on_side(gpu, |side| unsafe { side.fill(&places, pattern) }).map_err(Unready::Error)?;
        drop(holds);
        self.end_now(serial, Finished { job: transfer.job, bytes: len, result: Ok(()), raised: false, value: 0 });
        Ok(())
    }

    /// Fills places that no GPU reaches all of, each by one that does.
    fn fill_apart(&self, transfer: &Transfer, dst: &[Segment], pattern: u64, serial: u64) -> Result<(), Unready> {
        let (mut parts, mut len) = (Vec::new(), 0);
        for segment in dst {
            let (missing, place) = (MemoryError { at: segment.at, len: segment.len }, std::slice::from_ref(segment));
            let gpu = self.reach.filler(transfer.initiator, place);
            let gpu = gpu.ok_or(Unready::Error(missing.into()))?;
            // It goes on where the place before has ended.
            let pattern = pattern.rotate_right(8 * u32::try_from(len % 8).unwrap_or(0));
            parts.push((gpu, pattern, self.reach.places(gpu, place, true)?));
            len += segment.len;
        }
        for (gpu, pattern, (_ready, places)) in &parts {
            // SAFETY: as in `begin_copy`, with what `parts` holds.
            self.on_side(*gpu, |side| unsafe { side.fill(places, *pattern) }).map_err(Unready::Error)?;
        }
        self.end_now(serial, Finished { job: transfer.job, bytes: len, result: Ok(()), raised: false, value: 0 });
        Ok(())
    }

    /// Ends a transfer that is in no lane. Only the engine's own thread has such.
    pub(crate) fn end_now(&self, serial: u64, finished: Finished) {
        let mut book = lock(&self.book);
        book.running.remove(&serial);
        book.ended.push(finished);
    }

    /// Ends what waits. What a GPU has begun ends by itself, in milliseconds.
    pub(crate) fn give_up(&self, job: JobId) {
        let has_ended = lock(&self.book).give_up(job);
        if has_ended {
            self.wake();
        }
    }

    fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }

    /// What the engine's own thread does next; waits for it. `None` if it is over.
    fn next(&self) -> Option<(u64, Transfer)> {
        let mut book = lock(&self.book);
        loop {
            let first = book.waiting.pop_first();
            if first.is_some() || book.over {
                return first;
            }
            book = self.more.wait(book).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The engine's own thread.
    pub(crate) fn work_off(&self) {
        while let Some((serial, transfer)) = self.next() {
            let begun = match self.lost.get() {
                None => self.begin(&transfer, serial, true),
                Some(_) => Err(Unready::Error(EngineError::LOST)),
            };
            if let Err(unready) = begun {
                let error = match unready {
                    Unready::Error(error) => error,
                    Unready::Unregistered => EngineError::Aborted,
                };
                self.end_now(serial, Finished::failed(transfer.job, error));
            }
            self.ring();
            // What has gone while it was registered was not given up with the rest.
            self.reach.registry().sweep();
            // Whoever looks after the engine did not know when to look.
            self.wake();
        }
    }

    /// Notes that the context of a GPU is broken, and ends everything there. What other GPUs have begun they end themselves.
    fn lose(&self, gpu: usize, error: CudaError) {
        let told = device_error(&error);
        if let Err(again) = self.lost.set(error) {
            tracing::debug!("A GPU's context is still broken: {again}");
        } else if let Some(error) = self.lost.get() {
            tracing::error!("A GPU's context is broken, and what was under way is lost: {error}");
        }
        // Also what another thread has begun since the last time.
        let mut rides = Vec::new();
        self.ways[gpu].give_up(told, &mut rides);
        self.note(rides);
        self.tell_lost();
        self.wake();
    }

    /// Tells whoever wants to know that a context is broken, once.
    pub(crate) fn tell_lost(&self) {
        let Some(error) = self.lost.get() else { return };
        let tell = lock(&self.tell).take();
        if let Some(tell) = tell {
            tell(error);
        }
    }

    fn note(&self, rides: Vec<Ride>) {
        if rides.is_empty() {
            return;
        }
        let mut book = lock(&self.book);
        for Ride { job, serial, bytes, result, .. } in &rides {
            book.running.remove(serial);
            book.ended.push(Finished { job: *job, bytes: *bytes, result: *result, raised: false, value: 0 });
        }
        drop(book);
        // What they held is given back without the lock, and may take a moment.
        drop(rides);
    }

    /// Asks whether the contexts are still good, if that was not done lately.
    fn check(&self, now: bool) {
        let nanos = u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let last = self.checked.load(Ordering::Relaxed);
        let is_due = Duration::from_nanos(nanos.saturating_sub(last)) >= CHECK;
        let is_first = || self.checked.compare_exchange(last, nanos, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !(now || is_due && is_first()) {
            return;
        }
        for (gpu, ways) in self.ways.iter().enumerate() {
            if let Err(error) = ways.check() {
                self.lose(gpu, error);
            }
        }
    }

    pub(crate) fn ring(&self) {
        for (gpu, ways) in self.ways.iter().enumerate() {
            // SAFETY: as in `begin_copy`.
            if let Err(error) = unsafe { ways.ring() } {
                self.lose(gpu, error);
            }
        }
    }

    /// Ends flushes that have nothing before them any more.
    fn end_flushes(&self) {
        let due = lock(&self.book).take_due();
        if due.is_empty() {
            return;
        }
        let flushed = match self.lost.get() {
            Some(_) => Err(EngineError::LOST),
            None => self.flush().map_err(|error| device_error(&error)),
        };
        let ends = due.into_iter().map(|job| Finished { job, bytes: 0, result: flushed, raised: false, value: 0 });
        lock(&self.book).ended.extend(ends);
    }

    /// What has ended is visible to this machine's processors and to the GPU; what others wrote into its memory is made so.
    fn flush(&self) -> Result<(), CudaError> {
        self.ways.iter().try_for_each(|ways| ways.gpu().flush_writes())
    }

    /// Collects ends, and says when it is worth looking again.
    pub(crate) fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        self.ring();
        let mut rides = Vec::new();
        let mut soonest = None;
        for (gpu, ways) in self.ways.iter().enumerate() {
            match ways.collect(&mut rides) {
                Ok(due) => soonest = soonest.into_iter().chain(due).min(),
                Err(error) => self.lose(gpu, error),
            }
        }
        self.note(rides);
        if soonest.is_some() {
            self.check(false);
        }
        self.end_flushes();
        out.append(&mut lock(&self.book).ended);
        let soonest = soonest?;
        if self.settings.spin {
            return Some(Duration::ZERO);
        }
        let now = Instant::now();
        let late = now.saturating_duration_since(soonest);
        Some(if late.is_zero() { (soonest - now).max(LOOK.0) } else { (late / 4).clamp(LOOK.0, LOOK.1) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flushes_that_are_noted_in_another_order_than_they_were_submitted_in_all_end() {
        let mut book = Book { running: [3, 4, 5].into(), ..Book::default() };
        for serial in [5, 4] {
            book.flushes.insert(serial, JobId(serial));
        }
        assert_eq!(book.take_due(), [], "one is under way before them");
        book.running.remove(&3);
        assert_eq!(book.take_due(), [JobId(4), JobId(5)]);
        assert!(book.running.is_empty() && book.flushes.is_empty());
    }
}
