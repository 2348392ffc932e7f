//! Transfers, and the engine that carries them out.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use iommu_addr::{DomainId, EndpointId, Iova, Location, Range, Segment};
use smallvec::SmallVec;

use crate::{CopyError, MemoryError};

/// Names a transfer while an engine has it. Unique within one engine's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

/// Places laid end to end.
pub type Segments = SmallVec<[Segment; 2]>;

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// One hop: the initiator reaches both ends.
    Direct,
    /// Two hops through memory of the host.
    Staged,
}

/// What a transfer does. Source and destination have the same total length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Copy `src` to `dst`.
    Copy {
        /// Bytes to read.
        src: Segments,
        /// Bytes to write.
        dst: Segments,
        /// Which way.
        route: Route,
    },
    /// Fill `dst` with the little-endian bytes of `pattern`, repeated from the first byte on.
    Fill {
        /// Bytes to write.
        dst: Segments,
        /// Eight bytes.
        pattern: u64,
    },
    /// Run what an [`Initiated`] asked for, over the memory it named. Never split, whatever its length.
    Kernel {
        /// Bytes to read.
        src: Segments,
        /// Bytes to write.
        dst: Segments,
    },
    /// Change a word, and say what was there.
    Atomic {
        /// The word, naturally aligned.
        at: Location,
        /// How.
        atomic: Atomic,
    },
    /// Make every earlier transfer of the initiator visible to every observer.
    Flush,
}

/// How an atomic operation changes a word: those of PCIe (PCI Express 6.0, 2.2.7.1.1, AtomicOps).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AtomicOp {
    /// Adds to it, without a carry.
    Add,
    /// Puts another one in its place.
    Swap,
    /// The same, if it is this one.
    CompareSwap {
        /// What has to be there.
        compare: u64,
    },
}

/// An atomic operation on a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Atomic {
    /// What is done.
    pub op: AtomicOp,
    /// Bytes of the word, 4 or 8. Of a word of 4 bytes, the lower halves of all numbers count.
    pub len: u64,
    /// What is added, or put there.
    pub operand: u64,
}

impl Atomic {
    /// Changes a word of 4 bytes, at once for every processor; answers what was there.
    pub fn on_u32(self, word: &AtomicU32) -> u64 {
        let low = |number: u64| u32::try_from(number & u64::from(u32::MAX)).unwrap_or(0);
        let operand = low(self.operand);
        u64::from(match self.op {
            AtomicOp::Add => word.fetch_add(operand, Ordering::SeqCst),
            AtomicOp::Swap => word.swap(operand, Ordering::SeqCst),
            AtomicOp::CompareSwap { compare } => word
                .compare_exchange(low(compare), operand, Ordering::SeqCst, Ordering::SeqCst)
                .unwrap_or_else(|other| other),
        })
    }

    /// The same of 8 bytes.
    pub fn on_u64(self, word: &AtomicU64) -> u64 {
        match self.op {
            AtomicOp::Add => word.fetch_add(self.operand, Ordering::SeqCst),
            AtomicOp::Swap => word.swap(self.operand, Ordering::SeqCst),
            AtomicOp::CompareSwap { compare } => word
                .compare_exchange(compare, self.operand, Ordering::SeqCst, Ordering::SeqCst)
                .unwrap_or_else(|other| other),
        }
    }
}

/// One transfer, translated, checked and pinned: the engine may touch exactly these bytes until it reports the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Name for the report.
    pub job: JobId,
    /// Whose work it is; engines with a context per domain (register files) use it.
    pub domain: DomainId,
    /// The endpoint that acts.
    pub initiator: EndpointId,
    /// What to do.
    pub work: Work,
}

/// How a transfer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Which transfer.
    pub job: JobId,
    /// Bytes moved, from the first on, also after an error.
    pub bytes: u64,
    /// Success, or what went wrong after `bytes`.
    pub result: Result<(), EngineError>,
    /// The engine has something for [`DmaEngine::raised`].
    pub raised: bool,
    /// What was there before an atomic operation that ended well, else 0.
    pub value: u64,
}

impl Finished {
    /// The end of a transfer that moved its bytes through a [`crate::Memory`].
    pub fn moved(job: JobId, outcome: Result<u64, CopyError>) -> Self {
        let (bytes, result) = match outcome {
            Ok(bytes) => (bytes, Ok(())),
            Err(CopyError { bytes, source }) => (bytes, Err(EngineError::Memory(source))),
        };
        Self { job, bytes, result, raised: false, value: 0 }
    }

    /// The end of a transfer that has moved nothing.
    pub fn failed(job: JobId, error: EngineError) -> Self {
        Self { job, bytes: 0, result: Err(error), raised: false, value: 0 }
    }

    /// The end of an atomic operation.
    pub fn atomic(job: JobId, atomic: Atomic, was: Result<u64, MemoryError>) -> Self {
        let was = was.map_err(EngineError::Memory);
        let (bytes, value) = was.map_or((0, 0), |value| (atomic.len, value));
        Self { job, bytes, result: was.map(drop), raised: false, value }
    }
}

/// What became of a submission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Submit {
    /// The engine has it; a [`Finished`] comes through [`DmaEngine::poll`].
    Submitted,
    /// Already done, on the caller's thread.
    Executed(Finished),
}

/// Why a transfer was not taken, or did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// Every queue slot is taken; submit again after a [`Finished`].
    #[error("The engine's queue is full")]
    Busy,
    /// The engine cannot reach one of the places.
    #[error("The engine cannot reach the memory")]
    Memory(#[from] MemoryError),
    /// Registers need one naturally aligned access of 4 or 8 bytes.
    #[error("Registers take one aligned access of 4 or 8 bytes at a time")]
    RegisterAccess,
    /// Given up on request.
    #[error("The transfer was aborted")]
    Aborted,
    /// The device says so.
    #[error("The device failed with code {code:#x}")]
    Device {
        /// The device's own code.
        code: u32,
    },
}

impl EngineError {
    /// The device is lost, or whoever worked at it is: it takes no more transfers. Codes of [`EngineError::Device`] from `0xffff_0000` on are none of the
    /// device's.
    pub const LOST: Self = Self::Device { code: 0xffff_0002 };
    /// It runs no kernels.
    pub const NO_KERNELS: Self = Self::Device { code: 0xffff_0004 };
    /// It has no atomic operations on that memory.
    pub const NO_ATOMICS: Self = Self::Device { code: 0xffff_0005 };
}

/// Work that a device's own logic starts: the device translates it like any guest's work, with the endpoint as accessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initiated {
    /// Who acts.
    pub endpoint: EndpointId,
    /// In whose address space.
    pub domain: DomainId,
    /// What to read.
    pub src: Range<Iova>,
    /// What to write.
    pub dst: Range<Iova>,
}

/// What a device's own logic wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raised {
    /// Start work. Answer with a [`Work::Kernel`] transfer or with [`DmaEngine::refuse`].
    Initiated(Initiated),
    /// The user interrupt `vector`, for the domain that owns the context.
    Interrupt {
        /// Who.
        endpoint: EndpointId,
        /// For whom.
        domain: DomainId,
        /// Which one.
        vector: u32,
    },
}

/// What the planner needs to know of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineCaps {
    /// Bytes of a transfer that the engine takes whatever it does; longer work is split, see [`DmaEngine::longest`].
    pub max_transfer: u64,
    /// Transfers it can hold at a time.
    pub queue_depth: usize,
    /// It says so when the host's IOMMU stops it.
    pub reports_faults: bool,
    /// Mappings that its IOMMU can hold; `u32::MAX` if it maps none.
    pub max_mappings: u32,
}

/// What kind of device an endpoint is a slice of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndpointKind {
    /// A GPU.
    Gpu,
    /// An FPGA.
    Fpga,
    /// Blocks of a storage device's namespace as memory.
    Storage,
    /// Memory behind a BAR, without an engine.
    Memory,
    /// A DMA engine without memory of its own.
    Engine,
}

impl fmt::Display for EndpointKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpu => "gpu",
            Self::Fpga => "fpga",
            Self::Storage => "storage",
            Self::Memory => "memory",
            Self::Engine => "engine",
        })
    }
}

/// An endpoint as the device presents it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSpec {
    /// Number within the tenant.
    pub id: EndpointId,
    /// Kind of device.
    pub kind: EndpointKind,
    /// The operator's name for the slice, at most 31 bytes.
    pub name: String,
    /// Memory in bytes, a multiple of `granularity`; 0 if it has none.
    pub memory_len: u64,
    /// Size of the register page in bytes; 0 if there is none.
    pub registers_len: u64,
    /// Granule of allocation in bytes, a power of two of at least 4096.
    pub granularity: u64,
    /// Copy engines that work side by side.
    pub engines: u16,
}

/// Moves bytes for one tenant. Every method may be called from any thread and none blocks, except [`DmaEngine::quiesce`].
pub trait DmaEngine: Send + Sync {
    /// Limits, constant for the engine's life.
    fn caps(&self) -> EngineCaps;

    /// Whether `initiator` copies these places from one to the other without a stop in memory of the host. What it cannot is staged.
    fn in_one_hop(&self, initiator: EndpointId, dst: &[Segment], src: &[Segment]) -> bool {
        let _ = (initiator, dst, src);
        true
    }

    /// Whether it is `initiator`'s own engine that fills all of `dst`, and nobody has to do it in its place.
    fn fills(&self, initiator: EndpointId, dst: &[Segment]) -> bool {
        let _ = (initiator, dst);
        true
    }

    /// Whether `initiator` has atomic operations on the word at `at`: no other one there, and no access of whoever owns the memory, comes in between.
    fn has_atomics(&self, initiator: EndpointId, at: Location) -> bool {
        let _ = (initiator, at);
        false
    }

    /// Longest transfer of this one's kind in bytes, if that is more than [`EngineCaps::max_transfer`].
    fn longest(&self, transfer: &Transfer) -> u64 {
        let _ = transfer;
        self.caps().max_transfer
    }

    /// Takes a transfer or says why not; the caller keeps its transfer either way. An engine validates nothing that the device has
    /// promised (bounds, rights, pins), but answers a place it cannot reach with an error, never with a fault of the process.
    fn submit(&self, transfer: &Transfer) -> Result<Submit, EngineError>;

    /// What was submitted is to begin, also what an engine holds back to begin it together with more. To be called after each run of submissions.
    fn doorbell(&self) {}

    /// Appends the transfers that have ended since the last call, and says how long until the next one may end, if the engine knows.
    fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration>;

    /// Asks for an end; a [`Finished`] still comes, with whatever result.
    fn abort(&self, job: JobId);

    /// Waits until no transfer is left, and appends their ends. Aborts what would not end by itself.
    fn quiesce(&self, out: &mut Vec<Finished>);

    /// Appends what the devices' own logic wants. Called under a lock: must not call back.
    fn raised(&self, out: &mut Vec<Raised>) {
        let _ = out;
    }

    /// An [`Initiated`] was refused with this wire status.
    fn refuse(&self, initiated: &Initiated, status: u32) {
        let _ = (initiated, status);
    }

    /// The domain is gone: forget its contexts. No transfer of it is left.
    fn forget(&self, domain: DomainId) {
        let _ = domain;
    }

    /// Called whenever [`DmaEngine::poll`] or [`DmaEngine::raised`] may have something new and nobody asked. Set once, before the first
    /// submission. Any thread may call it, also one that is inside `abort` or `refuse`: it must not block, nor take a lock that is held
    /// around calls of the engine.
    fn on_progress(&self, wake: Box<dyn Fn() + Send + Sync>) {
        let _ = wake;
    }
}
