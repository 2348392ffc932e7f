//! What the tests share: a small tenant and short names.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test uses some of it")]

use iommu_addr::{Access, ApertureOffset, DomainId, EndpointId, Gpa, Iova, Location, Range, Segment};
use iommu_core::{Domain, Fault, FaultReason, Iommu, Iotlb, Limits, Origin, Pins, Refused, Segments};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub const PAGE: u64 = 0x1000;
pub const GPU: EndpointId = EndpointId::local(1);
pub const FPGA: EndpointId = EndpointId::local(2);
pub const NIC: EndpointId = EndpointId::local(3);

pub fn limits() -> Limits {
    Limits { domains: 4, mappings: 64, segments: 128, pieces: 64, pages: u32::MAX, iova: Range::all() }
}

pub fn tenant() -> Iommu {
    Iommu::new(limits(), [GPU, FPGA, NIC]).unwrap()
}

/// A domain that the GPU is attached to.
pub fn domain(iommu: &Iommu) -> Arc<Domain> {
    iommu.attach(DomainId(1), GPU).unwrap()
}

pub fn range(start: u64, last: u64) -> Range<Iova> {
    Range::new(Iova(start), Iova(last)).unwrap()
}

/// `count` pages from page `first`.
pub fn pages(first: u64, count: u64) -> Range<Iova> {
    Range::with_len(Iova(first * PAGE), count * PAGE).unwrap()
}

pub fn ram(gpa: u64, len: u64) -> Segment {
    Segment { at: Location::Ram(Gpa(gpa)), len }
}

pub fn vram(endpoint: EndpointId, offset: u64, len: u64) -> Segment {
    Segment { at: Location::Aperture { endpoint, offset: ApertureOffset(offset) }, len }
}

/// Maps guest memory, read and write; `gpa` in pages.
pub fn map(domain: &Domain, at: Range<Iova>, gpa: u64) {
    domain.map(at, &[ram(gpa * PAGE, at.len().unwrap())], Access::RW, Origin::Guest).unwrap();
}

pub fn pins(domain: &Arc<Domain>) -> Pins<Arc<Domain>> {
    Pins::new(Arc::clone(domain), GPU).unwrap()
}

/// Translates with a fresh cache and lets go.
pub fn look(domain: &Arc<Domain>, at: Range<Iova>, want: Access) -> Result<Segments, Refused> {
    pins(domain).translate(&mut Iotlb::new(16), at, want)
}

/// First refused address and reason.
pub fn refusal(result: Result<Segments, Refused>) -> (u64, FaultReason) {
    match result {
        Err(Refused::Fault(Fault { iova, reason, .. })) => (iova.0, reason),
        other => panic!("not a fault: {other:?}"),
    }
}

pub fn is_mapped(domain: &Arc<Domain>, at: Range<Iova>) -> bool {
    look(domain, at, Access::READ).is_ok()
}

/// Counts how often what it gave out was run.
#[derive(Clone, Default)]
pub struct Answers(Arc<AtomicUsize>);

impl Answers {
    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    pub fn one(&self) -> impl FnOnce() + Send + 'static {
        let count = Arc::clone(&self.0);
        move || {
            count.fetch_add(1, Ordering::SeqCst);
        }
    }
}
