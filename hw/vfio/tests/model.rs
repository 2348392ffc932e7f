//! The engine over a driver and an IOMMU that are models: every rule of theirs is checked at each command.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{World, file, ram};
use hw_engine::conformance::{self, APERTURES, Parts};
use hw_engine::{DmaEngine, EngineError, Fleet, JobId, Member, Owner, Place, Route, Segments, Transfer, Work};
use hw_host::HostEngine;
use hw_vfio::{Command, Driver, FaultWatch, Lazy, MapSink, Mapped, Shape, Slice, Unwatched, VfioEngine, VfioError};
use iommu_addr::{Access, ApertureOffset, BusAddr, DomainId, EndpointId, Gpa, Location, Segment};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const PAGE: u64 = 4096;

/// Pages by bus address: where they are in this process, and what is allowed.
#[derive(Default)]
struct Iommu(Mutex<Table>);

#[derive(Default)]
struct Table {
    pages: BTreeMap<u64, (u64, Access)>,
    next: u64,
    /// Of each command that is out: its first bus address and the one behind the last.
    running: BTreeMap<usize, (u64, u64)>,
    /// How many pages it holds at most.
    room: Option<usize>,
    /// What was allowed, in the order of mapping.
    granted: Vec<Access>,
}

struct Unmap(Arc<Iommu>, u64, u64, Arc<dyn Any + Send + Sync>);

impl Drop for Unmap {
    fn drop(&mut self) {
        let mut table = self.0.0.lock().unwrap();
        let is_used = |(first, end): &(u64, u64)| *first < self.2 && self.1 < *end;
        // Of a panic the IOMMU makes the best: what is unmapped too early is a fault.
        let panics = std::thread::panicking();
        assert!(panics || !table.running.values().any(is_used), "what a command needs stays mapped");
        (self.1..self.2).step_by(4096).for_each(|page| assert!(table.pages.remove(&page).is_some()));
        let _ = &self.3;
    }
}

struct Sink(Arc<Iommu>);

impl MapSink for Sink {
    fn map(&self, place: &Place, access: Access, mask: u64) -> Result<Mapped, VfioError> {
        let mut table = self.0.0.lock().unwrap();
        let (lead, first) = (place.address % PAGE, PAGE + table.next);
        let end = first + (lead + place.len).next_multiple_of(PAGE);
        if end - 1 > mask || table.pages.len() >= table.room.unwrap_or(usize::MAX) {
            return Err(VfioError::Addresses { bytes: end - first, mask });
        }
        // Never the same again, and never next to each other: what runs past its end is seen.
        table.next = end;
        table.granted.push(access);
        for page in (first..end).step_by(4096) {
            table.pages.insert(page, (place.address - lead + (page - first), access));
        }
        let guard = Box::new(Unmap(Arc::clone(&self.0), first, end, Arc::clone(&place.hold)));
        Ok(Mapped { first: BusAddr(first + lead), len: place.len, guard })
    }
}

impl Iommu {
    /// What a device does with a bus address; `None` if the IOMMU stops it.
    fn find(&self, bus: u64, want: Access) -> Option<*mut u8> {
        let table = self.0.lock().unwrap();
        let (address, access) = table.pages.get(&(bus / PAGE * PAGE))?;
        access.allows(want).then_some((address + bus % PAGE) as *mut u8)
    }
}

/// A disk that ends its commands in no order.
struct Disk {
    iommu: Arc<Iommu>,
    bytes: Vec<u8>,
    shape: Shape,
    running: BTreeMap<usize, Command>,
    interrupt: EventFd,
    trouble: Trouble,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Trouble {
    #[default]
    None,
    /// It ends no command, until it is reset.
    Stuck,
    /// It refuses every command.
    Refuses,
    /// Its driver has a mistake in it.
    Panics,
}

impl Disk {
    fn carry_out(&mut self, command: Command) -> Result<(), u32> {
        let (own, bus, len, is_in) = match command {
            Command::In { own, bus, len } => (own, bus, len, true),
            Command::Out { own, bus, len } => (own, bus, len, false),
            Command::Zero { own, len } => {
                assert!(own.is_multiple_of(self.shape.granule) && len.is_multiple_of(self.shape.granule));
                assert!(len > 0 && len <= self.shape.zeroes);
                let (own, len) = (usize::try_from(own).unwrap(), usize::try_from(len).unwrap());
                self.bytes[own..own + len].fill(0);
                return Ok(());
            }
            Command::Flush => return Ok(()),
        };
        let shape = &self.shape;
        assert!(own.is_multiple_of(shape.granule) && len.is_multiple_of(shape.granule) && len <= shape.most && len > 0);
        assert!(bus.0.is_multiple_of(shape.alignment));
        let want = if is_in { Access::READ } else { Access::WRITE };
        let mut at = 0;
        while at < len {
            // Up to the end of the page.
            let count = (PAGE - (bus.0 + at) % PAGE).min(len - at);
            let there = self.iommu.find(bus.0 + at, want).expect("what a command needs is mapped");
            let (from, count) = (usize::try_from(own + at).unwrap(), usize::try_from(count).unwrap());
            let here = &mut self.bytes[from..from + count];
            if is_in {
                // SAFETY: the table says where the page is in this process, and holds it; the disk's bytes are its own.
                unsafe { std::ptr::copy_nonoverlapping(there, here.as_mut_ptr(), count) };
            } else {
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(here.as_ptr(), there, count) };
            }
            at += count as u64;
        }
        Ok(())
    }
}

impl Driver for Disk {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn start(&mut self, slot: usize, command: Command) {
        assert!(slot < self.shape.depth && self.running.insert(slot, command).is_none());
        if let Command::In { bus, len, .. } | Command::Out { bus, len, .. } = command {
            self.iommu.0.lock().unwrap().running.insert(slot, (bus.0, bus.0 + len));
        }
        self.interrupt.write(1).unwrap();
    }

    fn poll(&mut self, ended: &mut Vec<(usize, Result<(), u32>)>) {
        if self.trouble == Trouble::Stuck {
            return;
        }
        assert!(self.trouble != Trouble::Panics, "as the test wants it");
        if let Some((slot, command)) = self.running.pop_last() {
            let result = if self.trouble == Trouble::Refuses { Err(0x281) } else { self.carry_out(command) };
            self.iommu.0.lock().unwrap().running.remove(&slot);
            ended.push((slot, result));
        }
    }

    fn reset(&mut self) -> Result<(), VfioError> {
        self.stop();
        self.trouble = Trouble::None;
        Ok(())
    }

    fn stop(&mut self) {
        self.running.clear();
        self.iommu.0.lock().unwrap().running.clear();
    }
}

const DISK: Shape = Shape {
    own_len: 1 << 20,
    is_buffer: false,
    granule: 512,
    alignment: 4,
    most: 16 << 10,
    depth: 5,
    mask: u64::MAX,
    zeroes: 4 << 10,
    reports_faults: false,
};

/// Copies through a small buffer.
const COPIER: Shape =
    Shape { own_len: 4096, is_buffer: true, granule: 1, alignment: 1, most: 4096, depth: 1, zeroes: 0, ..DISK };

fn build(shape: Shape, trouble: Trouble) -> Parts {
    build_behind(&Arc::default(), shape, trouble)
}

fn disk(iommu: &Arc<Iommu>, shape: Shape, trouble: Trouble) -> (Disk, Arc<Sink>, EventFd) {
    let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
    let disk = Disk {
        iommu: Arc::clone(iommu),
        bytes: vec![0xee; usize::try_from(shape.own_len).unwrap()],
        shape,
        running: BTreeMap::new(),
        interrupt: interrupt.try_clone().unwrap(),
        trouble,
    };
    (disk, Arc::new(Sink(Arc::clone(iommu))), interrupt)
}

/// A disk whose first endpoint's memory is its own, with somebody who watches.
fn watched(watch: Option<Box<dyn FaultWatch>>, reports_faults: bool) -> Arc<VfioEngine> {
    let (disk, sink, interrupt) = disk(&Arc::default(), Shape { reports_faults, ..DISK }, Trouble::None);
    let own = Some(Slice { endpoint: APERTURES[0].0, start: 512, len: APERTURES[0].1 });
    Arc::new(VfioEngine::over(Box::new(disk), sink, own, ram(), watch, interrupt, None).unwrap())
}

fn build_behind(iommu: &Arc<Iommu>, shape: Shape, trouble: Trouble) -> Parts {
    build_over(Arc::new(Sink(Arc::clone(iommu))), iommu, shape, trouble)
}

fn build_lazy(iommu: &Arc<Iommu>, shape: Shape) -> Parts {
    build_over(Arc::new(lazy(iommu, Lazy::LINGER)), iommu, shape, Trouble::None)
}

fn lazy(iommu: &Arc<Iommu>, linger: Duration) -> Lazy {
    Lazy::new(Arc::new(Sink(Arc::clone(iommu))), linger)
}

/// Keeps what it has, however long a test takes.
struct Tireless(Lazy);

impl MapSink for Tireless {
    fn map(&self, place: &Place, access: Access, mask: u64) -> Result<Mapped, VfioError> {
        self.0.map(place, access, mask)
    }
}

fn build_over(host: Arc<dyn MapSink>, iommu: &Arc<Iommu>, shape: Shape, trouble: Trouble) -> Parts {
    let memory = ram();
    let own = (!shape.is_buffer).then_some(Slice { endpoint: APERTURES[0].0, start: 512, len: APERTURES[0].1 });
    let mapped = if own.is_some() { &APERTURES[1..] } else { &APERTURES[..] };
    for (endpoint, len) in mapped {
        memory.add_aperture(*endpoint, &file(*len), *len).unwrap();
    }
    let (disk, _, interrupt) = disk(iommu, shape, trouble);
    let engine = VfioEngine::over(Box::new(disk), host, own, memory.clone(), None, interrupt, None).unwrap();
    let engine = Arc::new(engine);
    let memory = Arc::new(World { engine: Arc::clone(&engine), memory, hold: None });
    Parts { engine, memory, advance: None }
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
fn an_engine_whose_mappings_are_kept_conforms() {
    conformance::run(&|| build_lazy(&Arc::default(), DISK));
    conformance::run(&|| build_lazy(&Arc::default(), COPIER));
}

#[test]
fn what_was_mapped_is_used_again_for_the_same() {
    let iommu = Arc::<Iommu>::default();
    let host = Arc::new(Tireless(lazy(&iommu, Duration::MAX)));
    let parts = build_over(host, &iommu, DISK, Trouble::None);
    let pages = || iommu.0.lock().unwrap().pages.len();
    let granted = || iommu.0.lock().unwrap().granted[1..].to_vec();
    let before = pages();
    let ram = Location::Ram(Gpa(0x2000));
    for job in [1, 3, 5] {
        assert_eq!(move_page(&parts, job, own(0), ram), (4096, Ok(())));
        // The same memory, but what could be read must not be written.
        assert_eq!(move_page(&parts, job + 1, ram, own(512)), (4096, Ok(())));
        assert_eq!(granted(), [Access::READ, Access::WRITE]);
    }
    assert_eq!(pages(), before + 2);
    drop(parts);
    assert_eq!(pages(), 0);
}

#[test]
fn what_was_mapped_goes_when_there_is_nothing_to_do() {
    let iommu = Arc::<Iommu>::default();
    let parts = build_over(Arc::new(lazy(&iommu, Duration::MAX)), &iommu, DISK, Trouble::None);
    let pages = || iommu.0.lock().unwrap().pages.len();
    let before = pages();
    for job in 0..2 {
        assert_eq!(move_page(&parts, job, own(0), Location::Ram(Gpa(0x2000))), (4096, Ok(())));
        let begun = Instant::now();
        while pages() > before {
            assert!(begun.elapsed() < Duration::from_secs(30), "it goes");
            std::thread::yield_now();
        }
    }
}

/// The `n`th of many places of a page each.
fn nth(hold: &Arc<dyn Any + Send + Sync>, n: u64) -> Place {
    Place::new((n + 1) << 20, PAGE, Arc::clone(hold))
}

#[test]
fn only_the_same_pages_of_the_same_memory_are_the_same() {
    let iommu = Arc::<Iommu>::default();
    let lazy = lazy(&iommu, Duration::MAX);
    let (one, other): (Arc<dyn Any + Send + Sync>, Arc<dyn Any + Send + Sync>) = (Arc::new(1), Arc::new(2));
    let map = |place: Place, access, mask| lazy.map(&place, access, mask).map(|mapped| (mapped.first.0, mapped));
    let (page, _) = map(nth(&one, 0), Access::READ, u64::MAX).unwrap();
    let part = Place { address: (1 << 20) + 100, len: 50, ..nth(&one, 0) };
    let (first, used) = map(part.clone(), Access::READ, page + 0xfff).unwrap();
    assert_eq!((first, used.len), (page + 100, 50), "a part of the page is in it");
    assert_ne!(map(part.clone(), Access::READ, u64::MAX).unwrap().0, first, "that one is in use");
    drop(used);
    let differs = |place: &Place, access| map(place.clone(), access, u64::MAX).unwrap().0 / PAGE > first / PAGE + 1;
    let two = Place { len: PAGE, ..part.clone() };
    assert!(differs(&part, Access::WRITE) && differs(&part, Access::RW) && differs(&two, Access::READ));
    assert!(differs(&nth(&other, 0), Access::READ) && differs(&nth(&one, 1), Access::READ));
    let kept = Arc::strong_count(&other);
    lazy.rest();
    assert_eq!((kept, Arc::strong_count(&other)), (2, 1));
    let (page, _) = map(nth(&one, 0), Access::READ, u64::MAX).unwrap();
    assert!(map(nth(&one, 0), Access::READ, page + 0xffe).is_err(), "a function that cannot name its last byte");
}

#[test]
fn no_more_than_so_much_is_kept_and_the_oldest_goes_first_but_nothing_that_is_used() {
    let hold: Arc<dyn Any + Send + Sync> = Arc::new(());
    let most = Lazy::MAX_KEPT as u64;
    // Many small ones, or fewer large ones.
    for (len, most) in [(PAGE, most), (Lazy::MAX_KEPT_BYTES / 8, 8)] {
        let iommu = Arc::<Iommu>::default();
        let lazy = lazy(&iommu, Duration::MAX);
        let place = |n| Place { address: (n + 1) << 32, len, ..nth(&hold, 0) };
        let count = || iommu.0.lock().unwrap().pages.len() as u64 * PAGE / len;
        let used = lazy.map(&place(0), Access::RW, u64::MAX).unwrap();
        for n in 1..=most {
            drop(lazy.map(&place(n), Access::RW, u64::MAX).unwrap());
            assert_eq!(count(), n + 1);
        }
        drop(lazy.map(&place(most + 1), Access::RW, u64::MAX).unwrap());
        assert_eq!(count(), most / 2 + 1);
        assert!(iommu.find(used.first.0, Access::RW).is_some());
        let maps = || iommu.0.lock().unwrap().granted.len();
        let before = maps();
        for n in most / 2 + 2..=most + 1 {
            drop(lazy.map(&place(n), Access::RW, u64::MAX).unwrap());
        }
        assert_eq!(maps(), before);
        drop(lazy.map(&place(most / 2 + 1), Access::RW, u64::MAX).unwrap());
        assert_eq!(maps(), before + 1);
        drop(lazy);
        assert_eq!(count(), 1, "what is used outlives it");
        drop(used);
        assert_eq!(count(), 0);
    }
}

#[test]
fn nothing_is_kept_longer_than_it_may_be() {
    let iommu = Arc::<Iommu>::default();
    let lazy = lazy(&iommu, Duration::ZERO);
    let hold: Arc<dyn Any + Send + Sync> = Arc::new(());
    drop(lazy.map(&nth(&hold, 0), Access::READ, u64::MAX).unwrap());
    assert_eq!(iommu.0.lock().unwrap().pages.len(), 0);
}

#[test]
fn what_is_kept_is_in_nobodys_way() {
    let iommu = Arc::<Iommu>::default();
    iommu.0.lock().unwrap().room = Some(3);
    let lazy = lazy(&iommu, Duration::MAX);
    let hold: Arc<dyn Any + Send + Sync> = Arc::new(());
    for n in 0..10 {
        assert!(lazy.map(&nth(&hold, n), Access::READ, u64::MAX).is_ok(), "{n}");
    }
    let used: Vec<_> = (0..3).map(|n| lazy.map(&nth(&hold, n), Access::READ, u64::MAX).unwrap()).collect();
    assert!(lazy.map(&nth(&hold, 3), Access::READ, u64::MAX).is_err(), "all is in use");
    drop(used);
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
