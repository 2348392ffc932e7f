//! The supervisor's view of the broker: one process, replaced when it ends.
//!
//! Tenants go on while there is none: their workers have their memory. Only the next worker of one waits. Not here: what a lease is.

use std::os::fd::{AsFd, BorrowedFd};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use hw_vfio::VfioError;
use vmm_broker::{Backing, BrokerDevice, FromBroker, Lease, ToBroker};

use super::backoff::Backoff;
use super::child::{Child, Heard};
use super::groups::Groups;
use super::process::Starter;
use crate::config::{Config, DeviceConfig};

/// The broker, or its absence.
#[derive(Debug)]
pub(crate) struct Broker {
    child: Option<Child>,
    backoff: Backoff,
    /// When there is to be one; `None` once the daemon ends.
    due: Option<Instant>,
    /// How many have ended that were not asked to.
    pub(crate) failures: u64,
}

impl Broker {
    pub(crate) fn new() -> Self {
        Self { child: None, backoff: Backoff::default(), due: Some(Instant::now()), failures: 0 }
    }

    pub(crate) fn child(&self) -> Option<&Child> {
        self.child.as_ref()
    }

    /// When there is something to do about it.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due.filter(|_| self.child.is_none())
    }

    /// Starts one if it is time. True if one was started. `leases` are those that workers hold.
    pub(crate) fn start_if_due(
        &mut self,
        config: &Config,
        groups: &Groups,
        starter: &Starter,
        leases: impl Iterator<Item = Lease>,
        now: Instant,
    ) -> bool {
        if self.due().is_none_or(|at| at > now) {
            return false;
        }
        match Child::start("broker", &[], starter) {
            Ok(child) => {
                self.child = Some(child);
                self.set_devices(config, groups);
                for lease in leases {
                    self.tell(&ToBroker::Adopt(lease), &[]);
                }
                true
            }
            Err(error) => {
                tracing::error!("{error:#}");
                self.pause(Duration::ZERO);
                false
            }
        }
    }

    /// Tells it which devices the host has.
    pub(crate) fn set_devices(&mut self, config: &Config, groups: &Groups) {
        let device = |device: &DeviceConfig| BrokerDevice {
            name: device.name.clone(),
            memory: device.memory,
            backing: backing(device, groups),
        };
        let (numbers, fds) = groups.all();
        self.tell(&ToBroker::Devices { devices: config.devices.iter().map(device).collect(), groups: numbers }, &fds);
    }

    /// Asks for a lease. False if there is nobody to ask; the tenant then tries again.
    ///
    /// # Errors
    /// When there is nothing to ask with.
    pub(crate) fn lease(&mut self, lease: Lease) -> Result<bool, VfioError> {
        let container = lease.container.then(hw_vfio::open_container).transpose()?;
        let fds: Vec<_> = container.iter().map(AsFd::as_fd).collect();
        Ok(self.tell(&ToBroker::Lease(lease), &fds))
    }

    /// Ends a tenant's lease.
    pub(crate) fn release(&mut self, tenant: &str) {
        self.tell(&ToBroker::Release { tenant: tenant.to_owned() }, &[]);
    }

    fn tell(&mut self, message: &ToBroker, fds: &[BorrowedFd<'_>]) -> bool {
        self.child.as_mut().is_some_and(|child| child.tell(message, fds))
    }

    pub(crate) fn hear(&mut self) -> Heard<FromBroker> {
        self.child.as_mut().map_or(Heard::Nothing, |child| child.hear("broker"))
    }

    /// Stops listening to it.
    pub(crate) fn take_channel(&mut self) -> Option<vmm_broker::Channel> {
        self.child.as_mut()?.take_channel()
    }

    /// Looks whether it has ended; the next one follows after a pause.
    pub(crate) fn reap(&mut self) -> Option<(Child, ExitStatus)> {
        let status = self.child.as_mut()?.ended()?;
        let child = self.child.take()?;
        self.failures += u64::from(self.due.is_some());
        self.pause(child.age());
        Some((child, status))
    }

    fn pause(&mut self, lived: Duration) {
        let pause = self.backoff.after(true, lived);
        self.due = self.due.map(|_| Instant::now() + pause);
    }

    /// Asks it to end; there is no next one.
    pub(crate) fn stop(&mut self) {
        self.due = None;
        self.tell(&ToBroker::Shutdown {}, &[]);
    }

    /// Ends it now.
    pub(crate) fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            child.kill();
        }
    }
}

/// What the memory of a device's slices is.
fn backing(device: &DeviceConfig, groups: &Groups) -> Backing {
    let function = device.function.as_ref().and_then(|function| groups.function(&function.address));
    match function {
        Some(function) => Backing::Function(function),
        None if device.gpu.is_some() => Backing::Worker,
        None => Backing::File,
    }
}
