//! `peergated`, the daemon's command line: a supervisor, or, when a supervisor starts it so, a process of one of its roles.
//!
//! Not here: what any of them does.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};

use crate::broker::BrokerArgs;
use crate::config::quantity::size;
use crate::config::store::Store;
use crate::config::{Config, DEFAULT};
use crate::keeper::KeeperArgs;
use crate::worker::WorkerArgs;
use crate::{broker, keeper, log, supervisor, worker};

const EXAMPLES: &str = "\
Examples:
  peergated --print-default-config > peergated.toml   every key with its default and its meaning
  peergated --config peergated.toml --check           says what is wrong, with a line number
  peergated --config peergated.toml

A line on standard output says when every tenant can be connected to; the log goes to standard error.
SIGTERM, SIGINT and SIGHUP end it in good order; a second one kills the workers. `peergate` looks at a running daemon.

Exit status: 0 ended as told; 1 failed; 2 the command line or the configuration is wrong.";

/// Gives VMs a virtual P2P DMA device, one worker process a tenant.
#[derive(Debug, Parser)]
#[command(name = "peergated", version, after_help = EXAMPLES, max_term_width = 100, args_conflicts_with_subcommands = true)]
struct Cli {
    /// The configuration
    #[arg(long, value_name = "FILE", default_value = "/etc/peergate/peergated.toml")]
    config: PathBuf,
    /// Check the configuration and do no more
    #[arg(long)]
    check: bool,
    /// Print a configuration that has every key, and do no more
    #[arg(long)]
    print_default_config: bool,
    /// Which log lines go to stderr, in place of the configuration's: a level, or a filter such as warn,vmm_daemon=debug
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Started by a supervisor, never by hand
    #[command(hide = true)]
    Worker(WorkerArgs),
    /// Started by a supervisor, never by hand
    #[command(hide = true)]
    Broker(BrokerArgs),
    /// Started by a supervisor, never by hand
    #[command(hide = true)]
    Keeper(KeeperArgs),
}

/// What went wrong, as an exit status.
enum Failure {
    /// The operator's input.
    Usage(anyhow::Error),
    /// Everything else.
    Failed(anyhow::Error),
    /// A worker's, which its supervisor says.
    Told,
}

/// The whole program.
pub fn main() -> ExitCode {
    let (status, error) = match run(Cli::parse()) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failure::Usage(error)) => (2, error),
        Err(Failure::Failed(error)) => (1, error),
        Err(Failure::Told) => return ExitCode::FAILURE,
    };
    // Nothing is left to tell if even this fails.
    let _ = writeln!(io::stderr(), "peergated: {error:#}");
    ExitCode::from(status)
}

fn run(mut cli: Cli) -> Result<(), Failure> {
    if let Some(role) = cli.role.take() {
        return play(&role);
    }
    if cli.print_default_config {
        return print(DEFAULT).map_err(Failure::Failed);
    }
    if let Some(log) = &cli.log {
        log::filter(log).context("--log").map_err(Failure::Usage)?;
    }
    let (store, config) = Store::open(&cli.config, cli.log).map_err(|error| Failure::Usage(error.into()))?;
    if cli.check {
        return print(&summary(&cli.config, &config)).map_err(Failure::Failed);
    }
    log::start(&config.daemon.log, None).map_err(Failure::Usage)?;
    supervisor::run(store, config).map_err(Failure::Failed)
}

fn play(role: &Role) -> Result<(), Failure> {
    let (tag, args) = match role {
        Role::Worker(args) => (args.tenant.as_str(), &args.role),
        Role::Broker(args) => ("broker", &args.role),
        Role::Keeper(args) => (args.tenant.as_str(), &args.role),
    };
    log::start(&args.log, Some(tag)).map_err(Failure::Usage)?;
    let went_well = match role {
        Role::Worker(args) => worker::run(args),
        Role::Broker(args) => broker::run(args).map(|()| true),
        Role::Keeper(args) => keeper::run(args),
    };
    match went_well {
        Ok(true) => Ok(()),
        Ok(false) => Err(Failure::Told),
        Err(error) => Err(Failure::Failed(error)),
    }
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("Cannot print"),
    }
}

fn summary(path: &std::path::Path, config: &Config) -> String {
    let mut text = format!("{}: good\n", path.display());
    for tenant in &config.tenants {
        let slices: Vec<_> =
            tenant.slices.iter().map(|slice| format!("{} {}", slice.name, size(slice.memory))).collect();
        text += &format!("tenant {}: {} at {}\n", tenant.name, slices.join(", "), tenant.socket.display());
    }
    text
}
