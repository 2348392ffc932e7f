//! The seeds of the fuzz targets, without the fuzzer.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

fn replay(target: &str, body: impl Fn(&[u8])) -> Result<()> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(target);
    let mut count = 0;
    for entry in fs::read_dir(&dir).with_context(|| format!("No seeds in {}", dir.display()))? {
        let path = entry?.path();
        // Shown if the body panics.
        println!("{}", path.display());
        body(&fs::read(&path)?);
        count += 1;
    }
    assert!(count > 0, "no seeds in {}", dir.display());
    Ok(())
}

#[test]
fn requests() -> Result<()> {
    replay("requests", harness::fuzz::requests)
}

#[test]
fn chains() -> Result<()> {
    replay("chains", harness::fuzz::chains)
}

#[test]
fn ring() -> Result<()> {
    replay("ring", harness::fuzz::ring)
}

#[test]
fn frames() -> Result<()> {
    replay("frames", harness::fuzz::frames)
}

/// Inputs that nobody chose: cheap, the same every time, and more of them than seeds.
#[test]
fn noise() {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for round in 0..150 {
        let bytes: Vec<u8> = (0..200 + round * 4)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state.to_le_bytes()[3]
            })
            .collect();
        harness::fuzz::requests(&bytes);
        harness::fuzz::chains(&bytes);
        harness::fuzz::ring(&bytes);
        harness::fuzz::frames(&bytes);
    }
}
