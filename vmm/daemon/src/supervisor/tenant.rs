//! One tenant: what outlives its workers, its keeper, its worker, and where it stands.
//!
//! A tenant always has a keeper, and a worker as soon as there is one to be had: a lease of its slices is asked for, then a process is started that gets
//! it, and the keeper gets the other end of that process's connection. A worker that ends, well or not, is followed by the next. If the keeper holds a
//! VMM then, it carries the connection over; else the session begins afresh.
//!
//! A VM waits for a worker that takes over, so that has [`start::TAKE_OVER`], or [`start::TAKE_OVER_HARDWARE`]; one whose VM has gone has [`TEARDOWN`]
//! to end. A worker that is late is killed, which is a failure like any other.
//!
//! Not here: how a worker is started (`start`), what a worker or a keeper does, what changes while it runs (`adapt`), the event loop.

pub(crate) mod adapt;
mod start;

use std::os::fd::AsFd;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use vmm_broker::{FromKeeper, JournalPage, KeeperSetup, Lease, TenantPage, ToKeeper, ToSupervisor};
use vmm_control::{SocketFile, TenantState};

use super::backoff::Backoff;
use super::child::{Child, Heard, why};
use super::peers::Peers;
use super::process::Starter;
use crate::config::TenantConfig;

/// How long a worker may take to end once its VM has gone; it gives its own threads 20 s.
const TEARDOWN: Duration = Duration::from_secs(30);

/// A tenant.
#[derive(Debug)]
pub(crate) struct Tenant {
    /// Never that of another tenant while the daemon runs.
    pub(crate) id: u16,
    /// Its place in the ledger of links; another tenant that runs has another one, unless there are more of them than places.
    pub(crate) place: u16,
    pub(crate) config: TenantConfig,
    pub(crate) page: TenantPage,
    journal: JournalPage,
    /// `None` once the tenant ends.
    socket: Option<SocketFile>,
    keeper: Option<Child>,
    keeper_due: Instant,
    keeper_backoff: Backoff,
    /// The keeper holds a VMM's connection.
    connected: bool,
    backoff: Backoff,
    /// What the broker has given, or has been asked for.
    pub(crate) holds: Option<Lease>,
    /// The worker, or the next one, has devices that are not simulated.
    has_hardware: bool,
    /// What others hold leaves enough for the next worker.
    has_room: bool,
    /// The worker has nothing left of what it took before it was told to take no more.
    quiet: bool,
    /// How often it was told.
    drain_turn: u32,
    pub(crate) session: u32,
    pub(crate) failures: u64,
    /// Why the last worker that failed did, as it said itself.
    pub(crate) last_failure: Option<String>,
    /// How the worker's GPUs reach each other, as it says.
    pub(crate) peers: Peers,
    pub(crate) keeper_failures: u64,
    pub(crate) stage: Stage,
    /// Since when a connected VMM has had no worker.
    lost_at: Option<Instant>,
    /// How long the last one had none.
    pub(crate) last_outage: Option<Duration>,
}

/// Whether there is a worker.
#[derive(Debug)]
pub(crate) enum Stage {
    /// There will be, at that time.
    Pause { until: Instant },
    /// There will be, when the broker has answered.
    Leasing,
    /// There is; it may not be ready.
    Running { worker: Child, ready: bool },
    /// There will not be.
    Over,
}

impl Tenant {
    /// A tenant whose VMM will find `socket`.
    pub(crate) fn new(id: u16, place: u16, config: TenantConfig, socket: SocketFile) -> anyhow::Result<Self> {
        let page = TenantPage::create(&config.name)?;
        let journal = JournalPage::create(&config.name)?;
        let now = Instant::now();
        Ok(Self {
            id,
            place,
            config,
            page,
            journal,
            socket: Some(socket),
            keeper: None,
            keeper_due: now,
            keeper_backoff: Backoff::default(),
            connected: false,
            backoff: Backoff::default(),
            holds: None,
            has_hardware: false,
            has_room: true,
            quiet: false,
            drain_turn: 0,
            session: 0,
            failures: 0,
            last_failure: None,
            peers: Peers::default(),
            keeper_failures: 0,
            stage: Stage::Pause { until: now },
            lost_at: None,
            last_outage: None,
        })
    }

    /// Where the tenant stands, for the operator.
    pub(crate) fn state(&self) -> TenantState {
        match (&self.stage, self.connected) {
            (Stage::Over, _) => TenantState::Stopped,
            (Stage::Running { ready: true, .. }, true) if self.lost_at.is_none() => TenantState::Connected,
            (Stage::Running { ready: true, .. }, false) if self.keeper.is_some() => TenantState::Waiting,
            _ if self.session <= 1 && self.failures == 0 => TenantState::Starting,
            _ => TenantState::Restarting,
        }
    }

    /// The worker, if there is one.
    pub(crate) fn worker(&self) -> Option<&Child> {
        match &self.stage {
            Stage::Running { worker, .. } => Some(worker),
            _ => None,
        }
    }

    /// The keeper, if there is one.
    pub(crate) fn keeper(&self) -> Option<&Child> {
        self.keeper.as_ref()
    }

    /// What the worker holds, for a broker that knows nothing yet.
    pub(crate) fn held(&self) -> Option<Lease> {
        self.worker().and(self.holds.clone())
    }

    /// When there is something to do about it, whatever others do.
    pub(crate) fn due(&self) -> Option<Instant> {
        let worker = match self.stage {
            Stage::Pause { until } if self.has_room => Some(until),
            _ => None,
        };
        let keeper = Some(self.keeper_due).filter(|_| self.keeper.is_none() && self.socket.is_some());
        let children = [self.worker(), self.keeper()];
        let overdue = children.into_iter().flatten().filter_map(Child::due).min();
        // Without a keeper no worker is started.
        keeper.or(worker).into_iter().chain(overdue).min()
    }

    /// Ends processes that were asked to end and have not.
    pub(crate) fn kill_overdue(&mut self, now: Instant) {
        let worker = match &mut self.stage {
            Stage::Running { worker, .. } => Some(worker),
            _ => None,
        };
        worker.into_iter().chain(&mut self.keeper).for_each(|child| child.kill_if_due(now));
    }

    /// Whether processes of it are left.
    pub(crate) fn processes(&self) -> usize {
        usize::from(self.worker().is_some()) + usize::from(self.keeper.is_some())
    }

    /// Starts a keeper if there is none and it is time. True if one was started.
    pub(crate) fn start_keeper_if_due(&mut self, starter: &Starter, now: Instant) -> bool {
        let Some(socket) = self.socket.as_ref().filter(|_| self.keeper.is_none() && self.keeper_due <= now) else {
            return false;
        };
        match Child::start("keeper", &["--tenant", &self.config.name], starter) {
            Ok(mut keeper) => {
                keeper.tell(&ToKeeper::Setup(KeeperSetup { tenant: self.config.name.clone() }), &[socket.as_fd()]);
                self.keeper = Some(keeper);
                true
            }
            Err(error) => {
                tracing::error!(tenant = self.config.name, "{error:#}");
                self.keeper_due = now + self.keeper_backoff.after(true, Duration::ZERO);
                false
            }
        }
    }

    /// Takes what the worker has said. True if it is not to be listened to any more.
    pub(crate) fn hear_worker(&mut self) -> bool {
        let tenant = self.config.name.as_str();
        loop {
            let Stage::Running { worker, ready } = &mut self.stage else { return false };
            match worker.hear::<ToSupervisor>(tenant) {
                Heard::Nothing => return false,
                Heard::Closed => return true,
                Heard::Message(ToSupervisor::Ready {}, _) => {
                    tracing::debug!(tenant, "Worker ready");
                    *ready = true;
                }
                Heard::Message(ToSupervisor::Drained { turn }, _) => self.quiet |= turn == self.drain_turn,
                Heard::Message(ToSupervisor::Peers { peers }, _) => self.peers.hear(peers),
                Heard::Message(ToSupervisor::Failed { reason }, _) => worker.failed(&reason),
            }
        }
    }

    /// Takes what the keeper has said. True if it is not to be listened to any more.
    pub(crate) fn hear_keeper(&mut self) -> bool {
        loop {
            let (tenant, Some(keeper)) = (self.config.name.as_str(), &mut self.keeper) else { return false };
            match keeper.hear::<FromKeeper>(tenant) {
                Heard::Nothing => return false,
                Heard::Closed => return true,
                Heard::Message(FromKeeper::Connected {}, _) => {
                    tracing::info!(tenant, "A VMM has connected");
                    self.connected = true;
                }
                Heard::Message(FromKeeper::Disconnected {}, _) => self.disconnected(),
                Heard::Message(FromKeeper::Replayed { session }, _) if session == self.session => {
                    if let Stage::Running { worker, .. } = &mut self.stage {
                        worker.has_done();
                    }
                    self.last_outage = self.lost_at.take().map(|at| at.elapsed()).or(self.last_outage);
                    tracing::info!(tenant, session, outage = ?self.last_outage, "The VM goes on with a new session");
                }
                Heard::Message(FromKeeper::Replayed { .. }, _) => {}
                Heard::Message(FromKeeper::GaveUp { reason } | FromKeeper::Failed { reason }, _) => {
                    keeper.failed(&reason);
                }
            }
        }
    }

    fn disconnected(&mut self) {
        self.connected = false;
        self.lost_at = None;
        // Its stream is closed.
        if let Stage::Running { worker, .. } = &mut self.stage {
            worker.expect(TEARDOWN, "it did not end within 30 s after its VM had gone");
        }
        if let Some(reason) = self.keeper.as_mut().and_then(|keeper| keeper.reason.take()) {
            // Quoted: a VMM has had a hand in it.
            tracing::error!(
                tenant = self.config.name,
                "The VM's device is given up, because {reason:?}; restart the VM"
            );
        }
    }

    /// Looks whether the keeper has ended, and hands it over with how it ended; the next one follows after a pause.
    pub(crate) fn reap_keeper(&mut self) -> Option<(Child, ExitStatus)> {
        let status = self.keeper.as_mut()?.ended()?;
        let keeper = self.keeper.take()?;
        self.disconnected();
        self.keeper_failures += u64::from(!status.success());
        self.keeper_due = Instant::now() + self.keeper_backoff.after(!status.success(), keeper.age());
        Some((keeper, status))
    }

    /// Looks whether the worker has ended, and hands it over with how it ended; the next one follows after a pause.
    pub(crate) fn reap_worker(&mut self) -> Option<(Child, ExitStatus)> {
        let Stage::Running { worker, .. } = &mut self.stage else { return None };
        let status = worker.ended()?;
        let Stage::Running { worker, .. } = std::mem::replace(&mut self.stage, Stage::Over) else { return None };
        let failed = !status.success();
        if failed {
            self.failures += 1;
            self.last_failure.clone_from(&worker.reason);
        }
        self.peers = Peers::default();
        self.page.clear_worker();
        if self.connected {
            self.lost_at = self.lost_at.or(Some(Instant::now()));
        }
        // A worker that ends well although its VMM is there has been told to make room for the next.
        self.pause(failed, worker.age());
        Some((worker, status))
    }

    fn pause(&mut self, failed: bool, lived: Duration) {
        let pause = self.backoff.after(failed, lived);
        self.pause_for(pause);
    }

    /// The next worker follows then, unless the tenant ends.
    fn pause_for(&mut self, pause: Duration) {
        self.stage = if self.socket.is_some() { Stage::Pause { until: Instant::now() + pause } } else { Stage::Over };
    }

    /// How the worker ended, for the log.
    pub(crate) fn report(&self, worker: &Child, status: ExitStatus) {
        let (tenant, session, reason) = (self.config.name.as_str(), self.session, worker.reason.as_deref());
        if matches!(self.stage, Stage::Over) {
            return tracing::debug!(tenant, session, ?reason, "The worker has ended: {status}");
        }
        if status.success() && worker.is_ending() {
            return tracing::info!(tenant, session, "The session is over; the next one begins");
        }
        if status.success() {
            return tracing::info!(tenant, session, "The VM has gone; its memory is scrubbed");
        }
        let pause_ms = match self.stage {
            Stage::Pause { until } => until.saturating_duration_since(Instant::now()).as_millis(),
            _ => 0,
        };
        let (reason, hint) = why(reason, status);
        tracing::error!(tenant, session, pause_ms, "The worker has failed: {status}{reason}{hint}");
    }

    /// Stops listening to the worker.
    pub(crate) fn take_worker_channel(&mut self) -> Option<vmm_broker::Channel> {
        match &mut self.stage {
            Stage::Running { worker, .. } => worker.take_channel(),
            _ => None,
        }
    }

    /// Stops listening to the keeper.
    pub(crate) fn take_keeper_channel(&mut self) -> Option<vmm_broker::Channel> {
        self.keeper.as_mut()?.take_channel()
    }

    /// Ends its processes now.
    pub(crate) fn kill(&mut self) {
        if let Stage::Running { worker, .. } = &mut self.stage {
            worker.kill();
        }
        if let Some(keeper) = &mut self.keeper {
            keeper.kill();
        }
    }
}

#[cfg(test)]
mod tests;
