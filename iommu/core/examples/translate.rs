//! Times translation, mapping and unmapping on this machine: `cargo run --release -p iommu_core --example translate`. Times are of the processor, not of
//! the clock on the wall, so that other load matters less.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_precision_loss, reason = "a bench")]

use iommu_addr::{Access, DomainId, EndpointId, Gpa, Iova, Location, Range, Segment};
use iommu_core::{Domain, Iommu, Iotlb, Limits, Origin, Pins, Segments};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const GPU: EndpointId = EndpointId::local(1);
const PAGE: u64 = 4096;
const MANY: u64 = 1 << 20;

/// Nanoseconds that this thread has run.
fn now() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split(' ').next().unwrap().parse().unwrap()
}

fn per_op(name: &str, ops: u64, mut body: impl FnMut()) {
    body();
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = now();
        body();
        best = best.min((now() - start) as f64 / ops as f64);
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
    let (mut iotlb, mut segments) = (Iotlb::default(), Segments::new());
    for _ in 0..rounds {
        let mut pins = Pins::new(&**domain, GPU).unwrap();
        pins.translate_into(&mut segments, &mut iotlb, at(black_box(5)), Access::READ).unwrap();
        black_box(&segments);
    }
}

fn time_hits(domain: &Arc<Domain>) {
    let word = AtomicU64::new(0);
    per_op("two locked operations, for comparison", 1 << 24, || {
        for _ in 0..1 << 24 {
            black_box(word.fetch_add(1, Ordering::AcqRel));
            black_box(word.fetch_sub(1, Ordering::AcqRel));
        }
    });
    let (mut iotlb, mut segments) = (Iotlb::default(), Segments::new());
    per_op("hit, pin and unpin (held in one job)", 1 << 24, || {
        for _ in 0..1 << 22 {
            let mut pins = Pins::new(&**domain, GPU).unwrap();
            for page in [5, 6, 7, 8] {
                pins.translate_into(&mut segments, &mut iotlb, at(black_box(page)), Access::READ).unwrap();
                black_box(&segments);
            }
        }
    });
    per_op("hit, a job of its own each", 1 << 24, || hits(domain, 1 << 24));
    per_op("hit, a job of its own each, two threads, one mapping", 1 << 24, || {
        std::thread::scope(|scope| {
            scope.spawn(|| hits(domain, 1 << 24));
            hits(domain, 1 << 24);
        });
    });
}

fn time_misses(domain: &Domain, among: u64, random: &mut Random) {
    let (mut iotlb, mut segments) = (Iotlb::default(), Segments::new());
    for (name, prefetch) in [("32 at a time", true), ("one by one", false)] {
        per_op(&format!("miss among {among} pages, {name}"), 1 << 20, || {
            for _ in 0..(1 << 20) / 32 {
                let batch: [Iova; 32] = std::array::from_fn(|_| Iova(random.next() % among * PAGE));
                if prefetch {
                    domain.prefetch(&mut iotlb, &batch);
                }
                for at in batch {
                    let range = Range::with_len(at, 512).unwrap();
                    let mut pins = Pins::new(domain, GPU).unwrap();
                    pins.translate_into(&mut segments, &mut iotlb, range, Access::READ).unwrap();
                    black_box(&segments);
                }
            }
        });
    }
}

/// `cargo run ... --example translate [hits|misses|maps]`
fn main() {
    let only = std::env::args().nth(1);
    let runs = |what: &str| only.as_deref().is_none_or(|only| only == what);
    let limits = Limits {
        domains: 4,
        mappings: 2 << 20,
        segments: 2 << 20,
        pieces: 1 << 16,
        pages: u32::MAX,
        iova: Range::all(),
    };
    let iommu = Iommu::new(limits, [GPU, EndpointId::local(2)]).unwrap();
    let domain = iommu.attach(DomainId(1), GPU).unwrap();
    let small = iommu.attach(DomainId(2), GPU).unwrap();
    (0..64).for_each(|page| map(&small, page));
    let mut random = Random(88_172_645_463_325_252);
    if runs("hits") {
        time_hits(&small);
    }
    if runs("maps") {
        per_op("map and unmap one page, 64 mappings", 1 << 20, || {
            for page in 0..1 << 20 {
                map(&small, 64 + page);
                unmap(&small, 64 + page);
            }
        });
    }
    if !runs("misses") && !runs("maps") {
        return;
    }
    let start = now();
    (0..MANY).for_each(|page| map(&domain, page));
    println!("{:<60} {:8.1} ns", "map, up to 1 Mi single pages", (now() - start) as f64 / MANY as f64);
    if runs("misses") {
        [1 << 12, 1 << 15, MANY].into_iter().for_each(|among| time_misses(&domain, among, &mut random));
    }
    if runs("maps") {
        per_op("map and unmap one page, 1 Mi mappings, random", 1 << 18, || {
            for _ in 0..1 << 18 {
                let page = MANY + random.next() % MANY;
                map(&domain, page);
                unmap(&domain, page);
            }
        });
        let start = now();
        assert!(domain.unmap(Range::all()).unwrap().is_done());
        println!("{:<60} {:8.1} ns", "unmap of 1 Mi at once", (now() - start) as f64 / MANY as f64);
    }
}
