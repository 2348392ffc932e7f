//! What all threads of a [`CudaEngine`](crate::CudaEngine) share: lanes, the book of what is in none, and how a transfer begins and ends.
//!
//! Not here: the engine's face.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use hw_engine::jobs::Apart;
use hw_engine::{EngineError, Finished, JobId, MemoryError, Route, Transfer, Work};
use iommu_addr::{ApertureOffset, EndpointId, Location, Segment};

use crate::book::{Book, Flush};
use crate::driver::CudaError;
use crate::engine::Settings;
use crate::lane::{Load, Ride, device_error};
use crate::reach::{Reach, Ready, Unready, Way};
use crate::side::Side;
use crate::ways::Ways;

/// How often the driver is asked whether the context is still good, while something is under way.
pub(crate) const CHECK: Duration = Duration::from_millis(1);
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
    /// Transfers that were submitted and have not ended.
    pub(crate) under_way: Apart<AtomicUsize>,
    book: Mutex<Book>,
    /// What [`Book::told`] says, for a look without the lock.
    told: AtomicUsize,
    /// There is something for the engine's own thread, or it is over.
    pub(crate) more: Condvar,
    pub(crate) epoch: Instant,
    /// When the contexts were last asked after, in nanoseconds since the epoch.
    pub(crate) checked: AtomicU64,
    pub(crate) lost: OnceLock<CudaError>,
    pub(crate) wake: OnceLock<Wake>,
    pub(crate) tell: Mutex<Option<Tell>>,
}

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(ways: Vec<Ways>, sides: Vec<Mutex<Side>>, reach: Reach, settings: Settings) -> Self {
        Self {
            ways,
            sides,
            reach,
            settings,
            under_way: Apart(AtomicUsize::new(0)),
            book: Mutex::default(),
            told: AtomicUsize::new(0),
            more: Condvar::new(),
            epoch: Instant::now(),
            checked: AtomicU64::new(0),
            lost: OnceLock::new(),
            wake: OnceLock::new(),
            tell: Mutex::default(),
        }
    }

    fn with_book<T>(&self, change: impl FnOnce(&mut Book) -> T) -> T {
        let mut book = lock(&self.book);
        let answer = change(&mut book);
        self.told.store(book.told(), Ordering::Release);
        answer
    }

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

    /// The same for a transfer, on the engine's own thread: nobody is told of an end before the GPU has nothing of it any more. One that is lost may never say so.
    fn to_the_end(&self, gpu: usize, what: impl FnOnce(&mut Side) -> Result<(), CudaError>) -> Result<(), Unready> {
        if self.lost.get().is_some() {
            return Err(Unready::Error(EngineError::LOST));
        }
        self.on_side(gpu, what).map_err(|error| {
            while !lock(&self.sides[gpu]).is_quiet() {
                sleep(CHECK);
            }
            Unready::Error(error)
        })
    }

    /// Begins a transfer, or says that it has to wait for the engine's thread.
    pub(crate) fn begin(&self, transfer: &Transfer, may_block: bool) -> Result<(), Unready> {
        match &transfer.work {
            Work::Copy { src, dst, route: Route::Direct } => {
                let ready = self.reach.copy(transfer.initiator, dst, src, may_block)?;
                match ready.overlaps() {
                    false => self.begin_copy(transfer.job, ready),
                    true if may_block => self.shift(transfer.job, ready)?,
                    true => return Err(Unready::Unregistered),
                }
                Ok(())
            }
            Work::Copy { route: Route::Staged, .. } => Err(Unready::Error(EngineError::Device { code: u32::MAX })),
            Work::Fill { dst, pattern } => self.begin_fill(transfer, dst, *pattern, may_block),
            Work::Kernel { .. } => Err(Unready::Error(EngineError::NO_KERNELS)),
            Work::Atomic { at, atomic } => self.begin_atomic(transfer, *at, *atomic),
            // Behind what waits for the thread, too.
            Work::Flush if !may_block && lock(&self.book).is_waited_for() => Err(Unready::Unregistered),
            Work::Flush => {
                self.begin_flush(transfer.job);
                Ok(())
            }
        }
    }

    fn begin_flush(&self, job: JobId) {
        let mut behind = Vec::with_capacity(self.ways.len());
        for (gpu, ways) in self.ways.iter().enumerate() {
            // SAFETY: as in `begin_copy`.
            match unsafe { ways.mark() } {
                Ok(marks) => behind.push(marks),
                // Nothing is in its lanes any more.
                Err(error) => {
                    self.lose(gpu, error);
                    behind.push(Vec::new());
                }
            }
        }
        self.with_book(|book| book.flushes.push(Flush { job, behind }));
    }

    fn begin_copy(&self, job: JobId, ready: Ready) {
        let Ready { pieces, holds, way, gpu, len } = ready;
        let (ways, way) = (&self.ways[gpu], way.unwrap_or(Way::Local));
        let ride = Ride::new(job, len, holds);
        // SAFETY: `Reach` gave out addresses of slices that the GPU reaches, which live as long as the engine, and of what the ride holds.
        if let Err(error) = unsafe { ways.begin(way, ride, Load::Copies(pieces)) } {
            self.lose(gpu, error);
        }
    }

    /// Makes a copy whose ends overlap.
    fn shift(&self, job: JobId, Ready { pieces, gpu, len, .. }: Ready) -> Result<(), Unready> {
        for piece in pieces {
            // SAFETY: as in `begin_copy`; it has ended when this returns.
            self.to_the_end(gpu, |side| unsafe { side.shift(piece) })?;
        }
        self.end_now(Finished::moved(job, Ok(len)));
        Ok(())
    }

    fn begin_fill(&self, transfer: &Transfer, dst: &[Segment], pattern: u64, may_block: bool) -> Result<(), Unready> {
        let [byte, rest @ ..] = pattern.to_le_bytes();
        let is_one_byte = rest.iter().all(|other| *other == byte);
        if !is_one_byte && !may_block {
            return Err(Unready::Unregistered);
        }
        let Some(gpu) = self.reach.filler(transfer.initiator, dst) else {
            return if may_block { self.fill_apart(transfer, dst, pattern) } else { Err(Unready::Unregistered) };
        };
        let (ready, places) = self.reach.places(gpu, dst, may_block)?;
        let Ready { holds, len, .. } = ready;
        if is_one_byte {
            let ride = Ride::new(transfer.job, len, holds);
            // SAFETY: as in `begin_copy`.
            if let Err(error) = unsafe { self.ways[gpu].begin(Way::Local, ride, Load::Set { byte, places }) } {
                self.lose(gpu, error);
            }
            return Ok(());
        }
        // SAFETY: as in `begin_copy`, with `holds` kept until it has ended.
        self.to_the_end(gpu, |side| unsafe { side.fill(&places, pattern) })?;
        drop(holds);
        self.end_now(Finished::moved(transfer.job, Ok(len)));
        Ok(())
    }

    /// Fills places that no GPU reaches all of, each by one that does.
    fn fill_apart(&self, transfer: &Transfer, dst: &[Segment], pattern: u64) -> Result<(), Unready> {
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
            self.to_the_end(*gpu, |side| unsafe { side.fill(places, *pattern) })?;
        }
        self.end_now(Finished::moved(transfer.job, Ok(len)));
        Ok(())
    }

    /// Ends a transfer that is in no lane.
    pub(crate) fn end_now(&self, finished: Finished) {
        self.with_book(|book| book.ended.push(finished));
        self.under_way.0.fetch_sub(1, Ordering::AcqRel);
    }

    /// Leaves a transfer to the engine's own thread.
    pub(crate) fn leave(&self, transfer: Transfer) {
        self.with_book(|book| book.waiting.push_back(transfer));
        self.more.notify_one();
    }

    /// The engine's own thread ends when nothing waits for it any more.
    pub(crate) fn close(&self) {
        self.with_book(|book| book.over = true);
        self.more.notify_one();
    }

    /// Ends what waits, and has the engine's own thread register no more memory for what it has. What a GPU has begun ends by itself, in milliseconds.
    pub(crate) fn give_up(&self, job: JobId) {
        let waited = self.with_book(|book| {
            if book.busy == Some(job) {
                self.reach.give_up();
            }
            book.give_up(job)
        });
        if waited {
            self.under_way.0.fetch_sub(1, Ordering::AcqRel);
            self.wake();
        }
    }

    pub(crate) fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }

    /// What the engine's own thread does next; waits for it. `None` if it is over.
    fn next(&self) -> Option<Transfer> {
        let mut book = lock(&self.book);
        loop {
            let first = book.waiting.pop_front();
            book.busy = first.as_ref().map(|transfer| transfer.job);
            self.reach.go_on();
            if first.is_some() || book.over {
                return first;
            }
            book = self.more.wait(book).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The engine's own thread.
    pub(crate) fn work_off(&self) {
        while let Some(transfer) = self.next() {
            let begun = match self.lost.get() {
                None => self.begin(&transfer, true),
                Some(_) => Err(Unready::Error(EngineError::LOST)),
            };
            if let Err(unready) = begun {
                let error = match unready {
                    Unready::Error(error) => error,
                    Unready::Unregistered => EngineError::Aborted,
                };
                self.end_now(Finished::failed(transfer.job, error));
            }
            self.ring();
            // What has gone while it was registered was not given up with the rest.
            self.reach.registry().sweep();
            // Whoever looks after the engine did not know when to look.
            self.wake();
        }
    }

    /// Notes that the context of a GPU is broken. What it has begun, and what other GPUs have, ends as its lane says, or not before this process does.
    pub(crate) fn lose(&self, gpu: usize, error: CudaError) {
        let told = device_error(&error);
        if let Err(again) = self.lost.set(error) {
            tracing::debug!("A GPU's context is still broken: {again}");
        } else if let Some(error) = self.lost.get() {
            tracing::error!("A GPU's context is broken, and what was under way is lost: {error}");
        }
        let mut rides = Vec::new();
        self.ways[gpu].break_off(told, &mut rides);
        rides.into_iter().for_each(|ride| self.end_now(ride.end()));
        // Nor does what waits for the engine's own thread, which may wait for the GPU.
        let waiting = self.with_book(|book| std::mem::take(&mut book.waiting));
        waiting.into_iter().for_each(|transfer| self.end_now(Finished::failed(transfer.job, EngineError::LOST)));
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

    /// Asks whether the contexts are still good, if that was not done lately.
    fn check(&self, now: bool) {
        let nanos = u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let last = self.checked.load(Ordering::Relaxed);
        let is_due = Duration::from_nanos(nanos.saturating_sub(last)) >= CHECK;
        let is_first = || self.checked.compare_exchange(last, nanos, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !(now || is_due && is_first()) {
            return;
        }
        for (gpu, ways) in self.ways.iter().enumerate().filter(|(_, ways)| !ways.is_broken()) {
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

    /// Collects what ended in no lane, and flushes that have nothing before them any more.
    fn collect_told(&self, out: &mut Vec<Finished>) {
        if self.told.load(Ordering::Acquire) == 0 {
            return;
        }
        let due: Vec<_> = self.with_book(|book| {
            out.append(&mut book.ended);
            let is_lost = self.lost.get().is_some();
            let has_passed =
                |flush: &Flush| self.ways.iter().zip(&flush.behind).all(|(ways, marks)| ways.have_passed(marks));
            let is_due = |flush: &mut Flush| is_lost || has_passed(flush);
            book.flushes.extract_if(.., is_due).collect()
        });
        if due.is_empty() {
            return;
        }
        let flushed = match self.lost.get() {
            Some(_) => Err(EngineError::LOST),
            None => self.flush().map_err(|error| device_error(&error)),
        };
        self.under_way.0.fetch_sub(due.len(), Ordering::AcqRel);
        out.extend(due.iter().map(|flush| Finished {
            job: flush.job,
            bytes: 0,
            result: flushed,
            raised: false,
            value: 0,
        }));
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
            if ways.is_broken() {
                // What another thread has brought since.
                ways.break_off(EngineError::LOST, &mut rides);
            }
            match ways.collect(&mut rides) {
                Ok(due) => soonest = soonest.into_iter().chain(due).min(),
                Err(error) => self.lose(gpu, error),
            }
        }
        if !rides.is_empty() {
            self.under_way.0.fetch_sub(rides.len(), Ordering::AcqRel);
            out.extend(rides.into_iter().map(Ride::end));
        }
        if soonest.is_some() {
            self.check(false);
        }
        self.collect_told(out);
        let registry = self.reach.registry();
        let Some(soonest) = soonest else { return registry.look() };
        if self.settings.spin {
            return Some(Duration::ZERO);
        }
        let now = Instant::now();
        let late = now.saturating_duration_since(soonest);
        let next = if late.is_zero() { (soonest - now).max(LOOK.0) } else { (late / 4).clamp(LOOK.0, LOOK.1) };
        registry.look().into_iter().chain([next]).min()
    }
}
