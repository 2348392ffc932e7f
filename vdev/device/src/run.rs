//! Carrying work out: whose turn it is, what the engine said, what comes next.
//!
//! Work ends on the thread that submits it (engines that execute at once), or on the timekeeper. Streams whose turn must go on later wait on one
//! of two lists: `ready`, which every thread serves, and `starved`, for a full engine, which is tried again whenever something has ended.
//!
//! Not here: where work comes from.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use hw_engine::{EngineError, Finished, Submit};
use iommu_addr::DomainId;
use vdev_wire::Completion;

use crate::RequestError;
use crate::buffers::Buffer;
use crate::device::Device;
use crate::domain::Domain;
use crate::flight::Flight;
use crate::issue::{Issued, Planner, Refusal};
use crate::observer::{Counter, FaultRecord};
use crate::op::{Op, Outcome, StreamKey, Task};
use crate::streams::Next;
use crate::sync::lock;
use crate::turn::Turn;
use crate::work::Work;

/// Streams whose turn is owned by a list.
#[derive(Default)]
pub(crate) struct List {
    streams: Mutex<VecDeque<(Arc<Domain>, StreamKey)>>,
    len: AtomicUsize,
}

impl List {
    pub(crate) fn push(&self, domain: &Arc<Domain>, key: StreamKey) {
        let mut streams = lock(&self.streams);
        streams.push_back((Arc::clone(domain), key));
        self.len.store(streams.len(), Ordering::Release);
    }

    pub(crate) fn pop(&self) -> Option<(Arc<Domain>, StreamKey)> {
        if self.is_empty() {
            return None;
        }
        let mut streams = lock(&self.streams);
        let stream = streams.pop_front();
        self.len.store(streams.len(), Ordering::Release);
        stream
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::Acquire) == 0
    }

    /// Moves everything behind what `to` has.
    fn drain_into(&self, to: &Self) {
        while let Some((domain, key)) = self.pop() {
            to.push(&domain, key);
        }
    }
}

/// What work is to be issued.
#[derive(Clone, Copy)]
pub(crate) enum Fresh<'a> {
    Guest(&'a Work),
    Kernel(&'a hw_engine::Initiated),
    Scrub(&'a Buffer),
}

/// What became of work whose turn it was.
pub(crate) enum Went {
    /// It is over.
    Ended(Outcome),
    /// The engine has it.
    Submitted(Box<Issued>),
    /// The engine is full. Work that has moved nothing is to be issued anew.
    Starved(Option<Box<Issued>>),
    /// This thread has worked enough for now.
    Paused(Box<Issued>),
}

enum Pushed {
    Ended(Option<RequestError>),
    Submitted,
    Starved,
    Paused,
}

impl Device {
    fn planner(&self) -> Planner<'_> {
        Planner { reach: &self.spec.reach, engine: &*self.engine, max_transfer: self.max_transfer }
    }

    /// Issues work and carries it as far as it goes on this thread. `cookie` is for reports only.
    pub(crate) fn begin(
        &self,
        turn: &mut Turn,
        domain: &Domain,
        key: StreamKey,
        cookie: u64,
        fresh: Fresh<'_>,
    ) -> Went {
        let planner = self.planner();
        let mut issued = match fresh {
            Fresh::Guest(work) => planner.issue(&mut turn.iotlb, &domain.space, work),
            Fresh::Kernel(initiated) => planner.issue_kernel(&mut turn.iotlb, &domain.space, initiated),
            Fresh::Scrub(buffer) => Ok(planner.issue_scrub(domain.id, buffer)),
        };
        let pushed = match &mut issued {
            Ok(issued) => self.push(turn, issued),
            Err(refusal) => {
                return Went::Ended(Outcome::refused(self.refused(turn, domain.id, key, cookie, *refusal)));
            }
        };
        match (pushed, issued) {
            (Pushed::Ended(error), Ok(issued)) => Went::Ended(outcome(&issued, error)),
            (Pushed::Submitted, Ok(issued)) => Went::Submitted(Box::new(issued)),
            (Pushed::Paused, Ok(issued)) => Went::Paused(Box::new(issued)),
            (_, issued) => Went::Starved(issued.ok().filter(|issued| issued.bytes() > 0).map(Box::new)),
        }
    }

    /// Goes on with work that was issued before.
    fn resume(&self, turn: &mut Turn, mut issued: Box<Issued>) -> Went {
        match self.push(turn, &mut issued) {
            Pushed::Ended(error) => Went::Ended(outcome(&issued, error)),
            Pushed::Submitted => Went::Submitted(issued),
            Pushed::Starved => Went::Starved(Some(issued)),
            Pushed::Paused => Went::Paused(issued),
        }
    }

    fn push(&self, turn: &mut Turn, issued: &mut Issued) -> Pushed {
        loop {
            issued.transfer.job = self.flights.next_job(&mut turn.jobs);
            let finished = match self.engine.submit(&issued.transfer) {
                Ok(Submit::Executed(finished)) => finished,
                Ok(Submit::Submitted) => return Pushed::Submitted,
                Err(EngineError::Busy) => return Pushed::Starved,
                Err(error) => return Pushed::Ended(Some(error.into())),
            };
            turn.raised |= finished.raised;
            turn.spend(finished.bytes);
            match issued.absorb(&finished) {
                Ok(true) => return Pushed::Ended(None),
                Ok(false) if turn.is_spent() => return Pushed::Paused,
                Ok(false) => {}
                Err(error) => return Pushed::Ended(Some(error)),
            }
        }
    }

    /// Tells whoever is concerned of a refusal, and makes it an error.
    pub(crate) fn refused(
        &self,
        turn: &mut Turn,
        domain: DomainId,
        key: StreamKey,
        cookie: u64,
        refusal: Refusal,
    ) -> RequestError {
        match refusal {
            Refusal::Error(error) => error,
            Refusal::Fault(fault) => {
                let error = RequestError::Access { address: fault.address, reason: fault.reason };
                self.report(
                    turn,
                    &FaultRecord {
                        domain,
                        accessor: fault.accessor,
                        owner: fault.owner,
                        address: fault.address,
                        access: fault.access,
                        reason: fault.reason,
                        stream: key.number(),
                        cookie,
                        status: error.status(),
                        value: 0,
                        mapping: fault.mapping,
                        is_foreign: false,
                    },
                );
                error
            }
        }
    }

    /// Queues work that is not a guest's, which no limit concerns.
    pub(crate) fn enqueue(&self, domain: &Arc<Domain>, key: StreamKey, op: Op) {
        let deadline = op.deadline;
        let next = lock(&domain.streams).push(key, op);
        self.flights.watch(deadline);
        if next == Next::More {
            self.ready.push(domain, key);
        }
        self.wake();
    }

    /// Serves the ready list, `most` steps at most.
    pub(crate) fn run_ready(&self, turn: &mut Turn, most: usize) {
        for _ in 0..most {
            if turn.is_spent() {
                return;
            }
            let Some((domain, key)) = self.ready.pop() else { return };
            self.step(turn, &domain, key);
        }
    }

    /// Tries again what a full engine did not take.
    pub(crate) fn retry_starved(&self) {
        self.starved.drain_into(&self.ready);
    }

    /// Goes on with a stream whose turn is the caller's.
    fn step(&self, turn: &mut Turn, domain: &Arc<Domain>, key: StreamKey) {
        let Some(mut op) = lock(&domain.streams).pop(key) else { return };
        let due = turn.now >= op.deadline;
        let went = match (op.issued.take(), &op.task) {
            (issued @ Some(_), _) if self.is_down() => Went::Ended(given_up(issued, RequestError::Dropped)),
            (issued, _) if op.aborted.is_some() => Went::Ended(given_up(issued, RequestError::Cancelled)),
            (issued, _) if due => Went::Ended(given_up(issued, RequestError::Timeout)),
            (Some(issued), _) => self.resume(turn, issued),
            (None, Task::Guest(_) | Task::Kernel(_)) if domain.is_closing() => {
                Went::Ended(Outcome::refused(RequestError::Cancelled))
            }
            (None, Task::Guest(guest)) => match &guest.work {
                Ok(work) => self.begin(turn, domain, key, guest.cookie, Fresh::Guest(work)),
                Err(error) => Went::Ended(Outcome::refused(*error)),
            },
            (None, Task::Kernel(initiated)) => self.begin(turn, domain, key, 0, Fresh::Kernel(initiated)),
            (None, Task::Scrub { .. }) if self.is_down() => Went::Ended(Outcome::nothing()),
            (None, Task::Scrub { buffer, .. }) => self.begin(turn, domain, key, 0, Fresh::Scrub(buffer)),
        };
        self.settle_went(turn, domain, key, op, went);
    }

    /// Puts work where `went` says it belongs.
    pub(crate) fn settle_went(&self, turn: &mut Turn, domain: &Arc<Domain>, key: StreamKey, mut op: Op, went: Went) {
        match went {
            Went::Ended(outcome) => self.end(turn, domain, key, op, outcome),
            Went::Submitted(issued) => {
                let job = issued.transfer.job;
                op.issued = Some(issued);
                turn.submitted = true;
                turn.wake |= !turn.glances;
                turn.changed = true;
                let deadline = op.deadline;
                let flight = Flight { domain: Arc::clone(domain), key, op };
                turn.landed.extend(self.flights.launch(job, flight));
                // Relaxed: a CANCEL that looked among the flights before it was there had said so before, and held the same lock in between.
                if domain.cancels.load(Ordering::Relaxed) && lock(&domain.streams).is_taken_cancelled(key) {
                    self.abort_one(job, RequestError::Cancelled);
                }
                // Afterwards: a timekeeper that found the deadline due before it could find the transfer would forget both.
                turn.wake |= self.flights.watch(deadline);
            }
            Went::Starved(issued) => {
                op.issued = issued;
                self.put_back(turn, domain, key, op);
                self.starved.push(domain, key);
                // The timekeeper tries again at once: what filled the engine may have ended since.
                turn.wake = true;
            }
            Went::Paused(issued) => {
                op.issued = Some(issued);
                self.put_back(turn, domain, key, op);
                self.ready.push(domain, key);
            }
        }
    }

    pub(crate) fn put_back(&self, turn: &mut Turn, domain: &Arc<Domain>, key: StreamKey, op: Op) {
        let deadline = op.deadline;
        lock(&domain.streams).put_back(key, op);
        turn.wake |= self.flights.watch(deadline);
        turn.changed = true;
    }

    /// An engine has ended something.
    pub(crate) fn land(&self, turn: &mut Turn, flight: Flight, finished: &Finished) {
        let Flight { domain, key, mut op } = flight;
        turn.raised |= finished.raised;
        turn.changed = true;
        let Some(mut issued) = op.issued.take() else { return };
        let absorbed = issued.absorb(finished);
        let error = match (op.aborted, absorbed) {
            (Some(RequestError::Timeout), _) => Some(RequestError::Timeout),
            (Some(reason), Err(_) | Ok(false)) => Some(reason),
            (None, Ok(false)) => return self.settle_went(turn, &domain, key, op, Went::Paused(issued)),
            (None, Err(error)) => Some(error),
            (_, Ok(true)) => None,
        };
        let outcome = outcome(&issued, error);
        drop(issued);
        self.end(turn, &domain, key, op, outcome);
    }

    /// Work is over: reports it and moves its stream on.
    fn end(&self, turn: &mut Turn, domain: &Arc<Domain>, key: StreamKey, op: Op, outcome: Outcome) {
        self.report_end(turn, op.task, outcome);
        let (cancelled, next) = {
            let mut streams = lock(&domain.streams);
            // What was cancelled on request is no error of its stream.
            let is_error = outcome.error.is_some_and(|error| error != RequestError::Cancelled);
            let cancelled = if is_error { streams.fail(key) } else { Vec::new() };
            (cancelled, streams.ended(key))
        };
        self.cancel(turn, cancelled, RequestError::Cancelled);
        if next == Next::More {
            self.ready.push(domain, key);
        }
    }

    /// Ends work that was taken out of its stream's queue.
    pub(crate) fn cancel(&self, turn: &mut Turn, ops: Vec<Op>, reason: RequestError) {
        for op in ops {
            self.report_end(turn, op.task, Outcome::refused(reason));
        }
    }

    fn report_end(&self, turn: &mut Turn, task: Task, outcome: Outcome) {
        turn.changed = true;
        match task {
            Task::Guest(guest) => {
                let record = self.account(turn, guest.cookie, &outcome);
                turn.done.push((guest.slot, record));
            }
            Task::Kernel(initiated) => {
                turn.tally.add(Counter::Kernels, 1);
                if let Some(error) = outcome.error.filter(|_| !outcome.ran) {
                    self.engine.refuse(&initiated, error.status().to_raw());
                }
                turn.raised = true;
            }
            Task::Scrub { buffer, then } => {
                self.scrubbed(&buffer, outcome.error);
                self.scrubs.fetch_sub(1, Ordering::AcqRel);
                drop(then);
            }
        }
    }

    /// Counts the end of a guest's work, and makes its record.
    pub(crate) fn account(&self, turn: &mut Turn, cookie: u64, outcome: &Outcome) -> Completion {
        let record = outcome.record(cookie);
        let status = outcome.error.map_or(vdev_wire::Status::Ok, |error| error.status());
        let path = outcome.plan.map_or(vdev_wire::TransferPath::None, crate::plan::Plan::path);
        turn.tally.ended(status, path, outcome.bytes);
        record
    }
}

fn outcome(issued: &Issued, error: Option<RequestError>) -> Outcome {
    let bytes = issued.bytes();
    // A path is told only if bytes took it.
    let plan = issued.plan.filter(|_| error.is_none() || bytes > 0);
    Outcome { error, bytes, plan, ran: issued.ran(), value: issued.value() }
}

fn given_up(issued: Option<Box<Issued>>, error: RequestError) -> Outcome {
    issued.map_or(Outcome::refused(error), |issued| outcome(&issued, Some(error)))
}
