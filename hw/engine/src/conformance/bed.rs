//! What a case stands on: one engine, its memory, the model, and a record of what is still out.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use iommu_addr::{DomainId, EndpointId};

use super::{APERTURES, FlatMemory, Noise, Parts};
use crate::proof::{Pair, ProofError, Prover};
use crate::sync::lock;
use crate::{DmaEngine, EndpointKind, EndpointSpec, EngineError, Finished, JobId, Memory, Submit, Transfer, Work};

/// How long an engine in real time may take for anything here. Reached only by an engine that hangs.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) struct Bed {
    parts: Parts,
    pub(super) model: FlatMemory,
    jobs: AtomicU64,
    /// Transfers that have not been reported, with their work.
    open: Mutex<HashMap<JobId, Work>>,
    woken: Arc<(Mutex<bool>, Condvar)>,
}

impl Bed {
    pub(super) fn new(parts: Parts) -> Self {
        let model = FlatMemory::new();
        let mut noise = Noise::new(7);
        for (at, bytes) in model.runs() {
            let bytes = noise.bytes(bytes.len());
            model.write(at, &bytes).expect("the model has its own layout");
            parts.memory.write(at, &bytes).expect("the rig provides the suite's layout");
        }
        let woken = Arc::new((Mutex::new(false), Condvar::new()));
        let wake = Arc::clone(&woken);
        parts.engine.on_progress(Box::new(move || {
            *lock(&wake.0) = true;
            wake.1.notify_all();
        }));
        Self { parts, model, jobs: AtomicU64::new(1), open: Mutex::default(), woken }
    }

    pub(super) fn engine(&self) -> &dyn DmaEngine {
        &*self.parts.engine
    }

    /// Submits; an end on the spot, and a refusal for good, come back as [`Finished`].
    pub(super) fn submit(&self, initiator: EndpointId, work: &Work) -> Result<(JobId, Option<Finished>), EngineError> {
        let job = JobId(self.jobs.fetch_add(1, Ordering::Relaxed));
        let transfer = Transfer { job, domain: DomainId(1), initiator, work: work.clone() };
        let kept = transfer.clone();
        lock(&self.open).insert(job, work.clone());
        let submitted = self.engine().submit(&transfer);
        assert_eq!(transfer, kept, "a submission leaves the transfer as it was");
        match submitted {
            Ok(Submit::Submitted) => Ok((job, None)),
            Ok(Submit::Executed(finished)) => {
                self.record(&finished);
                Ok((job, Some(finished)))
            }
            Err(EngineError::Busy) => {
                lock(&self.open).remove(&job);
                Err(EngineError::Busy)
            }
            Err(error) => {
                let finished = Finished::failed(job, error);
                self.record(&finished);
                Ok((job, Some(finished)))
            }
        }
    }

    /// Submits, and waits out a full queue.
    pub(super) fn submit_soon(&self, initiator: EndpointId, work: &Work) -> (JobId, Option<Finished>) {
        loop {
            match self.submit(initiator, work) {
                Ok(taken) => return taken,
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    /// One transfer from submission to end.
    pub(super) fn run(&self, initiator: EndpointId, work: &Work) -> Finished {
        let (job, done) = self.submit(initiator, work).expect("an idle engine is not busy");
        done.unwrap_or_else(|| {
            let ends = self.settle();
            assert_eq!(ends.len(), 1, "one transfer has one end");
            assert_eq!(ends[0].job, job);
            ends.into_iter().next().expect("counted above")
        })
    }

    /// Drives time until nothing is out. Answers the ends in the order in which they were reported.
    pub(super) fn settle(&self) -> Vec<Finished> {
        let start = Instant::now();
        let mut ends = Vec::new();
        loop {
            let (next, any) = self.poll(&mut ends);
            if lock(&self.open).is_empty() {
                return ends;
            }
            if any {
                continue;
            }
            assert!(start.elapsed() < PATIENCE, "a submitted transfer ends");
            match &self.parts.advance {
                Some(advance) => advance(next.expect("an engine whose clock stands still knows when it goes on")),
                None => self.wait(next.unwrap_or(PATIENCE).min(PATIENCE)),
            }
        }
    }

    /// Asks once, and moves a clock that stands still to the next end.
    pub(super) fn turn(&self, ends: &mut Vec<Finished>) {
        let (next, any) = self.poll(ends);
        if let (false, Some(advance), Some(next)) = (any, &self.parts.advance, next) {
            advance(next);
        }
    }

    pub(super) fn quiesce(&self) -> Vec<Finished> {
        let mut ends = Vec::new();
        self.engine().quiesce(&mut ends);
        ends.iter().for_each(|end| self.record(end));
        assert!(lock(&self.open).is_empty(), "a quiet engine has reported every transfer");
        ends
    }

    pub(super) fn is_idle(&self) -> bool {
        lock(&self.open).is_empty()
    }

    /// Compares every byte with the model.
    pub(super) fn compare(&self) {
        for (at, want) in self.model.runs() {
            let mut have = vec![0; want.len()];
            self.parts.memory.read(at, &mut have).expect("the rig provides the suite's layout");
            if want != have {
                let index = want.iter().zip(&have).position(|(want, have)| want != have).unwrap_or(0);
                panic!("byte {index:#x} from {at:?} is {:#x}, not {:#x}", have[index], want[index]);
            }
        }
    }

    /// Proves the suite's endpoints to be peers, both ways.
    pub(super) fn prove(&self) -> Vec<Result<(), ProofError>> {
        let specs = APERTURES.map(|(id, memory_len)| EndpointSpec {
            id,
            kind: EndpointKind::Gpu,
            name: id.to_string(),
            memory_len,
            registers_len: 0,
            granularity: 4096,
            engines: 1,
        });
        let [one, other] = &specs;
        let wait = |by| match &self.parts.advance {
            Some(advance) => advance(by),
            None => self.wait(by),
        };
        let prover = Prover {
            engine: self.engine(),
            memory: &*self.parts.memory,
            unit: 64,
            deadline: Instant::now() + PATIENCE,
            wait: &wait,
        };
        prover.prove(&[Pair { accessor: one, owner: other }, Pair { accessor: other, owner: one }])
    }

    fn poll(&self, ends: &mut Vec<Finished>) -> (Option<Duration>, bool) {
        let before = ends.len();
        let next = self.engine().poll(ends);
        ends[before..].iter().for_each(|end| self.record(end));
        (next, ends.len() > before)
    }

    fn record(&self, end: &Finished) {
        let work = lock(&self.open).remove(&end.job);
        let work = work.expect("only a transfer that is out ends, and it ends once");
        self.model.apply(&work, end.bytes);
    }

    fn wait(&self, at_most: Duration) {
        let guard = lock(&self.woken.0);
        let (mut woken, _) =
            self.woken.1.wait_timeout_while(guard, at_most, |woken| !*woken).unwrap_or_else(PoisonError::into_inner);
        *woken = false;
    }
}
