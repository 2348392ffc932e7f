//! `cargo xtask test`: everything a change must pass, on a fresh machine too.

use anyhow::Result;
use xtask::kit::Kit;

use super::{Steps, cargo, checkout, lint, must};

pub(crate) fn run() -> Result<()> {
    let mut steps = Steps::default();
    lint::add(&mut steps);
    // Before the tests: those that boot a guest skip themselves where no kit is.
    let kit = steps.run("kit", Kit::ensure);
    if let Some(kit) = kit {
        module(&mut steps, &kit);
    }
    steps.run("tests", || must(cargo(&["test", "--quiet", "--workspace", "--no-fail-fast"])));
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
