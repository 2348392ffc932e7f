//! Flushes that wait: what an initiator started before may be with another engine than the one that is to flush.
//!
//! Not here: who carries out what.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use iommu_addr::EndpointId;

use crate::{EngineError, Finished, JobId, Submit, Transfer, Work};

#[derive(Default)]
pub(crate) struct Fences(Mutex<State>);

#[derive(Default)]
struct State {
    /// What engines have, and whose it is.
    running: BTreeMap<JobId, EndpointId>,
    /// Flushes, and what each waits for.
    held: Vec<(Transfer, BTreeSet<JobId>)>,
}

impl State {
    fn end(&mut self, job: JobId) {
        self.running.remove(&job);
        for (_, before) in &mut self.held {
            before.remove(&job);
        }
    }
}

impl Fences {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits a transfer, or keeps it until its turn.
    pub(crate) fn submit(
        &self,
        transfer: &Transfer,
        submit: impl FnOnce(&Transfer) -> Result<Submit, EngineError>,
    ) -> Result<Submit, EngineError> {
        let mut state = self.lock();
        if transfer.work == Work::Flush {
            let mine = state.running.iter().filter(|(_, initiator)| **initiator == transfer.initiator);
            let before: BTreeSet<JobId> = mine.map(|(job, _)| *job).collect();
            if !before.is_empty() {
                state.held.push((transfer.clone(), before));
                return Ok(Submit::Submitted);
            }
        }
        // Before an engine has it, so that its end is not missed.
        state.running.insert(transfer.job, transfer.initiator);
        drop(state);
        let submitted = submit(transfer);
        if !matches!(submitted, Ok(Submit::Submitted)) {
            // A flush may have come to wait for it meanwhile.
            self.lock().end(transfer.job);
        }
        submitted
    }

    /// Whether a flush waits for nothing but [`Fences::note`].
    pub(crate) fn is_due(&self) -> bool {
        self.lock().held.iter().any(|(_, before)| before.is_empty())
    }

    /// Notes ends, and submits what waited for them. What that ends at once is appended.
    pub(crate) fn note(
        &self,
        ended: &mut Vec<Finished>,
        from: usize,
        submit: impl Fn(&Transfer) -> Result<Submit, EngineError>,
    ) {
        let mut state = self.lock();
        for Finished { job, .. } in ended.iter().skip(from) {
            state.end(*job);
        }
        let mut at = 0;
        while let Some((transfer, before)) = state.held.get(at) {
            if !before.is_empty() {
                at += 1;
                continue;
            }
            let (job, initiator) = (transfer.job, transfer.initiator);
            match submit(transfer) {
                Ok(Submit::Submitted) => drop(state.running.insert(job, initiator)),
                Ok(Submit::Executed(finished)) => ended.push(finished),
                // Its turn comes with the next end.
                Err(EngineError::Busy) => {
                    at += 1;
                    continue;
                }
                Err(error) => ended.push(Finished::failed(job, error)),
            }
            state.held.remove(at);
        }
    }

    /// Gives up a flush that waits, and answers its end; `None` if there is no such.
    pub(crate) fn give_up(&self, job: JobId) -> Option<Finished> {
        let mut state = self.lock();
        let at = state.held.iter().position(|(transfer, _)| transfer.job == job)?;
        state.held.remove(at);
        Some(Finished::failed(job, EngineError::Aborted))
    }

    /// Gives up all of them; nothing runs any more.
    pub(crate) fn give_up_all(&self, ended: &mut Vec<Finished>) {
        let mut state = self.lock();
        state.running.clear();
        let held = state.held.drain(..).map(|(transfer, _)| transfer.job);
        ended.extend(held.map(|job| Finished::failed(job, EngineError::Aborted)));
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
