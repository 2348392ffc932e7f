//! Processors for tenants: each VM and its worker on one of their own, as an operator gives them to tenants whose times he promises. What one tenant
//! then does to another's times it does through what Peergate shares among them, not through the host's scheduler.
//!
//! Not here: what a host should do that has fewer processors than tenants.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result};
use rustix::io::Errno;
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

/// Places a process. A thread that begins meanwhile takes after the one that started it, so this goes on until there are no others than were placed.
fn place(process: Pid, set: &CpuSet) -> Result<()> {
    let mut placed = BTreeSet::new();
    loop {
        let there = threads(process)?;
        if there.is_subset(&placed) {
            return Ok(());
        }
        for thread in &there {
            match Pid::from_raw(*thread).map(|thread| sched_setaffinity(Some(thread), set)) {
                // It may have ended.
                None | Some(Ok(()) | Err(Errno::SRCH)) => {}
                Some(Err(error)) => return Err(error.into()),
            }
        }
        placed = there;
    }
}

fn threads(process: Pid) -> Result<BTreeSet<i32>> {
    let place = || "Cannot list its threads";
    let entries = fs::read_dir(format!("/proc/{process}/task")).with_context(place)?;
    let names = entries.map(|entry| Ok(entry.with_context(place)?.file_name().to_string_lossy().into_owned()));
    names.map(|name| name.and_then(|name: String| name.parse().with_context(place))).collect()
}
