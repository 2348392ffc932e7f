//! The broker: the process that makes the memory of slices, opens PCI functions, and knows who holds them.
//!
//! The main thread answers the supervisor; a second one scrubs what ended leases leave behind, so that no tenant waits for the memory of another; a third
//! one reads in the kernel's log what the IOMMU has stopped (`watch`). It sees nothing that a guest or VMM made, and maps no memory of anybody.
//!
//! It holds IOMMU groups, which the supervisor opened because only it has paths. A worker whose tenant has a whole group gets its functions, and nobody
//! else has them: when the worker ends, the kernel stops them before it lets go of what they could reach.
//!
//! Not here: the table itself (`vmm_broker::Leases`), engines, restarting.

mod watch;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use anyhow::Context;
use clap::Args;
use vmm_broker::{BrokerFunction, Channel, FromBroker, Granted, Lease, Leases, MemoryFile, ToBroker};
use vmm_sandbox::{Class, Sandbox};

use crate::role::{self, Needs, RoleArgs};
use watch::Watch;

/// How a supervisor starts a broker.
#[derive(Debug, Args)]
pub(crate) struct BrokerArgs {
    #[command(flatten)]
    pub(crate) role: RoleArgs,
}

/// It may have as many descriptors as there are slices.
const NEEDS: Needs =
    Needs { classes: &[Class::Broker, Class::Scrubber, Class::Watcher], threads: true, gpus: false, descriptors: None };

/// Serves the supervisor until it says so or is gone.
pub(crate) fn run(args: &BrokerArgs) -> anyhow::Result<()> {
    let (sandbox, channel) = role::begin(&args.role, NEEDS)?;
    let scrubber = start_scrubber(&sandbox)?;
    let mut hardware = Hardware { groups: BTreeMap::new(), watch: Watch::start(&sandbox)? };
    sandbox.apply(Class::Broker)?;
    let mut leases = Leases::default();
    while let Some((message, fds)) = channel.receive::<ToBroker>()? {
        let old = match message {
            ToBroker::Devices { devices, groups } => {
                leases.set_devices(devices);
                hardware.take(&groups, fds)?;
                continue;
            }
            ToBroker::Lease(lease) => answer(&mut leases, lease, fds.first(), &mut hardware, &channel)?,
            ToBroker::Adopt(lease) => {
                leases.adopt(lease);
                continue;
            }
            ToBroker::Release { tenant } => leases.release(&tenant),
            ToBroker::Shutdown {} => break,
        };
        scrubber.send(old).context("The scrubber has ended")?;
    }
    Ok(())
}

/// What it takes to give functions away.
struct Hardware {
    /// By their numbers.
    groups: BTreeMap<u32, OwnedFd>,
    watch: Watch,
}

impl Hardware {
    /// Takes the kernel's log and the groups in place of those so far, if there are any.
    fn take(&mut self, groups: &[u32], fds: Vec<OwnedFd>) -> anyhow::Result<()> {
        let mut fds = fds.into_iter();
        if let Some(log) = fds.next() {
            self.watch.log(log)?;
        }
        self.groups = groups.iter().copied().zip(fds).collect();
        Ok(())
    }

    /// The functions of a lease, in its container, each with the socket to ask about it.
    fn claim(&mut self, container: &OwnedFd, functions: &[BrokerFunction]) -> anyhow::Result<Vec<OwnedFd>> {
        let mut left = Vec::new();
        let mut fds = Vec::new();
        for BrokerFunction { address, group } in functions {
            let file = self.groups.get(group).with_context(|| format!("Nobody has opened the group of {address}"))?;
            if !left.contains(group) {
                hw_vfio::leave(file.as_fd()).with_context(|| format!("Function {address} is still in use"))?;
                left.push(*group);
            }
            fds.push(hw_vfio::claim(container.as_fd(), file.as_fd(), address)?);
            fds.push(self.watch.function(address)?);
        }
        Ok(fds)
    }
}

/// Gives a lease or says why not. Answers what is to be scrubbed.
fn answer(
    leases: &mut Leases,
    lease: Lease,
    container: Option<&OwnedFd>,
    hardware: &mut Hardware,
    channel: &Channel,
) -> anyhow::Result<Vec<MemoryFile>> {
    let (tenant, session) = (lease.tenant.clone(), lease.session);
    let refuse = |tenant: String, error: &anyhow::Error| {
        channel.send(&FromBroker::Refused { tenant, session, reason: format!("{error:#}") }, &[])
    };
    let Granted { files, functions, mut old } = match leases.lease(lease) {
        Ok(granted) => granted,
        Err(error) => {
            refuse(tenant, &error.into())?;
            return Ok(Vec::new());
        }
    };
    match container.map(|container| hardware.claim(container, functions)).transpose() {
        Ok(claimed) => {
            let fds = files
                .iter()
                .map(AsFd::as_fd)
                .chain(container.into_iter().chain(claimed.iter().flatten()).map(AsFd::as_fd));
            let fds: Vec<_> = fds.collect();
            channel.send(&FromBroker::Leased { tenant, session, fds: fds.len() }, &fds)?;
        }
        Err(error) => {
            old.extend(leases.release(&tenant));
            refuse(tenant, &error)?;
        }
    }
    Ok(old)
}

fn start_scrubber(sandbox: &Sandbox) -> anyhow::Result<Sender<Vec<MemoryFile>>> {
    let (send, receive) = channel();
    let sandbox = sandbox.clone();
    let run = move || {
        role::confine(&sandbox, Class::Scrubber);
        scrub(&receive);
    };
    thread::Builder::new().name("scrub".into()).spawn(run).context("Cannot start a thread")?;
    Ok(send)
}

/// Gives memory back to the host, whoever may still hold a descriptor of it.
fn scrub(old: &Receiver<Vec<MemoryFile>>) {
    for file in old.iter().flatten() {
        if let Err(error) = file.scrub() {
            // The next session has another file in any case.
            tracing::warn!("Cannot scrub the memory of a slice: {:#}", anyhow::Error::from(error));
        }
    }
}
