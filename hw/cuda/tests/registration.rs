//! Memory of this process is registered once, and let go of when it has gone, not before.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use common::{CHUNK, Fake, World, copy, copy_all, endpoint, ends_of, own, ram, regions, transfer, until};
use hw_cuda::{CudaEngine, Settings, Slice};
use hw_engine::{DmaEngine, EngineError, Finished, JobId, Memory, MemoryError, Place, RamMap, RamRegion};
use hw_host::HostMemory;
use iommu_addr::Location;

const MIB: u64 = 1 << 20;

/// Where in guest memory that begins at 0 the chunks begin, but for the first one's.
fn seams(world: &World, len: u64) -> Vec<u64> {
    let address = world.memory.place(ram(0), 1).unwrap().address;
    let first = address.next_multiple_of(CHUNK) - address;
    (0..).map(|n| first + n * CHUNK).skip_while(|at| *at == 0).take_while(|at| *at < len).collect()
}

fn world(len: u64, settings: Settings) -> Option<World> {
    Some(World::new(Fake::cuda()?, 2 * MIB, &regions(&[(0, len)]), settings))
}

#[test]
fn a_chunk_is_registered_once_and_a_copy_goes_across() {
    const LEN: u64 = 3 * CHUNK;
    let Some(world) = world(LEN, Settings::default()) else { return };
    let before = world.fake.get("registers");
    let registers = || world.fake.get("registers") - before;
    let seam = seams(&world, LEN).into_iter().find(|seam| *seam > MIB).unwrap();
    let bytes: Vec<u8> = (0..200_000_u32).map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1]).collect();
    let len = bytes.len() as u64;
    world.memory.write(ram(seam - 100_001), &bytes).unwrap();
    world.run(copy(own(0, 5), ram(seam - 100_001), 100_001));
    assert_eq!(registers(), 1);
    for at in [seam - 8, seam - 4096, seam - len] {
        world.run(copy(own(0, 1 << 20), ram(at), 8));
    }
    assert_eq!(registers(), 1, "the same chunk");
    // Small and large, in and out, across the seam.
    world.run(copy(own(0, 5), ram(seam - 100_001), len));
    assert_eq!(registers(), 2);
    world.run(copy(ram(seam - 77), own(0, 5), 1000));
    world.run(copy(ram(seam + MIB), own(0, 5), len));
    assert_eq!(registers(), 2);
    let mut have = vec![0; bytes.len()];
    world.memory.read(ram(seam + MIB), &mut have).unwrap();
    assert!(have == bytes);
    world.memory.read(ram(seam - 77), &mut have[..1000]).unwrap();
    assert!(have[..1000] == bytes[..1000]);
    world.end();
}

#[test]
fn what_is_not_mapped_any_more_is_let_go_of_and_nothing_else() {
    let Some(fake) = Fake::cuda() else { return };
    let both = regions(&[(0, MIB), (MIB, MIB)]);
    let world = World::new(fake, 2 * MIB, &both, Settings::default());
    let before = world.fake.get("registrations");
    let count = || world.fake.get("registrations") - before;
    let touch = |at| world.run(copy(own(0, 0), ram(at), 64));
    touch(0);
    touch(MIB);
    assert_eq!(count(), 2);
    world.memory.replace(&both[..1]).unwrap();
    world.engine.memory_changed();
    assert_eq!(count(), 1);
    let registers = world.fake.get("registers");
    touch(0);
    assert_eq!(world.fake.get("registers"), registers, "it is still there");
    // The same bytes elsewhere keep their mapping; a further change concerns nobody.
    let moved = RamRegion { gpa: both[1].gpa, ..both[0].clone() };
    world.memory.replace(&[moved]).unwrap();
    world.engine.memory_changed();
    touch(MIB);
    assert_eq!((count(), world.fake.get("registers")), (1, registers));
    world.memory.replace(&[]).unwrap();
    world.engine.memory_changed();
    assert_eq!(count(), 0);
    world.end();
}

#[test]
fn what_a_transfer_uses_stays_until_it_has_ended() {
    for len in [64, MIB] {
        let Some(world) = world(MIB, Settings::default()) else { return };
        let before = world.fake.get("registrations");
        let count = || world.fake.get("registrations") - before;
        world.run(copy(own(0, 0), ram(0), 8));
        world.memory.fill(ram(0), MIB, u64::MAX).unwrap();
        world.fake.set("stall", 1);
        world.submit(1, copy(own(0, MIB), ram(0), len));
        assert!(world.engine.poll(&mut Vec::new()).is_some(), "it looks again");
        world.memory.replace(&[]).unwrap();
        world.engine.memory_changed();
        assert_eq!(count(), 1);
        world.fake.set("stall", 0);
        assert_eq!(world.ends(1)[0].result, Ok(()));
        assert_eq!(count(), 0);
        world.memory.replace(&regions(&[(0, MIB)])).unwrap();
        world.run(copy(ram(0), own(0, MIB), len));
        let mut last = [0; 8];
        world.memory.read(ram(len - 8), &mut last).unwrap();
        assert_eq!(last, [0xff; 8], "from the memory that was there before");
        world.end();
    }
}

#[test]
fn no_more_than_so_many_are_registered_and_the_oldest_goes() {
    const LEN: u64 = 6 * CHUNK;
    let Some(world) = world(LEN, Settings { chunks: 2, ..Settings::default() }) else { return };
    let (before, all) = (world.fake.get("registrations"), seams(&world, LEN));
    let is_new = |chunk: usize| {
        let registers = world.fake.get("registers");
        world.run(copy(own(0, 0), ram(all[chunk]), 8));
        assert!(world.fake.get("registrations") - before <= 2);
        world.fake.get("registers") > registers
    };
    let news: Vec<_> = [0, 1, 0, 2, 0, 1, 1, 0, 2].into_iter().map(is_new).collect();
    assert_eq!(news, [true, true, false, true, false, true, false, false, true]);
    // Whoever needs more at a time gets it, and gives it back.
    world.run(copy(own(0, 0), ram(all[0] - 8), 16));
    world.fake.is_obeyed();
    world.end();
}

#[test]
fn what_a_transfer_uses_does_not_go_for_want_of_room() {
    const LEN: u64 = 4 * CHUNK;
    let Some(world) = world(LEN, Settings { chunks: 1, ..Settings::default() }) else { return };
    let (before, all) = (world.fake.get("registrations"), seams(&world, LEN));
    let count = || world.fake.get("registrations") - before;
    world.fake.set("stall", 1);
    for (job, chunk) in [(1, 0), (2, 1), (3, 0)] {
        world.submit(job, copy(own(0, 0), ram(all[chunk]), 2 * MIB));
        until("it has begun", || world.fake.get("copies") == i64::try_from(job).unwrap());
    }
    assert_eq!(count(), 2);
    world.fake.set("stall", 0);
    assert!(world.ends(3).iter().all(|end| end.result.is_ok()));
    world.run(copy(own(0, 0), ram(all[1]), MIB));
    world.run(copy(own(0, 0), ram(all[2]), MIB));
    assert_eq!(count(), 1);
    world.end();
}

#[test]
fn a_host_that_gives_no_memory_to_the_gpu_fails_that_transfer_alone() {
    const LEN: u64 = 3 * CHUNK;
    let Some(world) = world(LEN, Settings::default()) else { return };
    let seam = seams(&world, LEN)[0];
    world.run(copy(own(0, 0), ram(seam - 8), 8));
    world.fake.set("room", world.fake.get("registered"));
    world.submit(1, copy(own(0, 0), ram(seam), 8));
    let refused = Finished::failed(JobId(1), EngineError::Device { code: 2 });
    assert_eq!(world.ends(1), [refused]);
    world.run(copy(own(0, 0), ram(seam - 8), 8));
    world.fake.set("room", 1 << 40);
    world.run(copy(own(0, 0), ram(seam), 8));
    world.end();
}

#[test]
fn many_threads_register_a_chunk_once() {
    let Some(world) = world(MIB, Settings::default()) else { return };
    let before = world.fake.get("registers");
    std::thread::scope(|scope| {
        for n in 0..4 {
            let world = &world;
            scope.spawn(move || world.submit(n, copy(own(0, 4096 * n), ram(4096 * n), 4096)));
        }
    });
    assert!(world.ends(4).iter().all(|end| end.result.is_ok()));
    assert_eq!(world.fake.get("registers") - before, 1);
    until("nothing is queued", || world.fake.get("queued") == 0);
    world.end();
}

/// What happens to an engine and its memory.
type Event = Box<dyn Fn(&CudaEngine, &HostMemory) + Send + Sync>;

/// Guest memory with which something happens just when a place is found for the engine's own thread.
struct Eventful {
    memory: HostMemory,
    engine: OnceLock<Weak<CudaEngine>>,
    found: AtomicU32,
    event: Event,
}

impl Eventful {
    /// As large as that, behind an engine.
    fn new(fake: &Fake, len: u64, event: Event) -> (Arc<CudaEngine>, Arc<Self>) {
        let (engine, found) = (OnceLock::new(), AtomicU32::new(0));
        let memory = Arc::new(Self { memory: HostMemory::new(), engine, found, event });
        memory.memory.replace(&regions(&[(0, len)])).unwrap();
        let slices = vec![(endpoint(0), Slice::new(&fake.gpus()[0], 2 * MIB).unwrap())];
        let engine = Arc::new(CudaEngine::new(slices, memory.clone(), Settings::default(), None).unwrap());
        memory.engine.set(Arc::downgrade(&engine)).unwrap();
        (engine, memory)
    }
}

impl Memory for Eventful {
    fn copy(&self, dst: Location, src: Location, len: u64) -> Result<(), MemoryError> {
        self.memory.copy(dst, src, len)
    }

    fn fill(&self, dst: Location, len: u64, pattern: u64) -> Result<(), MemoryError> {
        self.memory.fill(dst, len, pattern)
    }

    fn read(&self, src: Location, into: &mut [u8]) -> Result<(), MemoryError> {
        self.memory.read(src, into)
    }

    fn write(&self, dst: Location, from: &[u8]) -> Result<(), MemoryError> {
        self.memory.write(dst, from)
    }

    fn place(&self, at: Location, most: u64) -> Option<Place> {
        let place = self.memory.place(at, most);
        if self.found.fetch_add(1, Ordering::Relaxed) == 1 {
            (self.event)(&self.engine.get().unwrap().upgrade().unwrap(), &self.memory);
        }
        place
    }
}

#[test]
fn what_goes_while_it_is_registered_is_let_go_of() {
    let Some(fake) = Fake::cuda() else { return };
    let goes = |engine: &CudaEngine, memory: &HostMemory| {
        memory.replace(&[]).unwrap();
        engine.memory_changed();
    };
    let (engine, _memory) = Eventful::new(&fake, MIB, Box::new(goes));
    let before = fake.get("registrations");
    engine.submit(&transfer(1, 0, copy(own(0, 0), ram(0), 64))).unwrap();
    assert_eq!(ends_of(&*engine, 1)[0].result, Ok(()));
    until("it is let go of", || fake.get("registrations") == before);
    drop(engine);
    fake.is_left_clean();
}

#[test]
fn what_is_given_up_while_it_registers_memory_registers_no_more() {
    let Some(fake) = Fake::cuda() else { return };
    let (engine, memory) = Eventful::new(&fake, 4 * CHUNK, Box::new(|engine, _| engine.abort(JobId(1))));
    let before = fake.get("registers");
    let (len, job) = (MIB, JobId(1));
    // A place in each of three chunks.
    let places: Vec<_> = (0..3).map(|n| (ram(n * CHUNK), len / 4)).collect();
    engine.submit(&transfer(1, 0, copy_all(&[(own(0, 0), len / 4 * 3)], &places))).unwrap();
    assert_eq!(ends_of(&*engine, 1), [Finished::failed(job, EngineError::Aborted)]);
    assert_eq!((fake.get("registers"), memory.found.load(Ordering::Relaxed)), (before, 2));
    engine.submit(&transfer(2, 0, copy(own(0, 0), ram(0), 64))).unwrap();
    assert_eq!(ends_of(&*engine, 1)[0].result, Ok(()), "that was of the first one alone");
    engine.abort(job);
    drop((engine, memory));
    fake.is_left_clean();
}

/// Another engine may use memory a little longer, and nobody tells of that.
#[test]
fn what_somebody_else_used_when_the_table_changed_is_let_go_of_later() {
    let Some(world) = world(MIB, Settings::default()) else { return };
    let before = world.fake.get("registrations");
    world.run(copy(own(0, 0), ram(0), 64));
    let place = world.memory.place(ram(0), 64);
    world.memory.replace(&[]).unwrap();
    world.engine.memory_changed();
    assert_eq!(world.fake.get("registrations"), before + 1);
    drop(place);
    until("it is let go of", || {
        assert!(world.engine.poll(&mut Vec::new()).is_some(), "it looks again");
        world.fake.get("registrations") == before
    });
    world.end();
}
