//! An engine that does as it is told: executes at once, holds what it gets until it is released, or is full.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hw_engine::{
    DmaEngine, EngineCaps, EngineError, Finished, Initiated, JobId, Raised, Submit, Transfer, Work, total_len,
};
use iommu_addr::{DomainId, EndpointId, Location, Segment};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Executes at once.
    Inline,
    /// Holds transfers until they are released.
    Hold,
    /// Takes nothing.
    Full,
    /// Executes, but reports the end as failed after this many bytes.
    Fail(u64),
}

pub type Wake = Box<dyn Fn() + Send + Sync>;

#[derive(Default)]
pub struct State {
    pub held: Vec<Transfer>,
    pub finished: Vec<Finished>,
    pub raised: Vec<Raised>,
    pub aborted: Vec<JobId>,
    pub refused: Vec<(Initiated, u32)>,
    pub forgotten: Vec<DomainId>,
    /// Every transfer ever taken.
    pub seen: Vec<Transfer>,
    /// How many of them there were when the doorbell rang last.
    pub rung: usize,
    wake: Option<Arc<Wake>>,
}

pub struct ScriptEngine {
    inner: Arc<dyn DmaEngine>,
    pub mode: Mutex<Mode>,
    /// Aborted transfers end (with an error) only if this is set; else they stay held.
    pub abort_ends: Mutex<bool>,
    pub state: Mutex<State>,
    max_transfer: u64,
    max_mappings: u32,
    /// Longest transfer, whichever it is, if that is more than `max_transfer`.
    pub longest: Mutex<Option<u64>>,
    /// Whoever cannot copy in one hop.
    pub two_hops: Mutex<Option<EndpointId>>,
    /// The endpoint whose engine fills nothing itself.
    pub no_fills: Mutex<Option<EndpointId>>,
    /// Whoever has no atomic operations.
    pub no_atomics: Mutex<Option<EndpointId>>,
    /// What happens elsewhere while it takes a transfer.
    pub meanwhile: Mutex<Option<Arc<dyn Fn() + Send + Sync>>>,
}

impl ScriptEngine {
    pub fn new(inner: Arc<dyn DmaEngine>, max_transfer: u64) -> Arc<Self> {
        Self::mapping(inner, max_transfer, u32::MAX)
    }

    /// One whose IOMMU holds so many mappings.
    pub fn mapping(inner: Arc<dyn DmaEngine>, max_transfer: u64, max_mappings: u32) -> Arc<Self> {
        let (mode, abort_ends) = (Mutex::new(Mode::Inline), Mutex::new(true));
        let (state, longest, two_hops, no_fills, no_atomics, meanwhile) = Default::default();
        Arc::new(Self {
            inner,
            mode,
            abort_ends,
            state,
            max_transfer,
            max_mappings,
            longest,
            two_hops,
            no_fills,
            no_atomics,
            meanwhile,
        })
    }

    pub fn set(&self, mode: Mode) {
        *self.mode.lock().unwrap() = mode;
    }

    pub fn held(&self) -> usize {
        self.state.lock().unwrap().held.len()
    }

    fn run(&self, transfer: &Transfer) -> Finished {
        if matches!(transfer.work, Work::Kernel { .. }) {
            return Finished { job: transfer.job, bytes: len(&transfer.work), result: Ok(()), raised: true, value: 0 };
        }
        match self.inner.submit(transfer) {
            Ok(Submit::Executed(finished)) => finished,
            other => panic!("the inner engine executes at once: {other:?}"),
        }
    }

    /// Carries out the `index`th held transfer and reports it.
    pub fn release(&self, index: usize) {
        let transfer = self.state.lock().unwrap().held.remove(index);
        let finished = self.run(&transfer);
        self.report(finished);
    }

    pub fn release_all(&self) {
        while self.held() > 0 {
            self.release(0);
        }
    }

    /// Ends the `index`th held transfer with an error.
    pub fn fail(&self, index: usize, bytes: u64, error: EngineError) {
        let transfer = self.state.lock().unwrap().held.remove(index);
        self.report(Finished { job: transfer.job, bytes, result: Err(error), raised: false, value: 0 });
    }

    fn report(&self, finished: Finished) {
        let wake = {
            let mut state = self.state.lock().unwrap();
            state.finished.push(finished);
            state.wake.clone()
        };
        if let Some(wake) = wake {
            wake();
        }
    }

    pub fn raise(&self, raised: Raised) {
        self.state.lock().unwrap().raised.push(raised);
    }
}

fn len(work: &Work) -> u64 {
    match work {
        Work::Copy { dst, .. } | Work::Fill { dst, .. } | Work::Kernel { dst, .. } => total_len(dst),
        Work::Atomic { atomic, .. } => atomic.len,
        Work::Flush => 0,
    }
}

impl DmaEngine for ScriptEngine {
    fn caps(&self) -> EngineCaps {
        EngineCaps {
            max_transfer: self.max_transfer,
            queue_depth: 64,
            reports_faults: true,
            max_mappings: self.max_mappings,
        }
    }

    fn in_one_hop(&self, initiator: EndpointId, dst: &[Segment], src: &[Segment]) -> bool {
        assert_eq!(total_len(dst), total_len(src), "both sides of the copy");
        *self.two_hops.lock().unwrap() != Some(initiator)
    }

    fn fills(&self, initiator: EndpointId, _: &[Segment]) -> bool {
        *self.no_fills.lock().unwrap() != Some(initiator)
    }

    fn longest(&self, _: &Transfer) -> u64 {
        self.longest.lock().unwrap().unwrap_or(self.max_transfer)
    }

    fn has_atomics(&self, initiator: EndpointId, at: Location) -> bool {
        *self.no_atomics.lock().unwrap() != Some(initiator) && self.inner.has_atomics(initiator, at)
    }

    fn doorbell(&self) {
        let mut state = self.state.lock().unwrap();
        state.rung = state.seen.len();
    }

    fn submit(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
        let mode = *self.mode.lock().unwrap();
        let meanwhile = self.meanwhile.lock().unwrap().clone();
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
        if mode == Mode::Full {
            return Err(EngineError::Busy);
        }
        let mut state = self.state.lock().unwrap();
        state.seen.push(transfer.clone());
        match mode {
            Mode::Hold => {
                state.held.push(transfer.clone());
                Ok(Submit::Submitted)
            }
            Mode::Fail(bytes) => {
                let result = Err(EngineError::Device { code: 7 });
                Ok(Submit::Executed(Finished { job: transfer.job, bytes, result, raised: false, value: 0 }))
            }
            Mode::Inline | Mode::Full => {
                drop(state);
                Ok(Submit::Executed(self.run(transfer)))
            }
        }
    }

    fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        out.append(&mut self.state.lock().unwrap().finished);
        None
    }

    fn abort(&self, job: JobId) {
        let ended = {
            let mut state = self.state.lock().unwrap();
            state.aborted.push(job);
            let index = state.held.iter().position(|transfer| transfer.job == job);
            match index {
                Some(index) if *self.abort_ends.lock().unwrap() => Some(state.held.remove(index)),
                _ => None,
            }
        };
        if let Some(transfer) = ended {
            self.report(Finished::failed(transfer.job, EngineError::Aborted));
        }
    }

    fn quiesce(&self, out: &mut Vec<Finished>) {
        let held = std::mem::take(&mut self.state.lock().unwrap().held);
        for transfer in held {
            out.push(Finished::failed(transfer.job, EngineError::Aborted));
        }
        self.poll(out);
    }

    fn raised(&self, out: &mut Vec<Raised>) {
        out.append(&mut self.state.lock().unwrap().raised);
    }

    fn refuse(&self, initiated: &Initiated, status: u32) {
        let mut state = self.state.lock().unwrap();
        state.refused.push((*initiated, status));
        let Initiated { endpoint, domain, .. } = *initiated;
        state.raised.push(Raised::Interrupt { endpoint, domain, vector: 0 });
    }

    fn forget(&self, domain: DomainId) {
        self.state.lock().unwrap().forgotten.push(domain);
    }

    fn on_progress(&self, wake: Wake) {
        self.state.lock().unwrap().wake = Some(Arc::new(wake));
    }
}
