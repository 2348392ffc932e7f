//! `pgctl`: the operator's and the tester's way to a Peergate device, in a guest.
//!
//! Commands act through [`peergate_guest::Driver`], so the same code runs on the kernel driver and, in tests, over a device in the same
//! process. What they say goes through a [`Console`]; progress goes to standard error; [`main`] alone knows of the process.
//!
//! Not here: knowledge of the wire or of how the device works.
#![forbid(unsafe_code)]

pub mod actor;
pub mod args;
mod commands;
pub mod console;
pub mod fpga;
pub mod job;
pub mod meter;
pub mod pattern;
pub mod selftest;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use peergate_guest::{Driver, KernelDriver};

pub use args::{Cli, Command};
pub use console::Console;
pub use meter::Meters;

/// Runs one command on `driver` and answers whether what was asked for came out well.
///
/// # Errors
/// What kept the command from trying, or from saying what came out.
pub fn run(cli: &Cli, driver: &dyn Driver, console: &mut Console<'_>) -> Result<bool> {
    match &cli.command {
        Command::List => commands::list(console),
        Command::Info => commands::info(driver, &cli.device, console),
        Command::Copy(args) => commands::copy(driver, args, console),
        Command::Fill(args) => commands::fill(driver, args, console),
        Command::Peer(args) => commands::peer(driver, args, console),
        Command::Run(args) => commands::run(driver, args, console),
        Command::Events(args) => commands::events(driver, args, console),
        Command::Selftest(args) => selftest::command(driver, args, console),
        Command::Act(args) => actor::command(driver, args),
    }
}

/// The program: exit code 0 if all is well, 1 if something was refused or failed, 2 if the command line makes no sense.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let driver = KernelDriver::new(&cli.device);
    let mut out = std::io::stdout();
    let mut console = Console::new(&mut out, cli.json).for_process();
    let result = run(&cli, &driver, &mut console);
    if let Err(error) = &result
        && !console.is_broken()
    {
        console::remark(&format!("pgctl: {}", chain(error)));
    }
    ExitCode::from(exit_code(&result, console.is_broken()))
}

/// Who reads no further has seen enough: a broken pipe is no failure.
fn exit_code(result: &Result<bool>, broken: bool) -> u8 {
    match result {
        Ok(true) => 0,
        Err(_) if broken => 0,
        Ok(false) | Err(_) => 1,
    }
}

/// An error with its causes, each said once.
fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: caused by: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[test]
    fn only_a_broken_pipe_excuses_an_error() {
        assert_eq!(exit_code(&Ok(true), false), 0);
        assert_eq!(exit_code(&Ok(false), true), 1);
        assert_eq!(exit_code(&Err(anyhow!("x")), false), 1);
        assert_eq!(exit_code(&Err(anyhow!("x")), true), 0);
    }

    #[test]
    fn a_cause_is_not_said_twice() {
        let error =
            Err::<(), _>(anyhow!("No such file")).context("Could not open x: No such file").context("Copying failed");
        assert_eq!(chain(&error.expect_err("made so")), "Copying failed: caused by: Could not open x: No such file");
    }
}
