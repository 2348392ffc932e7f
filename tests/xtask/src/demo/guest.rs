//! The guest: what it finds, what it runs, what comes back.
//!
//! Results leave the guest through a serial port of their own, so that no kernel message can tear a line.
//!
//! Not here: what `pgctl` tries.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::daemon::Daemon;
use super::programs::Programs;
use super::rows::Rows;
use super::{TENANT, driver};
use crate::guest::{GuestSpec, Initramfs, boot};
use crate::kit::Kit;

/// What a guest is to do.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The file of the main job.
    file: PathBuf,
    /// Whether the driver's own tests run after the self-test.
    driver_tests: bool,
    timeout: Duration,
}

impl Plan {
    /// The scenario on `file`.
    #[must_use]
    pub fn demo(file: PathBuf) -> Self {
        Self { file, driver_tests: false, timeout: Duration::from_secs(300) }
    }

    /// The scenario, then the driver's own tests.
    #[must_use]
    pub fn tests(file: PathBuf) -> Self {
        Self { driver_tests: true, timeout: Duration::from_secs(600), ..Self::demo(file) }
    }
}

/// Boots a guest on the daemon's tenant and runs the plan in it. Blocks.
///
/// # Errors
/// When the guest did not run to its end; the message has the console.
pub fn run(kit: &Kit, programs: &Programs, module: &Path, daemon: &Daemon, plan: &Plan, rows: &mut Rows) -> Result<()> {
    let results = daemon.scratch().join("results");
    let spec = spec(kit, programs, module, plan)?;
    let mut spec = spec.args(device_args(daemon)?).args(["-serial"]).args([format!("file:{}", results.display())]);
    spec.timeout = plan.timeout;
    eprintln!("booting Linux {} under QEMU {}", kit.kernel_release(), kit.qemu.version);
    let mut console = Vec::new();
    let outcome = boot(kit, &spec, |line| {
        console.push(line.to_owned());
        ControlFlow::Continue(())
    });
    let text = fs::read(&results).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let outcome = outcome.with_context(|| {
        format!("peergated's log:\n{}\nThe guest's results so far:\n{text}", daemon.log().join("\n"))
    })?;
    eprintln!("the guest ran {:.1} s", outcome.wall.as_secs_f64());
    read_results(&text, plan, rows).with_context(|| format!("The guest's console:\n{}", console.join("\n")))
}

/// The results: the self-test's lines up to its summary, then rows of the driver's tests, then `done`.
fn read_results(text: &str, plan: &Plan, rows: &mut Rows) -> Result<()> {
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let summary = lines.iter().position(|line| line.starts_with("{\"") && line.contains("\"rows\""));
    let end = summary.map_or(lines.len(), |at| at + 1);
    rows.add_selftest(lines[..end].iter().copied())?;
    if lines.contains(&COMPLAINT) {
        bail!("The guest's kernel logged a BUG, a WARNING or an Oops");
    }
    if plan.driver_tests {
        driver::read_results(&lines[end..], rows)?;
    }
    if lines.last() != Some(&"done") {
        bail!("The guest did not run to its end; its last result is {:?}", lines.last());
    }
    Ok(())
}

fn spec(kit: &Kit, programs: &Programs, module: &Path, plan: &Plan) -> Result<GuestSpec> {
    let mut root = Initramfs::new();
    root.busybox(kit)?;
    root.program("/bin/pgctl", &programs.path("pgctl"))?;
    root.file("/lib/peergate.ko", module, 0o644);
    root.file("/data/input", &plan.file, 0o644);
    let tests = if plan.driver_tests { driver::SCRIPT } else { "" };
    root.bytes("/lib/driver-tests.sh", tests, 0o644);
    root.init_script(SCRIPT);
    Ok(GuestSpec::new(root))
}

/// What the guest says if its kernel's log has what it must not have.
const COMPLAINT: &str = "kernel complained";

/// Runs in the guest; busybox's shell.
const SCRIPT: &str = r#"
stty -F /dev/ttyS1 raw -echo 2>/dev/null
exec 3>/dev/ttyS1
insmod /lib/peergate.ko || { echo "insmod failed"; dmesg | tail -20; }
pgctl list; pgctl info
pgctl selftest --file /data/input --json >&3 || echo "the self-test failed"
. /lib/driver-tests.sh
rmmod peergate || echo "rmmod failed"
dmesg | grep -E 'BUG|WARNING|Oops|Call Trace' && echo "kernel complained" >&3
echo done >&3
"#;

/// The device's arguments, as `peergate attach` prints them for this tenant: all but the machine's memory, which a guest here has anyway.
pub(super) fn device_args(daemon: &Daemon) -> Result<Vec<String>> {
    let answer = daemon.ask(&["attach", "--vmm", "qemu", TENANT])?;
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
