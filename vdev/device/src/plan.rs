//! Which way the bytes go, as data.
//!
//! Not here: rights (already checked), carrying it out.

use hw_engine::{Route, Segments};
use iommu_addr::{Addr, EndpointId, Iova, Segment};
use vdev_wire::{PathReason, TransferPath};

use crate::Reach;

/// The way of one transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Straight from device to device.
    Direct {
        /// Why.
        reason: PathReason,
    },
    /// Through host memory.
    Staged {
        /// Why.
        reason: PathReason,
    },
    /// Within one device, or between a device and the guest's memory.
    Local {
        /// Why.
        reason: PathReason,
    },
}

impl Plan {
    /// A plan for a transfer of `initiator` to and from memory of `owners`, to which it has every right; guest memory has none.
    pub fn new(reach: &Reach, initiator: EndpointId, owners: impl Iterator<Item = EndpointId>) -> Self {
        let mut plan = Self::Local { reason: PathReason::SameDevice };
        for owner in owners.filter(|owner| *owner != initiator) {
            match reach.verdict(initiator, owner) {
                (TransferPath::Staged, reason) => return Self::Staged { reason },
                (_, reason) => plan = Self::Direct { reason },
            }
        }
        plan
    }

    /// The same plan, or a staged one if the initiator's engine does not make the transfer `in_one_hop`.
    pub fn within(self, in_one_hop: impl FnOnce() -> bool) -> Self {
        if matches!(self, Self::Staged { .. }) || in_one_hop() {
            self
        } else {
            Self::Staged { reason: PathReason::EngineCannot }
        }
    }

    /// As the completion record says it.
    pub fn path(self) -> TransferPath {
        match self {
            Self::Direct { .. } => TransferPath::Direct,
            Self::Staged { .. } => TransferPath::Staged,
            Self::Local { .. } => TransferPath::Local,
        }
    }

    /// Why.
    pub fn reason(self) -> PathReason {
        match self {
            Self::Direct { reason } | Self::Staged { reason } | Self::Local { reason } => reason,
        }
    }

    /// As an engine is told.
    pub fn route(self) -> Route {
        match self {
            Self::Staged { .. } => Route::Staged,
            Self::Direct { .. } | Self::Local { .. } => Route::Direct,
        }
    }
}

/// Bytes `skip..skip + len` of places laid end to end, as far as there are any.
pub(crate) fn cut(segments: &[Segment], skip: u64, len: u64) -> Segments {
    let (mut skip, mut left) = (skip, len);
    let mut piece = Segments::new();
    for segment in segments {
        if left == 0 {
            break;
        }
        if let Some(beyond) = skip.checked_sub(segment.len) {
            skip = beyond;
            continue;
        }
        let len = segment.len.saturating_sub(skip).min(left);
        if let Some(at) = segment.at.checked_add(skip) {
            piece.push(Segment { at, len });
        }
        left = left.saturating_sub(len);
        skip = 0;
    }
    piece
}

/// Each segment with the address that it translates.
pub(crate) fn addresses(start: Iova, segments: &[Segment]) -> impl Iterator<Item = (Iova, &Segment)> {
    let mut next = start;
    segments.iter().map(move |segment| {
        let at = next;
        next = at.checked_add(segment.len).unwrap_or(at);
        (at, segment)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use iommu_addr::{Gpa, Location};

    fn ram(gpa: u64, len: u64) -> Segment {
        Segment { at: Location::Ram(Gpa(gpa)), len }
    }

    #[test]
    fn one_unreachable_owner_stages_the_whole() {
        let [a, b, c] = [0, 1, 2].map(EndpointId::local);
        let mut reach = Reach::all();
        reach.deny(a, c, PathReason::PeerUnreachable);
        let plan = |owners: &[EndpointId]| Plan::new(&reach, a, owners.iter().copied());
        assert_eq!(plan(&[]), Plan::Local { reason: PathReason::SameDevice });
        assert_eq!(plan(&[a]), Plan::Local { reason: PathReason::SameDevice });
        assert_eq!(plan(&[a, b]), Plan::Direct { reason: PathReason::PeerReachable });
        assert_eq!(plan(&[b, c]), Plan::Staged { reason: PathReason::PeerUnreachable });
        assert_eq!(plan(&[c]).route(), Route::Staged);
    }

    #[test]
    fn what_takes_two_hops_is_staged_whatever_the_endpoints_reach() {
        let (direct, local) =
            (Plan::Direct { reason: PathReason::PeerReachable }, Plan::Local { reason: PathReason::SameDevice });
        let policy = Plan::Staged { reason: PathReason::Policy };
        assert_eq!([direct, local, policy].map(|plan| plan.within(|| true)), [direct, local, policy]);
        let cannot = Plan::Staged { reason: PathReason::EngineCannot };
        assert_eq!([direct, local].map(|plan| plan.within(|| false)), [cannot, cannot]);
        assert_eq!(policy.within(|| unreachable!("not asked: it is staged already")), policy);
    }

    #[test]
    fn pieces_cover_the_whole_exactly_once() {
        let whole = [ram(0, 3), ram(100, 5), ram(200, 2)];
        let bytes = |segments: &[Segment]| -> Vec<u64> {
            segments
                .iter()
                .flat_map(|s| match s.at {
                    Location::Ram(gpa) => gpa.0..gpa.0 + s.len,
                    Location::Aperture { .. } => 0..0,
                })
                .collect()
        };
        for size in 1..12 {
            let cuts: Vec<u64> =
                (0..10).step_by(size as usize).flat_map(|skip| bytes(&cut(&whole, skip, size))).collect();
            assert_eq!(cuts, bytes(&whole), "pieces of {size}");
        }
        assert!(cut(&whole, 10, 4).is_empty());
    }
}
