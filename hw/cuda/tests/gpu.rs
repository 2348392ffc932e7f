//! The engine on a real GPU. Each test says so if this machine has none.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::sync::Arc;

use hw_cuda::{CudaEngine, Driver, Gpu, Settings, Slice};
use hw_engine::conformance::{self, APERTURES, Parts, RAM};
use hw_engine::{Fleet, Member, RamMap, RamRegion};
use hw_host::{HostEngine, HostMemory};
use iommu_addr::{Gpa, Range};

/// The first GPU, if there is one.
fn gpu() -> Option<Arc<Gpu>> {
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(error) => {
            println!("SKIP: {error}");
            return None;
        }
    };
    let first = driver.gpus().unwrap().first().unwrap().address.clone();
    Some(Gpu::open(&driver, &first).unwrap())
}

/// Of memory: the kernel pins no pages of a disk's files for good.
fn file(len: u64) -> File {
    let file = File::from(rustix::fs::memfd_create("gpu", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(len).unwrap();
    file
}

/// The suite's guest memory, in files that it does not begin with.
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

/// `slices` of the endpoints are the GPU's; the rest are apertures of other owners.
fn build(gpu: &Arc<Gpu>, slices: usize, settings: Settings) -> Parts {
    let memory = ram();
    for (endpoint, len) in &APERTURES[slices..] {
        memory.add_aperture(*endpoint, &file(*len), *len).unwrap();
    }
    let own = &APERTURES[..slices];
    let made = own.iter().map(|(endpoint, len)| (*endpoint, Slice::new(gpu, *len).unwrap())).collect();
    let engine = Arc::new(CudaEngine::new(made, memory.clone(), settings, None).unwrap());
    let member =
        |(endpoint, _): &(_, u64)| Member { endpoint: *endpoint, engine: engine.clone(), same_function: vec![] };
    let rest = Arc::new(HostEngine::new(memory.clone()));
    let fleet = Fleet::new(own.iter().map(member).collect(), vec![], rest, memory, None).unwrap();
    let memory = fleet.memory();
    Parts { engine: Arc::new(fleet), memory, advance: None }
}

#[test]
fn slices_of_one_gpu_conform() {
    let Some(gpu) = gpu() else { return };
    conformance::run(&|| build(&gpu, 2, Settings::default()));
}

#[test]
fn a_slice_beside_an_aperture_conforms() {
    let Some(gpu) = gpu() else { return };
    conformance::run(&|| build(&gpu, 1, Settings::default()));
}

#[test]
fn nothing_is_gathered_and_nobody_pauses() {
    let Some(gpu) = gpu() else { return };
    conformance::run(&|| build(&gpu, 1, Settings { spin: true, gather: 0, chunks: 2 }));
}
