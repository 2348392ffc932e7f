//! What every process that a supervisor starts does first: follow its supervisor, keep out of core dumps, find its channel.
//!
//! Not here: what the roles do.

use std::os::fd::AsFd;

use anyhow::Context;
use clap::Args;
use vmm_broker::Channel;
use vmm_sandbox::{Class, Mode, Sandbox, Signals, process};

/// What every role is told.
#[derive(Debug, Args)]
pub(crate) struct RoleArgs {
    /// The supervisor's process
    #[arg(long)]
    parent: u32,
    #[arg(long)]
    seccomp: Mode,
    #[arg(long)]
    pub(crate) log: String,
    #[arg(long)]
    core_dumps: bool,
}

/// The beginning of a role. The caller confines itself before it looks at anything that somebody else had a hand in.
pub(crate) fn begin(args: &RoleArgs) -> anyhow::Result<(Sandbox, Channel)> {
    Signals::unblock().context("Cannot unblock signals")?;
    process::follow_parent(args.parent)?;
    if !args.core_dumps {
        process::forbid_core_dumps().context("Cannot forbid core dumps")?;
    }
    let sandbox = Sandbox::new(args.seccomp)?;
    let channel = std::io::stdin().as_fd().try_clone_to_owned().context("There is no channel to a supervisor")?;
    let channel = Channel::from_fd(channel).context("This process is started by peergated only")?;
    // Read from the kernel once and then remembered; later it would be a forbidden system call.
    let _ = rustix::param::page_size();
    Ok((sandbox, channel))
}

/// Confines the calling thread, or ends the process: no thread runs with more than it should have.
pub(crate) fn confine(sandbox: &Sandbox, class: Class) {
    if let Err(error) = sandbox.apply(class) {
        tracing::error!("Cannot confine a thread: {:#}", anyhow::Error::from(error));
        std::process::abort();
    }
}
