//! `pgctl` without a guest: the same commands, over a vhost-user front-end in this process. `--device` is the tenant's socket.
//!
//! Not here: anything of what the commands do.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use harness::{DriverOptions, InProcessDriver};
use pgctl::Cli;
use pgctl::console::Console;

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("pgctl-no-vm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<bool> {
    let driver = InProcessDriver::connect(&cli.device, DriverOptions::default())?;
    let mut out = std::io::stdout();
    pgctl::run(cli, &driver, &mut Console::new(&mut out, cli.json).for_process())
}
