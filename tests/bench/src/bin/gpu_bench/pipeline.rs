//! A pipeline that mostly computes: tiles of an image come from an aperture, are convolved on the GPU, and go back.
//!
//! The kernel is the same for everyone; only the way of the bytes differs. One thing is done after another, as such programs are often written.
//!
//! Not here: how bytes are moved.

use std::ffi::c_void;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::measure::{Buffers, best};
use crate::raw::{Kernel, Stream, Way, compile};
use crate::report::{Row, Run};
use crate::rivals::{Job, Shape, fair, staged};
use crate::world::World;

/// A tile is a square of so many pixels, four bytes each: 16 MiB.
const SIDE: u32 = 2048;
const TILE: u64 = 4 * (SIDE as u64) * (SIDE as u64);
const TILES: u64 = 16;
const BLOCK: [u32; 2] = [32, 8];

/// A convolution with a square of weights, as a first version of a program has it: each thread makes a pixel.
const SOURCE: &str = r#"
extern "C" __global__ void convolve(const float *from, float *to, int side, int radius)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    float sum = 0.0f, weight = 1.0f / ((2 * radius + 1) * (2 * radius + 1));
    for (int dy = -radius; dy <= radius; dy++) {
        int row = min(max(y + dy, 0), side - 1) * side;
        for (int dx = -radius; dx <= radius; dx++)
            sum += weight * __ldg(from + row + min(max(x + dx, 0), side - 1));
    }
    to[y * side + x] = sum;
}
"#;

/// How the bytes go.
#[derive(Clone, Copy)]
enum Mover {
    Direct,
    Staged { is_registered: bool },
    Fair(Shape),
}

pub(crate) fn pipeline(world: &World, buffers: &mut Buffers, samples: usize, run: &mut Run) -> Result<()> {
    let kernel = world.cuda.kernel(&compile(SOURCE, "compute_80")?, "convolve")?;
    let stream = world.cuda.stream()?;
    let job = world.job(TILE, TILE, Way::Out);
    let shape = best(world, buffers, &[job])?;
    let movers = [
        ("direct", Mover::Direct),
        ("pageable", Mover::Staged { is_registered: false }),
        ("pinned", Mover::Staged { is_registered: true }),
        ("fair", Mover::Fair(shape)),
    ];
    for radius in [5, 10, 20] {
        let case = format!("radius {radius}");
        let alone = (0..=samples).map(|_| compute(world, kernel, &stream, radius)).skip(1);
        let alone = alone.collect::<Result<Vec<_>>>()?;
        run.add(Row::new("pipeline", &case, TILE, "compute", "ms", alone));
        let mut times: [Vec<f64>; 4] = Default::default();
        for sample in 0..=samples {
            for ((_, mover), times) in movers.iter().zip(&mut times) {
                let mut total = Duration::ZERO;
                for tile in 0..TILES {
                    // What a rival sets up once (threads, registered buffers) is not counted against it.
                    total += step(world, buffers, *mover, tile, Way::In)?;
                    let start = Instant::now();
                    launch(world, kernel, &stream, radius, tile)?;
                    stream.wait()?;
                    total += start.elapsed();
                    total += step(world, buffers, *mover, tile, Way::Out)?;
                }
                if sample > 0 {
                    times.push(total.as_secs_f64() * 1e3);
                }
            }
        }
        for ((who, _), samples) in movers.iter().zip(times) {
            run.add(Row::new("pipeline", &case, TILE, who, "ms", samples));
        }
    }
    Ok(())
}

/// Where a tile is on the GPU, and where its result.
fn places(world: &World, tile: u64) -> [u64; 2] {
    let from = world.device + tile % 2 * 2 * TILE;
    [from, from + TILE]
}

fn step(world: &World, buffers: &mut Buffers, mover: Mover, tile: u64, way: Way) -> Result<Duration> {
    let [from, to] = places(world, tile);
    let aperture = world.apertures[0].address + (2 * tile + u64::from(way == Way::Out)) * TILE;
    let job = Job { device: if way == Way::In { from } else { to }, aperture, len: TILE, count: 1, way };
    match mover {
        Mover::Direct => world.direct(&[job]),
        Mover::Staged { is_registered } => staged(&world.cuda, &mut buffers.one, is_registered, job),
        Mover::Fair(shape) => fair(&world.cuda, &mut buffers.many, shape, &[job]),
    }
}

fn launch(world: &World, kernel: Kernel, stream: &Stream, mut radius: i32, tile: u64) -> Result<()> {
    let ([mut from, mut to], mut side) = (places(world, tile), SIDE);
    let mut arguments: [*mut c_void; 4] =
        [(&raw mut from).cast(), (&raw mut to).cast(), (&raw mut side).cast(), (&raw mut radius).cast()];
    stream.launch(kernel, [SIDE / BLOCK[0], SIDE / BLOCK[1]], BLOCK, &mut arguments)
}

/// Milliseconds of all tiles' kernels alone.
fn compute(world: &World, kernel: Kernel, stream: &Stream, radius: i32) -> Result<f64> {
    let start = Instant::now();
    for tile in 0..TILES {
        launch(world, kernel, stream, radius, tile)?;
        stream.wait()?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e3)
}
