//! Flushes that wait: what an initiator started before may be with another engine than the one that is to flush.
//!
//! Not here: who carries out what.

use std::collections::BTreeMap;
use std::iter::successors;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use iommu_addr::EndpointId;

use crate::jobs::ByJob;
use crate::sync::lock;
use crate::{EngineError, Finished, JobId, Submit, Transfer, Work};

/// Whose a transfer is, and how many flushes there had been when it was submitted: a flush waits for what has less than itself.
type Since = (EndpointId, u64);

#[derive(Default)]
pub(crate) struct Fences {
    /// What engines have.
    running: ByJob<Mutex<Running>>,
    flushes: AtomicU64,
    held: Mutex<BTreeMap<Since, Transfer>>,
    /// How many those are, or one more, for a look without the lock. A flush is counted before it looks for what it waits for, so that whatever ends
    /// afterwards tells it.
    holding: AtomicUsize,
}

#[derive(Default)]
struct Running {
    since: BTreeMap<JobId, Since>,
    /// How many there are of each.
    counts: BTreeMap<Since, usize>,
}

impl Running {
    fn insert(&mut self, job: JobId, since: Since) {
        self.since.insert(job, since);
        *self.counts.entry(since).or_default() += 1;
    }

    fn remove(&mut self, job: JobId) {
        let Some(since) = self.since.remove(&job) else { return };
        if let Some(count) = self.counts.get_mut(&since) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&since);
            }
        }
    }

    /// The first of what an initiator has.
    fn first(&self, initiator: EndpointId) -> Option<u64> {
        self.counts.range((initiator, 0)..=(initiator, u64::MAX)).next().map(|((_, since), _)| *since)
    }
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
        self.begin(transfer);
        let submitted = submit(transfer);
        if !matches!(submitted, Ok(Submit::Submitted)) {
            self.end(transfer.job);
        }
        submitted
    }

    fn begin(&self, transfer: &Transfer) {
        let mut running = lock(self.running.of(transfer.job));
        // Relaxed: whoever submits a flush behind this one counts after it.
        running.insert(transfer.job, (transfer.initiator, self.flushes.load(Ordering::Relaxed)));
    }

    fn end(&self, job: JobId) {
        lock(self.running.of(job)).remove(job);
    }

    /// Keeps a flush that has something to wait for. False if it has not.
    fn hold(&self, flush: &Transfer) -> bool {
        let mut held = lock(&self.held);
        self.holding.store(held.len() + 1, Ordering::Release);
        let since = self.flushes.fetch_add(1, Ordering::Relaxed) + 1;
        let waits = self.first(flush.initiator) < since;
        if waits {
            held.insert((flush.initiator, since), flush.clone());
        }
        self.holding.store(held.len(), Ordering::Release);
        waits
    }

    /// The first of what an initiator has with all engines; with nothing, beyond all.
    fn first(&self, initiator: EndpointId) -> u64 {
        self.running.iter().filter_map(|part| lock(part).first(initiator)).min().unwrap_or(u64::MAX)
    }

    /// The flushes of each initiator that wait for nothing any more.
    fn due(&self, held: &BTreeMap<Since, Transfer>) -> Vec<Since> {
        let next = |last: &EndpointId| held.range((*last, u64::MAX)..).next().map(|((initiator, _), _)| *initiator);
        let initiators = successors(held.keys().next().map(|(initiator, _)| *initiator), next);
        let mine = |initiator| held.range((initiator, 0)..=(initiator, self.first(initiator))).map(|(since, _)| *since);
        initiators.flat_map(mine).collect()
    }

    /// Whether a flush waits for nothing but [`Fences::note`].
    pub(crate) fn is_due(&self) -> bool {
        self.holding.load(Ordering::Acquire) > 0 && !self.due(&lock(&self.held)).is_empty()
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
        // A flush that found one of them running had been counted before the lock of that was free again.
        if self.holding.load(Ordering::Acquire) == 0 {
            return;
        }
        // Until the end, so that whoever gives a flush up finds it here or with its engine.
        let mut held = lock(&self.held);
        for since in self.due(&held) {
            let Some(transfer) = held.get(&since) else { continue };
            self.begin(transfer);
            let submitted = submit(transfer);
            if submitted != Ok(Submit::Submitted) {
                self.end(transfer.job);
            }
            match submitted {
                Ok(Submit::Submitted) => {}
                Ok(Submit::Executed(finished)) => ended.push(finished),
                // Its turn comes when somebody looks again.
                Err(EngineError::Busy) => continue,
                Err(error) => ended.push(Finished::failed(transfer.job, error)),
            }
            held.remove(&since);
        }
        self.holding.store(held.len(), Ordering::Release);
    }

    /// Gives up a flush that waits, and answers its end; `None` if there is no such.
    pub(crate) fn give_up(&self, job: JobId) -> Option<Finished> {
        let mut held = lock(&self.held);
        let since = held.iter().find(|(_, flush)| flush.job == job).map(|(since, _)| *since)?;
        held.remove(&since);
        self.holding.store(held.len(), Ordering::Release);
        Some(Finished::failed(job, EngineError::Aborted))
    }

    /// Gives up all of them; nothing runs any more.
    pub(crate) fn give_up_all(&self, ended: &mut Vec<Finished>) {
        self.running.iter().for_each(|part| *lock(part) = Running::default());
        let held = std::mem::take(&mut *lock(&self.held));
        ended.extend(held.into_values().map(|flush| Finished::failed(flush.job, EngineError::Aborted)));
        self.holding.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    use iommu_addr::DomainId;
    use proptest::prelude::*;

    use super::*;
    use crate::Segments;

    fn flush(job: u64) -> Transfer {
        Transfer { job: JobId(job), domain: DomainId(1), initiator: EndpointId::local(0), work: Work::Flush }
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Submit {
            initiator: u16,
            is_flush: bool,
        },
        /// One of what runs ends; a full engine takes no flush meanwhile.
        End {
            which: usize,
            is_full: bool,
        },
        GiveUp {
            which: usize,
        },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0u16..3, any::<bool>()).prop_map(|(initiator, is_flush)| Step::Submit { initiator, is_flush }),
            4 => (any::<usize>(), any::<bool>()).prop_map(|(which, is_full)| Step::End { which, is_full }),
            1 => any::<usize>().prop_map(|which| Step::GiveUp { which }),
        ]
    }

    /// What runs, and flushes with what they wait for.
    #[derive(Default)]
    struct Model {
        running: BTreeMap<JobId, u16>,
        held: Vec<(JobId, u16, BTreeSet<JobId>)>,
    }

    impl Model {
        /// True if it goes to its engine.
        fn submit(&mut self, job: JobId, initiator: u16, is_flush: bool) -> bool {
            let mine = self.running.iter().filter(|(_, of)| is_flush && **of == initiator);
            let before: BTreeSet<_> = mine.map(|(job, _)| *job).collect();
            let goes = before.is_empty();
            if goes {
                self.running.insert(job, initiator);
            } else {
                self.held.push((job, initiator, before));
            }
            goes
        }

        /// The flushes that go to their engines, if those take any.
        fn end(&mut self, ended: JobId, is_full: bool) -> BTreeSet<JobId> {
            self.running.remove(&ended);
            self.held.iter_mut().for_each(|(.., before)| {
                before.remove(&ended);
            });
            let due = self.held.extract_if(.., |(.., before)| before.is_empty() && !is_full);
            due.map(|(job, initiator, _)| (job, self.running.insert(job, initiator)).0).collect()
        }
    }

    proptest! {
        #[test]
        fn a_flush_goes_when_all_before_it_has_ended(steps in prop::collection::vec(step(), 1..200)) {
            let (fences, mut model) = (Fences::default(), Model::default());
            for (job, step) in (0..).step_by(100).map(JobId).zip(steps) {
                match step {
                    Step::Submit { initiator, is_flush } => {
                        let (src, dst, route) = (Segments::new(), Segments::new(), crate::Route::Direct);
                        let work = if is_flush { Work::Flush } else { Work::Copy { src, dst, route } };
                        let transfer = Transfer { initiator: EndpointId::local(initiator), work, ..flush(job.0) };
                        let mut went = false;
                        let told = fences.submit(&transfer, |_| {
                            went = true;
                            Ok(Submit::Submitted)
                        });
                        prop_assert_eq!((told, went), (Ok(Submit::Submitted), model.submit(job, initiator, is_flush)));
                    }
                    Step::End { which, is_full } => {
                        let Some(ended) = model.running.keys().nth(which % model.running.len().max(1)).copied() else { continue };
                        let went = RefCell::new(BTreeSet::new());
                        fences.note(&mut vec![Finished::moved(ended, Ok(0))], 0, |transfer| {
                            if is_full {
                                return Err(EngineError::Busy);
                            }
                            went.borrow_mut().insert(transfer.job);
                            Ok(Submit::Submitted)
                        });
                        prop_assert_eq!(went.into_inner(), model.end(ended, is_full));
                    }
                    Step::GiveUp { which } => {
                        if model.held.is_empty() {
                            continue;
                        }
                        let (job, ..) = model.held.remove(which % model.held.len());
                        prop_assert_eq!(fences.give_up(job), Some(Finished::failed(job, EngineError::Aborted)));
                        prop_assert_eq!(fences.give_up(job), None);
                    }
                }
                let is_due = model.held.iter().any(|(.., before)| before.is_empty());
                prop_assert_eq!((fences.is_due(), fences.holding.load(Ordering::Relaxed)), (is_due, model.held.len()));
            }
        }
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
