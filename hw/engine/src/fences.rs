//! Flushes that wait: what an initiator started before may be with another engine than the one that is to flush.
//!
//! Not here: who carries out what.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use iommu_addr::EndpointId;

use crate::jobs::ByJob;
use crate::sync::lock;
use crate::{EngineError, Finished, JobId, Submit, Transfer, Work};

#[derive(Default)]
pub(crate) struct Fences {
    /// What engines have, and whose it is.
    running: ByJob<Mutex<BTreeMap<JobId, EndpointId>>>,
    held: Mutex<Vec<Held>>,
    /// How many those are, or one more, for a look without the lock. A flush is counted before it looks for what it waits for, so that whatever ends
    /// afterwards tells it.
    holding: AtomicUsize,
}

/// A flush, and what it waits for.
struct Held {
    transfer: Transfer,
    before: BTreeSet<JobId>,
}

impl Fences {
    /// Submits a transfer, or keeps it until its turn.
    pub(crate) fn submit(
        &self,
        transfer: &Transfer,
        submit: impl FnOnce(&Transfer) -> Result<Submit, EngineError>,
    ) -> Result<Submit, EngineError> {
        if transfer.work == Work::Flush && self.hold(transfer) {
            return Ok(Submit::Submitted);
        }
        // Before an engine has it, so that its end is not missed.
        lock(self.running.of(transfer.job)).insert(transfer.job, transfer.initiator);
        let submitted = submit(transfer);
        if !matches!(submitted, Ok(Submit::Submitted)) {
            // A flush may have come to wait for it meanwhile.
            self.end(transfer.job);
        }
        submitted
    }

    /// Keeps a flush that has something to wait for. False if it has not.
    fn hold(&self, flush: &Transfer) -> bool {
        let mut held = lock(&self.held);
        self.holding.store(held.len() + 1, Ordering::Release);
        let mut before = BTreeSet::new();
        for part in self.running.iter() {
            let part = lock(part);
            let mine = part.iter().filter(|(_, initiator)| **initiator == flush.initiator);
            before.extend(mine.map(|(job, _)| *job));
        }
        let waits = !before.is_empty();
        if waits {
            held.push(Held { transfer: flush.clone(), before });
        }
        self.holding.store(held.len(), Ordering::Release);
        waits
    }

    fn end(&self, job: JobId) {
        let _ = lock(self.running.of(job)).remove(&job);
        // A flush that found it running had been counted before the lock above was free again.
        if self.holding.load(Ordering::Acquire) > 0 {
            for held in lock(&self.held).iter_mut() {
                held.before.remove(&job);
            }
        }
    }

    /// Whether a flush waits for nothing but [`Fences::note`].
    pub(crate) fn is_due(&self) -> bool {
        self.holding.load(Ordering::Acquire) > 0 && lock(&self.held).iter().any(|held| held.before.is_empty())
    }

    /// Notes ends, and submits what waited for them. What that ends at once is appended.
    pub(crate) fn note(
        &self,
        ended: &mut Vec<Finished>,
        from: usize,
        submit: impl Fn(&Transfer) -> Result<Submit, EngineError>,
    ) {
        for Finished { job, .. } in ended.iter().skip(from) {
            self.end(*job);
        }
        if self.holding.load(Ordering::Acquire) == 0 {
            return;
        }
        // Until the end, so that whoever gives a flush up finds it here or with its engine.
        let mut held = lock(&self.held);
        let mut at = 0;
        while let Some(Held { transfer, before }) = held.get(at) {
            if !before.is_empty() {
                at += 1;
                continue;
            }
            let (job, running) = (transfer.job, self.running.of(transfer.job));
            lock(running).insert(job, transfer.initiator);
            let submitted = submit(transfer);
            if submitted != Ok(Submit::Submitted) {
                lock(running).remove(&job);
            }
            match submitted {
                Ok(Submit::Submitted) => {}
                Ok(Submit::Executed(finished)) => ended.push(finished),
                // Its turn comes when somebody looks again.
                Err(EngineError::Busy) => {
                    at += 1;
                    continue;
                }
                Err(error) => ended.push(Finished::failed(job, error)),
            }
            held.remove(at);
        }
        self.holding.store(held.len(), Ordering::Release);
    }

    /// Gives up a flush that waits, and answers its end; `None` if there is no such.
    pub(crate) fn give_up(&self, job: JobId) -> Option<Finished> {
        let mut held = lock(&self.held);
        let at = held.iter().position(|held| held.transfer.job == job)?;
        held.remove(at);
        self.holding.store(held.len(), Ordering::Release);
        Some(Finished::failed(job, EngineError::Aborted))
    }

    /// Gives up all of them; nothing runs any more.
    pub(crate) fn give_up_all(&self, ended: &mut Vec<Finished>) {
        self.running.iter().for_each(|part| lock(part).clear());
        let mut held = lock(&self.held);
        ended.extend(held.drain(..).map(|held| Finished::failed(held.transfer.job, EngineError::Aborted)));
        self.holding.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use iommu_addr::DomainId;

    use super::*;

    fn flush(job: u64) -> Transfer {
        Transfer { job: JobId(job), domain: DomainId(1), initiator: EndpointId::local(0), work: Work::Flush }
    }

    #[test]
    fn a_flush_that_waits_for_what_ends_at_once_is_not_forgotten() {
        for at_once in [Err(EngineError::Busy), Ok(())] {
            let fences = Fences::default();
            let done = fences.submit(&flush(1), |_| {
                // From another thread.
                assert_eq!(fences.submit(&flush(2), |_| unreachable!("it waits")), Ok(Submit::Submitted));
                assert!(!fences.is_due());
                at_once.map(|()| Submit::Executed(Finished::moved(JobId(1), Ok(0))))
            });
            assert_eq!(done.map(drop), at_once);
            assert!(fences.is_due());
            let mut ended = Vec::new();
            fences.note(&mut ended, 0, |transfer| Ok(Submit::Executed(Finished::moved(transfer.job, Ok(0)))));
            assert_eq!(ended.iter().map(|end| end.job).collect::<Vec<_>>(), [JobId(2)]);
        }
    }
}
