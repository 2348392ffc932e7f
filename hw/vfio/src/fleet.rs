//! All engines of a tenant as one: those of its functions, and one for everything else.
//!
//! A transfer goes to the engine of its initiator if that can make it in one hop, else to that of whoever owns memory that only its own engine reaches,
//! else to the rest. What would take two hops goes through memory of this process, on a thread of the fleet's: so no engine ever waits for another.
//!
//! Not here: rights, which way a transfer is to go.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use hw_engine::{
    DmaEngine, EngineCaps, EngineError, Finished, Initiated, JobId, Memory, MemoryError, Place, Raised, Route, Submit,
    Transfer, Work, copy_segments, fill_segments,
};
use iommu_addr::{DomainId, EndpointId, Location, Segment};

use crate::fences::Fences;
use crate::mover::{MAX_TRANSFER, code};
use crate::queue::{Carrier, DEPTH, Queue, ThreadHook};
use crate::{VfioEngine, VfioError};

/// An engine of a tenant.
pub struct Member {
    /// The endpoint that it is of.
    pub endpoint: EndpointId,
    /// The engine.
    pub engine: Arc<VfioEngine>,
    /// Endpoints that are memory behind BARs of the same function: what it does on the bus does not come back to itself.
    pub same_function: Vec<EndpointId>,
}

/// All engines of a tenant.
pub struct Fleet {
    members: Arc<Members>,
    /// Endpoints of functions that have no engine: what they start, the processor would have to do.
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
            Work::Kernel { .. } => return (0, Err(EngineError::Device { code: code::NO_KERNELS })),
        };
        let Finished { bytes, result, .. } = Finished::moved(transfer.job, moved);
        // An engine that is to end gives up what is asked of it, and memory has no word for that.
        (bytes, result.map_err(|error| if go_on() { error } else { EngineError::Aborted }))
    }
}

/// The engines of functions.
struct Members(Vec<Member>);

/// The memory of every endpoint, as its owner sees it: what only an engine reaches, that engine reads and writes. Reading and writing may wait for it.
struct View {
    members: Arc<Members>,
    rest: Arc<dyn Memory>,
}

impl Members {
    /// The engine whose own memory that endpoint's is.
    fn owner(&self, endpoint: EndpointId) -> Option<&Arc<VfioEngine>> {
        self.0.iter().map(|member| &member.engine).find(|engine| engine.own() == Some(endpoint))
    }

    fn owner_of(&self, at: Location) -> Option<&Arc<VfioEngine>> {
        self.owner(at.owner()?)
    }

    fn of(&self, endpoint: EndpointId) -> Option<&Arc<VfioEngine>> {
        self.0.iter().find(|member| member.endpoint == endpoint).map(|member| &member.engine)
    }

    fn in_one_hop(&self, engine: &Arc<VfioEngine>, initiator: EndpointId, dst: &[Segment], src: &[Segment]) -> bool {
        let own = self.0.iter().filter(|member| Arc::ptr_eq(&member.engine, engine)).flat_map(|of| &of.same_function);
        let mut owners = dst.iter().chain(src).filter_map(|segment| segment.at.owner());
        !owners.any(|owner| own.clone().any(|same| *same == owner)) && engine.in_one_hop(initiator, dst, src)
    }
}

/// Who carries a transfer out.
enum Who<'a> {
    Member(&'a Arc<VfioEngine>),
    Stager,
    Rest,
}

impl Fleet {
    /// A fleet over `memory`, in which there is nothing of what only engines reach. `idle` are endpoints of functions without an engine.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub fn new(
        members: Vec<Member>,
        idle: Vec<EndpointId>,
        rest: Arc<dyn DmaEngine>,
        memory: Arc<dyn Memory>,
        hook: Option<ThreadHook>,
    ) -> Result<Self, VfioError> {
        let members = Arc::new(Members(members));
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
                Owner::Nobody if self.idle.contains(&transfer.initiator) => Who::Stager,
                Owner::Nobody => self.members.of(transfer.initiator).map_or(Who::Rest, Who::Member),
                Owner::One(engine) => Who::Member(engine),
                Owner::Several => Who::Stager,
            },
            Work::Flush if self.idle.contains(&transfer.initiator) => Who::Stager,
            Work::Flush => self.members.of(transfer.initiator).map_or(Who::Rest, Who::Member),
            Work::Kernel { .. } => Who::Rest,
        }
    }

    fn copier(&self, initiator: EndpointId, dst: &[Segment], src: &[Segment], route: Route) -> Who<'_> {
        if route == Route::Direct
            && let Some(engine) = self.in_one(initiator, dst, src)
        {
            return Who::Member(engine);
        }
        let mut places = dst.iter().chain(src);
        let (is_members, is_bare) = (self.members.of(initiator).is_some(), self.idle.contains(&initiator));
        if is_members || is_bare || places.any(|segment| self.members.owner_of(segment.at).is_some()) {
            Who::Stager
        } else {
            Who::Rest
        }
    }

    /// The engine that makes this copy in one hop.
    fn in_one(&self, initiator: EndpointId, dst: &[Segment], src: &[Segment]) -> Option<&Arc<VfioEngine>> {
        let owners = dst.iter().chain(src).filter_map(|segment| self.members.owner_of(segment.at));
        let mut able = self.members.of(initiator).into_iter().chain(owners);
        able.find(|engine| self.members.in_one_hop(engine, initiator, dst, src))
    }

    fn hand_over(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
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
        self.members.0.iter().map(|member| &*member.engine as &dyn DmaEngine).chain([&*self.rest])
    }
}

/// Whose own memory some places are.
enum Owner<'a> {
    Nobody,
    One(&'a Arc<VfioEngine>),
    Several,
}

impl Members {
    fn owner_of_all(&self, places: &[Segment]) -> Owner<'_> {
        let mut owners = places.iter().map(|segment| self.owner_of(segment.at));
        let Some(first) = owners.next() else { return Owner::Nobody };
        let is_first = |other: Option<&Arc<VfioEngine>>| match (first, other) {
            (Some(first), Some(other)) => Arc::ptr_eq(first, other),
            (None, None) => true,
            _ => false,
        };
        match first {
            _ if !owners.all(is_first) => Owner::Several,
            Some(engine) => Owner::One(engine),
            None => Owner::Nobody,
        }
    }
}

impl DmaEngine for Fleet {
    fn caps(&self) -> EngineCaps {
        let all = self.engines().map(DmaEngine::caps);
        let both = |one: EngineCaps, other: EngineCaps| EngineCaps {
            max_transfer: one.max_transfer.min(other.max_transfer),
            queue_depth: one.queue_depth.min(other.queue_depth),
            reports_faults: one.reports_faults && other.reports_faults,
            max_mappings: one.max_mappings.min(other.max_mappings),
        };
        // The stager's own.
        let (max_transfer, queue_depth) = (MAX_TRANSFER, DEPTH);
        all.fold(EngineCaps { max_transfer, queue_depth, reports_faults: true, max_mappings: u32::MAX }, both)
    }

    fn in_one_hop(&self, initiator: EndpointId, dst: &[Segment], src: &[Segment]) -> bool {
        match self.copier(initiator, dst, src, Route::Direct) {
            Who::Member(_) => true,
            Who::Stager => false,
            Who::Rest => self.rest.in_one_hop(initiator, dst, src),
        }
    }

    fn submit(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
        let submitted = self.fences.submit(transfer, |transfer| self.hand_over(transfer));
        if !matches!(submitted, Ok(Submit::Submitted)) && self.fences.is_due() {
            self.tell();
        }
        submitted
    }

    fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        let before = out.len();
        self.stager.poll(out);
        let soonest = self.engines().filter_map(|engine| engine.poll(out)).min();
        self.fences.note(out, before, |transfer| self.hand_over(transfer));
        out.append(&mut lock(&self.given_up));
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
    /// The engine that reaches the byte at `at`, and the offset there.
    fn engine(&self, at: Location) -> Option<(&Arc<VfioEngine>, u64)> {
        let Location::Aperture { offset, .. } = at else { return None };
        Some((self.members.owner_of(at)?, offset.0))
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
        let Some((engine, offset)) = self.engine(src) else { return self.rest.read(src, into) };
        engine.read_own(offset, into).map_err(|_why| MemoryError { at: src, len: into.len() as u64 })
    }

    fn write(&self, dst: Location, from: &[u8]) -> Result<(), MemoryError> {
        let Some((engine, offset)) = self.engine(dst) else { return self.rest.write(dst, from) };
        engine.write_own(offset, from).map_err(|_why| MemoryError { at: dst, len: from.len() as u64 })
    }

    fn place(&self, at: Location, most: u64) -> Option<Place> {
        if self.engine(at).is_some() { None } else { self.rest.place(at, most) }
    }
}
