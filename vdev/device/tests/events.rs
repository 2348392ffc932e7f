//! Events, and what a device's own logic raises.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use common::*;
use hw_engine::{Initiated, Raised, Work};
use iommu_addr::{DomainId, EndpointId, Iova, Range};
use vdev_device::{Counter, Gauge};
use vdev_wire::{EventKind, FaultReason, OWNER_HIDDEN, PEER_READ, PEER_WRITE, Status};

const D: u64 = IOVA + DATA;
const VA: u64 = 1 << 40;

fn initiated(endpoint: EndpointId, domain: u32, src: u64, dst: u64, len: u64) -> Raised {
    let range = |start| Range::with_len(Iova(start), len).unwrap();
    Raised::Initiated(Initiated { endpoint, domain: DomainId(domain), src: range(src), dst: range(dst) })
}

/// One more fault.
fn fault(bed: &mut Bed, cookie: u64) {
    bed.run_one(1, fill(0x5000, 8, 0).cookie(cookie));
    bed.reset_stream(1, 0);
}

#[test]
fn events_wait_for_buffers_in_order() {
    let mut bed = Bed::ready();
    for cookie in 1..=3 {
        fault(&mut bed, cookie);
    }
    assert!(bed.take_events().is_empty());
    bed.post_events(2);
    let seqs = |bed: &mut Bed| -> Vec<(u64, u64)> {
        bed.take_events().iter().map(|event| (event.seq.get(), event.cookie.get())).collect()
    };
    assert_eq!(seqs(&mut bed), [(1, 1), (2, 2)]);
    bed.post_events(2);
    assert_eq!(seqs(&mut bed), [(3, 3)]);
    fault(&mut bed, 4);
    assert_eq!(seqs(&mut bed), [(4, 4)], "a buffer that waits is used at once");
    assert!(bed.rings[1].signals() > 0);
}

#[test]
fn events_beyond_the_bound_are_dropped_and_reported_once_there_is_room() {
    let mut bed = Bed::ready();
    for cookie in 1..=260 {
        fault(&mut bed, cookie);
    }
    assert_eq!((bed.seen.count_of(Counter::Events), bed.seen.count_of(Counter::EventsDropped)), (260, 4));
    let mut events = Vec::new();
    while events.len() < 257 {
        bed.post_events(32);
        let more = bed.take_events();
        assert!(!more.is_empty());
        events.extend(more);
    }
    assert_eq!(events[0].dropped_total.get(), 4);
    assert!((0..256).all(|i| events[i].seq.get() == i as u64 + 1), "the oldest survive, in order");
    let overflow = &events[256];
    assert_eq!(overflow.kind.get(), EventKind::Overflow as u16);
    assert_eq!((overflow.seq.get(), overflow.value.get(), overflow.dropped_total.get()), (261, 4, 4));
    assert_eq!(events.len(), 257, "one overflow");
    fault(&mut bed, 1);
    bed.post_events(1);
    assert_eq!(bed.take_events()[0].seq.get(), 262);
}

#[test]
fn buffers_too_small_or_malformed_come_back_empty() {
    let mut bed = Bed::ready();
    fault(&mut bed, 1);
    let at = bed.room(64);
    let small = bed.rings[1].push(&[], &[(at, 63)]);
    let readable = bed.rings[1].push(&[(at, 64)], &[]);
    bed.drain();
    assert_eq!(bed.rings[1].take_used(), [(small, 0), (readable, 0)]);
    bed.post_events(1);
    assert_eq!(bed.take_events().len(), 1, "the event is not lost");
}

#[test]
fn hello_forgets_events_of_the_earlier_driver() {
    let mut bed = Bed::ready();
    fault(&mut bed, 1);
    bed.hello();
    bed.post_events(2);
    assert!(bed.take_events().is_empty());
}

#[test]
fn user_interrupt_of_a_device_is_an_event_of_its_domain() {
    let mut bed = Bed::ready();
    bed.post_events(2);
    bed.engine.raise(Raised::Interrupt { endpoint: FPGA, domain: DomainId(1), vector: 3 });
    bed.engine.raise(Raised::Interrupt { endpoint: FPGA, domain: DomainId(9), vector: 3 });
    let events = bed.take_events();
    assert_eq!(events.len(), 1, "a domain that is not there has no events");
    let event = events[0];
    assert_eq!((event.kind.get(), event.value.get(), event.domain.get()), (EventKind::Interrupt as u16, 3, 1));
    assert_eq!((event.accessor.get(), event.owner.get()), (FPGA.to_raw(), OWNER_HIDDEN));
}

#[test]
fn device_that_initiates_gets_its_memory_translated_as_itself() {
    let mut bed = Bed::ready();
    bed.alloc(1, GPU, VA, PAGE);
    bed.enable(1, FPGA, GPU, PEER_WRITE);
    bed.engine.raise(initiated(FPGA, 1, D, VA, 64));
    bed.drain();
    let seen = bed.engine.state.lock().unwrap().seen.last().unwrap().clone();
    assert_eq!((seen.initiator, seen.domain), (FPGA, DomainId(1)));
    assert!(matches!(seen.work, Work::Kernel { .. }));
    assert_eq!(bed.seen.count_of(Counter::Kernels), 1);
    assert!(bed.engine.state.lock().unwrap().refused.is_empty());
}

#[test]
fn device_that_initiates_what_it_must_not_is_refused_and_a_fault() {
    let mut bed = Bed::ready();
    bed.alloc(1, GPU, VA, PAGE);
    bed.post_events(16);
    let statuses = |bed: &Bed| -> Vec<u32> {
        bed.engine.state.lock().unwrap().refused.iter().map(|(_, status)| *status).collect()
    };
    bed.engine.raise(initiated(FPGA, 1, D, VA, 64));
    bed.engine.raise(initiated(FPGA, 1, 0x5000, D, 64));
    bed.engine.raise(initiated(NIC, 1, D, D, 64));
    bed.engine.raise(initiated(FPGA, 9, D, D, 64));
    let events = bed.take_events();
    let of = |kind: EventKind| events.iter().filter(|event| event.kind.get() == kind as u16).collect::<Vec<_>>();
    let faults = of(EventKind::Fault);
    assert_eq!(of(EventKind::Interrupt).len(), 3, "each START ends with an interrupt; domain 9 is not there");
    let told: Vec<_> = faults.iter().map(|event| (event.reason, event.accessor.get(), event.address.get())).collect();
    assert!(told.contains(&(FaultReason::Peer as u8, FPGA.to_raw(), VA)));
    assert!(told.contains(&(FaultReason::Mapping as u8, FPGA.to_raw(), 0x5000)));
    assert!(told.contains(&(FaultReason::Domain as u8, NIC.to_raw(), 0)));
    let mut got = statuses(&bed);
    got.sort_unstable();
    let (fault, denied) = (Status::Fault.to_raw(), Status::Denied.to_raw());
    assert_eq!(got, [fault, fault, fault, denied]);
    assert_eq!(bed.seen.gauge_of(Gauge::InFlight), 0);
    let _ = PEER_READ;
}

#[test]
fn kernels_hold_their_memory_and_end_with_their_domain() {
    let mut bed = Bed::ready();
    bed.engine.set(Mode::Hold);
    bed.engine.raise(initiated(FPGA, 1, D, D + PAGE, 64));
    bed.engine.raise(initiated(FPGA, 1, D, D + PAGE, 64));
    bed.drain();
    assert_eq!(bed.engine.held(), 1, "one after the other");
    let all = vdev_wire::Attach { endpoint: vdev_wire::ENDPOINT_ALL.into(), flags: 0.into() };
    let detach = bed.start(vdev_wire::Opcode::Detach, 1, zerocopy::IntoBytes::as_bytes(&all));
    assert_eq!(bed.answer(detach), None);
    let refused = bed.engine.state.lock().unwrap().refused.len();
    assert_eq!(refused, 1, "the one that waited");
    bed.engine.release(0);
    assert_eq!(bed.answer(detach).unwrap().status, Status::Ok);
    bed.assert_empty();
}

#[test]
fn event_flood_of_one_turn_is_bounded() {
    let mut bed = Bed::ready();
    let works: Vec<_> = (0..128).map(|n| fill(0x5000, 8, 0).stream(n)).collect();
    for _ in 0..8 {
        bed.run(1, &works[..64]);
        for stream in 0..64 {
            bed.reset_stream(1, stream);
        }
    }
    assert_eq!(bed.seen.count_of(Counter::Events), 512);
    assert_eq!(bed.seen.count_of(Counter::EventsDropped), 256);
    assert_eq!(bed.seen.faults.lock().unwrap().len(), 512, "the operator sees all");
}

#[test]
fn more_events_than_buffers_ask_for_more_buffers() {
    let mut bed = Bed::ready();
    for cookie in 1..=70 {
        fault(&mut bed, cookie);
    }
    bed.post_events(64);
    while bed.device.drain(1) {}
    assert!(bed.rings[1].wants_notice(), "else nobody would look at the next buffers");
    assert_eq!(bed.take_events().len(), 64);
    bed.post_events(6);
    while bed.device.drain(1) {}
    assert_eq!(bed.rings[1].take_used().len(), 6);
}
