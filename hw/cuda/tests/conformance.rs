//! The suite that every engine passes, over a driver without a GPU that is as slow and as disorderly as it may be.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;

use common::{Fake, file};
use hw_cuda::{CudaEngine, Gpu, Settings, Slice};
use hw_engine::conformance::{self, APERTURES, Parts, RAM};
use hw_engine::{Fleet, Member, RamMap, RamRegion};
use hw_host::{HostEngine, HostMemory};
use iommu_addr::{Gpa, Range};

/// The suite's guest memory. Each region begins at an odd page of its file, so that regions that touch lie apart in this process.
fn ram() -> Arc<HostMemory> {
    let memory = HostMemory::new();
    let regions = RAM.map(|(start, len)| RamRegion {
        gpa: Range::with_len(Gpa(start), len).unwrap(),
        file: Arc::new(file(len + 0x5000)),
        offset: 0x3000,
    });
    memory.replace(&regions).unwrap();
    Arc::new(memory)
}

/// The suite's endpoints.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    /// Slices of one GPU.
    Together,
    /// Of two.
    Apart,
    /// One is somebody else's.
    Alone,
}

fn build(fake: &Fake, layout: Layout, settings: Settings) -> Parts {
    let (memory, gpus) = (ram(), fake.gpus());
    let slice = |(n, (endpoint, len)): (usize, (_, u64))| {
        let gpu: &Arc<Gpu> = if layout == Layout::Together { &gpus[0] } else { &gpus[n] };
        (endpoint, Slice::new(gpu, len).unwrap())
    };
    let count = if layout == Layout::Alone { 1 } else { 2 };
    for (endpoint, len) in APERTURES.into_iter().skip(count) {
        memory.add_aperture(endpoint, &file(len), len).unwrap();
    }
    let slices = APERTURES.into_iter().take(count).enumerate().map(slice).collect();
    let engine = Arc::new(CudaEngine::new(slices, memory.clone(), settings, None).unwrap());
    let member = |(endpoint, _)| Member { endpoint, engine: engine.clone(), same_function: Vec::new() };
    let members = APERTURES.into_iter().take(count).map(member).collect();
    let rest = Arc::new(HostEngine::new(memory.clone()));
    let fleet = Fleet::new(members, Vec::new(), rest, memory, None).unwrap();
    let memory = fleet.memory();
    Parts { engine: Arc::new(fleet), memory, advance: None }
}

fn conforms(fake: Option<Fake>, layout: Layout, peers: bool, settings: Settings) -> Option<Fake> {
    let fake = fake?;
    fake.set("gpus", 2);
    fake.set("peers", i64::from(peers));
    fake.set("jitter", 20);
    conformance::run(&|| build(&fake, layout, settings));
    fake.is_left_clean();
    Some(fake)
}

#[test]
fn slices_of_one_gpu_conform() {
    conforms(Fake::cuda(), Layout::Together, true, Settings::default());
}

#[test]
fn a_slice_beside_an_aperture_conforms() {
    conforms(Fake::cuda(), Layout::Alone, true, Settings::default());
}

#[test]
fn slices_of_peers_conform() {
    conforms(Fake::cuda(), Layout::Apart, true, Settings::default());
}

#[test]
fn slices_of_gpus_that_do_not_reach_each_other_conform() {
    conforms(Fake::cuda(), Layout::Apart, false, Settings::default());
}

#[test]
fn an_engine_conforms_that_gathers_nothing_and_remembers_little() {
    conforms(Fake::cuda(), Layout::Alone, true, Settings { spin: true, gather: 0, chunks: 1 });
}

#[test]
fn a_driver_that_copies_one_by_one_will_do() {
    for version in [12080, 12000] {
        let Some(fake) = conforms(Fake::cuda_of(version), Layout::Together, true, Settings::default()) else { return };
        assert_eq!(fake.get("batches"), 0);
    }
}
