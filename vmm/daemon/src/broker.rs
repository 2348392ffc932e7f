//! The broker: the process that makes the memory of slices and knows who holds it.
//!
//! The main thread answers the supervisor; a second one scrubs what ended leases leave behind, so that no tenant waits for the memory of another. It
//! sees nothing that a guest or VMM made, and maps no memory of anybody.
//!
//! Not here: the table itself (`vmm_broker::Leases`), engines, restarting.

use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use anyhow::Context;
use clap::Args;
use vmm_broker::{Channel, FromBroker, Lease, Leases, MemoryFile, ToBroker};
use vmm_sandbox::{Class, Sandbox};

use crate::role::{self, Needs, RoleArgs};

/// How a supervisor starts a broker.
#[derive(Debug, Args)]
pub(crate) struct BrokerArgs {
    #[command(flatten)]
    pub(crate) role: RoleArgs,
}

/// It may have as many descriptors as there are slices.
const NEEDS: Needs = Needs { classes: &[Class::Broker, Class::Scrubber], threads: true, descriptors: None };

/// Serves the supervisor until it says so or is gone.
pub(crate) fn run(args: &BrokerArgs) -> anyhow::Result<()> {
    let (sandbox, channel) = role::begin(&args.role, NEEDS)?;
    let scrubber = start_scrubber(&sandbox)?;
    sandbox.apply(Class::Broker)?;
    let mut leases = Leases::default();
    while let Some((message, _)) = channel.receive::<ToBroker>()? {
        let old = match message {
            ToBroker::Devices { devices } => {
                leases.set_devices(devices);
                continue;
            }
            ToBroker::Lease(lease) => answer(&mut leases, lease, &channel)?,
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

/// Gives a lease or says why not. Answers what is to be scrubbed.
fn answer(leases: &mut Leases, lease: Lease, channel: &Channel) -> anyhow::Result<Vec<MemoryFile>> {
    let (tenant, session) = (lease.tenant.clone(), lease.session);
    match leases.lease(lease) {
        Ok((files, old)) => {
            let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            channel.send(&FromBroker::Leased { tenant, session, slices: fds.len() }, &fds)?;
            Ok(old)
        }
        Err(error) => {
            let reason = format!("{:#}", anyhow::Error::from(error));
            channel.send(&FromBroker::Refused { tenant, session, reason }, &[])?;
            Ok(Vec::new())
        }
    }
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
