//! How long a guest under load is without a device when its worker is killed: from the signal to the first completion of the next session, as the guest sees
//! it; and of that, what the supervisor counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::load::Load;
use harness::daemon::kill;
use harness::{Binaries, Daemon};

use crate::Report;

const NAMES: [&str; 2] = ["restart_to_first_completion", "restart_supervisors_view"];
const CONFIG: &str = r#"
[[device]]
name = "gpu0"
kind = "gpu"
memory = "64MiB"

[[tenant]]
name = "vm"

[[tenant.slice]]
device = "gpu0"
memory = "64MiB"
"#;
/// Descriptors that must end well before each kill.
const UNDER_LOAD: u64 = 1000;
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn run(report: &mut Report) -> Result<()> {
    if !report.wants(&NAMES) {
        return Ok(());
    }
    let mut daemon = Daemon::start(&Binaries::build()?, CONFIG)?;
    let load = Load::start(&daemon.socket("vm"))?;
    let (mut seen, mut counted) = (Vec::new(), Vec::new());
    for _ in 0..report.samples() {
        // A worker that lived a second had no trouble, so that the next one is started at once.
        std::thread::sleep(Duration::from_millis(1100));
        wait(&load, &load.progress.ok, UNDER_LOAD)?;
        let worker = daemon.tenant("vm")?.worker_pid.context("A connected tenant has a worker")?;
        let (sessions, start) = (load.progress.sessions.load(Ordering::Relaxed), Instant::now());
        kill(worker)?;
        reach(&load, &load.progress.sessions, sessions + 1)?;
        wait(&load, &load.progress.ok, 1)?;
        seen.push(millis(start.elapsed()));
        daemon.wait_for("the supervisor to know", |daemon| Ok(daemon.tenant("vm")?.last_outage_us.is_some()))?;
        let outage = daemon.tenant("vm")?.last_outage_us.context("It was just there")?;
        counted.push(millis(Duration::from_micros(outage)));
    }
    load.stop()?;
    daemon.stop()?;
    report.numbers(NAMES[0], "ms", seen);
    report.numbers(NAMES[1], "ms", counted);
    Ok(())
}

/// Waits until a number of the load has grown by `by`.
fn wait(load: &Load, counter: &AtomicU64, by: u64) -> Result<()> {
    reach(load, counter, counter.load(Ordering::Relaxed) + by)
}

fn reach(load: &Load, counter: &AtomicU64, wanted: u64) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while counter.load(Ordering::Relaxed) < wanted {
        ensure!(!load.has_ended(), "The load has failed");
        ensure!(Instant::now() < deadline, "The load stands still");
        std::thread::yield_now();
    }
    Ok(())
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
