//! [`Ways`]: the lanes of a GPU.
//!
//! There are lanes of their own each way, from the GPU, to it, within it and to other GPUs, and of those for small transfers, which so wait for no large one. Each
//! kind has two: while a stream says that it has passed a copy, which takes a microsecond or two, the other one copies on.
//!
//! Not here: what a transfer's addresses are.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use hw_engine::EngineError;
use smallvec::SmallVec;

use crate::driver::CudaError;
use crate::gpu::{Gpu, Piece};
use crate::lane::{Gathered, Lane, Load, Ride};
use crate::pinned::Pinned;
use crate::reach::Way;

/// Lanes of a GPU.
pub(crate) const LANES: usize = 16;
/// Bytes a second between a GPU and this process's memory, within a GPU, and from one to another over NVLink, as an H200 has them: what a first guess of an
/// end is made of. Where it is too early, as for GPUs that meet over PCIe, it is looked again after a quarter of what was late.
const LINK: u64 = 54_000_000_000;
const MEMORY: u64 = 2_000_000_000_000;
const PEER: u64 = 390_000_000_000;
/// Bytes of a cache line, in which each lane's word is alone.
pub(crate) const LINE: usize = 64;

/// One way.
struct Group {
    small: [Lane; 2],
    large: [Lane; 2],
    /// What begins when the doorbell rings.
    gathered: Mutex<Vec<Gathered>>,
    /// How much that is, for a look without the lock.
    waiting: AtomicUsize,
}

pub(crate) struct Ways {
    gpu: Arc<Gpu>,
    groups: [Group; 4],
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, Vec<Gathered>> {
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.small.iter().chain(&self.large)
    }
}

/// The one that has less to do.
fn freer([one, other]: &[Lane; 2]) -> &Lane {
    if other.busy() < one.busy() { other } else { one }
}

impl Ways {
    /// The lanes of the GPU of that number, whose words are among `words`.
    pub(crate) fn new(gpu: &Arc<Gpu>, words: &Arc<Pinned>, number: usize) -> Result<Self, CudaError> {
        let lane =
            |index: usize, speed| Lane::new(gpu, words, (number * LANES + index) * LINE / size_of::<u32>(), speed);
        let group = |first: usize, speed| {
            let pair = |at| Ok([lane(first + at, speed)?, lane(first + at + 1, speed)?]);
            Ok(Group { small: pair(0)?, large: pair(2)?, gathered: Mutex::default(), waiting: AtomicUsize::new(0) })
        };
        let groups = [group(0, LINK)?, group(4, LINK)?, group(8, MEMORY)?, group(12, PEER)?];
        Ok(Self { gpu: Arc::clone(gpu), groups })
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    fn group(&self, way: Way) -> &Group {
        &self.groups[way as usize]
    }

    /// Begins a ride at once; it ends after the doorbell has rung. An error is one of the whole context; the ride is pending then, too.
    ///
    /// # Safety
    /// What the load names is memory of GPUs that this one reaches and that live as long as the lanes, or is in the ride's holds.
    pub(crate) unsafe fn begin(&self, way: Way, ride: Ride, load: &Load) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        unsafe { freer(&self.group(way).large).begin(ride, load) }
    }

    /// Begins a ride together with others, when the doorbell rings.
    pub(crate) fn gather(&self, way: Way, ride: Ride, pieces: SmallVec<[Piece; 2]>) {
        let group = self.group(way);
        let mut gathered = group.lock();
        gathered.push((ride, pieces));
        group.waiting.store(gathered.len(), Ordering::Release);
    }

    /// Begins what was gathered, and has the streams say when all that has begun has ended. An error is one of the whole context.
    ///
    /// # Safety
    /// As for [`Ways::begin`], for each ride that was gathered.
    pub(crate) unsafe fn ring(&self) -> Result<(), CudaError> {
        for group in &self.groups {
            group.large.iter().try_for_each(Lane::doorbell)?;
            if group.waiting.load(Ordering::Acquire) == 0 {
                continue;
            }
            let gathered = {
                let mut gathered = group.lock();
                group.waiting.store(0, Ordering::Release);
                std::mem::take(&mut *gathered)
            };
            if !gathered.is_empty() {
                // SAFETY: as the caller promises.
                unsafe { freer(&group.small).begin_all(gathered) }?;
            }
        }
        Ok(())
    }

    /// Appends the rides that have ended, and says when the next one may. `None` if none is under way. An error is one of the whole context.
    pub(crate) fn collect(&self, out: &mut Vec<Ride>) -> Result<Option<Instant>, CudaError> {
        let lanes = self.groups.iter().flat_map(Group::lanes);
        lanes.map(|lane| lane.collect(out)).try_fold(None, |soonest, due| Ok(soonest.into_iter().chain(due?).min()))
    }

    /// The context is broken: everything ends with this error, and the streams do nothing any more.
    pub(crate) fn give_up(&self, error: EngineError, out: &mut Vec<Ride>) {
        for group in &self.groups {
            group.lanes().for_each(|lane| lane.give_up(error, out));
            out.extend(group.lock().drain(..).map(|(ride, _)| ride.lost(error)));
        }
    }

    /// An error is one of the whole context.
    pub(crate) fn check(&self) -> Result<(), CudaError> {
        self.groups[0].small[0].check()
    }
}
