//! Atomic operations: what they do, who makes them, and who may not.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::*;
use hw_engine::Work;
use iommu_addr::Access;
use vdev_device::{Counter, Reach};
use vdev_wire::{
    ALLOC_REGISTERS, Completion, FaultReason, MAP_READ, MAP_WRITE, Opcode, PEER_READ, PEER_WRITE, PathReason, Status,
    TransferPath, WORK_ATOMIC_ADD, WORK_ATOMIC_COMPARE_SWAP, WORK_ATOMIC_SWAP, WORK_SYSTEM, WorkDescriptor,
};
use zerocopy::IntoBytes;

const VA: u64 = 1 << 40;
const VB: u64 = 1 << 41;
const REGS: u64 = 1 << 42;
const D: u64 = IOVA + DATA;

fn with(spec: vdev_device::DeviceSpec) -> Bed {
    let mut bed = Bed::with(spec).prepared();
    bed.alloc(1, GPU, VA, PAGE);
    bed.alloc(1, FPGA, VB, PAGE);
    bed.ok(Opcode::Alloc, 1, alloc(FPGA, RW | ALLOC_REGISTERS, REGS, PAGE).as_bytes());
    bed.post_events(32);
    bed
}

fn bed() -> Bed {
    with(spec())
}

fn add(at: u64) -> WorkDescriptor {
    atomic(WORK_ATOMIC_ADD, at, 8, 1)
}

/// Status, bytes, what was there, and the way.
fn end(record: &Completion) -> (Status, u64, u64, u8, u8) {
    (status(record), record.bytes.get(), record.fault_address.get(), record.path, record.reason)
}

const LOCAL: (u8, u8) = (TransferPath::Local as u8, PathReason::SameDevice as u8);

#[test]
fn a_word_is_changed_and_what_was_there_is_told() {
    let mut bed = bed();
    bed.set_ram(DATA, &[0xff; 16]);
    let compare = |expected: u64, new: u64| {
        let mut work = atomic(WORK_ATOMIC_COMPARE_SWAP, D, 8, new);
        work.source = expected.into();
        work
    };
    let all = u64::MAX;
    for (work, was, now) in [
        (add(D), all, 0),
        (atomic(WORK_ATOMIC_SWAP, D, 8, 5), 0, 5),
        (compare(4, 9), 5, 5),
        (compare(5, 9), 5, 9),
        (atomic(WORK_ATOMIC_ADD, D + 4, 4, 1 << 32 | 7), 0, 7 << 32 | 9),
    ] {
        let record = bed.run_one(1, work);
        assert_eq!(end(&record), (Status::Ok, work.length.get(), was, LOCAL.0, LOCAL.1), "{work:?}");
        assert_eq!(bed.ram(DATA, 8), u64::to_le_bytes(now), "{work:?}");
    }
    assert_eq!(bed.ram(DATA + 8, 8), [0xff; 8], "and no other");
    // In a device's memory, in the order of the stream, with a fence of its own.
    let mut last = add(VA + 8);
    last.flags = (WORK_ATOMIC_ADD | WORK_SYSTEM).into();
    let records = bed.run(1, &[fill(VA + 8, 8, 41), add(VA + 8), last]);
    assert_eq!(records.iter().map(|record| record.fault_address.get()).collect::<Vec<_>>(), [0, 41, 42]);
    assert_eq!(bed.vram(GPU, 8, 8), u64::to_le_bytes(43));
    assert_eq!(bed.seen.count_of(Counter::Errors), 0);
}

#[test]
fn the_owner_makes_it_where_the_initiator_cannot() {
    let unreachable = {
        let mut reach = Reach::all();
        reach.deny(GPU, FPGA, PathReason::PeerUnreachable);
        vdev_device::DeviceSpec { reach, ..spec() }
    };
    for (spec, no_atomics, by, path, reason) in [
        (spec(), None, GPU, TransferPath::Direct, PathReason::PeerReachable),
        (spec(), Some(GPU), FPGA, TransferPath::Staged, PathReason::EngineCannot),
        (unreachable, None, FPGA, TransferPath::Staged, PathReason::PeerUnreachable),
    ] {
        let mut bed = with(spec);
        *bed.engine.no_atomics.lock().unwrap() = no_atomics;
        bed.enable(1, GPU, FPGA, PEER_READ | PEER_WRITE);
        let record = bed.run_one(1, add(VB).by(GPU));
        assert_eq!(end(&record), (Status::Ok, 8, 0, path as u8, reason as u8));
        let made = bed.engine.state.lock().unwrap().seen.last().cloned().unwrap();
        assert_eq!((made.initiator, matches!(made.work, Work::Atomic { .. })), (by, true));
        assert_eq!(bed.vram(FPGA, 0, 8), u64::to_le_bytes(1));
    }
}

#[test]
fn memory_without_atomic_operations_says_so() {
    let mut bed = bed();
    *bed.engine.no_atomics.lock().unwrap() = Some(GPU);
    for at in [VA, D] {
        let record = bed.run_one(1, add(at).by(GPU));
        assert_eq!(end(&record), (Status::Unsupp, 0, 0, 0, 0));
        bed.reset_stream(1, 0);
    }
    assert_eq!(bed.vram(GPU, 0, 8), [0; 8]);
    assert_eq!(bed.take_events().len(), 0, "it is no fault");
}

#[test]
fn it_takes_the_right_to_read_and_the_right_to_write() {
    let mut bed = bed();
    let refused = |bed: &mut Bed, work: WorkDescriptor, status: Status, reason: FaultReason, access: Access| {
        let record = bed.run_one(1, work.cookie(7));
        let at = work.destination.get();
        assert_eq!((end(&record), record.fault_reason), ((status, 0, at, 0, 0), reason as u8));
        bed.reset_stream(1, 0);
        let events = bed.take_events();
        let event = events.first().unwrap();
        assert_eq!((event.address.get(), event.cookie.get()), (at, 7));
        assert_eq!(bed.seen.faults.lock().unwrap().last().unwrap().access, access);
    };
    let hole = IOVA - PAGE;
    refused(&mut bed, add(hole).by(GPU), Status::Fault, FaultReason::Mapping, Access::RW);
    for rights in [PEER_READ, PEER_WRITE] {
        bed.enable(1, GPU, FPGA, rights);
        refused(&mut bed, add(VB).by(GPU), Status::Denied, FaultReason::Peer, Access::RW);
        bed.ok(Opcode::PeerDisable, 1, peer(GPU, FPGA, rights).as_bytes());
    }
    for (iova, flags) in [(1 << 44, MAP_READ), (2 << 44, MAP_WRITE)] {
        bed.ok(Opcode::Map, 1, &map_bytes(iova, flags, &[(DATA, PAGE)]));
        refused(&mut bed, add(iova).by(GPU), Status::Fault, FaultReason::Permission, Access::RW);
    }
    // Registers take loads and stores alone.
    refused(&mut bed, add(REGS).by(FPGA), Status::Fault, FaultReason::Access, Access::RW);
    assert_eq!(bed.vram(FPGA, 0, 8), [0; 8]);
}

#[test]
fn one_that_is_given_up_after_it_was_made_tells_nothing_of_what_was_there() {
    let mut bed = bed();
    bed.run_one(1, fill(VA, 8, 7));
    bed.engine.set(Mode::Hold);
    let mut work = add(VA).cookie(1);
    work.flags = (WORK_ATOMIC_ADD | WORK_SYSTEM).into();
    let batch = bed.submit(1, &[work]);
    bed.drain();
    bed.engine.release(0);
    bed.drain();
    assert_eq!((bed.engine.held(), bed.statuses(batch)), (1, vec![None]), "the flush behind it");
    assert_eq!(bed.cancel(1, 0, Some(1)), (0, 1));
    bed.drain();
    let record = bed.records(batch)[0];
    assert_eq!(end(&record), (Status::Cancelled, 8, 0, LOCAL.0, LOCAL.1));
    assert_eq!(bed.vram(GPU, 0, 8), u64::to_le_bytes(8));
}

#[test]
fn what_takes_memory_or_rights_away_waits_for_one_that_was_issued() {
    let mut bed = bed();
    bed.enable(1, GPU, FPGA, PEER_READ | PEER_WRITE);
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[add(VB).by(GPU)]);
    bed.drain();
    let disable = bed.start(Opcode::PeerDisable, 1, peer(GPU, FPGA, PEER_READ).as_bytes());
    bed.drain();
    assert!(bed.answer(disable).is_none(), "it is under way");
    assert_eq!(bed.statuses(batch), [None]);
    bed.engine.release(0);
    bed.drain();
    assert!(bed.answer(disable).is_some());
    assert_eq!(bed.statuses(batch), [Some(Status::Ok)]);
    let batch = bed.submit(1, &[add(D).stream(2)]);
    bed.drain();
    let unmap = bed.start(Opcode::Unmap, 1, unmap(0, VA - 1).as_bytes());
    bed.drain();
    assert!(bed.answer(unmap).is_none(), "it is under way");
    bed.engine.release(0);
    bed.drain();
    assert!(bed.answer(unmap).is_some());
    assert_eq!(bed.statuses(batch), [Some(Status::Ok)]);
}

#[test]
fn a_full_engine_makes_it_once() {
    let mut bed = bed();
    bed.engine.set(Mode::Full);
    let batch = bed.submit(1, &[add(VA), add(VA)]);
    bed.drain();
    assert_eq!(bed.statuses(batch), [None, None]);
    bed.engine.set(Mode::Inline);
    bed.drain();
    let was: Vec<_> = bed.records(batch).iter().map(|record| end(record).2).collect();
    assert_eq!((was, bed.vram(GPU, 0, 8)), (vec![0, 1], u64::to_le_bytes(2).to_vec()));
}
