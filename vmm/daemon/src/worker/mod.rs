//! A worker: one process that serves one VM's connection and then ends.
//!
//! The main thread talks to the supervisor; a second one serves the connection, whose own threads confine themselves further. The process
//! confines itself before it looks at anything that a VMM or guest could have had a hand in, and is killed when its supervisor ends.
//!
//! It ends well when the VM has gone or the supervisor says so; everything else is a failure, and says why in the log.
//!
//! Not here: what a request means, restarting.

mod build;
mod drain;
mod functions;
mod gpus;
mod observer;
mod prove;

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, bail};
use clap::Args;
use hw_engine::RamMap;
use rustix::event::{PollFd, PollFlags, poll};
use vdev_device::Device;
use vmm_broker::{Channel, GpuPeer, JournalPage, Setup, SetupFds, TenantPage, ToSupervisor, ToWorker, UnsealedMemory};
use vmm_sandbox::{Class, Sandbox};
use vmm_vhost_user::{Options, ThreadClass, UnsealedPolicy, serve};

use crate::role::{self, Needs, RoleArgs};
use build::{Built, build};
use drain::Drain;
use gpus::{GpuArgs, Gpus};

/// How a supervisor starts a worker.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// Whose worker
    #[arg(long)]
    pub(crate) tenant: String,
    #[command(flatten)]
    pub(crate) gpus: GpuArgs,
    #[command(flatten)]
    pub(crate) role: RoleArgs,
}

/// Its own slices, two event counters a queue, and a front-end's memory.
const NEEDS: Needs = Needs {
    classes: &[Class::Worker, Class::Connection, Class::Queue, Class::Timekeeper, Class::Engine],
    threads: true,
    gpus: false,
    descriptors: Some(2048),
};

/// Serves one connection. False if it failed and the supervisor knows why, who then says it.
pub(crate) fn run(args: &WorkerArgs) -> anyhow::Result<bool> {
    let gpus = Gpus::open(&args.gpus, args.role.namespaces);
    let needs = Needs { gpus: !args.gpus.wanted.is_empty(), ..NEEDS };
    let (sandbox, channel) = role::begin(&args.role, needs)?;
    let sandbox = Arc::new(sandbox);
    let Some((setup, fds)) = receive_setup(&channel)? else { return Ok(true) };
    let pipes = || std::io::pipe().context("Cannot make a pipe");
    let (end, lost) = (pipes()?, pipes()?);
    // The driver of GPUs has started some.
    sandbox.apply_to_all(Class::Worker)?;
    // What is wrong with a GPU can be told only now.
    let outcome = gpus.and_then(|gpus| work(&channel, &setup, fds, &gpus, (end, lost), &sandbox));
    let Err(error) = outcome else { return Ok(true) };
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
        Some((message, _)) => bail!("The supervisor begins with {message:?} in place of a set-up"),
    }
}

type Pipe = (PipeReader, PipeWriter);

/// The first pipe is closed on its writing side when the connection is over; over the second one comes the reason if a GPU is lost.
fn work(
    channel: &Channel,
    setup: &Setup,
    fds: SetupFds,
    gpus: &Gpus,
    ((ended, ending), (lost, losing)): (Pipe, Pipe),
    sandbox: &Arc<Sandbox>,
) -> anyhow::Result<()> {
    let SetupFds { listener, page, ledger, journal, slices, functions } = fds;
    let page = Arc::new(TenantPage::open(page).context("Cannot map the tenant's page")?);
    crate::log::count_in(Arc::clone(&page));
    // First named, last gone: engines use what is behind its BARs.
    let Built { open: _open, device, ram, links, cuda } =
        build(setup, ledger, slices, functions, gpus, &page, sandbox)?;
    if let Some(engine) = &cuda {
        // Nobody listens any more if the worker ends already.
        engine.on_lost(Box::new(move |error| drop((&losing).write_all(error.to_string().as_bytes()))));
    }
    let journal = JournalPage::open(journal).context("Cannot map the journal of the tenant's queues")?;
    let options = options(setup, journal, sandbox);
    let connection = connect(Arc::clone(&device), ram, listener, options, ending)?;
    let mut drain = Drain::default();
    if setup.drained {
        drain.begin(&device, 0);
    }
    for peers in gpus.peers.chunks(GpuPeer::MOST) {
        channel.send(&ToSupervisor::Peers { peers: peers.to_vec() }, &[])?;
    }
    channel.send(&ToSupervisor::Ready {}, &[])?;
    loop {
        drain.look(&device, channel)?;
        let mut fds =
            [channel.as_fd(), ended.as_fd(), lost.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match poll(&mut fds, drain.glance()) {
            Err(rustix::io::Errno::INTR) => continue,
            result => result.context("Cannot wait")?,
        };
        let [heard, over, is_lost] = fds.map(|fd| !fd.revents().is_empty());
        if is_lost {
            bail!("A GPU is lost: {}", reason(&lost)?);
        }
        if over {
            return match connection.join() {
                Ok(result) => result,
                Err(_) => bail!("The connection's thread panicked"),
            };
        }
        if heard {
            match channel.receive::<ToWorker>() {
                Ok(None | Some((ToWorker::Shutdown {}, _))) => break,
                Ok(Some((ToWorker::Limits(limits), _))) => {
                    device.set_limits(&build::limits(&limits)).context("The supervisor has sent limits")?;
                    links.set_weight(limits.weight);
                }
                Ok(Some((ToWorker::Drain { turn }, _))) => drain.begin(&device, turn),
                Ok(Some((ToWorker::Resume {}, _))) => drain.end(&device),
                Ok(Some((ToWorker::MakeRoom {}, _))) => return Ok(()),
                Ok(Some((ToWorker::Setup(_), _))) => bail!("The supervisor has sent a second set-up"),
                Err(error) => return Err(error.into()),
            }
        }
    }
    tracing::debug!("Ending in good order");
    device.shutdown();
    Ok(())
}

/// What was written at once.
fn reason(mut pipe: &PipeReader) -> anyhow::Result<String> {
    let mut text = [0; 1024];
    let len = pipe.read(&mut text).context("Cannot read a pipe")?;
    Ok(String::from_utf8_lossy(text.get(..len).unwrap_or_default()).into_owned())
}

/// Starts the thread that serves the connection. `ending` is closed when it has ended.
fn connect(
    device: Arc<Device>,
    ram: Arc<dyn RamMap>,
    listener: OwnedFd,
    options: Options,
    ending: PipeWriter,
) -> anyhow::Result<JoinHandle<anyhow::Result<()>>> {
    let serve = move || {
        let _ending = ending;
        Ok(serve(listener, device, ram, &options, || {})?)
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
            role::confine(&sandbox, class);
        }),
    }
}
