//! Streams: order, credits, errors, cancelling, deadlines.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use std::sync::Arc;

use common::*;
use hw_engine::EngineError;
use vdev_device::{Counter, DeviceSpec, Gauge};
use vdev_wire::{Status, WorkDescriptor};

const D: u64 = IOVA + DATA;
const OK: Option<Status> = Some(Status::Ok);
const CANCELLED: Option<Status> = Some(Status::Cancelled);
const BUSY: Option<Status> = Some(Status::Busy);

fn limited(f: impl FnOnce(&mut DeviceSpec)) -> Bed {
    let mut spec = spec();
    f(&mut spec);
    Bed::with(spec).prepared()
}

/// Eight bytes at place `n`, in a stream.
fn work(stream: u32, n: u64) -> WorkDescriptor {
    fill(D + 64 * n, 8, n).stream(stream).cookie(n)
}

fn works(stream: u32, from: u64, to: u64) -> Vec<WorkDescriptor> {
    (from..to).map(|n| work(stream, n)).collect()
}

#[test]
fn one_stream_runs_one_after_the_other_and_others_beside_it() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[work(1, 0), work(1, 1), work(2, 2), work(1, 3), work(3, 4)]);
    bed.drain();
    assert_eq!(bed.engine.held(), 3, "the head of each stream");
    bed.engine.release(1);
    bed.drain();
    assert_eq!(bed.statuses(batch), [None, None, OK, None, None], "a poller sees each at once");
    assert!(!bed.is_used(batch), "the chain comes back when all of it is done");
    bed.engine.release(0);
    bed.drain();
    assert_eq!(bed.statuses(batch), [OK, None, OK, None, None]);
    assert_eq!(bed.engine.held(), 2, "the next of stream 1 was issued");
    for _ in 0..3 {
        bed.engine.release(0);
        bed.drain();
    }
    assert!(bed.is_used(batch));
    let cookies: Vec<u64> = bed.records(batch).iter().map(|record| record.cookie.get()).collect();
    assert_eq!(cookies, [0, 1, 2, 3, 4]);
    let order: Vec<_> = bed.engine.state.lock().unwrap().seen.iter().map(|t| format!("{:?}", t.work)).collect();
    assert_eq!(order.len(), 5);
}

#[test]
fn chains_of_both_queues_share_a_stream_in_order() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let first = bed.submit_on(2, 1, &[work(1, 0)]);
    bed.drain();
    let second = bed.submit_on(3, 1, &[work(1, 1)]);
    bed.drain();
    assert_eq!(bed.engine.held(), 1);
    bed.engine.release(0);
    bed.drain();
    assert_eq!((bed.is_used(first), bed.is_used(second)), (true, false));
    bed.engine.release(0);
    bed.drain();
    assert!(bed.is_used(second));
}

#[test]
fn work_behind_what_waits_is_not_overtaken_by_an_engine_that_executes_at_once() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let first = bed.submit(1, &[work(1, 0), work(1, 1)]);
    bed.drain();
    bed.engine.set(Mode::Inline);
    let second = bed.submit(1, &[work(1, 2), work(2, 3)]);
    bed.drain();
    assert_eq!(bed.statuses(first), [None, None]);
    assert_eq!(bed.statuses(second), [None, OK], "another stream is not held up");
    bed.engine.release(0);
    bed.drain();
    assert_eq!(bed.statuses(first), [OK, OK]);
    assert_eq!(bed.statuses(second), [OK, OK]);
    assert!(bed.is_used(first) && bed.is_used(second));
}

#[test]
fn credits_of_a_stream_answer_busy_and_leave_it_working() {
    let mut bed = limited(|spec| spec.limits.stream_credits = 3);
    bed.engine.set(Mode::Hold);
    let first = bed.submit(1, &works(1, 0, 5));
    bed.drain();
    assert_eq!(bed.statuses(first), [None, None, None, BUSY, BUSY], "one runs, two wait");
    let other = bed.submit(1, &works(2, 5, 6));
    bed.drain();
    assert_eq!(bed.statuses(other), [None], "credits are each stream's own");
    bed.engine.release(0);
    bed.drain();
    let second = bed.submit(1, &works(1, 6, 8));
    bed.drain();
    assert_eq!(bed.statuses(second), [None, BUSY], "one credit came back, and BUSY is no error");
    while bed.engine.held() > 0 {
        bed.engine.release(0);
        bed.drain();
    }
    assert_eq!(bed.statuses(first)[..3], [OK; 3]);
    assert!(bed.is_used(first) && bed.is_used(second));
    bed.engine.set(Mode::Inline);
    assert!(bed.run(1, &works(1, 0, 3)).iter().all(|record| status(record) == Status::Ok));
}

#[test]
fn credits_of_the_tenant_count_every_stream_and_domain() {
    let mut bed = limited(|spec| spec.limits.max_in_flight = 3);
    bed.attach(2, GPU);
    bed.map(2, DATA, PAGE);
    bed.engine.set(Mode::Hold);
    let first = bed.submit(1, &[work(1, 0), work(2, 1)]);
    let second = bed.submit_on(3, 2, &[work(1, 2), work(2, 3)]);
    bed.drain();
    assert_eq!(bed.statuses(first), [None, None]);
    assert_eq!(bed.statuses(second), [None, BUSY]);
    assert_eq!(bed.seen.gauge_of(Gauge::InFlight), 3);
    bed.engine.release_all();
    bed.drain();
    assert_eq!(bed.seen.gauge_of(Gauge::InFlight), 0);
    bed.engine.set(Mode::Inline);
    assert!(bed.run(1, &works(1, 0, 20)).iter().all(|record| status(record) == Status::Ok), "work that ends at once");
}

#[test]
fn streams_of_a_domain_are_limited_and_go_when_idle() {
    let mut bed = limited(|spec| spec.limits.max_streams = 2);
    for stream in 0..20 {
        bed.run_one(1, work(stream, 0));
    }
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[work(1, 0), work(2, 1), work(3, 2), work(2, 3)]);
    bed.drain();
    assert_eq!(bed.statuses(batch), [None, None, Some(Status::Quota), None]);
    bed.attach(2, GPU);
    bed.map(2, DATA, PAGE);
    let other = bed.submit(2, &[work(3, 4)]);
    bed.drain();
    assert_eq!(bed.statuses(other), [None], "another domain has its own");
    while bed.engine.held() > 0 {
        bed.engine.release(0);
        bed.drain();
    }
    bed.engine.set(Mode::Inline);
    assert_eq!(status(&bed.run_one(1, work(3, 2))), Status::Ok);
    bed.run_one(1, fill(0x5000, 8, 0).stream(4));
    bed.run_one(1, fill(0x5000, 8, 0).stream(5));
    assert_eq!(status(&bed.run_one(1, work(6, 0))), Status::Quota, "streams in error count");
    bed.reset_stream(1, 4);
    assert_eq!(status(&bed.run_one(1, work(6, 0))), Status::Ok);
}

#[test]
fn first_error_cancels_what_follows_until_the_stream_is_reset() {
    let mut bed = Bed::ready();
    let bad = fill(0x5000, 8, 0).stream(1);
    let batch = bed.submit(1, &[work(1, 0), bad, work(1, 1), work(2, 2), work(1, 3)]);
    bed.drain();
    assert!(bed.is_used(batch));
    assert_eq!(bed.statuses(batch), [OK, Some(Status::Fault), CANCELLED, OK, CANCELLED]);
    assert_eq!(status(&bed.run_one(1, work(1, 4))), Status::Cancelled, "what arrives later too");
    assert_eq!(bed.ram(DATA + 64 * 4, 8), [0; 8]);
    bed.reset_stream(1, 2);
    assert_eq!(status(&bed.run_one(1, work(1, 4))), Status::Cancelled, "another stream was reset");
    bed.reset_stream(1, 1);
    assert_eq!(status(&bed.run_one(1, work(1, 4))), Status::Ok);
}

#[test]
fn malformed_work_fails_in_its_turn() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let mut bad = work(1, 1);
    bad.opcode = 99.into();
    let batch = bed.submit(1, &[work(1, 0), bad, work(1, 2)]);
    bed.drain();
    assert_eq!(bed.statuses(batch), [None; 3], "earlier work of the stream goes first");
    bed.engine.release(0);
    bed.drain();
    assert_eq!(bed.statuses(batch), [OK, Some(Status::Unsupp), CANCELLED]);
}

#[test]
fn error_of_an_engine_fails_the_stream_and_what_waits() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let first = bed.submit(1, &works(1, 0, 2));
    let second = bed.submit_on(3, 1, &works(1, 2, 4));
    bed.drain();
    bed.engine.fail(0, 3, EngineError::Device { code: 1 });
    bed.drain();
    assert_eq!(bed.statuses(first), [Some(Status::IoErr), CANCELLED]);
    assert_eq!(bed.statuses(second), [CANCELLED, CANCELLED]);
    assert_eq!(bed.records(first)[0].bytes.get(), 3);
    assert!(bed.is_used(first) && bed.is_used(second));
    bed.reset_stream(1, 1);
    let third = bed.submit(1, &[work(1, 5)]);
    bed.drain();
    bed.engine.release(0);
    bed.drain();
    assert_eq!(bed.statuses(third), [OK]);
}

#[test]
fn cancel_ends_what_waits_and_asks_what_runs_to_stop() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    *bed.engine.abort_ends.lock().unwrap() = false;
    let batch = bed.submit(1, &[work(1, 0), work(1, 1), work(1, 2), work(1, 1), work(2, 1)]);
    bed.drain();
    assert_eq!(bed.cancel(1, 1, Some(1)), (2, 0));
    assert_eq!(bed.statuses(batch), [None, CANCELLED, None, CANCELLED, None], "by cookie, in its stream only");
    assert_eq!(bed.cancel(1, 1, Some(0)), (0, 1), "it runs already");
    assert_eq!(bed.cancel(1, 1, None), (1, 1));
    assert_eq!(bed.engine.state.lock().unwrap().aborted.len(), 1, "asked once");
    assert_eq!(bed.statuses(batch), [None, CANCELLED, CANCELLED, CANCELLED, None], "it has not stopped yet");
    bed.engine.fail(0, 3, EngineError::Aborted);
    bed.drain();
    assert_eq!(bed.statuses(batch)[0], CANCELLED);
    assert_eq!(bed.records(batch)[0].bytes.get(), 3);
    assert_eq!(bed.cancel(1, 2, None), (0, 1));
    bed.engine.release_all();
    bed.drain();
    assert_eq!(bed.statuses(batch)[4], OK, "it could not be stopped any more");
    assert!(bed.is_used(batch));
    bed.engine.set(Mode::Inline);
    assert_eq!(status(&bed.run_one(1, work(1, 3))), Status::Ok, "cancelling is no error of the stream");
    assert_eq!(bed.seen.gauge_of(Gauge::InFlight), 0);
}

#[test]
fn work_that_was_cancelled_while_it_ran_does_not_cancel_what_follows() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[work(1, 0), work(1, 1)]);
    bed.drain();
    assert_eq!(bed.cancel(1, 1, Some(0)), (0, 1));
    bed.drain();
    assert_eq!(bed.statuses(batch), [CANCELLED, None]);
    bed.engine.release_all();
    bed.drain();
    assert_eq!(bed.statuses(batch), [CANCELLED, OK]);
}

#[test]
fn long_work_can_be_cancelled_between_its_pieces() {
    let mut bed = Bed::ready();
    bed.ok(vdev_wire::Opcode::Map, 1, &map_bytes(1 << 36, RW, &[(DATA + (8 << 20), 64 << 20)]));
    let batch = bed.submit(1, &[fill(1 << 36, 64 << 20, 1).cookie(4)]);
    assert!(bed.device.drain(2));
    let cancel = vdev_wire::Cancel { stream: 0.into(), flags: 0.into(), cookie: 4.into() };
    let call = bed.start(vdev_wire::Opcode::Cancel, 1, zerocopy::IntoBytes::as_bytes(&cancel));
    bed.device.drain(0);
    let reply: vdev_wire::CancelReply = bed.answer(call).unwrap().read();
    assert_eq!((reply.cancelled.get(), reply.running.get()), (0, 1));
    assert_eq!(bed.statuses(batch), [CANCELLED]);
    let bytes = bed.records(batch)[0].bytes.get();
    assert!(bytes > 0 && bytes < 64 << 20, "{bytes} bytes were moved before");
}

/// Has a CANCEL served while the engine takes the next transfer, and what `turn` then leaves running end. Answers what was said of that work.
fn cancel_meanwhile(bed: &mut Bed, cookie: Option<u64>, turn: impl FnOnce(&mut Bed)) -> (u32, u32) {
    let (flags, cookie) = (u32::from(cookie.is_none()), cookie.unwrap_or(0));
    let cancel = vdev_wire::Cancel { stream: 0.into(), flags: flags.into(), cookie: cookie.into() };
    let call = bed.start(vdev_wire::Opcode::Cancel, 1, zerocopy::IntoBytes::as_bytes(&cancel));
    let device = Arc::downgrade(&bed.device);
    let serve = move || {
        let _ = device.upgrade().map(|device| device.drain(0));
    };
    *bed.engine.meanwhile.lock().unwrap() = Some(Arc::new(serve));
    turn(bed);
    *bed.engine.meanwhile.lock().unwrap() = None;
    let reply: vdev_wire::CancelReply = bed.answered(call).expect("it was served").read();
    bed.drain();
    (reply.cancelled.get(), reply.running.get())
}

#[test]
fn work_is_cancelled_while_a_thread_has_it_in_its_hands() {
    const LONG: u64 = 64 << 20;
    let mut bed = Bed::ready();
    bed.ok(vdev_wire::Opcode::Map, 1, &map_bytes(1 << 36, RW, &[(DATA + (8 << 20), LONG)]));
    let long = |cookie| fill(1 << 36, LONG, 1).cookie(cookie);
    let ended_early = |bed: &Bed, batch| {
        let record = bed.records(batch)[0];
        assert_eq!(Status::from_raw(record.status.get()), CANCELLED);
        assert!(record.bytes.get() < LONG, "{} bytes were moved", record.bytes.get());
    };
    for cookie in [Some(4), None] {
        // When it has just come, and when it goes on.
        for turns in 0..2 {
            let batch = bed.submit(1, &[long(4)]);
            (0..turns).for_each(|_| assert!(bed.device.drain(2)));
            let told = cancel_meanwhile(&mut bed, cookie, |bed| assert!(bed.device.drain(2)));
            assert_eq!(told, (0, 1), "after {turns} turns");
            ended_early(&bed, batch);
        }
        // While an engine takes it that carries it out later.
        bed.engine.set(Mode::Hold);
        let batch = bed.submit(1, &[long(4)]);
        assert_eq!(
            cancel_meanwhile(&mut bed, cookie, |bed| {
                bed.device.drain(2);
            }),
            (0, 1)
        );
        assert_eq!(bed.engine.held(), 0, "it was asked to stop");
        ended_early(&bed, batch);
        // While a full engine takes none of it.
        let batch = bed.submit(1, &[long(4)]);
        let full = Arc::clone(&bed.engine);
        let fill_up = |bed: &mut Bed| {
            full.set(Mode::Full);
            bed.device.drain(2);
        };
        assert_eq!(cancel_meanwhile(&mut bed, cookie, fill_up), (0, 1));
        bed.engine.set(Mode::Inline);
        bed.drain();
        ended_early(&bed, batch);
        assert_eq!(bed.records(batch)[0].bytes.get(), 0);
    }
    let batch = bed.submit(1, &[long(3), long(4)]);
    assert!(bed.device.drain(2));
    assert_eq!(cancel_meanwhile(&mut bed, Some(4), |bed| assert!(bed.device.drain(2))), (1, 0), "it waits");
    assert_eq!(bed.statuses(batch), [OK, CANCELLED]);
    // Nor does it concern what comes after that.
    let batch = bed.submit(1, &[fill(1 << 36, 8, 1).cookie(3), long(4)]);
    assert_eq!(cancel_meanwhile(&mut bed, Some(3), |bed| assert!(bed.device.drain(2))), (0, 1), "it ran");
    assert_eq!(bed.statuses(batch), [OK, OK]);
    assert_eq!(status(&bed.run_one(1, long(4))), Status::Ok, "nor what comes later");
    assert_eq!(bed.seen.gauge_of(Gauge::InFlight), 0);
}

#[test]
fn stream_that_holds_work_cannot_be_reset() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[work(1, 0), work(1, 1).timeout(1)]);
    bed.until("a timeout", |bed| bed.statuses(batch)[1].is_some());
    let reset = vdev_wire::StreamReset { stream: 1.into(), reserved: 0.into() };
    let body = zerocopy::IntoBytes::as_bytes(&reset);
    assert_eq!(bed.call(vdev_wire::Opcode::StreamReset, 1, body).status, Status::Busy);
    bed.engine.release_all();
    bed.drain();
    bed.reset_stream(1, 1);
}

#[test]
fn full_engine_is_tried_again_and_loses_nothing() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Full);
    let batch = bed.submit(1, &[work(1, 0), work(1, 1), work(2, 2)]);
    bed.drain();
    assert_eq!(bed.statuses(batch), [None; 3]);
    bed.engine.set(Mode::Inline);
    bed.drain();
    assert!(bed.is_used(batch));
    assert_eq!(bed.statuses(batch), [OK; 3]);
}

#[test]
fn work_of_a_full_engine_holds_no_memory() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Full);
    let batch = bed.submit(1, &[work(1, 0)]);
    bed.drain();
    assert_eq!(bed.unmap(1, 0, u64::MAX).status, Status::Ok);
    bed.drain();
    assert_eq!(bed.statuses(batch), [Some(Status::Fault)], "translated anew at each attempt");
}

#[test]
fn work_of_a_full_engine_can_be_cancelled() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Full);
    let batch = bed.submit(1, &works(1, 0, 2));
    bed.drain();
    assert_eq!(bed.cancel(1, 1, None), (2, 0));
    assert!(bed.is_used(batch));
    bed.engine.set(Mode::Inline);
    assert_eq!(status(&bed.run_one(1, work(1, 5))), Status::Ok);
}

#[test]
fn issued_work_that_is_overdue_ends_only_when_the_engine_lets_go() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    *bed.engine.abort_ends.lock().unwrap() = false;
    let batch = bed.submit(1, &[work(1, 0).timeout(1), work(1, 1)]);
    bed.until("an abort", |bed| !bed.engine.state.lock().unwrap().aborted.is_empty());
    assert_eq!(bed.statuses(batch), [None, None], "never before the engine is quiet");
    bed.drain();
    assert_eq!(bed.engine.state.lock().unwrap().aborted.len(), 1, "asked once");
    bed.engine.fail(0, 4, EngineError::Aborted);
    bed.drain();
    assert_eq!(bed.statuses(batch), [Some(Status::Timeout), CANCELLED]);
    assert_eq!(bed.records(batch)[0].bytes.get(), 4);
    assert_eq!(bed.seen.count_of(Counter::Timeouts), 1);
}

#[test]
fn waiting_work_that_is_overdue_is_never_issued() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[work(1, 0), work(1, 1).timeout(1), work(1, 2)]);
    bed.until("a timeout", |bed| bed.statuses(batch)[1].is_some());
    assert_eq!(bed.statuses(batch), [None, Some(Status::Timeout), CANCELLED]);
    bed.engine.release(0);
    bed.drain();
    assert_eq!(bed.statuses(batch)[0], OK, "what was issued ends as it does");
    assert_eq!(bed.engine.state.lock().unwrap().seen.len(), 1);
    assert_eq!(
        status(&{
            bed.engine.set(Mode::Inline);
            bed.run_one(1, work(1, 3))
        }),
        Status::Cancelled
    );
}

#[test]
fn timekeeper_sleeps_no_longer_than_the_earliest_deadline() {
    let mut bed = Bed::ready();
    assert_eq!(bed.device.poll(), None, "nothing to wait for");
    bed.engine.set(Mode::Hold);
    bed.submit(1, &[work(1, 0)]);
    bed.drain();
    let default = bed.device.poll().expect("a deadline");
    assert!(default <= std::time::Duration::from_secs(10));
    bed.submit(1, &[work(2, 1).timeout(500)]);
    bed.drain();
    assert!(bed.device.poll().expect("a deadline") <= std::time::Duration::from_millis(500));
}

#[test]
fn long_work_leaves_room_for_others_between_its_pieces() {
    let mut bed = Bed::ready();
    bed.ok(vdev_wire::Opcode::Map, 1, &map_bytes(1 << 36, RW, &[(DATA + (8 << 20), 64 << 20)]));
    let long = bed.submit(1, &[fill(1 << 36, 64 << 20, 1).stream(1), work(1, 1)]);
    let short = bed.submit_on(3, 1, &[work(2, 2)]);
    assert!(bed.device.drain(2), "not done in one turn");
    assert_eq!(bed.statuses(long), [None, None]);
    bed.device.drain(3);
    assert_eq!(bed.statuses(short), [OK]);
    assert_eq!(bed.statuses(long), [None, None], "still not");
    bed.drain();
    assert_eq!(bed.statuses(long), [OK, OK]);
    assert!(bed.is_used(long));
}

#[test]
fn paused_work_goes_on_when_its_queue_has_stopped() {
    let mut bed = Bed::ready();
    bed.ok(vdev_wire::Opcode::Map, 1, &map_bytes(1 << 36, RW, &[(DATA + (8 << 20), 64 << 20)]));
    let long = bed.submit(1, &[fill(1 << 36, 64 << 20, 1)]);
    assert!(bed.device.drain(2));
    bed.device.stop_queue(2);
    assert!(bed.is_used(long), "a queue stops only when its chains are back");
    assert_eq!(bed.statuses(long), [OK]);
}

#[test]
fn completions_of_one_turn_interrupt_once() {
    let mut bed = Bed::ready();
    let before = bed.rings[2].signals();
    bed.rings[2].take_used();
    let batches: Vec<_> = (0..10).map(|n| bed.submit(1, &works(n, 0, 3))).collect();
    bed.drain();
    assert_eq!(bed.rings[2].signals(), before + 1);
    for batch in batches {
        assert!(bed.is_used(batch));
    }
}

#[test]
fn engine_that_reports_before_the_submitter_is_done_loses_nothing() {
    // Threads submit and poll at the same time, on an engine whose reports come from yet another thread.
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    let (device, engine) = (bed.device.clone(), bed.engine.clone());
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let helper = std::thread::spawn({
        let stop = stop.clone();
        move || {
            while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                engine.release_all();
                device.poll();
            }
        }
    });
    for round in 0..200 {
        let batch = bed.submit(1, &works(round % 3, 0, 4));
        bed.until("the batch", |bed| bed.is_used(batch));
        assert_eq!(bed.statuses(batch), [OK; 4]);
    }
    stop.store(true, std::sync::atomic::Ordering::SeqCst);
    helper.join().unwrap();
    assert_eq!(bed.detach_all(1).status, Status::Ok);
    bed.assert_empty();
}
