//! Plain bytes: the suite's picture of the world, and a memory for engines that bring none.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use iommu_addr::{ApertureOffset, EndpointId, Gpa, Location, Segment};

use super::{APERTURES, RAM};
use crate::{Atomic, AtomicOp, Memory, MemoryError, Work};

/// Memory without speed: vectors behind a lock. Guest memory regions that touch are one.
#[derive(Debug, Default)]
pub struct FlatMemory {
    places: Mutex<BTreeMap<Key, Vec<u8>>>,
}

/// A space and the first address of a run of bytes in it.
type Key = (Option<EndpointId>, u64);

impl FlatMemory {
    /// Memory laid out as the suite wants it, all zero.
    pub fn new() -> Self {
        let flat = Self::default();
        for (start, len) in RAM {
            flat.add(Location::Ram(Gpa(start)), len);
        }
        for (endpoint, len) in APERTURES {
            flat.add(Location::Aperture { endpoint, offset: ApertureOffset(0) }, len);
        }
        flat
    }

    /// Adds `len` zero bytes.
    ///
    /// # Panics
    /// If `len` is more than this machine can address.
    pub fn add(&self, at: Location, len: u64) {
        let (space, start) = key(at);
        let bytes = vec![0; usize::try_from(len).expect("the suite's memory is small")];
        let mut places = self.places();
        let touching = places.iter_mut().find(|(key, held)| key.0 == space && key.1 + held.len() as u64 == start);
        match touching {
            Some((_, held)) => held.extend(bytes),
            None => {
                places.insert((space, start), bytes);
            }
        }
    }

    /// Every run of bytes, in no promised order.
    pub fn runs(&self) -> Vec<(Location, Vec<u8>)> {
        self.places().iter().map(|(key, bytes)| (location(*key), bytes.clone())).collect()
    }

    /// What the world looks like once the first `bytes` of `work` are done, as if through a buffer.
    pub(super) fn apply(&self, work: &Work, bytes: u64) {
        let len = usize::try_from(bytes).expect("the suite's transfers are small");
        let (dst, data) = match work {
            Work::Copy { src, dst, .. } => (dst, self.gather(src, len)),
            Work::Fill { dst, pattern } => (dst, pattern.to_le_bytes().into_iter().cycle().take(len).collect()),
            Work::Atomic { at, atomic } => {
                if bytes > 0 {
                    self.atomic(*at, *atomic).expect("a word that was changed has a place");
                }
                return;
            }
            Work::Kernel { .. } | Work::Flush => return,
        };
        let mut rest = &data[..];
        for segment in dst {
            let (now, later) = rest.split_at(rest.len().min(usize::try_from(segment.len).unwrap_or(usize::MAX)));
            if !now.is_empty() {
                self.write(segment.at, now).expect("bytes that were moved have a place");
            }
            rest = later;
        }
    }

    fn gather(&self, src: &[Segment], len: usize) -> Vec<u8> {
        let mut data = Vec::new();
        for segment in src {
            let want = (len - data.len()).min(usize::try_from(segment.len).unwrap_or(usize::MAX));
            let mut part = vec![0; want];
            if want > 0 {
                self.read(segment.at, &mut part).expect("bytes that were moved have a source");
            }
            data.extend(part);
        }
        data
    }

    fn with<T>(&self, at: Location, len: u64, act: impl FnOnce(&mut [u8]) -> T) -> Result<T, MemoryError> {
        let (space, start) = key(at);
        let none = MemoryError { at, len };
        let mut places = self.places();
        let (found, bytes) = places.range_mut(..=(space, start)).next_back().ok_or(none)?;
        if found.0 != space {
            return Err(none);
        }
        let first = usize::try_from(start - found.1).ok();
        let end = first.and_then(|first| first.checked_add(usize::try_from(len).ok()?));
        first.zip(end).and_then(|(first, end)| bytes.get_mut(first..end)).map(act).ok_or(none)
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<Key, Vec<u8>>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory for FlatMemory {
    fn copy(&self, dst: Location, src: Location, len: u64) -> Result<(), MemoryError> {
        let data = self.with(src, len, |bytes| bytes.to_vec())?;
        self.write(dst, &data)
    }

    fn fill(&self, dst: Location, len: u64, pattern: u64) -> Result<(), MemoryError> {
        self.with(dst, len, |bytes| {
            for (byte, value) in bytes.iter_mut().zip(pattern.to_le_bytes().into_iter().cycle()) {
                *byte = value;
            }
        })
    }

    fn read(&self, src: Location, into: &mut [u8]) -> Result<(), MemoryError> {
        self.with(src, into.len() as u64, |bytes| into.copy_from_slice(bytes))
    }

    fn write(&self, dst: Location, from: &[u8]) -> Result<(), MemoryError> {
        self.with(dst, from.len() as u64, |bytes| bytes.copy_from_slice(from))
    }

    fn atomic(&self, at: Location, atomic: Atomic) -> Result<u64, MemoryError> {
        self.with(at, atomic.len, |bytes| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            let was = u64::from_le_bytes(word);
            let is_same = |compare: u64| compare.to_le_bytes()[..bytes.len()] == *bytes;
            let now = match atomic.op {
                AtomicOp::Add => was.wrapping_add(atomic.operand),
                AtomicOp::CompareSwap { compare } if !is_same(compare) => was,
                AtomicOp::Swap | AtomicOp::CompareSwap { .. } => atomic.operand,
            };
            bytes.copy_from_slice(&now.to_le_bytes()[..bytes.len()]);
            was
        })
    }
}

fn key(at: Location) -> Key {
    match at {
        Location::Ram(gpa) => (None, gpa.0),
        Location::Aperture { endpoint, offset } => (Some(endpoint), offset.0),
    }
}

fn location((space, start): Key) -> Location {
    match space {
        None => Location::Ram(Gpa(start)),
        Some(endpoint) => Location::Aperture { endpoint, offset: ApertureOffset(start) },
    }
}

/// Numbers that look random and come out the same on every run (xorshift).
#[derive(Clone, Debug)]
pub struct Noise(u64);

impl Noise {
    /// A sequence of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number.
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `limit`, which must not be 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        (self.word() >> 16) % limit
    }

    /// `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len.div_ceil(8)).flat_map(|_| self.word().to_le_bytes()).take(len).collect()
    }
}
