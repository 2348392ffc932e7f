//! The engine in real time: what its thread does, and when it tells. No test waits for a length of time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hw_engine::conformance::FlatMemory;
use hw_engine::{DmaEngine, EngineError, Finished, JobId, Memory, MemoryError, Route, Unlimited};
use iommu_addr::Location;

use crate::common::{Desk, FPGA, GPU, Wires, copy, devices, own, ram};

/// Memory whose copies stop half way until somebody lets them go on.
struct Gate {
    flat: FlatMemory,
    arrived: Sender<()>,
    go_on: Mutex<Receiver<()>>,
}

impl Memory for Gate {
    fn copy(&self, dst: Location, src: Location, len: u64) -> Result<(), MemoryError> {
        self.arrived.send(()).unwrap();
        self.go_on.lock().unwrap().recv().unwrap();
        self.flat.copy(dst, src, len)
    }
    fn fill(&self, dst: Location, len: u64, pattern: u64) -> Result<(), MemoryError> {
        self.flat.fill(dst, len, pattern)
    }
    fn read(&self, src: Location, into: &mut [u8]) -> Result<(), MemoryError> {
        self.flat.read(src, into)
    }
    fn write(&self, dst: Location, from: &[u8]) -> Result<(), MemoryError> {
        self.flat.write(dst, from)
    }
}

/// An engine with a little latency over a gate; what arrives at it, and what opens it.
fn gated() -> (Desk, Receiver<()>, Sender<()>) {
    let ((arrived, arrivals), (open, go_on)) = (mpsc::channel(), mpsc::channel());
    let gate = Arc::new(Gate { flat: FlatMemory::new(), arrived, go_on: Mutex::new(go_on) });
    let config = devices(Duration::from_nanos(1), 1);
    (Desk::in_real_time(&config, Arc::new(Unlimited), gate), arrivals, open)
}

/// Too many bytes to be moved on the caller's thread.
const LEN: u64 = 0x5000;

/// Every wake of the engine, as a message.
fn wakes(desk: &Desk) -> Receiver<()> {
    let (wake, woken) = mpsc::channel();
    desk.engine.on_progress(Box::new(move || wake.send(()).unwrap_or_default()));
    woken
}

fn ends(desk: &Desk, woken: &Receiver<()>, count: usize) -> Vec<Finished> {
    let mut out = Vec::new();
    while out.len() < count {
        woken.recv().unwrap();
        desk.engine.poll(&mut out);
    }
    out
}

#[test]
fn an_end_wakes_whoever_waits_for_it() {
    let desk =
        Desk::in_real_time(&devices(Duration::from_micros(1), 1), Arc::new(Unlimited), Arc::new(FlatMemory::new()));
    let woken = wakes(&desk);
    desk.send(GPU, copy(own(FPGA, 0, 100), own(GPU, 0, 100), Route::Direct));
    assert_eq!(ends(&desk, &woken, 1)[0].job, JobId(0));
}

#[test]
fn no_end_is_reported_while_bytes_move() {
    let (desk, arrivals, open) = gated();
    let woken = wakes(&desk);
    desk.send(GPU, copy(own(FPGA, 0, LEN), own(GPU, 0, LEN), Route::Direct));
    arrivals.recv().unwrap();
    desk.engine.abort(JobId(0));
    let mut out = Vec::new();
    desk.engine.poll(&mut out);
    assert_eq!(out, [], "the thread is inside the copy");
    open.send(()).unwrap();
    let end = ends(&desk, &woken, 1).remove(0);
    assert_eq!((end.bytes, end.result), (LEN, Err(EngineError::Aborted)));
}

#[test]
fn quiesce_waits_for_bytes_that_move() {
    let (desk, arrivals, open) = gated();
    desk.send(GPU, copy(own(FPGA, 0, LEN), own(GPU, 0, LEN), Route::Direct));
    desk.send(GPU, copy(own(FPGA, LEN, LEN), own(GPU, 0, LEN), Route::Direct));
    arrivals.recv().unwrap();
    let opened = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut out = Vec::new();
            desk.engine.quiesce(&mut out);
            assert!(opened.load(Ordering::SeqCst), "quiet while a copy ran");
            assert_eq!(out.len(), 2);
        });
        opened.store(true, Ordering::SeqCst);
        open.send(()).unwrap();
        open.send(()).unwrap();
    });
}

#[test]
fn quiesce_lets_short_work_end_by_itself() {
    let config = devices(Duration::from_micros(50), 1);
    let desk = Desk::in_real_time(&config, Wires::new(Duration::from_nanos(1)), Arc::new(FlatMemory::new()));
    for n in 0..10 {
        desk.send(GPU, copy(own(FPGA, 100 * n, 100), own(GPU, 0, 100), Route::Direct));
    }
    let mut out = Vec::new();
    desk.engine.quiesce(&mut out);
    assert_eq!(out.iter().filter(|end| (end.bytes, end.result) == (100, Ok(()))).count(), 10);
}

#[test]
fn quiesce_gives_up_what_would_take_for_ever() {
    // An hour a byte.
    let desk = Desk::in_real_time(
        &devices(Duration::ZERO, 1),
        Wires::new(Duration::from_secs(3600)),
        Arc::new(FlatMemory::new()),
    );
    desk.send(GPU, copy(own(FPGA, 0, 100), own(GPU, 0, 100), Route::Direct));
    let mut out = Vec::new();
    desk.engine.quiesce(&mut out);
    assert_eq!(out.iter().map(|end| end.result).collect::<Vec<_>>(), [Err(EngineError::Aborted)]);
}

#[test]
fn an_engine_that_goes_while_work_is_out_takes_its_thread_along() {
    let memory = Arc::new(FlatMemory::new());
    let desk = Desk::in_real_time(&devices(Duration::ZERO, 1), Wires::new(Duration::from_secs(3600)), memory.clone());
    desk.send(GPU, copy(ram(0x1000, 100), own(GPU, 0, 100), Route::Direct));
    drop(desk);
    assert_eq!(Arc::strong_count(&memory), 1, "nobody can write the memory any more");
}

#[test]
fn the_engine_may_be_dropped_by_whom_it_wakes() {
    let desk =
        Desk::in_real_time(&devices(Duration::from_micros(1), 1), Arc::new(Unlimited), Arc::new(FlatMemory::new()));
    let (hold, release) = mpsc::channel::<Arc<hw_sim::SimEngine>>();
    let (dropped, told) = mpsc::channel();
    let release = Mutex::new(release);
    desk.engine.on_progress(Box::new(move || {
        drop(release.lock().unwrap().recv());
        dropped.send(()).unwrap_or_default();
    }));
    desk.send(GPU, copy(own(FPGA, 0, 100), own(GPU, 0, 100), Route::Direct));
    hold.send(desk.engine).unwrap();
    told.recv().unwrap();
}

#[test]
fn the_hook_runs_first_on_the_engines_thread() {
    let (seen, sees) = mpsc::channel();
    let mut config = devices(Duration::from_nanos(1), 1);
    config.thread_hook = Some(Arc::new(move || drop(seen.send(std::thread::current().name().map(String::from)))));
    let _desk = Desk::in_real_time(&config, Arc::new(Unlimited), Arc::new(FlatMemory::new()));
    assert_eq!(sees.recv().unwrap().as_deref(), Some("sim-engine"));
}
