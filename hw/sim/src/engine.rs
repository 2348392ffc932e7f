//! [`SimEngine`]: what a submission turns into, and how ends come out.

use std::sync::Arc;
use std::time::Duration;

use hw_engine::{
    DmaEngine, EngineCaps, EngineError, Finished, Initiated, JobId, LinkLedger, Memory, Raised, Submit, Transfer, Work,
    is_ordinary, total_len,
};
use iommu_addr::{DomainId, EndpointId, Location, Segment};

use crate::agenda::{Move, carry_out};
use crate::fabric::{Crossings, Fabric, route};
use crate::kernel::{Kernel, STEP};
use crate::registers::Registers;
use crate::traffic::Trip;
use crate::worker::{Core, Worker};
use crate::{Clock, ConfigError, SimConfig, SimEndpoint};

/// Longest transfer in bytes that takes time, and so is moved by the engine's thread.
const MAX_TRANSFER: u64 = 1 << 20;

/// Longest transfer where none takes time: each holds its caller's thread until it is over.
const MAX_INSTANT: u64 = 256 << 10;

/// Most bytes that are moved on the caller's thread though their end is due later.
const SMALL: u64 = 16 << 10;

/// Codes of [`EngineError::Device`] that this engine gives.
pub(crate) mod code {
    pub(crate) const UNKNOWN_ENDPOINT: u32 = 1;
    pub(crate) const NO_KERNEL: u32 = 2;
    pub(crate) const STREAM_ENDED: u32 = 3;
}

/// The copy engines, registers and kernels of one tenant's simulated devices.
///
/// Dropping it ends its thread; what is still out then is never reported, so [`DmaEngine::quiesce`] it before.
pub struct SimEngine {
    core: Arc<Core>,
    /// Moves the bytes of transfers that take time. None with a manual clock: `poll` does it.
    _worker: Option<Worker>,
}

impl SimEngine {
    /// [`EngineError::Device`]: the initiator is none of this engine's endpoints.
    pub const UNKNOWN_ENDPOINT: u32 = code::UNKNOWN_ENDPOINT;
    /// [`EngineError::Device`]: no START waits for this kernel.
    pub const NO_KERNEL: u32 = code::NO_KERNEL;
    /// [`EngineError::Device`]: the kernel's stream is longer than the cipher allows.
    pub const STREAM_ENDED: u32 = code::STREAM_ENDED;

    /// An engine for these endpoints. `ledger` counts time as `clock` does. Starts one thread, unless the clock is manual.
    ///
    /// # Errors
    /// If the endpoints make no sense, or no thread can be had.
    pub fn new(
        config: &SimConfig,
        memory: Arc<dyn Memory>,
        ledger: Arc<dyn LinkLedger>,
        clock: Clock,
    ) -> Result<Self, ConfigError> {
        let manual = clock.is_manual();
        let fabric = Fabric::new(config, ledger)?;
        let core = Arc::new(Core::new(config, fabric, Registers::new(config), memory, clock));
        let worker = if manual { None } else { Some(Worker::start(&core, config.thread_hook.clone())?) };
        Ok(Self { core, _worker: worker })
    }

    fn flush(&self, transfer: &Transfer, endpoint: &SimEndpoint) -> Result<Submit, EngineError> {
        let core = &*self.core;
        let nothing = Ok(Submit::Executed(Finished::moved(transfer.job, Ok(0))));
        if endpoint.latency.is_zero() && core.held() == 0 {
            return nothing;
        }
        core.claim()?;
        let now = core.clock.now();
        let mut inner = core.inner();
        if !inner.agenda.add_flush(transfer.job, transfer.initiator, now, endpoint.latency) {
            core.release(1);
            return nothing;
        }
        core.call_worker(&inner, inner.agenda.next_due(now));
        Ok(Submit::Submitted)
    }

    /// A transfer that takes time, or may: it holds a slot from here to its end.
    fn book(
        &self,
        transfer: &Transfer,
        endpoint: &SimEndpoint,
        crossings: Crossings,
        kernel: Option<Box<Kernel>>,
    ) -> Submit {
        let core = &*self.core;
        let (now, route) = (core.clock.now(), route(&transfer.work));
        let len = total_len(written(&transfer.work));
        let crosses = crossings.iter().any(|(_, _, bytes)| *bytes > 0);
        if endpoint.latency.is_zero() && !crosses && (kernel.is_none() || len <= STEP) {
            let end = core.run(transfer, kernel);
            core.release(1);
            return Submit::Executed(end);
        }
        // A few bytes are moved here at once: handing them to the thread would take longer.
        let small = kernel.is_none() && !core.clock.is_manual() && len <= SMALL;
        let moved = small.then(|| core.run(transfer, None));
        let mut inner = core.inner();
        let due = if crosses { None } else { Some(inner.occupy(endpoint, route, now)) };
        let seq = inner.agenda.add(Move { transfer: transfer.clone(), kernel }, moved, due);
        if crosses {
            inner.traffic.add(Trip::new(seq, transfer.initiator, route, crossings, now));
            core.book(&mut inner, now);
        }
        let next = inner.agenda.next_due(now).into_iter().chain(inner.traffic.due()).min();
        core.call_worker(&inner, next.filter(|_| small));
        Submit::Submitted
    }
}

fn written(work: &Work) -> &[Segment] {
    match work {
        Work::Copy { dst, .. } | Work::Fill { dst, .. } | Work::Kernel { dst, .. } => dst,
        Work::Atomic { .. } | Work::Flush => &[],
    }
}

impl DmaEngine for SimEngine {
    fn caps(&self) -> EngineCaps {
        let max_transfer = if self.core.fabric.is_instant() { MAX_INSTANT } else { MAX_TRANSFER };
        EngineCaps { max_transfer, queue_depth: self.core.depth, reports_faults: true, max_mappings: u32::MAX }
    }

    fn has_atomics(&self, initiator: EndpointId, at: Location) -> bool {
        self.core.fabric.endpoint(initiator).is_some() && is_ordinary(self.core.memory_of(initiator), at)
    }

    fn submit(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
        let core = &*self.core;
        let unknown = EngineError::Device { code: code::UNKNOWN_ENDPOINT };
        let endpoint = core.fabric.endpoint(transfer.initiator).ok_or(unknown)?;
        let memory = core.memory_of(transfer.initiator);
        if let Some(access) = core.registers.access(&transfer.work) {
            return Ok(Submit::Executed(core.registers.carry_out(access?, transfer, memory)));
        }
        let (src, dst) = match &transfer.work {
            Work::Flush => return self.flush(transfer, endpoint),
            Work::Kernel { src, dst } => (src, dst),
            Work::Copy { .. } | Work::Fill { .. } | Work::Atomic { .. } => {
                let crossings = core.fabric.crossings(transfer);
                if endpoint.latency.is_zero() && crossings.is_empty() {
                    return Ok(Submit::Executed(carry_out(memory, transfer)));
                }
                core.claim()?;
                return Ok(self.book(transfer, endpoint, crossings, None));
            }
        };
        core.claim()?;
        let Some(seed) = core.registers.seed(transfer.initiator, transfer.domain) else {
            core.release(1);
            return Err(EngineError::Device { code: code::NO_KERNEL });
        };
        let kernel = Box::new(Kernel::new(seed, src, dst));
        Ok(self.book(transfer, endpoint, core.fabric.crossings(transfer), Some(kernel)))
    }

    fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        self.core.poll(out)
    }

    fn abort(&self, job: JobId) {
        self.core.abort(job);
    }

    /// Waits for what is due within a second, and gives up the rest at once; kernels get that second. With a manual clock, all that is not
    /// due now is given up.
    fn quiesce(&self, out: &mut Vec<Finished>) {
        self.core.quiesce(out);
    }

    fn raised(&self, out: &mut Vec<Raised>) {
        self.core.registers.raised(out);
    }

    fn refuse(&self, initiated: &Initiated, status: u32) {
        self.core.registers.refuse(initiated, status);
        self.core.wake();
    }

    fn forget(&self, domain: DomainId) {
        self.core.registers.forget(domain);
    }

    fn on_progress(&self, wake: Box<dyn Fn() + Send + Sync>) {
        self.core.on_progress(wake);
    }
}
