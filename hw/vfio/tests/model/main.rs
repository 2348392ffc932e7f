//! The engine over a driver and an IOMMU that are models: every rule of theirs is checked at each command.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod lazy;
mod parts;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use common::{file, ram};
use hw_engine::conformance::{self, APERTURES, Parts};
use hw_engine::{DmaEngine, EngineError, Fleet, JobId, Member, Owner, Route, Segments, Transfer, Work};
use hw_host::HostEngine;
use hw_vfio::{FaultWatch, Shape, Slice, Unwatched, VfioEngine};
use iommu_addr::{Access, ApertureOffset, DomainId, EndpointId, Gpa, Location, Segment};
use parts::{COPIER, DISK, Iommu, Trouble, build, build_behind, disk};

/// A disk whose first endpoint's memory is its own, with somebody who watches.
fn watched(watch: Option<Box<dyn FaultWatch>>, reports_faults: bool) -> Arc<VfioEngine> {
    let (disk, sink, interrupt) = disk(&Arc::default(), Shape { reports_faults, ..DISK }, Trouble::None);
    let own = Some(Slice { endpoint: APERTURES[0].0, start: 512, len: APERTURES[0].1 });
    Arc::new(VfioEngine::over(Box::new(disk), sink, own, ram(), watch, interrupt, None).unwrap())
}

#[test]
fn an_engine_with_memory_of_its_own_conforms() {
    conformance::run(&|| build(DISK, Trouble::None));
}

/// A fleet of disks, each of which is an endpoint's memory; what is none's is the host's.
fn build_fleet(disks: usize) -> Parts {
    let memory = ram();
    for (endpoint, len) in APERTURES.into_iter().skip(disks) {
        memory.add_aperture(endpoint, &file(len), len).unwrap();
    }
    let disk = |(endpoint, len)| {
        let (disk, sink, interrupt) = disk(&Arc::default(), DISK, Trouble::None);
        let own = Some(Slice { endpoint, start: 512, len });
        let engine = VfioEngine::over(Box::new(disk), sink, own, memory.clone(), None, interrupt, None).unwrap();
        Member { endpoint, engine: Arc::new(engine), same_function: Vec::new() }
    };
    let members = APERTURES.into_iter().take(disks).map(disk).collect();
    let rest = Arc::new(HostEngine::new(memory.clone()));
    let fleet = Fleet::new(members, Vec::new(), rest, memory, None).unwrap();
    let memory = fleet.memory();
    Parts { engine: Arc::new(fleet), memory, advance: None }
}

#[test]
fn a_fleet_of_one_disk_conforms() {
    conformance::run(&|| build_fleet(1));
}

#[test]
fn a_fleet_of_disks_that_do_not_reach_each_other_conforms() {
    conformance::run(&|| build_fleet(2));
}

#[test]
fn an_engine_maps_no_more_than_a_container_holds() {
    let most = |parts: Parts| parts.engine.caps().max_mappings;
    assert_eq!((most(build(DISK, Trouble::None)), most(build_fleet(2))), (65_535, 65_535));
}

#[test]
fn a_hop_is_what_one_engine_does_alone() {
    let hop = |parts: &Parts, dst: (Location, u64), src: (Location, u64)| {
        let list = |(at, len)| [Segment { at, len }];
        parts.engine.in_one_hop(EndpointId::local(0), &list(dst), &list(src))
    };
    let (ram, other) = (|at| Location::Ram(Gpa(at)), |at| Location::Aperture { endpoint: APERTURES[1].0, offset: at });
    let other = |at| other(ApertureOffset(at));
    let one = build_fleet(1);
    assert!(hop(&one, (own(512), 1024), (ram(0x2000), 1024)) && hop(&one, (ram(0x2004), 512), (own(0), 512)));
    assert!(hop(&one, (own(0), 4096), (other(0), 4096)), "behind a BAR as good as in memory");
    assert!(
        !hop(&one, (own(1), 512), (ram(0x2000), 512)) && !hop(&one, (own(0), 511), (ram(0x2000), 511)),
        "no blocks"
    );
    assert!(!hop(&one, (own(0), 512), (ram(0x2002), 512)), "no dwords");
    assert!(!hop(&one, (own(0), 512), (own(4096), 512)), "its own to its own");
    assert!(!hop(&one, (other(0), 512), (ram(0x2000), 512)), "the processor would have to do it");
    assert!(!hop(&one, (own(0), 512), (ram(0x90_0000), 512)), "not there");
    let two = build_fleet(2);
    assert!(!hop(&two, (own(0), 512), (other(0), 512)), "blocks to blocks");
    assert!(hop(&two, (other(0), 512), (ram(0x2000), 512)), "the other disk does it");
    let copier = build(COPIER, Trouble::None);
    assert!(hop(&copier, (other(1), 4097), (ram(0x2001), 4097)) && hop(&copier, (own(1), 77), (other(5), 77)));
}

#[test]
fn what_is_erased_is_zero_to_the_last_byte_and_no_further() {
    // Without a command for it, and with one of 4 KiB at most.
    for zeroes in [0, 4096] {
        let (disk, sink, interrupt) = disk(&Arc::default(), Shape { zeroes, ..DISK }, Trouble::None);
        let own = Some(Slice { endpoint: APERTURES[0].0, start: 512, len: 0x5200 });
        let engine = VfioEngine::over(Box::new(disk), sink, own, ram(), None, interrupt, None).unwrap();
        let bytes = |at, len| {
            let mut bytes = vec![1; len];
            engine.read_own(APERTURES[0].0, at, &mut bytes).unwrap();
            bytes
        };
        assert_eq!(bytes(0x5200 - 16, 16), [0xee; 16]);
        engine.erase_own().unwrap();
        assert!(bytes(0, 0x5200).iter().all(|byte| *byte == 0), "{zeroes}");
    }
}

/// Says what it is told to, one after another.
struct Watch(std::vec::IntoIter<Result<u64, Unwatched>>);

impl FaultWatch for Watch {
    fn count(&mut self) -> Result<u64, Unwatched> {
        self.0.next().expect("nobody looks more often")
    }
}

#[test]
fn what_the_iommu_stopped_is_no_success() {
    let stopped = Err(EngineError::Device { code: 0xffff_0005 });
    let unwatched = Err(EngineError::Device { code: 0xffff_0006 });
    // The first look is before any work: what was then is none of ours.
    let told = vec![Ok(3), Ok(3), Ok(4), Ok(4), Err(Unwatched), Ok(4)];
    let engine = watched(Some(Box::new(Watch(told.into_iter()))), false);
    let results: Vec<_> = (0..5).map(|_| engine.write_own(APERTURES[0].0, 0, &[1; 512])).collect();
    assert_eq!(results, [Ok(()), stopped, Ok(()), unwatched, Ok(())]);
    // Nor about what stays within the device: the watch above has nothing more to say.
    engine.erase_own().unwrap();
    // Of a device that says it itself nobody asks.
    let never = || Some(Box::new(Watch(Vec::new().into_iter())) as Box<dyn FaultWatch>);
    assert_eq!(watched(never(), true).write_own(APERTURES[0].0, 0, &[1; 512]), Ok(()));
}

/// Says that it is asked, and answers when it is told to, or when nobody can tell it any more.
struct Gate(Sender<()>, Receiver<()>);

impl FaultWatch for Gate {
    fn count(&mut self) -> Result<u64, Unwatched> {
        let _ = self.0.send(());
        let _ = self.1.recv();
        Ok(0)
    }
}

#[test]
fn a_fleet_that_ends_gives_up_what_waits_before_it_waits_for_what_goes_through_the_host() {
    let (asked, is_asked) = channel();
    let (open, opened) = channel();
    open.send(()).unwrap();
    let mut watch = Some(Box::new(Gate(asked, opened)) as Box<dyn FaultWatch>);
    let memory = ram();
    let members = APERTURES.into_iter().take(2).map(|(endpoint, len)| {
        let (disk, sink, interrupt) = disk(&Arc::default(), DISK, Trouble::None);
        let own = Some(Slice { endpoint, start: 512, len });
        let engine = VfioEngine::over(Box::new(disk), sink, own, memory.clone(), watch.take(), interrupt, None);
        Member { endpoint, engine: Arc::new(engine.unwrap()), same_function: Vec::new() }
    });
    let rest = Arc::new(HostEngine::new(memory.clone()));
    let fleet = Fleet::new(members.collect(), Vec::new(), rest, memory.clone(), None).unwrap();
    // Before the fleet goes, the gate opens.
    let open = open;
    let patience = Duration::from_secs(30);
    // Asked once at its begin.
    is_asked.recv_timeout(patience).unwrap();
    let transfer = |job, dst, src| {
        let page = |at| Segments::from_iter([Segment { at, len: 4096 }]);
        let work = Work::Copy { src: page(src), dst: page(dst), route: Route::Direct };
        Transfer { job: JobId(job), domain: DomainId(1), initiator: APERTURES[0].0, work }
    };
    let other = Location::Aperture { endpoint: APERTURES[1].0, offset: ApertureOffset(0) };
    fleet.submit(&transfer(0, other, own(0))).unwrap();
    is_asked.recv_timeout(patience).unwrap();
    let mut jobs = 1..;
    let mut submit = || fleet.submit(&transfer(jobs.next().unwrap(), own(0), Location::Ram(Gpa(0x2000))));
    while submit().is_ok() {}
    let mut ended = Vec::new();
    std::thread::scope(|scope| {
        // If this panics, the gate opens.
        let _open = open;
        scope.spawn(|| fleet.quiesce(&mut ended));
        let begun = Instant::now();
        while submit().is_err() {
            assert!(begun.elapsed() < patience, "what waits is given up");
            std::thread::yield_now();
        }
    });
    assert!(ended.iter().any(|end| end.job == JobId(0) && end.result.is_ok()));
}

#[test]
fn an_engine_that_copies_through_a_buffer_conforms() {
    conformance::run(&|| build(COPIER, Trouble::None));
}

/// Copies a page of guest memory to the engine's own.
fn copy(parts: &Parts, job: u64, dst: u64) -> (u64, Result<(), EngineError>) {
    move_page(parts, job, own(dst), Location::Ram(Gpa(0x2000)))
}

fn own(offset: u64) -> Location {
    Location::Aperture { endpoint: APERTURES[0].0, offset: ApertureOffset(offset) }
}

fn move_page(parts: &Parts, job: u64, dst: Location, src: Location) -> (u64, Result<(), EngineError>) {
    let page = |at| Segments::from_iter([Segment { at, len: 4096 }]);
    let (dst, src) = (page(dst), page(src));
    let work = Work::Copy { src, dst, route: Route::Direct };
    let transfer = Transfer { job: JobId(job), domain: DomainId(1), initiator: APERTURES[0].0, work };
    parts.engine.submit(&transfer).unwrap();
    let mut ended = Vec::new();
    while ended.is_empty() {
        parts.engine.poll(&mut ended);
        std::thread::yield_now();
    }
    let end = ended.remove(0);
    assert_eq!(end.job, JobId(job));
    (end.bytes, end.result)
}

#[test]
fn a_source_can_be_read_and_a_destination_written_and_nothing_stays_mapped() {
    let iommu = Arc::<Iommu>::default();
    let parts = build_behind(&iommu, DISK, Trouble::None);
    let before = iommu.0.lock().unwrap().pages.len();
    assert_eq!(move_page(&parts, 1, own(0), Location::Ram(Gpa(0x2000))), (4096, Ok(())));
    assert_eq!(move_page(&parts, 2, Location::Ram(Gpa(0x3000)), own(512)), (4096, Ok(())));
    let table = iommu.0.lock().unwrap();
    // The first is the engine's own memory, for what does not fit a block.
    assert_eq!(table.granted[1..], [Access::READ, Access::WRITE]);
    assert_eq!(table.pages.len(), before);
}

#[test]
fn a_device_that_is_stuck_is_reset_and_works_again() {
    let parts = build(DISK, Trouble::Stuck);
    let (bytes, result) = copy(&parts, 1, 0);
    assert!(bytes == 0 && matches!(result, Err(EngineError::Device { .. })), "{result:?}");
    assert_eq!(copy(&parts, 2, 0), (4096, Ok(())));
}

#[test]
fn what_the_device_says_of_a_command_is_told() {
    assert_eq!(copy(&build(DISK, Trouble::Refuses), 1, 512), (0, Err(EngineError::Device { code: 0x281 })));
}

#[test]
fn a_driver_that_panics_leaves_nobody_waiting() {
    let parts = build(DISK, Trouble::Panics);
    let lost = Err(EngineError::Device { code: 0xffff_0002 });
    assert_eq!(copy(&parts, 1, 0), (0, lost));
    let mut ended = Vec::new();
    parts.engine.quiesce(&mut ended);
    assert!(ended.is_empty());
    let work = Work::Fill { dst: Segments::from_iter([Segment { at: own(0), len: 8 }]), pattern: 0 };
    let transfer = Transfer { job: JobId(2), domain: DomainId(1), initiator: APERTURES[0].0, work };
    assert_eq!(parts.engine.submit(&transfer).map(drop), lost);
    assert!(parts.memory.read(own(0), &mut [0; 8]).is_err());
}

#[test]
fn a_slice_is_whole_blocks_of_what_there_is() {
    let open = |start, len| {
        let (disk, sink, interrupt) = disk(&Arc::default(), DISK, Trouble::None);
        let own = Some(Slice { endpoint: EndpointId::local(0), start, len });
        VfioEngine::over(Box::new(disk), sink, own, ram(), None, interrupt, None).is_ok()
    };
    assert!(open(0, 1 << 20) && open((1 << 20) - 512, 512));
    for (start, len) in [(1, 512), (0, 513), (512, 1 << 20), (u64::MAX - 511, 512), (0, u64::MAX - 511)] {
        assert!(!open(start, len), "{start} {len}");
    }
}
