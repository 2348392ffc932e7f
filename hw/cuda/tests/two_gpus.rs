//! Slices of two real GPUs. Each test says so if this machine has fewer.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{copy, endpoint, ends_of, fleet, own, transfer};
use hw_cuda::{CudaEngine, Gpu, Nvml, Settings, Slice};
use hw_engine::conformance::{self, APERTURES, Noise};
use hw_engine::proof::{Pair, Prover};
use hw_engine::{DmaEngine, EndpointKind, EndpointSpec, Owner, Submit};
use hw_host::HostMemory;
use iommu_addr::EndpointId;

const MIB: u64 = 1 << 20;

/// Two GPUs that reach each other, if there are.
fn gpus() -> Option<[Arc<Gpu>; 2]> {
    let driver = common::real()?;
    let found = driver.gpus().unwrap();
    let [one, other, ..] = found.as_slice() else {
        println!("SKIP: this machine has fewer than two GPUs");
        return None;
    };
    let gpus = [one, other].map(|gpu| Gpu::open(&driver, &gpu.address).unwrap());
    if gpus[0].peer(&gpus[1]).access && gpus[1].peer(&gpus[0]).access {
        return Some(gpus);
    }
    println!("SKIP: the first two GPUs of this machine do not reach each other");
    None
}

/// An engine over a slice of each GPU, the first of which are endpoints 0 and 1.
fn engine(gpus: &[Arc<Gpu>; 2], slices: [(EndpointId, u64); 2], memory: &Arc<HostMemory>) -> Arc<CudaEngine> {
    let made = gpus.iter().zip(slices).map(|(gpu, (id, len))| (id, Slice::new(gpu, len).unwrap())).collect();
    Arc::new(CudaEngine::new(made, memory.clone(), Settings::default(), None).unwrap())
}

/// Bytes that tell where they are from, and nobody could guess.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    Noise::new(seed).bytes(len)
}

fn read(engine: &CudaEngine, endpoint: usize, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    engine.read_own(self::endpoint(endpoint), offset, &mut bytes).unwrap();
    bytes
}

#[test]
fn slices_of_two_gpus_conform() {
    let Some(gpus) = gpus() else { return };
    conformance::run(&|| {
        let own = gpus.iter().zip(APERTURES).map(|(gpu, (id, len))| (id, Slice::new(gpu, len).unwrap()));
        common::parts(own.collect(), Settings::default())
    });
}

#[test]
fn bytes_go_both_ways_at_once() {
    let Some(gpus) = gpus() else { return };
    // Small ones that are gathered, and large ones; half of them for the sake of whoever gets the bytes.
    for (len, count) in [(4096_u64, 256_u64), (16 * MIB, 8), (MIB + 13, 32)] {
        let (half, bytes) = (len * count, usize::try_from(len * count).unwrap());
        let slices = [0, 1].map(|n| (endpoint(n), 2 * half));
        let engine = engine(&gpus, slices, &Arc::new(HostMemory::new()));
        let patterns = [pattern(len, bytes), pattern(!len, bytes)];
        for (n, pattern) in patterns.iter().enumerate() {
            engine.write_own(endpoint(n), 0, pattern).unwrap();
        }
        for job in 0..2 * count {
            let (from, at) = (usize::try_from(job % 2).unwrap(), job / 2 * len);
            let initiator = usize::try_from(job / 2 % 2).unwrap();
            let work = copy(own(1 - from, half + at), own(from, at), len);
            assert_eq!(engine.submit(&transfer(job, initiator, work)).unwrap(), Submit::Submitted);
        }
        let ends = ends_of(&*engine, usize::try_from(2 * count).unwrap());
        assert!(ends.iter().all(|end| end.result.is_ok() && end.bytes == len), "{ends:?}");
        for (n, pattern) in patterns.iter().enumerate() {
            assert!(read(&engine, 1 - n, half, bytes) == *pattern, "{len} bytes from GPU {n}");
        }
    }
}

#[test]
fn another_process_writes_from_one_gpu_into_the_others_memory() {
    const FD: &str = "TWO_GPUS_FD";
    const NAME: &str = "another_process_writes_from_one_gpu_into_the_others_memory";
    let (len, bytes) = (8 * MIB, 8 << 20);
    let Some(gpus) = gpus() else { return };
    if let Ok(fd) = std::env::var(FD) {
        // SAFETY: the parent has left it open for this.
        let fd = unsafe { OwnedFd::from_raw_fd(fd.parse().unwrap()) };
        let slices = vec![
            (endpoint(0), Slice::new(&gpus[0], len).unwrap()),
            (endpoint(1), Slice::import(&gpus[1], fd.as_fd(), len).unwrap()),
        ];
        let engine = CudaEngine::new(slices, Arc::new(HostMemory::new()), Settings::default(), None).unwrap();
        assert!(read(&engine, 1, 0, bytes) == pattern(1, bytes), "what the parent has written");
        engine.write_own(endpoint(0), 0, &pattern(2, bytes)).unwrap();
        engine.submit(&transfer(1, 0, copy(own(1, 0), own(0, 0), len))).unwrap();
        assert_eq!(ends_of(&engine, 1)[0].result, Ok(()));
        return;
    }
    let slice = Slice::new(&gpus[1], len).unwrap();
    let fd = slice.export().unwrap();
    let memory = Arc::new(HostMemory::new());
    let engine = CudaEngine::new(vec![(endpoint(1), slice)], memory, Settings::default(), None).unwrap();
    engine.write_own(endpoint(1), 0, &pattern(1, bytes)).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([NAME, "--exact", "--nocapture"]).env(FD, fd.as_raw_fd().to_string());
    let inherit = move || rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty()).map_err(Into::into);
    // SAFETY: it makes one system call.
    unsafe { child.pre_exec(inherit) };
    assert!(child.status().unwrap().success());
    assert!(read(&engine, 1, 0, bytes) == pattern(2, bytes), "what the other process has copied");
}

#[test]
fn two_gpus_are_proved_to_be_peers() {
    let Some(gpus) = gpus() else { return };
    let (memory, ids) = (Arc::new(HostMemory::new()), [endpoint(0), endpoint(1)]);
    let fleet = fleet(&engine(&gpus, ids.map(|id| (id, 2 * MIB)), &memory), &ids, &memory);
    let specs = ids.map(|id| EndpointSpec {
        id,
        kind: EndpointKind::Gpu,
        name: format!("gpu{id}"),
        memory_len: 2 * MIB,
        registers_len: 0,
        granularity: 4096,
        engines: 1,
    });
    let pairs = [(0, 1), (1, 0)].map(|(one, other)| Pair { accessor: &specs[one], owner: &specs[other] });
    let deadline = Instant::now() + Duration::from_secs(20);
    let view = fleet.memory();
    let prover = Prover { engine: &fleet, memory: &*view, unit: 4096, deadline, wait: &std::thread::sleep };
    assert_eq!(prover.prove(&pairs), [Ok(()), Ok(())]);
}

#[test]
fn both_libraries_tell_of_the_way() {
    let Some(gpus) = gpus() else { return };
    let nvml = match Nvml::load() {
        Ok(nvml) => nvml,
        Err(error) => return println!("SKIP: {error}"),
    };
    let meters = [0, 1].map(|n: usize| nvml.meter(&gpus[n].info().uuid).unwrap());
    for (one, other) in [(0, 1), (1, 0)] {
        let (peer, link) = (gpus[one].peer(&gpus[other]), meters[one].link(&meters[other]).unwrap());
        println!("GPU {one} to GPU {other}: {peer:?}, {link}");
    }
}
