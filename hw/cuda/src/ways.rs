//! [`Ways`]: the lanes of a GPU.
//!
//! There are lanes of their own each way, from the GPU, to it, within it and to other GPUs, and of those for small transfers, which so wait for no large one. Each
//! kind has two: while a stream says that it has passed a copy, which takes a microsecond or two, the other one copies on. What is short for its way is gathered
//! to begin together.
//!
//! Not here: what a transfer's addresses are.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use hw_engine::EngineError;
use smallvec::SmallVec;

use crate::driver::CudaError;
use crate::gpu::{Gpu, Piece};
use crate::lane::{Gathered, Lane, Load, Ride};
use crate::pinned::Pinned;
use crate::reach::Way;

/// Lanes of a GPU: of four ways, and one for programs.
pub(crate) const LANES: usize = 4 * LANES_OF_A_WAY + 1;
const LANES_OF_A_WAY: usize = 4;
/// Bytes a second between a GPU and this process's memory, within a GPU, and from one to another over NVLink, as an H200 has them: what a first guess of an
/// end is made of. Where it is too early, as for GPUs that meet over PCIe, it is looked again after a quarter of what was late.
const LINK: u64 = 54_000_000_000;
const MEMORY: u64 = 2_000_000_000_000;
const PEER: u64 = 390_000_000_000;
/// How many times as long as small ones transfers may be that are gathered, too, for others of their like. A copy takes some 2.5 us beside what its bytes take, and
/// less if it begins together with others, so it depends on how fast a way is (H200: of 1 MiB, 205 GB/s one by one and 280 to 350 together from one GPU to
/// another; of 256 KiB, 34 and 50 to other memory).
const HOST_MORE: u64 = 16;
const GPU_MORE: u64 = 64;
/// Transfers that begin together without waiting for the doorbell: the GPU copies them while more are gathered.
const FULL: usize = 16;
/// Copies of a transfer that is gathered.
const FEW: usize = 16;
/// Bytes of a cache line, in which each lane's word is alone.
pub(crate) const LINE: usize = 64;

/// Two lanes that take turns.
struct Pair {
    lanes: [Lane; 2],
    /// Transfers of at most so many bytes are gathered.
    gathers: u64,
    gathered: Mutex<Vec<Gathered>>,
    /// How many those are, for a look without the lock.
    waiting: AtomicUsize,
}

/// One way.
struct Group {
    small: Pair,
    large: Pair,
}

pub(crate) struct Ways {
    gpu: Arc<Gpu>,
    groups: [Group; 4],
    /// Copies do not wait for what other programs of the GPU let wait.
    programs: Lane,
    /// Its context is: every call fails.
    is_broken: AtomicBool,
}

impl Pair {
    fn new(lanes: [Lane; 2], gathers: u64) -> Self {
        Self { lanes, gathers, gathered: Mutex::default(), waiting: AtomicUsize::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Gathered>> {
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Both lanes, first the one that has less to do.
    fn by_load(&self) -> [&Lane; 2] {
        let [one, other] = &self.lanes;
        if other.busy() < one.busy() { [other, one] } else { [one, other] }
    }

    fn freer(&self) -> &Lane {
        self.by_load()[0]
    }

    fn gathers(&self, ride: &Ride, pieces: &[Piece]) -> bool {
        ride.bytes <= self.gathers && pieces.len() <= FEW
    }

    /// Begins a ride together with others: when there are many, or the doorbell rings. An error is one of the whole context.
    ///
    /// # Safety
    /// As for [`Ways::begin`].
    unsafe fn gather(&self, ride: Ride, pieces: SmallVec<[Piece; 2]>) -> Result<(), CudaError> {
        let mut gathered = self.lock();
        gathered.push((ride, pieces));
        let bytes = gathered.iter().map(|(ride, _)| ride.bytes).sum();
        if gathered.len() >= FULL || self.lanes[0].is_long(bytes) {
            // SAFETY: as the caller promises.
            return unsafe { self.begin_gathered(gathered) };
        }
        self.waiting.store(gathered.len(), Ordering::Release);
        Ok(())
    }

    /// Begins what was gathered. An error is one of the whole context.
    ///
    /// # Safety
    /// As for [`Ways::begin`], for each ride.
    unsafe fn begin_gathered(&self, mut gathered: MutexGuard<'_, Vec<Gathered>>) -> Result<(), CudaError> {
        let [lane, other] = self.by_load();
        // A lane that somebody has is in a call of the driver's.
        let (lane, state) = lane.try_lock().map_or_else(|| (other, other.lock()), |state| (lane, state));
        // With the lane's lock: a flush that does not find these rides here finds them there.
        let rides = std::mem::replace(&mut *gathered, Vec::with_capacity(FULL));
        self.waiting.store(0, Ordering::Release);
        drop(gathered);
        // SAFETY: as the caller promises.
        if rides.is_empty() { Ok(()) } else { unsafe { lane.begin_all(state, rides) } }
    }

    /// Begins what was gathered, and has the streams say when all that has begun has ended. An error is one of the whole context.
    ///
    /// # Safety
    /// As for [`Ways::begin`], for each ride that was gathered.
    unsafe fn ring(&self) -> Result<(), CudaError> {
        if self.waiting.load(Ordering::Acquire) > 0 {
            // SAFETY: as the caller promises.
            unsafe { self.begin_gathered(self.lock()) }?;
        }
        self.lanes.iter().try_for_each(Lane::doorbell)
    }
}

impl Group {
    fn pairs(&self) -> impl Iterator<Item = &Pair> {
        [&self.small, &self.large].into_iter()
    }
}

impl Ways {
    /// The lanes of the GPU of that number, whose words are among `words`. Transfers of at most `gather` bytes are small.
    pub(crate) fn new(gpu: &Arc<Gpu>, words: &Arc<Pinned>, number: usize, gather: u64) -> Result<Self, CudaError> {
        let group = |way: Way, speed, more| {
            let lane = |index: usize| {
                let index = number * LANES + way as usize * LANES_OF_A_WAY + index;
                Lane::new(gpu, words, index * LINE / size_of::<u32>(), speed, way == Way::In)
            };
            let pair = |first, gathers| Ok(Pair::new([lane(first)?, lane(first + 1)?], gathers));
            Ok(Group { small: pair(0, gather)?, large: pair(2, gather.saturating_mul(more))? })
        };
        let [out, into] = [group(Way::Out, LINK, HOST_MORE)?, group(Way::In, LINK, HOST_MORE)?];
        let groups = [out, into, group(Way::Local, MEMORY, GPU_MORE)?, group(Way::Peer, PEER, GPU_MORE)?];
        let programs = Lane::for_programs(gpu, words, (number * LANES + LANES - 1) * LINE / size_of::<u32>())?;
        Ok(Self { gpu: Arc::clone(gpu), groups, programs, is_broken: AtomicBool::new(false) })
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    fn pairs(&self) -> impl Iterator<Item = &Pair> {
        self.groups.iter().flat_map(Group::pairs)
    }

    fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.pairs().flat_map(|pair| &pair.lanes).chain([&self.programs])
    }

    /// Begins a ride, at once or together with others; it ends after the doorbell has rung. An error is one of the whole context; the ride is pending then, too.
    ///
    /// # Safety
    /// What the load names is memory of GPUs that this one reaches and that live as long as the lanes, or is in the ride's holds.
    pub(crate) unsafe fn begin(&self, way: Way, ride: Ride, load: Load) -> Result<(), CudaError> {
        let group = &self.groups[way as usize];
        match load {
            Load::Copies(pieces) => match group.pairs().find(|pair| pair.gathers(&ride, &pieces)) {
                // SAFETY: as the caller promises.
                Some(pair) => unsafe { pair.gather(ride, pieces) },
                // SAFETY: as the caller promises.
                None => unsafe { group.large.freer().begin(ride, &Load::Copies(pieces)) },
            },
            // SAFETY: as the caller promises.
            Load::Set { .. } => unsafe { group.large.freer().begin(ride, &load) },
            // SAFETY: as the caller promises.
            Load::Atomic { .. } => unsafe { self.programs.begin(ride, &load) },
        }
    }

    /// Begins what was gathered, and has the streams say when all that has begun has ended. An error is one of the whole context.
    ///
    /// # Safety
    /// As for [`Ways::begin`], for each ride that was gathered.
    pub(crate) unsafe fn ring(&self) -> Result<(), CudaError> {
        if self.is_broken() {
            return Ok(());
        }
        // SAFETY: as the caller promises.
        self.pairs().try_for_each(|pair| unsafe { pair.ring() })?;
        self.programs.doorbell()
    }

    /// Begins what was gathered, and answers where the lanes are then. An error is one of the whole context.
    ///
    /// # Safety
    /// As for [`Ways::ring`].
    pub(crate) unsafe fn mark(&self) -> Result<Vec<u32>, CudaError> {
        // SAFETY: as the caller promises.
        unsafe { self.ring() }?;
        self.lanes().map(Lane::mark).collect()
    }

    /// Whether all has been collected that was begun before a mark.
    pub(crate) fn have_passed(&self, marks: &[u32]) -> bool {
        self.lanes().zip(marks).all(|(lane, mark)| lane.has_passed(*mark))
    }

    /// Appends the rides that have ended, and says when the next one may. `None` if none is under way. An error is one of the whole context.
    pub(crate) fn collect(&self, out: &mut Vec<Ride>) -> Result<Option<Instant>, CudaError> {
        let is_broken = self.is_broken();
        self.lanes()
            .map(|lane| lane.collect(out, is_broken))
            .try_fold(None, |soonest, due| Ok(soonest.into_iter().chain(due?).min()))
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }

    /// The context is broken: appends what has not begun, with this error. What has begun ends when its lane says so, or never.
    pub(crate) fn break_off(&self, error: EngineError, out: &mut Vec<Ride>) {
        self.is_broken.store(true, Ordering::Release);
        self.lanes().for_each(|lane| lane.break_off(out));
        for pair in self.pairs() {
            out.extend(pair.lock().drain(..).map(|(ride, _)| ride.lost(error)));
        }
    }

    /// An error is one of the whole context.
    pub(crate) fn check(&self) -> Result<(), CudaError> {
        self.groups[0].small.lanes[0].check()
    }
}
