//! `cargo xtask test`: everything a change must pass, on a fresh machine too.

use anyhow::{Result, bail};
use clap::Args;
use xtask::demo::programs::target_dir;
use xtask::demo::{self, Rows};
use xtask::kit::Kit;

use super::{Steps, cargo, checkout, lint, must};

/// Run everything a change must pass: lint, the kernel module with W=1 and sparse, and all tests, guests included
#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    /// Run only steps with this in their name, such as clippy, module, tests, demo, guest
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
}

pub(crate) fn run(args: TestArgs) -> Result<()> {
    let mut steps = Steps::only(args.only);
    lint::add(&mut steps);
    // Before the tests: those that boot a guest skip themselves where no kit is.
    let kit = match steps.run("kit", Kit::ensure) {
        Some(kit) => Some(kit),
        None => Kit::open()?,
    };
    if let Some(kit) = &kit {
        module(&mut steps, kit);
    }
    steps.run("tests", || must(cargo(&["test", "--quiet", "--workspace", "--no-fail-fast"])));
    steps.run("loom models of the IOMMU", loom);
    steps.run("the demo without a VM", || check(&demo::without_vm(None, &mut |_| {})?));
    if let Some(kit) = &kit {
        steps.run("the guest: self-test and driver tests", || check(&demo::guest_tests(kit, &mut |_| {})?));
    }
    steps.finish()
}

/// The guest's kernel module: no word from the compiler, none from sparse.
fn module(steps: &mut Steps, kit: &Kit) {
    let drivers = checkout().join("guest-driver");
    let (source, headers) = (drivers.join("kernel"), drivers.join("uapi"));
    if !["Kbuild", "Makefile"].iter().any(|file| source.join(file).is_file()) {
        return;
    }
    let out = checkout().join("target/guest-module");
    steps.run("kernel module, W=1", || kit.build_module(&source, &[&headers], &out));
    steps.run("kernel module, sparse", || kit.sparse(&source, &[&headers]));
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
