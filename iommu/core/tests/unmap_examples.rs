//! The seven examples of UNMAP in the virtio-iommu specification (virtio 1.3, 5.13.6.6), by number. Their addresses count pages here.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{domain, is_mapped, map, pages, tenant};
use iommu_core::UnmapError;

#[test]
fn example_1_unmap_of_nothing_succeeds() {
    let iommu = tenant();
    let domain = domain(&iommu);
    assert!(domain.unmap(pages(0, 5)).unwrap().is_done());
}

#[test]
fn example_2_unmap_of_the_exact_mapping_removes_it() {
    let iommu = tenant();
    let domain = domain(&iommu);
    map(&domain, pages(0, 10), 100);
    assert!(domain.unmap(pages(0, 10)).unwrap().is_done());
    assert!(!is_mapped(&domain, pages(0, 1)));
    assert_eq!(iommu.usage().mappings, 0);
}

#[test]
fn example_3_unmap_of_two_adjacent_mappings_removes_both() {
    let iommu = tenant();
    let domain = domain(&iommu);
    map(&domain, pages(0, 5), 100);
    map(&domain, pages(5, 5), 200);
    assert!(domain.unmap(pages(0, 10)).unwrap().is_done());
    assert!(!is_mapped(&domain, pages(0, 1)));
    assert!(!is_mapped(&domain, pages(5, 1)));
    assert_eq!(iommu.usage().mappings, 0);
}

#[test]
fn example_4_unmap_that_would_split_a_mapping_fails_and_changes_nothing() {
    let iommu = tenant();
    let domain = domain(&iommu);
    map(&domain, pages(0, 10), 100);
    for part in [pages(0, 5), pages(5, 5), pages(3, 1), pages(0, 9), pages(9, 5)] {
        assert_eq!(domain.unmap(part).unwrap_err(), UnmapError::Split { at: pages(0, 10) });
    }
    assert!(is_mapped(&domain, pages(0, 10)));
}

#[test]
fn example_5_unmap_of_one_of_two_adjacent_mappings_leaves_the_other() {
    let iommu = tenant();
    let domain = domain(&iommu);
    map(&domain, pages(0, 5), 100);
    map(&domain, pages(5, 5), 200);
    assert!(domain.unmap(pages(0, 5)).unwrap().is_done());
    assert!(!is_mapped(&domain, pages(0, 1)));
    assert!(is_mapped(&domain, pages(5, 5)));
}

#[test]
fn example_6_unmap_of_more_than_the_mapping_removes_it() {
    let iommu = tenant();
    let domain = domain(&iommu);
    map(&domain, pages(0, 5), 100);
    assert!(domain.unmap(pages(0, 10)).unwrap().is_done());
    assert!(!is_mapped(&domain, pages(0, 1)));
}

#[test]
fn example_7_unmap_over_a_gap_removes_the_mappings_around_it() {
    let iommu = tenant();
    let domain = domain(&iommu);
    map(&domain, pages(0, 5), 100);
    map(&domain, pages(10, 5), 200);
    assert!(domain.unmap(pages(0, 15)).unwrap().is_done());
    assert!(!is_mapped(&domain, pages(0, 1)));
    assert!(!is_mapped(&domain, pages(10, 1)));
}
