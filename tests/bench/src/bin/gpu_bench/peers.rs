//! From GPU to GPU: a slice of each of two behind one device, beside the driver's own copies and those through the host.
//!
//! Bytes are verified on each GPU's own side first, and that nothing is written once a right has been taken back. Every sample of a rival is taken in turns with
//! the others of its row. What a rival moves in a sample is as much as takes a few milliseconds at its speed.
//!
//! Not here: how anybody copies.

mod revoke;
mod rivals;
mod world;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hw_cuda::{Driver, Gpu, Nvml, Settings, Slice};

use crate::report::{Row, Run, gb_per_s};
use crate::rivals::Shape;
use revoke::{Take, revoke};
use rivals::{Buffers, Plain, fair};
use world::{Job, World};

/// Bytes of a sample of what goes directly, and of what is staged; at least one transfer.
const BYTES: [u64; 2] = [4 << 30, 512 << 20];
/// Most transfers of a sample.
const MOST: u64 = 4096;
/// Transfers of a rival's, one after another, before the next one's turn.
const BLOCK: usize = 25;

pub(crate) const NOTE: &str = "Each transfer is a copy by one GPU's copy engine into the other's memory, over what `machine` names; `bare` is the driver's call with peer access on \
     plain memory, `driver` the same call without peer access, which the driver stages, and `fair` the best of 1 to 16 threads through registered memory of the host.";

/// Everybody who copies.
struct All {
    spin: World,
    sleep: World,
    bare: Plain,
    driver: Plain,
    buffers: Buffers,
    half: u64,
}

/// How somebody copies.
#[derive(Clone, Copy)]
enum Who {
    Direct,
    Sleep,
    Bare { streams: usize, apart: bool },
    Driver,
    Fair(Shape),
}

impl Who {
    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Sleep => "direct, sleep",
            Self::Bare { .. } => "bare",
            Self::Driver => "driver",
            Self::Fair(_) => "fair",
        }
    }

    fn how(self) -> String {
        match self {
            Self::Bare { streams, apart } => {
                format!("{streams} streams a way, {}", if apart { "a thread each way" } else { "one thread" })
            }
            Self::Fair(shape) => format!("{} threads, pieces of {} KiB", shape.threads, shape.piece >> 10),
            _ => String::new(),
        }
    }

    fn is_staged(self) -> bool {
        matches!(self, Self::Driver | Self::Fair(_))
    }
}

impl All {
    fn copy(&self, who: Who, jobs: &[Job]) -> Result<Duration> {
        match who {
            Who::Direct => self.spin.direct(jobs),
            Who::Sleep => self.sleep.direct(jobs),
            Who::Bare { streams, apart: false } => self.bare.copy(jobs, streams),
            Who::Bare { streams, apart: true } => self.bare.copy_apart(jobs, streams),
            Who::Driver => self.driver.copy(jobs, 1),
            Who::Fair(shape) => fair(&self.bare, &self.buffers, shape, jobs),
        }
    }

    /// Finds nobody asleep: what others did meanwhile took milliseconds.
    fn wake(&self, who: Who) -> Result<()> {
        (0..3).try_for_each(|_| self.copy(who, &self.some(4096, false, 1)).map(drop))
    }

    /// Transfers of a length from the first GPU, or both ways, as many as make a sample of somebody's.
    fn jobs(&self, who: Who, len: u64, both: bool) -> Vec<Job> {
        let count = (BYTES[usize::from(who.is_staged())] / len).clamp(1, MOST);
        self.some(len, both, count)
    }

    fn some(&self, len: u64, both: bool, count: u64) -> Vec<Job> {
        let job = |from| Job { from, len, count, half: self.half };
        if both { vec![job(0), job(1)] } else { vec![job(0)] }
    }

    /// Everybody, each in the shape in which he is fastest at what `jobs` says.
    fn best(&self, len: u64, jobs: impl Fn(Who) -> Vec<Job>) -> Result<[Who; 5]> {
        let fastest = |tried: Vec<Who>| -> Result<Who> {
            let mut best: Option<(Duration, Who)> = None;
            for who in tried.iter().chain(&tried) {
                let time = self.copy(*who, &jobs(*who))?;
                if best.is_none_or(|(least, _)| time < least) {
                    best = Some((time, *who));
                }
            }
            best.map(|(_, who)| who).context("Nobody copies")
        };
        let ways = jobs(Who::Direct).len();
        let shapes =
            [(1, false), (2, false), (1, true), (2, true)].map(|(streams, apart)| Who::Bare { streams, apart });
        let bare = fastest(shapes[..2 * ways].to_vec())?;
        let fair = fastest(Shape::all(len, self.buffers.threads).into_iter().map(Who::Fair).collect())?;
        Ok([Who::Direct, Who::Sleep, bare, Who::Driver, fair])
    }
}

/// Measures the two first GPUs, or that one and the first other one. `most` is the longest transfer.
pub(crate) fn measure(which: Option<&str>, most: u64, samples: usize, base: Settings) -> Result<Run> {
    ensure!(
        most.is_power_of_two() && most >= 4096,
        "The longest transfer is {most} bytes; name a power of 2 from 4096 on"
    );
    let gpus = open(which)?;
    let mut run = Run {
        command: "cargo xtask bench --gpu --peers".to_owned(),
        note: NOTE.to_owned(),
        machine: machine(&gpus)?,
        rows: Vec::new(),
    };
    let most = most.next_multiple_of(Slice::GRANULE);
    for take in [Take::Right, Take::Buffer] {
        let world = World::new(&gpus, most, base)?;
        let (made, refused) = revoke(&world, most, take)?;
        ensure!(refused > 0, "{take:?}: nothing was refused after it was taken back");
        let said = format!("{made} copies were made, {refused} refused, and nothing was written after the answer");
        eprintln!("{take:?} taken back: {said}");
        run.machine.insert(format!("taking back a {take:?}").to_lowercase(), said.into());
    }
    let ordinals = [gpus[0].info().ordinal, gpus[1].info().ordinal];
    let (bare, driver) = (Plain::new(ordinals, 2 * most, true)?, Plain::new(ordinals, 2 * most, false)?);
    let buffers = Buffers::new(&bare)?;
    let (spin, sleep) = (Settings { spin: true, ..base }, Settings { spin: false, ..base });
    let (spin, sleep) = (World::new(&gpus, most, spin)?, World::new(&gpus, most, sleep)?);
    let all = All { spin, sleep, bare, driver, buffers, half: most };
    for len in [1, 4095, 64 << 10, (1 << 20) + 13, 64 << 20, 257 << 20].into_iter().filter(|len| *len <= most) {
        for from in [0, 1] {
            all.spin.verify(from, len)?;
            all.sleep.verify(from, len)?;
        }
    }
    let lens = || (12..=30).step_by(2).map(|shift| 1_u64 << shift).filter(|len| *len <= most);
    for len in lens() {
        latency(&all, len, &mut run)?;
    }
    for len in lens() {
        for (case, both) in [("one way", false), ("both ways", true)] {
            bandwidth(&all, len, (case, both), samples, &mut run)?;
        }
    }
    Ok(run)
}

/// One transfer at a time.
fn latency(all: &All, len: u64, run: &mut Run) -> Result<()> {
    let samples = usize::try_from((256 << 20) / len)?.clamp(20, 1000);
    for (case, both) in [("one way", false), ("both ways", true)] {
        let jobs = all.some(len, both, 1);
        let everybody = all.best(len, |_| jobs.clone())?;
        let mut times: [Vec<f64>; 5] = Default::default();
        let block = samples.min(BLOCK);
        for turn in 0..samples.div_ceil(block) {
            for (who, times) in everybody.iter().zip(&mut times) {
                // What is staged takes long to set up.
                if who.is_staged() && turn * block >= 200 {
                    continue;
                }
                all.wake(*who)?;
                for _ in 0..block {
                    times.push(all.copy(*who, &jobs)?.as_secs_f64() * 1e6);
                }
            }
        }
        for (who, times) in everybody.into_iter().zip(times) {
            run.add(Row { how: who.how(), ..Row::new("peer latency", case, len, who.name(), "us", times) });
        }
    }
    Ok(())
}

/// Many transfers, as fast as they go.
fn bandwidth(all: &All, len: u64, (case, both): (&str, bool), samples: usize, run: &mut Run) -> Result<()> {
    let everybody = all.best(len, |who| all.jobs(who, len, both))?;
    let mut rates: [Vec<f64>; 5] = Default::default();
    for sample in 0..=samples {
        for (who, rates) in everybody.iter().zip(&mut rates) {
            let jobs = all.jobs(*who, len, both);
            let bytes = jobs.iter().map(|job| job.bytes()).sum();
            all.wake(*who)?;
            let rate = gb_per_s(bytes, all.copy(*who, &jobs)?);
            // The first round warms everything up.
            if sample > 0 {
                rates.push(rate);
            }
        }
    }
    for (who, rates) in everybody.into_iter().zip(rates) {
        run.add(Row { how: who.how(), ..Row::new("peers", case, len, who.name(), "GB/s", rates) });
    }
    Ok(())
}

fn open(which: Option<&str>) -> Result<[Arc<Gpu>; 2]> {
    let driver = Driver::load()?;
    let all = driver.gpus()?;
    let first = Gpu::open(&driver, which.unwrap_or(&all.first().context("There is no GPU")?.address))?;
    let other = all.iter().find(|gpu| gpu.ordinal != first.info().ordinal);
    let other = other.context("There is one GPU only; measure peers where there are two")?;
    Ok([first, Gpu::open(&driver, &other.address)?])
}

/// What a run is made on, with how the two reach each other.
fn machine(gpus: &[Arc<Gpu>; 2]) -> Result<std::collections::BTreeMap<String, serde_json::Value>> {
    let nvml = Nvml::load()?;
    let mut machine = crate::world::machine(&gpus[0], &nvml.driver_version()?)?;
    let meters = [nvml.meter(&gpus[0].info().uuid)?, nvml.meter(&gpus[1].info().uuid)?];
    for (one, other) in [(0, 1), (1, 0)] {
        let hw_cuda::Peer { access, atomics, rank } = gpus[one].peer(&gpus[other]);
        let link = meters[one].link(&meters[other]).map_or_else(|error| error.to_string(), |link| link.to_string());
        let said = format!("access {access}, atomics {atomics}, rank {rank}, {link}");
        eprintln!("GPU {one} to GPU {other}: {said}");
        machine.insert(format!("gpu {one} to gpu {other}"), said.into());
    }
    Ok(machine)
}
