//! [`VfioEngine`]: a queue of transfers in front of a driver, and the thread that works it off.
//!
//! Not here: how a transfer becomes commands (`mover`).

use std::collections::VecDeque;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hw_engine::{DmaEngine, EngineCaps, EngineError, Finished, JobId, Memory, Submit, Transfer};
use iommu_addr::EndpointId;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::drivers::{self, Driver, Kind};
use crate::host::MapSink;
use crate::mover::{MAX_TRANSFER, Mover, code};
use crate::{Function, Shape, VfioError};

/// Transfers that wait or run.
const DEPTH: usize = 64;
/// How long a device may end nothing before it is reset.
const PATIENCE: Duration = Duration::from_secs(5);

/// A part of an engine's own memory, as the memory of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Whose memory it is.
    pub endpoint: EndpointId,
    /// Where it begins, in bytes.
    pub start: u64,
    /// Its length in bytes.
    pub len: u64,
}

impl Slice {
    /// Where `len` bytes of it are in the engine's own memory, if it has them.
    pub(crate) fn place(&self, offset: u64, len: u64) -> Option<u64> {
        offset.checked_add(len).filter(|end| *end <= self.len)?;
        self.start.checked_add(offset)
    }

    /// Whether an engine has it, and it begins and ends with blocks.
    fn fits(&self, shape: &Shape) -> bool {
        let is_whole = self.start.is_multiple_of(shape.granule) && self.len.is_multiple_of(shape.granule);
        let end = self.start.checked_add(self.len);
        is_whole && !shape.is_buffer && end.is_some_and(|end| end <= shape.own_len)
    }
}

/// Runs first thing in the engine's thread.
pub type ThreadHook = Arc<dyn Fn() + Send + Sync>;

/// An engine over one function.
pub struct VfioEngine {
    shared: Arc<Shared>,
    shape: Shape,
    thread: Option<JoinHandle<()>>,
}

type Wake = Box<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Something waits, something has ended, or it is over.
    changed: Condvar,
    wake: Mutex<Option<Wake>>,
}

/// What the thread is to do.
enum Item {
    Transfer(Transfer),
    Read(u64, u64, Sender<Result<Vec<u8>, EngineError>>),
    Write(u64, Vec<u8>, Sender<Result<(), EngineError>>),
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Item>,
    running: Option<JobId>,
    /// The running one is to end.
    abort: bool,
    ended: Vec<Finished>,
    over: bool,
}

impl VfioEngine {
    /// Opens an engine of this kind. The memory of one endpoint may be a slice of the engine's own; all else is in `memory`.
    ///
    /// # Errors
    /// When the function is of another kind or does not come up, or when there is no thread for it.
    pub fn open(
        kind: Kind,
        function: Function,
        own: Option<Slice>,
        memory: Arc<dyn Memory>,
        hook: Option<ThreadHook>,
    ) -> Result<Self, VfioError> {
        let interrupt = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(|source| VfioError::Start { source })?;
        let host = Arc::clone(function.host());
        let driver = drivers::open(kind, function, &interrupt)?;
        Self::over(driver, host, own, memory, interrupt, hook)
    }

    /// An engine over a driver that is open, behind `host`; `interrupt` counts when the driver has something to say.
    ///
    /// # Errors
    /// When the slice is none of the driver's, or when there is no memory or thread.
    pub fn over(
        driver: Box<dyn Driver>,
        host: Arc<dyn MapSink>,
        own: Option<Slice>,
        memory: Arc<dyn Memory>,
        interrupt: EventFd,
        hook: Option<ThreadHook>,
    ) -> Result<Self, VfioError> {
        let shape = driver.shape();
        if own.is_some_and(|own| !own.fits(&shape)) {
            return Err(VfioError::Unfit {
                what: "has no such slice: it must begin and end with a block of the namespace",
            });
        }
        let mut mover = Mover::new(driver, host, memory, own, interrupt, PATIENCE)?;
        let shared = Arc::<Shared>::default();
        let work = Arc::clone(&shared);
        let body = move || {
            if let Some(hook) = hook {
                hook();
            }
            let _alarm = Alarm(&work);
            work.work_off(&mut mover);
        };
        let thread = thread::Builder::new().name("vfio-engine".into()).spawn(body);
        Ok(Self { shared, shape, thread: Some(thread.map_err(|source| VfioError::Start { source })?) })
    }

    /// Reads the memory of the endpoint that is a slice of the engine's own, as its owner sees it. At most 256 KiB; blocks.
    ///
    /// # Errors
    /// When it is not there, or as the device says.
    pub fn read_own(&self, offset: u64, into: &mut [u8]) -> Result<(), EngineError> {
        let (sender, answer) = channel();
        self.shared.put(Item::Read(offset, into.len() as u64, sender));
        let bytes = answer.recv().unwrap_or(Err(EngineError::Aborted))?;
        into.copy_from_slice(&bytes);
        Ok(())
    }

    /// Writes it; as [`VfioEngine::read_own`].
    ///
    /// # Errors
    /// As there.
    pub fn write_own(&self, offset: u64, from: &[u8]) -> Result<(), EngineError> {
        let (sender, answer) = channel();
        self.shared.put(Item::Write(offset, from.to_vec(), sender));
        answer.recv().unwrap_or(Err(EngineError::Aborted))
    }

    /// What its driver can do.
    pub fn shape(&self) -> Shape {
        self.shape
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work_off(&self, mover: &mut Mover) {
        while let Some(item) = self.next() {
            let transfer = match item {
                Item::Transfer(transfer) => transfer,
                // Whoever asked may have gone.
                Item::Read(offset, len, answer) => {
                    let _ = answer.send(mover.read(offset, len));
                    continue;
                }
                Item::Write(offset, bytes, answer) => {
                    let _ = answer.send(mover.write(offset, &bytes));
                    continue;
                }
            };
            let (bytes, result) = mover.run(&transfer, &|| !self.lock().abort);
            let mut state = self.lock();
            state.running = None;
            state.ended.push(Finished { job: transfer.job, bytes, result, raised: false });
            drop(state);
            self.changed.notify_all();
            self.tell();
        }
    }

    fn put(&self, item: Item) {
        let mut state = self.lock();
        if !state.over {
            state.waiting.push_back(item);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The next item; `None` when it is over.
    fn next(&self) -> Option<Item> {
        let mut state = self.lock();
        loop {
            if state.over {
                return None;
            }
            if let Some(item) = state.waiting.pop_front() {
                if let Item::Transfer(transfer) = &item {
                    (state.running, state.abort) = (Some(transfer.job), false);
                }
                return Some(item);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn tell(&self) {
        if let Some(wake) = &*self.wake.lock().unwrap_or_else(PoisonError::into_inner) {
            wake();
        }
    }
}

impl State {
    fn give_up(&mut self, job: JobId, error: EngineError) {
        self.ended.push(Finished { job, bytes: 0, result: Err(error), raised: false });
    }

    /// Gives up what waits. What the memory's owner asked for is dropped with its answer's channel, which says so.
    fn give_up_all(&mut self, error: EngineError) {
        while let Some(item) = self.waiting.pop_front() {
            if let Item::Transfer(transfer) = item {
                self.give_up(transfer.job, error);
            }
        }
    }
}

/// Ends every transfer if the thread goes by a panic: nobody waits for an engine that nobody works at.
struct Alarm<'a>(&'a Shared);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        let (mut state, error) = (self.0.lock(), EngineError::Device { code: code::LOST });
        state.over = true;
        state.give_up_all(error);
        if let Some(job) = state.running.take() {
            state.give_up(job, error);
        }
        drop(state);
        self.0.changed.notify_all();
        self.0.tell();
    }
}

impl DmaEngine for VfioEngine {
    fn caps(&self) -> EngineCaps {
        EngineCaps { max_transfer: MAX_TRANSFER, queue_depth: DEPTH }
    }

    fn submit(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
        let mut state = self.shared.lock();
        if state.over {
            return Err(EngineError::Device { code: code::LOST });
        }
        if state.waiting.len() + usize::from(state.running.is_some()) + state.ended.len() >= DEPTH {
            return Err(EngineError::Busy);
        }
        state.waiting.push_back(Item::Transfer(transfer.clone()));
        drop(state);
        self.shared.changed.notify_all();
        Ok(Submit::Submitted)
    }

    fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        out.append(&mut self.shared.lock().ended);
        None
    }

    fn abort(&self, job: JobId) {
        let mut state = self.shared.lock();
        if state.running == Some(job) {
            state.abort = true;
            return;
        }
        let is_it = |item: &Item| matches!(item, Item::Transfer(transfer) if transfer.job == job);
        let Some(at) = state.waiting.iter().position(is_it) else { return };
        state.waiting.remove(at);
        state.give_up(job, EngineError::Aborted);
        drop(state);
        self.shared.tell();
    }

    fn quiesce(&self, out: &mut Vec<Finished>) {
        let mut state = self.shared.lock();
        state.give_up_all(EngineError::Aborted);
        state.abort = state.running.is_some();
        while state.running.is_some() {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        out.append(&mut state.ended);
    }

    fn on_progress(&self, wake: Wake) {
        *self.shared.wake.lock().unwrap_or_else(PoisonError::into_inner) = Some(wake);
    }
}

impl Drop for VfioEngine {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        (state.over, state.abort) = (true, true);
        drop(state);
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("An engine's thread had panicked; transfers may have been lost");
        }
    }
}
