//! How long transfers take, with a clock that the tests move.

use std::sync::Arc;
use std::time::Duration;

use hw_engine::{
    Atomic, AtomicOp, DmaEngine, EngineError, Finished, JobId, LinkId, Route, Segments, Submit, Unlimited, Work,
};
use iommu_addr::EndpointId;

use crate::common::{Desk, FPGA, GPU, Wires, copy, devices, instant, own, ram};

const NS: Duration = Duration::from_nanos(1);

/// Links of one byte a nanosecond, no latency.
fn wired(engines: u16) -> Desk {
    Desk::by_hand(&devices(Duration::ZERO, engines), Wires::new(NS))
}

fn straight(dst: Segments, src: Segments) -> Work {
    copy(dst, src, Route::Direct)
}

#[test]
fn two_equal_transfers_on_one_link_end_at_t_and_2t() {
    let desk = wired(2);
    for n in 0..2 {
        desk.send(GPU, straight(own(FPGA, 1000 * n, 1000), own(GPU, 0, 1000)));
    }
    assert_eq!(desk.ends(), [(0, 1000), (1, 2000)]);
}

#[test]
fn opposite_directions_do_not_contend() {
    let desk = wired(1);
    desk.send(GPU, straight(own(FPGA, 0, 1000), own(GPU, 0, 1000)));
    desk.send(FPGA, straight(own(GPU, 5000, 1000), own(FPGA, 5000, 1000)));
    assert_eq!(desk.ends(), [(0, 1000), (1, 1000)]);
}

#[test]
fn guest_memory_has_no_link_of_its_own() {
    let desk = wired(4);
    desk.send(GPU, straight(own(GPU, 0, 1000), ram(0x1000, 1000)));
    desk.send(FPGA, straight(own(FPGA, 0, 1000), ram(0x1000, 1000)));
    desk.send(GPU, straight(ram(0x3000, 1000), own(GPU, 2000, 1000)));
    assert_eq!(desk.ends(), [(0, 1000), (1, 1000), (2, 1000)]);
}

#[test]
fn a_copy_between_two_places_in_guest_memory_crosses_the_initiators_link() {
    let desk = wired(4);
    desk.send(GPU, straight(ram(0x3000, 600), ram(0x1000, 600)));
    desk.send(GPU, straight(ram(0x5000, 400), own(GPU, 0, 400)));
    desk.send(GPU, straight(own(GPU, 0x1000, 300), ram(0x5000, 300)));
    assert_eq!(desk.ends(), [(0, 600), (2, 900), (1, 1000)]);
}

#[test]
fn within_a_device_no_link_is_crossed() {
    let desk = wired(1);
    let end = desk.run(1, GPU, straight(own(GPU, 0x1000, 1000), own(GPU, 0, 1000)));
    assert_eq!(end, Finished { job: JobId(0), bytes: 1000, result: Ok(()), raised: false, value: 0 });
    // Two endpoints on one link are slices of one device.
    let mut config = devices(Duration::ZERO, 1);
    config.endpoints.iter_mut().for_each(|endpoint| endpoint.link = Some(LinkId(9)));
    let desk = Desk::by_hand(&config, Wires::new(NS));
    desk.run(1, GPU, straight(own(FPGA, 0, 1000), own(GPU, 0, 1000)));
}

#[test]
fn a_fill_comes_from_its_initiator() {
    let desk = wired(4);
    desk.run(1, GPU, Work::Fill { dst: own(GPU, 0, 500), pattern: 1 });
    desk.send(GPU, Work::Fill { dst: own(FPGA, 0, 500), pattern: 1 });
    desk.send(GPU, Work::Fill { dst: ram(0x1000, 500), pattern: 1 });
    assert_eq!(desk.ends(), [(1, 500), (2, 1000)]);
}

#[test]
fn an_atomic_operation_goes_there_and_comes_back() {
    let (add, compare) = (AtomicOp::Add, AtomicOp::CompareSwap { compare: 0 });
    let work = |at: Segments, op, len| Work::Atomic { at: at[0].at, atomic: Atomic { op, len, operand: 5 } };
    let desk = Desk::by_hand(&devices(50 * NS, 2), Wires::new(NS));
    desk.send(GPU, work(own(FPGA, 0, 8), add, 8));
    // The links are taken both ways.
    desk.send(FPGA, straight(own(FPGA, 64, 10), own(GPU, 0, 10)));
    desk.send(FPGA, straight(own(GPU, 64, 10), own(FPGA, 64, 10)));
    // Within a device it takes the engine alone.
    desk.send(GPU, work(own(GPU, 0, 4), compare, 4));
    assert_eq!(desk.ends(), [(3, 50), (0, 58), (1, 68), (2, 68)]);
    let read = [own(FPGA, 0, 8), own(GPU, 0, 8)].map(|at| desk.bytes(&at));
    assert_eq!(read, [5u64.to_le_bytes(); 2]);
    let at_once = Desk::by_hand(&instant(), Arc::new(Unlimited));
    at_once.run(1, GPU, work(own(FPGA, 0, 8), add, 8));
    assert_eq!(at_once.run(1, FPGA, work(own(FPGA, 0, 8), add, 8)).value, 5);
}

#[test]
fn each_part_of_a_list_crosses_its_own_links() {
    let desk = wired(4);
    let src = [own(GPU, 0, 100), ram(0x1000, 300), own(FPGA, 0, 50)].concat().into();
    desk.send(GPU, straight(own(FPGA, 0x1000, 450), src));
    // The FPGA's link took 400 in, the GPU's 100 out, the FPGA's own 50 nothing.
    desk.send(FPGA, straight(own(FPGA, 0x8000, 10), ram(0x1000, 10)));
    desk.send(GPU, straight(ram(0x4000, 10), own(GPU, 0, 10)));
    assert_eq!(desk.ends(), [(2, 110), (0, 400), (1, 410)]);
}

#[test]
fn the_hops_of_a_staged_copy_follow_one_another() {
    let desk = Desk::by_hand(&devices(50 * NS, 4), Wires::new(NS));
    desk.send(GPU, copy(own(FPGA, 0, 1000), own(GPU, 0, 1000), Route::Staged));
    assert_eq!(desk.ends(), [(0, 1000 + 1000 + 2 * 50)]);
}

#[test]
fn a_copy_engine_does_one_transfer_at_a_time() {
    for (engines, want) in [(1, [(0, 50), (1, 100), (2, 150)]), (2, [(0, 50), (1, 50), (2, 100)])] {
        let desk = Desk::by_hand(&devices(50 * NS, engines), Arc::new(Unlimited));
        for _ in 0..3 {
            desk.send(GPU, straight(own(FPGA, 0, 8), own(GPU, 0, 8)));
        }
        desk.send(FPGA, straight(own(GPU, 64, 8), own(FPGA, 64, 8)));
        let ends = desk.ends();
        assert!(want.iter().all(|end| ends.contains(end)), "{ends:?}");
        assert!(ends.contains(&(3, 50)), "the other endpoint's engine is free");
    }
}

#[test]
fn engines_that_share_a_ledger_contend() {
    let wires = Wires::new(NS);
    let tenants = [0, 1].map(|_| Desk::by_hand(&devices(Duration::ZERO, 1), wires.clone()));
    for tenant in &tenants {
        tenant.send(GPU, straight(own(FPGA, 0, 700), own(GPU, 0, 700)));
    }
    assert_eq!(tenants.each_ref().map(Desk::ends), [[(0, 700)], [(0, 1400)]]);
}

#[test]
fn time_that_costs_nothing_is_not_waited_for() {
    let desk = Desk::by_hand(&instant(), Wires::new(NS));
    desk.run(1, GPU, straight(own(FPGA, 0, 1000), own(GPU, 0, 1000)));
    // A link as fast as memory.
    let desk = Desk::by_hand(&devices(Duration::ZERO, 1), Arc::new(Unlimited));
    desk.run(1, GPU, straight(own(FPGA, 0, 1000), own(GPU, 0, 1000)));
    desk.run(1, GPU, Work::Flush);
}

#[test]
fn with_a_clock_that_stands_still_bytes_move_when_due() {
    let desk = wired(1);
    desk.memory.fill(own(GPU, 0, 1)[0].at, 100, u64::MAX).unwrap();
    desk.send(GPU, straight(own(FPGA, 0, 100), own(GPU, 0, 100)));
    let mut out = Vec::new();
    desk.clock.advance(99 * NS);
    assert_eq!(desk.engine.poll(&mut out), Some(NS));
    assert_eq!((out.len(), desk.bytes(&own(FPGA, 0, 100))), (0, vec![0; 100]));
    desk.clock.advance(NS);
    assert_eq!(desk.engine.poll(&mut out), None);
    assert_eq!((out.len(), desk.bytes(&own(FPGA, 0, 100))), (1, vec![0xff; 100]));
}

#[test]
fn a_slot_is_free_once_its_end_was_reported() {
    let mut config = devices(Duration::ZERO, 1);
    config.queue_depth = 2;
    let desk = Desk::by_hand(&config, Wires::new(NS));
    let work = || straight(own(FPGA, 0, 10), own(GPU, 0, 10));
    desk.send(GPU, work());
    desk.send(GPU, work());
    assert_eq!(desk.submit(1, FPGA, work()), Err(EngineError::Busy));
    assert_eq!(desk.submit(1, GPU, Work::Flush), Err(EngineError::Busy));
    desk.clock.advance(20 * NS);
    assert_eq!(desk.submit(1, GPU, work()), Err(EngineError::Busy), "nobody has asked for the ends yet");
    // A full engine books nothing for what it does not take.
    assert_eq!(desk.ends(), [(0, 20), (1, 20)]);
    desk.send(GPU, work());
    assert_eq!(desk.ends(), [(5, 30)]);
}

#[test]
fn an_abort_before_the_bytes_moved_moves_none() {
    let desk = wired(1);
    desk.memory.fill(own(GPU, 0, 1)[0].at, 100, u64::MAX).unwrap();
    desk.send(GPU, straight(own(FPGA, 0, 100), own(GPU, 0, 100)));
    desk.send(GPU, straight(own(FPGA, 200, 100), own(GPU, 0, 100)));
    desk.engine.abort(JobId(0));
    let mut out = Vec::new();
    desk.engine.poll(&mut out);
    assert_eq!(out, [Finished::failed(JobId(0), EngineError::Aborted)]);
    assert_eq!(desk.ends(), [(1, 200)]);
    assert_eq!(desk.bytes(&own(FPGA, 0, 100)), vec![0; 100]);
    assert_eq!(desk.bytes(&own(FPGA, 200, 100)), vec![0xff; 100]);
}

#[test]
fn a_flush_waits_for_the_transfer_that_was_given_up_before_it() {
    let desk = wired(1);
    desk.send(GPU, straight(own(FPGA, 0, 100), own(GPU, 0, 100)));
    desk.send(GPU, Work::Flush);
    desk.send(FPGA, straight(own(GPU, 200, 10), own(FPGA, 0, 10)));
    desk.engine.abort(JobId(0));
    assert_eq!(desk.ends(), [(0, 0), (2, 10), (1, 100)]);
}

#[test]
fn a_quiet_engine_by_hand_gives_up_what_is_not_due() {
    let desk = wired(1);
    desk.send(GPU, straight(own(FPGA, 0, 100), own(GPU, 0, 100)));
    desk.send(GPU, Work::Flush);
    let mut out = Vec::new();
    desk.engine.quiesce(&mut out);
    assert!(out.iter().all(|end| (end.bytes, end.result) == (0, Err(EngineError::Aborted))));
    assert_eq!((out.len(), desk.ends()), (2, vec![]));
}

#[test]
fn an_initiator_that_is_no_endpoint_is_refused() {
    let desk = wired(1);
    let nobody = EndpointId::local(77);
    let unknown = EngineError::Device { code: hw_sim::SimEngine::UNKNOWN_ENDPOINT };
    assert_eq!(desk.submit(1, nobody, Work::Flush), Err(unknown));
    assert_eq!(desk.submit(1, nobody, straight(own(FPGA, 0, 1), own(GPU, 0, 1))), Err(unknown));
    assert!(matches!(desk.submit(1, GPU, Work::Flush), Ok(Submit::Executed(_))));
}

#[test]
fn endpoints_that_make_no_sense_are_refused() {
    let refused = |config: &hw_sim::SimConfig| {
        let (memory, clock) = (Arc::new(hw_engine::conformance::FlatMemory::new()), hw_sim::Clock::Monotonic);
        hw_sim::SimEngine::new(config, memory, Arc::new(Unlimited), clock).err().unwrap().to_string()
    };
    assert!(refused(&devices(NS, 0)).contains("copy engines"));
    let mut twice = instant();
    twice.endpoints[1].spec.id = GPU;
    assert!(refused(&twice).contains("twice"));
    let mut full = instant();
    full.queue_depth = 0;
    assert!(refused(&full).contains("queue depth"));
}
