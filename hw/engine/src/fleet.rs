//! All engines of a tenant as one: those of its hardware, and one for everything else.
//!
//! A transfer goes to the engine of its initiator if that can make it in one hop, else to that of whoever owns memory that only its own engine reaches,
//! else to the rest. What would take two hops goes through memory of this process, on a thread of the fleet's: so no engine ever waits for another.
//!
//! Not here: rights, which way a transfer is to go.

use std::cell::Cell;
use std::io;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use iommu_addr::{DomainId, EndpointId, Location, Segment};

use crate::fences::Fences;
use crate::queue::{Carrier, DEPTH, Queue, ThreadHook};
use crate::sync::lock;
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
            Work::Fill { dst, .. } => self.filler(transfer.initiator, dst),
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

    fn filler(&self, initiator: EndpointId, dst: &[Segment]) -> Who<'_> {
        match self.members.owner_of_all(dst) {
            Whose::Nobody if self.idle.contains(&initiator) => Who::Stager,
            Whose::Nobody => self.members.of(initiator).map_or(Who::Rest, Who::Member),
            Whose::One(engine) => Who::Member(engine),
            Whose::Several => Who::Stager,
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
            let was = self.memory.atomic(at, atomic);
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
        let is_own = |engine| self.members.of(initiator).is_some_and(|own| Arc::ptr_eq(own, engine));
        match self.filler(initiator, dst) {
            Who::Member(engine) => is_own(engine) && engine.fills(initiator, dst),
            Who::Stager => false,
            Who::Rest => self.rest.fills(initiator, dst),
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
            let taken = self.hand_over(transfer);
            // What is full has something under way, whose end is looked after.
            handed_over.set(handed_over.get() || taken != Err(EngineError::Busy));
            taken
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
mod tests;
