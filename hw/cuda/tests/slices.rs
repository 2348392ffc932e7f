//! Memory of GPUs: zeroed, counted, handed to others; and GPUs that reach each other's, or do not.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use common::{Fake, World, copy, endpoint, own, ram, regions, transfer};
use hw_cuda::{CudaEngine, Driver, Gpu, Peer, Settings, Slice};
use hw_engine::{Atomic, AtomicOp, DmaEngine, EngineError, Fleet, Member, Memory, Owner, Route, Work};
use hw_host::{HostEngine, HostMemory};
use iommu_addr::{Location, Segment};

const MIB: u64 = 1 << 20;

fn gpu(fake: &Fake) -> Arc<Gpu> {
    fake.gpus().remove(0)
}

/// An engine over one slice and nothing else.
fn over(slice: Slice) -> CudaEngine {
    CudaEngine::new(vec![(endpoint(0), slice)], Arc::new(HostMemory::new()), Settings::default(), None).unwrap()
}

fn bytes(engine: &CudaEngine, len: usize) -> Vec<u8> {
    let mut bytes = vec![1; len];
    engine.read_own(endpoint(0), 0, &mut bytes).unwrap();
    bytes
}

#[test]
fn memory_is_zero_when_somebody_gets_it_also_what_he_cannot_see() {
    let Some(fake) = Fake::cuda() else { return };
    let gpu = gpu(&fake);
    for len in [6 << 20, (2 << 20) + 4096, 100] {
        let slice = Slice::new(&gpu, len).unwrap();
        assert_eq!(slice.len(), len);
        // The other end of the descriptor has all of what the driver gave.
        let file = File::from(slice.export().unwrap());
        let mut all = vec![1; usize::try_from(len.next_multiple_of(Slice::GRANULE)).unwrap()];
        file.read_exact_at(&mut all, 0).unwrap();
        assert!(all.iter().all(|byte| *byte == 0), "{len}");
        let engine = over(slice);
        assert!(bytes(&engine, usize::try_from(len).unwrap()).iter().all(|byte| *byte == 0));
        engine.write_own(endpoint(0), 0, &[0xee; 100]).unwrap();
        assert!(engine.write_own(endpoint(0), len - 99, &[0; 100]).is_err());
        assert!(engine.read_own(endpoint(0), u64::MAX, &mut [0; 2]).is_err());
        assert!(engine.read_own(endpoint(1), 0, &mut [0; 2]).is_err());
    }
    drop(gpu);
    fake.is_left_clean();
}

#[test]
fn a_gpu_that_has_no_more_memory_says_so_and_keeps_none() {
    let Some(fake) = Fake::cuda() else { return };
    let gpu = gpu(&fake);
    let before = fake.get("allocations");
    fake.set("oom", 1);
    assert_eq!(
        Slice::new(&gpu, 4 * MIB).unwrap_err().to_string(),
        "GPU 0000:1a:00.0 has no 4194304 bytes of memory left; give its slices less, or end what else uses it"
    );
    assert!(Slice::new(&gpu, 0).is_err() && Slice::new(&gpu, 2 << 30).is_err() && Slice::new(&gpu, u64::MAX).is_err());
    let slice = Slice::new(&gpu, 4 * MIB).unwrap();
    assert_eq!(fake.get("allocations"), before + 1);
    // What an engine needs for itself.
    fake.set("oom", 1);
    let made = CudaEngine::new(vec![(endpoint(0), slice)], Arc::new(HostMemory::new()), Settings::default(), None);
    let Err(error) = made else { panic!("there is no memory") };
    assert!(error.to_string().contains("has no 2097152 bytes of memory left"), "{error}");
    drop(gpu);
    fake.is_left_clean();
}

#[test]
fn a_slice_is_handed_to_another_process() {
    const FD: &str = "FAKE_SLICE_FD";
    const LIBRARY: &str = "FAKE_SLICE_LIBRARY";
    const NAME: &str = "a_slice_is_handed_to_another_process";
    if let (Ok(fd), Ok(library)) = (std::env::var(FD), std::env::var(LIBRARY)) {
        // SAFETY: the parent has left it open for this.
        let fd = unsafe { OwnedFd::from_raw_fd(fd.parse().unwrap()) };
        let driver = Driver::load_from(library.as_ref()).unwrap();
        let gpu = Gpu::open(&driver, "0000:1b:00.0").unwrap();
        let slice = Slice::import(&gpu, std::os::fd::AsFd::as_fd(&fd), 4 * MIB).unwrap();
        drop(fd);
        let engine = over(slice);
        assert_eq!(bytes(&engine, 5), b"there");
        engine.write_own(endpoint(0), 4 * MIB - 4, b"back").unwrap();
        return;
    }
    let Some(fake) = Fake::cuda() else { return };
    fake.set("gpus", 2);
    let gpu = fake.gpus().remove(1);
    let slice = Slice::new(&gpu, 4 * MIB).unwrap();
    let fd = slice.export().unwrap();
    let engine = over(slice);
    engine.write_own(endpoint(0), 0, b"there").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([NAME, "--exact", "--nocapture"]).env("FAKE_CUDA", "gpus=2").env(LIBRARY, fake.path());
    let number = fd.as_raw_fd();
    child.env(FD, number.to_string());
    let inherit = move || rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty()).map_err(Into::into);
    // SAFETY: it makes one system call.
    unsafe { child.pre_exec(inherit) };
    assert!(child.status().unwrap().success());
    drop(child);
    let mut back = [0; 4];
    engine.read_own(endpoint(0), 4 * MIB - 4, &mut back).unwrap();
    assert_eq!(&back, b"back");
    drop((engine, gpu));
    fake.is_left_clean();
}

#[test]
fn what_is_no_slice_or_of_another_length_is_not_taken() {
    let Some(fake) = Fake::cuda() else { return };
    let gpu = gpu(&fake);
    let slice = Slice::new(&gpu, 4 * MIB).unwrap();
    let (fd, file) = (slice.export().unwrap(), common::file(4 * MIB));
    for len in [0, 2 * MIB, 6 * MIB] {
        assert!(Slice::import(&gpu, std::os::fd::AsFd::as_fd(&fd), len).is_err(), "{len}");
    }
    assert!(Slice::import(&gpu, std::os::fd::AsFd::as_fd(&file), 4 * MIB).is_err());
    assert_eq!(slice.dma_buf().map(drop).ok(), Some(()));
    fake.set("export_error", 304);
    assert!(slice.export().unwrap_err().to_string().contains("CUDA_ERROR_OPERATING_SYSTEM (304)"));
    drop((slice, gpu));
    fake.is_left_clean();
}

/// A fleet over a slice of each of two GPUs.
fn fleet(world: &World) -> Fleet {
    let member = |n| Member { endpoint: endpoint(n), engine: world.engine.clone(), same_function: Vec::new() };
    let rest = Arc::new(HostEngine::new(world.memory.clone()));
    Fleet::new(vec![member(0), member(1)], Vec::new(), rest, world.memory.clone(), None).unwrap()
}

#[test]
fn gpus_copy_straight_if_they_reach_each_other_and_through_the_host_if_not() {
    for peers in [true, false] {
        let Some(fake) = Fake::cuda() else { return };
        fake.set("gpus", 2);
        fake.set("peers", i64::from(peers));
        let world = World::new(fake, 4 * MIB, &regions(&[(0, MIB)]), Settings::default());
        let fleet = fleet(&world);
        let in_one_hop = |initiator, dst, src| {
            let segment = |at| [Segment { at, len: 4096 }];
            fleet.in_one_hop(endpoint(initiator), &segment(dst), &segment(src))
        };
        for (from, to) in [(0, 1), (1, 0)] {
            for initiator in [0, 1] {
                assert_eq!(in_one_hop(initiator, own(to, 0), own(from, 0)), peers);
                assert!(in_one_hop(initiator, own(initiator, 0), own(initiator, 8192)));
                assert!(
                    in_one_hop(initiator, own(initiator, 0), ram(0))
                        && in_one_hop(initiator, ram(0), own(initiator, 0))
                );
                assert!(!in_one_hop(initiator, ram(0), ram(4096)), "neither end is a GPU's");
            }
            assert_eq!(in_one_hop(from, ram(0), own(to, 0)), peers, "the initiator has to reach it");
            let fills = |dst: &[Location]| {
                let dst: Vec<_> = dst.iter().map(|at| Segment { at: *at, len: 4096 }).collect();
                fleet.fills(endpoint(from), &dst)
            };
            assert!(fills(&[own(from, 0)]) && fills(&[ram(0)]));
            assert_eq!([fills(&[own(to, 0)]), fills(&[own(from, 0), own(to, 0)])], [peers; 2]);
        }
        let memory = fleet.memory();
        for (job, from, to) in [(1, 0, 1), (2, 1, 0)] {
            let bytes: Vec<u8> = (0..200_000_u32).map(|n| n.to_le_bytes()[usize::from(job == 1)]).collect();
            memory.write(own(from, 3), &bytes).unwrap();
            let mut work = copy(own(to, 1 << 20), own(from, 3), bytes.len() as u64);
            let Work::Copy { route, .. } = &mut work else { unreachable!("it is one") };
            *route = if peers { Route::Direct } else { Route::Staged };
            fleet.submit(&transfer(job, from, work)).unwrap();
            assert_eq!(common::ends_of(&fleet, 1)[0].result, Ok(()));
            let mut have = vec![0; bytes.len()];
            memory.read(own(to, 1 << 20), &mut have).unwrap();
            assert!(have == bytes);
        }
        drop((memory, fleet));
        world.end();
    }
}

#[test]
fn who_has_the_bytes_writes_them_whoever_wants_them() {
    let Some(fake) = Fake::cuda() else { return };
    fake.set("gpus", 2);
    let world = World::new(fake, 4 * MIB, &[], Settings::default());
    for (job, (from, initiator)) in [(0, 0), (0, 1), (1, 0), (1, 1)].into_iter().enumerate() {
        let bytes = [u8::try_from(job + 1).unwrap(); 3000];
        world.engine.write_own(endpoint(from), 0, &bytes).unwrap();
        // The other GPU does nothing.
        world.fake.set("stall", 1 << (1 - from));
        let work = copy(own(1 - from, MIB), own(from, 0), 3000);
        world.engine.submit(&transfer(job as u64, initiator, work)).unwrap();
        assert_eq!(world.ends(1)[0].result, Ok(()));
        world.fake.set("stall", 0);
        let mut have = [0; 3000];
        world.engine.read_own(endpoint(1 - from), MIB, &mut have).unwrap();
        assert_eq!(have, bytes, "from {from}, for {initiator}");
    }
    world.end();
}

#[test]
fn longer_transfers_are_gathered_where_the_way_is_faster() {
    let Some(fake) = Fake::cuda() else { return };
    fake.set("gpus", 2);
    let world = World::new(fake, 8 * MIB, &[], Settings::default());
    let calls = || ["batched", "copies"].map(|name| world.fake.get(name));
    let submit = |job: u64, to: usize, len: u64| {
        let work = copy(own(to, 0), own(0, 0), len);
        let work = if to == 0 { copy(own(0, 4 * MIB), own(0, 0), len) } else { work };
        world.engine.submit(&transfer(job, 0, work)).unwrap();
    };
    for to in [0, 1] {
        let before = calls();
        (0..4).for_each(|job| submit(job, to, 4 * MIB));
        assert_eq!(calls(), before, "within the GPU or to the other one: {to}");
        assert!(world.ends(4).iter().all(|end| (end.bytes, end.result) == (4 * MIB, Ok(()))));
        assert_eq!(calls(), [before[0] + 4, before[1]]);
    }
    let before = calls();
    submit(1, 1, 4 * MIB + 1);
    assert_eq!(calls(), [before[0], before[1] + 1]);
    assert_eq!(world.ends(1)[0].result, Ok(()));
    world.end();
}

#[test]
fn whoever_has_native_atomics_changes_the_word_itself() {
    let add = |at| Work::Atomic { at, atomic: Atomic { op: AtomicOp::Add, len: 8, operand: 5 } };
    for (name, able) in
        [("", [true, true]), ("peer_atomics", [true, false]), ("peers", [true, false]), ("jit", [false; 2])]
    {
        let Some(fake) = Fake::cuda() else { return };
        fake.set("gpus", 2);
        if !name.is_empty() {
            fake.set(name, 0);
        }
        let world = World::new(fake, 4 * MIB, &regions(&[(0, MIB)]), Settings::default());
        assert_eq!([0, 1].map(|by| world.engine.has_atomics(endpoint(by), own(0, 8))), able, "{name}");
        // A word that is not aligned, or not there in full.
        for (at, len) in [(own(0, 4), 8), (own(0, 4 * MIB - 4), 8), (own(0, 2), 4)] {
            let atomic = Atomic { op: AtomicOp::Add, len, operand: 1 };
            let submitted = world.engine.submit(&transfer(9, 0, Work::Atomic { at, atomic }));
            assert_eq!(submitted, Err(EngineError::NO_ATOMICS), "{at:?}");
        }
        for at in [own(0, 4 * MIB), own(7, 0), ram(0)] {
            assert!(!world.engine.has_atomics(endpoint(0), at), "{name}: {at:?}");
        }
        for (by, was) in (0..2).filter(|by| able[*by]).zip([0, 5]) {
            // The other GPU does nothing.
            world.fake.set("stall", 1 << (1 - by));
            world.engine.submit(&transfer(1, by, add(own(0, 8)))).unwrap();
            let ends = world.ends(1);
            world.fake.set("stall", 0);
            assert_eq!((ends[0].bytes, ends[0].result, ends[0].value), (8, Ok(()), was), "{name}");
        }
        // Asked all the same, it does nothing.
        for by in (0..2).filter(|by| !able[*by]) {
            let submitted = world.engine.submit(&transfer(1, by, add(own(0, 8))));
            assert_eq!(submitted, Err(EngineError::NO_ATOMICS), "{name}");
        }
        world.end();
    }
}

#[test]
fn how_gpus_reach_each_other_is_said() {
    let Some(fake) = Fake::cuda() else { return };
    fake.set("gpus", 2);
    let gpus = fake.gpus();
    let peer = |numbers: &[(&str, i64)]| {
        numbers.iter().for_each(|(name, value)| fake.set(name, *value));
        gpus[0].peer(&gpus[1])
    };
    assert_eq!(peer(&[]), Peer { access: true, atomics: true, rank: 0 });
    assert_eq!(peer(&[("peer_rank", 3), ("peer_atomics", 0)]), Peer { access: true, atomics: false, rank: 3 });
    let none = Peer { access: false, atomics: false, rank: 0 };
    assert_eq!(gpus[0].peer(&gpus[0]), none, "it is none of its own");
    assert_eq!(peer(&[("peers", 0)]), none);
}

#[test]
fn a_fill_reaches_slices_of_gpus_that_do_not_reach_each_other() {
    let Some(fake) = Fake::cuda() else { return };
    fake.set("gpus", 2);
    fake.set("peers", 0);
    let world = World::new(fake, 4 * MIB, &regions(&[(0, MIB)]), Settings::default());
    let segment = |(at, len)| Segment { at, len };
    for pattern in [0x0807_0605_0403_0201_u64, 0] {
        for initiator in [0, 1] {
            let dst = [(own(1, 0), 13), (own(0, 100), 30), (ram(0), 9), (own(1, 64), 8)].map(segment);
            let work = Work::Fill { dst: dst.into_iter().collect(), pattern };
            world.engine.submit(&transfer(1, initiator, work)).unwrap();
            let ends = world.ends(1);
            assert_eq!((ends[0].bytes, ends[0].result), (60, Ok(())));
            let mut have = vec![0xaa; 60];
            world.engine.read_own(endpoint(1), 0, &mut have[..13]).unwrap();
            world.engine.read_own(endpoint(0), 100, &mut have[13..43]).unwrap();
            world.memory.read(ram(0), &mut have[43..52]).unwrap();
            world.engine.read_own(endpoint(1), 64, &mut have[52..]).unwrap();
            assert!(have.into_iter().eq(pattern.to_le_bytes().into_iter().cycle().take(60)));
        }
    }
    world.end();
}

#[test]
fn an_engine_has_as_many_gpus_as_it_is_given() {
    let Some(fake) = Fake::cuda() else { return };
    fake.set("gpus", 20);
    let world = World::new(fake, 2 * MIB, &[], Settings::default());
    for n in 0..20 {
        world.engine.submit(&transfer(n as u64, n, copy(own(n, 0), own(19 - n, 4096), 4096))).unwrap();
    }
    assert!(world.ends(20).iter().all(|end| end.result.is_ok()));
    world.end();
}
