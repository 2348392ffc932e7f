//! An IOMMU and the driver of a disk, both models, and engines over them.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use hw_engine::Place;
use hw_engine::conformance::{APERTURES, Parts};
use hw_vfio::{Command, Driver, MapSink, Mapped, Shape, Slice, VfioEngine, VfioError};
use iommu_addr::{Access, BusAddr};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::common::{World, file, ram};

pub(crate) const PAGE: u64 = 4096;

/// Pages by bus address: where they are in this process, and what is allowed.
#[derive(Default)]
pub(crate) struct Iommu(pub(crate) Mutex<Table>);

#[derive(Default)]
pub(crate) struct Table {
    pub(crate) pages: BTreeMap<u64, (u64, Access)>,
    next: u64,
    /// Of each command that is out: its first bus address and the one behind the last.
    running: BTreeMap<usize, (u64, u64)>,
    /// How many pages it holds at most.
    pub(crate) room: Option<usize>,
    /// What was allowed, in the order of mapping.
    pub(crate) granted: Vec<Access>,
}

pub(crate) struct Unmap(Arc<Iommu>, u64, u64, Arc<dyn Any + Send + Sync>);

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

pub(crate) struct Sink(pub(crate) Arc<Iommu>);

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
    pub(crate) fn find(&self, bus: u64, want: Access) -> Option<*mut u8> {
        let table = self.0.lock().unwrap();
        let (address, access) = table.pages.get(&(bus / PAGE * PAGE))?;
        access.allows(want).then_some((address + bus % PAGE) as *mut u8)
    }
}

/// A disk that ends its commands in no order.
pub(crate) struct Disk {
    iommu: Arc<Iommu>,
    bytes: Vec<u8>,
    shape: Shape,
    running: BTreeMap<usize, Command>,
    interrupt: EventFd,
    trouble: Trouble,
}

#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) enum Trouble {
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

pub(crate) const DISK: Shape = Shape {
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
pub(crate) const COPIER: Shape =
    Shape { own_len: 4096, is_buffer: true, granule: 1, alignment: 1, most: 4096, depth: 1, zeroes: 0, ..DISK };

pub(crate) fn build(shape: Shape, trouble: Trouble) -> Parts {
    build_behind(&Arc::default(), shape, trouble)
}

pub(crate) fn disk(iommu: &Arc<Iommu>, shape: Shape, trouble: Trouble) -> (Disk, Arc<Sink>, EventFd) {
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

pub(crate) fn build_behind(iommu: &Arc<Iommu>, shape: Shape, trouble: Trouble) -> Parts {
    build_over(Arc::new(Sink(Arc::clone(iommu))), iommu, shape, trouble)
}

pub(crate) fn build_over(host: Arc<dyn MapSink>, iommu: &Arc<Iommu>, shape: Shape, trouble: Trouble) -> Parts {
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
