//! Turns on the processor, as the kernel tells of them.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::thread;

/// The turn of the calling thread in nanoseconds, on kernels that say it.
fn turn() -> Option<u64> {
    let sched = fs::read_to_string("/proc/thread-self/sched").ok()?;
    let line = sched.lines().find(|line| line.starts_with("se.slice"))?;
    line.rsplit(':').next()?.trim().parse().ok()
}

#[test]
fn threads_started_afterwards_have_short_turns_too() {
    let Some(before) = turn() else {
        println!("SKIP: this kernel does not tell how long turns are (CONFIG_SCHED_DEBUG, Linux 6.12)");
        return;
    };
    let asked = thread::spawn(|| {
        vmm_sandbox::process::take_short_turns().unwrap();
        thread::spawn(turn).join().unwrap()
    });
    let after = asked.join().unwrap();
    assert!(after.is_some_and(|after| after < before), "{after:?} after {before}");
}
