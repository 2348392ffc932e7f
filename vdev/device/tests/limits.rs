//! Limits of a tenant: what is refused, what waits, and what changes while there is more than a new limit allows.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use std::sync::Arc;

use common::*;
use hw_engine::DmaEngine;
use hw_host::HostEngine;
use vdev_device::{Counter, DeviceSpec, Limits};
use vdev_wire::{Opcode, ProbeReply, Status, WorkDescriptor};
use zerocopy::IntoBytes;

fn bed(limits: Limits) -> Bed {
    Bed::with(DeviceSpec { limits, ..spec() }).prepared()
}

fn map_one(bed: &mut Bed, domain: u32, page: u64) -> (Status, u64) {
    let answer = bed.call(Opcode::Map, domain, &map_bytes(page * PAGE, RW, &[(DATA, PAGE)]));
    (answer.status, answer.detail)
}

#[test]
fn guest_memory_is_counted_in_pages_over_all_domains() {
    // The bed maps 256 pages.
    let mut bed = bed(Limits { max_pinned_pages: 258, ..spec().limits });
    bed.attach(2, GPU);
    assert_eq!(map_one(&mut bed, 1, 1).0, Status::Ok);
    assert_eq!(map_one(&mut bed, 2, 1).0, Status::Ok);
    assert_eq!(map_one(&mut bed, 2, 2), (Status::Quota, 258));
    bed.alloc(1, GPU, 1 << 40, 8 * PAGE);
    assert_eq!(bed.unmap(1, PAGE, 2 * PAGE - 1).status, Status::Ok);
    assert_eq!(map_one(&mut bed, 2, 2).0, Status::Ok, "a page came back; a buffer's are not the guest's memory");
    assert_eq!(bed.detach_all(1).status, Status::Ok);
    assert_eq!((3..=258).map(|page| map_one(&mut bed, 2, page).0).filter(|status| *status == Status::Ok).count(), 256);
    assert_eq!(map_one(&mut bed, 2, 300), (Status::Quota, 258));
}

#[test]
fn events_wait_up_to_the_limit_in_force() {
    let mut bed = bed(Limits { max_events: 4, ..spec().limits });
    let fault = |bed: &mut Bed| {
        bed.run(1, &[fill(0x5000, 8, 0)]);
        bed.reset_stream(1, 0);
    };
    (0..6).for_each(|_| fault(&mut bed));
    assert_eq!(bed.seen.count_of(Counter::EventsDropped), 2);
    bed.device.set_limits(&Limits { max_events: 2, ..spec().limits }).unwrap();
    fault(&mut bed);
    assert_eq!(bed.seen.count_of(Counter::EventsDropped), 3);
    bed.post_events(8);
    let kinds: Vec<_> = bed.take_events().iter().map(|event| (event.kind.get(), event.dropped_total.get())).collect();
    let (fault, overflow) = (vdev_wire::EventKind::Fault as u16, vdev_wire::EventKind::Overflow as u16);
    assert_eq!(kinds, [(fault, 3), (fault, 3), (fault, 3), (fault, 3), (overflow, 3)], "those that waited stay");
}

#[test]
fn requests_that_come_too_fast_wait_and_none_is_lost() {
    let slow = Limits { control_rate: 1, ..spec().limits };
    let mut bed = Bed::with(DeviceSpec { limits: slow, ..spec() });
    let hello = bed.hello();
    assert_eq!(hello.status, Status::Ok);
    let mut calls = Vec::new();
    let mut answered = 0;
    // A ring of 64 entries takes 32 requests at a time.
    for _ in 0..8 {
        calls.extend((0..24).map(|_| bed.start(Opcode::Probe, 0, &[])));
        bed.drain();
        let before = calls.len();
        calls.retain(|call| bed.answer(*call).is_none());
        answered += before - calls.len();
        if !calls.is_empty() {
            break;
        }
    }
    // HELLO was one of the 64 that may come at once; a second brings one more.
    assert!((63..80).contains(&answered), "{answered}");
    assert!(!calls.is_empty());
    assert!(bed.device.poll().is_some_and(|rest| !rest.is_zero()), "the timekeeper comes back by itself");
    assert!(!bed.rings[0].wants_notice(), "and needs no kick");
    bed.device.set_limits(&spec().limits).unwrap();
    bed.until("the answers", |bed| {
        calls.retain(|call| bed.answer(*call).is_none());
        calls.is_empty()
    });
    assert!(bed.rings[0].wants_notice());
}

#[test]
fn lower_limits_take_nothing_away_and_refuse_what_is_new() {
    let mut bed = bed(spec().limits);
    bed.attach(2, GPU);
    let handles: Vec<_> = (0..3).map(|n| bed.alloc(1, GPU, (1 << 40) + n * PAGE, PAGE)).collect();
    let low = Limits { max_domains: 1, max_buffers: 1, max_mappings: 1, max_segments: 1, ..spec().limits };
    bed.device.set_limits(&low).unwrap();
    let quota = |limit| (Status::Quota, limit);
    assert_eq!(map_one(&mut bed, 1, 1), quota(1));
    let alloc_one = alloc(GPU, RW, 1 << 41, PAGE);
    let answer = bed.call(Opcode::Alloc, 1, alloc_one.as_bytes());
    assert_eq!((answer.status, answer.detail), quota(1));
    assert_eq!(bed.call(Opcode::Attach, 3, attach(GPU).as_bytes()).status, Status::Quota);
    assert_eq!(bed.call(Opcode::Attach, 2, attach(FPGA).as_bytes()).status, Status::Ok, "no new domain");
    let two = map_bytes(PAGE, RW, &[(DATA, PAGE), (DATA + 8 * PAGE, PAGE)]);
    assert_eq!(bed.call(Opcode::Map, 1, &two).status, Status::Quota);
    assert_eq!(bed.run(1, &[fill(1 << 40, 64, 0)])[0].status.get(), Status::Ok.to_raw(), "what there is works");
    let probe: ProbeReply = bed.ok(Opcode::Probe, 0, &[]).read();
    assert_eq!((probe.max_domains.get(), probe.max_buffers.get(), probe.max_segments.get()), (1, 1, 1));
    handles.into_iter().for_each(|handle| assert_eq!(bed.free(1, handle).status, Status::Ok));
    bed.device.set_limits(&spec().limits).unwrap();
    assert_eq!(map_one(&mut bed, 1, 1).0, Status::Ok);
}

#[test]
fn there_are_no_more_mappings_than_the_engines_iommu_holds() {
    let limits = |max_mappings| Limits { max_mappings, ..spec().limits };
    let engine = |memory| ScriptEngine::mapping(Arc::new(HostEngine::new(memory)), 1 << 20, 3) as Arc<dyn DmaEngine>;
    let mut bed = Bed::over(DeviceSpec { limits: limits(8), ..spec() }, engine).prepared();
    let told = |bed: &mut Bed| bed.ok(Opcode::Probe, 0, &[]).read::<ProbeReply>().max_mappings.get();
    assert_eq!(told(&mut bed), 3);
    // The bed has one.
    assert_eq!((map_one(&mut bed, 1, 1).0, map_one(&mut bed, 1, 2).0), (Status::Ok, Status::Ok));
    assert_eq!(map_one(&mut bed, 1, 3), (Status::Quota, 3));
    bed.device.set_limits(&limits(2)).unwrap();
    assert_eq!(told(&mut bed), 2);
    bed.device.set_limits(&limits(100)).unwrap();
    assert_eq!((told(&mut bed), map_one(&mut bed, 1, 3)), (3, (Status::Quota, 3)));
}

#[test]
fn limits_on_work_hold_for_the_next_work() {
    let mut bed = bed(spec().limits);
    bed.engine.set(Mode::Hold);
    let works: Vec<WorkDescriptor> = (0..4).map(|_| fill(IOVA + DATA, 64, 0)).collect();
    let first = bed.submit(1, &works);
    bed.drain();
    bed.device.set_limits(&Limits { stream_credits: 2, ..spec().limits }).unwrap();
    let busy = bed.run(1, &[fill(IOVA + DATA, 64, 0)]);
    assert_eq!(busy[0].status.get(), Status::Busy.to_raw());
    bed.device.set_limits(&Limits { max_streams: 1, ..spec().limits }).unwrap();
    let many = bed.run(1, &[fill(IOVA + DATA, 64, 0).stream(9)]);
    assert_eq!(many[0].status.get(), Status::Quota.to_raw());
    bed.device.set_limits(&Limits { max_in_flight: 3, ..spec().limits }).unwrap();
    let full = bed.run(1, &[fill(IOVA + DATA, 64, 0).stream(9)]);
    assert_eq!(full[0].status.get(), Status::Busy.to_raw());
    let short = Limits {
        default_timeout: std::time::Duration::from_millis(1),
        max_timeout: std::time::Duration::from_millis(1),
        ..spec().limits
    };
    bed.device.set_limits(&short).unwrap();
    let mut late = fill(IOVA + DATA, 64, 0).stream(9);
    late.timeout_ms = 2.into();
    assert_eq!(bed.run(1, &[late])[0].status.get(), Status::Range.to_raw());
    assert_eq!(bed.statuses(first), [None; 4], "what was taken goes on");
    bed.engine.set(Mode::Inline);
    bed.engine.release(0);
    bed.until("the first four", |bed| bed.is_used(first));
    assert!(bed.statuses(first).iter().all(|status| *status == Some(Status::Ok)));
}

#[test]
fn limits_that_make_no_device_change_nothing() {
    let mut bed = bed(spec().limits);
    let bad = Limits { max_domains: 0, max_buffers: 1, ..spec().limits };
    let said = bed.device.set_limits(&bad).unwrap_err().to_string();
    assert!(said.contains("max_domains"), "{said}");
    let probe: ProbeReply = bed.ok(Opcode::Probe, 0, &[]).read();
    assert_eq!(probe.max_buffers.get(), spec().limits.max_buffers);
}
