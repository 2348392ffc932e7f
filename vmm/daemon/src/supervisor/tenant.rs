//! One tenant: what outlives its workers, its keeper, its worker, and where it stands.
//!
//! A tenant always has a keeper, and a worker as soon as there is one to be had: a lease of its slices is asked for, then a process is started that gets
//! it, and the keeper gets the other end of that process's connection. A worker that ends, well or not, is followed by the next. If the keeper holds a
//! VMM then, it carries the connection over; else the session begins afresh.
//!
//! Not here: what a worker or a keeper does, what changes while it runs (`adapt`), the event loop.

pub(crate) mod adapt;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::Context;
use vmm_broker::{
    Endpoint, FromKeeper, JournalPage, KeeperSetup, Lease, LeaseSlice, Link, LinkTable, Setup, TenantPage, ToKeeper,
    ToSupervisor, ToWorker,
};
use vmm_control::{SocketFile, TenantState};

use super::backoff::Backoff;
use super::child::{Child, Heard, why};
use super::leftovers::remove_socket;
use super::process::Starter;
use crate::config::{Config, SliceConfig, TenantConfig};

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
    /// What others hold leaves enough for the next worker.
    has_room: bool,
    /// The worker has nothing left of what it took before it was told to take no more.
    quiet: bool,
    /// How often it was told.
    drain_turn: u32,
    pub(crate) session: u32,
    pub(crate) failures: u64,
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
            has_room: true,
            quiet: false,
            drain_turn: 0,
            session: 0,
            failures: 0,
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

    /// The lease that the next worker needs, if it is time for one.
    pub(crate) fn wants_lease(&mut self, config: &Config, now: Instant) -> Option<Lease> {
        let is_due = self.has_room && matches!(self.stage, Stage::Pause { until } if until <= now);
        if self.keeper.is_none() || !is_due {
            return None;
        }
        self.session = self.session.wrapping_add(1).max(1);
        self.stage = Stage::Leasing;
        self.holds = Some(self.lease(config));
        self.holds.clone()
    }

    /// Nobody answers the question for a lease: it will be asked again.
    pub(crate) fn lease_lost(&mut self) {
        if matches!(self.stage, Stage::Leasing) {
            self.pause_for(Duration::ZERO);
        }
    }

    /// Whether the broker's answer to a tenant of that name is for this one.
    pub(crate) fn is_asking(&self, name: &str) -> bool {
        self.config.name == name && matches!(self.stage, Stage::Leasing)
    }

    /// The broker says no.
    pub(crate) fn lease_refused(&mut self, session: u32, reason: &str) {
        if session != self.session || !matches!(self.stage, Stage::Leasing) {
            return;
        }
        tracing::error!(tenant = self.config.name, session, "The broker gives no memory: {reason}");
        self.pause(true, Duration::ZERO);
    }

    /// Starts the worker that the lease is for. True if there is one now. On a failure the next try follows after a pause.
    pub(crate) fn start(
        &mut self,
        session: u32,
        slices: &[OwnedFd],
        config: &Config,
        links: &LinkTable,
        starter: &Starter,
    ) -> bool {
        if session != self.session || !matches!(self.stage, Stage::Leasing) {
            return false;
        }
        if self.socket.is_none() {
            self.stage = Stage::Over;
            return false;
        }
        match self.launch(slices, config, links, starter) {
            Ok(worker) => {
                tracing::debug!(tenant = self.config.name, session, pid = worker.pid(), "Worker started");
                self.stage = Stage::Running { worker, ready: false };
                true
            }
            Err(error) => {
                tracing::error!(tenant = self.config.name, "{error:#}");
                self.pause(true, Duration::ZERO);
                false
            }
        }
    }

    fn launch(
        &mut self,
        slices: &[OwnedFd],
        config: &Config,
        links: &LinkTable,
        starter: &Starter,
    ) -> anyhow::Result<Child> {
        let keeper = self.keeper.as_mut().context("The tenant has no keeper")?;
        // What was said before the last worker ended has been heard, so nobody can have touched the rings if nobody was connected.
        let fresh = !self.connected;
        if fresh {
            self.journal.clear();
        }
        let (listener, stream) = private_connection(config, self.id)?;
        let mut worker = Child::start("worker", &["--tenant", &self.config.name], starter)?;
        let mut fds = vec![listener.as_fd(), self.page.page(), links.page(), self.journal.page()];
        fds.extend(slices.iter().map(AsFd::as_fd));
        let setup = setup(&self.config, self.place, self.session, config);
        (self.quiet, self.drain_turn) = (false, 0);
        worker.tell(&ToWorker::Setup(Box::new(setup)), &fds);
        keeper.tell(&ToKeeper::Worker { session: self.session, fresh }, &[stream.as_fd()]);
        Ok(worker)
    }

    fn lease(&self, config: &Config) -> Lease {
        let slice = |slice: &SliceConfig| {
            let device = config.devices.get(slice.device)?;
            Some(LeaseSlice { name: slice.name.clone(), device: device.name.clone(), memory: slice.memory })
        };
        Lease {
            tenant: self.config.name.clone(),
            session: self.session,
            slices: self.config.slices.iter().filter_map(slice).collect(),
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
        self.keeper_due = Instant::now() + self.keeper_backoff.after(!status.success(), keeper.age());
        Some((keeper, status))
    }

    /// Looks whether the worker has ended, and hands it over with how it ended; the next one follows after a pause.
    pub(crate) fn reap_worker(&mut self) -> Option<(Child, ExitStatus)> {
        let Stage::Running { worker, .. } = &mut self.stage else { return None };
        let status = worker.ended()?;
        let Stage::Running { worker, .. } = std::mem::replace(&mut self.stage, Stage::Over) else { return None };
        let failed = !status.success();
        self.failures += u64::from(failed);
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
        if status.success() && worker.due().is_some() {
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

fn setup(tenant: &TenantConfig, place: u16, session: u32, config: &Config) -> Setup {
    let endpoint = |slice: &SliceConfig| {
        let device = config.devices.get(slice.device)?;
        let (kind, engines, link) = (device.kind, device.engines, device.number);
        Some(Endpoint { name: slice.name.clone(), kind, memory_len: slice.memory, engines, link })
    };
    let count = config.devices.iter().map(|device| usize::from(device.number) + 1).max().unwrap_or(0);
    let mut links = vec![Link { bandwidth: 0, latency_ns: 0 }; count];
    for device in &config.devices {
        if let Some(link) = links.get_mut(usize::from(device.number)) {
            *link = device.link;
        }
    }
    Setup {
        tenant: tenant.name.clone(),
        session,
        submit_queues: tenant.submit_queues,
        endpoints: tenant.slices.iter().filter_map(endpoint).collect(),
        links,
        drained: tenant.drained,
        staged: tenant.staged.clone(),
        place,
        limits: tenant.limits,
        unsealed_memory: tenant.unsealed_memory,
    }
}

/// A listening socket for one worker, and the connection to it. Its file, which only this daemon's user can use, goes with the first.
fn private_connection(config: &Config, id: u16) -> anyhow::Result<(SocketFile, UnixStream)> {
    let path = config.daemon.runtime_dir.join(format!(".worker-{id}"));
    // A worker of a daemon that was killed may be there still, and nobody wants anything of it.
    remove_socket(&path);
    let socket = vmm_control::listen(&path, 0o600).context("Cannot make a worker's socket")?;
    let stream = UnixStream::connect(&path).context("Cannot connect to a worker's socket")?;
    Ok((socket, stream))
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::unix::process::ExitStatusExt;
    use std::path::Path;
    use std::process::{Command, Stdio};

    use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
    use vmm_broker::Channel;
    use vmm_sandbox::Fence;

    use super::super::process::Process;
    use super::*;
    use crate::config::DaemonConfig;

    const CONFIG: &str = include_str!("../../../../configs/demo.toml");

    /// A process that waits for the end of its input, and its end of a channel.
    fn process() -> (Child, Channel) {
        let (ours, theirs) = Channel::pair().unwrap();
        ours.set_nonblocking().unwrap();
        let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        (Child::new(Process::watch(child), ours), theirs)
    }

    fn tenant(dir: &Path) -> (Tenant, Config) {
        let mut config = Config::parse(Path::new("demo.toml"), CONFIG).unwrap();
        config.tenants[0].socket = dir.join("t.sock");
        let socket = vmm_control::listen(&config.tenants[0].socket, 0o600).unwrap();
        (Tenant::new(0, 0, config.tenants[0].clone(), socket).unwrap(), config)
    }

    /// A tenant that has a keeper and a worker, and their ends of the channels.
    fn running(dir: &Path) -> (Tenant, Channel, Channel) {
        let (mut tenant, config) = tenant(dir);
        let (keeper, keeper_says) = process();
        let (worker, worker_says) = process();
        tenant.keeper = Some(keeper);
        assert_eq!(tenant.wants_lease(&config, Instant::now()).unwrap().session, 1);
        tenant.stage = Stage::Running { worker, ready: false };
        (tenant, keeper_says, worker_says)
    }

    /// Waits for the worker's end, and says which signal it was.
    fn ended_by(tenant: &mut Tenant) -> Option<i32> {
        loop {
            if let Some((_, status)) = tenant.reap_worker() {
                return status.signal();
            }
            std::thread::yield_now();
        }
    }

    const KILLED: Option<i32> = Some(9);

    #[test]
    fn a_worker_that_makes_no_sense_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, _keeper, worker) = running(dir.path());
        assert!(!tenant.hear_worker());
        let garbage = [IoSlice::new(b"{\"reboot\":{}}")];
        sendmsg(&worker, &garbage, &mut SendAncillaryBuffer::default(), SendFlags::empty()).unwrap();
        assert!(tenant.hear_worker());
        assert_eq!(ended_by(&mut tenant), KILLED);
        assert_eq!((tenant.failures, tenant.state()), (1, TenantState::Restarting));
    }

    #[test]
    fn a_process_that_talks_without_end_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, _keeper, worker) = running(dir.path());
        let reason = "\u{1b}[2J\n".repeat(1000);
        let mut closed = false;
        // The bucket may refill while this runs.
        for _ in 0..10_000 {
            if worker.send(&ToSupervisor::Failed { reason: reason.clone() }, &[]).is_err() {
                break;
            }
            closed |= tenant.hear_worker();
            if closed {
                break;
            }
        }
        assert!(closed);
        assert_eq!(ended_by(&mut tenant), KILLED);
    }

    #[test]
    fn a_worker_that_hangs_up_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, _keeper, worker) = running(dir.path());
        drop(worker);
        // A process that another test is just starting may still hold a copy.
        while !tenant.hear_worker() {}
        assert_eq!(ended_by(&mut tenant), KILLED);
    }

    #[test]
    fn a_tenant_is_connected_once_its_worker_knows_what_the_last_one_knew() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, keeper, worker) = running(dir.path());
        assert_eq!(tenant.state(), TenantState::Starting);
        worker.send(&ToSupervisor::Ready {}, &[]).unwrap();
        tenant.hear_worker();
        assert_eq!(tenant.state(), TenantState::Waiting);
        keeper.send(&FromKeeper::Connected {}, &[]).unwrap();
        tenant.hear_keeper();
        assert_eq!(tenant.state(), TenantState::Connected);

        tenant.kill();
        assert_eq!(ended_by(&mut tenant), KILLED);
        assert_eq!(tenant.state(), TenantState::Restarting);
        let (next, says) = process();
        tenant.session = 2;
        tenant.stage = Stage::Running { worker: next, ready: false };
        says.send(&ToSupervisor::Ready {}, &[]).unwrap();
        tenant.hear_worker();
        assert_eq!(tenant.state(), TenantState::Restarting, "it does not know enough yet");
        keeper.send(&FromKeeper::Replayed { session: 1 }, &[]).unwrap();
        tenant.hear_keeper();
        assert_eq!((tenant.state(), tenant.last_outage), (TenantState::Restarting, None), "that was another one");
        keeper.send(&FromKeeper::Replayed { session: 2 }, &[]).unwrap();
        tenant.hear_keeper();
        assert_eq!(tenant.state(), TenantState::Connected);
        assert!(tenant.last_outage.is_some());
    }

    #[test]
    fn without_a_keeper_there_is_no_worker_and_its_end_ends_the_connection() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, config) = tenant(dir.path());
        assert!(tenant.wants_lease(&config, Instant::now()).is_none());
        let (keeper, says) = process();
        tenant.keeper = Some(keeper);
        says.send(&FromKeeper::Connected {}, &[]).unwrap();
        tenant.hear_keeper();
        assert!(tenant.connected);
        tenant.kill();
        while tenant.reap_keeper().is_none() {
            std::thread::yield_now();
        }
        assert!(!tenant.connected);
        assert!(tenant.due().is_some(), "there will be another");
    }

    #[test]
    fn a_lease_for_another_session_starts_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, config) = tenant(dir.path());
        let (keeper, _says) = process();
        tenant.keeper = Some(keeper);
        let links = LinkTable::create(&[0, 0]).unwrap();
        let starter =
            Starter::new(&DaemonConfig { namespaces: Fence::Off, landlock: Fence::Off, ..config.daemon.clone() });
        let starter = starter.unwrap();
        assert!(!tenant.start(0, &[], &config, &links, &starter), "none was asked for");
        tenant.wants_lease(&config, Instant::now()).unwrap();
        assert!(!tenant.start(7, &[], &config, &links, &starter));
        tenant.lease_refused(7, "not yours");
        assert!(matches!(tenant.stage, Stage::Leasing));
        tenant.lease_refused(1, "no memory");
        assert!(matches!(tenant.stage, Stage::Pause { .. }));
        tenant.kill();
    }

    #[test]
    fn a_stopped_tenant_accepts_nobody_and_gets_no_further_worker() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, keeper, worker) = running(dir.path());
        tenant.stop();
        assert!(!dir.path().join("t.sock").exists());
        assert_eq!(worker.receive::<ToWorker>().unwrap().unwrap().0, ToWorker::Shutdown {});
        assert_eq!(keeper.receive::<ToKeeper>().unwrap().unwrap().0, ToKeeper::Shutdown {});
        tenant.kill();
        assert_eq!(ended_by(&mut tenant), KILLED);
        while tenant.reap_keeper().is_none() {
            std::thread::yield_now();
        }
        assert!(matches!(tenant.stage, Stage::Over));
        assert_eq!((tenant.processes(), tenant.due(), tenant.state()), (0, None, TenantState::Stopped));
    }
}
