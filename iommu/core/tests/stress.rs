//! Real threads: translators hold what they found while mappers take it away and reuse it.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::*;
use iommu_addr::{Access, DomainId, Gpa, Iova, Location, Range};
use iommu_core::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

const PAGES: u64 = 24;
const ROUNDS: u64 = 4_000;

/// For each page of guest memory how often it was given away and taken back: odd while a mapping may lead there.
struct Memory(Vec<AtomicU64>);

impl Memory {
    fn state(&self, page: u64) -> u64 {
        self.0[usize::try_from(page).unwrap()].load(Ordering::SeqCst)
    }

    fn turn(&self, page: u64) {
        self.0[usize::try_from(page).unwrap()].fetch_add(1, Ordering::SeqCst);
    }
}

fn mapper(domain: &Domain, memory: &Arc<Memory>, first: u64) {
    let mut random = first * 2 + 1;
    for _ in 0..ROUNDS {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (at, gpa) = ((random >> 33) % PAGES, first + (random >> 43) % PAGES);
        if memory.state(gpa).is_multiple_of(2) {
            memory.turn(gpa);
            if domain.map(pages(at, 1), &[ram(gpa * PAGE, PAGE)], Access::RW, Origin::Guest).is_err() {
                memory.turn(gpa);
            }
        }
        // Whatever is mapped at `gone` goes; its memory is free again when the answer comes.
        let gone = (random >> 53) % PAGES;
        let was = Pins::new(domain, GPU).ok().and_then(|mut pins| {
            let found = pins.translate(&mut Iotlb::new(1), pages(gone, 1), Access::READ).ok()?;
            let Location::Ram(gpa) = found[0].at else { return None };
            Some(gpa.0 / PAGE)
        });
        if let Some(was) = was {
            let memory = Arc::clone(memory);
            domain.unmap(pages(gone, 1)).unwrap().then(move || memory.turn(was));
        }
    }
}

fn translator(domain: &Arc<Domain>, memory: &Memory, stop: &AtomicBool) -> u64 {
    let (mut iotlb, mut found, mut random) = (Iotlb::new(8), 0, 7_u64);
    while !stop.load(Ordering::Relaxed) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (random >> 33) % PAGES;
        if random >> 60 == 0 {
            domain.prefetch(&mut iotlb, &[Iova(at * PAGE), Iova((at ^ 1) * PAGE)]);
        }
        let mut pins = Pins::new(Arc::clone(domain), GPU).unwrap();
        let range = Range::with_len(Iova(at * PAGE + 8), 16).unwrap();
        if let Ok(segments) = pins.translate(&mut iotlb, range, Access::WRITE) {
            let Location::Ram(Gpa(gpa)) = segments[0].at else { panic!("only guest memory is mapped") };
            let state = memory.state(gpa / PAGE);
            assert_eq!(state % 2, 1, "page {gpa:#x} was taken back");
            for _ in 0..random >> 58 {
                std::hint::spin_loop();
            }
            assert_eq!(memory.state(gpa / PAGE), state, "page {gpa:#x} was taken back while held");
            found += 1;
        }
    }
    found
}

#[test]
fn nothing_taken_back_is_reached_by_many_threads_in_two_domains() {
    let limits = Limits { mappings: 40, segments: 40, ..limits() };
    let iommu = Iommu::new(limits, [GPU]).unwrap();
    let memory = Arc::new(Memory((0..2 * PAGES).map(|_| AtomicU64::new(0)).collect()));
    let (stop, together) = (AtomicBool::new(false), Barrier::new(6));
    let domains = [1, 2].map(|id| iommu.attach(DomainId(id), GPU).unwrap());
    thread::scope(|scope| {
        let translators: Vec<_> = (0..4)
            .map(|i| {
                let (domain, memory, stop, together) = (&domains[i % 2], &memory, &stop, &together);
                scope.spawn(move || {
                    together.wait();
                    translator(domain, memory, stop)
                })
            })
            .collect();
        let mappers = [(&domains[0], 0), (&domains[1], PAGES)].map(|(domain, first)| {
            let (memory, together) = (&memory, &together);
            scope.spawn(move || {
                together.wait();
                mapper(domain, memory, first);
            })
        });
        mappers.into_iter().for_each(|mapper| mapper.join().unwrap());
        stop.store(true, Ordering::Relaxed);
        let found: u64 = translators.into_iter().map(|translator| translator.join().unwrap()).sum();
        assert!(found > 0, "the test tested nothing");
    });
    let progress = iommu.reset();
    assert!(progress.is_done());
    assert_eq!(iommu.usage(), Usage::default());
    assert!((0..2 * PAGES).filter(|page| memory.state(*page) % 2 == 1).count() <= 40, "no answer was lost");
}

#[test]
fn quotas_are_exact_when_threads_race_for_the_last() {
    for _ in 0..200 {
        let iommu = Iommu::new(Limits { mappings: 5, segments: 9, ..limits() }, [GPU]).unwrap();
        let domain = domain(&iommu);
        let mapped: usize = thread::scope(|scope| {
            let threads = [0, 1, 2].map(|i| {
                let domain = &domain;
                scope.spawn(move || {
                    let two = [ram(0, PAGE), ram(0, PAGE)];
                    let map = |n: u64| domain.map(pages(i * 16 + n * 2, 2), &two, Access::RW, Origin::Guest);
                    (0..4_u64).filter(|n| map(*n).is_ok()).count()
                })
            });
            threads.map(|thread| thread.join().unwrap()).iter().sum()
        });
        assert_eq!(mapped, 4, "nine segments are four mappings of two");
        assert_eq!((iommu.usage().mappings, iommu.usage().segments), (4, 8));
    }
}
