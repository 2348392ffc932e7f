//! [`HostEngine`]: every transfer is a copy by the CPU, done before `submit` returns.
//!
//! It has no queue, no thread and no clock, so it is never busy and nothing is ever out. It runs no kernels and has no registers.

use std::sync::Arc;
use std::time::Duration;

use hw_engine::{
    DmaEngine, EngineCaps, EngineError, Finished, JobId, Memory, Submit, Transfer, Work, copy_segments, fill_segments,
    is_ordinary,
};
use iommu_addr::{EndpointId, Location};

/// Longest transfer in bytes, so that no call holds its thread for long.
const MAX_TRANSFER: u64 = 256 << 10;

/// Transfers that may be between `submit` and its answer. Any number would do: none is ever held.
const QUEUE_DEPTH: usize = 1024;

/// Moves bytes on the caller's thread. Staged copies take the detour through a small buffer of the calling thread.
#[derive(Clone)]
pub struct HostEngine {
    memory: Arc<dyn Memory>,
}

impl HostEngine {
    /// The device code of a [`Work::Kernel`]: this engine starts no kernels and knows none.
    pub const NO_KERNELS: u32 = 1;

    /// An engine over this memory.
    pub fn new(memory: Arc<dyn Memory>) -> Self {
        Self { memory }
    }
}

impl DmaEngine for HostEngine {
    fn caps(&self) -> EngineCaps {
        EngineCaps {
            max_transfer: MAX_TRANSFER,
            queue_depth: QUEUE_DEPTH,
            reports_faults: true,
            max_mappings: u32::MAX,
        }
    }

    fn has_atomics(&self, _initiator: EndpointId, at: Location) -> bool {
        is_ordinary(&*self.memory, at)
    }

    fn submit(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
        let memory = &*self.memory;
        let moved = match &transfer.work {
            Work::Copy { src, dst, route } => copy_segments(memory, dst, src, *route),
            Work::Fill { dst, pattern } => fill_segments(memory, dst, *pattern),
            // What was submitted before has been moved by this CPU, and its caches are coherent.
            Work::Flush => Ok(0),
            Work::Atomic { at, atomic } => {
                let was = memory.atomic(*at, *atomic);
                return Ok(Submit::Executed(Finished::atomic(transfer.job, *atomic, was)));
            }
            Work::Kernel { .. } => return Err(EngineError::Device { code: Self::NO_KERNELS }),
        };
        Ok(Submit::Executed(Finished::moved(transfer.job, moved)))
    }

    fn poll(&self, _out: &mut Vec<Finished>) -> Option<Duration> {
        None
    }

    fn abort(&self, _job: JobId) {}

    fn quiesce(&self, _out: &mut Vec<Finished>) {}
}
