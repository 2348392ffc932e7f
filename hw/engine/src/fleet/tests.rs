//! Who is handed what.

use std::sync::atomic::{AtomicBool, Ordering};

use iommu_addr::{ApertureOffset, Gpa};

use super::*;
use crate::Segments;

/// Counts what it is asked, and owns what it is told to.
#[derive(Default)]
struct Counting {
    owned: Vec<EndpointId>,
    calls: Mutex<Vec<&'static str>>,
    /// What it says has ended.
    ended: Mutex<Vec<JobId>>,
    /// It takes nothing.
    is_full: AtomicBool,
}

impl Counting {
    fn count(&self, call: &'static str) {
        self.calls.lock().unwrap().push(call);
    }

    fn calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

impl DmaEngine for Counting {
    fn caps(&self) -> EngineCaps {
        self.count("caps");
        EngineCaps { max_transfer: 1 << 30, queue_depth: 8, reports_faults: true, max_mappings: u32::MAX }
    }

    fn submit(&self, _: &Transfer) -> Result<Submit, EngineError> {
        self.count("submit");
        if self.is_full.load(Ordering::Relaxed) { Err(EngineError::Busy) } else { Ok(Submit::Submitted) }
    }

    fn doorbell(&self) {
        self.count("doorbell");
    }

    fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        self.count("poll");
        let ended = std::mem::take(&mut *self.ended.lock().unwrap());
        out.extend(ended.into_iter().map(|job| Finished::moved(job, Ok(0))));
        None
    }

    fn abort(&self, _: JobId) {
        self.count("abort");
    }

    fn quiesce(&self, _: &mut Vec<Finished>) {
        self.count("quiesce");
    }

    fn on_progress(&self, _: Box<dyn Fn() + Send + Sync>) {
        self.count("on_progress");
    }
}

impl Owner for Counting {
    fn owns(&self, endpoint: EndpointId) -> bool {
        self.owned.contains(&endpoint)
    }

    fn read_own(&self, _: EndpointId, _: u64, _: &mut [u8]) -> Result<(), EngineError> {
        self.count("read_own");
        Ok(())
    }

    fn write_own(&self, _: EndpointId, _: u64, _: &[u8]) -> Result<(), EngineError> {
        self.count("write_own");
        Ok(())
    }
}

struct Nowhere;

impl Memory for Nowhere {
    fn copy(&self, _: Location, src: Location, len: u64) -> Result<(), MemoryError> {
        Err(MemoryError { at: src, len })
    }

    fn fill(&self, dst: Location, len: u64, _: u64) -> Result<(), MemoryError> {
        Err(MemoryError { at: dst, len })
    }

    fn read(&self, src: Location, _: &mut [u8]) -> Result<(), MemoryError> {
        Err(MemoryError { at: src, len: 0 })
    }

    fn write(&self, dst: Location, _: &[u8]) -> Result<(), MemoryError> {
        Err(MemoryError { at: dst, len: 0 })
    }
}

const ENDPOINTS: [EndpointId; 2] = [EndpointId::local(0), EndpointId::local(1)];

/// An engine of two endpoints, and a fleet of it and one for the rest.
fn shared() -> (Arc<Counting>, Arc<Counting>, Fleet) {
    let engine = Arc::new(Counting { owned: ENDPOINTS.into(), ..Counting::default() });
    let rest = Arc::new(Counting::default());
    let member = |endpoint| Member { endpoint, engine: engine.clone(), same_function: Vec::new() };
    let members = ENDPOINTS.map(member).into();
    let fleet = Fleet::new(members, Vec::new(), rest.clone(), Arc::new(Nowhere), None).unwrap();
    (engine, rest, fleet)
}

#[test]
fn an_engine_of_several_endpoints_is_asked_once() {
    let (engine, rest, fleet) = shared();
    fleet.caps();
    fleet.on_progress(Box::new(|| ()));
    fleet.doorbell();
    fleet.poll(&mut Vec::new());
    fleet.abort(JobId(1));
    fleet.quiesce(&mut Vec::new());
    let asked = ["caps", "on_progress", "doorbell", "poll", "abort", "quiesce"];
    assert_eq!((engine.calls(), rest.calls()), (asked.into(), asked.into()));
}

#[test]
fn what_an_engine_does_between_its_endpoints_is_its_own() {
    let (engine, rest, fleet) = shared();
    let part = |endpoint, len| Segment { at: Location::Aperture { endpoint, offset: ApertureOffset(0) }, len };
    let (one, other) = (part(ENDPOINTS[0], 64), part(ENDPOINTS[1], 64));
    let submit = |initiator, work| {
        let submitted = fleet.submit(&Transfer { job: JobId(1), domain: DomainId(1), initiator, work });
        assert_eq!(submitted, Ok(Submit::Submitted));
    };
    let dst = Segments::from_iter([one, other]);
    submit(ENDPOINTS[0], Work::Fill { dst, pattern: 0 });
    // Whoever starts it.
    let (src, dst, route) = (Segments::from_iter([one]), Segments::from_iter([other]), Route::Direct);
    submit(EndpointId::local(2), Work::Copy { src, dst, route });
    assert_eq!((engine.calls(), rest.calls()), (vec!["submit"; 2], Vec::new()));
    // What is none's is the rest's.
    let ram = Segment { at: Location::Ram(Gpa(0)), len: 64 };
    submit(EndpointId::local(2), Work::Fill { dst: Segments::from_iter([ram]), pattern: 0 });
    assert_eq!((engine.calls(), rest.calls()), (Vec::new(), vec!["submit"]));
}

#[test]
fn an_initiator_fills_what_its_own_engine_does() {
    let [one, other, none, idle] = [0, 1, 2, 3].map(EndpointId::local);
    let engines = [one, other].map(|own| Arc::new(Counting { owned: vec![own], ..Counting::default() }));
    let member = |(endpoint, engine): (_, Arc<Counting>)| Member { endpoint, engine, same_function: Vec::new() };
    let members = [one, other].into_iter().zip(engines).map(member).collect();
    let fleet = Fleet::new(members, vec![idle], Arc::new(Counting::default()), Arc::new(Nowhere), None).unwrap();
    let part = |endpoint| Segment { at: Location::Aperture { endpoint, offset: ApertureOffset(0) }, len: 64 };
    let ram = Segment { at: Location::Ram(Gpa(0)), len: 64 };
    let fills = |initiator, dst: &[Segment]| fleet.fills(initiator, dst);
    assert!(fills(one, &[part(one)]) && fills(one, &[ram]) && fills(none, &[ram]) && fills(one, &[part(none)]));
    assert!(!fills(one, &[part(other)]) && !fills(none, &[part(one)]), "the owner's engine does");
    assert!(!fills(one, &[part(one), part(other)]) && !fills(one, &[part(one), ram]), "the host does");
    assert!(!fills(idle, &[ram]) && !fills(idle, &[part(idle)]), "it has none");
}

#[test]
fn a_flush_that_waited_is_rung_for() {
    let (engine, _, fleet) = shared();
    let dst = Segments::from_iter([Segment {
        at: Location::Aperture { endpoint: ENDPOINTS[0], offset: ApertureOffset(0) },
        len: 64,
    }]);
    for (job, work) in [(1, Work::Fill { dst, pattern: 0 }), (2, Work::Flush)] {
        let transfer = Transfer { job: JobId(job), domain: DomainId(1), initiator: ENDPOINTS[0], work };
        assert_eq!(fleet.submit(&transfer), Ok(Submit::Submitted));
    }
    engine.ended.lock().unwrap().push(JobId(1));
    engine.is_full.store(true, Ordering::Relaxed);
    assert_eq!(fleet.poll(&mut Vec::new()), None, "nothing went on: whoever fills the engine is looked after");
    assert_eq!(engine.calls(), ["submit", "poll", "submit"]);
    engine.is_full.store(false, Ordering::Relaxed);
    assert_eq!(fleet.poll(&mut Vec::new()), Some(Duration::ZERO), "it may have ended already");
    assert_eq!(engine.calls(), ["poll", "submit", "doorbell"]);
    assert_eq!(fleet.poll(&mut Vec::new()), None);
    assert_eq!(engine.calls(), ["poll"], "nothing new");
}

#[test]
fn a_transfer_is_as_long_as_whoever_carries_it_takes() {
    let (_, _, fleet) = shared();
    assert_eq!(fleet.caps().max_transfer, MAX_STAGED);
    let (own, ram) = (Location::Aperture { endpoint: ENDPOINTS[0], offset: ApertureOffset(0) }, Location::Ram(Gpa(0)));
    let longest = |initiator, at, route| {
        let all = || Segments::from_iter([Segment { at, len: 1 << 40 }]);
        let work = Work::Copy { src: all(), dst: all(), route };
        fleet.longest(&Transfer { job: JobId(1), domain: DomainId(1), initiator, work })
    };
    let nobodys = EndpointId::local(2);
    assert_eq!(longest(nobodys, own, Route::Direct), 1 << 30, "its owner");
    assert_eq!(longest(nobodys, ram, Route::Direct), 1 << 30, "the rest");
    assert_eq!(longest(nobodys, own, Route::Staged), MAX_STAGED, "the host");
}

#[test]
fn what_goes_through_the_host_is_read_and_written_by_its_owner() {
    let (engine, _, fleet) = shared();
    let at = |endpoint| Location::Aperture { endpoint, offset: ApertureOffset(0) };
    assert_eq!(fleet.memory().copy(at(ENDPOINTS[1]), at(ENDPOINTS[0]), 64), Ok(()));
    assert_eq!(engine.calls(), ["read_own", "write_own"]);
}
