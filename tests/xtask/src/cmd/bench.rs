//! `cargo xtask bench`: how fast, as figures and as ratios to the same machine's memcpy in the same run. Never a test.

use std::ffi::OsString;

use anyhow::Result;
use clap::Args;
use xtask::demo::bench;
use xtask::kit::Kit;

use super::{cargo, must};

/// Measure the device through its socket beside memcpy, and the virtual IOMMU by itself
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Measure from inside a guest instead: 4 KiB operations a second, beside a virtio block device that does nothing
    #[arg(long)]
    guest: bool,
    /// Measure a GPU of this machine instead: transfers, energy, a pipeline and scatter, each beside its rivals; with --peers copies from one GPU to another
    #[arg(long, conflicts_with = "guest")]
    gpu: bool,
    /// Passed on; see `cargo xtask bench -- --help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

pub(crate) fn run(args: BenchArgs) -> Result<()> {
    if args.guest {
        return bench::in_guest(&Kit::ensure()?, &args.args);
    }
    let program = if args.gpu { "gpu_bench" } else { "bench" };
    let mut command = cargo(&["run", "--quiet", "--release", "--package", "bench", "--bin", program, "--"]);
    command.args(args.args);
    must(command)
}
