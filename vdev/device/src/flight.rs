//! What engines have in hand, and when it is due.
//!
//! An engine may report an end before the submitting thread could say what it had submitted; such an early report waits here for its transfer.
//! Deadlines are watched by one number, a lower bound of all of them: it only falls when work is added, and is made exact when it is reached.
//!
//! Not here: what happens to work that has ended or is due.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use hw_engine::jobs::{BLOCK, ByJob};
use hw_engine::{Finished, JobId};

use crate::RequestError;
use crate::domain::Domain;
use crate::op::{Op, StreamKey};
use crate::sync::lock;

/// One transfer in an engine's hands, and whose it is.
pub(crate) struct Flight {
    pub(crate) domain: Arc<Domain>,
    pub(crate) key: StreamKey,
    pub(crate) op: Op,
}

#[derive(Default)]
struct Table {
    flights: HashMap<JobId, Flight>,
    early: HashMap<JobId, Finished>,
}

#[derive(Default)]
struct Part {
    table: Mutex<Table>,
    /// How many there are, for a look without the lock.
    len: AtomicUsize,
}

impl Part {
    fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }
}

/// Every transfer in an engine's hands.
pub(crate) struct Flights {
    parts: ByJob<Part>,
    jobs: AtomicU64,
    epoch: Instant,
    due: AtomicU64,
}

impl Flights {
    pub(crate) fn new(now: Instant) -> Self {
        let due = AtomicU64::new(u64::MAX);
        Self { parts: ByJob::default(), jobs: AtomicU64::new(BLOCK), epoch: now, due }
    }

    /// A name that no transfer had. `names` is the caller's own stock, so that threads seldom meet here.
    pub(crate) fn next_job(&self, names: &mut Range<u64>) -> JobId {
        if let Some(name) = names.next() {
            return JobId(name);
        }
        let first = self.jobs.fetch_add(BLOCK, Ordering::Relaxed);
        *names = first.saturating_add(1)..first.saturating_add(BLOCK);
        JobId(first)
    }

    /// A transfer has been submitted. Gives it back with its report if that was early.
    pub(crate) fn launch(&self, job: JobId, flight: Flight) -> Option<(Flight, Finished)> {
        let part = self.parts.of(job);
        let mut table = part.lock();
        if let Some(finished) = table.early.remove(&job) {
            return Some((flight, finished));
        }
        table.flights.insert(job, flight);
        part.len.store(table.flights.len(), Ordering::Relaxed);
        None
    }

    /// A transfer has ended. `None` if it is not known yet: then its report waits for it.
    pub(crate) fn land(&self, finished: Finished) -> Option<(Flight, Finished)> {
        let part = self.parts.of(finished.job);
        let mut table = part.lock();
        let Some(flight) = table.flights.remove(&finished.job) else {
            table.early.insert(finished.job, finished);
            return None;
        };
        part.len.store(table.flights.len(), Ordering::Relaxed);
        Some((flight, finished))
    }

    /// All at once: what has landed in one part and goes on in another under a new name is not missed.
    fn all(&self) -> Vec<MutexGuard<'_, Table>> {
        self.parts.iter().map(Part::lock).collect()
    }

    /// Whether there was nothing in flight a moment ago.
    pub(crate) fn is_idle(&self) -> bool {
        self.parts.iter().all(|part| part.len.load(Ordering::Relaxed) == 0)
    }

    /// Whether engines have nothing of the device.
    pub(crate) fn is_empty(&self) -> bool {
        self.all().iter().all(|table| table.flights.is_empty())
    }

    /// Transfers that satisfy `which`.
    pub(crate) fn count(&self, which: impl Fn(&Flight) -> bool) -> usize {
        let count = |table: &MutexGuard<'_, Table>| table.flights.values().filter(|flight| which(flight)).count();
        self.all().iter().map(count).sum()
    }

    /// Notes of transfers why they are to end, and gives the names of those of which nobody had.
    pub(crate) fn mark(&self, which: impl Fn(&Flight) -> bool, reason: RequestError) -> Vec<JobId> {
        let mut tables = self.all();
        let flights = tables.iter_mut().flat_map(|table| table.flights.iter_mut());
        flights.filter_map(|(job, flight)| (which(flight) && flight.op.abort(reason)).then_some(*job)).collect()
    }

    /// The same of one. False also if it has landed.
    pub(crate) fn mark_one(&self, job: JobId, reason: RequestError) -> bool {
        self.parts.of(job).lock().flights.get_mut(&job).is_some_and(|flight| flight.op.abort(reason))
    }

    /// The earliest deadline of transfers that nobody aborted yet.
    pub(crate) fn earliest_deadline(&self) -> Option<Instant> {
        let tables = self.all();
        let running = tables.iter().flat_map(|table| table.flights.values());
        running.filter(|flight| flight.op.aborted.is_none()).map(|flight| flight.op.deadline).min()
    }

    fn nanos(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.epoch).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Watches one more deadline. True if it is earlier than all others: the timekeeper sleeps too long.
    pub(crate) fn watch(&self, deadline: Instant) -> bool {
        let due = self.nanos(deadline);
        self.due.load(Ordering::Relaxed) > due && self.due.fetch_min(due, Ordering::AcqRel) > due
    }

    /// Whether a deadline may have passed. Then nothing is watched until [`Flights::watch`] is told anew.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        let now = self.nanos(now);
        self.due.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |due| (due <= now).then_some(u64::MAX)).is_ok()
    }

    /// How long until a deadline may pass.
    pub(crate) fn until_due(&self, now: Instant) -> Option<Duration> {
        let due = self.due.load(Ordering::Acquire);
        (due != u64::MAX).then(|| Duration::from_nanos(due.saturating_sub(self.nanos(now))))
    }
}
