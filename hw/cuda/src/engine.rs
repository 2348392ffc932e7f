//! [`CudaEngine`]: every GPU slice of one tenant, and the engines that reach them.
//!
//! A transfer becomes copies in one lane: those that are small are gathered until the doorbell rings, and begin together; larger ones begin at once. A lane
//! says when it is worth looking whether something has ended, so nobody spins for that unless it was asked for. Memory of this process that no GPU has
//! reached yet is registered first, on a thread of the engine's, and so are fills with more than one byte done there.
//!
//! The driver's errors that stay break the context: then every transfer ends with an error, and the engine is good for nothing more. Its process has
//! to make another one; no other process is concerned.
//!
//! Not here: copies of which no GPU reaches both ends, kernels, rights.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hw_engine::{
    DmaEngine, EngineCaps, EngineError, Finished, JobId, Memory, MemoryError, Route, Submit, Transfer, Work,
};
use iommu_addr::{ApertureOffset, EndpointId, Location, Segment};

use crate::driver::CudaError;
use crate::gpu::Gpu;
use crate::lane::{Lane, Load, Ride, device_error};
use crate::pinned::Pinned;
use crate::reach::{Own, Reach, Ready, Unready, Way};
use crate::registry::MAX_CHUNKS;
use crate::side::Side;
use crate::slice::Slice;

/// Longest transfer in bytes: 5 ms of a PCIe 5.0 link, beside which the time between two of them is nothing.
const MAX_TRANSFER: u64 = 256 << 20;
/// Transfers under way.
const DEPTH: usize = 1024;
/// Copies of a small transfer.
const SMALL_PIECES: usize = 16;
/// Bytes a second between a GPU and this process's memory, and within a GPU, as an H200 has them: what a first guess of an end is made of.
const LINK: u64 = 54_000_000_000;
const MEMORY: u64 = 2_000_000_000_000;
/// How often the driver is asked whether the context is still good, while something is under way.
const CHECK: Duration = Duration::from_millis(1);
/// Shortest pause between two looks, and the longest one for what should have ended already.
const LOOK: (Duration, Duration) = (Duration::from_micros(5), Duration::from_micros(200));
/// Lanes of a GPU: small transfers, out, in, local.
const LANES: usize = 4;

/// The device's code for a context that is broken.
const LOST: u32 = 0xffff_0003;
/// For a kernel: this engine starts none.
const NO_KERNELS: u32 = 0xffff_0001;

/// Runs first thing in the thread of an engine.
pub type ThreadHook = Arc<dyn Fn() + Send + Sync>;

type Wake = Box<dyn Fn() + Send + Sync>;
type Tell = Box<dyn Fn(&CudaError) + Send + Sync>;

/// How an engine works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whoever looks after the engine looks for ends without a pause. Costs a processor while something is under way.
    pub spin: bool,
    /// Transfers of at most so many bytes are gathered to begin together.
    pub gather: u64,
    /// Most chunks of 64 MiB of this process's memory that are registered at a time.
    pub chunks: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { spin: false, gather: 64 << 10, chunks: MAX_CHUNKS }
    }
}

/// Every GPU slice of a tenant. See the module.
pub struct CudaEngine {
    shared: Arc<Shared>,
    slow: Option<(Sender<Slow>, JoinHandle<()>)>,
}

/// Work for the engine's own thread.
struct Slow {
    transfer: Transfer,
    serial: u64,
}

struct Shared {
    /// Of each GPU. First named, first gone: by then nothing is under way in them.
    lanes: Vec<[Lane; LANES]>,
    /// One for each GPU, too.
    sides: Vec<Mutex<Side>>,
    reach: Reach,
    settings: Settings,
    book: Mutex<Book>,
    /// Small transfers that wait for the doorbell.
    gathered: AtomicUsize,
    epoch: Instant,
    /// When the contexts were last asked after, in nanoseconds since the epoch.
    checked: AtomicU64,
    lost: OnceLock<CudaError>,
    wake: OnceLock<Wake>,
    tell: OnceLock<Tell>,
}

#[derive(Default)]
struct Book {
    next: u64,
    /// Serial numbers of what is under way.
    running: BTreeSet<u64>,
    /// Flushes that wait for everything before them.
    flushes: VecDeque<(u64, JobId)>,
    /// What ended where nobody collects.
    ended: Vec<Finished>,
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CudaEngine {
    /// An engine over slices, of one GPU or several, and `memory`, in which there is nothing of them. `hook` runs first thing in its thread.
    ///
    /// # Errors
    /// What the driver says, or when there is no thread.
    ///
    /// # Panics
    /// Without a slice.
    pub fn new(
        slices: Vec<(EndpointId, Slice)>,
        memory: Arc<dyn Memory>,
        settings: Settings,
        hook: Option<ThreadHook>,
    ) -> Result<Self, CudaError> {
        let mut gpus: Vec<Arc<Gpu>> = Vec::new();
        let mut owns = HashMap::new();
        for (endpoint, slice) in slices {
            let known = gpus.iter().position(|gpu| gpu.is_same(slice.gpu()));
            let gpu = known.unwrap_or_else(|| {
                gpus.push(Arc::clone(slice.gpu()));
                gpus.len() - 1
            });
            owns.insert(endpoint, Own { slice, gpu });
        }
        let words = Arc::new(Pinned::new(&gpus[0], 4096 * gpus.len().div_ceil(64))?);
        let mut lanes = Vec::new();
        for (number, gpu) in gpus.iter().enumerate() {
            // A word each in a cache line of its own.
            let lane = |index, speed| Lane::new(gpu, &words, (number * LANES + index) * 16, speed);
            lanes.push([lane(0, LINK)?, lane(1, LINK)?, lane(2, LINK)?, lane(3, MEMORY)?]);
        }
        let sides = gpus.iter().map(|gpu| Ok(Mutex::new(Side::new(gpu)?))).collect::<Result<_, CudaError>>()?;
        let reach = Reach::new(owns, &gpus, memory, settings.chunks.max(1))?;
        let shared = Arc::new(Shared {
            lanes,
            sides,
            reach,
            settings,
            book: Mutex::default(),
            gathered: AtomicUsize::new(0),
            epoch: Instant::now(),
            checked: AtomicU64::new(0),
            lost: OnceLock::new(),
            wake: OnceLock::new(),
            tell: OnceLock::new(),
        });
        let (sender, receiver) = channel();
        let work = Arc::clone(&shared);
        let body = move || {
            if let Some(hook) = hook {
                hook();
            }
            work.work_off(&receiver);
        };
        let thread = thread::Builder::new().name("cuda".into()).spawn(body);
        let thread = thread.map_err(|source| CudaError::Host { step: "start a thread for a GPU's engine", source })?;
        Ok(Self { shared, slow: Some((sender, thread)) })
    }

    /// To be called when the memory that the engine was made over has changed: lets go of what nobody has mapped any more.
    pub fn memory_changed(&self) {
        self.shared.reach.registry().sweep();
    }

    /// `tell` is called once, on any thread, when a context is broken.
    pub fn on_lost(&self, tell: Box<dyn Fn(&CudaError) + Send + Sync>) {
        // Set once, as it is asked for once.
        let _ = self.shared.tell.set(tell);
        if let (Some(error), Some(tell)) = (self.shared.lost.get(), self.shared.tell.get()) {
            tell(error);
        }
    }

    /// Whether an endpoint's memory is one of the slices.
    pub fn owns(&self, endpoint: EndpointId) -> bool {
        self.shared.reach.own(endpoint).is_some()
    }

    /// Reads a slice. Blocks.
    ///
    /// # Errors
    /// Where there are no such bytes, or the context is broken.
    pub fn read_own(&self, endpoint: EndpointId, offset: u64, into: &mut [u8]) -> Result<(), EngineError> {
        let (gpu, at) = self.shared.own_bytes(endpoint, offset, into.len())?;
        // SAFETY: the bytes are a slice's of that GPU, and the slice lives as long as the engine.
        self.shared.on_side(gpu, |side| unsafe { side.read(at, into) })
    }

    /// Writes a slice. Blocks.
    ///
    /// # Errors
    /// As for [`CudaEngine::read_own`].
    pub fn write_own(&self, endpoint: EndpointId, offset: u64, from: &[u8]) -> Result<(), EngineError> {
        let (gpu, at) = self.shared.own_bytes(endpoint, offset, from.len())?;
        // SAFETY: as in `read_own`.
        self.shared.on_side(gpu, |side| unsafe { side.write(at, from) })
    }
}

impl Shared {
    /// Which GPU has bytes of a slice, and where.
    fn own_bytes(&self, endpoint: EndpointId, offset: u64, len: usize) -> Result<(usize, u64), EngineError> {
        let at = Location::Aperture { endpoint, offset: ApertureOffset(offset) };
        let missing = MemoryError { at, len: len as u64 };
        let own = self.reach.own(endpoint).ok_or(missing)?;
        let end = offset.checked_add(len as u64).ok_or(missing)?;
        if end > own.slice.len() { Err(missing.into()) } else { Ok((own.gpu, own.slice.base() + offset)) }
    }

    fn on_side(&self, gpu: usize, what: impl FnOnce(&mut Side) -> Result<(), CudaError>) -> Result<(), EngineError> {
        if self.lost.get().is_some() {
            return Err(EngineError::Device { code: LOST });
        }
        let answer = what(&mut lock(&self.sides[gpu]));
        answer.map_err(|error| {
            let told = device_error(&error);
            self.check(true);
            told
        })
    }

    /// Begins a transfer, or says that it has to wait for the engine's thread.
    fn begin(&self, transfer: &Transfer, serial: u64, may_block: bool) -> Result<(), Unready> {
        match &transfer.work {
            Work::Copy { src, dst, route: Route::Direct } => {
                let ready = self.reach.copy(transfer.initiator, dst, src, may_block)?;
                self.begin_copy(transfer.job, serial, ready);
                Ok(())
            }
            Work::Copy { route: Route::Staged, .. } => Err(Unready::Error(EngineError::Device { code: u32::MAX })),
            Work::Fill { dst, pattern } => self.begin_fill(transfer, dst, *pattern, serial, may_block),
            Work::Kernel { .. } => Err(Unready::Error(EngineError::Device { code: NO_KERNELS })),
            Work::Flush => {
                lock(&self.book).flushes.push_back((serial, transfer.job));
                Ok(())
            }
        }
    }

    fn begin_copy(&self, job: JobId, serial: u64, ready: Ready) {
        let Ready { pieces, holds, way, gpu, len } = ready;
        let [small, out, into, local] = &self.lanes[gpu];
        let ride = Ride { job, serial, bytes: len, result: Ok(()), _holds: holds };
        if len <= self.settings.gather && pieces.len() <= SMALL_PIECES {
            small.gather(ride, pieces);
            self.gathered.fetch_add(1, Ordering::Release);
            return;
        }
        let lane = match way {
            Some(Way::Out) => out,
            Some(Way::In) => into,
            Some(Way::Local) | None => local,
        };
        // SAFETY: `Reach` gave out addresses of slices that the GPU reaches, which live as long as the engine, and of what the ride holds.
        if let Err(error) = unsafe { lane.begin(ride, &Load::Copies(pieces)) } {
            self.lose(error);
        }
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
        let (ready, places) = self.reach.places(transfer.initiator, dst, may_block)?;
        let Ready { holds, gpu, len, .. } = ready;
        if is_one_byte {
            let ride = Ride { job: transfer.job, serial, bytes: len, result: Ok(()), _holds: holds };
            let [.., local] = &self.lanes[gpu];
            // SAFETY: as in `begin_copy`.
            if let Err(error) = unsafe { local.begin(ride, &Load::Set { byte, places }) } {
                self.lose(error);
            }
            return Ok(());
        }
        // SAFETY: as in `begin_copy`, with `holds` kept until it has ended.
        self.on_side(gpu, |side| unsafe { side.fill(&places, pattern) }).map_err(Unready::Error)?;
        drop(holds);
        self.end_now(serial, Finished { job: transfer.job, bytes: len, result: Ok(()), raised: false });
        Ok(())
    }

    /// Ends a transfer that is in no lane.
    fn end_now(&self, serial: u64, finished: Finished) {
        let mut book = lock(&self.book);
        book.running.remove(&serial);
        book.ended.push(finished);
        drop(book);
        self.wake();
    }

    fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }

    /// The engine's own thread.
    fn work_off(&self, receiver: &Receiver<Slow>) {
        while let Ok(Slow { transfer, serial }) = receiver.recv() {
            let begun = match self.lost.get() {
                None => self.begin(&transfer, serial, true),
                Some(_) => Err(Unready::Error(EngineError::Device { code: LOST })),
            };
            if let Err(unready) = begun {
                let error = match unready {
                    Unready::Error(error) => error,
                    Unready::Unregistered => EngineError::Aborted,
                };
                self.end_now(serial, Finished { job: transfer.job, bytes: 0, result: Err(error), raised: false });
            }
            // Whoever looks after the engine did not know when to look.
            self.wake();
        }
    }

    /// Notes that a context is broken, and ends everything.
    fn lose(&self, error: CudaError) {
        let told = device_error(&error);
        let is_news = self.lost.set(error).is_ok();
        // Also what another thread has begun since the last time.
        let mut rides = Vec::new();
        self.lanes.iter().flatten().for_each(|lane| lane.give_up(told, &mut rides));
        self.note(rides);
        if let Some(error) = self.lost.get().filter(|_| is_news) {
            tracing::error!("A GPU's context is broken, and what was under way is lost: {error}");
            if let Some(tell) = self.tell.get() {
                tell(error);
            }
        }
        self.wake();
    }

    fn note(&self, rides: Vec<Ride>) {
        if rides.is_empty() {
            return;
        }
        let mut book = lock(&self.book);
        for Ride { job, serial, bytes, result, .. } in &rides {
            book.running.remove(serial);
            book.ended.push(Finished { job: *job, bytes: *bytes, result: *result, raised: false });
        }
        drop(book);
        // What they held is given back without the lock, and may take a moment.
        drop(rides);
    }

    /// Asks whether the contexts are still good, if that was not done lately.
    fn check(&self, now: bool) {
        let nanos = u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let last = self.checked.load(Ordering::Relaxed);
        let is_due = now || Duration::from_nanos(nanos.saturating_sub(last)) >= CHECK;
        if !is_due || self.checked.compare_exchange(last, nanos, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        for [lane, ..] in &self.lanes {
            if let Err(error) = lane.check() {
                return self.lose(error);
            }
        }
    }

    fn ring(&self) {
        if self.gathered.load(Ordering::Acquire) == 0 || self.gathered.swap(0, Ordering::AcqRel) == 0 {
            return;
        }
        for [small, ..] in &self.lanes {
            // SAFETY: as in `begin_copy`.
            if let Err(error) = unsafe { small.doorbell() } {
                self.lose(error);
            }
        }
    }

    /// Ends flushes that have nothing before them any more.
    fn end_flushes(&self) {
        let mut due = Vec::new();
        let mut book = lock(&self.book);
        while let Some((serial, job)) = book.flushes.front().copied()
            && book.running.first() == Some(&serial)
        {
            book.flushes.pop_front();
            book.running.remove(&serial);
            due.push(job);
        }
        drop(book);
        if due.is_empty() {
            return;
        }
        let flushed = self.flush().map_err(|error| device_error(&error));
        let ends = due.into_iter().map(|job| Finished { job, bytes: 0, result: flushed, raised: false });
        lock(&self.book).ended.extend(ends);
    }

    /// What has ended is visible to this machine's processors and to the GPU; what others wrote into its memory is made so.
    fn flush(&self) -> Result<(), CudaError> {
        self.lanes.iter().try_for_each(|[lane, ..]| lane.gpu().flush_writes())
    }

    /// Collects ends, and says when it is worth looking again.
    fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        self.ring();
        let (mut rides, mut soonest) = (Vec::new(), None::<Instant>);
        for lane in self.lanes.iter().flatten() {
            let due = lane.collect(&mut rides);
            soonest = soonest.into_iter().chain(due).min();
        }
        self.note(rides);
        if soonest.is_some() {
            self.check(false);
        }
        self.end_flushes();
        out.append(&mut lock(&self.book).ended);
        let soonest = soonest.filter(|_| self.lost.get().is_none())?;
        if self.settings.spin {
            return Some(Duration::ZERO);
        }
        let now = Instant::now();
        let late = now.saturating_duration_since(soonest);
        Some(if late.is_zero() { (soonest - now).max(LOOK.0) } else { (late / 4).clamp(LOOK.0, LOOK.1) })
    }
}

impl DmaEngine for CudaEngine {
    fn caps(&self) -> EngineCaps {
        EngineCaps { max_transfer: MAX_TRANSFER, queue_depth: DEPTH, reports_faults: true, max_mappings: u32::MAX }
    }

    fn in_one_hop(&self, initiator: EndpointId, dst: &[Segment], src: &[Segment]) -> bool {
        self.shared.reach.in_one_hop(initiator, dst, src)
    }

    fn submit(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
        let shared = &*self.shared;
        if shared.lost.get().is_some() {
            return Err(EngineError::Device { code: LOST });
        }
        let serial = {
            let mut book = lock(&shared.book);
            if book.running.len() >= DEPTH {
                return Err(EngineError::Busy);
            }
            book.next += 1;
            let serial = book.next;
            book.running.insert(serial);
            serial
        };
        let error = match shared.begin(transfer, serial, false) {
            Ok(()) => return Ok(Submit::Submitted),
            Err(Unready::Unregistered) => {
                let slow = Slow { transfer: transfer.clone(), serial };
                match &self.slow {
                    Some((sender, _)) if sender.send(slow).is_ok() => return Ok(Submit::Submitted),
                    _ => EngineError::Device { code: LOST },
                }
            }
            Err(Unready::Error(error)) => error,
        };
        lock(&shared.book).running.remove(&serial);
        Err(error)
    }

    fn doorbell(&self) {
        self.shared.ring();
    }

    fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        self.shared.poll(out)
    }

    /// A copy that a GPU has begun ends by itself, in milliseconds.
    fn abort(&self, _job: JobId) {}

    fn quiesce(&self, out: &mut Vec<Finished>) {
        loop {
            let next = self.shared.poll(out);
            if lock(&self.shared.book).running.is_empty() {
                out.append(&mut lock(&self.shared.book).ended);
                return;
            }
            thread::sleep(next.unwrap_or(LOOK.1).max(LOOK.0));
        }
    }

    fn on_progress(&self, wake: Box<dyn Fn() + Send + Sync>) {
        // Set once, as its promise is.
        let _ = self.shared.wake.set(wake);
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.slow.take() {
            drop(sender);
            // It has no panics to tell of that it did not print.
            let _ = thread.join();
        }
        self.quiesce(&mut Vec::new());
    }
}
