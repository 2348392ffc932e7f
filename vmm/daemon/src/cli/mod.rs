//! `peergate`, the operator's command: asks the daemon and shows the answer.
//!
//! Not here: the daemon's side, the format of JSON answers (they are `vmm_control`'s).

mod attach;
mod faults;
mod follow;
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

const EXAMPLES: &str = "\
Examples:
  peergate status                          who is connected, what was moved
  peergate faults --tenant demo --last 20  who was refused, where and why
  peergate faults --follow --json          the same as it happens, one JSON line each
  peergate attach demo --memory 4G         arguments for QEMU
  peergate attach demo --vmm cloud-hypervisor --json

Exit status: 0 done; 1 the daemon cannot be reached, or the daemon or the VMM cannot do that; 2 the command line is wrong.";

/// Looks at a running peergated and tells how to attach a VM.
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
    /// pause), stopped (the daemon ends, or the tenant's memory could not be scrubbed). SESSION counts the tenant's workers, FAILURES those that did not end by themselves. JSON has every counter.
    Status,
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
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing is left to tell if even this fails.
            let _ = writeln!(io::stderr(), "peergate: {error:#}");
            ExitCode::from(1)
        }
    }
}

/// False if nobody reads: whoever stopped reading has seen enough.
fn print(text: &str) -> anyhow::Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        result => result.map(|()| true).context("Cannot print"),
    }
}

fn run(cli: &Cli) -> anyhow::Result<()> {
    if let Command::Faults { tenant, last, follow: true } = &cli.command {
        return follow::run(&cli.socket, tenant.as_deref(), last.unwrap_or(0), cli.json);
    }
    print(&ask(cli)?).map(drop)
}

fn ask(cli: &Cli) -> anyhow::Result<String> {
    let request = match &cli.command {
        Command::Status => Request::Status,
        Command::Tenants | Command::Attach(_) => Request::Tenants,
        Command::Endpoints => Request::Endpoints,
        Command::Faults { tenant, last, .. } => Request::Faults { tenant: tenant.clone(), last: *last, since: None },
    };
    let reply = Client::connect(&cli.socket)?.ask(&request)?;
    match (&cli.command, &reply) {
        (Command::Attach(args), Reply::Tenants(reply)) => attach(args, reply, cli.json),
        (_, Reply::Status(reply)) => render(cli.json, reply, show::status),
        (_, Reply::Tenants(reply)) => render(cli.json, reply, show::tenants),
        (_, Reply::Endpoints(reply)) => render(cli.json, reply, show::endpoints),
        (_, Reply::Faults(reply)) => render(cli.json, reply, faults::text),
        (_, Reply::Error(error)) => bail!("{}", error.message),
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
