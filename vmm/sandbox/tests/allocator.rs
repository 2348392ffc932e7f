//! Many confined threads allocate and free at once without the allocator opening a file, which would end the process.
//!
//! Without the test harness, because it starts threads before the filters are compiled, and a worker does not.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Barrier;
use std::thread;

use vmm_sandbox::{Class, Mode, Sandbox};

const THREADS: usize = 32;

fn main() {
    let sandbox = Sandbox::new(Mode::Enforce, &[Class::Timekeeper], false).unwrap();
    let all = Barrier::new(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                sandbox.apply(Class::Timekeeper).unwrap();
                // Small enough for an arena, and together more than an arena keeps when they are freed.
                let held: Vec<Vec<u8>> = (0..64).map(|_| vec![1; 100_000]).collect();
                all.wait();
                drop(held);
            });
        }
    });
    println!("1 passed, 0 failed");
}
