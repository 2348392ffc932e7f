//! The proof passes an engine that does what it says, however slowly, and names what is wrong with one that does not.
#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hw_engine::conformance::FlatMemory;
use hw_engine::proof::{PLACES, Pair, ProofError, Prover};
use hw_engine::{
    DmaEngine, EndpointKind, EndpointSpec, EngineCaps, EngineError, Finished, JobId, Memory, Submit, Transfer, Work,
    copy_segments,
};
use iommu_addr::{ApertureOffset, EndpointId, Location};

const UNIT: u64 = 24;

/// What an engine does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// Ends one transfer a poll, and holds one at a time.
    Slow,
    /// Takes nothing.
    Refuses,
    /// Ends everything with an error.
    Fails,
    /// Ends nothing until it is quiet.
    Hangs,
    /// Reads once, and then remembers.
    Remembers,
    /// Always full.
    Full,
}

struct Engine {
    memory: Arc<FlatMemory>,
    manner: Manner,
    held: Mutex<Vec<Transfer>>,
    remembered: Mutex<HashMap<Location, Vec<u8>>>,
    submitted: Mutex<Vec<JobId>>,
}

impl Engine {
    fn run(&self, transfer: &Transfer) -> Finished {
        let Work::Copy { src, dst, route } = &transfer.work else { panic!("the proof copies") };
        assert!(src.iter().chain(dst).all(|segment| segment.len == UNIT), "as much as it may");
        if self.manner == Manner::Remembers {
            let mut bytes = vec![0; usize::try_from(UNIT).unwrap()];
            self.memory.read(src[0].at, &mut bytes).unwrap();
            let mut remembered = self.remembered.lock().unwrap();
            let known = remembered.entry(src[0].at).or_insert(bytes);
            self.memory.write(dst[0].at, known).unwrap();
            return Finished::moved(transfer.job, Ok(UNIT));
        }
        Finished::moved(transfer.job, copy_segments(&*self.memory, dst, src, *route))
    }
}

impl DmaEngine for Engine {
    fn caps(&self) -> EngineCaps {
        EngineCaps { max_transfer: 1 << 20, queue_depth: 1, reports_faults: true, max_mappings: u32::MAX }
    }

    fn submit(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
        let mut held = self.held.lock().unwrap();
        match self.manner {
            Manner::Refuses => Err(EngineError::Device { code: 3 }),
            Manner::Full => Err(EngineError::Busy),
            _ if !held.is_empty() => Err(EngineError::Busy),
            _ => {
                self.submitted.lock().unwrap().push(transfer.job);
                held.push(transfer.clone());
                Ok(Submit::Submitted)
            }
        }
    }

    fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        let mut held = self.held.lock().unwrap();
        match self.manner {
            Manner::Hangs => {}
            Manner::Fails => out
                .extend(held.drain(..).map(|transfer| Finished::failed(transfer.job, EngineError::Device { code: 9 }))),
            _ => out.extend(held.drain(..).map(|transfer| self.run(&transfer))),
        }
        None
    }

    fn abort(&self, _job: JobId) {}

    fn quiesce(&self, out: &mut Vec<Finished>) {
        // It had been about to end well.
        out.extend(self.held.lock().unwrap().drain(..).map(|transfer| self.run(&transfer)));
    }
}

fn spec(id: u16, memory_len: u64) -> EndpointSpec {
    let (id, name, kind) = (EndpointId::local(id), format!("e{id}"), EndpointKind::Gpu);
    EndpointSpec { id, kind, name, memory_len, registers_len: 0, granularity: 4096, engines: 1 }
}

struct World {
    memory: Arc<FlatMemory>,
    engine: Engine,
    specs: Vec<EndpointSpec>,
    waits: Cell<u32>,
}

impl World {
    /// Endpoints with a page of memory each, and one without; the memory holds something.
    fn new(manner: Manner, endpoints: u16) -> Self {
        let memory = Arc::new(FlatMemory::default());
        let mut specs: Vec<_> = (0..endpoints).map(|id| spec(id, 4096)).collect();
        for spec in &specs {
            let at = Location::Aperture { endpoint: spec.id, offset: ApertureOffset(0) };
            memory.add(at, spec.memory_len);
            memory.fill(at, spec.memory_len, !0).unwrap();
        }
        specs.push(spec(endpoints, 0));
        let (held, remembered, submitted) = Default::default();
        let engine = Engine { memory: Arc::clone(&memory), manner, held, remembered, submitted };
        Self { memory, engine, specs, waits: Cell::new(0) }
    }

    /// Every pair with an owner that has memory.
    fn pairs(&self) -> Vec<Pair<'_>> {
        let owners = self.specs.iter().filter(|owner| owner.memory_len > 0);
        let of = |owner| self.specs.iter().map(move |accessor| Pair { accessor, owner });
        owners.flat_map(of).filter(|pair| pair.accessor.id != pair.owner.id).collect()
    }

    fn prove(&self, patience: Duration) -> Vec<Result<(), ProofError>> {
        let wait = |_| self.waits.set(self.waits.get() + 1);
        let (engine, memory, deadline) = (&self.engine, &*self.memory, Instant::now() + patience);
        Prover { engine, memory, unit: UNIT, deadline, wait: &wait }.prove(&self.pairs())
    }
}

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn every_pair_of_a_slow_engine_is_proved_and_its_places_are_erased() {
    let world = World::new(Manner::Slow, 4);
    assert_eq!(world.prove(PATIENCE), [Ok(()); 4 * 3 + 4]);
    for (at, bytes) in world.memory.runs() {
        let (lent, rest) = bytes.split_at(usize::try_from(PLACES * UNIT).unwrap());
        // With every role, an endpoint has lent all its places.
        assert!(lent.iter().all(|byte| *byte == 0), "erased: {at:?}");
        assert!(rest.iter().all(|byte| *byte == 0xff), "left alone: {at:?}");
    }
    let mut jobs = world.engine.submitted.lock().unwrap().clone();
    assert_eq!(jobs.len(), 3 * 16, "read, write, read");
    jobs.sort_unstable();
    jobs.dedup();
    assert_eq!(jobs.len(), 3 * 16, "each has a name of its own");
}

#[test]
fn engine_that_remembers_what_it_read_is_stale() {
    let results = World::new(Manner::Remembers, 2).prove(PATIENCE);
    // Without memory of its own the accessor writes where the owner looks, and what it writes is old.
    assert_eq!(results[0], Err(ProofError::Stale));
    assert_eq!(results[1], Err(ProofError::Dropped));
}

#[test]
fn errors_of_the_engine_are_kept() {
    let code = |code| Err(ProofError::Refused(EngineError::Device { code }));
    assert_eq!(World::new(Manner::Refuses, 2).prove(PATIENCE), [code(3); 4]);
    assert_eq!(World::new(Manner::Fails, 2).prove(PATIENCE), [code(9); 4]);
}

#[test]
fn engine_that_hangs_or_is_full_runs_out_of_time_and_is_quiet_then() {
    for manner in [Manner::Hangs, Manner::Full] {
        let world = World::new(manner, 2);
        assert_eq!(world.prove(Duration::from_millis(20)), [Err(ProofError::TimedOut); 4]);
        assert!(world.waits.get() > 0, "it waited");
        assert!(world.engine.held.lock().unwrap().is_empty(), "nothing is left in the engine");
        let mut bytes = [0; 8];
        let places = world.specs[..2].iter().flat_map(|spec| {
            let endpoint = spec.id;
            (0..PLACES).map(move |place| Location::Aperture { endpoint, offset: ApertureOffset(place * UNIT) })
        });
        for at in places {
            world.memory.read(at, &mut bytes).unwrap();
            assert!(bytes == [0; 8] || bytes == [0xff; 8], "no pattern stays: {bytes:?} at {at:?}");
        }
    }
    let late = World::new(Manner::Slow, 2);
    assert_eq!(late.prove(Duration::ZERO), [Err(ProofError::TimedOut); 4]);
    assert!(late.engine.submitted.lock().unwrap().is_empty(), "nothing begins once time is up");
}

#[test]
fn slice_without_room_is_not_proved() {
    let world = World::new(Manner::Slow, 2);
    let wait = |_| ();
    let (engine, memory, deadline) = (&world.engine, &*world.memory, Instant::now() + PATIENCE);
    let prover = Prover { engine, memory, unit: 8192, deadline, wait: &wait };
    assert!(matches!(prover.prove(&world.pairs())[..], [Err(ProofError::Memory(_)), ..]));
}
