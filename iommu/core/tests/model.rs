//! Random sequences of everything a domain does, against a list of mappings that is searched from end to end.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::*;
use iommu_addr::{Access, ApertureOffset, BufferId, DomainId, Gpa, Iova, Location, Range, Segment};
use iommu_core::*;
use proptest::prelude::*;
use std::sync::Arc;

const MAX_MAPPINGS: u32 = 24;
const MAX_SEGMENTS: u32 = 60;
/// Mappings of a domain of their own that leave no room in the index, so that everything else is found without it.
const CROWD: u32 = 30;

#[derive(Clone, Debug)]
enum Op {
    Map { domain: usize, range: Range<Iova>, cuts: Vec<u64>, access: Access, buffer: bool, seed: u64 },
    Unmap { domain: usize, range: Range<Iova> },
    Free { domain: usize, nth: usize, right: bool },
    Translate { domain: usize, range: Range<Iova>, want: Access, hold: bool },
    Drop { nth: usize },
    Prefetch { domain: usize, at: Vec<Iova> },
    Flush { domain: usize },
    Destroy { domain: usize },
}

/// Ranges of whole units, near the bottom, the middle and the top of the space, so that they often meet.
fn whole() -> impl Strategy<Value = Range<Iova>> {
    let unit = prop_oneof![4 => Just(12_u32), 1 => Just(15), 1 => Just(21), 1 => Just(30)];
    (unit, 0u64..12, 1u64..6, 0..3).prop_map(|(unit, at, len, place)| {
        let len = len << unit;
        match place {
            0 => Range::with_len(Iova(at << unit), len).unwrap(),
            1 => Range::with_len(Iova((1 << 40) + (at << unit)), len).unwrap(),
            _ => {
                let last = u64::MAX - (at << unit);
                range(last - (len - 1), last)
            }
        }
    })
}

fn bytes() -> impl Strategy<Value = Range<Iova>> {
    (whole(), any::<(u16, u16)>()).prop_map(|(at, (skip, drop))| {
        let (start, last) = (
            at.start().0.saturating_add(u64::from(skip) % 0x1800),
            at.last().0.saturating_sub(u64::from(drop) % 0x1800),
        );
        range(start.min(last), start.max(last))
    })
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::READ), Just(Access::WRITE), Just(Access::RW)]
}

fn op() -> impl Strategy<Value = Op> {
    let domain = || 0..2_usize;
    let map =
        (domain(), whole(), prop::collection::vec(0u64..5, 0..4), access(), prop::bool::weighted(0.2), any::<u64>())
            .prop_map(|(domain, range, cuts, access, buffer, seed)| Op::Map {
                domain,
                range,
                cuts,
                access,
                buffer,
                seed,
            });
    let translate = (domain(), bytes(), access(), prop::bool::weighted(0.3))
        .prop_map(|(domain, range, want, hold)| Op::Translate { domain, range, want, hold });
    prop_oneof![
        8 => map,
        4 => (domain(), whole()).prop_map(|(domain, range)| Op::Unmap { domain, range }),
        1 => domain().prop_map(|domain| Op::Unmap { domain, range: Range::all() }),
        2 => (domain(), any::<usize>(), prop::bool::weighted(0.8))
            .prop_map(|(domain, nth, right)| Op::Free { domain, nth, right }),
        10 => translate,
        4 => any::<usize>().prop_map(|nth| Op::Drop { nth }),
        1 => (domain(), prop::collection::vec(bytes().prop_map(Range::start), 0..40))
            .prop_map(|(domain, at)| Op::Prefetch { domain, at }),
        1 => domain().prop_map(|domain| Op::Flush { domain }),
        1 => domain().prop_map(|domain| Op::Destroy { domain }),
    ]
}

/// One mapping as the model knows it.
#[derive(Debug)]
struct Known {
    id: u64,
    range: Range<Iova>,
    segments: Vec<Segment>,
    access: Access,
    buffer: Option<BufferId>,
    draining: bool,
    pins: u32,
}

impl Known {
    /// Where `at` is, and how many bytes from there on lie in one piece.
    fn find(&self, at: Iova) -> (Location, u64) {
        let mut into = at.0 - self.range.start().0;
        for segment in &self.segments {
            if into < segment.len {
                return (segment.at.checked_add(into).unwrap(), segment.len - into);
            }
            into -= segment.len;
        }
        panic!("{at:?} is not in {:?}", self.range)
    }
}

/// A held job: the mappings of its domain that it pinned.
struct Held {
    domain: u64,
    mappings: Vec<u64>,
    _pins: Pins<Arc<Domain>>,
}

struct Space {
    serial: u64,
    domain: Arc<Domain>,
    mappings: Vec<Known>,
    /// For each answer that is due: the mappings that it still waits for.
    waits: Vec<Vec<u64>>,
}

struct World {
    iommu: Iommu,
    iotlb: Iotlb,
    spaces: Vec<Space>,
    /// Spaces that are destroyed but have held jobs.
    going: Vec<Space>,
    held: Vec<Held>,
    next: u64,
    answers: Answers,
    expected_answers: usize,
}

impl World {
    fn new(crowded: bool) -> Self {
        let limits = Limits {
            domains: 9,
            mappings: MAX_MAPPINGS + CROWD,
            segments: MAX_SEGMENTS + CROWD,
            pieces: 1 << 20,
            pages: u32::MAX,
            iova: Range::all(),
        };
        let iommu = Iommu::new(limits, [GPU]).unwrap();
        let crowd = iommu.attach(DomainId(99), GPU).unwrap();
        for i in 0..u64::from(CROWD) {
            // 63 pages from an odd place touch nine blocks of eight; eight of them just one.
            let (first, count) = if crowded { (i * 128 + 5, 63) } else { (i * 128, 8) };
            common::map(&crowd, pages(first, count), 0);
        }
        let mut world = Self {
            iommu,
            iotlb: Iotlb::new(16),
            spaces: Vec::new(),
            going: Vec::new(),
            held: Vec::new(),
            next: 0,
            answers: Answers::default(),
            expected_answers: 0,
        };
        for _ in 0..2 {
            let space = world.space();
            world.spaces.push(space);
        }
        world
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn space(&mut self) -> Space {
        let serial = self.fresh();
        let id = (1..).map(DomainId).find(|id| self.iommu.attach(*id, GPU).is_ok()).unwrap();
        Space { serial, domain: self.iommu.domain(id).unwrap(), mappings: Vec::new(), waits: Vec::new() }
    }

    fn usage(&self) -> (u32, u32, u32) {
        let all = || self.spaces.iter().chain(&self.going);
        let mappings = || all().flat_map(|space| &space.mappings);
        let count = |n: usize| u32::try_from(n).unwrap();
        let segments: u32 = mappings().map(|m| count(runs(&m.segments))).sum();
        (1 + count(all().count()), CROWD + count(mappings().count()), CROWD + segments)
    }

    fn run(&mut self, op: Op) {
        match op {
            Op::Map { domain, range, cuts, access, buffer, seed } => {
                self.map(domain, range, &cuts, access, buffer, seed);
            }
            Op::Unmap { domain, range } => self.unmap(domain, range),
            Op::Free { domain, nth, right } => self.free(domain, nth, right),
            Op::Translate { domain, range, want, hold } => self.translate(domain, range, want, hold),
            Op::Drop { nth } => {
                if !self.held.is_empty() {
                    let held = self.held.swap_remove(nth % self.held.len());
                    let (domain, mappings) = (held.domain, held.mappings.clone());
                    drop(held);
                    self.unpinned(domain, &mappings);
                }
            }
            Op::Prefetch { domain, at } => self.spaces[domain].domain.prefetch(&mut self.iotlb, &at),
            Op::Flush { domain } => {
                let progress = self.spaces[domain].domain.flush();
                let space = &mut self.spaces[domain];
                let waits: Vec<u64> = space.mappings.iter().filter(|m| m.draining).map(|m| m.id).collect();
                self.expect(domain, progress, waits);
            }
            Op::Destroy { domain } => self.destroy(domain),
        }
        assert_eq!(self.answers.count(), self.expected_answers);
        let usage = self.iommu.usage();
        assert_eq!((usage.domains, usage.mappings, usage.segments), self.usage());
    }

    /// An answer is due when all of `waits` have gone.
    fn expect(&mut self, domain: usize, progress: Progress, waits: Vec<u64>) {
        assert_eq!(progress.is_done(), waits.is_empty());
        progress.then(self.answers.one());
        if waits.is_empty() {
            self.expected_answers += 1;
        } else {
            self.spaces[domain].waits.push(waits);
        }
    }

    fn map(&mut self, domain: usize, range: Range<Iova>, cuts: &[u64], access: Access, buffer: bool, seed: u64) {
        let segments = segments(range, cuts, seed);
        let id = self.fresh();
        let buffer = buffer.then_some(BufferId { index: u32::try_from(id).unwrap(), generation: 7 });
        let (_, mappings, used) = self.usage();
        let space = &mut self.spaces[domain];
        let origin = buffer.map_or(Origin::Guest, Origin::Buffer);
        let result = space.domain.map(range, &segments, access, origin);
        let overlap = space.mappings.iter().any(|m| m.range.overlaps(range));
        let limits = self.iommu.limits();
        let full = mappings == limits.mappings || used + u32::try_from(runs(&segments)).unwrap() > limits.segments;
        match result {
            Ok(()) => assert!(!overlap && !full),
            Err(MapError::Overlap { at }) => {
                assert!(space.mappings.iter().any(|m| m.range == at && at.overlaps(range)));
            }
            Err(MapError::Quota { .. }) => assert!(full),
            Err(other) => panic!("{other}"),
        }
        if result.is_ok() {
            space.mappings.push(Known { id, range, segments, access, buffer, draining: false, pins: 0 });
        }
    }

    fn unmap(&mut self, domain: usize, range: Range<Iova>) {
        let space = &mut self.spaces[domain];
        let touched = || space.mappings.iter().filter(|m| m.range.overlaps(range));
        let split = touched().any(|m| !range.contains(m.range));
        let buffer = touched().any(|m| m.buffer.is_some());
        match space.domain.unmap(range) {
            Ok(progress) => {
                assert!(!split && !buffer);
                self.close(domain, range, progress);
            }
            Err(UnmapError::Split { .. }) => assert!(split),
            Err(UnmapError::Buffer { .. }) => assert!(buffer && !split),
            Err(UnmapError::NotMapped) => panic!("nothing mapped is no error"),
        }
    }

    fn free(&mut self, domain: usize, nth: usize, right: bool) {
        let space = &self.spaces[domain];
        let buffers: Vec<_> = space.mappings.iter().filter_map(|m| Some((m.buffer?, m.range))).collect();
        let Some((mut buffer, range)) = buffers.get(nth % buffers.len().max(1)).copied() else { return };
        if !right {
            buffer.generation += 1;
        }
        match space.domain.unmap_buffer(buffer, range) {
            Ok(progress) => {
                assert!(right);
                self.close(domain, range, progress);
            }
            Err(error) => assert_eq!((error, right), (UnmapError::NotMapped, false)),
        }
    }

    fn close(&mut self, domain: usize, range: Range<Iova>, progress: Progress) {
        let space = &mut self.spaces[domain];
        for mapping in space.mappings.iter_mut().filter(|m| range.contains(m.range)) {
            mapping.draining = true;
        }
        space.mappings.retain(|m| !m.draining || m.pins > 0);
        let waits = space.mappings.iter().filter(|m| range.contains(m.range)).map(|m| m.id).collect();
        self.expect(domain, progress, waits);
    }

    fn translate(&mut self, domain: usize, range: Range<Iova>, want: Access, hold: bool) {
        let space = &mut self.spaces[domain];
        let mut pins = Pins::new(Arc::clone(&space.domain), GPU).unwrap();
        let found = pins.translate(&mut self.iotlb, range, want);
        let mut expected: Vec<Segment> = Vec::new();
        let mut mappings = Vec::new();
        let mut at = range.start();
        let refused = loop {
            let Some(known) = space.mappings.iter_mut().find(|m| m.range.holds(at)) else {
                break Some(FaultReason::Mapping);
            };
            if known.draining {
                break Some(FaultReason::Draining);
            }
            if !known.access.allows(want) {
                break Some(FaultReason::Permission);
            }
            if !mappings.contains(&known.id) {
                mappings.push(known.id);
            }
            let (place, piece) = known.find(at);
            let left = range.last().0 - at.0;
            let len = if piece > left { left + 1 } else { piece };
            match expected.last_mut() {
                Some(last) if last.at.checked_add(last.len) == Some(place) => last.len += len,
                _ => expected.push(Segment { at: place, len }),
            }
            if left < len {
                break None;
            }
            at = Iova(at.0 + len);
        };
        match (refused, found) {
            (None, Ok(found)) => assert_eq!(found.as_slice(), expected),
            (Some(reason), Err(Refused::Fault(fault))) => {
                assert_eq!((fault.reason, fault.iova), (reason, at));
                return;
            }
            (refused, found) => panic!("{refused:?} is not {found:?}"),
        }
        if hold {
            space.mappings.iter_mut().filter(|m| mappings.contains(&m.id)).for_each(|m| m.pins += 1);
            self.held.push(Held { domain: space.serial, mappings, _pins: pins });
        }
    }

    fn unpinned(&mut self, domain: u64, mappings: &[u64]) {
        let Some(space) = self.spaces.iter_mut().chain(&mut self.going).find(|space| space.serial == domain) else {
            panic!("the domain must wait for its jobs")
        };
        space.mappings.iter_mut().filter(|m| mappings.contains(&m.id)).for_each(|m| m.pins -= 1);
        space.mappings.retain(|m| !m.draining || m.pins > 0);
        for waits in &mut space.waits {
            waits.retain(|id| space.mappings.iter().any(|m| m.id == *id));
        }
        let due = space.waits.len();
        space.waits.retain(|waits| !waits.is_empty());
        self.expected_answers += due - space.waits.len();
        let held = &self.held;
        let before = self.going.len();
        self.going.retain(|space| held.iter().any(|held| held.domain == space.serial));
        self.expected_answers += before - self.going.len();
    }

    fn destroy(&mut self, domain: usize) {
        let fresh = self.space();
        let mut space = std::mem::replace(&mut self.spaces[domain], fresh);
        let detached = self.iommu.detach(space.domain.id(), GPU).unwrap();
        assert!(detached.destroyed);
        let busy = self.held.iter().any(|held| held.domain == space.serial);
        assert_eq!(detached.progress.is_done(), !busy);
        detached.progress.then(self.answers.one());
        space.mappings.iter_mut().for_each(|m| m.draining = true);
        space.mappings.retain(|m| m.pins > 0);
        if busy {
            self.going.push(space);
        } else {
            self.expected_answers += 1;
        }
    }
}

/// Segments for a range: cut at some eighths, some of them following one another in memory.
fn segments(range: Range<Iova>, cuts: &[u64], seed: u64) -> Vec<Segment> {
    let pages = (range.span() >> 12) + 1;
    let mut ends: Vec<u64> = cuts.iter().map(|cut| pages * cut / 5).filter(|end| *end > 0).collect();
    ends.push(pages);
    ends.sort_unstable();
    ends.dedup();
    let (mut from, mut place) = (0, seed % (1 << 20));
    let mut segments = Vec::new();
    for (i, end) in ends.into_iter().enumerate() {
        let len = (end - from) << 12;
        let at = match seed >> 20 & 3 {
            0 => Location::Aperture { endpoint: GPU, offset: ApertureOffset(place << 12) },
            _ => Location::Ram(Gpa(place << 12)),
        };
        segments.push(Segment { at, len });
        place += (end - from) + (seed >> (24 + i) & 1);
        from = end;
    }
    segments
}

/// How many segments are left when those that follow one another count as one.
fn runs(segments: &[Segment]) -> usize {
    1 + segments.windows(2).filter(|pair| pair[0].at.checked_add(pair[0].len) != Some(pair[1].at)).count()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn everything_agrees_with_the_model(crowded: bool, ops in prop::collection::vec(op(), 1..80)) {
        let mut world = World::new(crowded);
        for op in ops {
            world.run(op);
        }
        while !world.held.is_empty() {
            world.run(Op::Drop { nth: 0 });
        }
        world.run(Op::Destroy { domain: 0 });
        world.run(Op::Destroy { domain: 1 });
        prop_assert_eq!(world.iommu.usage().mappings, CROWD);
    }
}
