//! `cargo xtask lab`: a host with an IOMMU and real devices, as QEMU makes it.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{ArgGroup, Args};
use xtask::demo::{Row, Rows};
use xtask::kit::{Kernel, Kit};
use xtask::lab::vmm::{CloudHypervisor, Vmm};
use xtask::lab::{self, Machine, Topology, guests};

use super::evidence;

/// What evidence of the lab is about.
const ABOUT: &str = "The lab, as `cargo xtask lab --check --evidence FILE` saw it: a host with an IOMMU and PCIe devices, in one QEMU, and guests of it on its\n\
                     own KVM. Rows of lab/tenant are a guest's under QEMU, those of lab/cloud-hypervisor the same guest's under the cloud-hypervisor that\n\
                     CLOUD_HYPERVISOR named.";

/// The same of the debug kernel.
const ABOUT_IOMMUFD: &str = "The lab, as `cargo xtask lab --kernel debug --check --evidence FILE` saw it: a host with an IOMMU and PCIe devices, in one QEMU, whose kernel\n\
                             has iommufd and is built with tests/xtask/debug-kernel.config. An NVMe controller moves bytes to and from memory behind another\n\
                             function's BAR, which is mapped by a dma-buf; \"fault\" is what the kernel's log said of the address.";

/// Boot a host with an IOMMU, PCIe devices bound to VFIO, and KVM for guests of its own; look around in it, check it, or run a program in it
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").required(true).args(["shell", "check", "program"])))]
pub(crate) struct LabArgs {
    /// Give a prompt in the host, on this terminal; the host goes when the shell ends
    #[arg(long)]
    shell: bool,
    /// Bring peergated, peergate and the guest of a tenant along (guest-tenant; guest-tenant-cloud-hypervisor if CLOUD_HYPERVISOR names one)
    #[arg(long, requires = "shell")]
    tenant: bool,
    /// Run every scenario, with cloud-hypervisor too if CLOUD_HYPERVISOR names one, v53 or newer; on the debug kernel those of iommufd, and no guests. Succeed
    /// only if all rows are as expected
    #[arg(long)]
    check: bool,
    /// Run only the scenarios with this word in their name: devices, engines, bare-guest, tenant, transfers, cloud-hypervisor/…; on the debug kernel devices, iommufd
    #[arg(long, value_name = "WORD", requires = "check")]
    only: Option<String>,
    /// Print rows as JSON, one a line: name, expected, got, ok
    #[arg(long, requires = "check")]
    json: bool,
    /// Write what was run and what came of it into this file
    #[arg(long, value_name = "FILE", requires = "check")]
    evidence: Option<PathBuf>,
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
                let inside = guests::Inside::build(&mut machine)?;
                guests::tenant(&mut machine, &inside, Vmm::Qemu)?;
                if let Some(cloud_hypervisor) = CloudHypervisor::named()? {
                    cloud_hypervisor.install(&mut machine)?;
                    guests::tenant(&mut machine, &inside, Vmm::CloudHypervisor)?;
                }
            }
            machine.shell()
        }
        None => check(&kit, &topology, args),
    }
}

/// Writes the rows of a run, and what it was made with.
fn keep(file: &Path, kit: &Kit, rows: &Rows<'_>) -> Result<()> {
    let (kernel, qemu) = (format!("Linux {}", kit.kernel_release()), &kit.qemu.version);
    let accel = lab::machine::accel(kit)?;
    if kit.is_debug() {
        let with = [("kernel", kernel), ("QEMU", format!("{qemu}, {accel:?}"))];
        return evidence::write(file, ABOUT_IOMMUFD, &with, rows);
    }
    let cloud_hypervisor = CloudHypervisor::named()?;
    let version = cloud_hypervisor.as_ref().map_or("none", CloudHypervisor::version);
    let guests = kit.with_kernel(Kernel::Newest)?;
    let with = [
        ("kernel", format!("{kernel}, and in guests {}", guests.kernel_release())),
        ("QEMU", format!("{qemu}, {accel:?}; in the host Kvm")),
        ("cloud-hypervisor", version.to_owned()),
    ];
    evidence::write(file, ABOUT, &with, rows)
}

fn check(kit: &Kit, topology: &Topology, args: &LabArgs) -> Result<()> {
    let json = args.json;
    let mut report = |row: &Row| {
        let text = if json { serde_json::to_string(row).unwrap_or_default() } else { row.text() };
        println!("{text}");
    };
    let rows = lab::check(kit, topology, args.only.as_deref(), &mut report)?;
    if let Some(file) = &args.evidence {
        keep(file, kit, &rows)?;
    }
    let (all, failed) = (rows.all().len(), rows.failed());
    if failed > 0 {
        bail!("{failed} of {all} rows are not as expected");
    }
    if !json {
        println!("\nAll {all} rows are as expected.");
    }
    Ok(())
}
