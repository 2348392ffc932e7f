//! Attaching, detaching, peer rights: one claim a test.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::*;
use iommu_addr::{Access, DomainId, EndpointId, Iova};
use iommu_core::*;
use std::sync::Arc;

#[test]
fn domain_lives_from_the_first_attach_to_the_last_detach() {
    let iommu = tenant();
    assert!(iommu.domain(DomainId(1)).is_none());
    let domain = iommu.attach(DomainId(1), GPU).unwrap();
    iommu.attach(DomainId(1), FPGA).unwrap();
    iommu.attach(DomainId(2), GPU).unwrap();
    assert_eq!(iommu.attach(DomainId(1), GPU).unwrap_err(), AttachError::Already { endpoint: GPU });
    let stranger = EndpointId::local(9);
    assert_eq!(iommu.attach(DomainId(7), stranger).unwrap_err(), AttachError::NoEndpoint { endpoint: stranger });
    assert_eq!(iommu.usage().domains, 2);
    assert_eq!(domain.endpoints().collect::<Vec<_>>(), [GPU, FPGA]);
    map(&domain, pages(0, 1), 0);
    let detached = iommu.detach(DomainId(1), GPU).unwrap();
    assert!(!detached.destroyed && detached.progress.is_done());
    assert!(iommu.domain(DomainId(1)).is_some());
    assert_eq!(iommu.detach(DomainId(1), GPU).unwrap_err(), DetachError::NotAttached { endpoint: GPU });
    let detached = iommu.detach(DomainId(1), FPGA).unwrap();
    assert!(detached.destroyed && detached.progress.is_done());
    assert!(iommu.domain(DomainId(1)).is_none());
    assert_eq!(iommu.detach(DomainId(1), FPGA).unwrap_err(), DetachError::NoDomain);
    assert_eq!(iommu.usage(), Usage { domains: 1, ..Usage::default() });
}

#[test]
fn only_an_attached_endpoint_acts() {
    let iommu = tenant();
    let domain = domain(&iommu);
    let fault = Pins::new(&*domain, FPGA).unwrap_err();
    assert_eq!((fault.reason, fault.accessor, fault.domain), (FaultReason::Domain, FPGA, DomainId(1)));
    assert!(Pins::new(&*domain, EndpointId::local(77)).is_err());
    iommu.attach(DomainId(1), FPGA).unwrap();
    assert!(Pins::new(&*domain, FPGA).is_ok());
}

#[test]
fn detach_waits_for_jobs_of_the_endpoint_and_for_no_other() {
    let iommu = tenant();
    let domain = domain(&iommu);
    iommu.attach(DomainId(1), FPGA).unwrap();
    iommu.attach(DomainId(1), NIC).unwrap();
    let job = pins(&domain);
    assert!(iommu.detach(DomainId(1), FPGA).unwrap().progress.is_done());
    let answers = Answers::default();
    iommu.detach(DomainId(1), GPU).unwrap().progress.then(answers.one());
    assert!(Pins::new(&*domain, GPU).is_err(), "no new job");
    assert_eq!(iommu.attach(DomainId(1), GPU).unwrap_err(), AttachError::Draining);
    assert_eq!(answers.count(), 0);
    drop(job);
    assert_eq!(answers.count(), 1);
    iommu.attach(DomainId(1), GPU).unwrap();
}

#[test]
fn destroying_waits_for_everything_and_frees_the_id_before_it_answers() {
    let iommu = Arc::new(tenant());
    let domain = domain(&iommu);
    map(&domain, pages(0, 1), 0);
    map(&domain, pages(1, 1), 1);
    let mut job = pins(&domain);
    job.translate(&mut Iotlb::default(), pages(0, 1), Access::READ).unwrap();
    let detached = iommu.detach(DomainId(1), GPU).unwrap();
    assert!(detached.destroyed);
    let (answers, free) = (Answers::default(), Answers::default());
    let (seen, then) = (Arc::clone(&iommu), free.one());
    detached.progress.then(move || {
        if seen.usage() == Usage::default() && seen.attach(DomainId(1), GPU).is_ok() {
            then();
        }
    });
    assert!(iommu.domain(DomainId(1)).is_none());
    assert_eq!(iommu.attach(DomainId(1), GPU).unwrap_err(), AttachError::Draining);
    assert_eq!(iommu.detach_all(DomainId(1)).unwrap_err(), DetachError::NoDomain);
    let late = domain.map(pages(9, 1), &[ram(0, PAGE)], Access::RW, Origin::Guest);
    assert_eq!(late, Err(MapError::Closing));
    let more = job.translate(&mut Iotlb::default(), pages(1, 1), Access::READ);
    assert_eq!(refusal(more), (0x1000, FaultReason::Mapping));
    iommu.reset().then(answers.one());
    assert_eq!(answers.count(), 0);
    drop(job);
    assert_eq!((answers.count(), free.count()), (1, 1));
}

#[test]
fn reset_destroys_every_domain() {
    let iommu = tenant();
    for id in 1..4 {
        let domain = iommu.attach(DomainId(id), GPU).unwrap();
        map(&domain, pages(0, 1), 0);
    }
    let domain = iommu.domain(DomainId(2)).unwrap();
    let job = pins(&domain);
    let answers = Answers::default();
    iommu.reset().then(answers.one());
    assert_eq!(iommu.usage().domains, 1);
    assert_eq!(answers.count(), 0);
    drop(job);
    assert_eq!(answers.count(), 1);
    assert_eq!(iommu.usage(), Usage::default());
    assert!(iommu.reset().is_done());
}

/// A domain with the GPU and the FPGA.
fn two(iommu: &Iommu) -> Arc<Domain> {
    iommu.attach(DomainId(1), FPGA).unwrap();
    domain(iommu)
}

#[test]
fn peer_rights_are_denied_until_given_and_have_a_direction() {
    let iommu = tenant();
    let domain = two(&iommu);
    let may = |from, to, want| Pins::new(&*domain, from).unwrap().peer(to, want, Iova(0x42)).is_ok();
    let fault = Pins::new(&*domain, GPU).unwrap().peer(FPGA, Access::READ, Iova(0x42)).unwrap_err();
    let (domain_id, iova, access, reason) = (DomainId(1), Iova(0x42), Access::READ, FaultReason::Peer);
    let expected = Fault { accessor: GPU, owner: Some(FPGA), domain: domain_id, iova, access, reason, mapping: None };
    assert_eq!(fault, expected);
    assert_eq!(domain.peer_query(GPU, FPGA), Ok(Access::NONE));
    assert_eq!(domain.peer_enable(GPU, FPGA, Access::READ), Ok(Access::READ));
    assert!(may(GPU, FPGA, Access::READ));
    assert!(!may(GPU, FPGA, Access::WRITE));
    assert!(!may(GPU, FPGA, Access::RW));
    assert!(!may(FPGA, GPU, Access::READ));
    assert!(may(FPGA, FPGA, Access::RW), "its own memory");
    assert!(!may(GPU, NIC, Access::READ));
    assert_eq!(domain.peer_enable(GPU, FPGA, Access::RW), Ok(Access::RW));
    let already = PeerError::Already { accessor: GPU, owner: FPGA };
    assert_eq!(domain.peer_enable(GPU, FPGA, Access::WRITE), Err(already));
    assert_eq!(domain.peer_enable(GPU, GPU, Access::RW), Err(PeerError::SameEndpoint));
    assert_eq!(domain.peer_enable(GPU, NIC, Access::RW), Err(PeerError::NotAttached { endpoint: NIC }));
    assert_eq!(domain.peer_query(NIC, GPU), Err(PeerError::NotAttached { endpoint: NIC }));
}

#[test]
fn rights_of_one_domain_are_no_rights_in_another() {
    let iommu = tenant();
    let domain = two(&iommu);
    iommu.attach(DomainId(2), FPGA).unwrap();
    let other = iommu.attach(DomainId(2), GPU).unwrap();
    domain.peer_enable(GPU, FPGA, Access::RW).unwrap();
    assert!(Pins::new(&*other, GPU).unwrap().peer(FPGA, Access::READ, Iova(0)).is_err());
}

#[test]
fn disabling_waits_for_jobs_that_rely_on_that_right_only() {
    let iommu = tenant();
    let domain = two(&iommu);
    domain.peer_enable(GPU, FPGA, Access::RW).unwrap();
    let mut reader = pins(&domain);
    reader.peer(FPGA, Access::READ, Iova(0)).unwrap();
    let (left, progress) = domain.peer_disable(GPU, FPGA, Access::WRITE).unwrap();
    assert_eq!(left, Access::READ);
    assert!(progress.is_done(), "nobody writes");
    let answers = Answers::default();
    let (left, progress) = domain.peer_disable(GPU, FPGA, Access::RW).unwrap();
    assert_eq!(left, Access::NONE);
    progress.then(answers.one());
    assert!(pins(&domain).peer(FPGA, Access::READ, Iova(0)).is_err(), "no new job");
    assert_eq!(domain.peer_enable(GPU, FPGA, Access::READ), Err(PeerError::Draining));
    let (_, again) = domain.peer_disable(GPU, FPGA, Access::READ).unwrap();
    again.then(answers.one());
    assert_eq!(answers.count(), 0);
    drop(reader);
    assert_eq!(answers.count(), 2);
    assert_eq!(domain.peer_enable(GPU, FPGA, Access::READ), Ok(Access::READ));
}

#[test]
fn detaching_takes_the_rights_with_it_and_waits_for_their_jobs() {
    let iommu = tenant();
    let domain = two(&iommu);
    domain.peer_enable(GPU, FPGA, Access::RW).unwrap();
    let mut job = pins(&domain);
    job.peer(FPGA, Access::WRITE, Iova(0)).unwrap();
    let answers = Answers::default();
    iommu.detach(DomainId(1), FPGA).unwrap().progress.then(answers.one());
    assert_eq!(answers.count(), 0, "the GPU still writes there");
    drop(job);
    assert_eq!(answers.count(), 1);
    iommu.attach(DomainId(1), FPGA).unwrap();
    assert_eq!(domain.peer_query(GPU, FPGA), Ok(Access::NONE), "rights do not come back");
}

#[test]
fn limits_that_make_no_sense_are_refused() {
    let misaligned = Limits { iova: range(0, 0x1fff_f000), ..limits() };
    assert_eq!(Iommu::new(misaligned, [GPU]).unwrap_err(), LimitsError::Misaligned);
    let huge = Limits { segments: MAX_SEGMENTS + 1, ..limits() };
    assert_eq!(Iommu::new(huge, [GPU]).unwrap_err(), LimitsError::Segments);
    let many = (0..=64).map(EndpointId::local);
    assert_eq!(Iommu::new(limits(), many).unwrap_err(), LimitsError::Endpoints);
}

#[test]
fn job_that_changes_its_accessor_keeps_its_translations_and_no_right() {
    let iommu = tenant();
    let domain = two(&iommu);
    map(&domain, pages(16, 1), 1);
    domain.peer_enable(GPU, FPGA, Access::RW).unwrap();
    let mut job = pins(&domain);
    job.translate(&mut Iotlb::new(16), pages(16, 1), Access::READ).unwrap();
    job.peer(FPGA, Access::READ, Iova(0)).unwrap();
    assert_eq!(job.act_as(NIC).unwrap_err().reason, FaultReason::Domain, "not attached");
    assert_eq!(job.accessor(), GPU, "nothing has changed");
    job.act_as(FPGA).unwrap();
    assert!(domain.peer_disable(GPU, FPGA, Access::RW).unwrap().1.is_done(), "the right is let go");
    assert!(iommu.detach(DomainId(1), GPU).unwrap().progress.is_done(), "so is the attachment");
    let unmap = domain.unmap(pages(16, 1)).unwrap();
    assert!(!unmap.is_done(), "the translation is held");
    drop(job);
    assert!(unmap.is_done());
}
