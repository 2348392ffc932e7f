//! What a job holds of a domain while it runs, and how it gets it.
//!
//! [`Pins`] is born with the accessor's attachment, grows by translations and peer rights, and lets everything go when it is dropped. While it
//! lives, UNMAP of what it translated, withdrawal of the rights it uses and DETACH of its accessor drain: they let nobody in, and end with it.
//!
//! A translation asks the thread's [`Iotlb`] first, then the index, both without a lock, then the table, which alone can say no.
//!
//! Not here: bytes, what the pieces are used for.

use crate::domain::{Blame, Domain};
use crate::fault::{Fault, FaultReason, Refused};
use crate::iotlb::Iotlb;
use crate::record::{Owner, Run};
use iommu_addr::{Access, Addr, EndpointId, Iova, Range, Segment};
use smallvec::SmallVec;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Where a translated range lies, in order.
pub type Segments = SmallVec<[Segment; 2]>;

/// Pieces of one translation that cost no quota.
const FREE_PIECES: usize = 2;

/// What a job holds. `D` is how it holds the domain: `&Domain`, or for jobs that outlive a call `Arc<Domain>`.
#[must_use = "dropping this lets the pins go"]
pub struct Pins<D: Deref<Target = Domain>> {
    domain: D,
    accessor: EndpointId,
    /// Heads of pinned mappings.
    mappings: SmallVec<[u32; 4]>,
    /// Pinned gates; the accessor's attachment is the first.
    gates: SmallVec<[usize; 3]>,
    /// Pieces that cost quota.
    pieces: u32,
}

/// Pins that keep their domain, for jobs that outlive a call.
pub type PinnedRange = Pins<Arc<Domain>>;

impl<D: Deref<Target = Domain>> Pins<D> {
    /// Begins a job of `accessor`: pins its attachment to the domain.
    ///
    /// # Errors
    /// A fault with reason Domain, at address 0 and without access, if it is not attached.
    pub fn new(domain: D, accessor: EndpointId) -> Result<Self, Fault> {
        let Some(gate) = domain.pin_attached(accessor) else { return Err(domain.not_attached(accessor)) };
        let gates = SmallVec::from_buf_and_len([gate, 0, 0], 1);
        Ok(Self { domain, accessor, mappings: SmallVec::new(), gates, pieces: 0 })
    }

    /// The domain.
    pub fn domain(&self) -> &D {
        &self.domain
    }

    /// Who acts.
    pub fn accessor(&self) -> EndpointId {
        self.accessor
    }

    /// Makes the job one of `accessor`: pins its attachment, and lets the previous accessor's and its peer rights go. What was translated stays
    /// pinned. For a device that can choose who acts only once it knows whose memory it is.
    ///
    /// # Errors
    /// As [`Pins::new`]; then nothing has changed.
    pub fn act_as(&mut self, accessor: EndpointId) -> Result<(), Fault> {
        if accessor == self.accessor {
            return Ok(());
        }
        let Some(gate) = self.domain.pin_attached(accessor) else { return Err(self.domain.not_attached(accessor)) };
        self.release_gates();
        self.gates.clear();
        self.gates.push(gate);
        self.accessor = accessor;
        Ok(())
    }

    /// Translates `range` for `want` and pins every mapping that it touches. The pieces come back in order, the first and the last cut to the range.
    /// Blocks on nothing if the addresses are mapped, on the domain's lock else.
    ///
    /// # Errors
    /// A fault with the first address that is refused: not mapped, not allowed, or going away; or [`Refused::Pieces`]. Then nothing more is pinned
    /// than before.
    #[inline]
    pub fn translate(&mut self, iotlb: &mut Iotlb, range: Range<Iova>, want: Access) -> Result<Segments, Refused> {
        let mut segments = Segments::new();
        self.translate_into(&mut segments, iotlb, range, want).map(|()| segments)
    }

    /// As [`Pins::translate`], but replaces what is in `segments`, which saves moving them. After an error they are no translation of anything.
    ///
    /// # Errors
    /// As [`Pins::translate`].
    #[inline(always)]
    pub fn translate_into(
        &mut self,
        segments: &mut Segments,
        iotlb: &mut Iotlb,
        range: Range<Iova>,
        want: Access,
    ) -> Result<(), Refused> {
        segments.clear();
        let start = range.start();
        if let Some(run) = iotlb.find(self.domain.serial(), start)
            && run.range.last() >= range.last()
            && run.access.allows(want)
            && let Some(len) = range.len()
            && self.domain.tenant.pin(run.owner)
        {
            self.mappings.push(run.owner.head);
            segments.push(Segment { at: run.locate(start), len });
            iotlb.count_hit();
            return Ok(());
        }
        self.translate_slowly(segments, iotlb, range, want)
    }

    #[cold]
    fn translate_slowly(
        &mut self,
        segments: &mut Segments,
        iotlb: &mut Iotlb,
        range: Range<Iova>,
        want: Access,
    ) -> Result<(), Refused> {
        let (held, counted) = (self.mappings.len(), self.pieces);
        let translated = self.translate_pieces(segments, iotlb, range, want);
        if translated.is_err() {
            self.release(held, counted);
            self.mappings.truncate(held);
            self.pieces = counted;
        }
        translated
    }

    fn translate_pieces(
        &mut self,
        segments: &mut Segments,
        iotlb: &mut Iotlb,
        range: Range<Iova>,
        want: Access,
    ) -> Result<(), Refused> {
        let mut held = None;
        let mut left = Some(range);
        while let Some(part) = left {
            if segments.len() >= FREE_PIECES {
                let pieces = &self.domain.tenant.quotas.pieces;
                if !pieces.take(1) {
                    return Err(Refused::Pieces { limit: pieces.limit() });
                }
                self.pieces = self.pieces.saturating_add(1);
            }
            let at = part.start();
            let run = self.pin_at(iotlb, at, held).map_err(|blame| self.fault(at, want, blame))?;
            held = Some(run.owner);
            if !run.access.allows(want) {
                return Err(self.refuse(run.to.owner(), at, want, FaultReason::Permission).into());
            }
            let last = run.range.last().min(part.last());
            push(segments, &run, at, last);
            left = last.checked_add(1).and_then(|next| Range::new(next, range.last()));
        }
        Ok(())
    }

    /// Finds the run that holds `at` and pins its mapping, unless that is `held`, which is pinned.
    fn pin_at(&mut self, iotlb: &mut Iotlb, at: Iova, held: Option<Owner>) -> Result<Run, Blame> {
        let domain = &*self.domain;
        let is_pinned = |run: &Run| held == Some(run.owner) || domain.tenant.pin(run.owner);
        let remembered = iotlb.find(domain.serial(), at).copied().filter(is_pinned);
        let run = if let Some(run) = remembered {
            iotlb.count_hit();
            run
        } else {
            iotlb.count_miss();
            match domain.find(iotlb, at).filter(is_pinned) {
                Some(run) => run,
                None => domain.find_exactly(iotlb, at, held)?,
            }
        };
        if held != Some(run.owner) {
            self.mappings.push(run.owner.head);
        }
        Ok(run)
    }

    /// Makes sure that the accessor may reach `owner`'s memory with `want`, and pins the right. Its own memory it may always reach.
    ///
    /// # Errors
    /// A fault with reason Peer at `at`, the first address of that side.
    pub fn peer(&mut self, owner: EndpointId, want: Access, at: Iova) -> Result<(), Fault> {
        if owner == self.accessor {
            return Ok(());
        }
        let Some(needed) = self.domain.peer_gates(self.accessor, owner, want) else {
            return Err(self.refuse(Some(owner), at, want, FaultReason::Peer));
        };
        for gate in needed {
            if !self.gates.contains(&gate) {
                if !self.domain.pin_gate(gate) {
                    return Err(self.refuse(Some(owner), at, want, FaultReason::Peer));
                }
                self.gates.push(gate);
            }
        }
        Ok(())
    }

    #[inline]
    fn release_gates(&self) {
        for gate in &self.gates {
            self.domain.unpin_gate(*gate);
        }
    }

    /// A fault at an address that is pinned.
    #[cold]
    fn refuse(&self, owner: Option<EndpointId>, at: Iova, want: Access, reason: FaultReason) -> Fault {
        self.fault(at, want, Blame { reason, owner, mapping: self.domain.provenance(at) })
    }

    fn fault(&self, iova: Iova, access: Access, blame: Blame) -> Fault {
        let Blame { reason, owner, mapping } = blame;
        Fault { accessor: self.accessor, owner, domain: self.domain.id(), iova, access, reason, mapping }
    }

    /// Lets mappings beyond the first `held` go, and pieces beyond `counted`.
    #[inline(always)]
    fn release(&self, held: usize, counted: u32) {
        let tenant = &self.domain.tenant;
        for head in self.mappings.iter().skip(held) {
            if tenant.slab.at(*head).word.unpin() {
                self.domain.end_mapping_drain(*head);
            }
        }
        let pieces = self.pieces.saturating_sub(counted);
        if pieces > 0 {
            tenant.quotas.pieces.give(pieces);
        }
    }
}

impl<D: Deref<Target = Domain>> Drop for Pins<D> {
    #[inline]
    fn drop(&mut self) {
        self.release(0, 0);
        self.release_gates();
    }
}

impl<D: Deref<Target = Domain>> fmt::Debug for Pins<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pins")
            .field("domain", &self.domain.id())
            .field("accessor", &self.accessor)
            .finish_non_exhaustive()
    }
}

/// Adds addresses `at..=last` of a run, as part of the last segment if they follow it in memory.
fn push(segments: &mut Segments, run: &Run, at: Iova, last: Iova) {
    let mut from = run.locate(at);
    // The whole space is 2^64 bytes long, more than a segment can say: it comes in two pieces.
    let mut len = last.raw().wrapping_sub(at.raw()).wrapping_add(1);
    if len == 0 {
        len = 1 << 63;
        segments.push(Segment { at: from, len });
        from = from.checked_add(len).unwrap_or(from);
    }
    if let Some(previous) = segments.last_mut()
        && previous.at.checked_add(previous.len) == Some(from)
        && let Some(sum) = previous.len.checked_add(len)
    {
        previous.len = sum;
    } else {
        segments.push(Segment { at: from, len });
    }
}
