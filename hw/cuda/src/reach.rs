//! What of a transfer a GPU's engines can do: from locations to addresses that it has.
//!
//! Not here: when it is done.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hw_engine::{EngineError, Memory, MemoryError, Pairs, Place};
use iommu_addr::{ApertureOffset, EndpointId, Location, Segment};
use smallvec::SmallVec;

use crate::atomic::Kernel;
use crate::driver::CudaError;
use crate::gpu::{Gpu, Piece};
use crate::registry::{Registration, Registry};
use crate::slice::Slice;

/// A slice, and the number of its GPU among the engine's.
pub(crate) struct Own {
    pub(crate) slice: Slice,
    pub(crate) gpu: usize,
}

/// Every place that the engine knows.
pub(crate) struct Reach {
    /// Few, so looking through them is quickest.
    slices: Vec<(EndpointId, Own)>,
    /// By the numbers of GPUs: whether the first reaches the second.
    peers: Vec<Vec<bool>>,
    /// The same: whether atomic operations of the first one's programs are atomic in the second one's memory.
    atomics: Vec<Vec<bool>>,
    memory: Arc<dyn Memory>,
    registry: Registry,
    /// What memory is being registered for was given up.
    given_up: AtomicBool,
    refusals: Seldom,
}

/// How long nothing is said of memory that cannot be given to a GPU once something was: a guest can cause that with every transfer.
const QUIET: Duration = Duration::from_secs(60);

/// When something was last said.
#[derive(Default)]
struct Seldom(Mutex<Option<Instant>>);

impl Seldom {
    /// Whether it is time to say something again.
    fn is_due(&self, now: Instant) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.is_none_or(|last| now.saturating_duration_since(last) >= QUIET);
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}

/// Why a transfer cannot begin.
#[derive(Debug)]
pub(crate) enum Unready {
    /// It is for the engine's own thread: memory is to be registered first, or somebody has to wait.
    Unregistered,
    /// It never can.
    Error(EngineError),
}

/// Where bytes are.
enum End {
    Own { gpu: usize, address: u64 },
    Host(Place),
}

/// A copy in addresses.
#[derive(Debug, Default)]
pub(crate) struct Ready {
    pub(crate) pieces: SmallVec<[Piece; 2]>,
    pub(crate) holds: SmallVec<[Arc<Registration>; 2]>,
    pub(crate) way: Option<Way>,
    /// Whose engines make it.
    pub(crate) gpu: usize,
    pub(crate) len: u64,
}

impl Ready {
    /// Whether an end of it overlaps the other.
    pub(crate) fn overlaps(&self) -> bool {
        self.pieces.iter().any(|piece| piece.dst.abs_diff(piece.src) < piece.len)
    }
}

/// Addresses, each with so many bytes.
pub(crate) type Places = SmallVec<[(u64, u64); 2]>;

/// Which engine of a GPU a copy needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From a GPU to this process's memory.
    Out,
    /// The other way.
    In,
    /// Within a GPU.
    Local,
    /// From a GPU to another.
    Peer,
}

impl Reach {
    /// Lets every GPU reach the slices of all those that it can reach.
    pub(crate) fn new(
        slices: Vec<(EndpointId, Own)>,
        gpus: &[Arc<Gpu>],
        memory: Arc<dyn Memory>,
        limit: usize,
    ) -> Result<Self, CudaError> {
        let reaches = |from: &Arc<Gpu>, to: &Arc<Gpu>| from.is_same(to) || from.reaches(to);
        let peers: Vec<Vec<_>> = gpus.iter().map(|from| gpus.iter().map(|to| reaches(from, to)).collect()).collect();
        let has = |from: &Arc<Gpu>, to: &Arc<Gpu>| from.is_same(to) || from.peer(to).atomics;
        let atomics = gpus.iter().map(|from| gpus.iter().map(|to| has(from, to)).collect()).collect();
        for (_, own) in &slices {
            let able = gpus.iter().zip(&peers).filter(|(_, peers)| peers[own.gpu]).map(|(gpu, _)| gpu);
            own.slice.allow(&able.collect::<Vec<_>>())?;
        }
        let registry = Registry::new(&gpus[0], limit);
        Ok(Self {
            slices,
            peers,
            atomics,
            memory,
            registry,
            given_up: AtomicBool::new(false),
            refusals: Seldom::default(),
        })
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The endpoint's slice, if it is one of these GPUs'.
    pub(crate) fn own(&self, endpoint: EndpointId) -> Option<&Own> {
        self.slices.iter().find(|(of, _)| *of == endpoint).map(|(_, own)| own)
    }

    /// Where a place is, and how many of its bytes are together there, at most `most`.
    fn end(&self, at: Location, most: u64) -> Option<(End, u64)> {
        if let Location::Aperture { endpoint, offset } = at
            && let Some(own) = self.own(endpoint)
        {
            let left = own.slice.len().checked_sub(offset.0).filter(|left| *left > 0)?;
            return Some((End::Own { gpu: own.gpu, address: own.slice.base() + offset.0 }, left.min(most)));
        }
        let place = self.memory.place(at, most)?;
        let len = place.len;
        Some((End::Host(place), len))
    }

    /// The GPU that would make a copy: the initiator's, or that of the first slice in it. `None` if there is none.
    fn gpu_for(&self, initiator: EndpointId, places: impl Iterator<Item = Location>) -> Option<usize> {
        let of = |endpoint| self.own(endpoint).map(|own| own.gpu);
        of(initiator).or_else(|| places.filter_map(|at| of(at.owner()?)).next())
    }

    /// The GPU that has all of a source, if it reaches the slices that the bytes go to: from one GPU to another, writing takes fewer ways than reading.
    fn writer(&self, dst: &[Segment], src: &[Segment]) -> Option<usize> {
        let of = |segment: &Segment| self.own(segment.at.owner()?).map(|own| own.gpu);
        let gpu = of(src.first()?)?;
        let has_all = src.iter().all(|segment| of(segment) == Some(gpu));
        let reaches_all = || dst.iter().all(|segment| of(segment).is_some_and(|to| self.peers[gpu][to]));
        (has_all && reaches_all()).then_some(gpu)
    }

    /// The GPU that would fill places: the initiator's, or one that has some of them. `None` if no one reaches all that are slices.
    pub(crate) fn filler(&self, initiator: EndpointId, dst: &[Segment]) -> Option<usize> {
        let of = |endpoint| self.own(endpoint).map(|own| own.gpu);
        let owners = || dst.iter().filter_map(|segment| of(segment.at.owner()?));
        of(initiator).into_iter().chain(owners()).find(|gpu| owners().all(|owner| self.peers[*gpu][owner]))
    }

    /// The GPU that makes an atomic operation for an initiator on a word of so many bytes, with what it runs and the word's address.
    pub(crate) fn atomic(&self, initiator: EndpointId, at: Location, len: u64) -> Option<(usize, Kernel, u64)> {
        let Location::Aperture { endpoint, offset: ApertureOffset(offset) } = at else { return None };
        let (actor, own) = (self.own(initiator)?, self.own(endpoint)?);
        let is_there = offset.is_multiple_of(len) && offset.checked_add(len).is_some_and(|end| end <= own.slice.len());
        let kernel = actor.slice.gpu().kernel().filter(|_| is_there && self.atomics[actor.gpu][own.gpu])?;
        Some((actor.gpu, kernel, own.slice.base() + offset))
    }

    /// Whether a GPU copies these places from one to the other: each piece has an end that is a slice which it reaches, and no end that it does not.
    pub(crate) fn in_one_hop(&self, initiator: EndpointId, dst: &[Segment], src: &[Segment]) -> bool {
        let Some(gpu) = self.gpu_for(initiator, dst.iter().chain(src).map(|segment| segment.at)) else { return false };
        let mut pairs = Pairs::new(dst, src);
        pairs.all(|pair| {
            let mut has_own = false;
            let reached =
                [pair.dst, pair.src].into_iter().all(|at| match at.owner().and_then(|owner| self.own(owner)) {
                    Some(own) => {
                        has_own = true;
                        self.peers[gpu][own.gpu]
                    }
                    None => self.memory.has_place(at),
                });
            reached && has_own
        })
    }

    /// No more memory is registered for what it is being registered for.
    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    /// Something else comes.
    pub(crate) fn go_on(&self) {
        self.given_up.store(false, Ordering::Relaxed);
    }

    /// Turns a copy into addresses; `may_block` says whether memory that is not registered is to be registered for it.
    pub(crate) fn copy(
        &self,
        initiator: EndpointId,
        dst: &[Segment],
        src: &[Segment],
        may_block: bool,
    ) -> Result<Ready, Unready> {
        let at = dst.first().map_or(Location::Ram(iommu_addr::Gpa(0)), |segment| segment.at);
        let missing = |at, len| Unready::Error(MemoryError { at, len }.into());
        let places = dst.iter().chain(src).map(|segment| segment.at);
        let writer = self.writer(dst, src).or_else(|| self.gpu_for(initiator, places));
        let gpu = writer.ok_or_else(|| missing(at, 0))?;
        let mut ready = Ready { gpu, ..Ready::default() };
        for pair in Pairs::new(dst, src) {
            let mut done = 0;
            while done < pair.len {
                let left = pair.len - done;
                let find = |at: Location| {
                    let found = at.checked_add(done).and_then(|next| self.end(next, left));
                    found.ok_or_else(|| missing(at, pair.len))
                };
                let ((to, to_len), (from, from_len)) = (find(pair.dst)?, find(pair.src)?);
                let way = match (&to, &from) {
                    (End::Own { gpu: to, .. }, End::Own { gpu: from, .. }) if to != from => Way::Peer,
                    (End::Own { .. }, End::Own { .. }) => Way::Local,
                    (End::Own { .. }, End::Host(_)) => Way::In,
                    (End::Host(_), End::Own { .. }) => Way::Out,
                    (End::Host(_), End::Host(_)) => return Err(missing(pair.dst, pair.len)),
                };
                let len = to_len.min(from_len);
                let (dst, len) = self.address(to, len, may_block, &mut ready)?;
                let (src, len) = self.address(from, len, may_block, &mut ready)?;
                ready.pieces.push(Piece { dst, src, len });
                ready.way = ready.way.or(Some(way));
                ready.len += len;
                done += len;
            }
        }
        Ok(ready)
    }

    /// Turns the destination of a fill by a GPU into addresses.
    pub(crate) fn places(&self, gpu: usize, dst: &[Segment], may_block: bool) -> Result<(Ready, Places), Unready> {
        let missing = |at, len| Unready::Error(MemoryError { at, len }.into());
        let (mut ready, mut places) = (Ready { gpu, ..Ready::default() }, SmallVec::new());
        for segment in dst {
            let mut done = 0;
            while done < segment.len {
                let next = segment.at.checked_add(done).and_then(|next| self.end(next, segment.len - done));
                let (end, len) = next.ok_or_else(|| missing(segment.at, segment.len))?;
                let (address, len) = self.address(end, len, may_block, &mut ready)?;
                places.push((address, len));
                ready.len += len;
                done += len;
            }
        }
        Ok((ready, places))
    }

    /// The address that a GPU has for an end, and how many of `len` bytes are reached by one copy.
    fn address(&self, end: End, len: u64, may_block: bool, ready: &mut Ready) -> Result<(u64, u64), Unready> {
        match end {
            End::Own { gpu, address } if self.peers[ready.gpu][gpu] => Ok((address, len)),
            End::Own { .. } => Err(Unready::Error(EngineError::Device { code: u32::MAX })),
            End::Host(place) => {
                let place = Place { len, ..place };
                let found = match self.registry.find(&place) {
                    Some(found) => found,
                    // Each may take tens of milliseconds.
                    None if may_block && self.given_up.load(Ordering::Relaxed) => {
                        return Err(Unready::Error(EngineError::Aborted));
                    }
                    None if may_block => self.registry.require(&place).map_err(|error| {
                        self.tell(&place, &error);
                        Unready::Error(crate::lane::device_error(&error))
                    })?,
                    None => return Err(Unready::Unregistered),
                };
                let (registration, within) = found;
                let is_new = |hold: &Arc<Registration>| !Arc::ptr_eq(hold, &registration);
                if ready.holds.iter().all(is_new) {
                    ready.holds.push(registration);
                }
                Ok((place.address, within))
            }
        }
    }

    /// Says that memory cannot be given to a GPU, and what to do, but not for every transfer that finds that out.
    fn tell(&self, place: &Place, error: &CudaError) {
        if !self.refusals.is_due(Instant::now()) {
            return tracing::debug!("Memory can still not be given to a GPU: {error}");
        }
        let advice = if place.is_device {
            "copies between it and this device's BAR fail; stage the pair"
        } else {
            "transfers there fail; back the VM's memory with a memfd or hugetlbfs, as the kernel pins no pages of files on a disk for good"
        };
        tracing::warn!("Memory cannot be given to a GPU ({error}): {advice}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_does_not_fill_the_log() {
        let (seldom, start) = (Seldom::default(), Instant::now());
        let is_due = |after| seldom.is_due(start + after);
        assert!(is_due(Duration::ZERO));
        assert!(!is_due(Duration::ZERO) && !is_due(QUIET / 2));
        assert!(is_due(QUIET) && !is_due(QUIET));
    }
}
