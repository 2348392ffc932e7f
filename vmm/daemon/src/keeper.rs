//! A tenant's keeper: the process that holds its VMM's connection while workers come and go.
//!
//! It takes workers' streams from the supervisor and tells it what becomes of the VMM; between the two [`vmm_keeper::Keeper`] does the work.
//!
//! Not here: what a keeper forwards and remembers.

use std::os::fd::AsFd;

use anyhow::{Context, bail};
use clap::Args;
use rustix::process::{Resource, getrlimit, setrlimit};
use vmm_broker::{Channel, FromKeeper, ToKeeper};
use vmm_keeper::{Event, Keeper};
use vmm_sandbox::Class;

use crate::role::{self, Needs, RoleArgs};

/// How a supervisor starts a keeper.
#[derive(Debug, Args)]
pub(crate) struct KeeperArgs {
    /// Whose keeper
    #[arg(long)]
    pub(crate) tenant: String,
    #[command(flatten)]
    pub(crate) role: RoleArgs,
}

/// A VMM hands over descriptors, many of which may be on their way to a worker, and no other tenant's keeper may feel that.
const NEEDS: Needs = Needs { classes: &[Class::Keeper], threads: false, gpus: false, descriptors: None };

/// Keeps until the supervisor says so or is gone. False if it failed and the supervisor knows why, who then says it.
pub(crate) fn run(args: &KeeperArgs) -> anyhow::Result<bool> {
    let (sandbox, channel) = role::begin(&args.role, NEEDS)?;
    raise_descriptor_limit();
    sandbox.apply(Class::Keeper)?;
    let Err(error) = keep(&channel) else { return Ok(true) };
    let reason = format!("{error:#}");
    if channel.send(&FromKeeper::Failed { reason }, &[]).is_err() {
        return Err(error);
    }
    Ok(false)
}

/// A VMM's memory and rings are descriptors that are held.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "Cannot raise the limit of open files");
    }
}

fn keep(channel: &Channel) -> anyhow::Result<()> {
    let listener = match channel.receive::<ToKeeper>()? {
        None | Some((ToKeeper::Shutdown {}, _)) => return Ok(()),
        Some((ToKeeper::Setup(_), fds)) => fds.into_iter().next().context("A set-up comes with a socket")?,
        Some((ToKeeper::Worker { .. }, _)) => bail!("The supervisor has sent a worker before the set-up"),
    };
    let mut keeper = Keeper::new(listener).context("Cannot take the tenant's socket")?;
    loop {
        let turn = keeper.turn(Some(channel.as_fd()), None).context("Cannot go on")?;
        if turn.told {
            match channel.receive::<ToKeeper>()? {
                None | Some((ToKeeper::Shutdown {}, _)) => return Ok(()),
                Some((ToKeeper::Setup(_), _)) => bail!("The supervisor has sent a second set-up"),
                Some((ToKeeper::Worker { session, fresh }, fds)) => {
                    let stream = fds.into_iter().next().context("A worker comes with a stream")?;
                    keeper.add_worker(stream, session, fresh);
                }
            }
        }
        for event in keeper.events() {
            channel.send(&message(event), &[])?;
        }
    }
}

fn message(event: Event) -> FromKeeper {
    match event {
        Event::Connected => FromKeeper::Connected {},
        Event::Disconnected => FromKeeper::Disconnected {},
        Event::Replayed { session } => FromKeeper::Replayed { session },
        Event::GaveUp { reason } => FromKeeper::GaveUp { reason },
    }
}
