//! One record: a run of I/O virtual addresses that lies in one piece somewhere, in one cache line.
//!
//! The first record of a mapping is its **head**, and its pin word guards the whole mapping. Every record names its head and the head's generation in
//! `owner`. Fields are written only while no head owns the record, and published by `owner`, so a reader that
//!
//! 1. reads `owner` and then the fields, with no lock, from a record that it found in any way, however stale, and then
//! 2. pins the head with the generation that `owner` named
//!
//! knows that what it read is what the pin guards: had the record changed hands in between, that generation of the head would be over.
//!
//! Not here: where records live ([`crate::slab`]), how one is found ([`crate::index`], [`crate::table`]).

use crate::sync::{AtomicU64, Ordering};
use crate::word::Word;
use iommu_addr::{Access, Addr, ApertureOffset, EndpointId, Gpa, Iova, Location, Range};

const APERTURE: u64 = 1 << 32;
const READ: u64 = 1 << 33;
const WRITE: u64 = 1 << 34;

/// The pin that makes a [`Run`] usable: which record is the head, and in which generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) head: u32,
    pub(crate) generation: u32,
}

/// What a record says: `range` of domain `domain` lies in one piece from `to` on. Valid only under a pin of `owner`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) domain: u64,
    pub(crate) range: Range<Iova>,
    pub(crate) to: Location,
    pub(crate) access: Access,
    pub(crate) owner: Owner,
}

impl Run {
    /// Where `at`, an address of the run, lies.
    #[inline]
    pub(crate) fn locate(&self, at: Iova) -> Location {
        let into = at.raw().wrapping_sub(self.range.start().raw());
        let mut place = self.to;
        match &mut place {
            Location::Ram(gpa) => gpa.0 = gpa.0.wrapping_add(into),
            Location::Aperture { offset, .. } => offset.0 = offset.0.wrapping_add(into),
        }
        place
    }
}

/// See the module.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Record {
    /// The mapping's pins, if this is a head.
    pub(crate) word: Word,
    owner: AtomicU64,
    start: AtomicU64,
    last: AtomicU64,
    to: AtomicU64,
    /// Endpoint, kind of `to`, access.
    kind: AtomicU64,
    domain: AtomicU64,
    /// Free: the next free record, plus one.
    link: AtomicU64,
}

impl Record {
    /// A free record.
    pub(crate) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            word: Word::new(),
            owner: zero(),
            start: zero(),
            last: zero(),
            to: zero(),
            kind: zero(),
            domain: zero(),
            link: zero(),
        }
    }

    /// Writes and publishes a run. The record must be free.
    pub(crate) fn write(&self, run: &Run) {
        let (to, place) = match run.to {
            Location::Ram(gpa) => (gpa.raw(), 0),
            Location::Aperture { endpoint, offset } => (offset.raw(), APERTURE | u64::from(endpoint.to_raw())),
        };
        let read = if run.access.read { READ } else { 0 };
        let write = if run.access.write { WRITE } else { 0 };
        self.start.store(run.range.start().raw(), Ordering::Relaxed);
        self.last.store(run.range.last().raw(), Ordering::Relaxed);
        self.to.store(to, Ordering::Relaxed);
        self.kind.store(place | read | write, Ordering::Relaxed);
        self.domain.store(run.domain, Ordering::Relaxed);
        let owner = u64::from(run.owner.head) << 32 | u64::from(run.owner.generation);
        self.owner.store(owner, Ordering::Release);
    }

    /// Reads the run if it holds `at` of `domain`; see the module for what that is worth.
    #[inline]
    pub(crate) fn read_if(&self, domain: u64, at: Iova) -> Option<Run> {
        let owner = self.owner.load(Ordering::Acquire);
        let range = self.range()?;
        if !range.holds(at) || self.domain.load(Ordering::Relaxed) != domain {
            return None;
        }
        let to = self.to.load(Ordering::Relaxed);
        let kind = self.kind.load(Ordering::Relaxed);
        let to = if kind & APERTURE == 0 {
            Location::Ram(Gpa(to))
        } else {
            Location::Aperture { endpoint: EndpointId::from_raw(low_half(kind)), offset: ApertureOffset(to) }
        };
        let access = Access { read: kind & READ != 0, write: kind & WRITE != 0 };
        let owner = Owner { head: low_half(owner >> 32), generation: low_half(owner) };
        Some(Run { domain, range, to, access, owner })
    }

    /// The run's addresses. `None` only if the record is being written.
    pub(crate) fn range(&self) -> Option<Range<Iova>> {
        Range::new(Iova(self.start.load(Ordering::Relaxed)), Iova(self.last.load(Ordering::Relaxed)))
    }

    /// Which domain the record serves or last served.
    pub(crate) fn domain(&self) -> u64 {
        self.domain.load(Ordering::Relaxed)
    }

    /// What [`Record::set_link`] set.
    pub(crate) fn link(&self) -> u64 {
        self.link.load(Ordering::Relaxed)
    }

    /// For the list of free records.
    pub(crate) fn set_link(&self, next: u64) {
        self.link.store(next, Ordering::Relaxed);
    }

    /// Brings the record's cache line closer.
    pub(crate) fn touch(&self) -> u64 {
        self.owner.load(Ordering::Relaxed)
    }
}

#[allow(clippy::cast_possible_truncation, reason = "the low half is what is asked for")]
fn low_half(word: u64) -> u32 {
    word as u32
}

const _: () = assert!(cfg!(loom) || size_of::<Record>() == 64);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_up_to_the_top_of_every_space() {
        let page = |start| Range::with_len(Iova(start), 0x1000).expect("in the space");
        let endpoint = EndpointId { host: 0xffff, id: 0xfffe };
        for (range, to, access) in [
            (page(0), Location::Ram(Gpa(u64::MAX - 0xfff)), Access::READ),
            (page(u64::MAX - 0xfff), Location::Aperture { endpoint, offset: iommu_addr::REGISTERS }, Access::WRITE),
            (Range::all(), Location::Ram(Gpa(0)), Access::RW),
        ] {
            let record = Record::new();
            let run = Run { domain: 7, range, to, access, owner: Owner { head: u32::MAX - 1, generation: u32::MAX } };
            record.write(&run);
            assert_eq!(record.read_if(7, range.last()), Some(run));
            assert_eq!(record.read_if(8, range.last()), None, "another domain's");
            assert_eq!(run.locate(range.last()), to.checked_add(range.span()).expect("in its space"));
        }
    }
}
