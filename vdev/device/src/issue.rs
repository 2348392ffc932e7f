//! From work to a transfer that an engine may carry out: translate, pin, check, plan.
//!
//! Order of refusals: the initiator's attachment, the source's translation, the destination's, peer rights, register access, overlap. What is
//! issued holds its pins until it is dropped, which must happen only after the engine has let go.
//!
//! Not here: telling anybody of a refusal, order, engines.

use std::sync::Arc;

use hw_engine::{DmaEngine, Finished, Initiated, JobId, Segments, Transfer, Work as EngineWork};
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
        let iommu_core::Fault { accessor, owner, iova: address, access, mapping, .. } = fault;
        Self::Fault(Fault { accessor: Some(accessor), owner, address, access, reason, mapping })
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
    _pins: Option<DomainPins>,
    /// What the engine has, or gets next.
    pub(crate) transfer: Transfer,
    /// All of it, if that is longer than one transfer may be.
    whole: Option<Box<Whole>>,
    len: u64,
    done: u64,
    /// Which way the bytes go; `None` if there are none.
    pub(crate) plan: Option<Plan>,
    /// Whose earlier work is to be made visible at the end.
    pub(crate) flush: SmallVec<[EndpointId; 2]>,
    ran: bool,
    /// What an atomic operation found.
    value: u64,
}

struct Whole {
    work: EngineWork,
    max_transfer: u64,
}

impl Issued {
    pub(crate) fn new(pins: Option<DomainPins>, transfer: Transfer, len: u64) -> Self {
        Self {
            _pins: pins,
            transfer,
            whole: None,
            len,
            done: 0,
            plan: None,
            flush: SmallVec::new(),
            ran: false,
            value: 0,
        }
    }

    /// Bytes moved so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.done
    }

    /// What was there before an atomic operation.
    pub(crate) fn value(&self) -> u64 {
        self.value
    }

    /// Whether an engine has reported an end of it, or of a part.
    pub(crate) fn ran(&self) -> bool {
        self.ran
    }

    /// Takes in the end of what the engine had. True if that was the last of it, else `transfer` is what comes next.
    ///
    /// # Errors
    /// The engine's, or `IoErr` from one that moved less than it was told.
    pub(crate) fn absorb(&mut self, finished: &Finished) -> Result<bool, RequestError> {
        self.ran = true;
        let was_flush = matches!(self.transfer.work, EngineWork::Flush);
        if !was_flush {
            self.done = self.done.saturating_add(finished.bytes).min(self.len);
            self.value = finished.value;
        }
        finished.result?;
        // An engine that moved nothing, and says it was well, would be given the same piece for ever.
        if !was_flush && self.done < self.len && (finished.bytes == 0 || !self.next_piece()) {
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
            EngineWork::Kernel { .. } | EngineWork::Atomic { .. } | EngineWork::Flush => return false,
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
    pub(crate) engine: &'a dyn DmaEngine,
    /// Bytes that the engine takes at a time, whatever it does; a multiple of 8.
    pub(crate) max_transfer: u64,
}

/// One translated side of a transfer.
pub(crate) struct Side<'a> {
    start: Iova,
    segments: &'a [Segment],
    want: Access,
}

impl<'a> Side<'a> {
    pub(crate) fn new(range: Range<Iova>, segments: &'a [Segment], want: Access) -> Self {
        Self { start: range.start(), segments, want }
    }

    fn owners(&self) -> impl Iterator<Item = EndpointId> + '_ {
        self.segments.iter().filter_map(|segment| segment.at.owner())
    }

    /// Whose registers it touches; `None` if none.
    pub(crate) fn registers(&self) -> Option<EndpointId> {
        self.segments.iter().find(|segment| segment.at.is_registers())?.at.owner()
    }
}

pub(crate) type DomainPins = Pins<Arc<iommu_core::Domain>>;

impl Planner<'_> {
    /// Issues a guest's work in a domain.
    pub(crate) fn issue(
        self,
        iotlb: &mut Iotlb,
        domain: &Arc<iommu_core::Domain>,
        work: &Work,
    ) -> Result<Issued, Refusal> {
        let is_any = work.initiator.is_none();
        let lowest = || domain.endpoints().next();
        let Some(acting) = work.initiator.or_else(lowest) else { return Err(no_domain(None).into()) };
        let mut pins = Pins::new(Arc::clone(domain), acting)?;
        // Before somebody is chosen, nobody is to blame.
        let blame = |refused: Refused| match refused.into() {
            Refusal::Fault(fault) if is_any => Refusal::Fault(Fault { accessor: None, ..fault }),
            refusal => refusal,
        };
        let (work_of_engine, plan, len) = match work.operation {
            Operation::Copy { src, dst } => {
                let from = pins.translate(iotlb, src, Access::READ).map_err(blame)?;
                let to = pins.translate(iotlb, dst, Access::WRITE).map_err(blame)?;
                let sides = [Side::new(src, &from, Access::READ), Side::new(dst, &to, Access::WRITE)];
                let plan = self.check(&mut pins, is_any, &sides)?;
                if overlaps(&from, &to) {
                    return Err(RequestError::State { what: "source and destination overlap" }.into());
                }
                let plan = plan.within(|| self.engine.in_one_hop(pins.accessor(), &to, &from));
                (EngineWork::Copy { src: from, dst: to, route: plan.route() }, plan, dst.len())
            }
            Operation::Fill { dst, pattern } => {
                let to = pins.translate(iotlb, dst, Access::WRITE).map_err(blame)?;
                let plan = self.check(&mut pins, is_any, &[Side::new(dst, &to, Access::WRITE)])?;
                let plan = plan.within(|| self.engine.fills(pins.accessor(), &to));
                (EngineWork::Fill { dst: to, pattern }, plan, dst.len())
            }
            Operation::Atomic { at, atomic } => {
                let to = pins.translate(iotlb, at, Access::RW).map_err(blame)?;
                return self.issue_atomic(pins, is_any, (at, &to), atomic, work.system);
            }
            Operation::Fence => return fence(pins, domain, is_any),
        };
        let accessor = pins.accessor();
        let initiator = match &work_of_engine {
            // Nothing is to be read: whoever owns the memory fills it if the accessor does not reach it.
            EngineWork::Fill { dst, .. } if matches!(plan, Plan::Staged { .. }) => {
                dst.first().and_then(|segment| segment.at.owner()).unwrap_or(accessor)
            }
            _ => accessor,
        };
        let transfer = Transfer { job: JobId(0), domain: domain.id(), initiator, work: work_of_engine };
        let mut issued = Issued::new(Some(pins), transfer, len.unwrap_or(u64::MAX));
        issued.plan = Some(plan);
        if work.system {
            issued.flush.push(accessor);
        }
        self.cut(&mut issued);
        Ok(issued)
    }

    /// Peer rights, register access, and the way to go. An accessor that may be any becomes the first that has every right.
    pub(crate) fn check(self, pins: &mut DomainPins, is_any: bool, sides: &[Side<'_>]) -> Result<Plan, Refusal> {
        if is_any { choose(pins, sides) } else { allow(pins, sides) }?;
        check_registers(pins, sides)?;
        Ok(Plan::new(self.reach, pins.accessor(), sides.iter().flat_map(Side::owners)))
    }

    /// Cuts what is longer than a transfer may be.
    fn cut(self, issued: &mut Issued) {
        if issued.len > self.max_transfer {
            // A multiple of 8, so that every piece of a fill begins with the pattern's first byte.
            let max_transfer = (self.engine.longest(&issued.transfer) & !7).max(self.max_transfer);
            if issued.len <= max_transfer {
                return;
            }
            let work = std::mem::replace(&mut issued.transfer.work, EngineWork::Flush);
            issued.whole = Some(Box::new(Whole { work, max_transfer }));
            issued.next_piece();
        }
    }

    /// Issues what a device's own logic asked for. Never cut.
    pub(crate) fn issue_kernel(
        self,
        iotlb: &mut Iotlb,
        domain: &Arc<iommu_core::Domain>,
        initiated: &Initiated,
    ) -> Result<Issued, Refusal> {
        let mut pins = Pins::new(Arc::clone(domain), initiated.endpoint)?;
        let from = pins.translate(iotlb, initiated.src, Access::READ)?;
        let to = pins.translate(iotlb, initiated.dst, Access::WRITE)?;
        let sides = [Side::new(initiated.src, &from, Access::READ), Side::new(initiated.dst, &to, Access::WRITE)];
        allow(&mut pins, &sides)?;
        for side in &sides {
            let mut places = addresses(side.start, side.segments);
            if let Some((at, segment)) = places.find(|(_, segment)| segment.at.is_registers()) {
                return Err(bad_access(&pins, segment.at.owner(), at, side.want).into());
            }
        }
        let work = EngineWork::Kernel { src: from, dst: to };
        let transfer = Transfer { job: JobId(0), domain: domain.id(), initiator: initiated.endpoint, work };
        Ok(Issued::new(Some(pins), transfer, initiated.dst.len().unwrap_or(u64::MAX)))
    }

    /// Issues the zeroing of a buffer that nobody can reach any more.
    pub(crate) fn issue_scrub(self, domain: DomainId, buffer: &Buffer) -> Issued {
        let at = Location::Aperture { endpoint: buffer.endpoint, offset: ApertureOffset(buffer.offset.unwrap_or(0)) };
        let dst = Segments::from_iter([Segment { at, len: buffer.len }]);
        let work = EngineWork::Fill { dst, pattern: 0 };
        let transfer = Transfer { job: JobId(0), domain, initiator: buffer.endpoint, work };
        let mut issued = Issued::new(None, transfer, buffer.len);
        self.cut(&mut issued);
        issued
    }
}

/// A fence flushes its initiator, or every attached endpoint.
fn fence(pins: DomainPins, domain: &iommu_core::Domain, is_any: bool) -> Result<Issued, Refusal> {
    let accessor = pins.accessor();
    let transfer = Transfer { job: JobId(0), domain: domain.id(), initiator: accessor, work: EngineWork::Flush };
    let mut issued = Issued::new(Some(pins), transfer, 0);
    if is_any {
        issued.flush.extend(domain.endpoints());
    } else {
        issued.flush.push(accessor);
    }
    if issued.next_flush() { Ok(issued) } else { Err(no_domain(None).into()) }
}

/// Pins every peer right that the accessor needs.
fn allow(pins: &mut DomainPins, sides: &[Side<'_>]) -> Result<(), iommu_core::Fault> {
    for side in sides {
        for (at, segment) in addresses(side.start, side.segments) {
            if let Some(owner) = segment.at.owner() {
                pins.peer(owner, side.want, at)?;
            }
        }
    }
    Ok(())
}

/// Makes the first candidate that has every right the accessor: the owner of the source, the owner of the destination, or without either
/// whoever acts now.
fn choose(pins: &mut DomainPins, sides: &[Side<'_>]) -> Result<(), iommu_core::Fault> {
    let mut refused = None;
    for candidate in sides.iter().filter_map(|side| side.owners().next()) {
        match pins.act_as(candidate).and_then(|()| allow(pins, sides)) {
            Ok(()) => return Ok(()),
            Err(fault) => refused = refused.or(Some(fault)),
        }
    }
    refused.map_or(Ok(()), Err)
}

fn check_registers(pins: &DomainPins, sides: &[Side<'_>]) -> Result<(), Fault> {
    let mut touched = 0_usize;
    for side in sides {
        let Some(owner) = side.registers() else { continue };
        touched = touched.saturating_add(1);
        // One access is a load or a store, not both.
        let bad = bad_register_access(side.start, side.segments).or((touched > 1).then_some(side.start));
        if let Some(at) = bad {
            return Err(bad_access(pins, Some(owner), at, side.want));
        }
    }
    Ok(())
}

pub(crate) fn bad_access(pins: &DomainPins, owner: Option<EndpointId>, address: Iova, access: Access) -> Fault {
    let (accessor, mapping) = (Some(pins.accessor()), pins.domain().provenance(address));
    Fault { accessor, owner, address, access, reason: FaultReason::Access, mapping }
}

/// The domain is not there, or nobody is attached to it.
pub(crate) fn no_domain(accessor: Option<EndpointId>) -> Fault {
    let (address, access, reason) = (Iova(0), Access::NONE, FaultReason::Domain);
    Fault { accessor, owner: None, address, access, reason, mapping: None }
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}
