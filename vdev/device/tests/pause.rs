//! A pause: what was taken ends, what comes later waits and is lost in no way, everything else goes on.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use common::*;
use vdev_device::{Counter, Gauge};
use vdev_wire::{Opcode, Status};

const D: u64 = IOVA + DATA;

#[test]
fn a_paused_device_takes_no_more_work_and_ends_what_it_took() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let before = bed.submit(1, &[fill(D, 8, 1), fill(D, 8, 2)]);
    bed.drain();
    assert!(!bed.device.is_quiet(), "it is not even paused");
    bed.device.pause();
    let after = bed.submit_on(3, 1, &[fill(D + 64, 8, 3)]);
    bed.drain();
    assert_eq!(bed.engine.held(), 1, "nothing new was taken");
    assert!(!bed.device.is_quiet());
    bed.engine.release(0);
    bed.drain();
    assert!(!bed.device.is_quiet(), "the second one of the chain runs");
    bed.engine.release(0);
    bed.drain();
    assert_eq!(bed.statuses(before), [Some(Status::Ok), Some(Status::Ok)]);
    assert!(bed.is_used(before));
    assert!(bed.device.is_quiet());
    assert_eq!(bed.statuses(after), [None]);
    assert!(!bed.is_used(after));

    bed.engine.set(Mode::Inline);
    bed.device.unpause();
    assert!(!bed.device.is_quiet());
    // The driver has kicked before; nobody will again.
    while bed.device.poll().is_some_and(|wait| wait.is_zero()) {}
    assert!(bed.is_used(after));
    assert_eq!(bed.statuses(after), [Some(Status::Ok)]);
}

#[test]
fn requests_are_served_and_deadlines_pass_during_a_pause() {
    let mut bed = {
        let mut spec = spec();
        spec.limits.default_timeout = std::time::Duration::from_millis(1);
        Bed::with(spec).prepared()
    };
    bed.engine.set(Mode::Hold);
    let late = bed.submit(1, &[fill(D, 8, 1)]);
    bed.drain();
    bed.device.pause();
    bed.ok(Opcode::Probe, 0, &[]);
    bed.ok(Opcode::Map, 1, &map_bytes(0x10_0000, RW, &[(DATA + (1 << 20), PAGE)]));
    bed.until("its deadline", |bed| bed.is_used(late));
    assert_eq!(bed.statuses(late), [Some(Status::Timeout)]);
    bed.until("quiet", |bed| bed.device.is_quiet());
}

#[test]
fn a_queue_that_starts_during_a_pause_waits_too() {
    let mut bed = Bed::ready();
    bed.device.pause();
    bed.device.pause();
    assert!(bed.device.is_quiet());
    bed.device.stop_queue(2);
    let ring = bed.rings[2].ring.clone();
    bed.device.start_queue(2, ring);
    let batch = bed.submit(1, &[fill(D, 8, 1)]);
    bed.drain();
    assert!(!bed.is_used(batch) && bed.device.is_quiet());
    bed.device.unpause();
    bed.drain();
    assert!(bed.is_used(batch));
}

/// Whoever asks while queues run must not be told that a device is quiet that is not.
#[test]
fn a_device_that_says_it_is_quiet_completes_nothing_more() {
    let mut bed = Bed::ready();
    for _ in 0..200 {
        let batch = bed.submit(1, &[fill(D, 8, 1), fill(D + 8, 8, 1)]);
        let other = bed.submit_on(3, 1, &[fill(D + 64, 8, 2).stream(9)]);
        let records = |bed: &Bed| [batch, other].map(|batch| bed.statuses(batch));
        let when_quiet = std::thread::scope(|scope| {
            for queue in [2, 3] {
                let device = &bed.device;
                scope.spawn(move || while device.drain(queue) {});
            }
            bed.device.pause();
            while !bed.device.is_quiet() {
                bed.device.poll();
            }
            records(&bed)
        });
        bed.drain();
        assert_eq!(records(&bed), when_quiet);
        bed.device.unpause();
        bed.drain();
        assert!(bed.is_used(batch) && bed.is_used(other));
    }
}

/// What the timekeeper has in its hands is in no list.
#[test]
fn a_device_that_scrubs_is_not_quiet() {
    let piece = 256 << 10;
    let mut bed = Bed::build(spec(), |memory| Arc::new(hw_host::HostEngine::new(memory)), piece).prepared();
    let handle = bed.alloc(1, GPU, 1 << 40, 4 * piece);
    let call = bed.start(Opcode::Free, 1, zerocopy::IntoBytes::as_bytes(&vdev_wire::Free { handle: handle.into() }));
    bed.device.drain(0);
    bed.device.pause();
    let (device, seen) = (Arc::downgrade(&bed.device), Arc::new(Mutex::new(Vec::new())));
    let told = Arc::clone(&seen);
    let ask = move || told.lock().unwrap().extend(device.upgrade().map(|device| device.is_quiet()));
    *bed.engine.meanwhile.lock().unwrap() = Some(Arc::new(ask));
    while bed.device.poll().is_some_and(|wait| wait.is_zero()) {}
    assert_eq!(*seen.lock().unwrap(), [false; 4], "asked at each piece");
    *bed.engine.meanwhile.lock().unwrap() = None;
    assert_eq!(bed.answer(call).unwrap().status, Status::Ok);
    assert!(bed.device.is_quiet());
}

/// Whoever finds a number first and tells it last would leave the wrong one behind.
#[test]
fn the_number_in_flight_is_true_once_a_device_is_quiet() {
    let mut bed = Bed::ready();
    bed.seen.gauges_slowly.store(true, Ordering::Relaxed);
    for _ in 0..100 {
        bed.engine.set(Mode::Hold);
        bed.device.unpause();
        bed.submit(1, &[fill(D, 8, 1)]);
        bed.drain();
        assert_eq!(bed.seen.gauge_of(Gauge::InFlight), 1);
        bed.device.pause();
        let (began, ends) = (Barrier::new(2), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                bed.device.gauges();
                began.wait();
                while !ends.load(Ordering::Relaxed) {
                    bed.device.gauges();
                }
            });
            began.wait();
            bed.engine.release(0);
            while !bed.device.is_quiet() {
                bed.device.poll();
            }
            ends.store(true, Ordering::Relaxed);
        });
        assert_eq!(bed.seen.gauge_of(Gauge::InFlight), 0);
        bed.rings[2].take_used();
    }
}

/// The driver has its work back before the observer hears of it.
#[test]
fn once_the_turns_are_over_the_observer_has_heard_of_all_that_a_quiet_device_did() {
    let mut bed = Bed::ready();
    bed.seen.counts_slowly.store(true, Ordering::Relaxed);
    for round in 1..=100 {
        bed.engine.set(Mode::Hold);
        bed.device.unpause();
        bed.submit(1, &[fill(D, 8, 1)]);
        bed.drain();
        bed.device.pause();
        let ends = AtomicBool::new(false);
        let seen = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    bed.device.poll();
                }
            });
            bed.engine.release(0);
            while !bed.device.is_quiet() {
                std::thread::yield_now();
            }
            bed.device.await_turns();
            ends.store(true, Ordering::Relaxed);
            (bed.seen.count_of(Counter::Ops), bed.seen.gauge_of(Gauge::InFlight))
        });
        assert_eq!(seen, (round, 0));
        bed.rings[2].take_used();
    }
}
