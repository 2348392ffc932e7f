//! One claim a test: mapping, translating, draining, quotas.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::*;
use iommu_addr::{Access, BufferId, DomainId, Gpa, Iova, Location, Range, Segment};
use iommu_core::*;
use std::sync::Arc;

const BUFFER: BufferId = BufferId { index: 3, generation: 1 };

#[test]
fn translation_gives_the_place_of_every_byte() {
    let iommu = tenant();
    let domain = domain(&iommu);
    let segments = [ram(0x9000, PAGE), ram(0x4000, 2 * PAGE), vram(GPU, 0x8000, PAGE)];
    domain.map(pages(16, 4), &segments, Access::RW, Origin::Guest).unwrap();
    let all = look(&domain, pages(16, 4), Access::READ).unwrap();
    assert_eq!(all.as_slice(), segments);
    let cut = look(&domain, range(0x10ffe, 0x11001), Access::RW).unwrap();
    assert_eq!(cut.as_slice(), [ram(0x9ffe, 2), ram(0x4000, 2)]);
    let end = look(&domain, range(0x13fff, 0x13fff), Access::WRITE).unwrap();
    assert_eq!(end.as_slice(), [vram(GPU, 0x8fff, 1)]);
}

#[test]
fn range_may_span_adjacent_mappings_and_faults_at_the_exact_gap() {
    let iommu = tenant();
    let domain = domain(&iommu);
    map(&domain, pages(0, 2), 100);
    map(&domain, pages(2, 1), 200);
    map(&domain, pages(4, 1), 300);
    let both = look(&domain, pages(0, 3), Access::READ).unwrap();
    assert_eq!(both.as_slice(), [ram(100 * PAGE, 2 * PAGE), ram(200 * PAGE, PAGE)]);
    assert_eq!(refusal(look(&domain, pages(0, 5), Access::READ)), (0x3000, FaultReason::Mapping));
    assert_eq!(refusal(look(&domain, range(0x5123, 0x5124), Access::READ)), (0x5123, FaultReason::Mapping));
}

#[test]
fn pieces_that_follow_one_another_in_memory_come_as_one() {
    let iommu = tenant();
    let domain = domain(&iommu);
    map(&domain, pages(0, 1), 50);
    map(&domain, pages(1, 1), 51);
    assert_eq!(look(&domain, range(0x10, 0x1fff), Access::READ).unwrap().as_slice(), [ram(50 * PAGE + 0x10, 0x1ff0)]);
}

#[test]
fn access_beyond_the_mapping_is_refused_at_its_first_address_with_the_owner() {
    let iommu = tenant();
    let domain = domain(&iommu);
    domain.map(pages(0, 1), &[ram(0, PAGE)], Access::RW, Origin::Guest).unwrap();
    domain.map(pages(1, 1), &[vram(GPU, 0, PAGE)], Access::READ, Origin::Guest).unwrap();
    domain.map(pages(2, 1), &[ram(0, PAGE)], Access::WRITE, Origin::Guest).unwrap();
    assert!(look(&domain, pages(0, 2), Access::READ).is_ok());
    assert!(look(&domain, pages(2, 1), Access::WRITE).is_ok());
    let refused = pins(&domain).translate(&mut Iotlb::default(), range(0x800, 0x1800), Access::WRITE).unwrap_err();
    let reason = FaultReason::Permission;
    let (access, domain_id) = (Access::WRITE, DomainId(1));
    let mapping = Provenance {
        relation: Relation::Holds,
        kind: MappingKind::Guest,
        range: pages(1, 1),
        access: Access::READ,
        request: 2,
        is_draining: false,
    };
    let (iova, mapping) = (Iova(0x1000), Some(mapping));
    let fault = Fault { accessor: GPU, owner: Some(GPU), domain: domain_id, iova, access, reason, mapping };
    assert_eq!(refused, Refused::Fault(fault));
    assert_eq!(refusal(look(&domain, pages(2, 1), Access::READ)), (0x2000, FaultReason::Permission));
    assert_eq!(refusal(look(&domain, pages(2, 1), Access::RW)), (0x2000, FaultReason::Permission));
}

#[test]
fn remembered_translation_still_checks_access() {
    let iommu = tenant();
    let domain = domain(&iommu);
    domain.map(pages(0, 1), &[ram(0, PAGE)], Access::READ, Origin::Guest).unwrap();
    let mut iotlb = Iotlb::default();
    pins(&domain).translate(&mut iotlb, pages(0, 1), Access::READ).unwrap();
    let refused = pins(&domain).translate(&mut iotlb, pages(0, 1), Access::WRITE);
    assert_eq!(refusal(refused), (0, FaultReason::Permission));
}

#[test]
fn last_page_of_the_space_maps_translates_and_unmaps() {
    let iommu = tenant();
    let domain = domain(&iommu);
    let top = range(u64::MAX - 0xfff, u64::MAX);
    let high = ram(u64::MAX - 0xfff, PAGE);
    domain.map(top, &[high], Access::RW, Origin::Guest).unwrap();
    assert_eq!(look(&domain, top, Access::RW).unwrap().as_slice(), [high]);
    let across = look(&domain, range(u64::MAX - 0x1fff, u64::MAX), Access::READ);
    assert_eq!(refusal(across), (u64::MAX - 0x1fff, FaultReason::Mapping));
    assert!(domain.unmap(Range::all()).unwrap().is_done());
    assert!(!is_mapped(&domain, top));
}

#[test]
fn whole_space_is_one_mapping_of_two_segments() {
    let iommu = tenant();
    let domain = domain(&iommu);
    let halves = [ram(0, 1 << 63), ram(1 << 63, 1 << 63)];
    domain.map(Range::all(), &halves, Access::READ, Origin::Guest).unwrap();
    let all = look(&domain, Range::all(), Access::READ).unwrap();
    assert_eq!(all.as_slice(), halves);
    assert_eq!(domain.unmap(pages(0, 1)).unwrap_err(), UnmapError::Split { at: Range::all() });
    assert!(domain.unmap(Range::all()).unwrap().is_done());
    assert_eq!(iommu.usage().segments, 0);
}

#[test]
fn gib_of_consecutive_memory_is_one_segment_of_the_quota() {
    let iommu = tenant();
    let domain = domain(&iommu);
    let run: Vec<Segment> = (0..512).map(|i| ram((1 << 32) + (i << 21), 1 << 21)).collect();
    domain.map(range(1 << 30, (2 << 30) - 1), &run, Access::RW, Origin::Guest).unwrap();
    assert_eq!(iommu.usage().segments, 1);
    let at = range((1 << 30) + 0x1234_5678, (1 << 30) + 0x1234_5678);
    assert_eq!(look(&domain, at, Access::READ).unwrap().as_slice(), [ram((1 << 32) + 0x1234_5678, 1)]);
}

#[test]
fn map_errors_change_nothing() {
    let iommu = Iommu::new(Limits { iova: range(0x1000, 0xffff_ffff), ..limits() }, [GPU, FPGA]).unwrap();
    let domain = iommu.attach(DomainId(1), GPU).unwrap();
    map(&domain, pages(8, 2), 0);
    let one = [ram(0, PAGE)];
    let cases: &[(Range<Iova>, &[Segment], Access, MapError)] = &[
        (pages(9, 1), &one, Access::RW, MapError::Overlap { at: pages(8, 2) }),
        (range(0x800, 0x17ff), &one, Access::RW, MapError::Misaligned { value: 0x800 }),
        (range(0x1000, 0x17ff), &[ram(0, 0x800)], Access::RW, MapError::Misaligned { value: 0x1800 }),
        (pages(1, 1), &[ram(0x10, PAGE)], Access::RW, MapError::Misaligned { value: 0x10 }),
        (pages(1, 1), &[ram(0, 0x800), ram(0x1000, 0x800)], Access::RW, MapError::Misaligned { value: 0x800 }),
        (pages(0, 2), &[ram(0, 2 * PAGE)], Access::RW, MapError::OutOfRange { allowed: range(0x1000, 0xffff_ffff) }),
        (
            pages(0xfffff, 2),
            &[ram(0, 2 * PAGE)],
            Access::RW,
            MapError::OutOfRange { allowed: range(0x1000, 0xffff_ffff) },
        ),
        (pages(1, 1), &[], Access::RW, MapError::Segments),
        (pages(1, 2), &one, Access::RW, MapError::Segments),
        (pages(1, 1), &[ram(0, 2 * PAGE)], Access::RW, MapError::Segments),
        (pages(1, 1), &[ram(0, PAGE), ram(0, 0)], Access::RW, MapError::Segments),
        (pages(1, 2), &[ram(u64::MAX - 0xfff, 2 * PAGE)], Access::RW, MapError::Segments),
        (pages(1, 1), &one, Access::NONE, MapError::NoAccess),
        (pages(1, 1), &[vram(FPGA, 0, PAGE)], Access::RW, MapError::NotAttached { endpoint: FPGA }),
    ];
    for (range, segments, access, error) in cases {
        assert_eq!(domain.map(*range, segments, *access, Origin::Guest), Err(*error), "{range}");
        assert_eq!((iommu.usage().mappings, iommu.usage().segments), (1, 1), "{error:?}");
    }
    assert!(is_mapped(&domain, pages(8, 2)));
}

#[test]
fn quotas_count_all_domains_together_and_come_back() {
    let few = Limits { domains: 2, mappings: 3, segments: 4, ..limits() };
    let iommu = Iommu::new(few, [GPU]).unwrap();
    let a = iommu.attach(DomainId(1), GPU).unwrap();
    let b = iommu.attach(DomainId(2), GPU).unwrap();
    assert_eq!(iommu.attach(DomainId(3), GPU).unwrap_err(), AttachError::Quota { limit: 2 });
    let two = [ram(0, PAGE), ram(0x5000, PAGE)];
    a.map(pages(0, 2), &two, Access::RW, Origin::Guest).unwrap();
    b.map(pages(0, 2), &two, Access::RW, Origin::Guest).unwrap();
    let full = b.map(pages(2, 1), &[ram(0, PAGE)], Access::RW, Origin::Guest);
    assert_eq!(full, Err(MapError::Quota { what: "segments", limit: 4 }));
    assert!(a.unmap(pages(0, 2)).unwrap().is_done());
    map(&b, pages(2, 1), 0);
    map(&b, pages(3, 1), 1);
    let full = a.map(pages(2, 1), &[ram(0, PAGE)], Access::RW, Origin::Guest);
    assert_eq!(full, Err(MapError::Quota { what: "mappings", limit: 3 }));
    assert!(iommu.detach_all(DomainId(2)).unwrap().is_done());
    assert_eq!(iommu.usage(), Usage { domains: 1, ..Usage::default() });
}

#[test]
fn pages_of_guest_memory_are_counted_until_their_drain_has_ended() {
    let iommu = Iommu::new(Limits { pages: 5, ..limits() }, [GPU]).unwrap();
    let domain = iommu.attach(DomainId(1), GPU).unwrap();
    let other = iommu.attach(DomainId(2), GPU).unwrap();
    let buffer = Origin::Buffer(BufferId { index: 0, generation: 0 });
    domain.map(pages(20, 9), &[vram(GPU, 0, 9 * PAGE)], Access::RW, buffer).unwrap();
    assert_eq!(iommu.usage().pages, 0, "a buffer's memory is the endpoint's");
    domain.map(pages(0, 3), &[ram(0, 3 * PAGE)], Access::RW, Origin::Guest).unwrap();
    let three = other.map(pages(0, 3), &[ram(0, 3 * PAGE)], Access::RW, Origin::Guest);
    assert_eq!(three, Err(MapError::Quota { what: "pages", limit: 5 }));
    let all = other.map(Range::all(), &[ram(0, 1 << 63), ram(1 << 63, 1 << 63)], Access::RW, Origin::Guest);
    assert_eq!(all, Err(MapError::Quota { what: "pages", limit: 5 }), "more than a number holds");
    let before = Usage { domains: 2, mappings: 2, segments: 2, pages: 3, ..Usage::default() };
    assert_eq!(iommu.usage(), before, "what is refused takes nothing");
    let mut job = pins(&domain);
    job.translate(&mut Iotlb::default(), pages(0, 1), Access::READ).unwrap();
    assert!(!domain.unmap(pages(0, 3)).unwrap().is_done());
    assert_eq!(iommu.usage().pages, 3, "somebody still uses them");
    drop(job);
    assert_eq!(iommu.usage().pages, 0);
    other.map(pages(0, 5), &[ram(0, 5 * PAGE)], Access::RW, Origin::Guest).unwrap();
    assert!(iommu.detach_all(DomainId(2)).unwrap().is_done());
    assert_eq!(iommu.usage().pages, 0);
}

#[test]
fn limits_change_while_there_is_more_than_they_allow() {
    let iommu = tenant();
    let domain = domain(&iommu);
    (0..4).for_each(|n| map(&domain, pages(n, 1), n));
    iommu.set_limits(&Limits { mappings: 2, ..limits() });
    let refused = Err(MapError::Quota { what: "mappings", limit: 2 });
    let one = |at| domain.map(pages(at, 1), &[ram(0, PAGE)], Access::RW, Origin::Guest);
    assert_eq!(one(9), refused);
    assert!((0..4).all(|n| is_mapped(&domain, pages(n, 1))), "what there is stays");
    assert!(domain.unmap(pages(0, 2)).unwrap().is_done());
    assert_eq!(one(9), refused, "two are left");
    assert!(domain.unmap(pages(2, 1)).unwrap().is_done());
    assert_eq!(one(9), Ok(()));
    iommu.set_limits(&Limits { mappings: u32::MAX, segments: u32::MAX, ..limits() });
    let limit = limits().segments;
    assert_eq!((20..).find_map(|at| one(at).err()), Some(MapError::Quota { what: "segments", limit }));
    assert_eq!(iommu.usage().segments, limit, "there are records for no more");
}

#[test]
fn unmap_of_a_pinned_mapping_answers_when_the_pin_goes() {
    let iommu = tenant();
    let domain = domain(&iommu);
    map(&domain, pages(0, 1), 0);
    map(&domain, pages(1, 1), 1);
    let mut iotlb = Iotlb::default();
    let mut job = pins(&domain);
    job.translate(&mut iotlb, pages(0, 1), Access::READ).unwrap();
    let other = Iotlb::default();
    let mut held = pins(&domain);
    held.translate(&mut { other }, pages(1, 1), Access::READ).unwrap();
    let answers = Answers::default();
    domain.unmap(pages(0, 1)).unwrap().then(answers.one());
    assert_eq!(answers.count(), 0);
    assert_eq!(refusal(held.translate(&mut iotlb, pages(0, 1), Access::READ)), (0, FaultReason::Draining));
    let again = domain.map(pages(0, 1), &[ram(0, PAGE)], Access::RW, Origin::Guest);
    assert_eq!(again, Err(MapError::Overlap { at: pages(0, 1) }), "the addresses are not free yet");
    assert_eq!(iommu.usage().mappings, 2, "nor is the quota");
    drop(job);
    assert_eq!(answers.count(), 1);
    assert_eq!(iommu.usage().mappings, 1);
    assert_eq!(refusal(held.translate(&mut iotlb, pages(0, 1), Access::READ)), (0, FaultReason::Mapping));
    map(&domain, pages(0, 1), 7);
    let now = held.translate(&mut iotlb, pages(0, 1), Access::READ).unwrap();
    assert_eq!(now.as_slice(), [ram(7 * PAGE, PAGE)], "not what was remembered");
}

#[test]
fn unmap_waits_only_for_what_it_unmaps() {
    let iommu = tenant();
    let domain = domain(&iommu);
    map(&domain, pages(0, 1), 0);
    map(&domain, pages(1, 1), 1);
    let mut job = pins(&domain);
    job.translate(&mut Iotlb::default(), pages(0, 1), Access::READ).unwrap();
    assert!(domain.unmap(pages(1, 1)).unwrap().is_done());
}

#[test]
fn every_unmap_and_flush_over_a_draining_mapping_waits_for_it() {
    let iommu = tenant();
    let domain = domain(&iommu);
    map(&domain, pages(0, 1), 0);
    assert!(domain.flush().is_done());
    let mut job = pins(&domain);
    job.translate(&mut Iotlb::default(), pages(0, 1), Access::READ).unwrap();
    assert!(domain.flush().is_done(), "pinned, but nobody wants it gone");
    let answers = Answers::default();
    domain.unmap(pages(0, 1)).unwrap().then(answers.one());
    domain.unmap(pages(0, 8)).unwrap().then(answers.one());
    domain.flush().then(answers.one());
    assert_eq!(domain.unmap(range(0, 0x7ff)).unwrap_err(), UnmapError::Split { at: pages(0, 1) });
    assert_eq!(answers.count(), 0);
    drop(job);
    assert_eq!(answers.count(), 3);
    assert!(domain.flush().is_done());
}

#[test]
fn unmap_over_several_pinned_mappings_answers_after_the_last() {
    let iommu = tenant();
    let domain = domain(&iommu);
    for page in 0..3 {
        map(&domain, pages(page, 1), page);
    }
    let hold = |page| {
        let mut job = pins(&domain);
        job.translate(&mut Iotlb::default(), pages(page, 1), Access::READ).unwrap();
        job
    };
    let (first, last) = (hold(0), hold(2));
    let answers = Answers::default();
    domain.unmap(pages(0, 3)).unwrap().then(answers.one());
    assert_eq!(iommu.usage().mappings, 2, "the one that nobody holds is gone");
    drop(last);
    assert_eq!(answers.count(), 0);
    drop(first);
    assert_eq!(answers.count(), 1);
}

#[test]
fn buffers_go_by_their_own_door_only() {
    let iommu = tenant();
    let domain = domain(&iommu);
    let segments = [vram(GPU, 0, 2 * PAGE)];
    domain.map(pages(4, 2), &segments, Access::RW, Origin::Buffer(BUFFER)).unwrap();
    map(&domain, pages(0, 1), 0);
    assert_eq!(domain.unmap(pages(0, 8)).unwrap_err(), UnmapError::Buffer { at: pages(4, 2) });
    assert!(is_mapped(&domain, pages(0, 1)), "nothing changed");
    let old = BufferId { generation: 0, ..BUFFER };
    assert_eq!(domain.unmap_buffer(old, pages(4, 2)).unwrap_err(), UnmapError::NotMapped);
    assert_eq!(domain.unmap_buffer(BUFFER, pages(4, 1)).unwrap_err(), UnmapError::NotMapped);
    assert_eq!(domain.unmap_buffer(BUFFER, pages(0, 1)).unwrap_err(), UnmapError::NotMapped);
    let mut job = pins(&domain);
    job.translate(&mut Iotlb::default(), pages(4, 2), Access::RW).unwrap();
    let answers = Answers::default();
    domain.unmap_buffer(BUFFER, pages(4, 2)).unwrap().then(answers.one());
    assert_eq!(answers.count(), 0);
    drop(job);
    assert_eq!(answers.count(), 1);
    assert!(!is_mapped(&domain, pages(4, 1)));
}

#[test]
fn domains_with_equal_addresses_never_see_each_other() {
    let iommu = tenant();
    let a = iommu.attach(DomainId(1), GPU).unwrap();
    let b = iommu.attach(DomainId(2), GPU).unwrap();
    let mut iotlb = Iotlb::default();
    map(&a, pages(0, 1), 10);
    assert_eq!(refusal(pins(&b).translate(&mut iotlb, pages(0, 1), Access::READ)), (0, FaultReason::Mapping));
    map(&b, pages(0, 1), 20);
    let mut at = |domain: &Arc<Domain>| pins(domain).translate(&mut iotlb, pages(0, 1), Access::READ).unwrap()[0].at;
    for _ in 0..2 {
        assert_eq!(at(&a), Location::Ram(Gpa(10 * PAGE)));
        assert_eq!(at(&b), Location::Ram(Gpa(20 * PAGE)));
    }
}

#[test]
fn domain_with_a_used_id_does_not_inherit_remembered_translations() {
    let iommu = tenant();
    let mut iotlb = Iotlb::default();
    let old = domain(&iommu);
    map(&old, pages(0, 1), 10);
    pins(&old).translate(&mut iotlb, pages(0, 1), Access::READ).unwrap();
    assert!(iommu.detach_all(DomainId(1)).unwrap().is_done());
    let new = domain(&iommu);
    assert_eq!(refusal(pins(&new).translate(&mut iotlb, pages(0, 1), Access::READ)), (0, FaultReason::Mapping));
}

#[test]
fn translation_of_many_pieces_is_bounded_by_the_quota() {
    let iommu = Iommu::new(Limits { pieces: 3, ..limits() }, [GPU]).unwrap();
    let domain = domain(&iommu);
    let scattered: Vec<Segment> = (0..8).map(|i| ram(i * 2 * PAGE, PAGE)).collect();
    domain.map(pages(0, 8), &scattered, Access::RW, Origin::Guest).unwrap();
    let mut job = pins(&domain);
    let mut iotlb = Iotlb::default();
    assert_eq!(job.translate(&mut iotlb, pages(0, 8), Access::READ), Err(Refused::Pieces { limit: 3 }));
    assert_eq!(iommu.usage().pieces, 0, "all or nothing");
    assert_eq!(job.translate(&mut iotlb, pages(0, 5), Access::READ).unwrap().len(), 5);
    assert_eq!(iommu.usage().pieces, 3);
    assert_eq!(job.translate(&mut iotlb, pages(5, 3), Access::READ), Err(Refused::Pieces { limit: 3 }));
    assert_eq!(job.translate(&mut iotlb, pages(5, 2), Access::READ).unwrap().len(), 2, "two are free");
    drop(job);
    assert_eq!(iommu.usage().pieces, 0);
}

#[test]
fn failed_translation_leaves_nothing_pinned() {
    let iommu = tenant();
    let domain = domain(&iommu);
    map(&domain, pages(0, 1), 0);
    let mut job = pins(&domain);
    assert!(job.translate(&mut Iotlb::default(), pages(0, 2), Access::READ).is_err());
    assert!(domain.unmap(pages(0, 1)).unwrap().is_done());
}

#[test]
fn prefetched_addresses_hit() {
    let iommu = tenant();
    let domain = domain(&iommu);
    for page in 0..40 {
        map(&domain, pages(page * 3, 1), page);
    }
    let at: Vec<Iova> = (0..40).map(|page| Iova(page * 3 * PAGE)).collect();
    let mut iotlb = Iotlb::new(1 << 12);
    domain.prefetch(&mut iotlb, &at);
    for (page, at) in (0..).zip(&at) {
        let here = Range::with_len(*at, PAGE).unwrap();
        let segments = pins(&domain).translate(&mut iotlb, here, Access::READ).unwrap();
        assert_eq!(segments.as_slice(), [ram(page * PAGE, PAGE)]);
    }
    assert!(iotlb.hits() >= 38, "{}", iotlb.hits());
    domain.prefetch(&mut iotlb, &[Iova(u64::MAX), Iova(PAGE)]);
}
