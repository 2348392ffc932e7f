//! `pgctl` without a guest: the same commands, over a vhost-user front-end in this process. `--device` is the tenant's socket.
//!
//! Not here: anything of what the commands do.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use harness::{DriverOptions, InProcessDriver};
use pgctl::actor::Stage;
use pgctl::console::Console;
use pgctl::{Cli, Command};

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
    if let Command::Act(_) = cli.command {
        // What it takes a kernel to do in a guest.
        let act_as = |domain| {
            driver.act_as(domain);
            Ok(())
        };
        let stage = Stage { driver: &driver, act_as: Some(&act_as) };
        pgctl::actor::serve(stage, &mut std::io::stdin().lock(), &mut std::io::stdout())?;
        return Ok(true);
    }
    let mut out = std::io::stdout();
    pgctl::run(cli, &driver, &mut Console::new(&mut out, cli.json).for_process())
}
