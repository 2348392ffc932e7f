//! A tenant's next worker: its lease, its set-up, its start.
//!
//! Not here: when there is to be one, what becomes of it.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::Context;
use vmm_broker::{Endpoint, Lease, LeaseSlice, Link, LinkTable, Setup, ToKeeper, ToWorker};
use vmm_control::SocketFile;

use super::{Stage, Tenant};
use crate::config::{Config, DeviceConfig, SliceConfig, TenantConfig};
use crate::supervisor::child::Child;
use crate::supervisor::leftovers::remove_socket;
use crate::supervisor::peers::Peers;
use crate::supervisor::process::Starter;

/// How long a worker may take from its start until it knows what the one before it knew.
pub(super) const TAKE_OVER: Duration = Duration::from_secs(5);
/// The same for one that has hardware: it erases and proves that first, and a GPU's driver takes its time to start.
pub(super) const TAKE_OVER_HARDWARE: Duration = Duration::from_secs(30);

impl Tenant {
    /// The lease that the next worker needs, if it is time for one.
    pub(crate) fn wants_lease(&mut self, config: &Config, now: Instant) -> Option<Lease> {
        let is_due = self.has_room && matches!(self.stage, Stage::Pause { until } if until <= now);
        if self.keeper.is_none() || !is_due {
            return None;
        }
        self.session = self.session.wrapping_add(1).max(1);
        self.stage = Stage::Leasing;
        self.holds = Some(self.lease(config));
        self.has_hardware =
            devices(&self.config, config).any(|device| device.function.is_some() || device.gpu.is_some());
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
        tracing::error!(tenant = self.config.name, session, "The tenant gets no lease: {reason}");
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
                self.take(worker);
                true
            }
            Err(error) => {
                tracing::error!(tenant = self.config.name, "{error:#}");
                self.pause(true, Duration::ZERO);
                false
            }
        }
    }

    /// There is a worker now.
    pub(super) fn take(&mut self, mut worker: Child) {
        if self.connected {
            let (patience, failure) = if self.has_hardware {
                (TAKE_OVER_HARDWARE, "it did not take over its VM within 30 s")
            } else {
                (TAKE_OVER, "it did not take over its VM within 5 s")
            };
            worker.expect(patience, failure);
        }
        self.stage = Stage::Running { worker, ready: false };
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
        let gpus = gpus(&self.config, config);
        self.peers = Peers::of(gpus.iter().copied());
        let words = [vec!["--tenant", &self.config.name], starter.gpu_words(gpus.into_iter())].concat();
        let mut worker = Child::start("worker", &words, starter)?;
        let mut fds = vec![listener.as_fd(), self.page.page(), links.page(), self.journal.page()];
        fds.extend(slices.iter().map(AsFd::as_fd));
        let setup = setup(&self.config, self.place, self.session, config);
        (self.quiet, self.drain_turn) = (false, 0);
        worker.tell(&ToWorker::Setup(Box::new(setup)), &fds);
        keeper.tell(&ToKeeper::Worker { session: self.session, fresh }, &[stream.as_fd()]);
        Ok(worker)
    }

    pub(super) fn lease(&self, config: &Config) -> Lease {
        let slice = |slice: &SliceConfig| {
            let device = config.devices.get(slice.device)?;
            Some(LeaseSlice { name: slice.name.clone(), device: device.name.clone(), memory: slice.memory })
        };
        Lease {
            tenant: self.config.name.clone(),
            session: self.session,
            slices: self.config.slices.iter().filter_map(slice).collect(),
            container: devices(&self.config, config).any(|device| device.function.is_some()),
        }
    }
}

/// The device of each slice.
fn devices<'a>(tenant: &'a TenantConfig, config: &'a Config) -> impl Iterator<Item = &'a DeviceConfig> {
    tenant.slices.iter().filter_map(|slice| config.devices.get(slice.device))
}

/// The GPUs that it has memory of, each once.
fn gpus<'a>(tenant: &'a TenantConfig, config: &'a Config) -> BTreeSet<&'a str> {
    devices(tenant, config).filter_map(|device| device.gpu.as_ref()).map(|gpu| gpu.which.as_str()).collect()
}

fn setup(tenant: &TenantConfig, place: u16, session: u32, config: &Config) -> Setup {
    let endpoint = |slice: &SliceConfig| {
        let device = config.devices.get(slice.device)?;
        let (kind, engines, link) = (device.kind, device.engines, device.number);
        let (function, gpu) = (device.function.clone(), device.gpu.clone());
        Some(Endpoint { name: slice.name.clone(), kind, memory_len: slice.memory, engines, link, function, gpu })
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
        iommu: tenant.iommu,
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
