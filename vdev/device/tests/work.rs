//! Work: what it does, and each refusal with its status, fault reason, address, event and operator's record.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use common::*;
use hw_engine::{Route, Work};
use iommu_addr::{Access, EndpointId, Iova};
use vdev_device::{Counter, Gauge, Reach};
use vdev_wire::{
    ALLOC_REGISTERS, Completion, FaultReason, MAP_READ, MAP_WRITE, OWNER_HIDDEN, Opcode, PEER_READ, PEER_WRITE,
    PathReason, Status, TransferPath, WORK_SYSTEM, WorkDescriptor,
};
use zerocopy::IntoBytes;

const VA: u64 = 1 << 40;
const VB: u64 = 1 << 41;
const REGS: u64 = 1 << 42;
const D: u64 = IOVA + DATA;

/// A domain with a buffer in the GPU, one in the FPGA, and the FPGA's registers.
fn bed() -> Bed {
    with(spec())
}

fn with(spec: vdev_device::DeviceSpec) -> Bed {
    let mut bed = Bed::with(spec).prepared();
    bed.alloc(1, GPU, VA, 16 * PAGE);
    bed.alloc(1, FPGA, VB, 16 * PAGE);
    bed.ok(Opcode::Alloc, 1, alloc(FPGA, RW | ALLOC_REGISTERS, REGS, PAGE).as_bytes());
    bed.post_events(32);
    bed
}

fn path(record: &Completion) -> (u8, u8) {
    (record.path, record.reason)
}

const DIRECT: (u8, u8) = (TransferPath::Direct as u8, PathReason::PeerReachable as u8);
const LOCAL: (u8, u8) = (TransferPath::Local as u8, PathReason::SameDevice as u8);
const NONE: (u8, u8) = (0, 0);

/// Runs work that must be refused, resets its stream, and gives status, fault reason and fault address.
fn refusal(bed: &mut Bed, work: WorkDescriptor) -> (Status, u8, u64) {
    let record = bed.run_one(1, work.cookie(0x77));
    assert_eq!((record.bytes.get(), path(&record)), (0, NONE), "nothing moved");
    assert_eq!(record.cookie.get(), 0x77);
    bed.reset_stream(1, work.stream.get());
    (status(&record), record.fault_reason, record.fault_address.get())
}

fn plain(status: Status) -> (Status, u8, u64) {
    (status, 0, 0)
}

fn fault(reason: FaultReason, address: u64) -> (Status, u8, u64) {
    let status = if reason == FaultReason::Peer { Status::Denied } else { Status::Fault };
    (status, reason as u8, address)
}

#[test]
fn copy_and_fill_reach_guest_and_endpoint_memory() {
    let mut bed = bed();
    bed.enable(1, GPU, FPGA, PEER_WRITE);
    let data: Vec<u8> = (0..3 * PAGE).map(|i| (i % 251) as u8).collect();
    bed.set_ram(DATA, &data);
    let records = bed.run(
        1,
        &[
            copy(D, VA + 5, 3 * PAGE - 7),
            copy(VA + 5, VB + 1, 3 * PAGE - 7),
            copy(VB + 1, D + 16 * PAGE, 3 * PAGE - 7),
            fill(D + 32 * PAGE, 13, 0x0807_0605_0403_0201),
        ],
    );
    assert!(records.iter().all(|record| status(record) == Status::Ok));
    assert_eq!(records.iter().map(path).collect::<Vec<_>>(), [LOCAL, DIRECT, LOCAL, LOCAL]);
    assert!(bed.ram(DATA + 16 * PAGE, data.len() - 7) == data[..data.len() - 7]);
    assert_eq!(bed.ram(DATA + 32 * PAGE, 14), [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 0]);
    let seen = &bed.seen;
    assert_eq!((seen.count_of(Counter::Ops), seen.count_of(Counter::Errors)), (4, 0));
    assert_eq!(seen.count_of(Counter::BytesDirect), 3 * PAGE - 7);
    assert_eq!(seen.count_of(Counter::BytesLocal), 2 * (3 * PAGE - 7) + 13);
}

#[test]
fn malformed_descriptors_are_refused() {
    let mut bed = bed();
    let set = |mut work: WorkDescriptor, f: &dyn Fn(&mut WorkDescriptor)| {
        f(&mut work);
        work
    };
    let c = copy(D, D + PAGE, 8);
    let cases: Vec<(&str, WorkDescriptor, Status)> = vec![
        ("ext", set(c, &|w| w.ext = 1), Status::Inval),
        ("reserved0", set(c, &|w| w.reserved0 = 1), Status::Inval),
        ("reserved1", set(c, &|w| w.reserved1 = 1.into()), Status::Inval),
        ("flags", set(c, &|w| w.flags = 2.into()), Status::Inval),
        ("operand of COPY", set(c, &|w| w.operand = 1.into()), Status::Inval),
        ("no length", copy(D, D + PAGE, 0), Status::Inval),
        ("opcode 0", set(c, &|w| w.opcode = 0.into()), Status::Unsupp),
        ("opcode LOAD", set(c, &|w| w.opcode = 5.into()), Status::Unsupp),
        ("source past the end", copy(u64::MAX - 6, D, 8), Status::Range),
        ("destination past the end", copy(D, u64::MAX - 6, 8), Status::Range),
        ("length past the end", copy(D, D, u64::MAX), Status::Range),
        ("no length", fill(D, 0, 1), Status::Inval),
        ("source of FILL", set(fill(D, 8, 1), &|w| w.source = 1.into()), Status::Inval),
        ("scope 0", set(fence(), &|w| w.operand = 0.into()), Status::Inval),
        ("scope 4", set(fence(), &|w| w.operand = 4.into()), Status::Inval),
        ("source of FENCE", set(fence(), &|w| w.source = 1.into()), Status::Inval),
        ("destination of FENCE", set(fence(), &|w| w.destination = 1.into()), Status::Inval),
        ("length of FENCE", set(fence(), &|w| w.length = 1.into()), Status::Inval),
        ("timeout", c.timeout(60_001), Status::Range),
    ];
    for (what, work, want) in cases {
        assert_eq!(refusal(&mut bed, work), plain(want), "{what}");
    }
    assert_eq!(status(&bed.run_one(1, c.timeout(60_000))), Status::Ok);
    assert_eq!(bed.take_events().len(), 0, "none of these is a fault");
}

#[test]
fn translation_faults_name_the_first_refused_address() {
    let mut bed = bed();
    bed.ok(Opcode::Map, 1, &map_bytes(0x10_0000, MAP_READ, &[(DATA, PAGE)]));
    bed.ok(Opcode::Map, 1, &map_bytes(0x10_1000, MAP_WRITE, &[(DATA, PAGE)]));
    let (map, permission) = (FaultReason::Mapping, FaultReason::Permission);
    assert_eq!(refusal(&mut bed, copy(0x5008, D, 8)), fault(map, 0x5008));
    assert_eq!(refusal(&mut bed, copy(D, 0x5008, 8)), fault(map, 0x5008));
    assert_eq!(refusal(&mut bed, copy(0x5000, 0x6000, 8)), fault(map, 0x5000), "the source first");
    assert_eq!(refusal(&mut bed, copy(D + (1 << 20) - 8, D, 16)), fault(map, D + (1 << 20)), "past a mapping's end");
    assert_eq!(refusal(&mut bed, fill(VA - 1, 8, 0)), fault(map, VA - 1));
    assert_eq!(refusal(&mut bed, fill(0x10_0004, 8, 0)), fault(permission, 0x10_0004), "read only");
    assert_eq!(refusal(&mut bed, copy(0x10_0ff8, D, 16)), fault(permission, 0x10_1000), "write only, half way");
    assert_eq!(refusal(&mut bed, copy(u64::MAX - 7, D, 8)), fault(map, u64::MAX - 7), "the last bytes of the space");
    let events = bed.take_events();
    let addresses: Vec<u64> = events.iter().map(|event| event.address.get()).collect();
    assert_eq!(addresses, [0x5008, 0x5008, 0x5000, D + (1 << 20), VA - 1, 0x10_0004, 0x10_1000, u64::MAX - 7]);
    let accesses: Vec<u8> = events.iter().map(|event| event.access).collect();
    assert_eq!(accesses, [1, 2, 1, 1, 2, 2, 1, 1]);
    assert!(events.iter().all(|event| event.accessor.get() == OWNER_HIDDEN), "nobody was chosen yet");
}

#[test]
fn fault_is_told_to_guest_and_operator_with_everything() {
    let mut bed = bed();
    let work = copy(D, VB + 0x40, 8).by(GPU).stream(6).cookie(0x1234);
    let record = bed.run_one(1, work);
    assert_eq!((status(&record), record.fault_reason), (Status::Denied, FaultReason::Peer as u8));
    let event = bed.take_events()[0];
    assert_eq!((event.kind.get(), event.reason, event.access), (1, FaultReason::Peer as u8, 2));
    assert_eq!((event.accessor.get(), event.owner.get()), (GPU.to_raw(), FPGA.to_raw()));
    assert_eq!((event.domain.get(), event.stream.get(), event.cookie.get()), (1, 6, 0x1234));
    assert_eq!((event.session.get(), event.seq.get(), event.dropped_total.get()), (SESSION, 1, 0));
    let fault = bed.seen.faults.lock().unwrap()[0];
    assert_eq!((fault.accessor, fault.owner, fault.address), (Some(GPU), Some(FPGA), Iova(VB + 0x40)));
    assert_eq!((fault.status, fault.reason, fault.access), (Status::Denied, FaultReason::Peer, Access::WRITE));
    assert_eq!((fault.domain.0, fault.stream, fault.cookie), (1, 6, 0x1234));
}

#[test]
fn explicit_initiator_must_be_attached() {
    let mut bed = bed();
    for nobody in [NIC, EndpointId::local(500), EndpointId { host: 3, id: 0 }] {
        assert_eq!(refusal(&mut bed, copy(D, D + PAGE, 8).by(nobody)), fault(FaultReason::Domain, 0));
        assert_eq!(refusal(&mut bed, fence().by(nobody)), fault(FaultReason::Domain, 0));
    }
    assert_eq!(bed.take_events()[0].accessor.get(), NIC.to_raw());
}

#[test]
fn peer_right_is_needed_for_each_side_and_direction() {
    let mut bed = bed();
    let peer = FaultReason::Peer;
    let (read, write) = (copy(VB + 8, D, 8).by(GPU), copy(D, VB + 8, 8).by(GPU));
    assert_eq!(refusal(&mut bed, read), fault(peer, VB + 8));
    assert_eq!(refusal(&mut bed, write), fault(peer, VB + 8));
    assert_eq!(refusal(&mut bed, fill(VB, 8, 0).by(GPU)), fault(peer, VB));
    bed.enable(1, GPU, FPGA, PEER_READ);
    assert_eq!(status(&bed.run_one(1, read)), Status::Ok);
    assert_eq!(refusal(&mut bed, write), fault(peer, VB + 8), "reading is not writing");
    assert_eq!(refusal(&mut bed, copy(VA, D, 8).by(FPGA)), fault(peer, VA), "one way is not the other");
    bed.enable(1, GPU, FPGA, PEER_WRITE);
    assert_eq!(status(&bed.run_one(1, write)), Status::Ok);
    bed.ok(Opcode::PeerDisable, 1, common::peer(GPU, FPGA, PEER_WRITE).as_bytes());
    assert_eq!(refusal(&mut bed, write), fault(peer, VB + 8), "withdrawn");
}

#[test]
fn peer_right_covers_buffers_of_before_and_after() {
    let mut bed = bed();
    bed.enable(1, GPU, FPGA, PEER_READ);
    bed.alloc(1, FPGA, 1 << 43, PAGE);
    assert_eq!(status(&bed.run_one(1, copy(VB, D, 8).by(GPU))), Status::Ok);
    assert_eq!(status(&bed.run_one(1, copy(1 << 43, D, 8).by(GPU))), Status::Ok);
}

#[test]
fn transfer_over_memory_of_two_owners_needs_both_rights() {
    let mut bed = Bed::with(spec()).prepared();
    bed.alloc(1, GPU, VA, PAGE);
    bed.alloc(1, FPGA, VA + PAGE, PAGE);
    let work = copy(VA + PAGE - 8, D, 16).by(GPU);
    assert_eq!(refusal(&mut bed, work), fault(FaultReason::Peer, VA + PAGE), "the first address that is the FPGA's");
    bed.enable(1, GPU, FPGA, PEER_READ);
    assert_eq!(status(&bed.run_one(1, work)), Status::Ok);
}

#[test]
fn any_initiator_is_the_first_candidate_with_every_right() {
    let mut bed = bed();
    let last = |bed: &Bed| bed.engine.state.lock().unwrap().seen.last().unwrap().initiator;
    assert_eq!(status(&bed.run_one(1, copy(D, D + PAGE, 8))), Status::Ok);
    assert_eq!(last(&bed), GPU, "both in guest memory: the lowest");
    bed.run_one(1, copy(VB, D, 8));
    assert_eq!(last(&bed), FPGA, "the owner of the source");
    bed.run_one(1, fill(VB, 8, 1));
    assert_eq!(last(&bed), FPGA, "the owner of the destination");
    assert_eq!(refusal(&mut bed, copy(VA, VB, 8)), fault(FaultReason::Peer, VB), "against the first candidate");
    assert_eq!(bed.take_events()[0].accessor.get(), GPU.to_raw());
    bed.enable(1, FPGA, GPU, PEER_READ);
    assert_eq!(status(&bed.run_one(1, copy(VA, VB, 8))), Status::Ok);
    assert_eq!(last(&bed), FPGA, "the second candidate has the right");
    bed.enable(1, GPU, FPGA, PEER_WRITE);
    bed.run_one(1, copy(VA, VB, 8));
    assert_eq!(last(&bed), GPU, "now the first has it too");
}

#[test]
fn unreachable_peers_are_staged_and_the_rights_still_count() {
    let mut staged = spec();
    let mut reach = Reach::all();
    reach.deny(GPU, FPGA, PathReason::PeerUnreachable);
    reach.deny(FPGA, GPU, PathReason::Policy);
    staged.reach = reach;
    let mut bed = with(staged);
    assert_eq!(refusal(&mut bed, copy(VA, VB, 64).by(GPU)), fault(FaultReason::Peer, VB));
    bed.enable(1, GPU, FPGA, RW);
    bed.enable(1, FPGA, GPU, RW);
    bed.run_one(1, fill(VA, 64, 0x55));
    let record = bed.run_one(1, copy(VA, VB, 64).by(GPU));
    assert_eq!((status(&record), path(&record)), (Status::Ok, (2, PathReason::PeerUnreachable as u8)));
    let sent = bed.engine.state.lock().unwrap().seen.last().unwrap().work.clone();
    assert!(matches!(sent, Work::Copy { route: Route::Staged, .. }));
    assert_eq!(bed.vram(FPGA, 0, 1), [0x55]);
    let record = bed.run_one(1, copy(VA, VB, 64).by(FPGA));
    assert_eq!(path(&record), (2, PathReason::Policy as u8));
    let record = bed.run_one(1, fill(VB, 8, 9).by(GPU));
    assert_eq!((status(&record), path(&record)), (Status::Ok, (2, PathReason::PeerUnreachable as u8)));
    assert_eq!(bed.engine.state.lock().unwrap().seen.last().unwrap().initiator, FPGA, "the owner does the filling");
    assert_eq!(path(&bed.run_one(1, copy(VA, D, 8))), LOCAL);
    assert_eq!(bed.seen.count_of(Counter::BytesStaged), 64 + 64 + 8);
}

#[test]
fn copy_that_its_engine_cannot_make_in_one_hop_is_staged_for_that_reason() {
    let mut bed = bed();
    bed.enable(1, GPU, FPGA, RW);
    bed.enable(1, FPGA, GPU, RW);
    *bed.engine.two_hops.lock().unwrap() = Some(GPU);
    let cannot = (TransferPath::Staged as u8, PathReason::EngineCannot as u8);
    bed.run_one(1, fill(VA, 64, 0x55).by(GPU));
    let record = bed.run_one(1, copy(VA, VB, 64).by(GPU));
    assert_eq!((status(&record), path(&record)), (Status::Ok, cannot));
    let sent = bed.engine.state.lock().unwrap().seen.last().unwrap().work.clone();
    assert!(matches!(sent, Work::Copy { route: Route::Staged, .. }));
    assert_eq!(bed.vram(FPGA, 0, 1), [0x55]);
    assert_eq!(path(&bed.run_one(1, copy(VA, D, 64).by(GPU))), cannot, "also within what is local");
    assert_eq!(path(&bed.run_one(1, copy(VA, VB, 64).by(FPGA))), DIRECT, "the other engine can");
    assert_eq!(path(&bed.run_one(1, fill(VA, 64, 1).by(GPU))), LOCAL, "a fill has no two places");
}

#[test]
fn fill_that_its_engine_does_not_make_itself_is_staged_for_that_reason() {
    let mut bed = bed();
    bed.enable(1, GPU, FPGA, RW);
    bed.enable(1, FPGA, GPU, RW);
    assert_eq!(path(&bed.run_one(1, fill(VB, 64, 1).by(GPU))), DIRECT);
    *bed.engine.no_fills.lock().unwrap() = Some(GPU);
    let cannot = (TransferPath::Staged as u8, PathReason::EngineCannot as u8);
    let record = bed.run_one(1, fill(VB, 64, 0x55).by(GPU));
    assert_eq!((status(&record), path(&record)), (Status::Ok, cannot));
    assert_eq!(bed.engine.state.lock().unwrap().seen.last().unwrap().initiator, FPGA, "the owner does the filling");
    assert_eq!(bed.vram(FPGA, 0, 1), [0x55]);
    assert_eq!(path(&bed.run_one(1, fill(VA, 64, 1).by(GPU))), cannot, "also within what is local");
    assert_eq!(path(&bed.run_one(1, fill(VA, 64, 1).by(FPGA))), DIRECT, "the other engine does");
}

#[test]
fn registers_take_one_aligned_access_of_four_or_eight_bytes() {
    let mut bed = bed();
    let access = FaultReason::Access;
    for (work, address, what) in [
        (copy(REGS, D, 2), REGS, "two bytes"),
        (copy(REGS, D, 16), REGS, "sixteen bytes"),
        (copy(REGS + 4, D, 8), REGS + 4, "not aligned"),
        (copy(D, REGS + 2, 4), REGS + 2, "a store, not aligned"),
        (fill(REGS, PAGE, 0), REGS, "the whole page"),
        (copy(REGS, REGS + 8, 8), REGS + 8, "a load and a store at once"),
    ] {
        assert_eq!(refusal(&mut bed, work), fault(access, address), "{what}");
    }
    let events = bed.take_events();
    assert!(events.iter().all(|event| event.owner.get() == FPGA.to_raw()));
    assert_eq!(refusal(&mut bed, copy(REGS, D, 8).by(GPU)), fault(FaultReason::Peer, REGS), "rights come first");
}

#[test]
fn overlapping_copies_are_refused_wherever_the_addresses_are() {
    let mut bed = bed();
    bed.ok(Opcode::Map, 1, &map_bytes(0x10_0000, RW, &[(DATA, PAGE)]));
    assert_eq!(refusal(&mut bed, copy(D, D + 7, 8)), plain(Status::Inval));
    assert_eq!(refusal(&mut bed, copy(D, 0x10_0007, 8)), plain(Status::Inval), "the same memory, mapped twice");
    assert_eq!(refusal(&mut bed, copy(VA + 1, VA, 8)), plain(Status::Inval));
    for work in [copy(D, D + 8, 8), copy(D, 0x10_0008, 8), copy(D, D, 8), copy(VA, VA + 8, 8)] {
        assert_eq!(status(&bed.run_one(1, work)), Status::Ok);
    }
    assert_eq!(bed.seen.count_of(Counter::Faults), 0);
}

#[test]
fn long_work_is_cut_into_pieces_that_are_all_of_it() {
    let mut bed = Bed::build(spec(), |memory| std::sync::Arc::new(hw_host::HostEngine::new(memory)), 3 * PAGE + 5);
    bed = bed.prepared();
    let data: Vec<u8> = (0..64 * PAGE).map(|i| (i * i / 3) as u8).collect();
    bed.set_ram(DATA, &data);
    bed.ok(Opcode::Map, 1, &map_bytes(1 << 36, RW, &[(DATA + 0x40_0000, 32 * PAGE), (DATA + 0x80_0000, 32 * PAGE)]));
    let record = bed.run_one(1, copy(D, 1 << 36, 64 * PAGE));
    assert_eq!((status(&record), record.bytes.get()), (Status::Ok, 64 * PAGE));
    assert!(bed.ram(DATA + 0x40_0000, 32 * PAGE as usize) == data[..32 * PAGE as usize]);
    assert!(bed.ram(DATA + 0x80_0000, 32 * PAGE as usize) == data[32 * PAGE as usize..]);
    let longest = bed
        .engine
        .state
        .lock()
        .unwrap()
        .seen
        .iter()
        .map(|transfer| match &transfer.work {
            Work::Copy { dst, .. } => hw_engine::total_len(dst),
            _ => 0,
        })
        .max();
    assert_eq!(longest, Some(3 * PAGE), "the limit, rounded down to whole patterns");
    let record = bed.run_one(1, fill(D + 1, 10 * PAGE + 3, 0x0807_0605_0403_0201));
    assert_eq!(status(&record), Status::Ok);
    let filled = bed.ram(DATA + 1, 10 * PAGE as usize + 3);
    assert!(filled.iter().enumerate().all(|(i, byte)| *byte == (i % 8) as u8 + 1), "the pattern runs on");
}

/// Nor is it given the same piece for ever.
#[test]
fn an_engine_that_says_it_is_well_and_moves_nothing_has_failed() {
    let mut bed = Bed::ready();
    bed.map(1, DATA + (8 << 20), 4 << 20);
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &[fill(IOVA + DATA + (8 << 20), 4 << 20, 1)]);
    bed.drain();
    let job = bed.engine.state.lock().unwrap().held.remove(0).job;
    let nothing = hw_engine::Finished { job, bytes: 0, result: Ok(()), raised: false, value: 0 };
    bed.engine.state.lock().unwrap().finished.push(nothing);
    bed.drain();
    assert_eq!((bed.engine.held(), bed.statuses(batch)), (0, vec![Some(Status::IoErr)]));
}

#[test]
fn work_is_cut_no_shorter_than_whoever_carries_it_takes() {
    let mut bed = Bed::build(spec(), |memory| std::sync::Arc::new(hw_host::HostEngine::new(memory)), 2 * PAGE);
    bed = bed.prepared();
    *bed.engine.longest.lock().unwrap() = Some(16 * PAGE + 5);
    for (pages, pieces) in [(16, 1), (40, 3)] {
        let before = bed.engine.state.lock().unwrap().seen.len();
        let record = bed.run_one(1, fill(D, pages * PAGE, 0));
        assert_eq!((status(&record), record.bytes.get()), (Status::Ok, pages * PAGE));
        assert_eq!(bed.engine.state.lock().unwrap().seen.len() - before, pieces);
    }
}

#[test]
fn engine_error_says_how_much_was_moved() {
    let mut bed = bed();
    bed.engine.set(Mode::Fail(5));
    let record = bed.run_one(1, copy(D, VA, 64));
    assert_eq!((status(&record), record.bytes.get(), path(&record)), (Status::IoErr, 5, LOCAL));
    bed.reset_stream(1, 0);
    bed.engine.set(Mode::Fail(0));
    let record = bed.run_one(1, copy(D, VA, 64));
    assert_eq!((status(&record), record.bytes.get(), path(&record)), (Status::IoErr, 0, NONE));
}

#[test]
fn fence_flushes_its_initiator_or_everybody() {
    let mut bed = bed();
    let flushed = |bed: &Bed| -> Vec<EndpointId> {
        let mut state = bed.engine.state.lock().unwrap();
        let seen = std::mem::take(&mut state.seen);
        seen.iter().filter(|transfer| transfer.work == Work::Flush).map(|transfer| transfer.initiator).collect()
    };
    flushed(&bed);
    let record = bed.run_one(1, fence().by(FPGA));
    assert_eq!((status(&record), path(&record), record.bytes.get()), (Status::Ok, NONE, 0));
    assert_eq!(flushed(&bed), [FPGA]);
    assert_eq!(status(&bed.run_one(1, fence())), Status::Ok);
    let mut all = flushed(&bed);
    all.sort_unstable();
    assert_eq!(all, [GPU, FPGA]);
}

#[test]
fn system_flag_flushes_after_the_transfer_and_before_its_completion() {
    let mut bed = bed();
    bed.engine.set(Mode::Hold);
    let mut work = copy(D, VA, 64);
    work.flags = WORK_SYSTEM.into();
    let batch = bed.submit(1, &[work]);
    bed.drain();
    bed.engine.release(0);
    bed.drain();
    assert_eq!(bed.statuses(batch), [None], "the flush is under way");
    let held = bed.engine.state.lock().unwrap().held[0].clone();
    assert_eq!((held.work, held.initiator), (Work::Flush, GPU));
    bed.engine.release(0);
    bed.drain();
    assert_eq!(bed.statuses(batch), [Some(Status::Ok)]);
    assert_eq!(bed.records(batch)[0].bytes.get(), 64);
    assert_eq!(bed.seen.gauge_of(Gauge::InFlight), 0);
}

#[test]
fn domains_do_not_see_each_others_memory() {
    let mut bed = bed();
    bed.attach(2, GPU);
    bed.attach(2, FPGA);
    let record = bed.run_one(2, copy(D, VA, 8));
    assert_eq!((status(&record), record.fault_address.get()), (Status::Fault, D));
    bed.alloc(2, GPU, VA, PAGE);
    bed.run_one(2, fill(VA, 8, 0x22).stream(1));
    bed.run_one(1, fill(VA, 8, 0x11).stream(1));
    bed.map(2, DATA, PAGE);
    bed.run_one(2, copy(VA, D, 8).stream(1));
    assert_eq!(bed.ram(DATA, 1), [0x22]);
}
