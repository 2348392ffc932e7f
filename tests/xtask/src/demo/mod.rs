//! The demo: one scenario, run from a guest under QEMU or from a front-end in a process of the host, and judged from both sides.
//!
//! `programs` builds what runs, `daemon` runs `peergated`, `guest` boots the guest; the guest's side of the scenario is `pgctl selftest`. When it is
//! over, `operator` looks up each refusal in `peergate faults`, and the daemon must end with nothing left behind. Everything becomes [`Row`]s.
//!
//! Not here: what the scenario tries (that is `pgctl`), assertions about speed.

pub mod bench;
pub mod daemon;
pub mod debug;
pub mod driver;
pub mod guest;
pub mod operator;
pub mod programs;
pub mod rows;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::kit::Kit;
use crate::work::checkout;
use daemon::Daemon;
use programs::Programs;
pub use rows::{Row, Rows};

/// Packages that the scenario needs without a guest.
pub const WITHOUT_VM: &[&str] = &["vmm_daemon", "e2e"];

/// The tenant of `configs/demo.toml`.
pub const TENANT: &str = "demo";

/// Runs the scenario in a guest; a row is reported as soon as it is known. Blocks until everything has ended.
///
/// # Errors
/// When the scenario could not run to its end.
pub fn in_guest<'r>(kit: &Kit, file: Option<PathBuf>, report: &'r mut dyn FnMut(&Row)) -> Result<Rows<'r>> {
    let programs = Programs::build(&["vmm_daemon", "pgctl"])?;
    let module = programs.module(kit)?;
    let daemon = Daemon::start_with(&programs, &shipped("demo.toml")?)?;
    let mut rows = Rows::new(report);
    let plan = guest::Plan::demo(file.unwrap_or_else(|| kit.kernel_image()));
    guest::run(kit, &programs, &module, &daemon, &plan, &mut rows)?;
    finish(daemon, rows)
}

/// Runs the scenario, and then the guest driver's own tests, in a guest whose links have a latency and a bandwidth: so transfers are really in
/// flight while things happen. Blocks until everything has ended.
///
/// # Errors
/// When it could not run to its end.
pub fn guest_tests<'r>(kit: &Kit, report: &'r mut dyn FnMut(&Row)) -> Result<Rows<'r>> {
    let programs = Programs::build(&["vmm_daemon", "pgctl"])?;
    let module = programs.module(kit)?;
    let config = shipped("demo.toml")?;
    let link = "link = { bandwidth = \"256MB/s\", latency = \"20us\" }";
    let slow = config.lines().flat_map(|line| [line, if line.starts_with("kind = ") { link } else { "" }]);
    let slow = slow.collect::<Vec<_>>().join("\n");
    ensure!(slow.contains(link), "configs/demo.toml has no device to slow down");
    let daemon = Daemon::start_with(&programs, &slow)?;
    let mut rows = Rows::new(report);
    guest::run(kit, &programs, &module, &daemon, &guest::Plan::tests(kit.kernel_image()), &mut rows)?;
    finish(daemon, rows)
}

/// Runs the scenario from a process of this host. Needs no kit.
///
/// # Errors
/// When the scenario could not run to its end.
pub fn without_vm<'r>(file: Option<&Path>, report: &'r mut dyn FnMut(&Row)) -> Result<Rows<'r>> {
    scenario(&Programs::build(WITHOUT_VM)?, file, report)
}

/// As [`without_vm`], with programs that are already built.
///
/// # Errors
/// As there.
pub fn scenario<'r>(programs: &Programs, file: Option<&Path>, report: &'r mut dyn FnMut(&Row)) -> Result<Rows<'r>> {
    let daemon = Daemon::start_with(programs, &shipped("demo.toml")?)?;
    let mut rows = Rows::new(report);
    programs.scenario(&daemon, file, &mut rows)?;
    finish(daemon, rows)
}

/// A configuration of `configs/`.
fn shipped(name: &str) -> Result<String> {
    fs::read_to_string(checkout().join("configs").join(name)).with_context(|| format!("Cannot read configs/{name}"))
}

/// The operator's side, and the end of the daemon.
fn finish<'r>(daemon: Daemon, mut rows: Rows<'r>) -> Result<Rows<'r>> {
    operator::judge(&daemon, &mut rows)?;
    for row in daemon.stop()? {
        rows.add(row);
    }
    Ok(rows)
}
