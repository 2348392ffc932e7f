//! The demo: one scenario, run from a guest under QEMU or from a front-end in a process of the host, and judged from both sides.
//!
//! `programs` builds what runs, `daemon` runs `peergated`, `guest` boots the guest; the guest's side of the scenario is `pgctl selftest`. When it is
//! over, `operator` looks up each refusal in `peergate faults`, and the daemon must end with nothing left behind. Everything becomes [`Row`]s.
//!
//! Not here: what the scenario tries (that is `pgctl`), assertions about speed.

pub mod daemon;
pub mod driver;
pub mod guest;
pub mod operator;
pub mod programs;
pub mod rows;

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::kit::Kit;
use daemon::Daemon;
use programs::Programs;
pub use rows::{Row, Rows};

/// The tenant of `configs/demo.toml`.
pub const TENANT: &str = "demo";

/// Runs the scenario in a guest; a row is reported as soon as it is known. Blocks until everything has ended.
///
/// # Errors
/// When the scenario could not run to its end.
pub fn in_guest<'r>(kit: &Kit, file: Option<PathBuf>, report: &'r mut dyn FnMut(&Row)) -> Result<Rows<'r>> {
    let programs = Programs::build(&["vmm_daemon", "pgctl"])?;
    let module = programs.module(kit)?;
    let daemon = Daemon::start(&programs, "demo.toml")?;
    let mut rows = Rows::new(report);
    let plan = guest::Plan::demo(file.unwrap_or_else(|| kit.kernel_image()));
    guest::run(kit, &programs, &module, &daemon, &plan, &mut rows)?;
    finish(daemon, rows)
}

/// Runs the scenario from a process of this host. Needs no kit.
///
/// # Errors
/// When the scenario could not run to its end.
pub fn without_vm<'r>(file: Option<&Path>, report: &'r mut dyn FnMut(&Row)) -> Result<Rows<'r>> {
    let programs = Programs::build(&["vmm_daemon", "e2e"])?;
    let daemon = Daemon::start(&programs, "demo.toml")?;
    let mut rows = Rows::new(report);
    programs.scenario(&daemon, file, &mut rows)?;
    finish(daemon, rows)
}

/// The operator's side, and the end of the daemon.
fn finish<'r>(daemon: Daemon, mut rows: Rows<'r>) -> Result<Rows<'r>> {
    operator::judge(&daemon, &mut rows)?;
    for row in daemon.stop()? {
        rows.add(row);
    }
    Ok(rows)
}
