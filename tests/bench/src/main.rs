//! Measures the device through its socket, and the virtual IOMMU by itself.
//!
//! The device is served by a thread of this process, with the CPU as its engine; a guest's driver polls for completions on another thread,
//! so that one submission queue is one core's work. Beside each rate by the clock stands the rate for a second of CPU time of the threads
//! that do the work: the same on an idle machine, and still meaningful on a busy one. Every number is the median of several samples.
//! Bandwidth is also given as a ratio to the copies that the same CPU does without a device, measured in turns with them. Numbers are
//! reported, never asserted.
//!
//! Where the daemon's processes matter (how long a VM is without a worker), it is the real one that is measured.
//!
//! Not here: guests; see `guest_bench`.

mod control;
mod cpu;
mod device;
mod fairness;
mod iommu;
mod report;
mod restart;

use clap::Parser;

use report::Report;

/// Measures Peergate.
#[derive(Debug, Parser)]
#[command(name = "bench")]
struct Args {
    /// Print one JSON object a row instead of a table.
    #[arg(long)]
    json: bool,
    /// Samples of each number.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    samples: u32,
    /// Milliseconds that a sample lasts, about.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    millis: u64,
    /// Only numbers whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let mut report = Report::new(args.json, args.samples, args.millis, args.only);
    iommu::run(&mut report)?;
    control::run(&mut report)?;
    device::run(&mut report)?;
    fairness::run(&mut report)?;
    restart::run(&mut report)?;
    report.finish();
    Ok(())
}
