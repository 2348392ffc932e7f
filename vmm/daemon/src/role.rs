//! What every process that a supervisor starts does first: give up all that it does not need, and find its channel.
//!
//! Not here: what the roles do.

use std::os::fd::AsFd;

use anyhow::Context;
use clap::Args;
use vmm_broker::Channel;
use vmm_sandbox::{Class, Confinement, Fence, Mode, Sandbox, Signals};

/// What every role is told.
#[derive(Debug, Args)]
pub(crate) struct RoleArgs {
    #[arg(long)]
    seccomp: Mode,
    #[arg(long)]
    pub(crate) namespaces: Fence,
    #[arg(long)]
    landlock: Fence,
    #[arg(long)]
    pub(crate) log: String,
    #[arg(long)]
    core_dumps: bool,
}

/// What a role may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    /// The filters of its threads.
    pub(crate) classes: &'static [Class],
    /// Whether it starts threads.
    pub(crate) threads: bool,
    /// Whether it has GPUs, whose driver has threads of its own by now.
    pub(crate) gpus: bool,
    /// Most descriptors, if fewer than the supervisor may have.
    pub(crate) descriptors: Option<u64>,
}

/// Most threads of the user that processes run as. On kernels before 5.14, and without user namespaces, all processes count together.
const MOST_THREADS: u64 = 16384;

/// The beginning of a role. The caller applies its filter of system calls before it looks at anything that somebody else had a hand in.
pub(crate) fn begin(args: &RoleArgs, needs: Needs) -> anyhow::Result<(Sandbox, Channel)> {
    Signals::unblock().context("Cannot unblock signals")?;
    if let Err(error) = vmm_sandbox::process::take_short_turns() {
        tracing::warn!(
            "Tenants may wait for each other longer than they need: the kernel refuses short turns ({error})"
        );
    }
    // Read from the kernel once and then remembered; later there is nothing to read it from.
    let _ = rustix::param::page_size();
    vmm_sandbox::confine(&Confinement {
        namespaces: args.namespaces,
        landlock: args.landlock,
        core_dumps: args.core_dumps,
        threads: if needs.threads { MOST_THREADS } else { 0 },
        descriptors: needs.descriptors,
    })?;
    let sandbox = Sandbox::new(args.seccomp, needs.classes, needs.gpus)?;
    let channel = std::io::stdin().as_fd().try_clone_to_owned().context("There is no channel to a supervisor")?;
    let channel = Channel::from_fd(channel).context("This process is started by peergated only")?;
    Ok((sandbox, channel))
}

/// Confines the calling thread, or ends the process: no thread runs with more than it should have.
pub(crate) fn confine(sandbox: &Sandbox, class: Class) {
    if let Err(error) = sandbox.apply(class) {
        tracing::error!("Cannot confine a thread: {:#}", anyhow::Error::from(error));
        std::process::abort();
    }
}
