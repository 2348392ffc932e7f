//! How much one turn moves, and who waits for it: large copies at memory speed beside small ones. Counted in bytes, not in time.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::*;
use hw_engine::{Work, total_len};
use hw_host::HostEngine;
use vdev_device::DeviceSpec;
use vdev_wire::WorkDescriptor;

const KIB: u64 = 1 << 10;
/// As the engines that execute at once have it.
const PIECE: u64 = 256 * KIB;
/// What a turn may move of work that waited, and again of work that has just come: each goes on until it has moved a piece.
const MOST: u64 = 4 * PIECE;
const LARGE: u64 = 1 << 20;

fn bed() -> Bed {
    Bed::build(spec(), |memory| Arc::new(HostEngine::new(memory)), PIECE).prepared()
}

fn large(stream: u32) -> WorkDescriptor {
    fill(IOVA + DATA, LARGE, 0).stream(stream)
}

fn small(stream: u32) -> WorkDescriptor {
    fill(IOVA + DATA, 64, 0).stream(stream)
}

/// One turn of a queue: bytes that it moved.
fn turn(bed: &Bed, queue: u16) -> u64 {
    let before = bed.engine.state.lock().unwrap().seen.len();
    bed.device.drain(queue);
    let state = bed.engine.state.lock().unwrap();
    let len = |work: &Work| if let Work::Fill { dst, .. } = work { total_len(dst) } else { 0 };
    state.seen[before..].iter().map(|transfer| len(&transfer.work)).sum()
}

#[test]
fn a_turn_moves_little_however_much_there_is() {
    let mut bed = bed();
    let works: Vec<_> = (0..60).map(large).collect();
    let batches = [bed.submit(1, &works[..30]), bed.submit(1, &works[30..])];
    let mut moved = 0;
    while moved < 60 * LARGE {
        let one = turn(&bed, 2);
        assert!(one > 0 && one <= MOST, "{one}");
        moved += one;
    }
    assert!(batches.into_iter().all(|batch| bed.is_used(batch)));
}

/// A queue that is disabled, or whose ring breaks, gets no turn to go on with what the last one left.
#[test]
fn whoever_takes_no_further_turn_leaves_the_rest_to_the_timekeeper() {
    let mut bed = bed();
    let woken = Arc::new(AtomicU64::new(0));
    let wake = Arc::clone(&woken);
    bed.device.on_progress(Arc::new(move || {
        wake.fetch_add(1, Ordering::Relaxed);
    }));
    let batch = bed.submit(1, &[large(0)]);
    assert!(bed.device.drain(2));
    woken.store(0, Ordering::Relaxed);
    bed.device.rest();
    assert_eq!(woken.load(Ordering::Relaxed), 1);
    while bed.device.poll().is_some_and(|wait| wait.is_zero()) {}
    assert!(bed.is_used(batch));
    bed.device.rest();
    assert_eq!(woken.load(Ordering::Relaxed), 1, "nothing is left");
}

#[test]
fn small_work_on_the_same_queue_waits_for_a_piece_of_each_large_one() {
    let mut bed = bed();
    let first: Vec<_> = (0..8).map(large).collect();
    bed.submit(1, &first);
    turn(&bed, 2);
    let little = bed.submit(1, &[small(9)]);
    let mut moved = 0;
    while !bed.is_used(little) {
        let one = turn(&bed, 2);
        assert!(one > 0);
        moved += one;
    }
    assert!(moved <= 8 * PIECE + MOST, "{moved} of {} came first", 8 * LARGE);
}

#[test]
fn small_work_on_another_queue_waits_for_no_turn_of_this_one() {
    let mut bed = bed();
    let works: Vec<_> = (0..8).map(large).collect();
    bed.submit(1, &works);
    turn(&bed, 2);
    let little = bed.submit_on(3, 1, &[small(9)]);
    let moved = turn(&bed, 3);
    assert!(bed.is_used(little), "within its queue's next turn");
    assert!(moved <= MOST, "{moved}");
}

#[test]
fn what_is_put_off_keeps_its_order_and_its_end() {
    let mut bed = bed();
    // All budget goes to the first; the others are put off, two of them in one stream.
    let works = [large(1), large(2), small(3), small(3), fill(0x5000, 64, 0).stream(4), small(4), small(5)];
    let batch = bed.submit(1, &works);
    turn(&bed, 2);
    assert_eq!(bed.statuses(batch)[3], None);
    bed.drain();
    use vdev_wire::Status::{Cancelled, Fault, Ok};
    let ends: Vec<_> = bed.statuses(batch).into_iter().map(Option::unwrap).collect();
    assert_eq!(ends, [Ok, Ok, Ok, Ok, Fault, Cancelled, Ok]);
    assert!(bed.is_used(batch));
}

#[test]
fn whoever_begins_more_while_he_collects_looks_again_at_once() {
    let mut bed = bed();
    bed.engine.set(Mode::Hold);
    bed.submit(1, &[large(0)]);
    turn(&bed, 2);
    bed.engine.release(0);
    assert_eq!(bed.device.poll(), Some(Duration::ZERO), "the engine has said nothing of what began since");
    assert_eq!(bed.engine.held(), 1);
    assert_ne!(bed.device.poll(), Some(Duration::ZERO));
}

#[test]
fn what_an_engine_was_given_is_rung_for_before_the_turn_ends() {
    let mut bed = bed();
    bed.engine.set(Mode::Hold);
    let given = |bed: &Bed| {
        let state = bed.engine.state.lock().unwrap();
        assert_eq!(state.rung, state.seen.len());
        state.seen.len()
    };
    bed.submit(1, &[large(0), large(1)]);
    turn(&bed, 2);
    let first = given(&bed);
    // Also what begins where ends are collected.
    bed.engine.release(0);
    bed.device.poll();
    assert_eq!((first, given(&bed)), (2, 3));
}

#[test]
fn a_turn_takes_no_more_than_it_can_move_unless_the_engine_moves_it() {
    let mut bed = bed();
    // How many of four chains two turns begin, each of which is as much as a turn moves.
    let begun = |bed: &mut Bed, mode| {
        bed.engine.set(mode);
        (0..4).for_each(|stream| _ = bed.submit(1, &[fill(IOVA + DATA, PIECE, 0).stream(stream)]));
        let turns = [turn(bed, 2) / PIECE, turn(bed, 2) / PIECE];
        bed.engine.set(Mode::Inline);
        while bed.engine.held() > 0 {
            bed.engine.release(0);
        }
        bed.drain();
        turns
    };
    assert_eq!(begun(&mut bed, Mode::Inline), [1, 1]);
    assert_eq!(begun(&mut bed, Mode::Hold), [1, 3], "the first turn does not know it yet");
    assert_eq!(begun(&mut bed, Mode::Hold), [4, 0], "now it does");
}

#[test]
fn a_queue_that_does_not_linger_has_the_timekeeper_look_at_once() {
    let mut bed = bed();
    let wakes = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&wakes);
    bed.device.on_progress(Arc::new(move || _ = count.fetch_add(1, Ordering::Relaxed)));
    bed.engine.set(Mode::Hold);
    // The second deadline is later than the first, and wakes nobody.
    for stream in 0..2 {
        bed.submit(1, &[large(stream)]);
        turn(&bed, 2);
        assert_eq!(wakes.swap(0, Ordering::Relaxed), 1, "{stream}");
    }
}

#[test]
fn a_queue_that_lingers_collects_ends_itself_and_has_the_timekeeper_look_when_it_rests() {
    let spec = DeviceSpec { linger: Duration::from_millis(100), ..spec() };
    let mut bed = Bed::build(spec, |memory| Arc::new(HostEngine::new(memory)), PIECE).prepared();
    let (wakes, woken) = (Arc::new(AtomicU64::new(0)), |wakes: &AtomicU64| wakes.swap(0, Ordering::Relaxed));
    let count = Arc::clone(&wakes);
    bed.device.on_progress(Arc::new(move || _ = count.fetch_add(1, Ordering::Relaxed)));
    bed.engine.set(Mode::Hold);
    // The first deadline that there is to watch.
    let first = bed.submit(1, &[large(0)]);
    assert!(bed.device.drain(2));
    assert_eq!(woken(&wakes), 1);
    let pieces = LARGE / PIECE;
    for piece in 1..=pieces {
        assert_eq!(bed.engine.held(), 1);
        bed.engine.release(0);
        woken(&wakes);
        assert!(bed.device.drain(2));
        assert_eq!(woken(&wakes), 0, "piece {piece}");
    }
    assert!(bed.is_used(first));
    bed.submit(1, &[large(0)]);
    while bed.device.drain(2) {}
    assert_eq!(woken(&wakes), 1, "what is under way when it rests is the timekeeper's");
}

#[test]
fn what_is_under_way_when_a_queue_is_left_in_the_middle_is_the_timekeepers() {
    let spec = DeviceSpec { linger: Duration::from_millis(100), ..spec() };
    let mut bed = Bed::build(spec, |memory| Arc::new(HostEngine::new(memory)), PIECE).prepared();
    let wakes = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&wakes);
    bed.device.on_progress(Arc::new(move || _ = count.fetch_add(1, Ordering::Relaxed)));
    let woken = || wakes.swap(0, Ordering::Relaxed);
    bed.device.rest();
    assert_eq!(woken(), 0, "there is nothing");
    bed.engine.set(Mode::Hold);
    bed.submit(1, &[large(0)]);
    assert!(bed.device.drain(2), "it lingers");
    woken();
    // As when the front-end disables the queue: nobody drains it any more.
    bed.device.rest();
    assert_eq!(woken(), 1);
}
