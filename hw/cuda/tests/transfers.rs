//! How transfers are put into streams, and when they have ended.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Fake, World, copy, copy_all, own, ram, regions, transfer, until};
use hw_cuda::Settings;
use hw_engine::{Atomic, AtomicOp, DmaEngine, EngineError, JobId, Memory, Owner, Submit, Work};

const MIB: u64 = 1 << 20;
const GATHER: u64 = 64 << 10;
/// Guest memory that nothing has used.
const OTHER: u64 = 1 << 40;

fn world_of(fake: Option<Fake>) -> Option<World> {
    let world = World::new(
        fake?,
        8 * MIB,
        &regions(&[(0, 8 * MIB), (OTHER, MIB)]),
        Settings { gather: GATHER, ..Settings::default() },
    );
    // What comes first is registered on the engine's thread.
    world.run(copy(own(0, 0), ram(0), 8));
    Some(world)
}

fn world() -> Option<World> {
    world_of(Fake::cuda())
}

/// Numbers of the driver before something, and what has come to them.
fn since<const N: usize>(world: &World, names: [&'static str; N]) -> impl Fn() -> [i64; N] + use<N> {
    let fake = Arc::clone(&world.fake);
    let before = names.map(|name| fake.get(name));
    move || std::array::from_fn(|n| fake.get(names[n]) - before[n])
}

/// Copies of so many bytes each, out of the slice to places in guest memory that do not touch.
fn begin(world: &World, count: u64, len: u64) {
    for n in 0..count {
        world.submit(n, copy(ram(n * 2 * len), own(0, n * len), len));
    }
}

#[test]
fn short_transfers_begin_together_and_long_ones_at_once() {
    let Some(world) = world() else { return };
    let calls = since(&world, ["batches", "batched", "copies"]);
    let ends = |count, len| {
        let ends = world.ends(count);
        assert!(ends.iter().all(|end| (end.bytes, end.result) == (len, Ok(()))), "{ends:?}");
    };
    begin(&world, 15, 4096);
    assert_eq!(calls(), [0, 0, 0], "they wait for the doorbell");
    world.engine.doorbell();
    assert_eq!(calls(), [1, 15, 0]);
    ends(15, 4096);
    begin(&world, 5, GATHER);
    ends(5, GATHER);
    assert_eq!((calls(), world.fake.get("longest_batched")), ([2, 20, 0], i64::try_from(GATHER).unwrap()));
    // Those that are not small begin with their like.
    begin(&world, 5, GATHER + 1);
    begin(&world, 5, 4096);
    assert_eq!(calls(), [2, 20, 0]);
    world.engine.doorbell();
    assert_eq!(calls(), [4, 30, 0]);
    assert_eq!(world.ends(10).len(), 10);
    begin(&world, 2, 1 + 16 * GATHER);
    assert_eq!(calls(), [4, 30, 2], "they wait for nothing");
    ends(2, 1 + 16 * GATHER);
    // For so few a call for all is not worth it.
    begin(&world, 3, 64);
    ends(3, 64);
    assert_eq!(calls(), [4, 30, 5]);
    world.end();
}

#[test]
fn many_that_are_gathered_do_not_wait_for_the_doorbell() {
    let Some(world) = world() else { return };
    let calls = since(&world, ["batches", "batched"]);
    for n in 0..600 {
        world.submit(n, copy(ram(16 * n), own(0, 16 * n), 8));
    }
    assert_eq!(calls(), [37, 592]);
    assert_eq!(world.ends(600).len(), 600);
    assert_eq!(calls(), [38, 600]);
    // Nor do few that keep the GPU busy for long: 80 us, at 54 GB/s.
    for n in 0..5 {
        assert_eq!(calls(), [38, 600]);
        world.submit(n, copy(ram(n * MIB), own(0, n * MIB), MIB));
    }
    assert_eq!(calls(), [39, 605]);
    assert_eq!(world.ends(5).len(), 5);
    world.end();
}

#[test]
fn a_driver_without_a_call_for_many_copies_one_by_one() {
    for version in [12080, 12000] {
        let Some(world) = world_of(Fake::cuda_of(version)) else { return };
        let calls = since(&world, ["batches", "copies", "in_rows"]);
        begin(&world, 20, 4096);
        assert!(world.ends(20).iter().all(|end| (end.bytes, end.result) == (4096, Ok(()))));
        assert_eq!(calls(), [0, 20, 0]);
        (0..8).for_each(|n| world.submit(n, copy(own(0, n * GATHER), ram(n * GATHER), GATHER / 2)));
        assert_eq!(world.ends(8).len(), 8);
        assert_eq!(calls(), [0, 28, 0], "also into the GPU");
        world.end();
    }
}

#[test]
fn a_stream_says_once_where_it_is_of_copies_that_come_while_others_are_under_way() {
    const LEN: u64 = MIB + 8;
    let Some(world) = world() else { return };
    world.submit(0, copy(own(0, 0), ram(0), LEN));
    world.ends(1);
    let carried_out = since(&world, ["executed"]);
    world.fake.set("stall", 1);
    for n in 0..8 {
        world.submit(n, copy(own(0, 0), ram(0), LEN));
        world.engine.doorbell();
    }
    world.fake.set("stall", 0);
    assert_eq!(world.ends(8).len(), 8);
    // Two lanes, and in each the first copy and all others.
    assert_eq!(carried_out(), [8 + 4]);
    world.end();
}

#[test]
fn looking_begins_what_was_gathered_too() {
    let Some(world) = world() else { return };
    let calls = since(&world, ["batches", "copies"]);
    begin(&world, 4, 64);
    let mut ends = Vec::new();
    world.engine.poll(&mut ends);
    assert_eq!(calls(), [1, 0]);
    until("they end", || world.fake.get("queued") == 0);
    world.engine.poll(&mut ends);
    assert_eq!(ends.len(), 4);
    world.end();
}

#[test]
fn ends_that_overlap_are_copied_as_if_through_a_buffer_wherever_in_the_transfer_they_are() {
    let Some(world) = world() else { return };
    let bytes: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
    world.engine.write_own(common::endpoint(0), 4096, &bytes).unwrap();
    let len = bytes.len() as u64;
    let moved = |from: u64, to: u64| {
        let (dst, src) = ([(ram(0), 8), (own(0, to), len)], [(own(0, 7 * MIB), 8), (own(0, from), len)]);
        world.submit(1, copy_all(&dst, &src));
        assert_eq!(world.ends(1)[0].bytes, len + 8);
        let mut have = vec![0; bytes.len()];
        world.engine.read_own(common::endpoint(0), to, &mut have).unwrap();
        assert!(have == bytes, "{from} {to}");
    };
    moved(4096, 5003);
    moved(5003, 4097);
    world.end();
}

#[test]
fn a_flush_ends_after_all_that_was_begun_before_it_and_others_writes_are_made_visible() {
    let Some(world) = world() else { return };
    let flushes = since(&world, ["flushes", "executed"]);
    world.fake.set("stall", 1);
    begin(&world, 2, 2 * MIB);
    world.submit(2, Work::Flush);
    world.submit(3, copy(own(0, 0), ram(7 * MIB), 8));
    world.fake.set("steps", 1);
    until("one is carried out", || flushes()[1] == 1);
    let mut ends = Vec::new();
    world.engine.poll(&mut ends);
    assert_eq!((ends.len(), flushes()[0]), (0, 0));
    world.fake.set("stall", 0);
    let ends: Vec<_> = world.ends(4).iter().map(|end| end.job.0).collect();
    let place = |job| ends.iter().position(|end| *end == job).unwrap();
    assert!(place(2) > place(0) && place(2) > place(1), "{ends:?}");
    assert_eq!(flushes()[0], 1);
    // With nothing before it.
    world.submit(4, Work::Flush);
    assert_eq!((world.ends(1)[0].result, flushes()[0]), (Ok(()), 2));
    world.end();
}

#[test]
fn a_flush_ends_after_what_waits_for_the_engines_own_thread() {
    let Some(world) = world() else { return };
    let dst = [iommu_addr::Segment { at: own(0, 0), len: 4096 }];
    world.fake.set("stall", 1);
    world.submit(1, Work::Fill { dst: dst.into_iter().collect(), pattern: 0x0102 });
    world.submit(2, Work::Flush);
    until("the thread is at the first one", || world.fake.get("queued") > 0);
    world.submit(3, Work::Flush);
    let mut ends = Vec::new();
    world.engine.poll(&mut ends);
    assert_eq!(ends, []);
    world.fake.set("stall", 0);
    assert_eq!(world.ends(3).iter().map(|end| end.job.0).collect::<Vec<_>>(), [1, 2, 3]);
    world.end();
}

#[test]
fn each_atomic_operation_under_way_says_what_it_found_and_copies_do_not_wait_for_it() {
    let Some(world) = world() else { return };
    let add = |at| Work::Atomic { at, atomic: Atomic { op: AtomicOp::Add, len: 8, operand: 3 } };
    let written = since(&world, ["executed"]);
    let (mut found, mut expected) = (Vec::new(), Vec::new());
    // More than may be under way, so that what they leave is where others left theirs.
    for round in 0..5 {
        (0..400).for_each(|n| world.submit(n, add(own(0, 4096))));
        let mut ends = world.ends(400);
        ends.sort_by_key(|end| end.job.0);
        assert!(ends.iter().all(|end| (end.bytes, end.result) == (8, Ok(()))));
        found.extend(ends.iter().map(|end| end.value));
        expected.extend((0..400).map(|n| 3 * (400 * round + n)));
    }
    assert_eq!(found, expected);
    assert!(written()[0] < 2500, "one word for all that had begun: {written:?}", written = written());
    world.fake.set("stall_programs", 1);
    world.submit(1, add(own(0, 4096)));
    world.submit(2, copy(ram(0), own(0, MIB), 64));
    world.submit(3, copy(own(0, 0), ram(0), 64));
    assert_eq!(world.ends(2).iter().map(|end| end.job.0).collect::<std::collections::BTreeSet<_>>(), [2, 3].into());
    world.fake.set("stall_programs", 0);
    assert_eq!(world.ends(1)[0].value, 3 * 2000);
    world.end();
}

/// They would wait for programs of whoever else has the GPU, or the processor would make them.
#[test]
fn short_copies_into_a_gpu_are_for_its_copy_engines_too() {
    let Some(world) = world() else { return };
    let calls = since(&world, ["batches", "batched", "copies", "in_rows"]);
    let bytes: Vec<u8> = (0..=u8::MAX).cycle().take(64 << 10).collect();
    world.memory.write(ram(0), &bytes).unwrap();
    world.fake.set("stall_programs", 1);
    let lens = [2, 3, 64, 65, 4095, 4096, 32_767, 32_766];
    for (n, len) in (0..).zip(lens) {
        world.submit(n, copy(own(0, n * GATHER + n % 3), ram(n), len));
    }
    let mut ends = world.ends(8);
    ends.sort_by_key(|end| end.job.0);
    assert!(ends.iter().zip(lens).all(|(end, len)| (end.bytes, end.result) == (len, Ok(()))), "{ends:?}");
    assert_eq!(calls(), [0, 0, 0, 8 + 4], "and the last byte of an odd number");
    (0..8).for_each(|n| world.submit(n, copy(own(0, (8 + n) * GATHER), ram(n), GATHER / 2)));
    assert_eq!(world.ends(8).len(), 8);
    assert_eq!(calls(), [1, 8, 0, 12], "longer ones are anyway");
    world.fake.set("stall_programs", 0);
    for (n, len) in (0..).zip(lens.map(|len| usize::try_from(len).unwrap())) {
        let mut have = vec![0; len + 2];
        world.engine.read_own(common::endpoint(0), n * GATHER + n % 3, &mut have).unwrap();
        let sent = bytes.iter().skip(usize::try_from(n).unwrap()).take(len);
        assert!(have.iter().eq(sent.chain(&[0; 2])), "{len}");
    }
    // Of a single byte there are no two rows.
    let calls = since(&world, ["copies", "in_rows"]);
    world.run(copy(own(0, 0), ram(0), 1));
    assert_eq!(calls(), [1, 0]);
    world.end();
}

#[test]
fn a_gpu_that_sees_all_writes_anyway_is_not_told_to() {
    let Some(fake) = Fake::cuda() else { return };
    fake.set("attribute 118", 200);
    let Some(world) = world_of(Some(fake)) else { return };
    world.submit(1, Work::Flush);
    assert_eq!((world.ends(1)[0].result, world.fake.get("flushes")), (Ok(()), 0));
    world.end();
}

#[test]
fn a_copy_that_is_aborted_still_ends_once_and_not_before_its_time() {
    let Some(world) = world() else { return };
    world.fake.set("stall", 1);
    begin(&world, 3, MIB);
    begin(&world, 3, 64);
    (0..3).for_each(|job| world.engine.abort(JobId(job)));
    let mut ends = Vec::new();
    world.engine.poll(&mut ends);
    assert!(ends.is_empty(), "the GPU still writes: {ends:?}");
    world.fake.set("stall", 0);
    assert_eq!(world.ends(6).len(), 6);
    world.end();
}

#[test]
fn what_has_not_begun_ends_when_it_is_aborted() {
    let Some(world) = world() else { return };
    let registers = since(&world, ["registers"]);
    let dst = [iommu_addr::Segment { at: own(0, 0), len: 4096 }];
    world.fake.set("stall", 1);
    // The engine's own thread is at this one.
    world.submit(1, Work::Fill { dst: dst.into_iter().collect(), pattern: 0x0102 });
    until("it has begun", || world.fake.get("queued") > 0);
    world.submit(2, copy(own(0, 0), ram(OTHER), 64));
    world.submit(3, Work::Flush);
    (1..4).for_each(|job| world.engine.abort(JobId(job)));
    let mut ends = Vec::new();
    world.engine.poll(&mut ends);
    let ends: Vec<_> = ends.iter().map(|end| (end.job.0, end.bytes, end.result)).collect();
    assert_eq!(ends, [2, 3].map(|job| (job, 0, Err(EngineError::Aborted))));
    world.fake.set("stall", 0);
    assert_eq!(world.ends(1)[0].result, Ok(()));
    world.run(copy(own(0, 0), ram(0), 8));
    assert_eq!(registers(), [0], "it was not begun after all");
    world.end();
}

#[test]
fn a_quiet_engine_has_waited_for_its_gpu() {
    let Some(world) = world() else { return };
    let calls = since(&world, ["executed", "batches"]);
    world.fake.set("stall", 1);
    begin(&world, 3, MIB);
    begin(&world, 8, 64);
    // Also what has to be registered first.
    world.submit(20, copy(own(0, 0), ram(OTHER), 64));
    world.submit(21, Work::Flush);
    let (mut ends, is_quiet) = (Vec::new(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            world.engine.quiesce(&mut ends);
            is_quiet.store(true, Ordering::Release);
        });
        until("it has begun all that it had", || calls()[1] == 1);
        assert!(!is_quiet.load(Ordering::Acquire));
        world.fake.set("stall", 0);
    });
    assert_eq!(ends.len(), 13);
    assert!(ends.iter().all(|end| end.result.is_ok()));
    assert!(calls()[0] >= 8, "three copies and all others, each with its word");
    let mut more = Vec::new();
    assert_eq!((world.engine.poll(&mut more), more.len()), (None, 0));
    world.run(copy(own(0, 0), ram(0), 8));
    world.end();
}

#[test]
fn an_engine_that_goes_waits_for_its_gpu() {
    let Some(world) = world() else { return };
    let World { engine, memory, fake, .. } = world;
    fake.set("delay", 2000);
    for n in 0..4 {
        engine.submit(&transfer(n, 0, copy(ram(n * MIB), own(0, n * MIB), MIB))).unwrap();
        engine.submit(&transfer(n + 4, 0, copy(own(0, 0), ram(8 * MIB - 8 * (n + 1)), 8))).unwrap();
    }
    drop(engine);
    drop(memory);
    fake.is_left_clean();
}

#[test]
fn a_full_engine_says_so() {
    let Some(world) = world() else { return };
    world.fake.set("stall", 1);
    let depth = world.engine.caps().queue_depth;
    let submit = |n: usize| world.engine.submit(&transfer(n as u64, 0, copy(own(0, 0), ram(64 * n as u64), 8)));
    for n in 0..depth {
        assert_eq!(submit(n), Ok(Submit::Submitted));
    }
    assert_eq!(submit(depth), Err(EngineError::Busy));
    world.fake.set("stall", 0);
    assert_eq!(world.ends(depth).len(), depth);
    world.run(copy(own(0, 0), ram(0), 8));
    world.end();
}

#[test]
fn somebody_is_woken_for_what_the_engines_own_thread_does() {
    let Some(world) = world() else { return };
    let woken = Arc::new(AtomicBool::new(false));
    let wake = Arc::clone(&woken);
    world.engine.on_progress(Box::new(move || wake.store(true, Ordering::Release)));
    let fill = |at| {
        let dst = [iommu_addr::Segment { at, len: 4099 }];
        Work::Fill { dst: dst.into_iter().collect(), pattern: 0x0102_0304_0506_0708 }
    };
    for (job, at) in [(1, own(0, 3)), (2, ram(3))] {
        world.submit(job, fill(at));
        until("it wakes", || woken.swap(false, Ordering::AcqRel));
        assert_eq!(world.ends(1)[0].bytes, 4099);
    }
    let mut bytes = [0; 8];
    world.memory.read(ram(3 + 4096 - 8), &mut bytes).unwrap();
    assert_eq!(bytes, [8, 7, 6, 5, 4, 3, 2, 1]);
    world.end();
}
