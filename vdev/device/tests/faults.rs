//! The two sides of a refusal: what the guest is told, what the operator is told, and what a flood of them leaves of it.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use common::*;
use iommu_addr::{Access, EndpointId, Iova, Range};
use proptest::prelude::*;
use vdev_device::{Counter, FaultRecord, MappingKind, Provenance, Relation};
use vdev_wire::{
    ALLOC_REGISTERS, Event, EventKind, FaultReason, MAP_READ, OWNER_HIDDEN, Opcode, Status, WorkDescriptor,
};
use zerocopy::IntoBytes;

const D: u64 = IOVA + DATA;
const VA: u64 = 1 << 40;
const REGS: u64 = 1 << 41;

/// The operator's record and the guest's event of work that is refused.
fn both(bed: &mut Bed, work: WorkDescriptor) -> (FaultRecord, Event) {
    bed.run_one(1, work);
    bed.reset_stream(1, 0);
    last(bed)
}

fn last(bed: &mut Bed) -> (FaultRecord, Event) {
    let events = bed.take_events();
    (*bed.seen.faults.lock().unwrap().last().unwrap(), *events.last().unwrap())
}

fn range(start: u64, len: u64) -> Range<Iova> {
    Range::with_len(Iova(start), len).unwrap()
}

fn endpoints(record: &FaultRecord) -> (u32, u32) {
    let raw = |endpoint: Option<EndpointId>| endpoint.map_or(OWNER_HIDDEN, EndpointId::to_raw);
    (raw(record.accessor), raw(record.owner))
}

#[test]
fn owner_is_told_to_the_guest_if_it_is_its_own_and_to_the_operator_always() {
    let mut bed = Bed::ready();
    bed.post_events(8);
    let own = bed.alloc(1, FPGA, VA, PAGE);
    let (record, event) = both(&mut bed, copy(VA, D, 8).by(GPU));
    assert_eq!(endpoints(&record), (GPU.to_raw(), FPGA.to_raw()));
    assert_eq!((event.accessor.get(), event.owner.get()), endpoints(&record), "its own: both are told the same");

    // The same endpoint's memory, as another program of the guest tries to free it.
    bed.attach(2, GPU);
    assert_eq!(bed.free(2, own).status, Status::NoEnt);
    let (record, event) = last(&mut bed);
    assert_eq!((record.reason, record.value, event.value.get()), (FaultReason::Domain, own, own));
    assert_eq!(endpoints(&record), (OWNER_HIDDEN, FPGA.to_raw()), "the operator sees whose it is");
    assert_eq!((event.accessor.get(), event.owner.get()), (OWNER_HIDDEN, OWNER_HIDDEN));

    // The guest cannot tell that from a handle that never was.
    assert_eq!(bed.free(2, own + 5).status, Status::NoEnt);
    let (record, invented) = last(&mut bed);
    assert_eq!(endpoints(&record), (OWNER_HIDDEN, OWNER_HIDDEN), "nobody's");
    let same = Event { seq: event.seq, value: event.value, ..invented };
    assert_eq!(same, event);
}

#[test]
fn operator_is_told_which_mapping_it_was_and_the_guest_is_not() {
    let mut bed = Bed::ready();
    bed.post_events(8);
    let before = bed.seen.faults.lock().unwrap().len();
    let about = |bed: &mut Bed, work| both(bed, work).0.mapping.unwrap();
    let first = about(&mut bed, fill(VA, 8, 0)).request;
    let buffer = bed.alloc(1, GPU, VA, 2 * PAGE);
    bed.ok(Opcode::Map, 1, &map_bytes(VA + 2 * PAGE, MAP_READ, &[(DATA, PAGE)]));
    let registers = alloc(FPGA, RW | ALLOC_REGISTERS, REGS, PAGE);
    bed.ok(Opcode::Alloc, 1, registers.as_bytes());

    let held = |kind, range, access, request| Provenance {
        relation: Relation::Holds,
        kind,
        range,
        access,
        request,
        is_draining: false,
    };
    let memory = held(MappingKind::Guest, range(VA + 2 * PAGE, PAGE), Access::READ, first + 2);
    assert_eq!(about(&mut bed, fill(VA + 2 * PAGE - 8, 16, 0)), memory, "the one that refuses, not the one before");
    assert_eq!(
        about(&mut bed, copy(VA + 8, D, 8).by(FPGA)),
        held(MappingKind::Buffer, range(VA, 2 * PAGE), Access::RW, first + 1),
        "no peer right"
    );
    assert_eq!(
        about(&mut bed, copy(REGS, D, 2)),
        held(MappingKind::Registers, range(REGS, PAGE), Access::RW, first + 3),
        "not how registers are accessed"
    );
    let nearest = about(&mut bed, copy(D, VA + 3 * PAGE, 8));
    assert_eq!((nearest.relation, nearest.request), (Relation::Nearest, first + 2));
    bed.free(1, buffer);
    let gone = about(&mut bed, copy(VA, D, 8));
    assert_eq!((gone.relation, gone.request, gone.is_draining), (Relation::Held, first + 1, false));
    let none = both(&mut bed, copy(D, D + PAGE, 8).by(NIC)).0;
    assert_eq!((none.reason, none.mapping), (FaultReason::Domain, None));
    assert_eq!(bed.seen.faults.lock().unwrap().len() - before, 7);
}

#[test]
fn mapping_that_drains_says_so() {
    let mut bed = Bed::ready();
    bed.post_events(2);
    bed.map(1, 64 << 20, PAGE);
    bed.engine.set(Mode::Hold);
    let at = IOVA + (64 << 20);
    let batch = bed.submit(1, &[copy(at, D, 8).stream(1)]);
    bed.drain();
    let unmap = bed.start(Opcode::Unmap, 1, unmap(at, at + PAGE - 1).as_bytes());
    let mapping = both(&mut bed, copy(at + 8, D, 8)).0.mapping.unwrap();
    assert_eq!((mapping.relation, mapping.is_draining, mapping.range), (Relation::Holds, true, range(at, PAGE)));
    bed.engine.release(0);
    assert_eq!(bed.answer(unmap).unwrap().status, Status::Ok);
    assert_eq!(bed.statuses(batch), [Some(Status::Ok)]);
}

/// What a driver can know from the events that reached it.
#[derive(Default)]
struct Heard {
    delivered: u64,
    last: Option<Event>,
}

impl Heard {
    fn take(&mut self, bed: &mut Bed) {
        for event in bed.take_events() {
            let (seq, dropped) = (event.seq.get(), event.dropped_total.get());
            let before = self.last.map_or((0, 0), |last| (last.seq.get(), last.dropped_total.get()));
            assert!(seq > before.0 && dropped >= before.1, "numbers only grow");
            assert!(seq - 1 - self.delivered <= dropped, "what is missing before {seq} is counted as dropped");
            if event.kind.get() == EventKind::Overflow as u16 {
                assert!(event.value.get() > 0 && event.value.get() <= dropped);
            }
            self.delivered += 1;
            self.last = Some(event);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 12, ..ProptestConfig::default() })]
    #[test]
    fn numbers_of_events_are_right_whatever_a_flood_does(
        steps in prop::collection::vec((0usize..120, 0usize..40), 1..12),
    ) {
        let mut bed = Bed::ready();
        let (mut heard, mut faults) = (Heard::default(), 0);
        for (count, buffers) in steps {
            // More streams than a domain may have would be refused otherwise.
            for count in [count.min(60), count.saturating_sub(60)] {
                let works: Vec<_> = (0..count as u32).map(|n| fill(0x5000, 8, 0).stream(n)).collect();
                bed.run(1, &works);
                (0..count as u32).for_each(|stream| bed.reset_stream(1, stream));
            }
            faults += count as u64;
            bed.post_events(buffers.min(bed.rings[1].room()));
            heard.take(&mut bed);
        }
        // Until nothing waits any more: a buffer is left over.
        loop {
            let before = heard.delivered;
            bed.post_events(bed.rings[1].room().min(32));
            heard.take(&mut bed);
            if heard.delivered == before {
                break;
            }
        }
        let (seq, dropped) = heard.last.map_or((0, 0), |last| (last.seq.get(), last.dropped_total.get()));
        prop_assert_eq!(seq, heard.delivered + dropped, "every event was delivered or counted");
        let overflows = seq - faults;
        prop_assert_eq!(overflows > 0, dropped > 0, "a drop is told of");
        prop_assert_eq!(bed.seen.count_of(Counter::EventsDropped), dropped);
        prop_assert_eq!(bed.seen.faults.lock().unwrap().len() as u64, faults, "the operator is told of every one");
    }
}

#[test]
fn events_that_an_earlier_driver_did_not_take_count_as_dropped() {
    let mut bed = Bed::ready();
    for _ in 0..3 {
        bed.run_one(1, fill(0x5000, 8, 0));
        bed.reset_stream(1, 0);
    }
    bed.hello();
    assert_eq!(bed.seen.count_of(Counter::EventsDropped), 3);
    bed.attach(1, GPU);
    bed.run_one(1, fill(0x5000, 8, 0));
    bed.post_events(1);
    let event = bed.take_events()[0];
    assert_eq!((event.seq.get(), event.dropped_total.get()), (4, 3));
}
