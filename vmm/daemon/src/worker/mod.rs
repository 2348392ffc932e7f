//! A worker: one process that serves one VM's connection and then ends.
//!
//! The main thread talks to the supervisor; a second one serves the connection, whose own threads confine themselves further. The process
//! confines itself before it looks at anything that a VMM or guest could have had a hand in, and is killed when its supervisor ends.
//!
//! It ends well when the VM has gone or the supervisor says so; everything else is a failure, and says why in the log.
//!
//! Not here: what a request means, restarting.

mod build;
mod observer;

use std::io::{PipeReader, PipeWriter};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, bail};
use clap::Args;
use rustix::event::{PollFd, PollFlags, poll};
use vmm_broker::{
    Channel, ConnectionState, JournalPage, Setup, SetupFds, TenantPage, ToSupervisor, ToWorker, UnsealedMemory,
};
use vmm_sandbox::{Class, Mode, Sandbox, Signals, process};
use vmm_vhost_user::{Options, ThreadClass, UnsealedPolicy, serve};

use build::{Built, build};

/// How a supervisor starts a worker.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// Whose worker
    #[arg(long)]
    pub(crate) tenant: String,
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

/// Serves one connection. False if it failed and the supervisor knows why, who then says it.
pub(crate) fn run(args: &WorkerArgs) -> anyhow::Result<bool> {
    Signals::unblock().context("Cannot unblock signals")?;
    process::follow_parent(args.parent)?;
    if !args.core_dumps {
        process::forbid_core_dumps().context("Cannot forbid core dumps")?;
    }
    let sandbox = Arc::new(Sandbox::new(args.seccomp)?);
    let channel = std::io::stdin().as_fd().try_clone_to_owned().context("There is no channel to a supervisor")?;
    let channel = Channel::from_fd(channel).context("Workers are started by peergated only")?;
    let Some((setup, fds)) = receive_setup(&channel)? else { return Ok(true) };
    // Read from the kernel once and then remembered; later it would be a forbidden system call.
    let _ = rustix::param::page_size();
    let end = std::io::pipe().context("Cannot make a pipe")?;
    sandbox.apply(Class::Worker)?;
    let Err(error) = work(&channel, &setup, fds, end, &sandbox) else { return Ok(true) };
    let reason = format!("{error:#}");
    if channel.send(&ToSupervisor::Failed { reason }, &[]).is_err() {
        return Err(error);
    }
    Ok(false)
}

/// `None` if the supervisor has changed its mind.
fn receive_setup(channel: &Channel) -> anyhow::Result<Option<(Box<Setup>, SetupFds)>> {
    match channel.receive::<ToWorker>()? {
        None | Some((ToWorker::Shutdown {}, _)) => Ok(None),
        Some((ToWorker::Setup(setup), fds)) => {
            let fds = SetupFds::sort(&setup, fds)?;
            Ok(Some((setup, fds)))
        }
    }
}

/// `end` is closed on its writing side when the connection is over.
fn work(
    channel: &Channel,
    setup: &Setup,
    fds: SetupFds,
    (ended, ending): (PipeReader, PipeWriter),
    sandbox: &Arc<Sandbox>,
) -> anyhow::Result<()> {
    let SetupFds { listener, page, ledger, journal, slices } = fds;
    let page = Arc::new(TenantPage::open(page).context("Cannot map the tenant's page")?);
    let built = build(setup, ledger, slices, &page, sandbox)?;
    let device = Arc::clone(&built.device);
    let journal = JournalPage::open(journal).context("Cannot map the journal of the tenant's queues")?;
    let options = options(setup, journal, sandbox);
    let connection = connect(built, listener, options, Arc::clone(&page), ending)?;
    page.set_state(ConnectionState::Waiting);
    channel.send(&ToSupervisor::Ready {}, &[])?;
    loop {
        let mut fds = [PollFd::new(channel, PollFlags::IN), PollFd::new(&ended, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            result => result.context("Cannot wait")?,
        };
        let [heard, over] = fds.map(|fd| !fd.revents().is_empty());
        if over {
            return match connection.join() {
                Ok(result) => result,
                Err(_) => bail!("The connection's thread panicked"),
            };
        }
        if heard {
            match channel.receive::<ToWorker>() {
                Ok(None | Some((ToWorker::Shutdown {}, _))) => break,
                Ok(Some((ToWorker::Setup(_), _))) => bail!("The supervisor has sent a second set-up"),
                Err(error) => return Err(error.into()),
            }
        }
    }
    tracing::debug!("Ending in good order");
    device.shutdown();
    Ok(())
}

/// Starts the thread that serves the connection. `ending` is closed when it has ended.
fn connect(
    built: Built,
    listener: OwnedFd,
    options: Options,
    page: Arc<TenantPage>,
    ending: PipeWriter,
) -> anyhow::Result<JoinHandle<anyhow::Result<()>>> {
    let serve = move || {
        let _ending = ending;
        let connected = || {
            page.set_state(ConnectionState::Connected);
            tracing::info!("A VMM has connected");
        };
        Ok(serve(listener, built.device, built.ram, &options, connected)?)
    };
    std::thread::Builder::new().name("serve".into()).spawn(serve).context("Cannot start a thread")
}

fn options(setup: &Setup, journal: JournalPage, sandbox: &Arc<Sandbox>) -> Options {
    let sandbox = Arc::clone(sandbox);
    Options {
        unsealed_memory: match setup.unsealed_memory {
            UnsealedMemory::Warn => UnsealedPolicy::Warn,
            UnsealedMemory::Refuse => UnsealedPolicy::Refuse,
        },
        journal: Some(Arc::new(journal)),
        thread_hook: Arc::new(move |class| {
            let class = match class {
                ThreadClass::Connection => Class::Connection,
                ThreadClass::Queue => Class::Queue,
                ThreadClass::Timekeeper => Class::Timekeeper,
            };
            confine(&sandbox, class);
        }),
    }
}

/// Confines the calling thread, or ends the process: no thread runs with more than it should have.
fn confine(sandbox: &Sandbox, class: Class) {
    if let Err(error) = sandbox.apply(class) {
        tracing::error!("Cannot confine a thread: {:#}", anyhow::Error::from(error));
        std::process::abort();
    }
}
