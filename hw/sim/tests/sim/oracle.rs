//! The host's engine as the oracle: whatever it does to mapped memory, the simulated one does too, error for error and byte for byte.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use hw_engine::conformance::{APERTURES, Noise, RAM};
use hw_engine::{
    Atomic, AtomicOp, DmaEngine, Finished, JobId, LinkLedger, Memory, RamMap, RamRegion, Route, Segments, Submit,
    Transfer, Unlimited, Work,
};
use hw_host::{HostEngine, HostMemory};
use hw_sim::{Clock, ManualClock, SimConfig, SimEngine};
use iommu_addr::{ApertureOffset, DomainId, EndpointId, Gpa, Location, Range, Segment};
use proptest::prelude::*;

use crate::common::{Wires, devices, instant};

fn file(len: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(len).unwrap();
    file
}

/// Everything that a world holds.
fn places() -> impl Iterator<Item = (Location, u64)> {
    let ram = RAM.into_iter().map(|(start, len)| (Location::Ram(Gpa(start)), len));
    let own = |(endpoint, len)| (Location::Aperture { endpoint, offset: ApertureOffset(0) }, len);
    ram.chain(APERTURES.into_iter().map(own))
}

/// Mapped memory with the same noise in it each time.
fn world() -> Arc<HostMemory> {
    let memory = HostMemory::new();
    for (endpoint, len) in APERTURES {
        memory.add_aperture(endpoint, &file(len), len).unwrap();
    }
    let regions = RAM.map(|(start, len)| {
        let gpa = Range::with_len(Gpa(start), len).unwrap();
        RamRegion { gpa, file: Arc::new(file(len)), offset: 0 }
    });
    memory.replace(&regions).unwrap();
    let mut noise = Noise::new(11);
    for (at, len) in places() {
        memory.write(at, &noise.bytes(usize::try_from(len).unwrap())).unwrap();
    }
    Arc::new(memory)
}

fn contents(memory: &HostMemory) -> Vec<Vec<u8>> {
    let read = |(at, len)| {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        memory.read(at, &mut bytes).unwrap();
        bytes
    };
    places().map(read).collect()
}

/// One transfer from submission to end, moving the clock.
fn run(engine: &dyn DmaEngine, clock: &ManualClock, transfer: &Transfer) -> Finished {
    let mut ends = Vec::new();
    match engine.submit(transfer).unwrap() {
        Submit::Executed(end) => return end,
        Submit::Submitted => {
            while ends.is_empty() {
                let next = engine.poll(&mut ends);
                next.into_iter().for_each(|by| clock.advance(by));
            }
        }
    }
    ends.remove(0)
}

/// Places in the world, now and then just outside it.
fn segment() -> impl Strategy<Value = Segment> {
    let ram = (0x1000u64..0x11_0000).prop_map(|gpa| Location::Ram(Gpa(gpa)));
    let dense = (RAM[0].0..RAM[1].0 + RAM[1].1).prop_map(|gpa| Location::Ram(Gpa(gpa)));
    let own = (0u16..2, 0u64..0x30010).prop_map(|(id, offset)| Location::Aperture {
        endpoint: EndpointId::local(id),
        offset: ApertureOffset(offset),
    });
    let len = prop_oneof![8 => 1u64..100, 2 => 1u64..9000];
    (prop_oneof![1 => ram, 4 => dense, 5 => own], len).prop_map(|(at, len)| Segment { at, len })
}

/// A list of exactly `len` bytes, if it can be cut so.
fn cut(list: Vec<Segment>, len: u64) -> Segments {
    let mut left = len;
    let part = |mut segment: Segment| {
        segment.len = segment.len.min(left);
        left -= segment.len;
        (segment.len > 0).then_some(segment)
    };
    list.into_iter().filter_map(part).collect()
}

fn work() -> impl Strategy<Value = Work> {
    let list = || prop::collection::vec(segment(), 1..5);
    let copy = (list(), list(), any::<bool>()).prop_map(|(src, dst, staged)| {
        let len = hw_engine::total_len(&src).min(hw_engine::total_len(&dst));
        let route = if staged { Route::Staged } else { Route::Direct };
        Work::Copy { src: cut(src, len), dst: cut(dst, len), route }
    });
    let fill = (list(), any::<u64>()).prop_map(|(dst, pattern)| Work::Fill { dst: dst.into(), pattern });
    prop_oneof![5 => copy, 2 => fill, 2 => atomic(), 1 => Just(Work::Flush)]
}

fn atomic() -> impl Strategy<Value = Work> {
    let op = prop_oneof![
        Just(AtomicOp::Add),
        Just(AtomicOp::Swap),
        any::<u64>().prop_map(|compare| AtomicOp::CompareSwap { compare })
    ];
    (segment(), op, any::<bool>(), any::<u64>()).prop_map(|(segment, op, long, operand)| {
        let at = match segment.at {
            Location::Ram(gpa) => Location::Ram(Gpa(gpa.0 & !7)),
            Location::Aperture { endpoint, offset } => {
                Location::Aperture { endpoint, offset: ApertureOffset(offset.0 & !7) }
            }
        };
        Work::Atomic { at, atomic: Atomic { op, len: if long { 8 } else { 4 }, operand } }
    })
}

fn compare(config: &SimConfig, ledger: Arc<dyn LinkLedger>, works: Vec<(u16, Work)>) {
    let (oracle, simulated) = (world(), world());
    let clock = ManualClock::new();
    let host = HostEngine::new(oracle.clone());
    let sim = SimEngine::new(config, simulated.clone(), ledger, Clock::Manual(Arc::clone(&clock))).unwrap();
    for (job, (initiator, work)) in (0..).zip(works) {
        let initiator = EndpointId::local(initiator);
        let transfer = Transfer { job: JobId(job), domain: DomainId(1), initiator, work };
        assert_eq!(run(&sim, &clock, &transfer), run(&host, &clock, &transfer), "{transfer:?}");
    }
    assert!(contents(&oracle) == contents(&simulated), "the same ends, but other bytes");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn the_instant_engine_does_what_the_host_does(works in prop::collection::vec((0u16..2, work()), 1..20)) {
        compare(&instant(), Arc::new(Unlimited), works);
    }

    #[test]
    fn the_engine_with_links_does_what_the_host_does(works in prop::collection::vec((0u16..2, work()), 1..20)) {
        compare(&devices(Duration::from_nanos(30), 2), Wires::new(Duration::from_nanos(1)), works);
    }
}
