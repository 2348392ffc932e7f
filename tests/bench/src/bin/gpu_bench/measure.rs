//! Latency, bandwidth, energy and scatter.
//!
//! Every sample of a rival is taken in turns with the others of its row, so that all see the same machine. Not here: the pipeline.

use std::time::{Duration, Instant};

use anyhow::Result;
use hw_cuda::Meter;

use crate::raw::Way;
use crate::report::{Row, Run, gb_per_s};
use crate::rivals::{BUFFER, Job, Shape, bare, fair, staged};
use crate::world::{OTHER, World};

/// Bytes of a sample, at least one transfer.
const BYTES: u64 = 256 << 20;
/// Most transfers of a sample.
const MOST: u64 = 2048;
/// How long a run for energy lasts, about.
const ENERGY: Duration = Duration::from_secs(2);

/// What the staged rivals use, made once.
pub(crate) struct Buffers {
    pub(crate) one: Vec<u8>,
    pub(crate) many: Vec<u8>,
    threads: usize,
}

impl Buffers {
    pub(crate) fn new() -> Result<Self> {
        let threads = std::thread::available_parallelism()?.get().min(16);
        Ok(Self { one: vec![1; usize::try_from(BUFFER)?], many: vec![1; threads * (8 << 20)], threads })
    }
}

/// Transfers of a rival before the next one's turn: as often as a program would that makes one transfer after another.
const BLOCK: usize = 25;

/// One transfer at a time: whoever waits for it looks without a pause.
pub(crate) fn latency(world: &World, buffers: &mut Buffers, samples: usize, run: &mut Run, mode: &str) -> Result<()> {
    let through = blocks(samples, [&mut || world.through()])?;
    let [through] = through;
    run.add(Row::new("latency", "device", 8, mode, "us", through));
    let rested = (0..50).map(|_| {
        std::thread::sleep(Duration::from_millis(5));
        Ok(world.direct(&[world.job(4096, 4096, Way::Out)])?.as_secs_f64() * 1e6)
    });
    run.add(Row::new("latency", "at rest", 4096, mode, "us", rested.collect::<Result<_>>()?));
    for len in [8, 4096, 64 << 10, 1 << 20] {
        for (case, way) in [("out", Way::Out), ("in", Way::In)] {
            let job = world.job(len, len, way);
            let [direct, alone, plain] = blocks(
                samples,
                [&mut || world.direct(&[job]), &mut || world.alone(&job), &mut || bare(&world.cuda, &[job])],
            )?;
            run.add(Row::new("latency", case, len, mode, "us", direct));
            if mode != "direct" {
                continue;
            }
            run.add(Row::new("latency", case, len, "engine", "us", alone));
            run.add(Row::new("latency", case, len, "bare", "us", plain));
            for (who, is_registered) in [("pageable", false), ("pinned", true)] {
                let [hops] = blocks(200, [&mut || staged(&world.cuda, &mut buffers.one, is_registered, job)])?;
                run.add(Row::new("latency", case, len, who, "us", hops));
            }
        }
    }
    Ok(())
}

/// Finds the device awake: what its rivals did meanwhile took milliseconds, and a thread that has slept so long takes up to 0.2 ms to wake in a virtual
/// machine, as the row `at rest` of the latencies says.
fn wake(world: &World) -> Result<()> {
    (0..3).try_for_each(|_| world.through().map(drop))
}

/// Takes so many samples, in microseconds, of each rival, in turns.
fn blocks<const N: usize>(
    samples: usize,
    mut rivals: [&mut dyn FnMut() -> Result<Duration>; N],
) -> Result<[Vec<f64>; N]> {
    let mut times = [const { Vec::new() }; N];
    while times.iter().any(|times| times.len() < samples) {
        for (rival, times) in rivals.iter_mut().zip(&mut times) {
            // The first ones of a block find nothing where it was.
            for sample in 0..BLOCK + 5 {
                let time = rival()?;
                if sample >= 5 {
                    times.push(time.as_secs_f64() * 1e6);
                }
            }
        }
    }
    Ok(times)
}

/// Many transfers, as fast as they go.
pub(crate) fn transfer(world: &World, buffers: &mut Buffers, samples: usize, run: &mut Run) -> Result<()> {
    for len in (12..=30).step_by(2).map(|shift| 1_u64 << shift) {
        for case in ["out", "in", "both"] {
            let way = if case == "in" { Way::In } else { Way::Out };
            // For both ways at once, half of the memory each.
            let len = if case == "both" { len.min(512 << 20) } else { len };
            let job = world.job(len, BYTES.min(MOST * len).max(if case == "both" { 2 * len } else { len }), way);
            let jobs = if case == "both" { job.both().to_vec() } else { vec![job] };
            let bytes: u64 = jobs.iter().map(|job| job.bytes()).sum();
            let shape = best(world, buffers, &jobs)?;
            let mut times: [Vec<f64>; 5] = Default::default();
            for sample in 0..=samples {
                let hop = |buffers: &mut Buffers, is_registered| -> Result<Duration> {
                    let parts = jobs.iter().map(|job| staged(&world.cuda, &mut buffers.one, is_registered, *job));
                    parts.sum()
                };
                wake(world)?;
                let taken = [
                    world.direct(&jobs)?,
                    bare(&world.cuda, &jobs)?,
                    hop(buffers, false)?,
                    hop(buffers, true)?,
                    fair(&world.cuda, &mut buffers.many, shape, &jobs)?,
                ];
                // The first round warms everything up.
                if sample > 0 {
                    times.iter_mut().zip(taken).for_each(|(all, time)| all.push(gb_per_s(bytes, time)));
                }
            }
            for (who, samples) in ["direct", "bare", "pageable", "pinned", "fair"].into_iter().zip(times) {
                let mut row = Row::new("transfer", case, len, who, "GB/s", samples);
                if who == "fair" {
                    row.how = format!("{} threads, pieces of {} KiB", shape.threads, shape.piece >> 10);
                }
                run.add(row);
            }
        }
    }
    Ok(())
}

/// The shape in which the fair rival is fastest.
pub(crate) fn best(world: &World, buffers: &mut Buffers, jobs: &[Job]) -> Result<Shape> {
    let len = jobs.first().map_or(1, |job| job.len);
    let mut best = (Duration::MAX, Shape { threads: 1, piece: len.min(1 << 20) });
    for shape in Shape::all(len, buffers.threads) {
        for _ in 0..2 {
            let time = fair(&world.cuda, &mut buffers.many, shape, jobs)?;
            best = if time < best.0 { (time, shape) } else { best };
        }
    }
    Ok(best.1)
}

/// What the GPU draws for the same bytes.
pub(crate) fn energy(world: &World, buffers: &mut Buffers, meter: &Meter, run: &mut Run) -> Result<()> {
    let len = 64 << 20;
    let job = world.job(len, BYTES, Way::Out);
    let shape = best(world, buffers, &[job])?;
    let start = (Instant::now(), meter.energy()?);
    std::thread::sleep(ENERGY);
    let idle = joules(meter, start.1)? / start.0.elapsed().as_secs_f64();
    run.add(Row::new("energy", "idle", 0, "idle", "W", vec![idle]));
    for who in ["direct", "pageable", "pinned", "fair"] {
        let mut samples: [Vec<f64>; 2] = Default::default();
        for _ in 0..3 {
            let (start, before, mut moved) = (Instant::now(), meter.energy()?, 0);
            while start.elapsed() < ENERGY {
                match who {
                    "direct" => world.direct(&[job])?,
                    "fair" => fair(&world.cuda, &mut buffers.many, shape, &[job])?,
                    who => staged(&world.cuda, &mut buffers.one, who == "pinned", job)?,
                };
                moved += job.bytes();
            }
            let (used, time) = (joules(meter, before)?, start.elapsed());
            #[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
            let gigabytes = moved as f64 / 1e9;
            samples[0].push(used / gigabytes);
            samples[1].push(used / time.as_secs_f64());
        }
        let [each, power] = samples;
        run.add(Row::new("energy", "out", len, who, "J/GB", each));
        run.add(Row::new("energy", "power", len, who, "W", power));
    }
    Ok(())
}

fn joules(meter: &Meter, before: u64) -> Result<f64> {
    let used = meter.energy()?.saturating_sub(before);
    #[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
    Ok(used as f64 / 1e3)
}

/// One buffer of the GPU's to several apertures, a part to each.
pub(crate) fn scatter(world: &World, buffers: &mut Buffers, samples: usize, run: &mut Run) -> Result<()> {
    for count in [2, 4, 8] {
        for part in [1 << 20, 16 << 20, OTHER] {
            let to = world.apertures.iter().take(count).zip(0..);
            let jobs: Vec<_> = to
                .map(|(aperture, n)| {
                    let (device, aperture) = (world.device + n * part, aperture.address);
                    Job { device, aperture, len: part, count: 1, way: Way::Out }
                })
                .collect();
            let bytes: u64 = jobs.iter().map(|job| job.bytes()).sum();
            let shape = best(world, buffers, &jobs)?;
            let mut times: [Vec<f64>; 4] = Default::default();
            for sample in 0..=samples {
                let hop = |buffers: &mut Buffers, is_registered| -> Result<Duration> {
                    jobs.iter().map(|job| staged(&world.cuda, &mut buffers.one, is_registered, *job)).sum()
                };
                wake(world)?;
                let taken = [
                    world.direct(&jobs)?,
                    hop(buffers, false)?,
                    hop(buffers, true)?,
                    fair(&world.cuda, &mut buffers.many, shape, &jobs)?,
                ];
                if sample > 0 {
                    times.iter_mut().zip(taken).for_each(|(all, time)| all.push(gb_per_s(bytes, time)));
                }
            }
            for (who, samples) in ["direct", "pageable", "pinned", "fair"].into_iter().zip(times) {
                let mut row = Row::new("scatter", &format!("to {count}"), part, who, "GB/s", samples);
                if who == "fair" {
                    row.how = format!("{} threads, pieces of {} KiB", shape.threads, shape.piece >> 10);
                }
                run.add(row);
            }
        }
    }
    Ok(())
}
