//! Processors for tenants: each VM and its worker on one of their own, as an operator gives them to tenants whose times he promises. What one tenant
//! then does to another's times it does through what Peergate shares among them, not through the host's scheduler.
//!
//! Not here: what a host should do that has fewer processors than tenants.

use std::fs;

use anyhow::{Context, Result};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::actor::Actor;
use super::daemon::Daemon;

/// Places the processes of each tenant. False if there are fewer processors than tenants: then nothing has changed.
///
/// # Errors
/// When the kernel refuses.
pub fn apart(daemon: &Daemon, actors: [&Actor; 2]) -> Result<bool> {
    let allowed = sched_getaffinity(None).context("Cannot ask which processors this process may use")?;
    let mut processors = (0..CpuSet::MAX_CPU).filter(|number| allowed.is_set(*number));
    let (Some(first), Some(second)) = (processors.next(), processors.next()) else { return Ok(false) };
    for (actor, processor) in actors.into_iter().zip([first, second]) {
        let mut set = CpuSet::new();
        set.set(processor);
        for process in [actor.process(), daemon.worker(&actor.tenant)?] {
            place(process, &set).with_context(|| format!("Cannot give tenant {} a processor", actor.tenant))?;
        }
    }
    Ok(true)
}

/// Places a process. A thread that begins meanwhile takes after the one that started it, so this is done until all are placed.
fn place(process: Pid, set: &CpuSet) -> Result<()> {
    loop {
        let mut placed = true;
        for entry in fs::read_dir(format!("/proc/{process}/task")).context("Cannot list its threads")? {
            let name = entry.context("Cannot list its threads")?.file_name();
            let Some(thread) = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw) else {
                continue;
            };
            match sched_getaffinity(Some(thread)) {
                Ok(now) if now == *set => {}
                Err(rustix::io::Errno::SRCH) => {}
                Ok(_) | Err(_) => {
                    placed = false;
                    match sched_setaffinity(Some(thread), set) {
                        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
            }
        }
        if placed {
            return Ok(());
        }
    }
}
