//! `peergate`, the operator's command: asks the daemon and shows the answer.
//!
//! Not here: the daemon's side, the format of JSON answers (they are `vmm_control`'s).

mod attach;
mod change;
mod faults;
mod follow;
mod sandbox;
mod selftest;
mod show;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use serde::Serialize;
use vmm_control::{Client, Reply, Request};

use crate::config::quantity::VM_SIZE;
use crate::config::{CONTROL, RUNTIME_DIR};
use attach::{Attachment, Vmm};
use change::{DrainArgs, ReloadArgs, ResumeArgs, SliceCommand, TenantCommand, Told};
use selftest::SelftestArgs;

const EXAMPLES: &str = "\
Examples:
  peergate status                          who is connected, what was moved
  peergate status --sandbox                how each process is fenced in
  peergate faults --tenant demo --last 20  who was refused, where and why
  peergate faults --follow --json          the same as it happens, one JSON line each
  peergate attach demo --memory 4G         arguments for QEMU
  peergate attach demo --vmm cloud-hypervisor --json
  peergate tenant add db --slice gpu0=64MiB
  peergate tenant limits db max_mappings=512
  peergate drain db && peergate slice move db gpu0 --to gpu1; peergate resume db
  peergate reload --dry-run                what the edited configuration file would change
  peergate selftest                        whether this host's KVM isolates and wakes VMs as it must; needs no daemon

A change is made as a whole or not at all. Commands that change something edit the configuration file, keep its comments, and are still
in force after a restart of the daemon; `reload` is for files that were edited by hand.

Exit status: 0 done; 1 the daemon cannot be reached, the daemon or the VMM cannot do that, or a proof of `selftest` failed; 2 the command line is wrong;
3 not done: it takes --force or --partial, or the time of a drain is over.";

/// Looks at a running peergated, changes what it runs, and tells how to attach a VM.
#[derive(Debug, Parser)]
#[command(name = "peergate", version, after_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    /// The daemon's control socket [default: /run/peergate/control.sock]
    #[arg(long, global = true, value_name = "PATH", hide_default_value = true, default_value_os_t = default_socket())]
    socket: PathBuf,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The daemon and its tenants: state, worker, counters
    ///
    /// States: starting (the worker is set up), waiting (a VMM may connect), connected, restarting (the next worker follows after a
    /// pause), stopped (the daemon ends, or the tenant's memory could not be scrubbed). SESSION counts the tenant's workers, FAILURES those that did not end by themselves. Lines below
    /// the table, if any, say how often broker and keepers have failed, and how many faults and log lines of a tenant were only counted. JSON has every counter.
    Status {
        /// How each process is fenced in, from the kernel's own files
        ///
        /// EFFECTIVE and BOUNDING are capabilities. SECCOMP is the number of filters, those of the supervisor included, which its children inherit.
        /// NAMESPACES (user, mnt, net, pid, ipc, uts, cgroup): own, or those shared with the supervisor. ROOT: empty, or how many file systems
        /// are seen. A row for threads that are fenced in alike. A process that was just started may not be done
        /// yet, and a thread takes its last filter when it first has work. Landlock cannot be seen from
        /// outside: the first line says what is configured, and a process that cannot apply it does not run.
        #[arg(long)]
        sandbox: bool,
    },
    /// How each tenant is set up
    Tenants,
    /// The slices of devices that tenants have
    Endpoints,
    /// Refused accesses: who, whose memory, which address, why, and which mapping it is about
    ///
    /// The newest 1024 of each tenant are kept, also when its worker ends. A tenant gets 256 records at once and then 1000 a second; what comes
    /// faster is only counted. VALUE is the handle, where a freed or foreign one was used. Requests of a session that map (MAP, ALLOC) are
    /// counted from 1 as they are carried out.
    Faults {
        /// Only this tenant's
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
        /// Only the newest N, shared out among the tenants that have some [default: 1024, with --follow 0]
        #[arg(long, value_name = "N")]
        last: Option<u32>,
        /// Go on with new ones as they come, one line each, until interrupted; says what could not be shown
        #[arg(long, short)]
        follow: bool,
    },
    /// The exact arguments that give a VM the tenant's device
    ///
    /// What would crash the VMM is refused, with the reason. The memory arguments replace the VM's own: the device needs guest memory
    /// that is shared.
    Attach(AttachArgs),
    /// Add, remove or limit tenants
    #[command(subcommand)]
    Tenant(TenantCommand),
    /// Add, remove or move slices of tenants
    #[command(subcommand)]
    Slice(SliceCommand),
    /// Read the configuration file again: print what differs from what runs, then apply it
    ///
    /// Lines begin with + (new), - (goes), ~ (changes) or ! (waits for a restart of peergated). A file with an error is refused as a whole, with the
    /// line. If a connected guest would lose something, nothing is applied without --force; if a part waits for a restart, nothing is
    /// applied without --partial.
    Reload(ReloadArgs),
    /// Take no more work from a tenant's guest and wait until what it has submitted is over
    ///
    /// The guest's later work waits in its queues and nothing of it is lost; its control requests are served, and its VMM may connect or
    /// stay. A drained tenant stays so, also after a restart of the daemon, until `peergate resume`. What was submitted ends by itself or by its
    /// deadline.
    Drain(DrainArgs),
    /// Take work from a drained tenant's guest again, what waits first
    Resume(ResumeArgs),
    /// Prove on this host, before any VM comes, what VMs with this device rely on
    ///
    /// A VM of a few bytes of code stores into a window, which lands; the window is revoked while it stores, and nothing lands any more; its
    /// doorbell wakes without an exit; a completion interrupts it; and through these it talks to a device, in a daemon that is started for
    /// that alone. Needs /dev/kvm, in hardware or in software: without it, rows are SKIP, which is no failure.
    Selftest(SelftestArgs),
}

#[derive(Debug, Args)]
struct AttachArgs {
    /// Which tenant's
    tenant: String,
    /// Whose arguments
    #[arg(long, value_enum, default_value = "qemu")]
    vmm: Vmm,
    /// The guest's memory, such as 512M or 4G
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = parse_size)]
    memory: u64,
    /// Submission queues [default: as many as the tenant has]
    #[arg(long, value_name = "N")]
    queues: Option<u32>,
    /// Entries of each queue
    #[arg(long, value_name = "N", default_value_t = 256)]
    queue_size: u32,
    /// Virtio device id [default: the tenant's]
    #[arg(long, value_name = "ID")]
    device_id: Option<u32>,
}

fn default_socket() -> PathBuf {
    PathBuf::from(RUNTIME_DIR).join(CONTROL)
}

fn parse_size(text: &str) -> Result<u64, String> {
    VM_SIZE
        .parse(text)
        .ok_or_else(|| format!("write {}, for example {} (units: {})", VM_SIZE.what, VM_SIZE.example, VM_SIZE.units()))
}

/// The whole program.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let told = run(&cli).and_then(|told| print(&told.text).map(|_| told.undone));
    let (status, reason) = match told {
        Ok(None) => return ExitCode::SUCCESS,
        Ok(Some(reason)) => (3, reason),
        Err(error) => (1, format!("{error:#}")),
    };
    // Nothing is left to tell if even this fails.
    let _ = writeln!(io::stderr(), "peergate: {reason}");
    ExitCode::from(status)
}

/// False if nobody reads: whoever stopped reading has seen enough.
fn print(text: &str) -> anyhow::Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        result => result.map(|()| true).context("Cannot print"),
    }
}

fn run(cli: &Cli) -> anyhow::Result<Told> {
    if let Command::Faults { tenant, last, follow: true } = &cli.command {
        follow::run(&cli.socket, tenant.as_deref(), last.unwrap_or(0), cli.json)?;
        return Ok(Told::default());
    }
    if let Command::Selftest(args) = &cli.command {
        let report = selftest::run(args, &cli.socket);
        print(&report.text(cli.json)?)?;
        return report.verdict().map(|()| Told::default());
    }
    let mut client = Client::connect(&cli.socket)?;
    match &cli.command {
        Command::Tenant(command) => change::change(&mut client, &command.request(), cli.json),
        Command::Slice(command) => change::change(&mut client, &command.request(), cli.json),
        Command::Reload(args) => change::reload(&mut client, *args, cli.json, |text| print(text).map(drop)),
        Command::Drain(args) => change::drain(&mut client, args, cli.json),
        Command::Resume(args) => change::resume(&mut client, args, cli.json),
        command => look(&mut client, command, cli.json).map(|text| Told { text, undone: None }),
    }
}

/// Commands that change nothing.
fn look(client: &mut Client, command: &Command, json: bool) -> anyhow::Result<String> {
    let request = match command {
        Command::Status { sandbox: true } => Request::Sandbox,
        Command::Endpoints => Request::Endpoints,
        Command::Tenants | Command::Attach(_) => Request::Tenants,
        Command::Faults { tenant, last, .. } => Request::Faults { tenant: tenant.clone(), last: *last, since: None },
        _ => Request::Status,
    };
    let reply = client.ask(&request)?;
    match (command, &reply) {
        (Command::Attach(args), Reply::Tenants(reply)) => attach(args, reply, json),
        (_, Reply::Status(reply)) => render(json, reply, show::status),
        (_, Reply::Sandbox(reply)) => render(json, reply, sandbox::text),
        (_, Reply::Tenants(reply)) => render(json, reply, show::tenants),
        (_, Reply::Endpoints(reply)) => render(json, reply, show::endpoints),
        (_, Reply::Faults(reply)) => render(json, reply, faults::text),
        (_, Reply::Error(error)) => bail!("{}", error.message),
        (_, Reply::Changes(_) | Reply::Drain(_)) => bail!("peergated answers something else than was asked"),
    }
}

fn render<T: Serialize>(json: bool, reply: &T, text: impl FnOnce(&T) -> String) -> anyhow::Result<String> {
    if !json {
        return Ok(text(reply));
    }
    let mut line = serde_json::to_string_pretty(reply).context("Cannot write JSON")?;
    line.push('\n');
    Ok(line)
}

fn attach(args: &AttachArgs, reply: &vmm_control::TenantsReply, json: bool) -> anyhow::Result<String> {
    let Some(tenant) = reply.tenants.iter().find(|tenant| tenant.name == args.tenant) else {
        let names: Vec<_> = reply.tenants.iter().map(|tenant| tenant.name.as_str()).collect();
        bail!("There is no tenant {:?}; there are: {}", args.tenant, names.join(", "));
    };
    let most = u32::from(tenant.submit_queues);
    let submit_queues = args.queues.unwrap_or(most);
    if submit_queues == 0 || submit_queues > most {
        bail!(
            "Tenant {:?} has {most} submission queues, so {submit_queues} do not work; pass --queues {most} or less",
            tenant.name
        );
    }
    let attachment = Attachment {
        socket: tenant.socket.clone(),
        device_id: args.device_id.unwrap_or(tenant.device_id),
        // Control and events come first.
        queues: u32::from(vdev_wire::FIRST_SUBMIT_QUEUE) + submit_queues,
        queue_size: args.queue_size,
        max_queue_size: tenant.max_queue_size,
        config_size: tenant.config_size,
        memory: args.memory,
    };
    let words = attach::arguments(args.vmm, &attachment)?;
    render(json, &words, |words| attach::for_shell(words))
}
