//! Guest memory: a sealed memory file as a VMM would share it, and an allocator of its pages.
//!
//! Two regions of one file, with a hole between them as on a PC, so that nothing works by the accident of one region at zero. Bytes are only
//! copied in and out, never borrowed: the device writes them at the same time.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use hw_engine::RamRegion;
use iommu_addr::{Gpa, Range};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vhost::VhostUserMemoryRegionInfo;
use vm_memory::{
    AtomicAccess, Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    VolatileSlice,
};

/// Granule of allocation, in bytes.
pub const PAGE: u64 = 4096;
/// End of the low region.
const LOW_END: u64 = 0xa_0000;
/// Begin of the high region.
const HIGH: u64 = 0x10_0000;

/// A guest's memory.
#[derive(Debug)]
pub struct GuestRam {
    memory: GuestMemoryMmap,
    free: Mutex<BTreeMap<u64, u64>>,
}

impl GuestRam {
    /// Memory with `len` bytes (a multiple of the page size) to allocate from, beside the low region. The file is sealed as QEMU's is.
    pub fn new(len: u64) -> Result<Arc<Self>> {
        let file = memory_file(HIGH + len, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::from_file(&file, len)
    }

    /// The same on a file of the caller's, which must hold 1 MiB more than `len`.
    pub fn from_file(file: &File, len: u64) -> Result<Arc<Self>> {
        ensure!(len > 0 && len.is_multiple_of(PAGE), "Guest memory comes in pages");
        let part = |gpa: u64, len: u64| -> Result<_> {
            Ok((GuestAddress(gpa), usize::try_from(len)?, Some(FileOffset::new(file.try_clone()?, gpa))))
        };
        let memory = GuestMemoryMmap::from_ranges_with_files([part(0, LOW_END)?, part(HIGH, len)?])?;
        Ok(Arc::new(Self { memory, free: Mutex::new(BTreeMap::from([(HIGH, len)])) }))
    }

    /// The mapping itself.
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// What SET_MEM_TABLE says about it.
    pub fn regions(&self) -> Result<Vec<VhostUserMemoryRegionInfo>> {
        self.memory.iter().map(|region| Ok(VhostUserMemoryRegionInfo::from_guest_region(region)?)).collect()
    }

    /// What a transport would tell the device's engines about it.
    pub fn ram_regions(&self) -> Result<Vec<RamRegion>> {
        self.memory
            .iter()
            .map(|region| {
                let backing = region.file_offset().context("Guest memory is a file")?;
                let gpa = Range::with_len(Gpa(region.start_addr().0), region.len()).context("A region has a length")?;
                Ok(RamRegion { gpa, file: Arc::clone(backing.arc()), offset: backing.start() })
            })
            .collect()
    }

    /// The address that the front-end has it at, which is how ring addresses travel.
    pub fn host_address(&self, gpa: u64) -> Result<u64> {
        Ok(self.memory.get_host_address(GuestAddress(gpa))? as u64)
    }

    /// First guest-physical address after the memory.
    pub fn end(&self) -> u64 {
        self.memory.last_addr().0 + 1
    }

    /// Copies in.
    pub fn write(&self, gpa: u64, bytes: &[u8]) -> Result<()> {
        self.memory.write_slice(bytes, GuestAddress(gpa)).with_context(|| format!("No guest memory at {gpa:#x}"))
    }

    /// Copies out.
    pub fn read(&self, gpa: u64, into: &mut [u8]) -> Result<()> {
        self.memory.read_slice(into, GuestAddress(gpa)).with_context(|| format!("No guest memory at {gpa:#x}"))
    }

    /// Copies within the memory, as fast as the CPU does it.
    pub fn copy(&self, to: u64, from: u64, len: usize) -> Result<()> {
        let (to, from) = (self.slice(to, len)?, self.slice(from, len)?);
        from.copy_to_volatile_slice(to);
        Ok(())
    }

    fn slice(&self, gpa: u64, len: usize) -> Result<VolatileSlice<'_>> {
        self.memory.get_slice(GuestAddress(gpa), len).with_context(|| format!("No guest memory at {gpa:#x}"))
    }

    /// One atomic store.
    pub fn store<T: AtomicAccess>(&self, gpa: u64, value: T, order: Ordering) -> Result<()> {
        self.memory.store(value, GuestAddress(gpa), order).with_context(|| format!("No guest memory at {gpa:#x}"))
    }

    /// One atomic load.
    pub fn load<T: AtomicAccess>(&self, gpa: u64, order: Ordering) -> Result<T> {
        self.memory.load(GuestAddress(gpa), order).with_context(|| format!("No guest memory at {gpa:#x}"))
    }

    /// Allocates zeroed pages for `len` bytes in one run.
    pub fn alloc(self: &Arc<Self>, len: u64) -> Result<Pages> {
        self.alloc_runs(len, u64::MAX)
    }

    /// Allocates zeroed pages for `len` bytes in runs of at most `longest` bytes that do not touch each other.
    pub fn alloc_scattered(self: &Arc<Self>, len: u64, longest: u64) -> Result<Pages> {
        self.alloc_runs(len, longest.max(PAGE))
    }

    fn alloc_runs(self: &Arc<Self>, len: u64, longest: u64) -> Result<Pages> {
        ensure!(len > 0, "No page is no allocation");
        let mut pages = Pages { ram: Arc::clone(self), runs: Vec::new(), len };
        let mut gaps = Vec::new();
        let mut left = len.next_multiple_of(PAGE);
        while left > 0 {
            let run = left.min(longest / PAGE * PAGE);
            let found = self.take(run);
            let Some(gpa) = found else { break };
            pages.runs.push((gpa, run));
            left -= run;
            if left > 0 {
                gaps.extend(self.take(PAGE));
            }
        }
        gaps.into_iter().for_each(|gpa| self.give(gpa, PAGE));
        ensure!(left == 0, "Guest memory is used up: {left} bytes are missing");
        pages.fill_zero()?;
        Ok(pages)
    }

    fn take(&self, len: u64) -> Option<u64> {
        let mut free = self.free.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (&gpa, &have) = free.iter().find(|(_, have)| **have >= len)?;
        free.remove(&gpa);
        if have > len {
            free.insert(gpa + len, have - len);
        }
        Some(gpa)
    }

    fn give(&self, gpa: u64, len: u64) {
        let mut free = self.free.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (mut start, mut size) = (gpa, len);
        if let Some(after) = free.remove(&(gpa + len)) {
            size += after;
        }
        if let Some((&before, &have)) = free.range(..gpa).next_back()
            && before + have == gpa
        {
            (start, size) = (before, size + have);
        }
        free.insert(start, size);
    }
}

/// A memory file with seals.
pub fn memory_file(len: u64, seals: SealFlags) -> Result<File> {
    let file = File::from(memfd_create("guest-ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.set_len(len)?;
    fcntl_add_seals(&file, seals)?;
    Ok(file)
}

/// Pages of a guest; freed when dropped.
#[derive(Debug)]
pub struct Pages {
    ram: Arc<GuestRam>,
    runs: Vec<(u64, u64)>,
    len: u64,
}

impl Pages {
    /// Address of the first byte.
    pub fn gpa(&self) -> u64 {
        self.runs[0].0
    }

    /// Runs of guest-physical memory: address and length, whole pages.
    pub fn runs(&self) -> &[(u64, u64)] {
        &self.runs
    }

    /// Bytes asked for.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Copies in, from `offset` on.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.walk(offset, bytes.len(), |gpa, part| self.ram.write(gpa, &bytes[part]))
    }

    /// Copies out, from `offset` on.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let len = into.len();
        self.walk(offset, len, |gpa, part| self.ram.read(gpa, &mut into[part]))
    }

    fn walk(
        &self,
        offset: u64,
        len: usize,
        mut each: impl FnMut(u64, std::ops::Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let (mut skip, mut done) = (offset, 0);
        for (gpa, run) in &self.runs {
            if done == len {
                break;
            }
            if skip >= *run {
                skip -= run;
                continue;
            }
            let part = usize::try_from(run - skip)?.min(len - done);
            each(gpa + skip, done..done + part)?;
            (skip, done) = (0, done + part);
        }
        ensure!(done == len, "{len} bytes at {offset} leave an allocation of {} bytes", self.len);
        Ok(())
    }

    fn fill_zero(&self) -> Result<()> {
        static ZEROES: [u8; 1 << 16] = [0; 1 << 16];
        for (gpa, run) in &self.runs {
            let mut done = 0;
            while done < *run {
                let step = (run - done).min(ZEROES.len() as u64);
                self.ram.write(gpa + done, &ZEROES[..usize::try_from(step)?])?;
                done += step;
            }
        }
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        for (gpa, len) in self.runs.drain(..) {
            self.ram.give(gpa, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_pages_come_back_as_one_run() {
        let ram = GuestRam::new(16 * PAGE).unwrap();
        let parts: Vec<_> = (0..16).map(|_| ram.alloc(PAGE).unwrap()).collect();
        assert!(ram.alloc(1).is_err());
        drop(parts);
        assert_eq!(ram.alloc(16 * PAGE).unwrap().runs().len(), 1);
    }

    #[test]
    fn scattered_runs_do_not_touch_and_hold_their_bytes() {
        let ram = GuestRam::new(64 * PAGE).unwrap();
        let pages = ram.alloc_scattered(8 * PAGE, 2 * PAGE).unwrap();
        assert_eq!(pages.runs().len(), 4);
        assert!(pages.runs().windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0));
        let bytes: Vec<u8> = (0..8 * PAGE).map(|i| (i % 251) as u8).collect();
        pages.write(0, &bytes).unwrap();
        let mut back = vec![0; 5000];
        pages.read(6000, &mut back).unwrap();
        assert_eq!(back, bytes[6000..11000]);
        assert!(pages.write(8 * PAGE - 1, &[0; 2]).is_err());
    }
}
