//! What breaks a context is the end of its engine, which says so, and of nothing else.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};

use common::{Fake, World, copy, endpoint, own, ram, regions, transfer, until};
use hw_cuda::{CudaEngine, Driver, Gpu, Settings, Slice};
use hw_engine::{Atomic, AtomicOp, DmaEngine, EngineError, Finished, Memory, Owner, RamMap, Work};
use hw_host::HostMemory;

const MIB: u64 = 1 << 20;
/// Guest memory that nothing has used.
const OTHER: u64 = 1 << 40;

/// GPUs, and an engine for each of them that is told to have one.
fn world(gpus: i64) -> Option<World> {
    let fake = Fake::cuda()?;
    fake.set("gpus", gpus);
    // It need not be told to flush, and so is not asked anything by that.
    fake.set("attribute 118", 200);
    let world = World::new(fake, 4 * MIB, &regions(&[(0, 8 * MIB), (OTHER, MIB)]), Settings::default());
    world.run(copy(own(0, 0), ram(0), 8));
    Some(world)
}

/// What an engine says when it is lost.
fn listen(engine: &CudaEngine) -> Arc<Mutex<Vec<String>>> {
    let heard = Arc::<Mutex<Vec<String>>>::default();
    let hears = Arc::clone(&heard);
    engine.on_lost(Box::new(move |error| hears.lock().unwrap().push(error.to_string())));
    heard
}

/// One of every kind: large, small, filled, to be registered first, atomic, and a flush.
fn begin_all(world: &World) -> usize {
    let fill = |pattern| {
        let dst = [iommu_addr::Segment { at: own(0, 0), len: 4096 }];
        Work::Fill { dst: dst.into_iter().collect(), pattern }
    };
    let works = [
        copy(ram(0), own(0, 0), MIB),
        copy(own(0, MIB), ram(2 * MIB), MIB),
        copy(own(0, 2 * MIB), own(0, 0), MIB),
        copy(own(0, 0), ram(64), 64),
        fill(0),
        fill(0x0102),
        copy(own(0, 0), ram(OTHER), 64),
        Work::Atomic { at: own(0, 8), atomic: Atomic { op: AtomicOp::Add, len: 8, operand: 1 } },
        Work::Flush,
    ];
    let count = works.len();
    works.into_iter().enumerate().for_each(|(job, work)| world.submit(job as u64, work));
    count
}

/// Collects ends until the engine says that it is lost, and then until the streams have nothing any more.
fn ends_until_lost(world: &World, said: &str, heard: &Mutex<Vec<String>>) -> Vec<Finished> {
    let mut ends = Vec::new();
    let mut until = |what, is_so: &dyn Fn() -> bool| {
        until(what, || {
            world.engine.poll(&mut ends);
            is_so()
        });
    };
    until("it says so", &|| !heard.lock().unwrap().is_empty());
    until("streams have nothing", &|| world.fake.get("queued") == 0);
    world.engine.poll(&mut ends);
    let again = world.engine.submit(&transfer(99, 0, copy(own(0, 0), ram(0), 8)));
    assert_eq!(again, Err(EngineError::LOST));
    assert_eq!(world.engine.read_own(endpoint(0), 0, &mut [0; 8]), Err(EngineError::LOST));
    assert_eq!(world.engine.write_own(endpoint(0), 0, &[0; 8]), Err(EngineError::LOST));
    let heard = heard.lock().unwrap();
    assert!(heard.len() == 1 && heard[0].contains(said), "{heard:?}");
    ends
}

/// Each has ended once at most, and what has not ended well has moved nothing.
fn are_told_once(ends: &[Finished], count: usize) {
    let jobs: BTreeSet<_> = ends.iter().map(|end| end.job.0).collect();
    assert!(jobs.len() == ends.len() && jobs.iter().all(|job| *job < count as u64), "{ends:?}");
    assert!(ends.iter().all(|end| end.result.is_ok() || (end.bytes == 0 && end.result != Err(EngineError::Busy))));
    // A flush moves nothing.
    assert!(jobs.contains(&(count as u64 - 1)), "{ends:?}");
}

#[test]
fn a_context_that_fails_ends_what_it_carries_out_and_what_it_has_not_begun() {
    for after in 0..12 {
        let Some(world) = world(1) else { return };
        let heard = listen(&world.engine);
        world.fake.set("stall", 1);
        let count = begin_all(&world);
        world.engine.doorbell();
        world.fake.set("fault_after", after);
        world.fake.set("stall", 0);
        let ends = ends_until_lost(&world, "CUDA_ERROR_ILLEGAL_ADDRESS (700)", &heard);
        are_told_once(&ends, count);
        let World { engine, fake, .. } = world;
        drop(engine);
        fake.is_obeyed();
    }
}

/// Whoever is told of an end may give the memory to somebody else.
#[test]
fn what_a_broken_context_carries_out_does_not_end_before_that() {
    let Some(world) = world(1) else { return };
    let heard = listen(&world.engine);
    world.fake.set("stall", 1);
    // Each in a lane of its own.
    let lens = [64, MIB, 64];
    let works = [copy(ram(0), own(0, 0), 64), copy(own(0, MIB), own(0, 0), MIB), copy(own(0, 2 * MIB), own(0, 0), 64)];
    works.into_iter().enumerate().for_each(|(job, work)| world.submit(job as u64, work));
    world.engine.doorbell();
    until("each has a copy and the word behind it", || world.fake.get("queued") == 6);
    // One stream does one thing, and that wrongly.
    world.fake.set("fault_after", 0);
    world.fake.set("steps", 1);
    let mut ends = Vec::new();
    until("it says so", || {
        world.engine.poll(&mut ends);
        !heard.lock().unwrap().is_empty()
    });
    world.memory.replace(&[]).unwrap();
    world.engine.memory_changed();
    world.engine.quiesce(&mut ends);
    assert!(ends.is_empty(), "{ends:?}");
    world.fake.set("stall", 0);
    ends = world.ends(2);
    assert!(
        ends.iter().all(|end| (end.bytes, end.result) == (lens[usize::try_from(end.job.0).unwrap()], Ok(()))),
        "{ends:?}"
    );
    assert_eq!(world.fake.get("queued"), 0);
    assert!(
        world.engine.poll(&mut ends).is_some() && ends.len() == 2,
        "nobody can say that of the third one: {ends:?}"
    );
    let World { engine, fake, .. } = world;
    drop(engine);
    fake.is_obeyed();
}

#[test]
fn a_gpu_that_is_lost_is_told_of_and_takes_nothing_more() {
    for (code, said) in [(46, "CUDA_ERROR_DEVICE_UNAVAILABLE (46)"), (999, "CUDA_ERROR_UNKNOWN (999)")] {
        let Some(world) = world(1) else { return };
        let heard = listen(&world.engine);
        world.fake.set("stall", 1);
        let count = begin_all(&world);
        world.fake.set("lost_code", code);
        world.fake.set("lost", 1);
        let ends = ends_until_lost(&world, said, &heard);
        are_told_once(&ends, count);
        assert!(ends.iter().all(|end| end.result.is_err()), "{ends:?}");
        world.fake.is_obeyed();
    }
}

#[test]
fn whoever_asks_late_is_told_too() {
    let Some(world) = world(1) else { return };
    world.fake.set("fault_after", 0);
    world.submit(1, copy(ram(0), own(0, 0), MIB));
    until("it is lost", || {
        world.engine.poll(&mut Vec::new());
        world.engine.read_own(endpoint(0), 0, &mut [0; 8]) == Err(EngineError::LOST)
    });
    assert_eq!(listen(&world.engine).lock().unwrap().len(), 1);
}

#[test]
fn what_the_owner_waits_for_ends_when_the_context_fails() {
    let Some(world) = world(1) else { return };
    let heard = listen(&world.engine);
    world.fake.set("fault_after", 0);
    let read = world.engine.read_own(endpoint(0), 0, &mut [0; 64]);
    assert_eq!(read, Err(EngineError::Device { code: 700 }));
    assert_eq!(heard.lock().unwrap().len(), 1);
    assert_eq!(world.engine.write_own(endpoint(0), 0, &[0; 8]), Err(EngineError::LOST));
}

#[test]
fn another_gpus_engine_goes_on() {
    let Some(world) = world(2) else { return };
    let gpus = world.fake.gpus();
    let slices = vec![(endpoint(0), Slice::new(&gpus[1], 2 * MIB).unwrap())];
    let memory = Arc::new(HostMemory::new());
    let other = CudaEngine::new(slices, memory, Settings::default(), None).unwrap();
    let heard = [listen(&world.engine), listen(&other)].map(|heard| move || heard.lock().unwrap().len());
    world.fake.set("stall", 1);
    world.submit(1, copy(ram(0), own(0, 0), MIB));
    world.fake.set("fault_after", 0);
    world.fake.set("stall", 0);
    until("it is lost", || {
        world.engine.poll(&mut Vec::new());
        heard[0]() == 1
    });
    let mut ends = Vec::new();
    for job in 0..4 {
        other.submit(&transfer(job, 0, copy(own(0, 0), own(0, MIB), MIB))).unwrap();
    }
    other.quiesce(&mut ends);
    assert!(ends.len() == 4 && ends.iter().all(|end| end.result.is_ok()), "{ends:?}");
    assert_eq!(heard.map(|count| count()), [1, 0]);
}

#[test]
fn a_transfer_of_a_gpu_that_works_does_not_end_before_its_bytes_are_moved() {
    let Some(world) = world(2) else { return };
    let heard = listen(&world.engine);
    world.memory.fill(ram(0), 8 * MIB, 0).unwrap();
    world.engine.write_own(endpoint(1), 0, &vec![1; 1 << 20]).unwrap();
    // The second one takes its time, and the first one fails meanwhile.
    world.fake.set("stall", 2);
    let submit = |job, gpu: usize, at, len| {
        world.engine.submit(&transfer(job, gpu, copy(ram(at), own(gpu, 0), len))).unwrap();
    };
    submit(1, 1, 0, MIB);
    submit(2, 1, MIB, 64);
    world.engine.doorbell();
    world.fake.set("fault_after", 0);
    submit(3, 0, 2 * MIB, MIB);
    let mut ends = Vec::new();
    until("it is lost", || {
        world.engine.poll(&mut ends);
        heard.lock().unwrap().len() == 1
    });
    assert!(world.engine.poll(&mut ends).is_some() && ends.is_empty(), "{ends:?}");
    world.memory.replace(&[]).unwrap();
    world.engine.memory_changed();
    world.fake.set("stall", 0);
    assert_eq!(world.ends(2).len(), 2);
    until("it is quiet", || world.fake.get("queued") == 0);
    world.fake.is_obeyed();
}

#[test]
fn a_driver_that_cannot_be_used_is_one_clear_sentence() {
    let Some(fake) = Fake::cuda() else { return };
    let said = |fake: &Fake| Driver::load_from(fake.path()).unwrap_err().to_string();
    for (code, what) in [
        (
            100,
            "cuInit failed with CUDA_ERROR_NO_DEVICE (100); no GPU is visible to this process: may its user open /dev/nvidia*?",
        ),
        (
            803,
            "cuInit failed with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803); the kernel's driver and the library are of different versions",
        ),
        (12345, "cuInit failed with an error without a name (12345)"),
    ] {
        fake.set("init_error", code);
        assert_eq!(said(&fake), what);
    }
    let Some(old) = Fake::cuda_of(11000) else { return };
    assert_eq!(said(&old), "The CUDA driver has no cuStreamWriteValue32_v2; it must be of CUDA 12.0 or newer");
    let Err(none) = Driver::load_from(Path::new("libcuda-of-nobody.so.1")) else { panic!("there is none") };
    assert!(none.to_string().starts_with("This machine has no CUDA driver (libcuda-of-nobody.so.1); "));
}

#[test]
fn a_gpu_is_found_by_what_it_is_called_and_must_be_able_to_do_what_is_needed() {
    let Some(fake) = Fake::cuda() else { return };
    fake.set("gpus", 2);
    let driver = fake.driver();
    let uuid = "GPU-00112233-4455-6677-8899-aabbccddee01";
    for which in [uuid, &uuid.to_uppercase(), "0000:1b:00.0", "00000000:1B:00.0"] {
        let gpu = Gpu::open(&driver, which).unwrap();
        let info = gpu.info();
        assert_eq!((info.ordinal, info.name.as_str(), info.address.as_str()), (1, "Fake GPU 1", "0000:1b:00.0"));
        assert_eq!((info.uuid.as_str(), info.memory_len), (uuid, 1 << 30));
    }
    assert_eq!(fake.get("contexts"), 0, "whoever opened it has gone");
    let error = Gpu::open(&driver, "0000:1c:00.0").unwrap_err().to_string();
    assert!(error.contains("no GPU 0000:1c:00.0") && error.contains(uuid) && error.contains("0000:1a:00.0"), "{error}");
    for attribute in [91, 99, 102, 103] {
        fake.set(&format!("attribute {attribute}"), 0);
        let error = Gpu::open(&driver, uuid).unwrap_err().to_string();
        assert!(error.starts_with("GPU 0000:1b:00.0 cannot "), "{error}");
        fake.set(&format!("attribute {attribute}"), 1);
    }
    assert_eq!(fake.get("contexts"), 0);
}
