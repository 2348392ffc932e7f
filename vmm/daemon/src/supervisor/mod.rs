//! The supervisor: one thread that owns what outlives workers, starts them, watches them, and answers the operator.
//!
//! It parses nothing that a guest controls. One event loop waits for: the operator's socket and its clients, signals, a timer, and of each
//! worker its channel and its end. A descriptor is always taken from the loop before it is closed: workers hold copies of some, and the loop
//! would go on hearing of a closed one.
//!
//! Ending: listening sockets go first, workers are asked to end, then killed after [`PATIENCE`] or at a second signal; the loop ends when
//! none is left, or when one has not ended [`PATIENCE`] after it was killed: the kernel then waits for something that its VMM serves.
//!
//! Not here: what a worker does, the messages themselves, the configuration's meaning.

mod answers;
mod backoff;
mod clients;
mod runtime_dir;
mod tenant;

use std::cell::Cell;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use vmm_broker::LinkTable;
use vmm_control::{SocketFile, TenantState};
use vmm_sandbox::{Class, Sandbox, Signals};

use crate::config::Config;
use clients::Clients;
use runtime_dir::RuntimeDir;
use tenant::{Heard, Stage, Tenant};

/// How long workers may take to end in good order.
const PATIENCE: Duration = Duration::from_secs(5);

/// What an event is about: one of these, plus a number.
const SIGNAL: u32 = 0;
const TIMER: u32 = 1;
const CONTROL: u32 = 2;
const CHANNEL: u32 = 0x1_0000;
const WORKER: u32 = 0x2_0000;
const CLIENT: u32 = 0x3_0000;

/// Everything that lives as long as the daemon.
pub(crate) struct Supervisor {
    config: Config,
    tenants: Vec<Tenant>,
    links: LinkTable,
    control: Option<SocketFile>,
    clients: Clients,
    signals: Signals,
    timer: OwnedFd,
    started: Instant,
    /// When workers that still run are killed, or given up if they have been.
    ending: Option<Instant>,
    killed: bool,
    /// How many workers are left behind, once the loop is to end.
    done: Rc<Cell<Option<usize>>>,
    /// Whoever started the daemon has been told that every tenant can be connected to.
    told_ready: bool,
}

/// Runs a daemon until it is told to end. Leaves no process, socket or file behind.
pub(crate) fn run(config: Config) -> anyhow::Result<()> {
    if let Err(error) = vmm_sandbox::process::keep_inherited_descriptors() {
        tracing::warn!(%error, "Workers may inherit descriptors that this daemon was started with");
    }
    let signals = Signals::block().context("Cannot take signals")?;
    let sandbox = Sandbox::new(config.daemon.seccomp)?;
    raise_descriptor_limit();
    // Dropped last: its sockets are gone by then.
    let _runtime_dir = RuntimeDir::acquire(&config.daemon.runtime_dir)?;
    let done = Rc::new(Cell::new(None));
    let supervisor = Supervisor::new(config, signals, Rc::clone(&done))?;
    sandbox.apply(Class::Supervisor)?;
    supervisor.announce();
    let mut manager =
        EventManager::<Supervisor>::new().map_err(|error| anyhow::anyhow!("Cannot make an event loop: {error}"))?;
    manager.add_subscriber(supervisor);
    loop {
        match done.get() {
            None => manager.run().map_err(|error| anyhow::anyhow!("The event loop failed: {error}"))?,
            Some(0) => return Ok(()),
            Some(left) => bail!("Killed workers have not ended ({left}); their VMMs hold them, so end those, too"),
        };
    }
}

/// Each slice is a descriptor.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "Cannot raise the limit of open files");
    }
}

impl Supervisor {
    fn new(config: Config, signals: Signals, done: Rc<Cell<Option<usize>>>) -> anyhow::Result<Self> {
        let daemon = &config.daemon;
        let control = vmm_control::listen(&daemon.control, daemon.control_mode)?;
        control.listener().set_nonblocking(true).context("Cannot prepare the control socket")?;
        let bandwidths: Vec<_> = config.devices.iter().map(|device| device.link.bandwidth).collect();
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
            .context("Cannot make a timer")?;
        Ok(Self {
            tenants: config.tenants.iter().cloned().map(Tenant::new).collect::<anyhow::Result<_>>()?,
            links: LinkTable::create(&bandwidths)?,
            control: Some(control),
            clients: Clients::default(),
            signals,
            timer,
            started: Instant::now(),
            ending: None,
            killed: false,
            done,
            told_ready: false,
            config,
        })
    }

    fn announce(&self) {
        let daemon = &self.config.daemon;
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            pid = std::process::id(),
            control = %daemon.control.display(),
            seccomp = %daemon.seccomp,
            "peergated is up"
        );
        for tenant in &self.config.tenants {
            tracing::info!(tenant = tenant.name, socket = %tenant.socket.display(), slices = tenant.slices.len(), "Waiting for a VMM");
        }
    }

    /// Says once, on standard output, that every tenant waits for its VMM.
    fn tell_ready(&mut self) {
        let is_up = |tenant: &Tenant| matches!(tenant.state(), TenantState::Waiting | TenantState::Connected);
        if self.told_ready || !self.tenants.iter().all(is_up) {
            return;
        }
        self.told_ready = true;
        let line = format!("peergated is ready; control socket {}\n", self.config.daemon.control.display());
        let mut out = std::io::stdout().lock();
        // Nobody needs to listen.
        let _ = out.write_all(line.as_bytes()).and_then(|()| out.flush());
    }

    /// Does what is due, and sets the timer for what comes next.
    fn tend(&mut self, ops: &mut EventOps<'_>) {
        let now = Instant::now();
        let overdue = self.ending.is_some_and(|at| at <= now);
        let given_up = overdue && self.killed;
        if overdue && !given_up {
            tracing::warn!("Workers are still running; killing them");
            self.kill(now);
        }
        for index in 0..self.tenants.len() {
            self.start_if_due(index, now, ops);
        }
        let running = self.tenants.iter().filter(|tenant| matches!(tenant.stage, Stage::Running(_))).count();
        if self.ending.is_some() && (running == 0 || given_up) {
            self.done.set(Some(running));
        }
        let pauses = self.tenants.iter().filter_map(|tenant| match tenant.stage {
            Stage::Pause { until } => Some(until),
            _ => None,
        });
        self.set_timer(pauses.chain(self.ending).min());
    }

    /// Kills the workers, which then have [`PATIENCE`] to be gone.
    fn kill(&mut self, now: Instant) {
        self.tenants.iter_mut().for_each(Tenant::kill);
        if !std::mem::replace(&mut self.killed, true) {
            self.ending = Some(now + PATIENCE);
        }
    }

    fn start_if_due(&mut self, index: usize, now: Instant, ops: &mut EventOps<'_>) {
        let Some(tenant) = self.tenants.get_mut(index) else { return };
        if !matches!(tenant.stage, Stage::Pause { until } if until <= now) {
            return;
        }
        if let Err(error) = tenant.start(&self.config, &self.links) {
            tracing::error!(tenant = tenant.config.name, "{error:#}");
            return;
        }
        let Stage::Running(worker) = &tenant.stage else { return };
        // There are at most 128 tenants.
        let number = u32::try_from(index).unwrap_or(0);
        add(ops, worker.pidfd.as_fd(), WORKER + number);
        if let Some(channel) = &worker.channel {
            add(ops, channel.as_fd(), CHANNEL + number);
        }
    }

    fn set_timer(&self, at: Option<Instant>) {
        let wait =
            at.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1)));
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let once =
            Timespec { tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX), tv_nsec: wait.subsec_nanos().into() };
        let spec = Itimerspec { it_interval: zero, it_value: once };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec) {
            tracing::error!(%error, "Cannot set the timer");
        }
    }

    fn on_signal(&mut self, ops: &mut EventOps<'_>) {
        let signal = match self.signals.take() {
            Ok(Some(signal)) => signal,
            Ok(None) => return,
            Err(error) => return tracing::error!(%error, "Cannot take a signal"),
        };
        if self.ending.is_some() {
            tracing::warn!(signal, "Killing the workers");
            return self.kill(Instant::now());
        }
        tracing::info!(signal, "Ending");
        if let Some(control) = self.control.take() {
            forget(ops, control.as_fd());
        }
        self.tenants.iter_mut().for_each(Tenant::stop);
        self.ending = Some(Instant::now() + PATIENCE);
    }

    fn on_control(&mut self, ops: &mut EventOps<'_>) {
        let Some(control) = &self.control else { return };
        let accepted = match control.listener().accept() {
            Ok((stream, _)) => self.clients.add(stream, CLIENT, ops),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = accepted {
            tracing::warn!("Cannot take an operator's connection: {error:#}");
        }
    }

    fn on_channel(&mut self, index: usize, ops: &mut EventOps<'_>) {
        let Some(tenant) = self.tenants.get_mut(index) else { return };
        if tenant.hear() == Heard::Closed
            && let Stage::Running(worker) = &mut tenant.stage
            && let Some(channel) = worker.channel.take()
        {
            forget(ops, channel.as_fd());
        }
        self.tell_ready();
    }

    fn on_worker(&mut self, index: usize, ops: &mut EventOps<'_>) {
        let Some(tenant) = self.tenants.get_mut(index) else { return };
        // Its last words may still be there.
        while tenant.hear() == Heard::Message {}
        let Some((worker, status)) = tenant.reap() else { return };
        forget(ops, worker.pidfd.as_fd());
        if let Some(channel) = &worker.channel {
            forget(ops, channel.as_fd());
        }
        report(tenant, worker.reason.as_deref(), status);
    }

    fn on_client(&mut self, number: u32, ops: &mut EventOps<'_>) {
        // The clients are lent out while they are answered from the rest.
        let mut clients = std::mem::take(&mut self.clients);
        clients.advance(number, CLIENT, ops, |request| answers::answer(self, request));
        self.clients = clients;
    }
}

impl MutEventSubscriber for Supervisor {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        add(ops, self.signals.as_fd(), SIGNAL);
        add(ops, self.timer.as_fd(), TIMER);
        if let Some(control) = &self.control {
            add(ops, control.as_fd(), CONTROL);
        }
        self.tend(ops);
    }

    fn process(&mut self, event: Events, ops: &mut EventOps<'_>) {
        let number = event.data() & 0xffff;
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        match event.data() {
            SIGNAL => self.on_signal(ops),
            TIMER => drop(rustix::io::read(&self.timer, &mut [0_u8; 8])),
            CONTROL => self.on_control(ops),
            CLIENT.. => self.on_client(number, ops),
            WORKER.. => self.on_worker(index, ops),
            CHANNEL.. => self.on_channel(index, ops),
            _ => {}
        }
        self.tend(ops);
    }
}

/// How a worker ended, for the log.
fn report(tenant: &Tenant, reason: Option<&str>, status: ExitStatus) {
    let (name, session) = (tenant.config.name.as_str(), tenant.session);
    if matches!(tenant.stage, Stage::Over) {
        tracing::debug!(tenant = name, session, ?reason, "The worker has ended: {status}");
        return;
    }
    if status.success() {
        tracing::info!(tenant = name, session, "The VM has gone; its slices are scrubbed");
        return;
    }
    let pause_ms = match tenant.stage {
        Stage::Pause { until } => until.saturating_duration_since(Instant::now()).as_millis(),
        _ => 0,
    };
    let hint = match status.signal().and_then(rustix::process::Signal::from_named_raw) {
        Some(rustix::process::Signal::BUS) => "; the VMM has probably truncated its guest's memory",
        Some(rustix::process::Signal::SYS) => "; it made a system call that is on no list, see the kernel's audit log",
        _ => "",
    };
    // Quoted: whoever wrote it may be hostile.
    let reason = reason.map(|reason| format!(", because {reason:?}")).unwrap_or_default();
    tracing::error!(tenant = name, session, pause_ms, "The worker has failed: {status}{reason}{hint}");
}

fn add(ops: &mut EventOps<'_>, fd: BorrowedFd<'_>, data: u32) {
    if let Err(error) = ops.add(Events::with_data_raw(fd.as_raw_fd(), data, EventSet::IN)) {
        tracing::error!(%error, data, "Cannot wait for a descriptor");
    }
}

fn forget(ops: &mut EventOps<'_>, fd: BorrowedFd<'_>) {
    if let Err(error) = ops.remove(Events::empty_raw(fd.as_raw_fd())) {
        tracing::error!(%error, "Cannot forget a descriptor");
    }
}
