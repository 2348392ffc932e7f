//! Queues and devices end: nothing is lost, nothing is touched afterwards.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::*;
use hw_engine::{Initiated, Raised};
use hw_host::HostEngine;
use iommu_addr::{DomainId, Iova, Range};
use vdev_device::Gauge;
use vdev_wire::{Opcode, Status};
use zerocopy::IntoBytes;

const D: u64 = IOVA + DATA;

fn touches(bed: &Bed, queue: usize) -> usize {
    bed.rings[queue].ring.touches.load(Ordering::SeqCst)
}

#[test]
fn stopped_queue_lets_its_chains_end_and_is_not_touched_afterwards() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[fill(D, 8, 1), fill(D + 64, 8, 2)]);
    bed.drain();
    let (device, engine) = (bed.device.clone(), bed.engine.clone());
    let stopper = std::thread::spawn(move || device.stop_queue(2));
    while engine.state.lock().unwrap().seen.len() < 2 {
        engine.release_all();
        std::thread::yield_now();
    }
    engine.release_all();
    stopper.join().unwrap();
    assert!(bed.is_used(batch));
    let before = touches(&bed, 2);
    bed.submit(1, &[fill(D, 8, 3)]);
    bed.drain();
    assert_eq!(touches(&bed, 2), before);
    bed.device.start_queue(2, bed.rings[2].ring.clone());
    bed.engine.set(Mode::Inline);
    bed.drain();
    assert_eq!(bed.ram(DATA, 1), [3], "what was offered meanwhile");
}

#[test]
fn queue_whose_work_does_not_end_is_cancelled_after_a_while() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[fill(D, 8, 1), fill(D + 64, 8, 2)]);
    bed.drain();
    bed.device.stop_queue(2);
    assert!(bed.is_used(batch));
    assert_eq!(bed.statuses(batch), [Some(Status::Cancelled), Some(Status::Cancelled)]);
    assert_eq!(bed.engine.state.lock().unwrap().aborted.len(), 1, "what ran was aborted first");
}

#[test]
fn cut_work_that_a_full_engine_keeps_waiting_is_cancelled_too() {
    let mut bed = Bed::build(spec(), |memory| Arc::new(HostEngine::new(memory)), 4096).prepared();
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[fill(D, 3 * 4096, 1).timeout(20_000)]);
    bed.drain();
    bed.engine.set(Mode::Full);
    bed.engine.release(0);
    bed.drain();
    bed.device.stop_queue(2);
    assert!(bed.is_used(batch));
    assert_eq!(bed.statuses(batch), [Some(Status::Cancelled)]);
}

#[test]
fn control_queue_that_stops_loses_no_answer_of_work_that_can_be_aborted() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[fill(D, 8, 1)]);
    let [src, dst] = [D + PAGE, D + 2 * PAGE].map(|at| Range::with_len(Iova(at), 64).unwrap());
    bed.engine.raise(Raised::Initiated(Initiated { endpoint: FPGA, domain: DomainId(1), src, dst }));
    bed.drain();
    assert_eq!(bed.engine.held(), 2, "a driver's work and a kernel");
    let call = bed.start(Opcode::Unmap, 1, unmap(0, u64::MAX).as_bytes());
    assert_eq!(bed.answer(call), None);
    bed.device.stop_queue(0);
    assert_eq!(bed.answer(call).expect("before the ring was left alone").status, Status::Ok);
    assert_eq!(bed.statuses(batch), [Some(Status::Cancelled)]);
}

#[test]
fn control_queue_stops_although_a_request_still_waits() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    *bed.engine.abort_ends.lock().unwrap() = false;
    bed.submit(1, &[fill(D, 8, 1)]);
    bed.drain();
    let call = bed.start(Opcode::Unmap, 1, unmap(0, u64::MAX).as_bytes());
    assert_eq!(bed.answer(call), None);
    bed.device.stop_queue(0);
    let before = touches(&bed, 0);
    bed.engine.release_all();
    bed.drain();
    assert_eq!(touches(&bed, 0), before, "its answer goes nowhere");
    assert_eq!(bed.seen.gauge_of(Gauge::Mappings), 0, "but it took effect");
    bed.device.start_queue(0, bed.rings[0].ring.clone());
    bed.ok(Opcode::Probe, 0, &[]);
}

#[test]
fn stopping_a_queue_that_is_not_there_or_not_started_does_nothing() {
    let bed = Bed::new();
    bed.device.stop_queue(2);
    bed.device.stop_queue(2);
    bed.device.stop_queue(77);
    assert!(!bed.device.drain(2));
    assert!(!bed.device.drain(77));
    bed.device.start_queue(77, bed.rings[2].ring.clone());
}

#[test]
fn shutdown_ends_everything_and_touches_no_ring_afterwards() {
    let mut bed = Bed::ready();
    bed.alloc(1, GPU, 1 << 40, PAGE);
    bed.attach(2, FPGA);
    bed.engine.set(Mode::Hold);
    let running = bed.submit(1, &[fill(D, 8, 1), fill(1 << 40, 8, 2)]);
    bed.drain();
    let control = bed.start(Opcode::Unmap, 1, unmap(D, D + (1 << 20) - 1).as_bytes());
    assert_eq!(bed.answer(control), None);
    bed.engine.set(Mode::Full);
    let starved = bed.submit_on(3, 1, &[fill(D, 8, 3).stream(4)]);
    bed.drain();
    bed.device.shutdown();
    assert!(bed.is_used(running) && bed.is_used(starved));
    assert!(bed.statuses(running).iter().chain(&bed.statuses(starved)).all(|status| *status != Some(Status::Ok)));
    bed.assert_empty();
    assert_eq!(bed.engine.state.lock().unwrap().forgotten.len(), 2);
    let before: Vec<_> = (0..4).map(|queue| touches(&bed, queue)).collect();
    bed.submit(1, &[fill(D, 8, 1)]);
    bed.drain();
    bed.device.shutdown();
    assert_eq!((0..4).map(|queue| touches(&bed, queue)).collect::<Vec<_>>(), before);
}

#[test]
fn device_dropped_without_shutdown_answers_what_is_open() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[fill(D, 8, 1)]);
    bed.drain();
    let other = Bed::new();
    bed.device = other.device.clone();
    assert!(bed.is_used(batch));
    assert_eq!(bed.statuses(batch), [Some(Status::IoErr)]);
}

#[test]
fn progress_of_the_engine_wakes_the_timekeeper() {
    let mut bed = Bed::ready();
    let (send, receive) = std::sync::mpsc::channel();
    bed.device.on_progress(std::sync::Arc::new(move || {
        let _ = send.send(());
    }));
    bed.engine.set(Mode::Hold);
    bed.submit(1, &[fill(D, 8, 1)]);
    bed.device.drain(2);
    receive.recv().expect("woken to watch the deadline");
    while receive.try_recv().is_ok() {}
    bed.engine.release(0);
    receive.recv().expect("woken by the engine");
}

/// A connection that ends and a process that is told to end do so at the same time, and neither may take the other's word for that queues rest.
#[test]
fn two_who_end_the_device_at_a_time_have_nothing_refused_that_was_allowed() {
    const WORKS: usize = 16;
    for _ in 0..80 {
        let mut bed = Bed::ready();
        let works: Vec<_> = (0..WORKS).map(|_| fill(IOVA + DATA, 64 << 10, 1)).collect();
        let batches: Vec<_> =
            [2, 3].iter().flat_map(|queue| [*queue; 4]).map(|queue| bed.submit_on(queue, 1, &works)).collect();
        let start = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for queue in [2, 3] {
                let (device, start) = (&bed.device, &start);
                scope.spawn(move || {
                    start.wait();
                    while device.drain(queue) {}
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    start.wait();
                    bed.device.shutdown();
                });
            }
        });
        let statuses = batches.iter().flat_map(|batch| bed.statuses(*batch)).flatten();
        let odd: Vec<_> = statuses.filter(|status| ![Status::Ok, Status::Cancelled].contains(status)).collect();
        assert!(odd.is_empty() && bed.seen.faults.lock().unwrap().is_empty(), "{odd:?}");
    }
}
