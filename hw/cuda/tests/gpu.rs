//! The engine on a real GPU. Each test says so if this machine has none.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use hw_cuda::{Gpu, Settings, Slice};
use hw_engine::conformance::{self, APERTURES, Parts};

/// The first GPU, if there is one.
fn gpu() -> Option<Arc<Gpu>> {
    let driver = common::real()?;
    let first = driver.gpus().unwrap().first().unwrap().address.clone();
    Some(Gpu::open(&driver, &first).unwrap())
}

/// So many of the suite's endpoints are the GPU's; the rest are apertures of other owners.
fn build(gpu: &Arc<Gpu>, slices: usize, settings: Settings) -> Parts {
    let own = APERTURES.into_iter().take(slices);
    common::parts(own.map(|(endpoint, len)| (endpoint, Slice::new(gpu, len).unwrap())).collect(), settings)
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
