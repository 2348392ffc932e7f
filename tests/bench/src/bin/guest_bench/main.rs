//! Measures, from inside a guest, how many 4 KiB operations a second the device does, beside a virtio block device of the same VM whose back-end does nothing.
//!
//! Both are driven by one thread of user space with as many operations on their way, in turns, so that whatever else the machine does meets both. Prints one
//! JSON object a number: name, unit, median, min, max; and the median of the ratios.
//!
//! Not here: the VM.

mod block;
mod copies;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Parser;
use serde_json::json;

/// Bytes of one operation.
const SIZE: u32 = 4096;

#[derive(Debug, Parser)]
struct Args {
    /// The Peergate device
    #[arg(long, default_value = "/dev/peergate0")]
    device: PathBuf,
    /// The block device to compare with
    #[arg(long, default_value = "/dev/vda")]
    block: PathBuf,
    /// Samples of each number
    #[arg(long, default_value_t = 7)]
    samples: u32,
    /// Milliseconds that a sample lasts, about
    #[arg(long, default_value_t = 1000)]
    millis: u64,
}

/// Something that does operations, so many at a time.
trait Rival {
    /// Does about a hundred and answers how many.
    fn some(&mut self) -> Result<u64>;
}

fn main() -> Result<()> {
    let args = Args::parse();
    for depth in [1_usize, 32] {
        let mut device = copies::Copies::open(&args.device, depth)?;
        let mut block = block::Block::open(&args.block, depth)?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        // The first round warms both up.
        for round in 0..=args.samples {
            let pair = (sample(&mut device, args.millis)?, sample(&mut block, args.millis)?);
            if round > 0 {
                ours.push(pair.0);
                theirs.push(pair.1);
            }
        }
        let ratios = ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs).collect();
        print(&format!("guest_copy_4k_depth{depth}"), "ops/s", ours);
        print(&format!("guest_virtio_blk_read_4k_depth{depth}"), "ops/s", theirs);
        print(&format!("guest_copy_of_virtio_blk_depth{depth}"), "ratio", ratios);
    }
    Ok(())
}

/// Operations a second.
fn sample(rival: &mut dyn Rival, millis: u64) -> Result<f64> {
    let (start, mut done) = (Instant::now(), 0_u64);
    loop {
        done += rival.some()?;
        let passed = start.elapsed();
        if passed >= Duration::from_millis(millis) {
            #[allow(clippy::cast_precision_loss, reason = "far below 2^53")]
            return Ok(done as f64 / passed.as_secs_f64());
        }
    }
}

fn print(name: &str, unit: &str, mut samples: Vec<f64>) {
    samples.sort_by(f64::total_cmp);
    let (Some(min), Some(max)) = (samples.first(), samples.last()) else { return };
    let middle = samples.len() / 2;
    let median =
        if samples.len() % 2 == 1 { samples[middle] } else { f64::midpoint(samples[middle - 1], samples[middle]) };
    println!(
        "{}",
        json!({"name": name, "unit": unit, "median": median, "min": min, "max": max, "samples": samples.len()})
    );
}
