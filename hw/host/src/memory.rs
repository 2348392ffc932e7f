//! [`HostMemory`]: the memory of one tenant, as this process has it mapped.
//!
//! Readers take the table in force without a lock and keep it, with its mappings, until their copy has ended. Changes build a new table
//! beside the old one. Not here: how bytes are moved (`mapping`), how an address is found (`table`).

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use hw_engine::{Atomic, Buffer, Memory, MemoryError, Place, RamMap, RamRegion};
use iommu_addr::{EndpointId, Gpa, Location, Range};

use crate::mapping::{FileError, Key, Mapping};
use crate::table::{Aperture, Region, Table};

/// Why a change of the memory was refused. Comes inside an [`io::Error`]; nothing has changed then.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The file behind guest memory is of no use.
    #[error(
        "Guest memory {gpa} cannot be mapped; back the VM's memory with a shared file (such as a memfd with share=on)"
    )]
    Region {
        /// The region.
        gpa: Range<Gpa>,
        /// What is wrong with its file.
        source: FileError,
    },
    /// Two regions claim the same addresses.
    #[error("Guest memory {first} overlaps {second}; give each guest address one place")]
    Overlap {
        /// A region.
        first: Range<Gpa>,
        /// The next one.
        second: Range<Gpa>,
    },
    /// The file behind a slice is of no use.
    #[error("The memory of endpoint {endpoint} cannot be mapped; give it a memory file as long as the slice")]
    Aperture {
        /// Whose memory.
        endpoint: EndpointId,
        /// What is wrong with its file.
        source: FileError,
    },
    /// The endpoint has memory already.
    #[error("Endpoint {endpoint} already has memory; give each endpoint one slice")]
    Taken {
        /// Which endpoint.
        endpoint: EndpointId,
    },
}

impl From<MapError> for io::Error {
    fn from(error: MapError) -> Self {
        let kind = match &error {
            MapError::Region { source, .. } | MapError::Aperture { source, .. } => source.kind(),
            MapError::Overlap { .. } => io::ErrorKind::InvalidInput,
            MapError::Taken { .. } => io::ErrorKind::AlreadyExists,
        };
        Self::new(kind, error)
    }
}

/// A run of memory behind a BAR that may be mapped.
#[derive(Clone, Copy, Debug)]
pub struct DeviceArea<'a> {
    /// Where it begins in the endpoint's memory.
    pub start: u64,
    /// What maps it.
    pub file: &'a File,
    /// Where in the file it begins.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Where it is in a dma-buf, if it is in one.
    pub buffer: Option<&'a Buffer>,
}

/// Guest memory and endpoints' memory, mapped shared. Every method may be called from any thread; moving bytes never blocks.
#[derive(Debug, Default)]
pub struct HostMemory {
    table: ArcSwap<Table>,
    /// Held while a new table is built, so that no change is lost.
    changes: Mutex<()>,
}

impl HostMemory {
    /// Memory without a byte.
    pub fn new() -> Self {
        Self::default()
    }

    /// Maps the first `len` bytes of `file` as the memory of `endpoint`. The file may be closed afterwards; seal it against shrinking.
    ///
    /// # Errors
    /// `AlreadyExists` if the endpoint has memory; `InvalidInput` if the file is too short or `len` is 0; else what `mmap` says, for
    /// instance if the file is not open for reading and writing.
    pub fn add_aperture(&self, endpoint: EndpointId, file: &File, len: u64) -> io::Result<()> {
        let run = || Ok(Aperture { endpoint, start: 0, mapping: Arc::new(Mapping::new(file, 0, len)?), buffer: None });
        self.add(endpoint, std::iter::once_with(run))
    }

    /// Maps memory behind a device's BAR as the memory of `endpoint`. The files may be closed afterwards. What lies between the areas is not there.
    ///
    /// # Errors
    /// As for [`HostMemory::add_aperture`].
    pub fn add_device(&self, endpoint: EndpointId, areas: &[DeviceArea<'_>]) -> io::Result<()> {
        let run = |area: &DeviceArea<'_>| {
            let mapping = Arc::new(Mapping::of_device(area.file, area.offset, area.len)?);
            Ok(Aperture { endpoint, start: area.start, mapping, buffer: area.buffer.cloned() })
        };
        self.add(endpoint, areas.iter().map(run))
    }

    fn add(&self, endpoint: EndpointId, runs: impl Iterator<Item = Result<Aperture, FileError>>) -> io::Result<()> {
        self.change(|table| {
            if table.apertures.iter().any(|run| run.endpoint == endpoint) {
                return Err(MapError::Taken { endpoint });
            }
            for run in runs {
                table.apertures.push(run.map_err(|source| MapError::Aperture { endpoint, source })?);
            }
            Ok(())
        })
    }

    fn change(&self, edit: impl FnOnce(&mut Table) -> Result<(), MapError>) -> io::Result<()> {
        let _one_at_a_time = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut table = Table::clone(&self.table.load());
        edit(&mut table)?;
        self.table.store(Arc::new(table));
        Ok(())
    }
}

impl RamMap for HostMemory {
    fn replace(&self, regions: &[RamRegion]) -> io::Result<()> {
        self.change(|table| {
            let mut ram: Vec<Region> = Vec::with_capacity(regions.len());
            for region in regions {
                let mapping = mapping_for(region, ram.iter().chain(&table.ram))
                    .map_err(|source| MapError::Region { gpa: region.gpa, source })?;
                ram.push(Region { gpa: region.gpa, mapping });
            }
            ram.sort_by_key(|region| region.gpa.start());
            if let Some(pair) = ram.windows(2).find(|pair| pair[0].gpa.overlaps(pair[1].gpa)) {
                return Err(MapError::Overlap { first: pair[0].gpa, second: pair[1].gpa });
            }
            table.ram = ram;
            Ok(())
        })
    }

    fn contains(&self, range: Range<Gpa>) -> bool {
        self.table.load().holds(range)
    }
}

/// The mapping that a region needs: one of `known` if the bytes are the same, else a new one.
fn mapping_for<'a>(region: &RamRegion, known: impl Iterator<Item = &'a Region>) -> Result<Arc<Mapping>, FileError> {
    let len = region.gpa.len().unwrap_or(u64::MAX);
    let key = Key::of(&region.file, region.offset, len)?;
    match known.map(|region| &region.mapping).find(|mapping| mapping.key() == key) {
        Some(mapping) => Ok(Arc::clone(mapping)),
        None => Ok(Arc::new(Mapping::new(&region.file, region.offset, len)?)),
    }
}

impl Memory for HostMemory {
    fn copy(&self, dst: Location, src: Location, len: u64) -> Result<(), MemoryError> {
        let table = self.table.load();
        if let (Some(to), Some(from)) = (table.whole(dst, len), table.whole(src, len)) {
            to.copy_from(from);
            return Ok(());
        }
        copy_pieces(&table, dst, src, len)
    }

    fn fill(&self, dst: Location, len: u64, pattern: u64) -> Result<(), MemoryError> {
        let table = self.table.load();
        if let Some(span) = table.whole(dst, len) {
            span.fill(pattern);
            return Ok(());
        }
        let mut done: usize = 0;
        for span in table.pieces(dst, len)? {
            span.fill(pattern.rotate_right(u32::try_from(done % 8 * 8).unwrap_or(0)));
            done += span.len();
        }
        Ok(())
    }

    fn read(&self, src: Location, into: &mut [u8]) -> Result<(), MemoryError> {
        let table = self.table.load();
        if let Some(span) = table.whole(src, into.len() as u64) {
            span.read(into);
            return Ok(());
        }
        let mut rest = into;
        for span in table.pieces(src, rest.len() as u64)? {
            let (now, later) = rest.split_at_mut(span.len());
            span.read(now);
            rest = later;
        }
        Ok(())
    }

    fn write(&self, dst: Location, from: &[u8]) -> Result<(), MemoryError> {
        let table = self.table.load();
        if let Some(span) = table.whole(dst, from.len() as u64) {
            span.write(from);
            return Ok(());
        }
        let mut rest = from;
        for span in table.pieces(dst, rest.len() as u64)? {
            let (now, later) = rest.split_at(span.len());
            span.write(now);
            rest = later;
        }
        Ok(())
    }

    fn atomic(&self, at: Location, atomic: Atomic) -> Result<u64, MemoryError> {
        let table = self.table.load();
        let done = table.whole(at, atomic.len).and_then(|word| word.atomic(atomic));
        done.ok_or(MemoryError { at, len: atomic.len })
    }

    fn place(&self, at: Location, most: u64) -> Option<Place> {
        self.table.load().place(at, most)
    }

    fn has_place(&self, at: Location) -> bool {
        // A place counts who holds it, which threads that ask for the same one would notice.
        self.table.load().span(at, 1).is_some()
    }
}

#[cold]
/// A copy whose source or destination spans regions, or is not there.
fn copy_pieces(table: &Table, dst: Location, src: Location, len: u64) -> Result<(), MemoryError> {
    let mut steps = Vec::new();
    let mut done: u64 = 0;
    while done < len {
        let rest = |at: Location| {
            let span = at.checked_add(done).and_then(|next| table.span(next, len - done));
            span.ok_or(MemoryError { at, len })
        };
        let (to, from) = (rest(dst)?, rest(src)?);
        done += to.len().min(from.len()) as u64;
        steps.push((to, from));
    }
    // Against overlap: towards higher addresses the last bytes go first.
    if matches!((dst, src), (Location::Ram(dst), Location::Ram(src)) if dst > src)
        || matches!((dst, src), (Location::Aperture { offset: dst, .. }, Location::Aperture { offset: src, .. }) if dst > src)
    {
        steps.reverse();
    }
    steps.into_iter().for_each(|(to, from)| to.copy_from(from));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use iommu_addr::ApertureOffset;
    use std::os::unix::fs::FileExt;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};

    const LEN: u64 = 0x4000;

    fn file(len: u64) -> Arc<File> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        Arc::new(file)
    }

    fn region(gpa: u64, file: &Arc<File>, offset: u64, len: u64) -> RamRegion {
        RamRegion { gpa: Range::with_len(Gpa(gpa), len).unwrap(), file: Arc::clone(file), offset }
    }

    fn ram(gpa: u64) -> Location {
        Location::Ram(Gpa(gpa))
    }

    fn aperture(id: u16, offset: u64) -> Location {
        Location::Aperture { endpoint: EndpointId::local(id), offset: ApertureOffset(offset) }
    }

    fn mappings(memory: &HostMemory) -> Vec<Arc<Mapping>> {
        memory.table.load().ram.iter().map(|region| Arc::clone(&region.mapping)).collect()
    }

    #[test]
    fn a_region_of_the_same_bytes_keeps_its_mapping() {
        let (memory, first, second) = (HostMemory::new(), file(4 * LEN), file(LEN));
        memory.replace(&[region(0, &first, LEN, LEN), region(LEN, &second, 0, LEN)]).unwrap();
        let before = mappings(&memory);
        // Another descriptor of the same file, at another address and in another order.
        let again = Arc::new(first.try_clone().unwrap());
        memory.replace(&[region(7 * LEN, &second, 0, LEN), region(9 * LEN, &again, LEN, LEN)]).unwrap();
        let after = mappings(&memory);
        assert!(Arc::ptr_eq(&before[0], &after[1]) && Arc::ptr_eq(&before[1], &after[0]));
        // Other bytes of the file are another mapping.
        memory.replace(&[region(0, &first, 2 * LEN, LEN), region(LEN, &first, LEN, 2 * LEN)]).unwrap();
        let other = mappings(&memory);
        assert!(other.iter().all(|new| !before.iter().any(|old| Arc::ptr_eq(old, new))));
    }

    #[test]
    fn memory_of_a_device_is_known_by_its_place_in_a_dma_buf_too() {
        let (memory, bar) = (HostMemory::new(), file(LEN));
        let buffer = |offset| Buffer { file: Arc::clone(&bar), offset };
        let (low, high) = (buffer(0x7000), buffer(0x1000));
        let area = |start, buffer| DeviceArea { start, file: &bar, offset: start, len: 0x1000, buffer };
        memory.add_device(EndpointId::local(0), &[area(0, Some(&low)), area(0x1000, Some(&high))]).unwrap();
        memory.add_device(EndpointId::local(1), &[area(0, None)]).unwrap();
        let offset = |id, at| memory.place(aperture(id, at), 1).unwrap().buffer.map(|buffer| buffer.offset);
        assert_eq!((offset(0, 0x123), offset(0, 0x1123), offset(1, 0x123)), (Some(0x7123), Some(0x1123), None));
    }

    #[test]
    fn a_copy_that_runs_keeps_the_memory_that_went() {
        let (memory, old) = (HostMemory::new(), file(LEN));
        memory.replace(&[region(0, &old, 0, LEN)]).unwrap();
        let weak = Arc::downgrade(&mappings(&memory)[0]);
        let running = memory.table.load();
        let span = running.whole(ram(16), 4).unwrap();
        memory.replace(&[]).unwrap();
        assert!(!memory.contains(Range::with_len(Gpa(0), 1).unwrap()), "new copies see the new table");
        span.write(b"late");
        drop(running);
        let mut bytes = [0; 4];
        old.read_exact_at(&mut bytes, 16).unwrap();
        assert_eq!(&bytes, b"late");
        assert!(weak.upgrade().is_none(), "the last copy took the mapping with it");
    }

    #[test]
    fn copies_go_on_while_the_table_changes() {
        let (memory, stays, comes_and_goes) = (HostMemory::new(), file(LEN), file(LEN));
        memory.add_aperture(EndpointId::local(0), &file(LEN), LEN).unwrap();
        memory.replace(&[region(0, &stays, 0, LEN)]).unwrap();
        memory.fill(ram(0), LEN, 0x1111_2222_3333_4444).unwrap();
        let (stop, copying) = (AtomicBool::new(false), Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                copying.wait();
                loop {
                    memory.copy(aperture(0, 0), ram(0), LEN).expect("this region is in every table");
                    // There or not there, never half.
                    let _ = memory.copy(ram(LEN), aperture(0, 0), LEN);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            copying.wait();
            for _ in 0..200 {
                memory.replace(&[region(0, &stays, 0, LEN), region(LEN, &comes_and_goes, 0, LEN)]).unwrap();
                memory.replace(&[region(0, &stays, 0, LEN)]).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        let mut word = [0; 8];
        memory.read(aperture(0, LEN - 8), &mut word).unwrap();
        assert_eq!(u64::from_le_bytes(word), 0x1111_2222_3333_4444);
    }

    #[test]
    fn a_refused_table_leaves_the_old_one() {
        let (memory, good, short) = (HostMemory::new(), file(LEN), file(100));
        memory.replace(&[region(0, &good, 0, LEN)]).unwrap();
        let kept = mappings(&memory);
        let refused = |regions: &[RamRegion]| memory.replace(regions).expect_err("must be refused").to_string();
        assert!(refused(&[region(LEN, &good, 0, LEN), region(2 * LEN, &short, 0, LEN)]).contains("cannot be mapped"));
        assert!(refused(&[region(0, &good, 0, LEN), region(LEN - 1, &good, 0, 8)]).contains("overlaps"));
        let whole_space = RamRegion { gpa: Range::all(), file: Arc::clone(&good), offset: 0 };
        assert!(refused(&[whole_space]).contains("cannot be mapped"));
        let read_only = Arc::new(File::open("/proc/self/exe").unwrap());
        assert!(refused(&[region(0, &read_only, 0, 1)]).contains("cannot be mapped"));
        assert!(Arc::ptr_eq(&kept[0], &mappings(&memory)[0]));
        memory.write(ram(0), b"still here").unwrap();
    }

    #[test]
    fn a_region_may_begin_inside_a_page() {
        let (memory, odd) = (HostMemory::new(), file(LEN));
        memory.replace(&[region(0x1000, &odd, 0x1801, 0x900)]).unwrap();
        memory.write(ram(0x1003), b"odd").unwrap();
        let mut bytes = [0; 3];
        odd.read_exact_at(&mut bytes, 0x1804).unwrap();
        assert_eq!(&bytes, b"odd");
        assert!(memory.write(ram(0x1000 + 0x8fe), b"odd").is_err(), "the file goes on, the region does not");
    }

    #[test]
    fn guest_memory_holds_ranges_that_span_regions_but_no_hole() {
        let (memory, bytes) = (HostMemory::new(), file(3 * LEN));
        memory
            .replace(&[region(4 * LEN, &bytes, 2 * LEN, LEN), region(LEN, &bytes, 0, LEN), region(0, &bytes, LEN, LEN)])
            .unwrap();
        let holds = |gpa, len| memory.contains(Range::with_len(Gpa(gpa), len).unwrap());
        assert!(holds(0, 2 * LEN) && holds(LEN - 1, 2) && holds(4 * LEN, LEN));
        assert!(!holds(0, 2 * LEN + 1) && !holds(3 * LEN, 1) && !holds(LEN, 4 * LEN) && !holds(5 * LEN - 1, 2));
        assert!(!memory.contains(Range::all()));
    }

    #[test]
    fn memory_at_the_very_end_of_the_address_space_works() {
        let (memory, bytes) = (HostMemory::new(), file(LEN));
        memory.replace(&[region(u64::MAX - LEN + 1, &bytes, 0, LEN)]).unwrap();
        assert!(memory.contains(Range::with_len(Gpa(u64::MAX), 1).unwrap()));
        memory.write(ram(u64::MAX), b"!").unwrap();
        assert!(memory.write(ram(u64::MAX), b"!!").is_err());
    }

    #[test]
    fn endpoints_have_one_slice_each_and_no_registers() {
        let memory = HostMemory::new();
        memory.add_aperture(EndpointId::local(3), &file(LEN), LEN).unwrap();
        let again = memory.add_aperture(EndpointId::local(3), &file(LEN), LEN).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        let short = memory.add_aperture(EndpointId::local(4), &file(LEN), LEN + 1).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::InvalidInput);
        assert!(memory.add_aperture(EndpointId::local(4), &file(LEN), 0).is_err());
        let at = aperture(3, iommu_addr::REGISTERS.0);
        assert_eq!(memory.fill(at, 8, 1), Err(MemoryError { at, len: 8 }));
    }

    #[test]
    fn a_refused_access_moves_nothing() {
        let (memory, bytes) = (HostMemory::new(), file(LEN));
        memory.add_aperture(EndpointId::local(0), &file(LEN), LEN).unwrap();
        memory.replace(&[region(0, &bytes, 0, LEN)]).unwrap();
        let missing = MemoryError { at: ram(LEN - 8), len: 16 };
        assert_eq!(memory.copy(ram(LEN - 8), aperture(0, 0), 16), Err(missing));
        assert_eq!(memory.copy(aperture(0, 0), ram(LEN - 8), 16), Err(missing));
        assert_eq!(memory.fill(ram(LEN - 8), 16, u64::MAX), Err(missing));
        assert_eq!(memory.write(ram(LEN - 8), &[1; 16]), Err(missing));
        assert_eq!(memory.read(ram(LEN - 8), &mut [1; 16]), Err(missing));
        let mut all = vec![1; usize::try_from(LEN).unwrap()];
        for at in [ram(0), aperture(0, 0)] {
            memory.read(at, &mut all).unwrap();
            assert!(all.iter().all(|&byte| byte == 0));
        }
    }
}
