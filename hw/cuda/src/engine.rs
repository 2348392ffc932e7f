//! [`CudaEngine`]: every GPU slice of one tenant, and the engines that reach them.
//!
//! A transfer becomes copies in one lane: those that are short are gathered until there are many or the doorbell rings, and begin together; longer ones begin at
//! once. Atomic operations are programs of the GPU's, in a lane of their own. A lane says when it is worth looking whether something has ended, so nobody spins
//! for that unless it was asked for. Memory of this process that no GPU has reached yet is registered first, on a thread of the engine's, where fills with more
//! than one byte are made, too.
//!
//! The driver's errors that stay break the context: then nothing new begins, and the engine is good for nothing more. What has begun the GPU may carry out all the
//! same, and then it ends well; of the rest nobody can say when the GPU writes no more, so it has no end while the process lives. Another process has to take
//! over; nobody else is concerned.
//!
//! Not here: copies of which no GPU reaches both ends, a guest's kernels, rights.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hw_engine::queue::ThreadHook;
use hw_engine::{DmaEngine, EngineCaps, EngineError, Finished, JobId, Memory, Owner, Submit, Transfer};
use iommu_addr::{EndpointId, Location, Segment};

use crate::driver::CudaError;
use crate::gpu::Gpu;
use crate::pinned::Pinned;
use crate::reach::{Own, Reach, Unready};
use crate::registry::MAX_CHUNKS;
use crate::shared::{CHECK, LOOK, Shared, lock};
use crate::side::Side;
use crate::slice::Slice;
use crate::ways::{LANES, LINE, Ways};

/// Longest transfer in bytes: 5 ms of a PCIe 5.0 link, beside which the time between two of them is nothing.
const MAX_TRANSFER: u64 = 256 << 20;
/// How long a lost GPU is waited for.
const PATIENCE: Duration = Duration::from_secs(1);
/// Transfers under way.
pub(crate) const DEPTH: usize = 1024;

/// How an engine works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whoever looks after the engine looks for ends without a pause. Costs a processor while something is under way.
    pub spin: bool,
    /// Transfers of at most so many bytes are small: they wait for no larger ones. Small ones are gathered to begin together, and so are those of up to 16 times
    /// as many bytes, or 64 times, depending on what is between the places.
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
    thread: Option<JoinHandle<()>>,
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
        let mut owns = Vec::new();
        for (endpoint, slice) in slices {
            let known = gpus.iter().position(|gpu| gpu.is_same(slice.gpu()));
            let gpu = known.unwrap_or_else(|| {
                gpus.push(Arc::clone(slice.gpu()));
                gpus.len() - 1
            });
            owns.push((endpoint, Own { slice, gpu }));
        }
        let words = Arc::new(Pinned::new(&gpus[0], (gpus.len() * LANES * LINE).next_multiple_of(4096))?);
        let ways = gpus.iter().enumerate().map(|(number, gpu)| Ways::new(gpu, &words, number, settings.gather));
        let ways = ways.collect::<Result<_, CudaError>>()?;
        let sides = gpus.iter().map(|gpu| Ok(Mutex::new(Side::new(gpu)?))).collect::<Result<_, CudaError>>()?;
        let reach = Reach::new(owns, &gpus, memory, settings.chunks.max(1))?;
        let shared = Arc::new(Shared::new(ways, sides, reach, settings));
        let work = Arc::clone(&shared);
        let body = move || {
            if let Some(hook) = hook {
                hook();
            }
            work.work_off();
        };
        let thread = thread::Builder::new().name("cuda".into()).spawn(body);
        let thread = thread.map_err(|source| CudaError::Host { step: "start a thread for a GPU's engine", source })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// To be called when the memory that the engine was made over has changed: lets go of what nobody has mapped any more.
    pub fn memory_changed(&self) {
        self.shared.reach.registry().changed();
        // Whoever looks after the engine is to look a few times more.
        self.shared.wake();
    }

    /// `tell` is called once, on any thread, when a context is broken.
    pub fn on_lost(&self, tell: Box<dyn Fn(&CudaError) + Send + Sync>) {
        *lock(&self.shared.tell) = Some(tell);
        self.shared.tell_lost();
    }
}

impl DmaEngine for CudaEngine {
    fn caps(&self) -> EngineCaps {
        EngineCaps { max_transfer: MAX_TRANSFER, queue_depth: DEPTH, reports_faults: true, max_mappings: u32::MAX }
    }

    fn in_one_hop(&self, initiator: EndpointId, dst: &[Segment], src: &[Segment]) -> bool {
        self.shared.reach.in_one_hop(initiator, dst, src)
    }

    fn fills(&self, initiator: EndpointId, dst: &[Segment]) -> bool {
        let reach = &self.shared.reach;
        reach.own(initiator).is_some_and(|own| reach.filler(initiator, dst) == Some(own.gpu))
    }

    fn has_atomics(&self, initiator: EndpointId, at: Location) -> bool {
        // As every word is aligned, it is there if its first byte is.
        self.shared.reach.atomic(initiator, at, 1).is_some()
    }

    fn submit(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
        let shared = &*self.shared;
        if shared.lost.get().is_some() {
            return Err(EngineError::LOST);
        }
        if shared.under_way.0.fetch_add(1, Ordering::AcqRel) >= DEPTH {
            // Another thread may find it full for a moment, too, and tries again as this one does.
            shared.under_way.0.fetch_sub(1, Ordering::AcqRel);
            return Err(EngineError::Busy);
        }
        let error = match shared.begin(transfer, false) {
            Ok(()) => return Ok(Submit::Submitted),
            Err(Unready::Unregistered) => {
                if self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
                    shared.leave(transfer.clone());
                    return Ok(Submit::Submitted);
                }
                EngineError::LOST
            }
            Err(Unready::Error(error)) => error,
        };
        shared.under_way.0.fetch_sub(1, Ordering::AcqRel);
        Err(error)
    }

    fn doorbell(&self) {
        self.shared.ring();
    }

    fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        self.shared.poll(out)
    }

    fn abort(&self, job: JobId) {
        self.shared.give_up(job);
    }

    /// What a lost GPU has is waited for for a second: it may never end.
    fn quiesce(&self, out: &mut Vec<Finished>) {
        let begun = Instant::now();
        loop {
            let next = self.shared.poll(out);
            if self.shared.under_way.0.load(Ordering::Acquire) == 0 {
                // What ended since it looked.
                self.shared.poll(out);
                return;
            }
            if self.shared.lost.get().is_some() && begun.elapsed() > PATIENCE {
                return;
            }
            thread::sleep(next.unwrap_or(LOOK.1).clamp(LOOK.0, CHECK));
        }
    }

    fn on_progress(&self, wake: Box<dyn Fn() + Send + Sync>) {
        // Set once, as its promise is.
        let _ = self.shared.wake.set(wake);
    }
}

impl Owner for CudaEngine {
    fn owns(&self, endpoint: EndpointId) -> bool {
        self.shared.reach.own(endpoint).is_some()
    }

    fn read_own(&self, endpoint: EndpointId, offset: u64, into: &mut [u8]) -> Result<(), EngineError> {
        let (gpu, at) = self.shared.own_bytes(endpoint, offset, into.len())?;
        // SAFETY: the bytes are a slice's of that GPU, and the slice lives as long as the engine.
        self.shared.on_side(gpu, |side| unsafe { side.read(at, into) })
    }

    fn write_own(&self, endpoint: EndpointId, offset: u64, from: &[u8]) -> Result<(), EngineError> {
        let (gpu, at) = self.shared.own_bytes(endpoint, offset, from.len())?;
        // SAFETY: as in `read_own`.
        self.shared.on_side(gpu, |side| unsafe { side.write(at, from) })
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        self.shared.close();
        if self.shared.lost.get().is_some() {
            // The GPU may carry out what it has, and the engine's thread may wait for that: what they use stays as long as the process.
            return std::mem::forget(Arc::clone(&self.shared));
        }
        // The last owner may be what the engine wakes: then this is the thread itself, and it ends after this call.
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != thread::current().id()) {
            // It has no panics to tell of that it did not print.
            let _ = thread.join();
        }
        self.quiesce(&mut Vec::new());
    }
}
