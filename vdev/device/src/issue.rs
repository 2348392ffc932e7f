//! From work to a transfer that an engine may carry out: translate, pin, check, plan.
//!
//! Order of refusals: the initiator's attachment, the source's translation, the destination's, peer rights, register access, overlap. What is
//! issued holds its pins until it is dropped, which must happen only after the engine has let go.
//!
//! Not here: telling anybody of a refusal, order, engines.

use std::sync::Arc;

use hw_engine::{Finished, Initiated, JobId, Segments, Transfer, Work as EngineWork};
use iommu_addr::{Access, ApertureOffset, DomainId, EndpointId, Iova, Location, Range, Segment};
use iommu_core::{Iotlb, Pins, Refused};
use smallvec::SmallVec;
use vdev_wire::FaultReason;

use crate::buffers::Buffer;
use crate::check::{bad_register_access, overlaps};
use crate::error::Fault;
use crate::plan::{Plan, addresses, cut};
use crate::work::{Operation, Work};
use crate::{Reach, RequestError};

/// Why nothing was issued.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Refusal {
    /// An access was refused: somebody has to be told.
    Fault(Fault),
    /// Anything else.
    Error(RequestError),
}

impl From<RequestError> for Refusal {
    fn from(error: RequestError) -> Self {
        Self::Error(error)
    }
}

impl From<iommu_core::Fault> for Refusal {
    fn from(fault: iommu_core::Fault) -> Self {
        let reason = match fault.reason {
            iommu_core::FaultReason::Domain => FaultReason::Domain,
            iommu_core::FaultReason::Mapping => FaultReason::Mapping,
            iommu_core::FaultReason::Permission => FaultReason::Permission,
            iommu_core::FaultReason::Peer => FaultReason::Peer,
            iommu_core::FaultReason::Stale => FaultReason::Stale,
            iommu_core::FaultReason::Draining => FaultReason::Draining,
            iommu_core::FaultReason::Access => FaultReason::Access,
        };
        let accessor = Some(fault.accessor);
        Self::Fault(Fault { accessor, owner: fault.owner, address: fault.iova, access: fault.access, reason })
    }
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Fault(fault) => fault.into(),
            Refused::Pieces { limit } => RequestError::Limit { what: "pieces", limit: u64::from(limit) }.into(),
        }
    }
}

/// Work that was issued: its pins, and how far it got.
pub(crate) struct Issued {
    /// Held until the engine has let go; `None` for the device's own scrubbing.
    _pins: Option<Pins<Arc<iommu_core::Domain>>>,
    /// What the engine has, or gets next.
    pub(crate) transfer: Transfer,
    /// All of it, if that is longer than one transfer may be.
    whole: Option<Box<Whole>>,
    len: u64,
    done: u64,
    /// Which way the bytes go; `None` if there are none.
    pub(crate) plan: Option<Plan>,
    /// Whose earlier work is to be made visible at the end.
    flush: SmallVec<[EndpointId; 2]>,
}

struct Whole {
    work: EngineWork,
    max_transfer: u64,
}

impl Issued {
    /// Bytes moved so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.done
    }

    /// Takes in the end of what the engine had. True if that was the last of it, else `transfer` is what comes next.
    ///
    /// # Errors
    /// The engine's, or `IoErr` from one that moved less than it was told.
    pub(crate) fn absorb(&mut self, finished: &Finished) -> Result<bool, RequestError> {
        let was_flush = matches!(self.transfer.work, EngineWork::Flush);
        if !was_flush {
            self.done = self.done.saturating_add(finished.bytes).min(self.len);
        }
        finished.result?;
        if !was_flush && self.done < self.len && !self.next_piece() {
            return Err(RequestError::Dropped);
        }
        Ok(self.done >= self.len && !self.next_flush())
    }

    /// Makes `transfer` the piece at `done`; false if the engine stopped short of the last one's end.
    fn next_piece(&mut self) -> bool {
        let Some(whole) = &self.whole else { return false };
        let (skip, len) = (self.done, whole.max_transfer);
        if !skip.is_multiple_of(len) {
            return false;
        }
        self.transfer.work = match &whole.work {
            EngineWork::Copy { src, dst, route } => {
                EngineWork::Copy { src: cut(src, skip, len), dst: cut(dst, skip, len), route: *route }
            }
            EngineWork::Fill { dst, pattern } => EngineWork::Fill { dst: cut(dst, skip, len), pattern: *pattern },
            EngineWork::Kernel { .. } | EngineWork::Flush => return false,
        };
        true
    }

    fn next_flush(&mut self) -> bool {
        let Some(endpoint) = self.flush.pop() else { return false };
        self.transfer.initiator = endpoint;
        self.transfer.work = EngineWork::Flush;
        true
    }
}

/// What issuing needs to know of the device.
#[derive(Clone, Copy)]
pub(crate) struct Planner<'a> {
    pub(crate) reach: &'a Reach,
    /// Longest transfer; a multiple of 8 so that every piece of a fill begins with the pattern's first byte.
    pub(crate) max_transfer: u64,
}

/// One translated side of a transfer.
struct Side {
    range: Range<Iova>,
    segments: Segments,
    want: Access,
}

impl Planner<'_> {
    /// Issues a guest's work in a domain.
    pub(crate) fn issue(
        self,
        iotlb: &mut Iotlb,
        domain: &Arc<iommu_core::Domain>,
        work: &Work,
    ) -> Result<Issued, Refusal> {
        let lowest = || domain.endpoints().next();
        let Some(acting) = work.initiator.or_else(lowest) else { return Err(no_domain(None).into()) };
        let mut pins = Pins::new(Arc::clone(domain), acting)?;
        let is_any = work.initiator.is_none();
        let translated = translate_work(&mut pins, iotlb, &work.operation);
        let (src, dst) = translated.map_err(|refusal| if is_any { anonymous(refusal) } else { refusal })?;
        let Some(dst) = dst else {
            let flush: SmallVec<[EndpointId; 2]> =
                if is_any { domain.endpoints().collect() } else { [acting].into_iter().collect() };
            return fence(pins, domain.id(), flush);
        };
        let src = src.as_ref();
        if is_any {
            choose(&mut pins, src, &dst)?;
        } else {
            allow(&mut pins, src, &dst)?;
        }
        check_registers(pins.accessor(), src, &dst)?;
        if let Some(src) = src
            && overlaps(&src.segments, &dst.segments)
        {
            return Err(RequestError::State { what: "source and destination overlap" }.into());
        }
        let flush = if work.system { SmallVec::from_iter([pins.accessor()]) } else { SmallVec::new() };
        Ok(self.plan(pins, domain.id(), &work.operation, src, dst, flush))
    }

    fn plan(
        self,
        pins: Pins<Arc<iommu_core::Domain>>,
        domain: DomainId,
        operation: &Operation,
        src: Option<&Side>,
        dst: Side,
        flush: SmallVec<[EndpointId; 2]>,
    ) -> Issued {
        let accessor = pins.accessor();
        let owners = |side: &Side| side.segments.iter().filter_map(|s| s.at.owner()).collect::<SmallVec<[_; 2]>>();
        let from = src.map(owners).unwrap_or_default();
        let plan = Plan::new(self.reach, accessor, from.into_iter().chain(owners(&dst)));
        let len = dst.range.len().unwrap_or(u64::MAX);
        let (work, initiator) = match operation {
            Operation::Fill { pattern, .. } => {
                // Nothing is to be read: whoever owns the memory fills it if the accessor does not reach it.
                let owner = dst.segments.first().and_then(|segment| segment.at.owner());
                let by_owner = owner.filter(|_| matches!(plan, Plan::Staged { .. }));
                (EngineWork::Fill { dst: dst.segments, pattern: *pattern }, by_owner.unwrap_or(accessor))
            }
            Operation::Copy { .. } | Operation::Fence => {
                let src = src.map(|side| side.segments.clone()).unwrap_or_default();
                (EngineWork::Copy { src, dst: dst.segments, route: plan.route() }, accessor)
            }
        };
        let transfer = Transfer { job: JobId(0), domain, initiator, work };
        self.pieces(Issued { _pins: Some(pins), transfer, whole: None, len, done: 0, plan: Some(plan), flush })
    }

    /// Cuts what is longer than a transfer may be.
    fn pieces(self, mut issued: Issued) -> Issued {
        if issued.len > self.max_transfer {
            let work = std::mem::replace(&mut issued.transfer.work, EngineWork::Flush);
            issued.whole = Some(Box::new(Whole { work, max_transfer: self.max_transfer }));
            issued.next_piece();
        }
        issued
    }

    /// Issues what a device's own logic asked for. Never cut.
    pub(crate) fn issue_kernel(
        self,
        iotlb: &mut Iotlb,
        domain: &Arc<iommu_core::Domain>,
        initiated: &Initiated,
    ) -> Result<Issued, Refusal> {
        let mut pins = Pins::new(Arc::clone(domain), initiated.endpoint)?;
        let src = translate(&mut pins, iotlb, initiated.src, Access::READ)?;
        let dst = translate(&mut pins, iotlb, initiated.dst, Access::WRITE)?;
        allow(&mut pins, Some(&src), &dst)?;
        for side in [&src, &dst] {
            let mut places = addresses(side.range.start(), &side.segments);
            if let Some((at, segment)) = places.find(|(_, segment)| segment.at.is_registers()) {
                return Err(bad_access(initiated.endpoint, segment.at.owner(), at, side.want).into());
            }
        }
        let len = dst.range.len().unwrap_or(u64::MAX);
        let work = EngineWork::Kernel { src: src.segments, dst: dst.segments };
        let transfer = Transfer { job: JobId(0), domain: domain.id(), initiator: initiated.endpoint, work };
        Ok(Issued { _pins: Some(pins), transfer, whole: None, len, done: 0, plan: None, flush: SmallVec::new() })
    }

    /// Issues the zeroing of a buffer that nobody can reach any more.
    pub(crate) fn issue_scrub(self, domain: DomainId, buffer: &Buffer) -> Issued {
        let at = Location::Aperture { endpoint: buffer.endpoint, offset: ApertureOffset(buffer.offset.unwrap_or(0)) };
        let dst = Segments::from_iter([Segment { at, len: buffer.len }]);
        let work = EngineWork::Fill { dst, pattern: 0 };
        let transfer = Transfer { job: JobId(0), domain, initiator: buffer.endpoint, work };
        let (len, flush) = (buffer.len, SmallVec::new());
        self.pieces(Issued { _pins: None, transfer, whole: None, len, done: 0, plan: None, flush })
    }
}

fn fence(
    pins: Pins<Arc<iommu_core::Domain>>,
    domain: DomainId,
    flush: SmallVec<[EndpointId; 2]>,
) -> Result<Issued, Refusal> {
    let transfer = Transfer { job: JobId(0), domain, initiator: pins.accessor(), work: EngineWork::Flush };
    let mut issued = Issued { _pins: Some(pins), transfer, whole: None, len: 0, done: 0, plan: None, flush };
    if issued.next_flush() { Ok(issued) } else { Err(no_domain(None).into()) }
}

type Sides = (Option<Side>, Option<Side>);

fn translate_work(
    pins: &mut Pins<Arc<iommu_core::Domain>>,
    iotlb: &mut Iotlb,
    operation: &Operation,
) -> Result<Sides, Refusal> {
    Ok(match operation {
        Operation::Copy { src, dst } => {
            let src = translate(pins, iotlb, *src, Access::READ)?;
            (Some(src), Some(translate(pins, iotlb, *dst, Access::WRITE)?))
        }
        Operation::Fill { dst, .. } => (None, Some(translate(pins, iotlb, *dst, Access::WRITE)?)),
        Operation::Fence => (None, None),
    })
}

fn translate(
    pins: &mut Pins<Arc<iommu_core::Domain>>,
    iotlb: &mut Iotlb,
    range: Range<Iova>,
    want: Access,
) -> Result<Side, Refusal> {
    Ok(Side { range, segments: pins.translate(iotlb, range, want)?, want })
}

/// Pins every peer right that the accessor needs.
fn allow(pins: &mut Pins<Arc<iommu_core::Domain>>, src: Option<&Side>, dst: &Side) -> Result<(), iommu_core::Fault> {
    for side in src.into_iter().chain([dst]) {
        for (at, segment) in addresses(side.range.start(), &side.segments) {
            if let Some(owner) = segment.at.owner() {
                pins.peer(owner, side.want, at)?;
            }
        }
    }
    Ok(())
}

/// Makes the first candidate that has every right the accessor: the owner of the source, the owner of the destination, whoever acts now.
fn choose(pins: &mut Pins<Arc<iommu_core::Domain>>, src: Option<&Side>, dst: &Side) -> Result<(), iommu_core::Fault> {
    let owner = |side: &Side| side.segments.iter().find_map(|segment| segment.at.owner());
    let (from, to) = (src.and_then(owner), owner(dst));
    let mut candidates: SmallVec<[EndpointId; 2]> = from.into_iter().chain(to).collect();
    if candidates.is_empty() {
        candidates.push(pins.accessor());
    }
    let mut refused = None;
    for candidate in candidates {
        match pins.act_as(candidate).and_then(|()| allow(pins, src, dst)) {
            Ok(()) => return Ok(()),
            Err(fault) => refused = refused.or(Some(fault)),
        }
    }
    refused.map_or(Ok(()), Err)
}

fn check_registers(accessor: EndpointId, src: Option<&Side>, dst: &Side) -> Result<(), Fault> {
    for side in src.into_iter().chain([dst]) {
        if let Some(at) = bad_register_access(side.range.start(), &side.segments) {
            let owner = side.segments.iter().find(|segment| segment.at.is_registers()).and_then(|s| s.at.owner());
            return Err(bad_access(accessor, owner, at, side.want));
        }
    }
    Ok(())
}

fn bad_access(accessor: EndpointId, owner: Option<EndpointId>, address: Iova, access: Access) -> Fault {
    Fault { accessor: Some(accessor), owner, address, access, reason: FaultReason::Access }
}

/// The domain is not there, or nobody is attached to it.
pub(crate) fn no_domain(accessor: Option<EndpointId>) -> Fault {
    Fault { accessor, owner: None, address: Iova(0), access: Access::NONE, reason: FaultReason::Domain }
}

/// The planner had chosen nobody yet.
fn anonymous(refusal: Refusal) -> Refusal {
    match refusal {
        Refusal::Fault(fault) => Refusal::Fault(Fault { accessor: None, ..fault }),
        error @ Refusal::Error(_) => error,
    }
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}
