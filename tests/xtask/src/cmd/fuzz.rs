//! `cargo xtask fuzz`: libFuzzer on the parsers, from the checked-in seeds on. The seeds also run as ordinary tests.

use std::fs;

use anyhow::{Context, Result, ensure};
use clap::Args;
use tempfile::TempDir;

use super::{Steps, cargo, checkout, must};

/// Fuzz requests, descriptor chains and ring memory for a while each
#[derive(Debug, Args)]
pub(crate) struct FuzzArgs {
    /// Seconds a target
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Only targets with this in their name
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
}

pub(crate) fn run(args: &FuzzArgs) -> Result<()> {
    let mut steps = Steps::only(args.only.clone());
    add(&mut steps, args.seconds)?;
    steps.finish()
}

/// One step a target.
pub(crate) fn add(steps: &mut Steps, seconds: u32) -> Result<()> {
    let home = checkout().join("tests/fuzz");
    let mut targets = Vec::new();
    for entry in fs::read_dir(home.join("src/bin")).context("Cannot list the fuzz targets")? {
        let name = entry.context("Cannot list the fuzz targets")?.path();
        targets.extend(name.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
    }
    targets.sort();
    ensure!(!targets.is_empty(), "There are no fuzz targets in {}", home.display());
    for target in targets {
        steps.run(&format!("fuzz {target}"), || {
            // What it finds that is new goes here and not into the checkout; a crash is written beside it and named in the output.
            let corpus = TempDir::with_prefix("peergate-fuzz-").context("Cannot create a temporary folder")?;
            let mut command = cargo(&["run", "--quiet", "--release", "--bin", &target, "--"]);
            command.current_dir(&home).arg(corpus.path());
            let seeds = home.join("seeds").join(&target);
            if seeds.is_dir() {
                command.arg(seeds);
            }
            command.arg(format!("-max_total_time={seconds}")).args([
                "-timeout=20",
                "-rss_limit_mb=4096",
                "-verbosity=0",
            ]);
            command.args(["-print_final_stats=1", "-artifact_prefix=peergate-fuzz-"]);
            must(command)
        });
    }
    Ok(())
}
