//! One tenant in the supervisor: its socket, page and slices, which outlive its workers, and the worker of the moment.
//!
//! A worker's life: started with a [`Setup`] and its descriptors; reports that it is ready; ends. What it used is then scrubbed, and after a
//! pause ([`Backoff`]) the next one is started on the same listening socket, with the next session.
//!
//! Not here: the event loop, answers to the operator.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use vmm_broker::{
    Channel, ConnectionState, Endpoint, JournalPage, LinkTable, MemoryFile, Setup, TenantPage, ToSupervisor, ToWorker,
};
use vmm_control::{SocketFile, TenantState};

use super::backoff::Backoff;
use crate::config::{Config, TenantConfig};

/// Messages that a worker may send in its life; one that sends more is broken.
const MAX_MESSAGES: u32 = 8;
/// Characters of a worker's reason that are logged.
const MAX_REASON: usize = 400;

/// A tenant.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) config: TenantConfig,
    pub(crate) page: TenantPage,
    journal: JournalPage,
    /// `None` once the daemon ends.
    socket: Option<SocketFile>,
    slices: Vec<MemoryFile>,
    backoff: Backoff,
    pub(crate) session: u32,
    pub(crate) failures: u64,
    pub(crate) stage: Stage,
}

/// Whether there is a worker.
#[derive(Debug)]
pub(crate) enum Stage {
    /// There will be, at that time.
    Pause { until: Instant },
    /// There is.
    Running(Worker),
    /// There will not be.
    Over,
}

/// A worker process.
#[derive(Debug)]
pub(crate) struct Worker {
    child: Child,
    started: Instant,
    messages: u32,
    /// Why it fails, as it says.
    pub(crate) reason: Option<String>,
    /// Readable once the process has ended.
    pub(crate) pidfd: OwnedFd,
    /// `None` once the worker has closed its end.
    pub(crate) channel: Option<Channel>,
}

/// What a channel had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// A message; there may be more.
    Message,
    /// Nothing, for now.
    Nothing,
    /// The worker has closed its end, or has been killed for what it said: listen no more.
    Closed,
}

impl Tenant {
    pub(crate) fn new(config: TenantConfig) -> anyhow::Result<Self> {
        let socket = vmm_control::listen(&config.socket, config.socket_mode)?;
        let page = TenantPage::create(&config.name)?;
        let journal = JournalPage::create(&config.name)?;
        let slices = config.slices.iter().map(|slice| slice_file(&config, slice)).collect::<anyhow::Result<_>>()?;
        Ok(Self {
            config,
            page,
            journal,
            socket: Some(socket),
            slices,
            backoff: Backoff::default(),
            session: 0,
            failures: 0,
            stage: Stage::Pause { until: Instant::now() },
        })
    }

    /// Where the tenant stands, for the operator.
    pub(crate) fn state(&self) -> TenantState {
        match (&self.stage, self.page.state()) {
            (Stage::Running(_), ConnectionState::Waiting) => TenantState::Waiting,
            (Stage::Running(_), ConnectionState::Connected) => TenantState::Connected,
            (Stage::Running(_), ConnectionState::Starting) => TenantState::Starting,
            (Stage::Pause { .. }, _) if self.session == 0 => TenantState::Starting,
            (Stage::Pause { .. }, _) => TenantState::Restarting,
            (Stage::Over, _) => TenantState::Stopped,
        }
    }

    /// The worker's process.
    pub(crate) fn worker_pid(&self) -> Option<u32> {
        match &self.stage {
            Stage::Running(worker) => Some(worker.child.id()),
            _ => None,
        }
    }

    /// Starts the next worker. On an error the next try follows after a pause.
    pub(crate) fn start(&mut self, config: &Config, links: &LinkTable) -> anyhow::Result<()> {
        self.session = self.session.wrapping_add(1).max(1);
        let started = self.launch(config, links);
        match started {
            Ok(worker) => {
                tracing::debug!(
                    tenant = self.config.name,
                    session = self.session,
                    pid = worker.child.id(),
                    "Worker started"
                );
                self.stage = Stage::Running(worker);
                Ok(())
            }
            Err(error) => {
                self.pause(true, Duration::ZERO);
                Err(error)
            }
        }
    }

    fn launch(&self, config: &Config, links: &LinkTable) -> anyhow::Result<Worker> {
        let socket = self.socket.as_ref().context("The daemon ends")?;
        // Each worker meets a new VMM.
        self.journal.clear();
        let (ours, theirs) = Channel::pair()?;
        ours.set_nonblocking()?;
        let daemon = &config.daemon;
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("peergated")
            .args(["worker", "--tenant", &self.config.name, "--seccomp", daemon.seccomp.name(), "--log", &daemon.log])
            .args(["--parent", &std::process::id().to_string()])
            .args(daemon.core_dumps.then_some("--core-dumps"))
            .env_clear()
            .stdin(Stdio::from(theirs.into_fd()))
            .stdout(Stdio::null())
            // The terminal's signals are for the supervisor, which then ends the workers in good order.
            .process_group(0);
        let mut child = command.spawn().context("Cannot start a worker process")?;
        let prepared = pidfd(&child).and_then(|pidfd| {
            let mut fds = vec![socket.as_fd(), self.page.page(), links.page(), self.journal.page()];
            fds.extend(self.slices.iter().map(AsFd::as_fd));
            ours.send(&ToWorker::Setup(Box::new(self.setup(config))), &fds)?;
            Ok(pidfd)
        });
        match prepared {
            Ok(pidfd) => {
                Ok(Worker { child, started: Instant::now(), messages: 0, reason: None, pidfd, channel: Some(ours) })
            }
            Err(error) => {
                // A process that cannot be watched must not stay.
                child.kill().and_then(|()| child.wait()).context("Cannot end a worker process")?;
                Err(error)
            }
        }
    }

    fn setup(&self, config: &Config) -> Setup {
        let endpoint = |slice: &crate::config::SliceConfig| {
            let device = config.devices.get(slice.device)?;
            let link = u16::try_from(slice.device).ok()?;
            let (kind, engines) = (device.kind, device.engines);
            Some(Endpoint { name: slice.name.clone(), kind, memory_len: slice.memory, engines, link })
        };
        Setup {
            tenant: self.config.name.clone(),
            session: self.session,
            submit_queues: self.config.submit_queues,
            endpoints: self.config.slices.iter().filter_map(endpoint).collect(),
            links: config.devices.iter().map(|device| device.link).collect(),
            staged: self.config.staged.clone(),
            limits: self.config.limits,
            unsealed_memory: self.config.unsealed_memory,
        }
    }

    /// Takes one message of the worker, if there is one.
    pub(crate) fn hear(&mut self) -> Heard {
        let Stage::Running(worker) = &mut self.stage else { return Heard::Nothing };
        let Some(channel) = &worker.channel else { return Heard::Nothing };
        let tenant = self.config.name.as_str();
        match channel.receive::<ToSupervisor>() {
            Err(error) if error.would_block() => return Heard::Nothing,
            Ok(Some((message, _))) if worker.messages < MAX_MESSAGES => {
                worker.messages += 1;
                match message {
                    ToSupervisor::Ready {} => tracing::debug!(tenant, "Worker ready"),
                    ToSupervisor::Failed { reason } => {
                        worker.reason = Some(reason.chars().take(MAX_REASON).collect());
                    }
                }
                return Heard::Message;
            }
            Ok(Some(_)) => tracing::error!(tenant, "The worker talks too much; ending it"),
            // An end at the end of its life, or a worker that can no longer be told to end.
            Ok(None) => tracing::debug!(tenant, "The worker has closed its channel"),
            Err(error) => {
                tracing::error!(tenant, "The worker makes no sense; ending it: {:#}", anyhow::Error::from(error));
            }
        }
        worker.kill();
        Heard::Closed
    }

    /// Looks whether the worker has ended. If so, scrubs what it used, and hands it over with how it ended; the next one follows after a
    /// pause.
    pub(crate) fn reap(&mut self) -> Option<(Worker, ExitStatus)> {
        let Stage::Running(worker) = &mut self.stage else { return None };
        let status = match worker.child.try_wait() {
            Ok(None) => return None,
            Ok(Some(status)) => status,
            Err(error) => {
                tracing::error!(tenant = self.config.name, %error, "Cannot learn how the worker ended");
                ExitStatus::from_raw(1 << 8)
            }
        };
        let Stage::Running(worker) = std::mem::replace(&mut self.stage, Stage::Over) else { return None };
        let failed = !status.success();
        self.failures += u64::from(failed);
        self.page.clear_worker();
        let scrubbed = self.scrub();
        if scrubbed && self.socket.is_some() {
            self.pause(failed, worker.started.elapsed());
        }
        Some((worker, status))
    }

    fn pause(&mut self, failed: bool, lived: Duration) {
        self.stage = Stage::Pause { until: Instant::now() + self.backoff.after(failed, lived) };
    }

    /// No byte of one session is seen in the next. False if that cannot be ascertained.
    fn scrub(&mut self) -> bool {
        self.slices.iter_mut().zip(&self.config.slices).all(|(file, slice)| {
            let (tenant, slice_name) = (self.config.name.as_str(), slice.name.as_str());
            let Err(error) = file.scrub() else { return true };
            tracing::error!(tenant, slice_name, %error, "Cannot scrub a slice; taking fresh memory");
            match slice_file(&self.config, slice) {
                Ok(fresh) => *file = fresh,
                Err(error) => {
                    tracing::error!(tenant, slice_name, "The tenant is stopped: {error:#}");
                    return false;
                }
            }
            true
        })
    }

    /// Accepts nobody any more, and asks the worker to end.
    pub(crate) fn stop(&mut self) {
        self.socket = None;
        match &mut self.stage {
            Stage::Running(worker) => {
                let asked = worker.channel.as_ref().map(|channel| channel.send(&ToWorker::Shutdown {}, &[]));
                if !matches!(asked, Some(Ok(()))) {
                    worker.kill();
                }
            }
            stage => *stage = Stage::Over,
        }
    }

    /// Ends the worker now.
    pub(crate) fn kill(&mut self) {
        if let Stage::Running(worker) = &mut self.stage {
            worker.kill();
        }
    }
}

impl Worker {
    fn kill(&mut self) {
        if let Err(error) = self.child.kill() {
            tracing::error!(pid = self.child.id(), %error, "Cannot end the worker");
        }
    }
}

fn slice_file(tenant: &TenantConfig, slice: &crate::config::SliceConfig) -> anyhow::Result<MemoryFile> {
    Ok(MemoryFile::create(&format!("peergate-{}-{}", tenant.name, slice.name), slice.memory)?)
}

fn pidfd(child: &Child) -> anyhow::Result<OwnedFd> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("The worker has no process number")?;
    pidfd_open(pid, PidfdFlags::empty()).context("Cannot watch a worker process")
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::path::Path;

    use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

    use super::*;

    /// A tenant whose worker is a process that waits for the end of its input, and the worker's end of the channel.
    fn with_worker(dir: &Path) -> (Tenant, Channel) {
        let text = include_str!("../../../../configs/demo.toml");
        let mut config = Config::parse(Path::new("demo.toml"), text).unwrap().tenants.swap_remove(0);
        config.socket = dir.join("t.sock");
        let mut tenant = Tenant::new(config).unwrap();
        let (ours, theirs) = Channel::pair().unwrap();
        ours.set_nonblocking().unwrap();
        let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pidfd = pidfd(&child).unwrap();
        tenant.stage = Stage::Running(Worker {
            child,
            started: Instant::now(),
            messages: 0,
            reason: None,
            pidfd,
            channel: Some(ours),
        });
        (tenant, theirs)
    }

    /// Waits for the worker's end, and says which signal it was.
    fn ended_by(tenant: &mut Tenant) -> Option<i32> {
        loop {
            if let Some((_, status)) = tenant.reap() {
                return status.signal();
            }
            std::thread::yield_now();
        }
    }

    const KILLED: Option<i32> = Some(9);

    #[test]
    fn a_worker_that_makes_no_sense_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, theirs) = with_worker(dir.path());
        assert_eq!(tenant.hear(), Heard::Nothing);
        let garbage = [IoSlice::new(b"{\"reboot\":{}}")];
        sendmsg(&theirs, &garbage, &mut SendAncillaryBuffer::default(), SendFlags::empty()).unwrap();
        assert_eq!(tenant.hear(), Heard::Closed);
        assert_eq!(ended_by(&mut tenant), KILLED);
        assert_eq!((tenant.failures, tenant.state()), (1, TenantState::Starting));
    }

    #[test]
    fn a_worker_that_talks_without_end_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, theirs) = with_worker(dir.path());
        for _ in 0..=MAX_MESSAGES {
            theirs.send(&ToSupervisor::Failed { reason: "\u{1b}[2J\n".repeat(1000) }, &[]).unwrap();
        }
        let heard: Vec<_> = (0..=MAX_MESSAGES).map(|_| tenant.hear()).collect();
        assert_eq!(heard.iter().filter(|heard| **heard == Heard::Message).count(), 8);
        assert_eq!(heard.last(), Some(&Heard::Closed));
        assert_eq!(ended_by(&mut tenant), KILLED);
    }

    #[test]
    fn a_worker_that_hangs_up_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, theirs) = with_worker(dir.path());
        drop(theirs);
        // A process that another test is just starting may still hold a copy.
        let mut heard = Heard::Nothing;
        while heard == Heard::Nothing {
            heard = tenant.hear();
        }
        assert_eq!(heard, Heard::Closed);
        assert_eq!(ended_by(&mut tenant), KILLED);
    }

    #[test]
    fn a_stopped_tenant_accepts_nobody_and_gets_no_further_worker() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, theirs) = with_worker(dir.path());
        tenant.stop();
        assert!(!dir.path().join("t.sock").exists());
        assert_eq!(theirs.receive::<ToWorker>().unwrap().unwrap().0, ToWorker::Shutdown {});
        tenant.kill();
        assert_eq!(ended_by(&mut tenant), KILLED);
        assert!(matches!(tenant.stage, Stage::Over));
        assert_eq!(tenant.state(), TenantState::Stopped);
    }
}
