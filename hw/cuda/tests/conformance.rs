//! The suite that every engine passes, over a driver without a GPU that is as slow and as disorderly as it may be.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;

use common::Fake;
use hw_cuda::{Gpu, Settings, Slice};
use hw_engine::conformance::{self, APERTURES, Parts};

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
    let gpus = fake.gpus();
    let slice = |(n, (endpoint, len)): (usize, (_, u64))| {
        let gpu: &Arc<Gpu> = if layout == Layout::Together { &gpus[0] } else { &gpus[n] };
        (endpoint, Slice::new(gpu, len).unwrap())
    };
    let count = if layout == Layout::Alone { 1 } else { 2 };
    common::parts(APERTURES.into_iter().take(count).enumerate().map(slice).collect(), settings)
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
