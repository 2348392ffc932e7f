//! The supervisor: one thread that owns what outlives workers, starts them, watches them, and answers the operator.
//!
//! It parses nothing that a guest controls. One event loop waits for: the operator's socket and its clients, signals, a timer, and of each
//! process its channel and its end.
//!
//! Ending: listening sockets go first, workers are asked to end, then killed after [`PATIENCE`] or at a second signal; the loop ends when
//! none is left, or when one has not ended [`PATIENCE`] after it was killed: the kernel then waits for something that its VMM serves.
//!
//! Not here: what a worker does, the messages themselves, the configuration's meaning.

pub(crate) mod answers;
mod backoff;
mod broker;
mod change;
mod child;
mod clients;
mod faults;
mod groups;
mod inspect;
mod leftovers;
mod peers;
mod process;
mod runtime_dir;
mod tenant;
mod waiting;

use std::cell::Cell;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use vmm_broker::{FromBroker, LinkTable};
use vmm_control::{Reply, Request, SocketFile, TenantState};
use vmm_sandbox::{Class, Sandbox, Signals};

use crate::config::Config;
use crate::config::store::Store;
use broker::Broker;
use child::{Heard, why};
use clients::Clients;
use groups::Groups;
use leftovers::Patience;
use process::Starter;
use runtime_dir::RuntimeDir;
use tenant::Tenant;
use waiting::{add, forget, listen_no_more, listen_to};

/// How long workers may take to end in good order.
const PATIENCE: Duration = Duration::from_secs(5);

/// What an event is about: one of these, plus the number of a tenant or client.
const SIGNAL: u32 = 0;
const TIMER: u32 = 1;
const CONTROL: u32 = 2;
const BROKER: u32 = 3;
const BROKER_END: u32 = 4;
const WORKER: u32 = 0x1_0000;
const WORKER_END: u32 = 0x2_0000;
const KEEPER: u32 = 0x3_0000;
const KEEPER_END: u32 = 0x4_0000;
const CLIENT: u32 = 0x5_0000;

/// Everything that lives as long as the daemon.
pub(crate) struct Supervisor {
    config: Config,
    store: Store,
    /// In the configuration's order.
    tenants: Vec<Tenant>,
    /// Removed ones, until nothing is left of them.
    leaving: Vec<Tenant>,
    next_id: u16,
    broker: Broker,
    groups: Groups,
    starter: Starter,
    links: LinkTable,
    control: Option<SocketFile>,
    clients: Clients,
    signals: Signals,
    timer: OwnedFd,
    started: Instant,
    /// When processes that still run are killed, or given up if they have been.
    ending: Option<Instant>,
    killed: bool,
    /// How many processes are left behind, once the loop is to end.
    done: Rc<Cell<Option<usize>>>,
    /// Whoever started the daemon has been told that every tenant can be connected to.
    told_ready: bool,
}

/// Runs a daemon until it is told to end. Leaves no process, socket or file behind.
pub(crate) fn run(store: Store, config: Config) -> anyhow::Result<()> {
    if let Err(error) = vmm_sandbox::process::keep_inherited_descriptors() {
        tracing::warn!(%error, "Workers may inherit descriptors that this daemon was started with");
    }
    let signals = Signals::block().context("Cannot take signals")?;
    let sandbox = Sandbox::new(config.daemon.seccomp, &[Class::Supervisor], false)?;
    let starter = Starter::new(&config.daemon)?;
    process::raise_descriptor_limit();
    let mut patience = Patience::new(runtime_dir::PATIENCE);
    // Dropped last: its sockets are gone by then.
    let _runtime_dir = RuntimeDir::acquire(&config.daemon.runtime_dir, || patience.wait())?;
    let done = Rc::new(Cell::new(None));
    let supervisor = Supervisor::new(store, config, starter, signals, Rc::clone(&done))?;
    sandbox.apply(Class::Supervisor)?;
    supervisor.announce();
    let mut manager =
        EventManager::<Supervisor>::new().map_err(|error| anyhow::anyhow!("Cannot make an event loop: {error}"))?;
    manager.add_subscriber(supervisor);
    loop {
        match done.get() {
            None => manager.run().map_err(|error| anyhow::anyhow!("The event loop failed: {error}"))?,
            Some(0) => return Ok(()),
            Some(left) => bail!("Killed processes have not ended ({left}); their VMMs hold them, so end those, too"),
        };
    }
}

impl Supervisor {
    fn new(
        store: Store,
        config: Config,
        starter: Starter,
        signals: Signals,
        done: Rc<Cell<Option<usize>>>,
    ) -> anyhow::Result<Self> {
        let daemon = &config.daemon;
        let groups = Groups::default().for_config(&config)?;
        let mut patience = Patience::new(leftovers::PATIENCE);
        let control = leftovers::listen(&daemon.control, daemon.control_mode, || patience.wait())?;
        control.listener().set_nonblocking(true).context("Cannot prepare the control socket")?;
        let bandwidths: Vec<_> = config.devices.iter().map(|device| device.link.bandwidth).collect();
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
            .context("Cannot make a timer")?;
        let tenants = (0..).zip(config.tenants.iter().cloned()).map(|(id, tenant)| {
            let socket = leftovers::listen(&tenant.socket, tenant.socket_mode, || patience.wait())?;
            Tenant::new(id, id, tenant, socket)
        });
        let tenants = tenants.collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Self {
            next_id: u16::try_from(tenants.len()).unwrap_or(0),
            tenants,
            leaving: Vec::new(),
            store,
            broker: Broker::new(),
            groups,
            starter,
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
            namespaces = %daemon.namespaces,
            landlock = %daemon.landlock,
            "peergated is up"
        );
        for tenant in &self.config.tenants {
            tracing::info!(tenant = tenant.name, socket = %tenant.socket.display(), slices = tenant.slices.len(), "Waiting for a VMM");
        }
    }

    /// Says once, on standard output, that every tenant waits for its VMM, also if there is none.
    fn tell_ready(&mut self) {
        let is_up = |tenant: &Tenant| matches!(tenant.state(), TenantState::Waiting | TenantState::Connected);
        if self.told_ready || self.ending.is_some() || !self.tenants.iter().all(is_up) {
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
            tracing::warn!("Processes are still running; killing them");
            self.kill(now);
        }
        self.tidy(now);
        self.start_what_is_due(now, ops);
        self.tell_ready();
        let left = self.processes();
        if self.ending.is_some() && (left == 0 || given_up) {
            self.done.set(Some(left));
        }
        let due = self.everybody().filter_map(Tenant::due).chain(self.broker.due());
        self.set_timer(due.chain(self.ending).min());
    }

    /// Every tenant, the leaving ones last.
    fn everybody(&self) -> impl Iterator<Item = &Tenant> {
        self.tenants.iter().chain(&self.leaving)
    }

    fn everybody_mut(&mut self) -> impl Iterator<Item = &mut Tenant> {
        self.tenants.iter_mut().chain(&mut self.leaving)
    }

    fn processes(&self) -> usize {
        let tenants: usize = self.everybody().map(Tenant::processes).sum();
        tenants + usize::from(self.broker.child().is_some())
    }

    /// Kills every process, which then has [`PATIENCE`] to be gone.
    fn kill(&mut self, now: Instant) {
        self.everybody_mut().for_each(Tenant::kill);
        self.broker.kill();
        if !std::mem::replace(&mut self.killed, true) {
            self.ending = Some(now + PATIENCE);
        }
    }

    /// Starts the broker, keepers, and asks for the leases that the next workers need.
    fn start_what_is_due(&mut self, now: Instant, ops: &mut EventOps<'_>) {
        let Self { config, tenants, leaving, broker, groups, starter, .. } = self;
        if broker.start_if_due(config, groups, starter, tenants.iter().chain(&*leaving).filter_map(Tenant::held), now)
            && let Some(child) = broker.child()
        {
            listen_to(ops, child, BROKER, BROKER_END);
        }
        for tenant in tenants {
            let number = u32::from(tenant.id);
            if tenant.start_keeper_if_due(starter, now)
                && let Some(keeper) = tenant.keeper()
            {
                listen_to(ops, keeper, KEEPER + number, KEEPER_END + number);
            }
            if broker.child().is_some()
                && let Some(lease) = tenant.wants_lease(config, now)
            {
                let session = lease.session;
                match broker.lease(lease) {
                    Ok(true) => {}
                    Ok(false) => tenant.lease_lost(),
                    Err(error) => tenant.lease_refused(session, &format!("{:#}", anyhow::Error::from(error))),
                }
            }
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
            tracing::warn!(signal, "Killing every process");
            return self.kill(Instant::now());
        }
        tracing::info!(signal, "Ending");
        if let Some(control) = self.control.take() {
            forget(ops, control.as_fd());
        }
        self.tenants.iter_mut().for_each(Tenant::stop);
        self.broker.stop();
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

    fn tenant(&mut self, id: u32) -> Option<&mut Tenant> {
        self.everybody_mut().find(|tenant| u32::from(tenant.id) == id)
    }

    fn on_worker(&mut self, id: u32, ops: &mut EventOps<'_>) {
        let Some(tenant) = self.tenant(id) else { return };
        if tenant.hear_worker()
            && let Some(channel) = tenant.take_worker_channel()
        {
            forget(ops, channel.as_fd());
        }
    }

    fn on_worker_end(&mut self, id: u32, ops: &mut EventOps<'_>) {
        let Some(tenant) = self.tenant(id) else { return };
        // Its last words may still be there; and whether its VMM has gone decides how the next one begins.
        tenant.hear_worker();
        tenant.hear_keeper();
        let Some((worker, status)) = tenant.reap_worker() else { return };
        listen_no_more(ops, &worker);
        tenant.report(&worker, status);
    }

    fn on_keeper(&mut self, id: u32, ops: &mut EventOps<'_>) {
        let Some(tenant) = self.tenant(id) else { return };
        if tenant.hear_keeper()
            && let Some(channel) = tenant.take_keeper_channel()
        {
            forget(ops, channel.as_fd());
        }
    }

    fn on_keeper_end(&mut self, id: u32, ops: &mut EventOps<'_>) {
        let Some(tenant) = self.tenant(id) else { return };
        tenant.hear_keeper();
        let Some((keeper, status)) = tenant.reap_keeper() else { return };
        listen_no_more(ops, &keeper);
        if !status.success() {
            let (reason, hint) = why(keeper.reason.as_deref(), status);
            let tenant = tenant.config.name.as_str();
            tracing::error!(tenant, "The keeper has failed, and with it a VMM's connection: {status}{reason}{hint}");
        }
    }

    fn on_broker(&mut self, ops: &mut EventOps<'_>) {
        loop {
            match self.broker.hear() {
                Heard::Nothing => return,
                Heard::Closed => {
                    if let Some(channel) = self.broker.take_channel() {
                        forget(ops, channel.as_fd());
                    }
                    return;
                }
                Heard::Message(FromBroker::Refused { tenant, session, reason }, _) => {
                    if let Some(tenant) = self.everybody_mut().find(|known| known.is_asking(&tenant)) {
                        tenant.lease_refused(session, &reason);
                    }
                }
                Heard::Message(FromBroker::Leased { tenant, session, .. }, slices) => {
                    self.on_lease(&tenant, session, &slices, ops);
                }
            }
        }
    }

    fn on_lease(&mut self, tenant: &str, session: u32, slices: &[OwnedFd], ops: &mut EventOps<'_>) {
        let Self { config, tenants, leaving, links, starter, .. } = self;
        let Some(tenant) = tenants.iter_mut().chain(leaving).find(|known| known.is_asking(tenant)) else { return };
        // What the keeper says about its VMM decides whether the session begins afresh.
        tenant.hear_keeper();
        if tenant.start(session, slices, config, links, starter)
            && let Some(worker) = tenant.worker()
        {
            let number = u32::from(tenant.id);
            listen_to(ops, worker, WORKER + number, WORKER_END + number);
        }
    }

    fn on_broker_end(&mut self, ops: &mut EventOps<'_>) {
        self.on_broker(ops);
        let Some((broker, status)) = self.broker.reap() else { return };
        listen_no_more(ops, &broker);
        self.everybody_mut().for_each(Tenant::lease_lost);
        if self.ending.is_none() {
            self.everybody_mut().for_each(Tenant::broker_lost);
            let (reason, hint) = why(broker.reason.as_deref(), status);
            tracing::error!("The broker has failed; workers go on without it: {status}{reason}{hint}");
        }
    }

    fn answer(&mut self, request: Request) -> Reply {
        match request {
            Request::Change { edit, consent } => self.change(&edit, &consent),
            Request::Reload { consent } => self.reload(&consent),
            Request::Drain { tenant } => self.drain(&tenant, true),
            Request::Resume { tenant } => self.drain(&tenant, false),
            question => answers::answer(self, question),
        }
    }

    fn on_client(&mut self, number: u32, ops: &mut EventOps<'_>) {
        // The clients are lent out while they are answered from the rest.
        let mut clients = std::mem::take(&mut self.clients);
        clients.advance(number, CLIENT, ops, |request| self.answer(request));
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
        match event.data() {
            SIGNAL => self.on_signal(ops),
            TIMER => drop(rustix::io::read(&self.timer, &mut [0_u8; 8])),
            CONTROL => self.on_control(ops),
            BROKER => self.on_broker(ops),
            BROKER_END => self.on_broker_end(ops),
            CLIENT.. => self.on_client(number, ops),
            KEEPER_END.. => self.on_keeper_end(number, ops),
            KEEPER.. => self.on_keeper(number, ops),
            WORKER_END.. => self.on_worker_end(number, ops),
            WORKER.. => self.on_worker(number, ops),
            _ => {}
        }
        self.tend(ops);
    }
}
