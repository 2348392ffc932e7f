//! [`Book`]: what an engine has in no lane.
//!
//! Not here: whose turn it is.

use std::collections::VecDeque;

use hw_engine::{EngineError, Finished, JobId, Transfer};

/// What is in no lane. Seldom there is anything.
#[derive(Default)]
pub(crate) struct Book {
    /// What waits for the engine's own thread, in the order in which it came.
    pub(crate) waiting: VecDeque<Transfer>,
    /// What that thread has in its hands.
    pub(crate) busy: Option<JobId>,
    /// That thread ends when nothing waits any more.
    pub(crate) over: bool,
    /// Flushes that wait for what is in lanes.
    pub(crate) flushes: Vec<Flush>,
    /// What ended where nobody collects.
    pub(crate) ended: Vec<Finished>,
}

/// A flush, and where the lanes of each GPU were when it came.
pub(crate) struct Flush {
    pub(crate) job: JobId,
    pub(crate) behind: Vec<Vec<u32>>,
}

impl Book {
    /// How much there is for whoever collects.
    pub(crate) fn told(&self) -> usize {
        self.flushes.len() + self.ended.len()
    }

    /// Whether the engine's own thread has something to do.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.busy.is_some() || !self.waiting.is_empty()
    }

    /// Ends what has not begun. False if nothing of that name waits.
    pub(crate) fn give_up(&mut self, job: JobId) -> bool {
        let before = self.waiting.len() + self.flushes.len();
        self.waiting.retain(|transfer| transfer.job != job);
        self.flushes.retain(|flush| flush.job != job);
        let waited = self.waiting.len() + self.flushes.len() < before;
        if waited {
            self.ended.push(Finished::failed(job, EngineError::Aborted));
        }
        waited
    }
}
