//! The virtual IOMMU by itself: what one side of a copy pays for its translation, and what a mapping costs.

use std::hint::black_box;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use iommu_addr::{Access, Addr, DomainId, EndpointId, Gpa, Iova, Location, Range, Segment};
use iommu_core::{Domain, Iommu, Iotlb, Limits, Origin, Pins, Segments};

use crate::Report;
use crate::cpu::own_time;

const PAGE: u64 = 4096;
const MAPPINGS: u32 = 1 << 20;
const BATCH: u32 = 32;
/// Translations of one job: it pins its accessor's attachment once.
const A_JOB: usize = 4;
const ACCESSOR: EndpointId = EndpointId::local(0);
const FIRST: Iova = Iova(1 << 32);

pub(crate) fn run(report: &mut Report) -> Result<()> {
    if !report.wants(&["translate_hit", "translate_miss", "map_unmap_iommu"]) {
        return Ok(());
    }
    let (mappings, segments) = (MAPPINGS + 1, MAPPINGS + 1);
    let limits = Limits { domains: 1, mappings, segments, pieces: MAPPINGS, pages: u32::MAX, iova: Range::all() };
    let iommu = Iommu::new(limits, [ACCESSOR])?;
    let domain = iommu.attach(DomainId(1), ACCESSOR)?;
    for index in 0..u64::from(MAPPINGS) {
        // Neighbours are far apart in guest memory, so that nothing can be joined.
        let gpa = index.wrapping_mul(0x9e37_79b9) % (1 << 24) * 2 * PAGE;
        map(&domain, page(index)?, gpa)?;
    }
    let mut iotlb = Iotlb::default();
    let few: Vec<Iova> = (0..u64::from(BATCH)).map(page).collect::<Result<_>>()?;
    report.rate("translate_hit", "translations/s", own_time, || translate(&domain, &mut iotlb, &few, false))?;
    let mut random = Random(1);
    report.rate("translate_miss", "translations/s", own_time, || {
        let batch: Vec<Iova> = (0..BATCH).map(|_| page(random.next() % u64::from(MAPPINGS))).collect::<Result<_>>()?;
        translate(&domain, &mut iotlb, &batch, true)
    })?;
    let spare = page(u64::from(MAPPINGS))?;
    report.rate("map_unmap_iommu", "pairs/s", own_time, || {
        for _ in 0..BATCH {
            map(&domain, spare, 0)?;
            ensure!(domain.unmap(range(spare)?)?.is_done(), "Nothing is pinned");
        }
        Ok(u64::from(BATCH))
    })
}

/// What a batch of jobs does: a hint for all of them, then translations and pins, a few a job.
fn translate(domain: &Arc<Domain>, iotlb: &mut Iotlb, batch: &[Iova], hint: bool) -> Result<u64> {
    if hint {
        domain.prefetch(iotlb, batch);
    }
    let mut segments = Segments::new();
    for job in batch.chunks(A_JOB) {
        let mut pins = Pins::new(&**domain, ACCESSOR).ok().context("The accessor is attached")?;
        for at in job {
            let range = Range::with_len(*at, 64).context("64 bytes")?;
            let found = pins.translate_into(&mut segments, iotlb, range, Access::READ);
            found.ok().context("The page is mapped")?;
            black_box(&segments);
        }
    }
    Ok(batch.len() as u64)
}

fn page(index: u64) -> Result<Iova> {
    FIRST.checked_add(index * PAGE).context("Within the space")
}

fn range(at: Iova) -> Result<Range<Iova>> {
    Range::with_len(at, PAGE).context("Within the space")
}

fn map(domain: &Domain, at: Iova, gpa: u64) -> Result<()> {
    let segment = Segment { at: Location::Ram(Gpa(gpa)), len: PAGE };
    Ok(domain.map(range(at)?, &[segment], Access::RW, Origin::Guest)?)
}

/// Enough for addresses that a prefetcher does not guess.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
