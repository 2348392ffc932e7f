//! Tenants that share a link: engines of their own, in this process, each with its own view of one page of credit.
//!
//! Every tenant copies from one device to another, over links of 2 GB/s, and keeps many transfers of mixed sizes on their way. What each moved in a
//! fixed time says how equal their shares were (Jain's index: 1 if all are equal, 1/n if one has everything) and how much of the link was used; what
//! a small copy takes, by itself and beside tenants that flood the link, says what they cost others. On a machine with fewer cores than threads the
//! latter is mostly the host's scheduler.
//!
//! Not here: processes, guests.

use std::sync::Arc;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use harness::ram::memory_file;
use harness::rig::{EndpointKind, endpoint};
use hw_engine::{DmaEngine, Finished, JobId, LinkId, Route, Segments, Submit, Transfer, Work};
use hw_host::HostMemory;
use hw_sim::{Clock, SimConfig, SimEndpoint, SimEngine};
use iommu_addr::{ApertureOffset, DomainId, EndpointId, Location, Segment};
use rustix::fs::SealFlags;
use vmm_broker::LinkTable;

use crate::Report;

const BANDWIDTH: u64 = 2_000_000_000;
const MEMORY: u64 = 2 << 20;
const DEPTH: usize = 16;
/// As a device cuts them.
const SIZES: [u64; 6] = [4 << 10, 64 << 10, 1 << 20, 4 << 10, 256 << 10, 16 << 10];
const SMALL: u64 = 4 << 10;
/// Between two small copies.
const PAUSE: Duration = Duration::from_micros(200);
const NAMES: [&str; 6] =
    ["fair_jain_2", "fair_used_2", "fair_jain_8", "fair_used_8", "small_p99_alone", "small_p99_beside_7"];

pub(crate) fn run(report: &mut Report) -> Result<()> {
    if !report.wants(&NAMES) {
        return Ok(());
    }
    for (count, [jain_name, used_name]) in [(2, ["fair_jain_2", "fair_used_2"]), (8, ["fair_jain_8", "fair_used_8"])] {
        let (mut fair, mut used) = (Vec::new(), Vec::new());
        for _ in 0..report.samples() {
            let (moved, _) = sample(count, false, report.length())?;
            fair.push(jain(&moved));
            used.push(moved.iter().sum::<f64>() / report.length().as_secs_f64() / 1e9);
        }
        report.numbers(jain_name, "Jain's index", fair);
        report.numbers(used_name, "GB/s of 2", used);
    }
    for (name, flooding) in [("small_p99_alone", 0), ("small_p99_beside_7", 7)] {
        let mut slowest = Vec::new();
        for _ in 0..report.samples() {
            slowest.push(percentile_99(sample(flooding, true, report.length())?.1).as_secs_f64() * 1e6);
        }
        report.numbers(name, "us", slowest);
    }
    Ok(())
}

/// Bytes that each of `flooding` tenants moved, and how long each copy of the one that moves little took, if there is one.
fn sample(flooding: usize, with_small: bool, length: Duration) -> Result<(Vec<f64>, Vec<Duration>)> {
    let page = LinkTable::create(&[BANDWIDTH; 2])?;
    let tenants =
        (0..flooding + usize::from(with_small)).map(|place| Tenant::new(&page, place)).collect::<Result<Vec<_>>>()?;
    let end = Instant::now() + length;
    thread::scope(|scope| {
        let (floods, small) = tenants.split_at(flooding);
        let small = small.first().map(|tenant| scope.spawn(|| tenant.small(end)));
        let floods: Vec<_> =
            floods.iter().enumerate().map(|(n, tenant)| scope.spawn(move || tenant.flood(n, end))).collect();
        let moved =
            floods.into_iter().map(|flood| flood.join().ok().context("A tenant panicked")?).collect::<Result<_>>()?;
        let took = small.map(|small| small.join().ok().context("A tenant panicked")?).transpose()?.unwrap_or_default();
        Ok((moved, took))
    })
}

struct Tenant {
    engine: SimEngine,
}

impl Tenant {
    fn new(page: &LinkTable, place: usize) -> Result<Self> {
        let links = LinkTable::open(page.page().try_clone_to_owned()?, &[BANDWIDTH; 2], u16::try_from(place)?)?;
        let memory = Arc::new(HostMemory::new());
        let mut endpoints = Vec::new();
        for id in 0..2 {
            let spec = endpoint(id, EndpointKind::Gpu, MEMORY);
            memory.add_aperture(spec.id, &memory_file(MEMORY, SealFlags::SHRINK)?, MEMORY)?;
            endpoints.push(SimEndpoint { link: Some(LinkId(id)), ..SimEndpoint::instant(spec) });
        }
        let engine = SimEngine::new(&SimConfig::new(endpoints), memory, Arc::new(links), Clock::Monotonic)?;
        Ok(Self { engine })
    }

    /// Has the engine wake this thread.
    fn wake_me(&self) {
        let me: Thread = thread::current();
        self.engine.on_progress(Box::new(move || me.unpark()));
    }

    fn submit(&self, job: u64, len: u64) -> Result<()> {
        let side = |id| {
            let at = Location::Aperture { endpoint: EndpointId::local(id), offset: ApertureOffset(0) };
            Segments::from_iter([Segment { at, len }])
        };
        let work = Work::Copy { src: side(0), dst: side(1), route: Route::Direct };
        let transfer = Transfer { job: JobId(job), domain: DomainId(1), initiator: EndpointId::local(0), work };
        anyhow::ensure!(self.engine.submit(&transfer)? == Submit::Submitted, "A link takes time");
        Ok(())
    }

    /// Keeps the link busy. Answers the bytes moved.
    fn flood(&self, phase: usize, end: Instant) -> Result<f64> {
        self.wake_me();
        let mut finished: Vec<Finished> = Vec::new();
        let (mut next, mut out, mut moved) = (phase, 0, 0.0);
        while Instant::now() < end {
            while out < DEPTH {
                self.submit(u64::try_from(next)?, SIZES[next % SIZES.len()])?;
                (next, out) = (next + 1, out + 1);
            }
            self.engine.poll(&mut finished);
            if finished.is_empty() {
                thread::park_timeout(end.saturating_duration_since(Instant::now()));
            }
            out -= finished.len();
            moved += finished.drain(..).map(|end| f64::from(u32::try_from(end.bytes).unwrap_or(u32::MAX))).sum::<f64>();
        }
        self.engine.quiesce(&mut finished);
        Ok(moved)
    }

    /// Copies a little now and then. Answers how long each copy took.
    fn small(&self, end: Instant) -> Result<Vec<Duration>> {
        self.wake_me();
        let (mut took, mut finished) = (Vec::new(), Vec::new());
        while Instant::now() < end {
            let start = Instant::now();
            self.submit(took.len() as u64, SMALL)?;
            while finished.is_empty() {
                // As a device's timekeeper: by itself when the engine knows, else when it is told.
                match self.engine.poll(&mut finished) {
                    Some(rest) if finished.is_empty() => thread::park_timeout(rest),
                    None if finished.is_empty() => thread::park(),
                    _ => {}
                }
            }
            finished.clear();
            took.push(start.elapsed());
            thread::sleep(PAUSE);
        }
        Ok(took)
    }
}

/// 1 if all are equal, 1/n if one has everything.
fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    sum * sum / (f64::from(u32::try_from(shares.len()).unwrap_or(u32::MAX)) * squares)
}

fn percentile_99(mut took: Vec<Duration>) -> Duration {
    took.sort_unstable();
    took.get(took.len() * 99 / 100).copied().unwrap_or_default()
}
