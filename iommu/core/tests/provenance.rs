//! Which mapping a fault is about.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::*;
use iommu_addr::{Access, Addr, BufferId, DomainId, Iova, REGISTERS, Range};
use iommu_core::*;
use proptest::prelude::*;
use std::sync::Arc;

const BUFFER: BufferId = BufferId { index: 3, generation: 1 };

/// What a refused access of one byte at `at` says of the mappings.
fn about(domain: &Arc<Domain>, at: u64, want: Access) -> Option<Provenance> {
    match look(domain, range(at, at), want) {
        Err(Refused::Fault(fault)) => fault.mapping,
        other => panic!("not a fault: {other:?}"),
    }
}

fn guest(relation: Relation, range: Range<Iova>, request: u64) -> Option<Provenance> {
    let (kind, access, is_draining) = (MappingKind::Guest, Access::RW, false);
    Some(Provenance { relation, kind, range, access, request, is_draining })
}

#[test]
fn address_that_nothing_holds_has_a_nearest_mapping() {
    let iommu = tenant();
    let domain = domain(&iommu);
    assert_eq!(about(&domain, 0x5000, Access::READ), None, "nothing is mapped");
    map(&domain, pages(0, 2), 0);
    map(&domain, pages(8, 1), 0);
    let (below, above) = (guest(Relation::Nearest, pages(0, 2), 1), guest(Relation::Nearest, pages(8, 1), 2));
    assert_eq!(about(&domain, 0x2000, Access::READ), below);
    // 0x1fff and 0x8000 are the ends.
    assert_eq!(about(&domain, 0x4fff, Access::READ), below);
    assert_eq!(about(&domain, 0x5000, Access::READ), above);
    assert_eq!(about(&domain, u64::MAX, Access::READ), above);
    map(&domain, pages(10, 1), 0);
    assert_eq!(about(&domain, 0x9000, Access::READ), above, "the one below if the other is no nearer");
    assert_eq!(about(&domain, 0x9fff, Access::READ), guest(Relation::Nearest, pages(10, 1), 3));
}

#[test]
fn refused_access_names_the_mapping_that_refuses_what_it_is_and_what_it_allows() {
    let iommu = tenant();
    let domain = domain(&iommu);
    iommu.attach(DomainId(1), FPGA).unwrap();
    let buffer = [vram(FPGA, 0, 2 * PAGE)];
    domain.map(pages(0, 2), &buffer, Access::READ, Origin::Buffer(BUFFER)).unwrap();
    let registers = [vram(FPGA, REGISTERS.raw(), PAGE)];
    domain.map(pages(2, 1), &registers, Access::WRITE, Origin::Buffer(BUFFER)).unwrap();
    let expected = |kind, range, access, request| {
        Some(Provenance { relation: Relation::Holds, kind, range, access, request, is_draining: false })
    };
    let buffer = expected(MappingKind::Buffer, pages(0, 2), Access::READ, 1);
    assert_eq!(about(&domain, 0x1234, Access::WRITE), buffer);
    assert_eq!(about(&domain, 0x2000, Access::READ), expected(MappingKind::Registers, pages(2, 1), Access::WRITE, 2));
    let mut job = pins(&domain);
    job.translate(&mut Iotlb::default(), pages(0, 1), Access::READ).unwrap();
    assert_eq!(job.peer(FPGA, Access::READ, Iova(0x800)).unwrap_err().mapping, buffer);
    assert_eq!(Pins::new(&*domain, NIC).unwrap_err().mapping, None, "no address was asked for");
}

#[test]
fn draining_mapping_says_so_and_is_remembered_once_it_is_gone() {
    let iommu = tenant();
    let domain = domain(&iommu);
    map(&domain, pages(4, 4), 0);
    let mut job = pins(&domain);
    job.translate(&mut Iotlb::default(), pages(4, 1), Access::READ).unwrap();
    let progress = domain.unmap(pages(4, 4)).unwrap();
    assert!(!progress.is_done());
    let holds = guest(Relation::Holds, pages(4, 4), 1).unwrap();
    assert_eq!(about(&domain, 0x5000, Access::READ), Some(Provenance { is_draining: true, ..holds }));
    drop(job);
    assert_eq!(about(&domain, 0x5000, Access::READ), guest(Relation::Held, pages(4, 4), 1));
    assert_eq!(about(&domain, 0x3fff, Access::READ), None, "it never held that");
    map(&domain, pages(4, 1), 0);
    assert_eq!(about(&domain, 0x5000, Access::READ), guest(Relation::Held, pages(4, 4), 1));
    domain.unmap(pages(4, 1)).unwrap().then(|| ());
    assert_eq!(about(&domain, 0x4000, Access::READ), guest(Relation::Held, pages(4, 1), 2), "the last that held it");
}

#[test]
fn so_many_removed_mappings_are_remembered_and_no_more() {
    let iommu = tenant();
    let domain = domain(&iommu);
    for page in 0..65 {
        map(&domain, pages(page, 1), 0);
        assert!(domain.unmap(pages(page, 1)).unwrap().is_done());
    }
    assert_eq!(about(&domain, 0, Access::READ), None);
    assert_eq!(about(&domain, PAGE, Access::READ), guest(Relation::Held, pages(1, 1), 2));
}

#[test]
fn mappings_are_counted_over_all_domains_and_refused_ones_are_not() {
    let iommu = tenant();
    let (a, b) = (domain(&iommu), iommu.attach(DomainId(2), GPU).unwrap());
    map(&a, pages(0, 1), 0);
    assert!(a.map(pages(0, 1), &[ram(0, PAGE)], Access::RW, Origin::Guest).is_err());
    map(&b, pages(0, 1), 0);
    assert_eq!(about(&b, PAGE, Access::READ), guest(Relation::Nearest, pages(0, 1), 2));
    assert_eq!(about(&a, PAGE, Access::READ), guest(Relation::Nearest, pages(0, 1), 1));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn nearest_and_last_are_those_of_a_search_from_end_to_end(
        steps in prop::collection::vec((0u64..40, 1u64..4, prop::bool::ANY), 1..60),
        at in 0u64..50 * PAGE,
    ) {
        let iommu = tenant();
        let domain = domain(&iommu);
        let (mut live, mut gone, mut made) = (Vec::<(Range<Iova>, u64)>::new(), Vec::new(), 0);
        for (first, count, removes) in steps {
            let range = pages(first, count);
            if removes {
                if domain.unmap(range).is_ok() {
                    let mut inside: Vec<_> = live.iter().copied().filter(|(at, _)| range.contains(*at)).collect();
                    inside.sort_by_key(|(at, _)| at.start());
                    live.retain(|(at, _)| !range.contains(*at));
                    gone.extend(inside);
                }
            } else if domain.map(range, &[ram(0, count * PAGE)], Access::READ, Origin::Guest).is_ok() {
                made += 1;
                live.push((range, made));
            }
        }
        gone.drain(..gone.len().saturating_sub(64));
        let holds = |(range, _): &&(Range<Iova>, u64)| range.holds(Iova(at));
        let distance = |(range, _): &&(Range<Iova>, u64)| {
            let (start, last) = (range.start().raw(), range.last().raw());
            // The lower one comes first if both are as far.
            (start.saturating_sub(at).max(at.saturating_sub(last)), start)
        };
        let expected = if let Some(found) = live.iter().find(holds) {
            Some((Relation::Holds, *found))
        } else if let Some(found) = gone.iter().rev().find(holds) {
            Some((Relation::Held, *found))
        } else {
            live.iter().min_by_key(distance).map(|found| (Relation::Nearest, *found))
        };
        let got = about(&domain, at, Access::WRITE).map(|about| (about.relation, (about.range, about.request)));
        prop_assert_eq!(got, expected);
    }
}
