//! The suite that every engine passes: `run` it over a [`Rig`] that builds the engine and its memory anew for each case.
//!
//! The suite lays out a small world ([`RAM`], [`APERTURES`]), keeps a plain byte model of it ([`FlatMemory`]), submits work, drives time
//! until every transfer has ended, and then compares every byte of the world. A case that fails panics; its name is printed before.
//!
//! Not here: what only one engine has (registers, kernels, bandwidth). Those are the engine's own tests.

mod bed;
mod cases;
mod model;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use iommu_addr::{EndpointId, Gpa, Range};

use crate::{DmaEngine, Memory, RamRegion};

pub use model::{FlatMemory, Noise};

/// Guest memory that a rig provides, as (first address, length): two regions that touch, then a hole, then one more.
pub const RAM: [(u64, u64); 3] = [(0x1000, 0x18000), (0x19000, 0x18000), (0x10_0000, 0x8000)];

/// Endpoints that a rig provides, as (id, memory length). Each may be an initiator; none has registers at these offsets.
pub const APERTURES: [(EndpointId, u64); 2] = [(EndpointId::local(0), 0x30000), (EndpointId::local(1), 0x28000)];

/// [`RAM`] in files that `file` makes of a length. Each region begins at an odd page of its file, so that regions that touch lie apart in this process.
pub fn ram_regions(file: impl Fn(u64) -> File) -> Vec<RamRegion> {
    let region = |(start, len)| {
        let gpa = Range::with_len(Gpa(start), len).expect("inside the address space");
        RamRegion { gpa, file: Arc::new(file(len + 0x5000)), offset: 0x3000 }
    };
    RAM.into_iter().map(region).collect()
}

/// What a case works with.
pub struct Parts {
    /// A fresh engine.
    pub engine: Arc<dyn DmaEngine>,
    /// The memory it works on, laid out as [`RAM`] and [`APERTURES`].
    pub memory: Arc<dyn Memory>,
    /// Moves the engine's clock on. `None`: the engine lives in real time and calls `on_progress`.
    pub advance: Option<Box<dyn Fn(Duration) + Send + Sync>>,
}

/// Builds engines for the suite.
pub trait Rig {
    /// A fresh engine over fresh memory.
    fn build(&self) -> Parts;
}

impl<F: Fn() -> Parts> Rig for F {
    fn build(&self) -> Parts {
        self()
    }
}

/// Runs every case, each on fresh parts.
///
/// # Panics
/// Where the engine does not conform.
pub fn run(rig: &dyn Rig) {
    run_but(rig, &[]);
}

/// Runs every case but those with these words in their name, for an engine that would take hours; says which it leaves out.
///
/// # Panics
/// As for [`run`]; where there is no such case.
pub fn run_but(rig: &dyn Rig, slow: &[&str]) {
    for words in slow {
        assert!(cases::ALL.iter().any(|(name, _)| name.contains(words)), "there is no case {words:?}");
    }
    for (name, case) in cases::ALL {
        if slow.iter().any(|words| name.contains(words)) {
            println!("conformance: SKIP {name}: too many bytes for this engine");
            continue;
        }
        println!("conformance: {name}");
        case(&bed::Bed::new(rig.build()));
    }
}
