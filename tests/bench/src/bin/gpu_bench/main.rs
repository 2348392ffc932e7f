//! Measures transfers between a GPU's memory and apertures of other owners: through Peergate's whole device path, and as programs do it without.
//!
//! The device is served by threads of this process and driven through its vhost-user socket and queues, as a guest's driver would. Rivals are in
//! `rivals`. Everything is compared with its rivals in the same run; nothing is asserted. `--from` makes a plot of an earlier run, on any machine.
//!
//! Not here: guests; a simulated GPU (see `bench`).

#![allow(unsafe_op_in_unsafe_fn, reason = "rivals call the driver directly")]

mod measure;
mod peers;
mod pipeline;
mod plot;
mod raw;
mod report;
mod rivals;
mod summary;
mod world;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use hw_cuda::{Nvml, Settings};

use measure::Buffers;
use report::{NOTE, Run};
use world::World;

/// Measures a GPU behind Peergate, beside its rivals.
#[derive(Debug, Parser)]
#[command(name = "gpu_bench")]
struct Args {
    /// Write everything to this file, as JSON
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Draw the bandwidths into this file, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Measure nothing; read the file that an earlier run has written
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Samples of each bandwidth
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    samples: u32,
    /// Measure copies from one GPU to another instead
    #[arg(long, conflicts_with = "only")]
    peers: bool,
    /// With --peers: longest transfer
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30)]
    most: u64,
    /// Only this part: latency, transfer, energy, pipeline or scatter
    #[arg(long, value_name = "PART")]
    only: Option<String>,
    /// Which GPU, by PCI address or UUID; the first one by default
    #[arg(long, value_name = "GPU")]
    gpu: Option<String>,
    /// Transfers of at most so many bytes are gathered to begin together
    #[arg(long, value_name = "BYTES")]
    gather: Option<u64>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let run = match &args.from {
        Some(file) => serde_json::from_str(&fs::read_to_string(file).context("Cannot read the run")?)?,
        None => measure(&args)?,
    };
    summary::print(&run);
    if let Some(file) = &args.out {
        fs::write(file, serde_json::to_string_pretty(&run)? + "\n").context("Cannot write the run")?;
    }
    if let Some(file) = &args.plot {
        fs::write(file, plot::svg(&run)).context("Cannot write the plot")?;
    }
    Ok(())
}

fn measure(args: &Args) -> Result<Run> {
    let wants = |part: &str| args.only.as_deref().is_none_or(|only| only == part);
    let samples = usize::try_from(args.samples)?;
    let base = Settings { gather: args.gather.unwrap_or(Settings::default().gather), ..Settings::default() };
    if args.peers {
        return peers::measure(args.gpu.as_deref(), args.most, samples, base);
    }
    let mut buffers = Buffers::new()?;
    let (command, note) = ("cargo xtask bench --gpu".to_owned(), NOTE.to_owned());
    let mut run = Run { command, note, machine: Default::default(), rows: Vec::new() };
    let nvml = Nvml::load()?;
    if wants("latency") {
        // How an operator gets it who asks for nothing: nobody spins for an end.
        let world = World::new(args.gpu.as_deref(), base)?;
        measure::latency(&world, &mut buffers, 300, &mut run, "direct, sleep")?;
    }
    let world = World::new(args.gpu.as_deref(), Settings { spin: true, ..base })?;
    run.machine = world::machine(&world.gpu, &nvml.driver_version()?)?;
    for len in [1, 4095, 64 << 10, (1 << 20) + 13, 64 << 20, 257 << 20] {
        world.verify(len)?;
    }
    if wants("latency") {
        measure::latency(&world, &mut buffers, 1000, &mut run, "direct")?;
    }
    if wants("transfer") {
        measure::transfer(&world, &mut buffers, samples, &mut run)?;
    }
    if wants("scatter") {
        measure::scatter(&world, &mut buffers, samples, &mut run)?;
    }
    if wants("pipeline") {
        pipeline::pipeline(&world, &mut buffers, samples, &mut run)?;
    }
    if wants("energy") {
        let meter = nvml.meter(&world.gpu.info().uuid)?;
        measure::energy(&world, &mut buffers, &meter, &mut run)?;
    }
    Ok(run)
}
