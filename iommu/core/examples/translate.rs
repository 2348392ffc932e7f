//! Times translation, mapping and unmapping on this machine: `cargo run --release -p iommu_core --example translate`.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_precision_loss, reason = "a bench")]

use iommu_addr::{Access, DomainId, EndpointId, Gpa, Iova, Location, Range, Segment};
use iommu_core::{Domain, Iommu, Iotlb, Limits, Origin, Pins};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

const GPU: EndpointId = EndpointId::local(1);
const PAGE: u64 = 4096;
const MANY: u64 = 1 << 20;

fn per_op(name: &str, ops: u64, mut body: impl FnMut()) {
    body();
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        body();
        best = best.min(start.elapsed().as_nanos() as f64 / ops as f64);
    }
    println!("{name:<60} {best:8.1} ns");
}

fn at(page: u64) -> Range<Iova> {
    Range::with_len(Iova(page * PAGE), 512).unwrap()
}

fn map(domain: &Domain, page: u64) {
    let range = Range::with_len(Iova(page * PAGE), PAGE).unwrap();
    let segment = Segment { at: Location::Ram(Gpa((MANY - page % MANY) * 2 * PAGE)), len: PAGE };
    domain.map(range, &[segment], Access::RW, Origin::Guest).unwrap();
}

fn unmap(domain: &Domain, page: u64) {
    let range = Range::with_len(Iova(page * PAGE), PAGE).unwrap();
    assert!(domain.unmap(range).unwrap().is_done());
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn hits(domain: &Arc<Domain>, rounds: u64) {
    let mut iotlb = Iotlb::default();
    for _ in 0..rounds {
        let mut pins = Pins::new(&**domain, GPU).unwrap();
        black_box(pins.translate(&mut iotlb, at(black_box(5)), Access::READ)).unwrap();
    }
}

fn main() {
    let limits = Limits { domains: 4, mappings: 2 << 20, segments: 2 << 20, pieces: 1 << 16, iova: Range::all() };
    let iommu = Iommu::new(limits, [GPU, EndpointId::local(2)]).unwrap();
    let domain = iommu.attach(DomainId(1), GPU).unwrap();
    let small = iommu.attach(DomainId(2), GPU).unwrap();
    (0..64).for_each(|page| map(&small, page));

    let mut iotlb = Iotlb::default();
    per_op("hit, pin and unpin (held in one job)", 1 << 20, || {
        for _ in 0..1 << 18 {
            let mut pins = Pins::new(&*small, GPU).unwrap();
            for page in [5, 6, 7, 8] {
                black_box(pins.translate(&mut iotlb, at(black_box(page)), Access::READ)).unwrap();
            }
        }
    });
    per_op("hit, a job of its own each", 1 << 20, || hits(&small, 1 << 20));
    per_op("hit, a job of its own each, two threads, one mapping", 1 << 20, || {
        std::thread::scope(|scope| {
            scope.spawn(|| hits(&small, 1 << 20));
            hits(&small, 1 << 20);
        });
    });
    per_op("map and unmap one page, 64 mappings", 1 << 18, || {
        for page in 0..1 << 18 {
            map(&small, 64 + page);
            unmap(&small, 64 + page);
        }
    });

    let start = Instant::now();
    (0..MANY).for_each(|page| map(&domain, page));
    println!("{:<60} {:8.1} ns", "map, up to 1 Mi single pages", start.elapsed().as_nanos() as f64 / MANY as f64);
    let mut random = Random(88_172_645_463_325_252);
    for (name, prefetch) in [("miss among 1 Mi pages, 32 at a time", true), ("miss among 1 Mi pages, one by one", false)] {
        per_op(name, 1 << 18, || {
            for _ in 0..(1 << 18) / 32 {
                let batch: [Iova; 32] = std::array::from_fn(|_| Iova(random.next() % MANY * PAGE));
                if prefetch {
                    domain.prefetch(&mut iotlb, &batch);
                }
                let mut pins = Pins::new(&*domain, GPU).unwrap();
                for at in batch {
                    let range = Range::with_len(at, 512).unwrap();
                    black_box(pins.translate(&mut iotlb, range, Access::READ)).unwrap();
                }
            }
        });
    }
    per_op("map and unmap one page, 1 Mi mappings, random", 1 << 16, || {
        for _ in 0..1 << 16 {
            let page = MANY + random.next() % MANY;
            map(&domain, page);
            unmap(&domain, page);
        }
    });
    let start = Instant::now();
    assert!(domain.unmap(Range::all()).unwrap().is_done());
    println!("{:<60} {:8.1} ns", "unmap of 1 Mi at once", start.elapsed().as_nanos() as f64 / MANY as f64);
}
