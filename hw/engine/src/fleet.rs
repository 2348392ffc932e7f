//! All engines of a tenant as one: those of its hardware, and one for everything else.
//!
//! A transfer goes to the engine of its initiator if that can make it in one hop, else to that of whoever owns memory that only its own engine reaches,
//! else to the rest. What would take two hops goes through memory of this process, on a thread of the fleet's: so no engine ever waits for another.
//!
//! Not here: rights, which way a transfer is to go.

use std::cell::Cell;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use iommu_addr::{DomainId, EndpointId, Location, Segment};

use crate::fences::Fences;
use crate::queue::{Carrier, DEPTH, Queue, ThreadHook};
use crate::{
    Atomic, DmaEngine, EngineCaps, EngineError, Finished, Initiated, JobId, Memory, MemoryError, Owner, Place, Raised,
    Route, Submit, Transfer, Work, copy_segments, fill_segments, is_ordinary,
};

/// Most bytes that are asked of an [`Owner`] at a time, and so the longest transfer that goes through the host.
pub const MAX_STAGED: u64 = 256 << 10;

/// An endpoint, and the engine that works for it.
pub struct Member {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Its engine, which may be that of other endpoints too.
    pub engine: Arc<dyn Owner>,
    /// Endpoints that are memory behind BARs of the same function: what it does on the bus does not come back to itself.
    pub same_function: Vec<EndpointId>,
}

/// All engines of a tenant.
pub struct Fleet {
    members: Arc<Members>,
    /// Endpoints of hardware that has no engine: what they start, the processor would have to do.
    idle: Vec<EndpointId>,
    rest: Arc<dyn DmaEngine>,
    stager: Queue<Stager>,
    memory: Arc<View>,
    fences: Fences,
    /// Flushes that were given up while they waited.
    given_up: Mutex<Vec<Finished>>,
    wake: OnceLock<Wake>,
}

type Wake = Arc<dyn Fn() + Send + Sync>;

/// Carries bytes through memory of this process.
struct Stager(Arc<View>);

impl Carrier for Stager {
    fn run(&mut self, transfer: &Transfer, go_on: &dyn Fn() -> bool) -> (u64, Result<(), EngineError>) {
        let moved = match &transfer.work {
            Work::Copy { src, dst, route } => copy_segments(&*self.0, dst, src, *route),
            Work::Fill { dst, pattern } => fill_segments(&*self.0, dst, *pattern),
            // What came before was the processor's own doing.
            Work::Flush => return (0, Ok(())),
            // The processor makes those at once.
            Work::Atomic { .. } => return (0, Err(EngineError::NO_ATOMICS)),
            Work::Kernel { .. } => return (0, Err(EngineError::NO_KERNELS)),
        };
        let Finished { bytes, result, .. } = Finished::moved(transfer.job, moved);
        // An engine that is to end gives up what is asked of it, and memory has no word for that.
        (bytes, result.map_err(|error| if go_on() { error } else { EngineError::Aborted }))
    }
}

/// The endpoints that have an engine of their own.
struct Members {
    all: Vec<Member>,
    /// Each of their engines, once.
    engines: Vec<Arc<dyn Owner>>,
}

/// The memory of every endpoint, as its owner sees it: what only an engine reaches, that engine reads and writes. Reading and writing may wait for it.
struct View {
    members: Arc<Members>,
    rest: Arc<dyn Memory>,
}

impl Members {
    fn new(all: Vec<Member>) -> Self {
        let mut engines: Vec<Arc<dyn Owner>> = Vec::new();
        for Member { engine, .. } in &all {
            if !engines.iter().any(|known| Arc::ptr_eq(known, engine)) {
                engines.push(Arc::clone(engine));
            }
        }
        Self { all, engines }
    }

    /// The engine whose own memory that endpoint's is.
    fn owner(&self, endpoint: EndpointId) -> Option<&Arc<dyn Owner>> {
        self.engines.iter().find(|engine| engine.owns(endpoint))
    }

    fn owner_of(&self, at: Location) -> Option<&Arc<dyn Owner>> {
        self.owner(at.owner()?)
    }

    fn of(&self, endpoint: EndpointId) -> Option<&Arc<dyn Owner>> {
        self.all.iter().find(|member| member.endpoint == endpoint).map(|member| &member.engine)
    }

    fn in_one_hop(&self, engine: &Arc<dyn Owner>, initiator: EndpointId, dst: &[Segment], src: &[Segment]) -> bool {
        let own = self.all.iter().filter(|member| Arc::ptr_eq(&member.engine, engine)).flat_map(|of| &of.same_function);
        let mut owners = dst.iter().chain(src).filter_map(|segment| segment.at.owner());
        !owners.any(|owner| own.clone().any(|same| *same == owner)) && engine.in_one_hop(initiator, dst, src)
    }
}

/// Who carries a transfer out.
enum Who<'a> {
    Member(&'a Arc<dyn Owner>),
    Stager,
    Rest,
}

impl Fleet {
    /// A fleet over `memory`, in which there is nothing of what only engines reach. `idle` are endpoints of hardware without an engine.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub fn new(
        members: Vec<Member>,
        idle: Vec<EndpointId>,
        rest: Arc<dyn DmaEngine>,
        memory: Arc<dyn Memory>,
        hook: Option<ThreadHook>,
    ) -> io::Result<Self> {
        let members = Arc::new(Members::new(members));
        let view = Arc::new(View { members: Arc::clone(&members), rest: memory });
        let stager = Queue::start("stager", Stager(Arc::clone(&view)), hook)?;
        let (fences, given_up, wake) = (Fences::default(), Mutex::default(), OnceLock::new());
        Ok(Self { members, idle, rest, stager, memory: view, fences, given_up, wake })
    }

    /// Every byte there is, as its owner sees it.
    pub fn memory(&self) -> Arc<dyn Memory> {
        Arc::clone(&self.memory) as _
    }

    fn who(&self, transfer: &Transfer) -> Who<'_> {
        match &transfer.work {
            Work::Copy { src, dst, route } => self.copier(transfer.initiator, dst, src, *route),
            Work::Fill { dst, .. } => match self.members.owner_of_all(dst) {
                Whose::Nobody if self.idle.contains(&transfer.initiator) => Who::Stager,
                Whose::Nobody => self.members.of(transfer.initiator).map_or(Who::Rest, Who::Member),
                Whose::One(engine) => Who::Member(engine),
                Whose::Several => Who::Stager,
            },
            Work::Flush if self.idle.contains(&transfer.initiator) => Who::Stager,
            Work::Flush => self.members.of(transfer.initiator).map_or(Who::Rest, Who::Member),
            Work::Atomic { at, .. } => match self.members.owner_of(*at) {
                Some(engine) => Who::Member(engine),
                None => Who::Rest,
            },
            Work::Kernel { .. } => Who::Rest,
        }
    }

    /// Whether an endpoint is one that the rest knows nothing of.
    fn is_hardware(&self, endpoint: EndpointId) -> bool {
        self.members.of(endpoint).is_some() || self.idle.contains(&endpoint)
    }

    fn copier(&self, initiator: EndpointId, dst: &[Segment], src: &[Segment], route: Route) -> Who<'_> {
        if route == Route::Direct
            && let Some(engine) = self.in_one(initiator, dst, src)
        {
            return Who::Member(engine);
        }
        let mut places = dst.iter().chain(src);
        if self.is_hardware(initiator) || places.any(|segment| self.members.owner_of(segment.at).is_some()) {
            Who::Stager
        } else {
            Who::Rest
        }
    }

    /// The engine that makes this copy in one hop.
    fn in_one(&self, initiator: EndpointId, dst: &[Segment], src: &[Segment]) -> Option<&Arc<dyn Owner>> {
        let owners = dst.iter().chain(src).filter_map(|segment| self.members.owner_of(segment.at));
        let mut able = self.members.of(initiator).into_iter().chain(owners);
        able.find(|engine| self.members.in_one_hop(engine, initiator, dst, src))
    }

    fn hand_over(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
        if let Work::Atomic { at, atomic } = transfer.work
            && self.members.owner_of(at).is_none()
            && self.is_hardware(transfer.initiator)
        {
            // Of memory of this process the processor changes a word at once.
            let was = self.memory.atomic(at, atomic).map_err(EngineError::Memory);
            return Ok(Submit::Executed(Finished::atomic(transfer.job, atomic, was)));
        }
        match self.who(transfer) {
            Who::Member(engine) => engine.submit(transfer),
            Who::Stager => self.stager.submit(transfer),
            Who::Rest => self.rest.submit(transfer),
        }
    }

    fn tell(&self) {
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }

    fn engines(&self) -> impl Iterator<Item = &dyn DmaEngine> {
        self.members.engines.iter().map(|engine| &**engine as &dyn DmaEngine).chain([&*self.rest])
    }
}

/// Whose own memory some places are.
enum Whose<'a> {
    Nobody,
    One(&'a Arc<dyn Owner>),
    Several,
}

impl Members {
    fn owner_of_all(&self, places: &[Segment]) -> Whose<'_> {
        let mut owners = places.iter().map(|segment| self.owner_of(segment.at));
        let Some(first) = owners.next() else { return Whose::Nobody };
        let is_first = |other: Option<&Arc<dyn Owner>>| match (first, other) {
            (Some(first), Some(other)) => Arc::ptr_eq(first, other),
            (None, None) => true,
            _ => false,
        };
        match first {
            _ if !owners.all(is_first) => Whose::Several,
            Some(engine) => Whose::One(engine),
            None => Whose::Nobody,
        }
    }
}

impl DmaEngine for Fleet {
    fn caps(&self) -> EngineCaps {
        let all = self.engines().map(DmaEngine::caps);
        let both = |one: EngineCaps, other: EngineCaps| EngineCaps {
            max_transfer: one.max_transfer.min(other.max_transfer),
            queue_depth: one.queue_depth.max(other.queue_depth),
            reports_faults: one.reports_faults && other.reports_faults,
            max_mappings: one.max_mappings.min(other.max_mappings),
        };
        // The stager's own.
        let (max_transfer, queue_depth) = (MAX_STAGED, DEPTH);
        all.fold(EngineCaps { max_transfer, queue_depth, reports_faults: true, max_mappings: u32::MAX }, both)
    }

    fn in_one_hop(&self, initiator: EndpointId, dst: &[Segment], src: &[Segment]) -> bool {
        match self.copier(initiator, dst, src, Route::Direct) {
            Who::Member(_) => true,
            Who::Stager => false,
            Who::Rest => self.rest.in_one_hop(initiator, dst, src),
        }
    }

    fn fills(&self, initiator: EndpointId, dst: &[Segment]) -> bool {
        let own = self.members.of(initiator);
        match (own, self.members.owner_of_all(dst)) {
            (_, Whose::Several) => false,
            (Some(own), Whose::One(engine)) => Arc::ptr_eq(own, engine) && own.fills(initiator, dst),
            (Some(own), Whose::Nobody) => own.fills(initiator, dst),
            (None, Whose::One(_)) => false,
            (None, Whose::Nobody) => !self.idle.contains(&initiator) && self.rest.fills(initiator, dst),
        }
    }

    fn has_atomics(&self, initiator: EndpointId, at: Location) -> bool {
        match self.members.owner_of(at) {
            Some(engine) => engine.has_atomics(initiator, at),
            // Of a guest's memory the processor does it. Another owner's memory is for its own engine.
            None if self.is_hardware(initiator) => at.owner().is_none() && is_ordinary(&*self.memory, at),
            None => self.rest.has_atomics(initiator, at),
        }
    }

    fn submit(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
        let submitted = self.fences.submit(transfer, |transfer| self.hand_over(transfer));
        if !matches!(submitted, Ok(Submit::Submitted)) && self.fences.is_due() {
            self.tell();
        }
        submitted
    }

    fn longest(&self, transfer: &Transfer) -> u64 {
        match self.who(transfer) {
            Who::Member(engine) => engine.longest(transfer),
            Who::Stager => MAX_STAGED,
            Who::Rest => self.rest.longest(transfer),
        }
    }

    fn doorbell(&self) {
        self.engines().for_each(DmaEngine::doorbell);
    }

    fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        let before = out.len();
        self.stager.poll(out);
        let soonest = self.engines().filter_map(|engine| engine.poll(out)).min();
        let handed_over = Cell::new(false);
        self.fences.note(out, before, |transfer| {
            handed_over.set(true);
            self.hand_over(transfer)
        });
        out.append(&mut lock(&self.given_up));
        if handed_over.get() {
            self.doorbell();
            // Nobody has looked after that yet, nor is anybody told to.
            return Some(Duration::ZERO);
        }
        soonest
    }

    fn abort(&self, job: JobId) {
        if let Some(finished) = self.fences.give_up(job) {
            lock(&self.given_up).push(finished);
            return self.tell();
        }
        // Those that do not have it do nothing.
        self.stager.abort(job);
        self.engines().for_each(|engine| engine.abort(job));
    }

    fn quiesce(&self, out: &mut Vec<Finished>) {
        // The stager last: it waits for the others, and not for what they had before.
        self.stager.give_up();
        self.engines().for_each(|engine| engine.quiesce(out));
        self.stager.quiesce(out);
        self.fences.give_up_all(out);
        out.append(&mut lock(&self.given_up));
    }

    fn raised(&self, out: &mut Vec<Raised>) {
        self.rest.raised(out);
    }

    fn refuse(&self, initiated: &Initiated, status: u32) {
        self.rest.refuse(initiated, status);
    }

    fn forget(&self, domain: DomainId) {
        self.rest.forget(domain);
    }

    fn on_progress(&self, wake: Box<dyn Fn() + Send + Sync>) {
        let wake: Wake = wake.into();
        // Set once, as its promise is.
        let _ = self.wake.set(Arc::clone(&wake));
        let stager = Arc::clone(&wake);
        self.stager.on_progress(Box::new(move || stager()));
        for engine in self.engines() {
            let wake = Arc::clone(&wake);
            engine.on_progress(Box::new(move || wake()));
        }
    }
}

fn lock(ended: &Mutex<Vec<Finished>>) -> MutexGuard<'_, Vec<Finished>> {
    ended.lock().unwrap_or_else(PoisonError::into_inner)
}

impl View {
    /// The engine that reaches the byte at `at`, and where that is.
    fn engine(&self, at: Location) -> Option<(&Arc<dyn Owner>, EndpointId, u64)> {
        let Location::Aperture { endpoint, offset } = at else { return None };
        Some((self.members.owner(endpoint)?, endpoint, offset.0))
    }
}

impl Memory for View {
    fn copy(&self, dst: Location, src: Location, len: u64) -> Result<(), MemoryError> {
        if self.engine(dst).is_none() && self.engine(src).is_none() {
            return self.rest.copy(dst, src, len);
        }
        let mut bytes = vec![0; usize::try_from(len).ok().ok_or(MemoryError { at: src, len })?];
        self.read(src, &mut bytes)?;
        self.write(dst, &bytes)
    }

    fn fill(&self, dst: Location, len: u64, pattern: u64) -> Result<(), MemoryError> {
        if self.engine(dst).is_none() {
            return self.rest.fill(dst, len, pattern);
        }
        let len = usize::try_from(len).ok().ok_or(MemoryError { at: dst, len })?;
        let bytes: Vec<u8> = pattern.to_le_bytes().into_iter().cycle().take(len).collect();
        self.write(dst, &bytes)
    }

    fn read(&self, src: Location, into: &mut [u8]) -> Result<(), MemoryError> {
        let Some((engine, endpoint, offset)) = self.engine(src) else { return self.rest.read(src, into) };
        engine.read_own(endpoint, offset, into).map_err(|_why| MemoryError { at: src, len: into.len() as u64 })
    }

    fn write(&self, dst: Location, from: &[u8]) -> Result<(), MemoryError> {
        let Some((engine, endpoint, offset)) = self.engine(dst) else { return self.rest.write(dst, from) };
        engine.write_own(endpoint, offset, from).map_err(|_why| MemoryError { at: dst, len: from.len() as u64 })
    }

    fn atomic(&self, at: Location, atomic: Atomic) -> Result<u64, MemoryError> {
        if self.engine(at).is_some() { Err(MemoryError { at, len: atomic.len }) } else { self.rest.atomic(at, atomic) }
    }

    fn place(&self, at: Location, most: u64) -> Option<Place> {
        if self.engine(at).is_some() { None } else { self.rest.place(at, most) }
    }

    fn has_place(&self, at: Location) -> bool {
        self.engine(at).is_none() && self.rest.has_place(at)
    }
}

#[cfg(test)]
mod tests {
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
            Ok(Submit::Submitted)
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
        assert_eq!(fleet.poll(&mut Vec::new()), Some(Duration::ZERO), "it may have ended already");
        assert_eq!(engine.calls(), ["submit", "poll", "submit", "doorbell"]);
        assert_eq!(fleet.poll(&mut Vec::new()), None);
        assert_eq!(engine.calls(), ["poll"], "nothing new");
    }

    #[test]
    fn a_transfer_is_as_long_as_whoever_carries_it_takes() {
        let (_, _, fleet) = shared();
        assert_eq!(fleet.caps().max_transfer, MAX_STAGED);
        let (own, ram) =
            (Location::Aperture { endpoint: ENDPOINTS[0], offset: ApertureOffset(0) }, Location::Ram(Gpa(0)));
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
}
