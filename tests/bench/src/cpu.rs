//! CPU time of threads of this process.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

/// How long the device's threads have had a CPU.
pub(crate) fn device_time() -> Result<Duration> {
    let mut sum = Duration::ZERO;
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        // A thread that has ended meanwhile counts no more.
        let name = fs::read_to_string(task.join("comm")).unwrap_or_default();
        if matches!(name.trim_end(), "vring_worker" | "timekeeper") {
            sum += cpu_time(&task).unwrap_or_default();
        }
    }
    Ok(sum)
}

/// How long this thread has had a CPU.
pub(crate) fn own_time() -> Result<Duration> {
    cpu_time(Path::new("/proc/thread-self"))
}

fn cpu_time(task: &Path) -> Result<Duration> {
    let times = fs::read_to_string(task.join("schedstat"))?;
    let nanos = times.split_whitespace().next().context("A thread has a run time")?;
    Ok(Duration::from_nanos(nanos.parse()?))
}
