//! The cases. Each says one thing that holds for every engine.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use iommu_addr::{ApertureOffset, EndpointId, Gpa, Location, Segment};

use super::bed::Bed;
use super::{APERTURES, Noise, RAM};
use crate::{Atomic, AtomicOp, EngineError, Finished, JobId, Memory, Route, Segments, Work, total_len};

type Case = (&'static str, fn(&Bed));

pub(super) const ALL: [Case; 19] = [
    ("a copy reaches every pair of places", copy_between_places),
    ("segment lists need not match", copy_segment_lists),
    ("a long transfer is cut nowhere", copy_long),
    ("a fill keeps its phase across segments", fill_phase),
    ("an overlapping copy goes as if through a buffer", copy_overlap),
    ("a copy spans regions that touch", copy_spans_regions),
    ("an atomic operation changes one word and says what was there", atomics),
    ("atomic operations of many threads are all there", atomics_of_many),
    ("memory that is not there is an error, after an exact count", unreachable),
    ("a flush ends after what came before", flush_order),
    ("a full engine says so and takes more later", busy),
    ("an abort ends the transfer once", abort),
    ("an abort of nothing does nothing", abort_nothing),
    ("a quiet engine has nothing left", quiesce),
    ("an engine works on after it was quiet", quiesce_then_work),
    ("an idle engine has nothing to report", idle),
    ("many threads may submit", many_threads),
    ("random transfers move exactly their bytes", random_transfers),
    ("two endpoints are proved to be peers", proof),
];

const GPU: EndpointId = APERTURES[0].0;
const FPGA: EndpointId = APERTURES[1].0;

fn ram(gpa: u64) -> Location {
    Location::Ram(Gpa(gpa))
}

fn own(endpoint: EndpointId, offset: u64) -> Location {
    Location::Aperture { endpoint, offset: ApertureOffset(offset) }
}

fn seg(at: Location, len: u64) -> Segment {
    Segment { at, len }
}

fn copy(dst: &[Segment], src: &[Segment], route: Route) -> Work {
    Work::Copy { src: src.into(), dst: dst.into(), route }
}

fn fill(dst: &[Segment], pattern: u64) -> Work {
    Work::Fill { dst: dst.into(), pattern }
}

fn ends_well(bed: &Bed, initiator: EndpointId, work: &Work) {
    let end = bed.run(initiator, work);
    let want = match work {
        Work::Copy { dst, .. } | Work::Fill { dst, .. } | Work::Kernel { dst, .. } => total_len(dst),
        Work::Atomic { atomic, .. } => atomic.len,
        Work::Flush => 0,
    };
    assert_eq!((end.bytes, end.result), (want, Ok(())), "{work:?}");
    assert!(!end.raised, "moving bytes raises nothing");
    bed.compare();
}

fn copy_between_places(bed: &Bed) {
    let places = [ram(RAM[0].0), ram(RAM[2].0), own(GPU, 0), own(FPGA, 0)];
    for (i, &src) in places.iter().enumerate() {
        for (k, &dst) in places.iter().enumerate() {
            for initiator in [GPU, FPGA] {
                for route in [Route::Direct, Route::Staged] {
                    let (from, to) = (0x1001 + 8 * i as u64, 0x3003 + 0x1000 * k as u64 % 0x2000);
                    let at = |place: Location, by| place.checked_add(by).expect("inside the layout");
                    for len in [1, 7, 64, 4095] {
                        ends_well(bed, initiator, &copy(&[seg(at(dst, to), len)], &[seg(at(src, from), len)], route));
                    }
                }
            }
        }
    }
}

fn copy_segment_lists(bed: &Bed) {
    let dst = [seg(own(FPGA, 5), 1), seg(ram(0x3001), 4096), seg(own(GPU, 0x7003), 77), seg(ram(0x10_0003), 400)];
    let src = [seg(ram(0x5007), 100), seg(own(GPU, 0x11), 33), seg(own(FPGA, 0x9000), 4000), seg(ram(0x9001), 441)];
    for route in [Route::Direct, Route::Staged] {
        ends_well(bed, GPU, &copy(&dst, &src, route));
        ends_well(bed, FPGA, &copy(&dst[1..2], &[seg(own(GPU, 0x20), 4095), seg(ram(0x2001), 1)], route));
    }
}

fn copy_long(bed: &Bed) {
    let len = bed.engine().caps().max_transfer.min(APERTURES[1].1 - 3);
    for route in [Route::Direct, Route::Staged] {
        ends_well(bed, GPU, &copy(&[seg(own(FPGA, 3), len)], &[seg(own(GPU, 1), len)], route));
        ends_well(bed, FPGA, &copy(&[seg(own(GPU, 0x21), len)], &[seg(own(FPGA, 0), len)], route));
    }
}

fn fill_phase(bed: &Bed) {
    let pattern = 0x0807_0605_0403_0201;
    ends_well(bed, GPU, &fill(&[seg(ram(0x2003), 5), seg(own(FPGA, 1), 3), seg(own(GPU, 9), 1001)], pattern));
    ends_well(bed, FPGA, &fill(&[seg(own(GPU, 0x101), 1), seg(ram(0x4001), 8192)], pattern));
    ends_well(bed, GPU, &fill(&[seg(ram(RAM[1].0 - 13), 29)], pattern));
    ends_well(bed, GPU, &fill(&[seg(own(GPU, 0x1007), 9000)], 0xabab_abab_abab_abab));
    for len in 1..20 {
        ends_well(bed, GPU, &fill(&[seg(own(FPGA, 0x333 + 32 * len), len)], !pattern));
    }
}

fn copy_overlap(bed: &Bed) {
    // Inside one place, and across the seam of two regions.
    for base in [own(GPU, 0x1000), ram(0x3000), ram(RAM[1].0 - 0x800)] {
        for (from, to) in [(0, 1), (1, 0), (0, 0x7ff), (0x7ff, 0), (0, 0x2f), (100, 100)] {
            let at = |by| base.checked_add(by).expect("inside the layout");
            ends_well(bed, GPU, &copy(&[seg(at(to), 0x1000)], &[seg(at(from), 0x1000)], Route::Direct));
        }
    }
}

fn copy_spans_regions(bed: &Bed) {
    let seam = RAM[1].0;
    for route in [Route::Direct, Route::Staged] {
        ends_well(bed, GPU, &copy(&[seg(own(GPU, 77), 5000)], &[seg(ram(seam - 2501), 5000)], route));
        ends_well(bed, GPU, &copy(&[seg(ram(seam - 1), 2)], &[seg(own(FPGA, 4), 2)], route));
        ends_well(bed, GPU, &copy(&[seg(ram(seam - 100), 300)], &[seg(ram(RAM[2].0), 300)], route));
    }
}

fn unreachable(bed: &Bed) {
    let hole = RAM[1].0 + RAM[1].1;
    let past_gpu = APERTURES[0].1;
    let nobody = EndpointId::local(999);
    let bad = [
        seg(ram(hole - 8), 64),
        seg(ram(hole), 64),
        seg(own(GPU, past_gpu - 63), 64),
        seg(own(GPU, past_gpu), 64),
        seg(own(nobody, 0), 64),
        seg(own(GPU, 1 << 40), 64),
        seg(ram(u64::MAX - 63), 64),
    ];
    let good = seg(own(FPGA, 0x101), 100);
    for bad in bad {
        for route in [Route::Direct, Route::Staged] {
            fails(bed, &copy(&[seg(ram(0x2000), 164)], &[good, bad], route), 164);
            fails(bed, &copy(&[good, bad], &[seg(ram(0x2000), 164)], route), 164);
        }
        fails(bed, &fill(&[good, bad], 0x1122_3344_5566_7788), 164);
    }
}

/// The transfer fails on memory after some bytes, and has written those and no others.
fn fails(bed: &Bed, work: &Work, len: u64) {
    let end = bed.run(GPU, work);
    assert!(matches!(end.result, Err(EngineError::Memory(_))), "{work:?} ended with {:?}", end.result);
    assert!(end.bytes < len, "{work:?} claims all of its bytes");
    bed.compare();
}

fn flush_order(bed: &Bed) {
    for round in 0..4 {
        let mut order = Vec::new();
        let mut before = Vec::new();
        for n in 0..5 {
            let at = 0x1000 * n + 8 * round;
            let work = copy(&[seg(own(FPGA, at), 900 + n)], &[seg(own(GPU, at), 900 + n)], Route::Direct);
            before.push(soon(bed, GPU, &work, &mut order));
            soon(bed, FPGA, &fill(&[seg(ram(0x10_0000 + 8 * n), 8)], n), &mut order);
        }
        let flush = soon(bed, GPU, &Work::Flush, &mut order);
        order.extend(bed.settle());
        let place = |job| order.iter().position(|end: &Finished| end.job == job).expect("every job ends");
        assert_eq!(order[place(flush)].result, Ok(()));
        assert!(before.iter().all(|&job| place(job) < place(flush)), "earlier work of the initiator ends first");
        bed.compare();
    }
}

/// Submits, driving the engine while it is full.
fn soon(bed: &Bed, initiator: EndpointId, work: &Work, ends: &mut Vec<Finished>) -> JobId {
    loop {
        match bed.submit(initiator, work) {
            Ok((job, done)) => {
                ends.extend(done);
                return job;
            }
            Err(_) => ends.extend(bed.settle()),
        }
    }
}

fn busy(bed: &Bed) {
    let depth = bed.engine().caps().queue_depth;
    assert!(depth > 0, "an engine holds at least one transfer");
    let slot = |n: usize| 16 * (n as u64 % 0x800);
    let work = |n| copy(&[seg(own(FPGA, slot(n)), 16)], &[seg(own(GPU, 3 + slot(n)), 16)], Route::Direct);
    let mut refused = None;
    let mut held = 0;
    for n in 0..depth.min(4096) + 1 {
        match bed.submit(GPU, &work(n)) {
            Ok((_, done)) => held += usize::from(done.is_none()),
            Err(error) => {
                assert_eq!(error, EngineError::Busy);
                refused = Some(n);
                break;
            }
        }
    }
    assert!(held <= depth, "no more are held than the engine says");
    assert!(refused.is_some() || held < depth.min(4096) + 1);
    assert_eq!(bed.settle().len(), held);
    ends_well(bed, GPU, &work(refused.unwrap_or(0)));
}

fn abort(bed: &Bed) {
    for n in 0..8 {
        let len = 0x4000 + n;
        let works = [
            copy(&[seg(own(FPGA, 0x1000), len)], &[seg(own(GPU, 0x21), len)], Route::Direct),
            copy(&[seg(ram(0x1000), len)], &[seg(own(GPU, 0x21), len)], Route::Staged),
            fill(&[seg(own(GPU, 0x20000), len)], n),
            Work::Flush,
        ];
        let jobs: Vec<_> = works.iter().map(|work| bed.submit_soon(GPU, work)).collect();
        let aborted: Vec<_> = jobs.into_iter().filter(|(_, done)| done.is_none()).map(|(job, _)| job).collect();
        aborted.iter().for_each(|&job| bed.engine().abort(job));
        let ends = bed.settle();
        assert_eq!(ends.len(), aborted.len());
        for end in ends {
            assert!(matches!(end.result, Ok(()) | Err(EngineError::Aborted)), "{:?}", end.result);
        }
        bed.compare();
    }
}

fn abort_nothing(bed: &Bed) {
    bed.engine().abort(JobId(12345));
    let work = fill(&[seg(own(GPU, 0), 8)], 5);
    let (job, _) = bed.submit_soon(GPU, &work);
    bed.settle();
    bed.engine().abort(job);
    idle(bed);
    ends_well(bed, FPGA, &work);
}

/// Words of every place that the engine has atomic operations on for somebody; says so if there are none.
fn words(bed: &Bed) -> Vec<(EndpointId, Location)> {
    let places = [ram(RAM[0].0 + 0x1000), own(GPU, 0x1000), own(FPGA, 0x1000)];
    let all = [GPU, FPGA].into_iter().flat_map(|by| places.map(|at| (by, at)));
    let able: Vec<_> = all.filter(|(by, at)| bed.engine().has_atomics(*by, *at)).collect();
    if able.is_empty() {
        println!("conformance: SKIP: the engine has no atomic operations");
    }
    able
}

fn atomics(bed: &Bed) {
    const OPERAND: u64 = 0x0123_4567_89ab_cdef;
    for (initiator, place) in words(bed) {
        for (len, skip) in [(4, 0), (4, 4), (8, 8), (8, 0)] {
            let at = place.checked_add(skip).expect("inside the layout");
            // As a program of that owner would have it.
            let value = || {
                let mut bytes = [0; 8];
                let len = usize::try_from(len).expect("it is short");
                bed.model.read(at, &mut bytes[..len]).expect("inside the layout");
                u64::from_le_bytes(bytes)
            };
            let ops = [
                AtomicOp::Swap,
                AtomicOp::Add,
                AtomicOp::Add,
                AtomicOp::CompareSwap { compare: !value() },
                AtomicOp::Swap,
                AtomicOp::CompareSwap { compare: OPERAND },
                AtomicOp::CompareSwap { compare: OPERAND + 1 },
            ];
            for (op, more) in ops.into_iter().zip(0..) {
                let (was, atomic) = (value(), Atomic { op, len, operand: OPERAND.wrapping_mul(more) ^ OPERAND });
                let end = bed.run(initiator, &Work::Atomic { at, atomic });
                assert_eq!((end.bytes, end.result, end.value), (len, Ok(()), was), "{op:?} by {initiator} at {at:?}");
                bed.compare();
            }
        }
    }
}

fn atomics_of_many(bed: &Bed) {
    const EACH: u64 = 50;
    for (initiator, at) in words(bed) {
        let work = |op, operand| Work::Atomic { at, atomic: Atomic { op, len: 8, operand } };
        bed.run(initiator, &work(AtomicOp::Swap, 0));
        let (running, at_once) = (AtomicUsize::new(4), Mutex::new(Vec::new()));
        let mut ends = std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..EACH {
                        let (_, end) = bed.submit_soon(initiator, &work(AtomicOp::Add, 3));
                        at_once.lock().unwrap_or_else(PoisonError::into_inner).extend(end);
                    }
                    running.fetch_sub(1, Ordering::AcqRel);
                });
            }
            let mut ends = Vec::new();
            while running.load(Ordering::Acquire) > 0 {
                bed.turn(&mut ends);
                std::thread::yield_now();
            }
            ends
        });
        ends.extend(bed.settle());
        ends.append(&mut at_once.lock().unwrap_or_else(PoisonError::into_inner));
        // Each found what another one had left, and no two the same.
        let mut found: Vec<_> = ends.into_iter().map(|end| end.value).collect();
        found.sort_unstable();
        let all: Vec<_> = (0..4 * EACH).map(|number| 3 * number).collect();
        assert_eq!(found, all, "by {initiator} at {at:?}");
        bed.compare();
    }
}

fn quiesce(bed: &Bed) {
    let mut held = 0;
    for n in 0..20 {
        let len = 0x1003 + n;
        let initiator = if n % 2 == 0 { GPU } else { FPGA };
        let work = match n % 4 {
            3 => Work::Flush,
            2 => fill(&[seg(ram(0x2000 + 0x2000 * n), len)], n),
            _ => copy(&[seg(own(FPGA, 0x2000 * n), len)], &[seg(own(GPU, 0x21 * n), len)], Route::Direct),
        };
        match bed.submit(initiator, &work) {
            Ok((_, done)) => held += usize::from(done.is_none()),
            Err(_) => break,
        }
    }
    let ends = bed.quiesce();
    assert_eq!(ends.len(), held, "quiesce reports every transfer that was out");
    for end in ends {
        assert!(matches!(end.result, Ok(()) | Err(EngineError::Aborted)), "{:?}", end.result);
    }
    bed.compare();
    idle(bed);
    assert_eq!(bed.quiesce().len(), 0, "there is nothing left to report");
}

fn quiesce_then_work(bed: &Bed) {
    bed.submit_soon(GPU, &fill(&[seg(own(GPU, 0), 0x1000)], 5));
    bed.quiesce();
    ends_well(bed, GPU, &copy(&[seg(own(FPGA, 9), 800)], &[seg(own(GPU, 7), 800)], Route::Direct));
}

fn idle(bed: &Bed) {
    let mut ends = Vec::new();
    bed.turn(&mut ends);
    assert!(ends.is_empty(), "an idle engine reports {ends:?}");
    assert_eq!(bed.engine().poll(&mut ends), None, "an idle engine waits for nothing");
    let mut raised = Vec::new();
    bed.engine().raised(&mut raised);
    assert!(raised.is_empty(), "an idle engine raises {raised:?}");
}

fn many_threads(bed: &Bed) {
    let running = AtomicUsize::new(4);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let running = &running;
            scope.spawn(move || {
                // Each thread writes a part of its own and reads one that nobody writes.
                let mut noise = Noise::new(thread);
                for n in 0..100 {
                    let (len, at) = (1 + noise.below(60), 0x2000 * thread + 64 * n);
                    let src = seg(own(GPU, noise.below(0x1_0000)), len);
                    let dst = if n % 2 == 0 { seg(ram(RAM[0].0 + at), len) } else { seg(own(FPGA, at), len) };
                    let route = if n % 3 == 0 { Route::Staged } else { Route::Direct };
                    bed.submit_soon(if n % 5 == 0 { FPGA } else { GPU }, &copy(&[dst], &[src], route));
                }
                running.fetch_sub(1, Ordering::Release);
            });
        }
        let mut ends = Vec::new();
        while running.load(Ordering::Acquire) > 0 || !bed.is_idle() {
            bed.turn(&mut ends);
            std::thread::yield_now();
        }
        assert!(ends.iter().all(|end| end.result == Ok(())));
    });
    bed.compare();
    idle(bed);
}

fn random_transfers(bed: &Bed) {
    let mut noise = Noise::new(42);
    for round in 0..300 {
        let initiator = if noise.below(2) == 0 { GPU } else { FPGA };
        let len = 1 + noise.below(if round % 10 == 0 { 0x6000 } else { 300 });
        // Sources lie in the lower half of each place, destinations in the upper.
        let dst = list(&mut noise, len, true);
        let work = match noise.below(4) {
            0 => fill(&dst, noise.word()),
            way => {
                let route = if way == 1 { Route::Staged } else { Route::Direct };
                copy(&dst, &list(&mut noise, len, false), route)
            }
        };
        ends_well(bed, initiator, &work);
    }
}

fn proof(bed: &Bed) {
    assert_eq!(bed.prove(), [Ok(()), Ok(())], "both ways");
    idle(bed);
}

/// A list of `len` bytes in one half of the world, without overlap inside it.
fn list(noise: &mut Noise, len: u64, upper: bool) -> Segments {
    const HALF: u64 = 0x1_4000;
    let base = if upper { HALF } else { 0 };
    let (mut left, mut segments) = (len, Segments::new());
    // Each place is used once at most.
    let mut places = vec![ram(RAM[0].0 + base), own(GPU, base), own(FPGA, base)];
    while left > 0 {
        let place = places.swap_remove(usize::try_from(noise.below(places.len() as u64)).unwrap_or(0));
        let part = if places.is_empty() { left } else { 1 + noise.below(left) };
        let at = place.checked_add(noise.below(HALF - part)).expect("inside the layout");
        segments.push(seg(at, part));
        left -= part;
    }
    segments
}
