//! What happens besides queues' turns: the timekeeper, what devices' own logic raises, reports, and the end of queues and of the device.
//!
//! Not here: carrying work out (`run`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use hw_engine::{Finished, Initiated, JobId, Raised};
use iommu_addr::DomainId;
use vdev_wire::{CONTROL_QUEUE, Status};

use crate::RequestError;
use crate::complete::finish;
use crate::device::Device;
use crate::domain::Domain;
use crate::finally::Finally;
use crate::flight::Flight;
use crate::observer::{Counter, FaultRecord};
use crate::op::{Op, StreamKey, Task};
use crate::port::Port;
use crate::sync::{lock, try_lock};
use crate::turn::Turn;

/// Steps on streams in one turn of the timekeeper.
const STEPS: usize = 256;
/// Rounds of what a device's own logic raises in one turn: each may be the answer to the one before.
const ROUNDS: usize = 64;
/// How often a stopping queue looks again.
const GLANCE: Duration = Duration::from_millis(2);

impl Device {
    /// One turn of the timekeeper: collects what engines have ended, goes on with what waited, expires deadlines, and takes up what came during
    /// a pause and the control requests that came too fast. Answers how long it may sleep at most; `None` is until it is woken.
    pub fn poll(&self) -> Option<Duration> {
        let later = [self.take_up(), self.take_paced()];
        self.tend().into_iter().chain(later.into_iter().flatten()).min()
    }

    fn tend(&self) -> Option<Duration> {
        let mut turn = lock(&self.timekeeper);
        let turn = &mut *turn;
        turn.begin();
        let mut finished = Vec::new();
        let hint = self.engine.poll(&mut finished);
        self.land_all(turn, finished);
        self.expire(turn);
        self.retry_starved();
        self.run_ready(turn, STEPS);
        turn.raised = true;
        turn.wake = false;
        // What has begun since may end sooner than the engine could say.
        let is_stale = turn.submitted;
        self.settle(turn);
        if is_stale || !self.ready.is_empty() {
            return Some(Duration::ZERO);
        }
        let due = self.flights.until_due(Instant::now());
        hint.into_iter().chain(due).min()
    }

    /// Collects what engines have ended, unless somebody is just doing that: a queue's thread that looks for more work does not leave it to the
    /// timekeeper, which has to be woken. Answers whether there may be more of it before the thread would rest.
    pub(crate) fn glance(&self) -> bool {
        if !self.glances() || self.flights.is_idle() {
            return false;
        }
        let Some(mut turn) = try_lock(&self.timekeeper) else { return false };
        let mut finished = Vec::new();
        let hint = self.engine.poll(&mut finished);
        if !finished.is_empty() {
            turn.begin();
            self.land_all(&mut turn, finished);
            self.retry_starved();
            self.settle(&mut turn);
        }
        hint.is_some_and(|hint| hint <= self.spec.linger)
    }

    /// Whether queues' threads look for ends: those that look for more work for a while do.
    pub(crate) fn glances(&self) -> bool {
        !self.spec.linger.is_zero()
    }

    /// A queue's thread takes no further turn, whatever the last one answered: from here on the timekeeper has to look for what is in flight,
    /// and to go on with what the turn has left.
    pub fn rest(&self) {
        if !self.ready.is_empty() || self.glances() && !self.flights.is_idle() {
            self.wake();
        }
    }

    fn land_all(&self, turn: &mut Turn, finished: Vec<Finished>) {
        for report in finished {
            if let Some((flight, finished)) = self.flights.land(report) {
                self.land(turn, flight, &finished);
            }
        }
    }

    /// Ends a turn: early reports, what devices raised, completions, events, counters, gauges.
    pub(crate) fn settle(&self, turn: &mut Turn) {
        for _ in 0..ROUNDS {
            for (flight, finished) in std::mem::take(&mut turn.landed) {
                self.land(turn, flight, &finished);
            }
            if !std::mem::take(&mut turn.raised) {
                break;
            }
            self.take_raised(turn);
        }
        if std::mem::take(&mut turn.submitted) {
            self.engine.doorbell();
        }
        finish(&mut turn.done);
        if self.events.are_waiting()
            && let Some(port) = self.event_port()
        {
            turn.wake |= self.events.deliver(&port);
        }
        turn.tally.flush(&*self.observer);
        if std::mem::take(&mut turn.changed) {
            self.gauges();
        }
        if std::mem::take(&mut turn.wake) {
            self.wake();
        }
    }

    fn take_raised(&self, turn: &mut Turn) {
        let mut raised = Vec::new();
        let raised: Vec<_> = {
            // A domain takes what was raised in it along when it goes; under the lock none of it can be taken for that of the next one of its id.
            let domains = lock(&self.domains);
            self.engine.raised(&mut raised);
            let live = |id| domains.get(&id).filter(|domain| !domain.is_closing()).map(Arc::clone);
            raised.into_iter().map(|what| (live(domain_of(&what)), what)).collect()
        };
        for (domain, what) in raised {
            match what {
                Raised::Initiated(initiated) => self.initiated(turn, domain, initiated),
                Raised::Interrupt { endpoint, domain: id, vector } => {
                    if domain.is_some() {
                        let fits = self.events.interrupt(id, endpoint, vector);
                        self.count_event(turn, fits);
                    }
                }
            }
        }
    }

    /// A device's own logic starts work: it waits its turn like any other.
    fn initiated(&self, turn: &mut Turn, domain: Option<Arc<Domain>>, initiated: Initiated) {
        let Some(domain) = domain else {
            self.engine.refuse(&initiated, Status::Fault.to_raw());
            turn.raised = true;
            return;
        };
        let deadline = turn.now.checked_add(self.limits.default_timeout()).unwrap_or(turn.now);
        let op = Op { task: Task::Kernel(initiated), deadline, issued: None, aborted: None };
        self.enqueue(&domain, StreamKey::kernels(initiated.endpoint), op);
    }

    /// Tells the operator and the guest of a refused access.
    pub(crate) fn report(&self, turn: &mut Turn, record: &FaultRecord) {
        turn.tally.add(Counter::Faults, 1);
        self.observer.fault(record);
        let fits = self.events.fault(record);
        self.count_event(turn, fits);
    }

    fn count_event(&self, turn: &mut Turn, fits: bool) {
        turn.tally.add(Counter::Events, 1);
        if !fits {
            turn.tally.add(Counter::EventsDropped, 1);
        }
    }

    pub(crate) fn log_malformed(&self, port: &Port, now: Instant, error: &RequestError) {
        if self.limiter.allow(now) {
            tracing::warn!(queue = port.index, %error, "The driver sent a malformed chain");
        }
    }

    /// Ends what waits beyond its deadline, and has engines abort what runs beyond it.
    fn expire(&self, turn: &mut Turn) {
        if !self.flights.is_due(turn.now) {
            return;
        }
        let now = turn.now;
        let domains: Vec<_> = lock(&self.domains).values().map(Arc::clone).collect();
        let mut earliest = None::<Instant>;
        for domain in domains {
            self.expire_waiting(turn, &domain);
            let next = lock(&domain.streams).earliest_deadline();
            earliest = earliest.into_iter().chain(next).min();
        }
        self.abort(|flight| now >= flight.op.deadline, RequestError::Timeout);
        if let Some(next) = earliest.into_iter().chain(self.flights.earliest_deadline()).min() {
            self.flights.watch(next);
        }
    }

    fn expire_waiting(&self, turn: &mut Turn, domain: &Arc<Domain>) {
        let now = turn.now;
        let (late, behind) = {
            let mut streams = lock(&domain.streams);
            let late = streams.take_all_waiting(|_| true, |op| now >= op.deadline);
            let behind: Vec<_> = late.iter().flat_map(|(key, _)| streams.fail(*key)).collect();
            (late, behind)
        };
        self.cancel(turn, late.into_iter().map(|(_, op)| op).collect(), RequestError::Timeout);
        self.cancel(turn, behind, RequestError::Cancelled);
    }

    /// Takes no more from a ring and lets its chains end: for two seconds by themselves, then what waits is cancelled and what runs is aborted.
    /// Of the control queue, whose requests wait for work of the others, what runs in those is aborted. Blocks until then; once it returns the
    /// ring is not touched any more.
    pub fn stop_queue(&self, index: u16) {
        let Some(port) = self.take_port(index) else {
            // What it had in hand is never answered.
            return self.journal_of(index).into_iter().for_each(|journal| journal.stop(false));
        };
        let start = Instant::now();
        while !port.is_idle() {
            self.poll();
            self.wake();
            let waited = start.elapsed();
            // Again and again: another thread may just have had some of it in its hands.
            if waited >= Self::STOP_PATIENCE {
                self.cancel_port(&port);
            }
            // Control requests wait for jobs of other queues, which an engine may keep: they end in silence.
            if waited >= Self::STOP_PATIENCE.saturating_mul(2) && !self.has_work_of(&port) {
                break;
            }
            port.wait_idle(GLANCE);
        }
        port.close();
        port.stop_journal();
        self.wake();
    }

    fn has_work_of(&self, port: &Arc<Port>) -> bool {
        let mine = |op: &Op| matches!(&op.task, Task::Guest(guest) if guest.slot.came_through(port));
        let domains: Vec<_> = lock(&self.domains).values().map(Arc::clone).collect();
        self.flights.count(|flight| mine(&flight.op)) > 0
            || domains.iter().any(|domain| lock(&domain.streams).any(mine))
    }

    fn cancel_port(&self, port: &Arc<Port>) {
        let mine = |op: &Op| matches!(&op.task, Task::Guest(guest) if guest.slot.came_through(port));
        let running = |op: &Op| mine(op) || port.index == CONTROL_QUEUE && !matches!(op.task, Task::Scrub { .. });
        let mut turn = lock(&self.timekeeper);
        let domains: Vec<_> = lock(&self.domains).values().map(Arc::clone).collect();
        for domain in domains {
            let waiting = {
                let mut streams = lock(&domain.streams);
                streams.cancel_all_issued(running);
                streams.take_all_waiting(|_| true, mine)
            };
            self.cancel(&mut turn, waiting.into_iter().map(|(_, op)| op).collect(), RequestError::Cancelled);
        }
        self.abort(|flight| running(&flight.op), RequestError::Cancelled);
        finish(&mut turn.done);
    }

    pub(crate) fn abort(&self, which: impl Fn(&Flight) -> bool, reason: RequestError) {
        let jobs = self.flights.mark(which, reason);
        jobs.into_iter().for_each(|job| self.engine.abort(job));
    }

    pub(crate) fn abort_one(&self, job: JobId, reason: RequestError) {
        if self.flights.mark_one(job, reason) {
            self.engine.abort(job);
        }
    }

    /// The connection is over: takes no more work, waits until the engines are quiet, answers what is left, forgets every domain and touches no
    /// ring any more. Buffers are not scrubbed: whoever owns the memory does that. May be called by several threads at a time.
    pub fn shutdown(&self) {
        self.go_down();
        let ports = self.ports();
        // Waits for each queue's thread to be out of its turn, whoever has taken the queue's ring.
        (0..self.num_queues()).for_each(|index| drop(self.take_port(index)));
        let domains: Vec<_> = lock(&self.domains).values().map(Arc::clone).collect();
        {
            let mut turn = lock(&self.timekeeper);
            turn.begin();
            for domain in domains {
                self.destroy(&mut turn, &domain, Finally::new(|| {}));
            }
            self.settle(&mut turn);
        }
        self.abort(|_| true, RequestError::Dropped);
        loop {
            // Looked at under the timekeeper's lock: what its thread has just collected is in no list.
            let mut turn = lock(&self.timekeeper);
            if self.flights.is_empty() && self.ready.is_empty() && self.starved.is_empty() {
                break;
            }
            turn.begin();
            let mut finished = Vec::new();
            self.engine.quiesce(&mut finished);
            self.land_all(&mut turn, finished);
            self.retry_starved();
            self.run_ready(&mut turn, STEPS);
            self.settle(&mut turn);
        }
        ports.iter().for_each(|port| port.close());
        self.gauges();
    }
}

fn domain_of(raised: &Raised) -> DomainId {
    match raised {
        Raised::Initiated(Initiated { domain, .. }) | Raised::Interrupt { domain, .. } => *domain,
    }
}
