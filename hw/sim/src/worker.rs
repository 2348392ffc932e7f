//! What the engine's thread and its callers share, and the thread itself.
//!
//! The thread moves bytes as soon as it can and tells the owner when an end is due. Bytes are moved outside the lock; an end is taken from
//! the agenda under it, so each comes once.

use std::io;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hw_engine::{EngineError, Finished, JobId, Memory, Route, ThreadHook, Transfer};

use iommu_addr::EndpointId;

use crate::agenda::{Agenda, End, carry_out};
use crate::fabric::Fabric;
use crate::flaw::View;
use crate::kernel::Kernel;
use crate::registers::Registers;
use crate::traffic::Traffic;
use crate::{Clock, ConfigError, SimConfig, SimEndpoint};

/// How far ahead an end may be for `quiesce` to wait for it.
const GRACE: Duration = Duration::from_secs(1);

/// What the thread waits for.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Rest {
    /// Nothing: it looks at the agenda before it waits.
    #[default]
    Awake,
    /// A call, or this time.
    Until(Duration),
    /// A call.
    Asleep,
}

/// What changes under the lock.
#[derive(Default)]
pub(crate) struct Inner {
    pub(crate) agenda: Agenda,
    /// What of it is on its way over links.
    pub(crate) traffic: Traffic,
    /// Ends that nobody has asked for yet.
    done: Vec<Finished>,
    /// For each endpoint, until when each of its copy engines is taken.
    engines: Vec<(EndpointId, Vec<Duration>)>,
    rest: Rest,
    stop: bool,
}

impl Inner {
    /// Takes the copy engine that is free first. Answers when the transfer ends whose last byte has `crossed` then.
    pub(crate) fn occupy(&mut self, endpoint: &SimEndpoint, route: Route, crossed: Duration) -> Duration {
        let hops = match route {
            Route::Direct => 1,
            Route::Staged => 2,
        };
        if endpoint.latency.is_zero() {
            return crossed;
        }
        let engines = self.engines.iter_mut().find(|(id, _)| *id == endpoint.spec.id);
        let free = engines.and_then(|(_, until)| until.iter_mut().min());
        let begin = free.as_deref().map_or(crossed, |free| crossed.max(*free));
        let due = begin.saturating_add(endpoint.latency.saturating_mul(hops));
        free.into_iter().for_each(|free| *free = due);
        due
    }
}

pub(crate) struct Core {
    pub(crate) fabric: Fabric,
    pub(crate) registers: Registers,
    memory: Arc<dyn Memory>,
    /// For endpoints with flaws.
    views: Vec<View>,
    pub(crate) clock: Clock,
    pub(crate) depth: usize,
    /// Transfers between their submission and the report of their end.
    held: AtomicUsize,
    inner: Mutex<Inner>,
    /// There is something to move, or something has ended.
    changed: Condvar,
    progress: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl Core {
    pub(crate) fn new(
        config: &SimConfig,
        fabric: Fabric,
        registers: Registers,
        memory: Arc<dyn Memory>,
        clock: Clock,
    ) -> Self {
        let engines = config.endpoints.iter().map(|endpoint| &endpoint.spec);
        let engines = engines.map(|spec| (spec.id, vec![Duration::ZERO; spec.engines.into()])).collect();
        Self {
            fabric,
            registers,
            views: View::of(&config.flaws, &memory),
            memory,
            clock,
            depth: config.queue_depth,
            held: AtomicUsize::new(0),
            inner: Mutex::new(Inner { engines, ..Inner::default() }),
            changed: Condvar::new(),
            progress: OnceLock::new(),
        }
    }

    /// Memory as this endpoint sees it.
    pub(crate) fn memory_of(&self, initiator: EndpointId) -> &dyn Memory {
        match self.views.iter().find(|view| view.accessor == initiator) {
            Some(view) => view,
            None => &*self.memory,
        }
    }

    pub(crate) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn held(&self) -> usize {
        self.held.load(Ordering::Acquire)
    }

    /// Takes a slot, or finds none free.
    pub(crate) fn claim(&self) -> Result<(), EngineError> {
        let more = |held: usize| held.checked_add(1).filter(|held| *held <= self.depth);
        self.held.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).map_or(Err(EngineError::Busy), |_| Ok(()))
    }

    pub(crate) fn release(&self, slots: usize) {
        self.held.fetch_sub(slots, Ordering::AcqRel);
    }

    /// Tells the thread of something new: bytes to move, or an end that is due at a time.
    pub(crate) fn call_worker(&self, inner: &Inner, due: Option<Duration>) {
        let sleeps_past = match (inner.rest, due) {
            (Rest::Awake, _) => false,
            (Rest::Until(alarm), Some(due)) => due < alarm,
            (Rest::Until(_), None) | (Rest::Asleep, _) => true,
        };
        if sleeps_past {
            self.changed.notify_all();
        }
    }

    pub(crate) fn on_progress(&self, wake: Box<dyn Fn() + Send + Sync>) {
        if self.progress.set(wake).is_err() {
            tracing::warn!("The engine already has someone to wake; the second one is ignored");
        }
    }

    pub(crate) fn wake(&self) {
        if let Some(wake) = self.progress.get() {
            wake();
        }
    }

    /// A transfer from beginning to end, on this thread.
    pub(crate) fn run(&self, transfer: &Transfer, kernel: Option<Box<Kernel>>) -> Finished {
        let memory = self.memory_of(transfer.initiator);
        let Some(mut kernel) = kernel else {
            return carry_out(memory, transfer);
        };
        let mut finished = loop {
            if let Some(end) = kernel.step(memory, transfer.job) {
                break end;
            }
        };
        self.registers.finish(transfer.initiator, transfer.domain, &finished);
        finished.raised = true;
        finished
    }

    pub(crate) fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        if self.held() == 0 {
            return None;
        }
        let mut inner = self.inner();
        let now = self.clock.now();
        self.settle(&mut inner, now);
        self.hand_over(&mut inner, out);
        // In real time the thread looks after the links.
        let links = inner.traffic.due().filter(|_| self.clock.is_manual());
        let next = inner.agenda.next_due(now).into_iter().chain(links).min();
        next.map(|due| due.saturating_sub(now))
    }

    pub(crate) fn abort(&self, job: JobId) {
        let mut inner = self.inner();
        let end = inner.agenda.abort(job);
        let ended = end.is_some();
        self.report(&mut inner, end);
        self.forget_aborted(&mut inner);
        drop(inner);
        if ended {
            // A flush may have waited for this transfer.
            self.changed.notify_all();
            self.wake();
        }
    }

    pub(crate) fn quiesce(&self, out: &mut Vec<Finished>) {
        let manual = self.clock.is_manual();
        let horizon = self.clock.now().saturating_add(if manual { Duration::ZERO } else { GRACE });
        let mut inner = self.inner();
        loop {
            let now = self.clock.now();
            self.settle(&mut inner, now);
            let ends = inner.agenda.abort_late(horizon, now >= horizon);
            self.report(&mut inner, ends);
            self.forget_aborted(&mut inner);
            if inner.agenda.is_empty() {
                break self.hand_over(&mut inner, out);
            }
            // What is being moved is waited for, however long that takes.
            let next = inner.agenda.next_due(now).map_or(GRACE, |due| due.saturating_sub(now));
            inner = self.changed.wait_timeout(inner, next.min(GRACE)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Moves what is due, as nobody else does it.
    fn move_due(&self, inner: &mut Inner, now: Duration) {
        while let Some((seq, mut moving)) = inner.agenda.take_due(now) {
            let end = loop {
                if let Some(end) = moving.step(self.memory_of(moving.transfer.initiator)) {
                    break end;
                }
            };
            let ended = inner.agenda.put_back(seq, moving, Some(end));
            self.report(inner, ended);
        }
    }

    /// Books what may be booked, and ends what is over.
    fn settle(&self, inner: &mut Inner, now: Duration) {
        self.book(inner, now);
        if self.clock.is_manual() {
            self.move_due(inner, now);
        }
        let ends = inner.agenda.settle(now);
        self.report(inner, ends);
    }

    /// Books every piece whose turn it is.
    pub(crate) fn book(&self, inner: &mut Inner, now: Duration) {
        if inner.traffic.is_empty() {
            return;
        }
        for (trip, crossed) in inner.traffic.advance(&*self.fabric.ledger, now) {
            if let Some(endpoint) = self.fabric.endpoint(trip.initiator) {
                let due = inner.occupy(endpoint, trip.route, crossed);
                inner.agenda.set_due(trip.seq, due);
            }
        }
    }

    fn forget_aborted(&self, inner: &mut Inner) {
        let Inner { agenda, traffic, .. } = inner;
        traffic.retain(&*self.fabric.ledger, |seq| agenda.is_wanted(seq));
    }

    fn report(&self, inner: &mut Inner, ends: impl IntoIterator<Item = End>) {
        for End { mut finished, kernel } in ends {
            if let Some((endpoint, domain)) = kernel {
                self.registers.finish(endpoint, domain, &finished);
                finished.raised = true;
            }
            inner.done.push(finished);
        }
    }

    fn hand_over(&self, inner: &mut Inner, out: &mut Vec<Finished>) {
        self.release(inner.done.len());
        out.append(&mut inner.done);
    }

    /// The thread's life.
    fn work(&self) {
        let mut inner = self.inner();
        while !inner.stop {
            let now = self.clock.now();
            let before = inner.done.len();
            self.settle(&mut inner, now);
            if inner.done.len() > before {
                drop(inner);
                self.changed.notify_all();
                self.wake();
                inner = self.inner();
            } else if let Some((seq, mut moving)) = inner.agenda.take() {
                drop(inner);
                let end = moving.step(self.memory_of(moving.transfer.initiator));
                inner = self.inner();
                let ended = inner.agenda.put_back(seq, moving, end);
                let given_up = ended.is_some();
                self.report(&mut inner, ended);
                if given_up {
                    drop(inner);
                    self.changed.notify_all();
                    self.wake();
                    inner = self.inner();
                }
            } else {
                inner = self.rest(inner, now);
            }
        }
    }

    /// Waits for a call, or until the next end is due.
    fn rest<'a>(&'a self, mut inner: MutexGuard<'a, Inner>, now: Duration) -> MutexGuard<'a, Inner> {
        let next = inner.agenda.next_due(now).into_iter().chain(inner.traffic.due()).min();
        inner.rest = next.map_or(Rest::Asleep, Rest::Until);
        let mut inner = match next {
            Some(due) => {
                let most = due.saturating_sub(now);
                self.changed.wait_timeout(inner, most).unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner),
        };
        inner.rest = Rest::Awake;
        inner
    }
}

/// The engine's thread; ends with this.
pub(crate) struct Worker {
    core: Arc<Core>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(crate) fn start(core: &Arc<Core>, hook: Option<ThreadHook>) -> Result<Self, ConfigError> {
        let shared = Arc::clone(core);
        let body = move || {
            if let Some(hook) = hook {
                hook();
            }
            // The default lets a timer be 50 µs late, longer than most transfers take. Without the right to change it, they are late.
            if let Err(error) = rustix::thread::set_current_timer_slack(NonZeroU64::new(1)) {
                tracing::debug!(error = &error as &dyn std::error::Error, "Simulated transfers may end late");
            }
            shared.work();
        };
        let spawned: io::Result<_> = thread::Builder::new().name("sim-engine".into()).spawn(body);
        let thread = spawned.map_err(|source| ConfigError::Thread { source })?;
        Ok(Self { core: Arc::clone(core), thread: Some(thread) })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.core.inner().stop = true;
        self.core.changed.notify_all();
        let Some(thread) = self.thread.take() else { return };
        // The last owner may be what the engine wakes: then this is the thread itself, and it ends after this call.
        if thread.thread().id() != thread::current().id() && thread.join().is_err() {
            tracing::error!("The engine's thread had panicked; transfers may have been lost");
        }
    }
}
