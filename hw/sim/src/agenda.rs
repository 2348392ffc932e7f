//! Transfers that are out: bytes to move, and ends that are not due yet.
//!
//! Pure state: who moves the bytes, and when, is the caller's. A transfer is waiting, being moved, or moved; it ends when it is moved and
//! due. When it is due is known from the beginning, or once it is booked on every link. A flush is moved from the start; it is due when everything
//! that its initiator submitted before it is, and ends once nothing of that is left.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use hw_engine::{EngineError, Finished, JobId, Memory, Transfer, Work, copy_segments, fill_segments};
use iommu_addr::EndpointId;
use smallvec::SmallVec;

use crate::kernel::Kernel;

/// The place of a transfer in the order of submission.
pub(crate) type Seq = u64;

/// The bytes of one transfer.
pub(crate) struct Move {
    pub(crate) transfer: Transfer,
    pub(crate) kernel: Option<Box<Kernel>>,
}

impl Move {
    /// Moves bytes: a step of a kernel, all of anything else. `None`: there is more to do.
    pub(crate) fn step(&mut self, memory: &dyn Memory) -> Option<Finished> {
        if let Some(kernel) = &mut self.kernel {
            return kernel.step(memory, self.transfer.job);
        }
        Some(carry_out(memory, &self.transfer))
    }

    fn done(&self) -> u64 {
        self.kernel.as_ref().map_or(0, |kernel| kernel.done())
    }
}

/// A copy, fill, atomic operation or flush at once.
pub(crate) fn carry_out(memory: &dyn Memory, transfer: &Transfer) -> Finished {
    let moved = match &transfer.work {
        Work::Copy { src, dst, route } => copy_segments(memory, dst, src, *route),
        Work::Fill { dst, pattern } => fill_segments(memory, dst, *pattern),
        Work::Atomic { at, atomic } => {
            let was = memory.atomic(*at, *atomic);
            return Finished::atomic(transfer.job, *atomic, was);
        }
        Work::Flush | Work::Kernel { .. } => Ok(0),
    };
    Finished::moved(transfer.job, moved)
}

enum Phase {
    Waiting(Move),
    Moving,
    Moved(Finished),
}

struct Job {
    id: JobId,
    initiator: EndpointId,
    /// When it may end; `None` while it is on its way over links, or is a flush behind one that is.
    due: Option<Duration>,
    /// How long a flush takes.
    flush: Option<Duration>,
    aborted: bool,
    /// Whose registers hear of the end.
    kernel: Option<KernelOf>,
    phase: Phase,
}

/// The context that a kernel belongs to.
pub(crate) type KernelOf = (EndpointId, iommu_addr::DomainId);

/// An end, and the kernel that it is the end of.
pub(crate) struct End {
    pub(crate) finished: Finished,
    pub(crate) kernel: Option<KernelOf>,
}

#[derive(Default)]
pub(crate) struct Agenda {
    jobs: BTreeMap<Seq, Job>,
    due: BTreeSet<(Duration, Seq)>,
    /// Waiting transfers in the order in which they get their turn.
    turns: VecDeque<Seq>,
    /// Flushes of which nobody knows yet when they are due.
    flushes: Vec<Seq>,
    next: Seq,
}

impl Agenda {
    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Takes a transfer that may not end before it is due; its bytes are to be moved unless they have been. If it is not known yet when it is
    /// due, [`Agenda::set_due`] tells.
    pub(crate) fn add(&mut self, moving: Move, moved: Option<Finished>, due: Option<Duration>) -> Seq {
        let Move { transfer, kernel } = &moving;
        let kernel = kernel.is_some().then_some((transfer.initiator, transfer.domain));
        let (id, initiator) = (transfer.job, transfer.initiator);
        let waits = moved.is_none();
        let phase = moved.map_or(Phase::Waiting(moving), Phase::Moved);
        let seq = self.insert(Job { id, initiator, due, flush: None, aborted: false, kernel, phase });
        if waits {
            self.turns.push_back(seq);
        }
        seq
    }

    /// A transfer may end from `due` on.
    pub(crate) fn set_due(&mut self, seq: Seq, due: Duration) {
        if let Some(job) = self.jobs.get_mut(&seq) {
            job.due = Some(due);
            self.due.insert((due, seq));
        }
    }

    /// Whether a transfer is out and nobody has given it up.
    pub(crate) fn is_wanted(&self, seq: Seq) -> bool {
        self.jobs.get(&seq).is_some_and(|job| !job.aborted)
    }

    /// Takes a flush, which ends `latency` after everything that its initiator has out. False if there is nothing to wait for.
    pub(crate) fn add_flush(&mut self, id: JobId, initiator: EndpointId, now: Duration, latency: Duration) -> bool {
        if latency.is_zero() && !self.jobs.values().any(|job| job.initiator == initiator) {
            return false;
        }
        let moved = Phase::Moved(Finished::moved(id, Ok(0)));
        let flush = Some(latency);
        let seq = self.insert(Job { id, initiator, due: None, flush, aborted: false, kernel: None, phase: moved });
        self.flushes.push(seq);
        self.settle_flushes(now);
        true
    }

    /// Finds out when flushes are due.
    fn settle_flushes(&mut self, now: Duration) {
        for seq in std::mem::take(&mut self.flushes) {
            let Some(Job { initiator, flush: Some(latency), .. }) = self.jobs.get(&seq) else { continue };
            let mut earlier = self.jobs.range(..seq).filter(|(_, job)| job.initiator == *initiator);
            let last = earlier.try_fold(now, |last, (_, job)| Some(last.max(job.due?)));
            match last.map(|last| last.saturating_add(*latency)) {
                Some(due) => self.set_due(seq, due),
                None => self.flushes.push(seq),
            }
        }
    }

    fn insert(&mut self, job: Job) -> Seq {
        let seq = self.next;
        self.next += 1;
        self.due.extend(job.due.map(|due| (due, seq)));
        self.jobs.insert(seq, job);
        seq
    }

    /// The next transfer whose bytes are to be moved. It comes back through [`Agenda::put_back`].
    pub(crate) fn take(&mut self) -> Option<(Seq, Move)> {
        while let Some(seq) = self.turns.pop_front() {
            if let Some(moving) = self.take_one(seq) {
                return Some((seq, moving));
            }
        }
        None
    }

    /// As [`Agenda::take`], but only what is due.
    pub(crate) fn take_due(&mut self, now: Duration) -> Option<(Seq, Move)> {
        let mut due = self.due.range(..=(now, Seq::MAX)).map(|&(_, seq)| seq);
        let seq = due.find(|seq| matches!(self.jobs.get(seq), Some(Job { phase: Phase::Waiting(_), .. })))?;
        self.turns.retain(|turn| *turn != seq);
        Some((seq, self.take_one(seq)?))
    }

    fn take_one(&mut self, seq: Seq) -> Option<Move> {
        let job = self.jobs.get_mut(&seq)?;
        match std::mem::replace(&mut job.phase, Phase::Moving) {
            Phase::Waiting(moving) => Some(moving),
            other => {
                job.phase = other;
                None
            }
        }
    }

    /// The bytes stand still again; `end` if all are moved. Answers the end of a transfer that was given up meanwhile.
    pub(crate) fn put_back(&mut self, seq: Seq, moving: Move, end: Option<Finished>) -> Option<End> {
        let job = self.jobs.get_mut(&seq)?;
        if job.aborted {
            let bytes = end.map_or(moving.done(), |end| end.bytes);
            return self.end(seq, |id| aborted(id, bytes));
        }
        match end {
            Some(end) => job.phase = Phase::Moved(end),
            None => {
                job.phase = Phase::Waiting(moving);
                self.turns.push_back(seq);
            }
        }
        None
    }

    /// Ends what is moved and due.
    pub(crate) fn settle(&mut self, now: Duration) -> SmallVec<[End; 4]> {
        self.settle_flushes(now);
        let due: SmallVec<[Seq; 16]> = self.due.range(..=(now, Seq::MAX)).map(|&(_, seq)| seq).collect();
        due.into_iter().filter_map(|seq| self.end_moved(seq)).collect()
    }

    fn end_moved(&mut self, seq: Seq) -> Option<End> {
        let job = self.jobs.get(&seq)?;
        let Phase::Moved(finished) = &job.phase else { return None };
        if job.flush.is_some() && self.jobs.range(..seq).any(|(_, earlier)| earlier.initiator == job.initiator) {
            return None;
        }
        let finished = finished.clone();
        self.end(seq, |_| finished)
    }

    /// When the next transfer is due that is not yet.
    pub(crate) fn next_due(&self, now: Duration) -> Option<Duration> {
        self.due.range((now, Seq::MAX)..).map(|&(due, _)| due).find(|due| *due > now)
    }

    /// Gives up one transfer. Its end comes from here, or from [`Agenda::put_back`] if its bytes are being moved.
    pub(crate) fn abort(&mut self, id: JobId) -> Option<End> {
        let seq = self.jobs.iter().find(|(_, job)| job.id == id).map(|(seq, _)| *seq)?;
        self.abort_one(seq)
    }

    /// Gives up the transfers that are due after `horizon`; once it is reached also those that are due nobody knows when, and kernels.
    pub(crate) fn abort_late(&mut self, horizon: Duration, reached: bool) -> Vec<End> {
        let is_late = |job: &Job| job.due.map_or(reached, |due| due > horizon) || (reached && job.kernel.is_some());
        let late = self.jobs.iter().filter(|(_, job)| is_late(job));
        let late: Vec<Seq> = late.map(|(seq, _)| *seq).collect();
        late.into_iter().filter_map(|seq| self.abort_one(seq)).collect()
    }

    fn abort_one(&mut self, seq: Seq) -> Option<End> {
        let job = self.jobs.get_mut(&seq)?;
        let bytes = match &job.phase {
            Phase::Moving => {
                job.aborted = true;
                return None;
            }
            Phase::Waiting(moving) => moving.done(),
            Phase::Moved(end) => end.bytes,
        };
        self.turns.retain(|turn| *turn != seq);
        self.end(seq, |id| aborted(id, bytes))
    }

    fn end(&mut self, seq: Seq, finished: impl FnOnce(JobId) -> Finished) -> Option<End> {
        let job = self.jobs.remove(&seq)?;
        if let Some(due) = job.due {
            self.due.remove(&(due, seq));
        }
        Some(End { finished: finished(job.id), kernel: job.kernel })
    }
}

fn aborted(job: JobId, bytes: u64) -> Finished {
    Finished { job, bytes, result: Err(EngineError::Aborted), raised: false, value: 0 }
}
