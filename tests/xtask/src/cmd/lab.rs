//! `cargo xtask lab`: a host with an IOMMU and real devices, as QEMU makes it.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{ArgGroup, Args};
use xtask::demo::Row;
use xtask::kit::{Kernel, Kit};
use xtask::lab::{self, Machine, Topology, guests};

/// Boot a host with an IOMMU, PCIe devices bound to VFIO, and KVM for guests of its own; look around in it, check it, or run a program in it
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").required(true).args(["shell", "check", "program"])))]
pub(crate) struct LabArgs {
    /// Give a prompt in the host, on this terminal; the host goes when the shell ends
    #[arg(long)]
    shell: bool,
    /// Bring peergated, peergate and the guest of a tenant (guest-tenant) along
    #[arg(long, requires = "shell")]
    tenant: bool,
    /// Run every scenario; succeed only if all rows are as expected
    #[arg(long)]
    check: bool,
    /// Print rows as JSON, one a line: name, expected, got, ok
    #[arg(long, requires = "check")]
    json: bool,
    /// The host's devices: a file, or the name of one of configs/topologies
    #[arg(long, value_name = "FILE", default_value = "default")]
    topology: PathBuf,
    /// The host's kernel; one without VFIO is refused
    #[arg(long, value_name = "KERNEL", default_value = "newest")]
    kernel: Kernel,
    /// A program of this machine and its arguments, to run in the host; /run/lab/devices there lists the devices
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

pub(crate) fn run(args: &LabArgs) -> Result<()> {
    let topology = Topology::load(&args.topology)?;
    let kit = Kit::ensure()?.with_kernel(args.kernel)?;
    match args.program.split_first() {
        Some((program, words)) => {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let ended = lab::run_program(&kit, &topology, program.as_ref(), &words)?;
            print!("{}", ended.output);
            eprintln!("the host ran {:.1} s", ended.wall.as_secs_f64());
            if ended.status != 0 {
                bail!("The program ended with status {}", ended.status);
            }
            Ok(())
        }
        None if args.shell => {
            let mut machine = Machine::new(&kit, &topology)?;
            if args.tenant {
                guests::tenant(&mut machine)?;
            }
            machine.shell()
        }
        None => check(&kit, &topology, args.json),
    }
}

fn check(kit: &Kit, topology: &Topology, json: bool) -> Result<()> {
    let mut report = |row: &Row| {
        let text = if json { serde_json::to_string(row).unwrap_or_default() } else { row.text() };
        println!("{text}");
    };
    let rows = lab::check(kit, topology, &mut report)?;
    let (all, failed) = (rows.all().len(), rows.failed());
    if failed > 0 {
        bail!("{failed} of {all} rows are not as expected");
    }
    if !json {
        println!("\nAll {all} rows are as expected.");
    }
    Ok(())
}
