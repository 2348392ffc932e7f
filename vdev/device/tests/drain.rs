//! What has to wait for issued work: UNMAP, FREE, PEER_DISABLE, DETACH, HELLO. And nothing else waits with it.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use common::*;
use vdev_device::Gauge;
use vdev_wire::{
    Attach, ENDPOINT_ALL, FaultReason, Free, Hello, HelloReply, Opcode, PEER_READ, PEER_WRITE, PeerReply, Status,
};
use zerocopy::{FromZeros, IntoBytes};

const D: u64 = IOVA + DATA;
const VA: u64 = 1 << 40;
const VB: u64 = 1 << 41;

fn detach_all() -> Attach {
    Attach { endpoint: ENDPOINT_ALL.into(), flags: 0.into() }
}

#[test]
fn unmap_waits_for_issued_work_and_delays_no_other_request() {
    let mut bed = Bed::ready();
    bed.ok(Opcode::Map, 1, &map_bytes(0x10_0000, RW, &[(DATA + (1 << 20), PAGE)]));
    bed.engine.set(Mode::Hold);
    let running = bed.submit(1, &[fill(D, 8, 1).stream(1)]);
    bed.drain();
    let slow = bed.start(Opcode::Unmap, 1, unmap(D, D + (1 << 20) - 1).as_bytes());
    assert_eq!(bed.answer(slow), None);
    assert_eq!(bed.unmap(1, 0x10_0000, 0x10_0fff).status, Status::Ok, "another unmap overtakes it");
    bed.ok(Opcode::Probe, 0, &[]);
    let flush = bed.start(Opcode::Flush, 1, &[0; 8]);
    assert_eq!(bed.answer(flush), None, "FLUSH waits for the earlier unmap");
    bed.engine.set(Mode::Inline);
    let record = bed.run_one(1, fill(D + 8, 8, 1).stream(2));
    assert_eq!((status(&record), record.fault_reason), (Status::Fault, FaultReason::Draining as u8));
    assert_eq!(record.fault_address.get(), D + 8);
    let overlap = map_bytes(D, RW, &[(DATA, PAGE)]);
    assert_eq!(bed.call(Opcode::Map, 1, &overlap).status, Status::Inval, "the addresses are not free yet");
    bed.engine.release(0);
    assert_eq!(bed.answer(slow).unwrap().status, Status::Ok);
    assert_eq!(bed.answer(flush).unwrap().status, Status::Ok);
    assert!(bed.is_used(running));
    assert_eq!(bed.call(Opcode::Map, 1, &overlap).status, Status::Ok);
}

#[test]
fn work_that_only_waits_in_its_stream_delays_no_unmap() {
    let mut bed = Bed::ready();
    bed.ok(Opcode::Map, 1, &map_bytes(0x10_0000, RW, &[(DATA + (1 << 20), PAGE)]));
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[fill(D, 8, 1), fill(0x10_0000, 8, 2)]);
    bed.drain();
    assert_eq!(bed.unmap(1, 0x10_0000, 0x10_0fff).status, Status::Ok);
    bed.engine.release(0);
    bed.drain();
    assert_eq!(bed.statuses(batch), [Some(Status::Ok), Some(Status::Fault)], "translated when issued");
}

#[test]
fn free_waits_for_issued_work_and_for_the_scrubbing() {
    let mut bed = Bed::ready();
    let handle = bed.alloc(1, GPU, VA, VRAM);
    bed.engine.set(Mode::Hold);
    let running = bed.submit(1, &[fill(VA, 64, !0)]);
    bed.drain();
    let free = bed.start(Opcode::Free, 1, Free { handle: handle.into() }.as_bytes());
    assert_eq!(bed.answer(free), None);
    assert_eq!(bed.free(1, handle).status, Status::Stale, "a second FREE does not wait");
    bed.engine.release(0);
    assert_eq!(bed.answer(free), None, "the memory is being zeroed");
    assert!(bed.is_used(running));
    assert_eq!(bed.engine.held(), 1);
    let full = bed.call(Opcode::Alloc, 1, alloc(GPU, RW, VB, PAGE).as_bytes());
    assert_eq!(full.status, Status::NoMem, "it is nobody's yet");
    assert_eq!(bed.seen.gauge_of(Gauge::BufferBytes), VRAM);
    bed.engine.release(0);
    assert_eq!(bed.answer(free).unwrap().status, Status::Ok);
    bed.alloc(1, GPU, VA, VRAM);
    assert_eq!(bed.vram(GPU, 0, 64), [0; 64]);
}

#[test]
fn flush_waits_for_every_earlier_request_that_drains_and_no_later_one() {
    let mut bed = Bed::ready();
    bed.ok(Opcode::Map, 1, &map_bytes(0x10_0000, RW, &[(DATA + (1 << 20), PAGE)]));
    let handle = bed.alloc(1, GPU, VA, PAGE);
    bed.engine.set(Mode::Hold);
    bed.submit(1, &[fill(0x10_0000, 8, 1).stream(1), fill(D, 8, 1).stream(2)]);
    bed.drain();
    let flush = |bed: &mut Bed| bed.start(Opcode::Flush, 1, &[0; 8]);
    let at_once = flush(&mut bed);
    assert_eq!(bed.answer(at_once).unwrap().status, Status::Ok, "nothing drains");
    let free = bed.start(Opcode::Free, 1, Free { handle: handle.into() }.as_bytes());
    let first = flush(&mut bed);
    let unmap = bed.start(Opcode::Unmap, 1, unmap(0x10_0000, 0x10_0fff).as_bytes());
    let second = flush(&mut bed);
    assert_eq!((bed.answer(free), bed.answer(first), bed.answer(second)), (None, None, None));
    bed.engine.release(0);
    assert_eq!(bed.answer(unmap).unwrap().status, Status::Ok);
    assert_eq!(bed.answer(second), None, "the FREE came before it too");
    bed.engine.release(1);
    assert_eq!(bed.answer(free).unwrap().status, Status::Ok, "zeroed");
    assert_eq!(bed.answer(first).unwrap().status, Status::Ok);
    assert_eq!(bed.answer(second).unwrap().status, Status::Ok);
    bed.engine.release_all();
}

#[test]
fn disabling_a_right_waits_for_work_that_relies_on_it_only() {
    let mut bed = Bed::ready();
    bed.alloc(1, FPGA, VB, PAGE);
    bed.enable(1, GPU, FPGA, RW);
    bed.engine.set(Mode::Hold);
    bed.submit(1, &[copy(VB, D, 8).by(GPU).stream(1), fill(D + 64, 8, 0).by(GPU).stream(2)]);
    bed.drain();
    let reply: PeerReply = bed.ok(Opcode::PeerDisable, 1, peer(GPU, FPGA, PEER_WRITE).as_bytes()).read();
    assert_eq!(reply.rights.get(), PEER_READ, "nobody writes");
    let disable = bed.start(Opcode::PeerDisable, 1, peer(GPU, FPGA, PEER_READ).as_bytes());
    assert_eq!(bed.answer(disable), None);
    let batch = bed.submit(1, &[copy(VB, D + 8, 8).by(GPU).stream(3)]);
    bed.drain();
    assert_eq!(bed.statuses(batch), [Some(Status::Denied)], "no new issue");
    assert_eq!(bed.call(Opcode::PeerEnable, 1, peer(GPU, FPGA, PEER_READ).as_bytes()).status, Status::Inval);
    bed.engine.release(0);
    let answer = bed.answer(disable).unwrap();
    assert_eq!((answer.status, answer.read::<PeerReply>().rights.get()), (Status::Ok, 0));
    bed.engine.release_all();
}

#[test]
fn detach_cancels_what_waits_lets_what_runs_end_and_then_answers() {
    let mut bed = Bed::ready();
    bed.alloc(1, GPU, VA, PAGE);
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[fill(VA, 8, !0), fill(D, 8, 2), fence(), fill(D + 64, 8, 1).stream(2)]);
    bed.drain();
    let detach = bed.start(Opcode::Detach, 1, detach_all().as_bytes());
    assert_eq!(bed.answer(detach), None);
    let cancelled = Some(Status::Cancelled);
    assert_eq!(bed.statuses(batch), [None, cancelled, cancelled, None]);
    for (opcode, body) in [(Opcode::Flush, vec![0; 8]), (Opcode::Attach, attach(GPU).as_bytes().to_vec())] {
        assert_eq!(bed.call(opcode, 1, &body).status, Status::NoEnt, "{opcode:?} while it goes");
    }
    assert_eq!(bed.detach_all(1).status, Status::NoEnt);
    let late = bed.submit(1, &[fill(D, 8, 3)]);
    bed.drain();
    assert_eq!(bed.statuses(late), [Some(Status::NoEnt)]);
    bed.attach(2, GPU);
    bed.engine.release(1);
    assert_eq!(bed.answer(detach), None, "one is left");
    bed.engine.release(0);
    assert_eq!(bed.answer(detach), None, "the buffer is being zeroed");
    assert!(bed.is_used(batch));
    assert!(bed.engine.state.lock().unwrap().forgotten.is_empty());
    bed.engine.release(0);
    assert_eq!(bed.answer(detach).unwrap().status, Status::Ok);
    assert_eq!(bed.engine.state.lock().unwrap().forgotten.len(), 1);
    bed.attach(1, FPGA);
    bed.detach_all(1);
    bed.detach_all(2);
    bed.assert_empty();
}

#[test]
fn detach_waits_for_a_fence_of_the_endpoint() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    bed.submit(1, &[fence().by(GPU)]);
    bed.drain();
    let detach = bed.start(Opcode::Detach, 1, attach(GPU).as_bytes());
    assert_eq!(bed.answer(detach), None);
    bed.engine.release(0);
    assert_eq!(bed.answer(detach).unwrap().status, Status::Ok);
}

#[test]
fn detach_while_a_buffer_is_being_freed_waits_for_both() {
    let mut bed = Bed::ready();
    let handle = bed.alloc(1, GPU, VA, PAGE);
    bed.engine.set(Mode::Hold);
    let free = bed.start(Opcode::Free, 1, Free { handle: handle.into() }.as_bytes());
    assert_eq!(bed.answer(free), None, "scrubbing");
    let detach = bed.start(Opcode::Detach, 1, detach_all().as_bytes());
    assert_eq!(bed.answer(detach), None);
    bed.engine.release(0);
    assert_eq!(bed.answer(free).unwrap().status, Status::Ok);
    assert_eq!(bed.answer(detach).unwrap().status, Status::Ok);
    bed.assert_empty();
}

#[test]
fn hello_resets_everything_and_answers_when_it_is_quiet() {
    let mut bed = Bed::ready();
    bed.attach(2, FPGA);
    bed.alloc(2, FPGA, VB, PAGE);
    bed.map(2, DATA, PAGE);
    bed.post_events(4);
    bed.engine.set(Mode::Hold);
    let first = bed.submit(1, &[fill(D, 8, 1), fill(D, 8, 2)]);
    let second = bed.submit_on(3, 2, &[fill(VB, 8, 1), fill(D, 8, 2)]);
    bed.drain();
    let unmap = bed.start(Opcode::Unmap, 1, unmap(0, u64::MAX).as_bytes());
    assert_eq!(bed.answer(unmap), None);
    let body = Hello { version: 1.into(), ..Hello::new_zeroed() };
    let hello = bed.start(Opcode::Hello, 0, body.as_bytes());
    assert_eq!(bed.answer(hello), None);
    assert_eq!(bed.statuses(first), [None, Some(Status::Cancelled)]);
    assert_eq!(bed.statuses(second), [None, Some(Status::Cancelled)]);
    let again = bed.start(Opcode::Hello, 0, body.as_bytes());
    assert_eq!(bed.answer(again), None, "a second HELLO waits too");
    while bed.engine.held() > 0 {
        bed.engine.release(0);
        bed.drain();
    }
    assert!(bed.is_used(first) && bed.is_used(second));
    assert_eq!(bed.answer(unmap).unwrap().status, Status::Ok);
    assert_eq!(bed.answer(hello).unwrap().read::<HelloReply>().session.get(), SESSION);
    assert_eq!(bed.answer(again).unwrap().status, Status::Ok);
    bed.assert_empty();
    assert_eq!(bed.call(Opcode::Flush, 1, &[0; 8]).status, Status::NoEnt);
    bed.engine.set(Mode::Inline);
    let mut bed = bed.prepared();
    assert_eq!(status(&bed.run_one(1, fill(D, 8, 1))), Status::Ok);
}

#[test]
fn handles_of_an_earlier_driver_mean_nothing_to_the_next() {
    let mut bed = Bed::ready();
    let handle = bed.alloc(1, GPU, VA, PAGE);
    let mut bed = bed.prepared();
    assert_eq!(bed.free(1, handle).status, Status::NoEnt);
}

#[test]
fn scrub_that_times_out_takes_its_memory_out_of_use() {
    let mut bed = {
        let mut spec = spec();
        spec.limits.default_timeout = std::time::Duration::from_millis(1);
        spec.limits.max_timeout = std::time::Duration::from_millis(1);
        Bed::with(spec).prepared()
    };
    let handle = bed.alloc(1, GPU, VA, VRAM);
    bed.engine.set(Mode::Hold);
    let free = bed.start(Opcode::Free, 1, Free { handle: handle.into() }.as_bytes());
    let mut answer = None;
    bed.until("the answer", |bed| {
        answer = bed.answer(free);
        answer.is_some()
    });
    assert_eq!(answer.unwrap().status, Status::Ok);
    let answer = bed.call(Opcode::Alloc, 1, alloc(GPU, RW, VA, PAGE).as_bytes());
    assert_eq!(answer.status, Status::NoMem);
}
