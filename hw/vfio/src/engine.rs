//! [`VfioEngine`]: a driver as an engine, with a queue of transfers in front of it.
//!
//! Not here: how a transfer becomes commands (`mover`), the queue and its thread ([`hw_engine::queue`]).

use std::sync::Arc;
use std::time::Duration;

use hw_engine::queue::{DEPTH, Queue, Wake};
use hw_engine::{DmaEngine, EngineCaps, EngineError, Finished, JobId, Memory, Owner, Submit, ThreadHook, Transfer};
use iommu_addr::{EndpointId, Segment};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::drivers::{self, Driver, Kind};
use crate::host::{MAX_MAPPINGS, MapSink};
use crate::mover::{MAX_TRANSFER, Mover};
use crate::reach::Reach;
use crate::watch::FaultWatch;
use crate::{Function, Shape, VfioError};

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

/// An engine over one function.
pub struct VfioEngine {
    queue: Queue<Mover>,
    reach: Arc<Reach>,
}

impl VfioEngine {
    /// Opens an engine of this kind behind `host`, which is the function's or one over it. The memory of one endpoint may be a slice of the engine's own;
    /// all else is in `memory`. `watch` is for an engine that does not report faults itself; without it, what the IOMMU stops seems a success.
    ///
    /// # Errors
    /// When the function is of another kind or does not come up, or when there is no thread for it.
    pub fn open(
        kind: Kind,
        function: Function,
        host: Arc<dyn MapSink>,
        own: Option<Slice>,
        memory: Arc<dyn Memory>,
        watch: Option<Box<dyn FaultWatch>>,
        hook: Option<ThreadHook>,
    ) -> Result<Self, VfioError> {
        let interrupt = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(|source| VfioError::Start { source })?;
        let driver = drivers::open(kind, function, &interrupt)?;
        Self::over(driver, host, own, memory, watch, interrupt, hook)
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
        watch: Option<Box<dyn FaultWatch>>,
        interrupt: EventFd,
        hook: Option<ThreadHook>,
    ) -> Result<Self, VfioError> {
        let shape = driver.shape();
        if own.is_some_and(|own| !own.fits(&shape)) {
            return Err(VfioError::Unfit {
                what: "has no such slice: it must begin and end with a block of the namespace",
            });
        }
        let reach = Arc::new(Reach { shape, own, memory });
        let mover = Mover::new(driver, Arc::clone(&reach), host, watch, interrupt, PATIENCE)?;
        let queue = Queue::start("vfio-engine", mover, hook).map_err(|source| VfioError::Start { source })?;
        Ok(Self { queue, reach })
    }

    /// Makes the memory that is the engine's own zero, all of it. Blocks.
    ///
    /// # Errors
    /// As the device says.
    pub fn erase_own(&self) -> Result<(), EngineError> {
        self.queue.call(Mover::erase)
    }

    /// What its driver can do.
    pub fn shape(&self) -> Shape {
        self.reach.shape
    }
}

impl DmaEngine for VfioEngine {
    fn caps(&self) -> EngineCaps {
        EngineCaps {
            max_transfer: MAX_TRANSFER,
            queue_depth: DEPTH,
            reports_faults: self.reach.shape.reports_faults,
            max_mappings: MAX_MAPPINGS,
        }
    }

    fn in_one_hop(&self, _initiator: EndpointId, dst: &[Segment], src: &[Segment]) -> bool {
        self.reach.in_one_hop(dst, src)
    }

    fn submit(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
        self.queue.submit(transfer)
    }

    fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        self.queue.poll(out);
        None
    }

    fn abort(&self, job: JobId) {
        self.queue.abort(job);
    }

    fn quiesce(&self, out: &mut Vec<Finished>) {
        self.queue.quiesce(out);
    }

    fn on_progress(&self, wake: Wake) {
        self.queue.on_progress(wake);
    }
}

impl Owner for VfioEngine {
    fn owns(&self, endpoint: EndpointId) -> bool {
        self.reach.own.is_some_and(|own| own.endpoint == endpoint)
    }

    fn read_own(&self, endpoint: EndpointId, offset: u64, into: &mut [u8]) -> Result<(), EngineError> {
        let len = into.len() as u64;
        into.copy_from_slice(&self.queue.call(move |mover| mover.read(endpoint, offset, len))?);
        Ok(())
    }

    fn write_own(&self, endpoint: EndpointId, offset: u64, from: &[u8]) -> Result<(), EngineError> {
        let bytes = from.to_vec();
        self.queue.call(move |mover| mover.write(endpoint, offset, &bytes))
    }
}
