//! The pin protocol under the model checker: every interleaving of a few threads.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p iommu_core --release --test loom`.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "tests")]

use iommu_addr::{Access, DomainId, EndpointId, Gpa, Iova, Location, Range, Segment};
use iommu_core::{Domain, Iommu, Iotlb, Limits, MapError, Origin, Pins, Usage};
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use std::sync::Arc;

const GPU: EndpointId = EndpointId::local(1);
const FPGA: EndpointId = EndpointId::local(2);

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 10_000;
    builder.check(model);
}

fn tenant(endpoints: &[EndpointId]) -> Arc<Iommu> {
    let limits = Limits { domains: 2, mappings: 2, segments: 2, pieces: 2, pages: 64, iova: Range::all() };
    Arc::new(Iommu::new(limits, endpoints.iter().copied()).unwrap())
}

fn page(number: u64) -> Range<Iova> {
    Range::with_len(Iova(number << 12), 0x1000).unwrap()
}

fn try_map(domain: &Domain, at: Range<Iova>, gpa: u64) -> Result<(), MapError> {
    domain.map(at, &[Segment { at: Location::Ram(Gpa(gpa)), len: 0x1000 }], Access::RW, Origin::Guest)
}

fn map(domain: &Domain, at: Range<Iova>, gpa: u64) {
    try_map(domain, at, gpa).unwrap();
}

/// How many use what is mapped, whether its unmapping has returned, and how often it was answered.
#[derive(Default)]
struct Witness {
    users: AtomicU32,
    withdrawn: AtomicU32,
    answers: AtomicU32,
}

impl Witness {
    /// Uses the page if the translation succeeds: no use may begin once the unmapping has returned, or go on once its answer is given.
    fn use_page(&self, domain: &Domain, iotlb: &mut Iotlb) {
        let mut pins = Pins::new(domain, GPU).unwrap();
        let withdrawn = self.withdrawn.load(Ordering::SeqCst);
        if pins.translate(iotlb, page(0), Access::READ).is_ok() {
            assert_eq!(withdrawn, 0, "a use began after the unmapping");
            self.users.fetch_add(1, Ordering::SeqCst);
            assert_eq!(self.answers.load(Ordering::SeqCst), 0, "used after the answer");
            self.users.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn answer(&self) {
        assert_eq!(self.users.load(Ordering::SeqCst), 0, "answered while in use");
        self.answers.fetch_add(1, Ordering::SeqCst);
    }
}

fn warm(domain: &Domain) -> Iotlb {
    let mut iotlb = Iotlb::new(1);
    Pins::new(domain, GPU).unwrap().translate(&mut iotlb, page(0), Access::READ).unwrap();
    iotlb
}

#[test]
fn nobody_uses_a_page_after_the_answer_and_the_answer_comes_once() {
    check(|| {
        let iommu = tenant(&[GPU]);
        let domain = iommu.attach(DomainId(1), GPU).unwrap();
        map(&domain, page(0), 0);
        let witness = Arc::new(Witness::default());
        let users: Vec<_> = (0..2)
            .map(|_| {
                let (domain, witness, mut iotlb) = (Arc::clone(&domain), Arc::clone(&witness), warm(&domain));
                thread::spawn(move || witness.use_page(&domain, &mut iotlb))
            })
            .collect();
        let (seen, tenant) = (Arc::clone(&witness), Arc::clone(&iommu));
        let progress = domain.unmap(page(0)).unwrap();
        witness.withdrawn.store(1, Ordering::SeqCst);
        progress.then(move || {
            assert_eq!(tenant.usage().mappings, 0, "quota comes back first");
            seen.answer();
        });
        for user in users {
            user.join().unwrap();
        }
        assert_eq!(witness.answers.load(Ordering::SeqCst), 1);
        assert_eq!(iommu.usage(), Usage { domains: 1, ..Usage::default() });
    });
}

#[test]
fn stale_translation_never_reaches_what_took_the_place() {
    check(|| {
        let iommu = tenant(&[GPU]);
        let domain = iommu.attach(DomainId(1), GPU).unwrap();
        map(&domain, page(0), 0xa000);
        let mut iotlb = warm(&domain);
        let user = {
            let domain = Arc::clone(&domain);
            thread::spawn(move || {
                let mut pins = Pins::new(&*domain, GPU).unwrap();
                let found = pins.translate(&mut iotlb, page(0), Access::READ).ok().map(|segments| segments[0].at);
                // Only ever the old place while the old mapping is held, or the new one.
                assert!(matches!(found, None | Some(Location::Ram(Gpa(0xa000 | 0xb000)))), "{found:?}");
                if found == Some(Location::Ram(Gpa(0xa000))) {
                    assert_eq!(try_map(&domain, page(0), 0xc000), Err(MapError::Overlap { at: page(0) }));
                }
            })
        };
        let answered = Arc::new(AtomicU32::new(0));
        let then = Arc::clone(&answered);
        domain.unmap(page(0)).unwrap().then(move || then.store(1, Ordering::SeqCst));
        if answered.load(Ordering::SeqCst) == 1 {
            map(&domain, page(0), 0xb000);
        }
        user.join().unwrap();
        assert_eq!(answered.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn lookup_never_finds_what_took_the_place_of_its_record() {
    check(|| {
        let iommu = tenant(&[GPU]);
        let domain = iommu.attach(DomainId(1), GPU).unwrap();
        map(&domain, page(0), 0xa000);
        let user = {
            let domain = Arc::clone(&domain);
            thread::spawn(move || {
                let mut pins = Pins::new(&*domain, GPU).unwrap();
                let found = pins.translate(&mut Iotlb::new(1), page(0), Access::READ);
                let found = found.ok().map(|segments| segments[0].at);
                assert!(matches!(found, None | Some(Location::Ram(Gpa(0xa000)))), "{found:?}");
            })
        };
        domain.unmap(page(0)).unwrap().then(|| ());
        map(&domain, page(1), 0xb000);
        user.join().unwrap();
        assert_eq!(iommu.usage().mappings, 1);
    });
}

#[test]
fn place_that_went_to_another_domain_is_not_reached_and_drains() {
    check(|| {
        let iommu = tenant(&[GPU]);
        let old = iommu.attach(DomainId(1), GPU).unwrap();
        let new = iommu.attach(DomainId(2), GPU).unwrap();
        map(&old, page(0), 0xa000);
        let mut iotlb = warm(&old);
        assert!(old.unmap(page(0)).unwrap().is_done());
        map(&new, page(0), 0xb000);
        let user = {
            let old = Arc::clone(&old);
            thread::spawn(move || {
                let mut pins = Pins::new(&*old, GPU).unwrap();
                assert!(pins.translate(&mut iotlb, page(0), Access::READ).is_err());
            })
        };
        let answers = Arc::new(AtomicU32::new(0));
        let then = Arc::clone(&answers);
        new.unmap(page(0)).unwrap().then(move || {
            then.fetch_add(1, Ordering::SeqCst);
        });
        user.join().unwrap();
        assert_eq!(answers.load(Ordering::SeqCst), 1);
        assert_eq!(iommu.usage().mappings, 0);
    });
}

#[test]
fn two_unmaps_of_a_used_page_are_both_answered_after_the_use() {
    check(|| {
        let iommu = tenant(&[GPU]);
        let domain = iommu.attach(DomainId(1), GPU).unwrap();
        map(&domain, page(0), 0);
        let mut iotlb = warm(&domain);
        let witness = Arc::new(Witness::default());
        let unmap = |domain: &Domain, witness: &Arc<Witness>| {
            let seen = Arc::clone(witness);
            domain.unmap(page(0)).unwrap().then(move || seen.answer());
        };
        let user = {
            let (domain, witness) = (Arc::clone(&domain), Arc::clone(&witness));
            thread::spawn(move || witness.use_page(&domain, &mut iotlb))
        };
        let other = {
            let (domain, witness) = (Arc::clone(&domain), Arc::clone(&witness));
            thread::spawn(move || unmap(&domain, &witness))
        };
        unmap(&domain, &witness);
        user.join().unwrap();
        other.join().unwrap();
        assert_eq!(witness.answers.load(Ordering::SeqCst), 2);
        assert_eq!(iommu.usage().mappings, 0);
    });
}

#[test]
fn domain_goes_once_whatever_its_jobs_do() {
    check(|| {
        let iommu = tenant(&[GPU]);
        let domain = iommu.attach(DomainId(1), GPU).unwrap();
        map(&domain, page(0), 0);
        let mut iotlb = warm(&domain);
        let (witness, job) = (Arc::new(Witness::default()), Arc::clone(&domain));
        let seen = Arc::clone(&witness);
        let user = thread::spawn(move || {
            if let Ok(mut pins) = Pins::new(job, GPU) {
                seen.users.fetch_add(1, Ordering::SeqCst);
                let _ = pins.translate(&mut iotlb, page(0), Access::READ);
                seen.users.fetch_sub(1, Ordering::SeqCst);
            }
        });
        let (seen, tenant) = (Arc::clone(&witness), Arc::clone(&iommu));
        iommu.detach(DomainId(1), GPU).unwrap().progress.then(move || {
            assert_eq!(tenant.usage(), Usage::default());
            seen.answer();
        });
        user.join().unwrap();
        assert_eq!(witness.answers.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn withdrawn_right_is_not_used_after_the_answer() {
    check(|| {
        let iommu = tenant(&[GPU, FPGA]);
        let domain = iommu.attach(DomainId(1), GPU).unwrap();
        iommu.attach(DomainId(1), FPGA).unwrap();
        domain.peer_enable(GPU, FPGA, Access::READ).unwrap();
        let witness = Arc::new(Witness::default());
        let users: Vec<_> = (0..2)
            .map(|_| {
                let (domain, seen) = (Arc::clone(&domain), Arc::clone(&witness));
                thread::spawn(move || {
                    let mut pins = Pins::new(&*domain, GPU).unwrap();
                    if pins.peer(FPGA, Access::READ, Iova(0)).is_ok() {
                        seen.users.fetch_add(1, Ordering::SeqCst);
                        assert_eq!(seen.answers.load(Ordering::SeqCst), 0, "used after the answer");
                        seen.users.fetch_sub(1, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        let seen = Arc::clone(&witness);
        domain.peer_disable(GPU, FPGA, Access::READ).unwrap().1.then(move || seen.answer());
        for user in users {
            user.join().unwrap();
        }
        assert_eq!(witness.answers.load(Ordering::SeqCst), 1);
    });
}
