//! `cargo xtask test`: everything a change must pass, on a fresh machine too.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use xtask::demo::bundle::Bundle;
use xtask::demo::programs::target_dir;
use xtask::demo::{self, Acts, Row, Rows, Setting};
use xtask::guest::accel;
use xtask::kit::{Kernel, Kit};
use xtask::lab::{self, Topology};

use super::{Steps, cargo, checkout, evidence, lint, must};

/// Kernels that the module must build for, and those that guests run it on.
const MODULES: [Kernel; 3] = [Kernel::Newest, Kernel::V6_12, Kernel::V6_1];
const GUESTS: [Kernel; 2] = [Kernel::Newest, Kernel::V6_12];
/// What evidence of the guest's tests is about.
const ABOUT: &str = "The guest's tests, as `cargo xtask test --kernel KERNEL --evidence FILE` saw them. A BUG, a WARNING or a report of a check in the\n\
                     kernel's log would have ended the run. A debug kernel is built with tests/xtask/debug-kernel.config.";

/// Run everything a change must pass: lint, the kernel module with W=1 and sparse, and all tests, guests included
#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    /// Run only steps with this in their name, such as clippy, module, tests, demo, guest, lab, 6.12
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
    /// Run nothing but the guest's tests, on this kernel: newest, 6.12, 6.1, or debug (KASAN, lockdep, kmemleak; built if it is not there yet)
    #[arg(long, value_name = "KERNEL", conflicts_with = "only")]
    kernel: Option<Kernel>,
    /// Write what was run and what came of it into this file
    #[arg(long, value_name = "FILE", requires = "kernel")]
    evidence: Option<PathBuf>,
}

pub(crate) fn run(args: TestArgs) -> Result<()> {
    if let Some(kernel) = args.kernel {
        return guest(kernel, args.evidence.as_deref());
    }
    let mut steps = Steps::only(args.only);
    lint::add(&mut steps);
    // Before the tests: those that boot a guest skip themselves where no kit is.
    let kit = match steps.run("kit", Kit::ensure) {
        Some(kit) => Some(kit),
        None => Kit::open()?,
    };
    if let Some(kit) = &kit {
        modules(&mut steps, kit);
    }
    steps.run("tests", || must(cargo(&["test", "--quiet", "--workspace", "--no-fail-fast"])));
    steps.run("loom models of the IOMMU", loom);
    steps.run("the demo without a VM", || check(&demo::without_vm(Acts::Both, &Setting::default(), &mut |_| {})?));
    if let Some(kit) = &kit {
        for kernel in GUESTS {
            let name = format!("the guest, Linux {}: self-test and driver tests", name(kit, kernel));
            steps.run(&name, || check(&demo::guest_tests(&kit.with_kernel(kernel)?, &mut |_| {})?));
        }
        steps.run("two guests: the demo's second act", || {
            check(&demo::in_guest(&Bundle::build(kit)?, Acts::Second, &Setting::default(), &mut |_| {})?)
        });
        steps.run("a bundle: the demo's first act", || from_bundle(kit));
        steps.run("the lab: VT-d, VFIO and guests under KVM", || {
            check(&lab::check(kit, &Topology::load(Path::new("default"))?, None, &mut |_| {})?)
        });
    }
    steps.finish()
}

/// The guest's tests on one kernel.
fn guest(kernel: Kernel, evidence: Option<&Path>) -> Result<()> {
    let kit = Kit::ensure()?.with_kernel(kernel)?;
    let mut ignore = |_: &Row| {};
    let rows = demo::guest_tests(&kit, &mut ignore)?;
    if let Some(file) = evidence {
        let machine = format!("QEMU {}, {:?}", kit.qemu.version, accel::choose(&kit)?.accel);
        let with = [("kernel", format!("Linux {}", kit.kernel_release())), ("machine", machine)];
        evidence::write(file, ABOUT, &with, &rows)?;
    }
    check(&rows)
}

/// The guest's kernel module: no word from the compiler on any kernel, none from sparse on the newest.
fn modules(steps: &mut Steps, kit: &Kit) {
    let drivers = checkout().join("guest-driver");
    let (source, headers) = (drivers.join("kernel"), drivers.join("uapi"));
    for kernel in MODULES {
        let out = checkout().join("target/guest-module").join(kernel.name());
        let name = format!("kernel module, Linux {}, W=1", name(kit, kernel));
        steps.run(&name, || kit.with_kernel(kernel)?.build_module(&source, &[&headers], &out));
    }
    steps.run("kernel module, sparse", || kit.sparse(&source, &[&headers]));
}

/// What a step calls a kernel; known before the kernel is there.
fn name(kit: &Kit, kernel: Kernel) -> String {
    if kernel == Kernel::Newest { kit.kernel_name() } else { kernel.name().to_owned() }
}

/// The demo's first act with what a bundle has.
fn from_bundle(kit: &Kit) -> Result<()> {
    let dir = tempfile::tempdir().context("Cannot create a temporary folder")?;
    Bundle::build(kit)?.pack(dir.path())?;
    check(&demo::in_guest(&Bundle::open(dir.path())?, Acts::First, &Setting::default(), &mut |_| {})?)
}

/// Every interleaving of a few threads on the pin protocol, in a target directory of its own: the flag would rebuild everything else.
fn loom() -> Result<()> {
    let mut command = cargo(&["test", "--quiet", "--release", "--package", "iommu_core", "--test", "loom"]);
    command.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", target_dir().join("loom"));
    must(command)
}

/// Prints the rows, and fails if one is not as expected.
fn check(rows: &Rows<'_>) -> Result<()> {
    for row in rows.all() {
        println!("{}", row.text());
    }
    let (all, failed) = (rows.all().len(), rows.failed());
    if failed > 0 {
        bail!("{failed} of {all} rows are not as expected");
    }
    println!("{all} passed, 0 failed");
    Ok(())
}
