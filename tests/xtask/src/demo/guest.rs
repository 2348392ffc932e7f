//! The guest: what it finds, what it runs, what comes back.
//!
//! Results leave the guest through a serial port of their own, so that no kernel message can tear a line.
//!
//! Not here: what `pgctl` tries.

use std::fmt::Write as _;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::bundle::Bundle;
use super::daemon::Daemon;
use super::programs::Programs;
use super::rows::Rows;
use super::{TENANT, debug, driver, operator};
use crate::guest::{GuestSpec, Initramfs, boot};
use crate::kit::Kit;

/// How many times longer everything may take on the debug kernel, and the memory that it needs with all that it notes down.
pub(super) const DEBUG_IS_SLOWER: u32 = 10;
pub(super) const DEBUG_MEMORY_MIB: u32 = 1024;

/// Modules of the kernel's own that the driver needs.
pub(super) const MODULES: [&str; 1] = ["virtio_pci"];

/// How often a test guest's worker is ended.
const LOSSES: u32 = 3;

/// What a guest is to do.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The file of the main job.
    file: PathBuf,
    /// The driver that dawdles, if the driver's own tests run after the self-test.
    driver_tests: Option<PathBuf>,
    /// How often the worker is ended meanwhile.
    losses: u32,
    timeout: Duration,
}

impl Plan {
    /// The scenario on `file`.
    #[must_use]
    pub fn demo(file: PathBuf) -> Self {
        Self { file, driver_tests: None, losses: 0, timeout: Duration::from_secs(300) }
    }

    /// The scenario, then the driver's own tests, which need a driver that dawdles ([`driver::dawdling_module`]) too.
    #[must_use]
    pub fn tests(file: PathBuf, dawdling: PathBuf) -> Self {
        Self { driver_tests: Some(dawdling), losses: LOSSES, timeout: Duration::from_secs(600), ..Self::demo(file) }
    }
}

/// Boots a guest on the daemon's tenant and runs the plan in it. Blocks.
///
/// # Errors
/// When the guest did not run to its end; the message has the console.
pub fn run(bundle: &Bundle, daemon: &mut Daemon, plan: &Plan, rows: &mut Rows) -> Result<()> {
    let kit = &bundle.kit;
    let results = daemon.scratch().join("results");
    let spec = spec(bundle, plan)?;
    let mut spec =
        spec.args(device_args(daemon, TENANT)?).args(["-serial"]).args([format!("file:{}", results.display())]);
    spec.timeout = plan.timeout;
    if kit.is_debug() {
        spec.timeout *= DEBUG_IS_SLOWER;
        spec.memory_mib = DEBUG_MEMORY_MIB;
    }
    eprintln!("booting Linux {} under QEMU {}", kit.kernel_release(), kit.qemu.version);
    let mut console = Vec::new();
    let mut trouble = None;
    let outcome = boot(kit, &spec, |line| {
        console.push(line.to_owned());
        if line.contains(IN_FLIGHT) {
            trouble = daemon.kill_worker(TENANT).err();
        }
        trouble = trouble.take().or_else(|| operator::heed(daemon, line).err());
        if trouble.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let text = fs::read(&results).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let outcome = trouble.map_or(outcome, Err).with_context(|| {
        format!("peergated's log:\n{}\nThe guest's results so far:\n{text}", daemon.log().join("\n"))
    })?;
    eprintln!("the guest ran {:.1} s", outcome.wall.as_secs_f64());
    read_results(&text, plan, rows).with_context(|| format!("The guest's console:\n{}", console.join("\n")))
}

/// The results: rows of `pgctl`, each time up to a summary, and rows of the driver's tests, then `done`.
fn read_results(text: &str, plan: &Plan, rows: &mut Rows) -> Result<()> {
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let (mut rest, mut selftests) = (lines.as_slice(), 0);
    while let [line, others @ ..] = rest {
        rest = match *line {
            COMPLAINT => bail!(
                "The guest's kernel logged what it must not: a BUG, a WARNING, an Oops or what a check of the debug kernel found"
            ),
            "done" if others.is_empty() && selftests == 1 + plan.losses => return Ok(()),
            line if line.starts_with('{') => {
                let summary = rest.iter().position(|line| line.starts_with("{\"") && line.contains("\"rows\""));
                let (selftest, behind) = rest.split_at(summary.map_or(rest.len(), |at| at + 1));
                rows.add_selftest(selftest.iter().copied())?;
                selftests += 1;
                behind
            }
            line => {
                rows.add(driver::read_result(line)?);
                others
            }
        };
    }
    bail!("The guest did not run to its end; its last result is {:?}, after {selftests} self-tests", lines.last())
}

/// What every guest has: a shell, `pgctl`, the driver and what it needs; and the script's lines that load what it needs.
///
/// # Errors
/// When a file is missing.
pub(crate) fn root(kit: &Kit, programs: &Programs, module: &Path) -> Result<(Initramfs, String)> {
    let mut root = Initramfs::new();
    root.busybox(kit)?;
    root.program("/bin/pgctl", &programs.path("pgctl"))?;
    root.file("/lib/peergate.ko", module, 0o644);
    let mut load = String::new();
    for module in kit.kernel_modules(&MODULES)? {
        let path = format!("/lib/{}.ko", module.name);
        let _ = writeln!(load, "insmod {path}");
        root.file(&path, module.path, 0o644);
    }
    Ok((root, load))
}

fn spec(bundle: &Bundle, plan: &Plan) -> Result<GuestSpec> {
    let Bundle { kit, programs, module } = bundle;
    let (mut root, load) = root(kit, programs, module)?;
    root.file("/data/input", &plan.file, 0o644);
    if let Some(dawdling) = &plan.driver_tests {
        root.file("/lib/dawdling.ko", dawdling, 0o644);
    }
    let tests = plan.driver_tests.as_ref().map_or("", |_| driver::SCRIPT);
    let hooks = if plan.driver_tests.is_some() && kit.is_debug() { debug::SCRIPT } else { "" };
    let slow = if kit.is_debug() { DEBUG_IS_SLOWER } else { 1 };
    root.bytes("/lib/driver-tests.sh", tests, 0o644);
    root.init_script(&format!("{load}SLOW={slow}\nLOSSES={}\n{HOOKS}{hooks}{SCRIPT}", plan.losses));
    Ok(GuestSpec::new(root))
}

/// What `pgctl selftest --until-loss` says on the guest's console when the worker may be ended.
const IN_FLIGHT: &str = "work is in flight";
/// What the guest says if its kernel's log has what it must not have.
const COMPLAINT: &str = "kernel complained";

/// What a kernel that finds out more does more.
const HOOKS: &str = "before_load() { :; }; before_unload() { :; }; after_unload() { :; }\n";

/// Runs in the guest; busybox's shell.
const SCRIPT: &str = r#"
stty -F /dev/ttyS1 raw -echo 2>/dev/null
exec 3>/dev/ttyS1
before_load
insmod /lib/peergate.ko || { echo "insmod failed"; dmesg | tail -20; }
pgctl list; pgctl info
pgctl selftest --file /data/input --json >&3 || echo "the self-test failed"
. /lib/driver-tests.sh
before_unload
rmmod peergate || echo "rmmod failed"
after_unload
dmesg | grep -E 'BUG|WARNING|Oops|Call Trace|KASAN|UBSAN|INFO:|turning off the locking' && { dmesg; echo "kernel complained" >&3; }
echo done >&3
"#;

/// The device's arguments, as `peergate attach` prints them for a tenant: all but the machine's memory, which a guest here has anyway.
pub(super) fn device_args(daemon: &Daemon, tenant: &str) -> Result<Vec<String>> {
    let answer = daemon.ask(&["attach", "--vmm", "qemu", tenant])?;
    let args: Vec<String> = answer
        .as_array()
        .context("peergate attach printed no list")?
        .iter()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect();
    let pairs = args.chunks_exact(2).filter(|pair| matches!(pair[0].as_str(), "-chardev" | "-device"));
    let kept: Vec<String> = pairs.flatten().cloned().collect();
    if kept.len() != 4 {
        bail!("peergate attach must name one chardev and one device: {}", args.join(" "));
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SELFTEST: &str =
        "{\"name\":\"a\",\"expected\":\"x\",\"got\":\"x\",\"ok\":true}\n{\"rows\":1,\"failed\":0,\"ok\":true}\n";

    fn read(text: &str, losses: u32) -> Result<usize> {
        let plan = Plan { losses, ..Plan::tests(PathBuf::new(), PathBuf::new()) };
        let mut ignore = |_: &super::super::Row| {};
        let mut rows = Rows::new(&mut ignore);
        read_results(text, &plan, &mut rows).map(|()| rows.all().len())
    }

    #[test]
    fn rows_of_pgctl_and_of_the_driver_may_alternate() {
        let text = format!("test early 1 1\n{SELFTEST}test late 0 0\n{SELFTEST}done\n");
        assert_eq!(read(&text, 1).expect("complete"), 4);
    }

    #[test]
    fn results_that_are_not_all_there_are_an_error() {
        let whole = format!("{SELFTEST}test late 0 0\ndone\n");
        assert!(read(&whole, 0).is_ok());
        for (text, losses) in [
            (whole.as_str(), 1),
            (whole.trim_end_matches("done\n"), 0),
            ("done\n", 0),
            ("", 0),
            (&format!("done\n{SELFTEST}"), 0),
            (&format!("{SELFTEST}nonsense\ndone\n"), 0),
            (&format!("{SELFTEST}{COMPLAINT}\ndone\n"), 0),
        ] {
            assert!(read(text, losses).is_err(), "{text:?} with {losses} losses");
        }
    }
}
