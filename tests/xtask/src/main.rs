//! `cargo xtask COMMAND`: what a person or a CI job asks of the whole project. Each command is a module of `cmd`.
#![forbid(unsafe_code)]

mod cmd;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tasks of the Peergate project
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Bench(cmd::bench::BenchArgs),
    Bundle(cmd::bundle::BundleArgs),
    Demo(cmd::demo::DemoArgs),
    Fuzz(cmd::fuzz::FuzzArgs),
    Kit(cmd::kit::KitArgs),
    Lab(cmd::lab::LabArgs),
    /// Check formatting, clippy and the documentation; warnings are failures
    Lint,
    Mutate(cmd::mutate::MutateArgs),
    Test(cmd::test::TestArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Bench(args) => cmd::bench::run(args),
        Command::Bundle(args) => cmd::bundle::run(&args),
        Command::Fuzz(args) => cmd::fuzz::run(&args),
        Command::Demo(args) => cmd::demo::run(args),
        Command::Kit(args) => cmd::kit::run(&args),
        Command::Lab(args) => cmd::lab::run(&args),
        Command::Lint => cmd::lint::run(),
        Command::Mutate(args) => cmd::mutate::run(&args),
        Command::Test(args) => cmd::test::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
