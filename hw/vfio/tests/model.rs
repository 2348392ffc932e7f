//! The engine over a driver and an IOMMU that are models: every rule of theirs is checked at each command.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use common::{World, file, ram};
use hw_engine::conformance::{self, APERTURES, Parts};
use hw_engine::{EngineError, JobId, Place, Route, Segments, Transfer, Work};
use hw_vfio::{Command, Driver, MapSink, Mapped, Shape, Slice, VfioEngine, VfioError};
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
        // Never the same again, and never next to each other: what runs past its end is seen.
        table.next = end;
        table.granted.push(access);
        assert!(end <= mask);
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
    reports_faults: false,
};

/// Copies through a small buffer.
const COPIER: Shape = Shape { own_len: 4096, is_buffer: true, granule: 1, alignment: 1, most: 4096, depth: 1, ..DISK };

fn build(shape: Shape, trouble: Trouble) -> Parts {
    build_behind(&Arc::default(), shape, trouble)
}

fn build_behind(iommu: &Arc<Iommu>, shape: Shape, trouble: Trouble) -> Parts {
    let memory = ram();
    let own = (!shape.is_buffer).then_some(Slice { endpoint: APERTURES[0].0, start: 512, len: APERTURES[0].1 });
    let mapped = if own.is_some() { &APERTURES[1..] } else { &APERTURES[..] };
    for (endpoint, len) in mapped {
        memory.add_aperture(*endpoint, &file(*len), *len).unwrap();
    }
    let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
    let disk = Disk {
        iommu: Arc::clone(iommu),
        bytes: vec![0xee; usize::try_from(shape.own_len).unwrap()],
        shape,
        running: BTreeMap::new(),
        interrupt: interrupt.try_clone().unwrap(),
        trouble,
    };
    let sink = Arc::new(Sink(Arc::clone(iommu)));
    let engine = VfioEngine::over(Box::new(disk), sink, own, memory.clone(), interrupt, None).unwrap();
    let engine = Arc::new(engine);
    let memory = Arc::new(World { engine: Arc::clone(&engine), has_own: own.is_some(), memory, hold: None });
    Parts { engine, memory, advance: None }
}

#[test]
fn an_engine_with_memory_of_its_own_conforms() {
    conformance::run(&|| build(DISK, Trouble::None));
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
        let parts = build(DISK, Trouble::None);
        drop(parts);
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        let iommu = Arc::<Iommu>::default();
        let disk = Disk {
            iommu: Arc::clone(&iommu),
            bytes: Vec::new(),
            shape: DISK,
            running: BTreeMap::new(),
            interrupt: interrupt.try_clone().unwrap(),
            trouble: Trouble::None,
        };
        let own = Some(Slice { endpoint: EndpointId::local(0), start, len });
        VfioEngine::over(Box::new(disk), Arc::new(Sink(iommu)), own, ram(), interrupt, None).is_ok()
    };
    assert!(open(0, 1 << 20) && open((1 << 20) - 512, 512));
    for (start, len) in [(1, 512), (0, 513), (512, 1 << 20), (u64::MAX - 511, 512), (0, u64::MAX - 511)] {
        assert!(!open(start, len), "{start} {len}");
    }
}
