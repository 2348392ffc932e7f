//! Issuing an atomic operation: who makes it.
//!
//! Not here: its bytes (`work`), what else work has to satisfy (`issue`).

use hw_engine::{Atomic, JobId, Transfer, Work};
use iommu_addr::{Access, Iova, Range, Segment};

use crate::RequestError;
use crate::issue::{DomainPins, Issued, Planner, Refusal, Side, bad_access};
use crate::plan::Plan;

impl Planner<'_> {
    /// The accessor makes it if it has atomic operations on that memory, else whose memory it is, for the accessor; so it is atomic in any case. `to` is what
    /// `at` was translated to.
    pub(crate) fn issue_atomic(
        self,
        mut pins: DomainPins,
        is_any: bool,
        (at, to): (Range<Iova>, &[Segment]),
        atomic: Atomic,
        system: bool,
    ) -> Result<Issued, Refusal> {
        let side = Side::new(at, to, Access::RW);
        let registers = side.registers();
        let plan = self.check(&mut pins, is_any, &[side])?;
        if registers.is_some() {
            return Err(bad_access(&pins, registers, at.start(), Access::RW).into());
        }
        // Aligned as it is, it lies within one page.
        let [word] = to else { return Err(RequestError::State { what: "the word is in pieces" }.into()) };
        let accessor = pins.accessor();
        let reaches = !matches!(plan, Plan::Staged { .. });
        let mut able = [reaches.then_some(accessor), word.at.owner()].into_iter().flatten();
        let Some(initiator) = able.find(|endpoint| self.engine.has_atomics(*endpoint, word.at)) else {
            return Err(RequestError::Unknown { what: "atomic operations on this memory", value: at.start().0 }.into());
        };
        let (domain, work) = (pins.domain().id(), Work::Atomic { at: word.at, atomic });
        let transfer = Transfer { job: JobId(0), domain, initiator, work };
        let mut issued = Issued::new(Some(pins), transfer, atomic.len);
        issued.plan = Some(plan.within(|| initiator == accessor));
        if system {
            issued.flush.push(accessor);
        }
        Ok(issued)
    }
}
