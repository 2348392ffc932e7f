//! What a translated transfer must satisfy besides its translation: overlap, and how registers may be touched. Default deny.
//!
//! Peer rights are checked where they are pinned, in `issue`.

use hw_engine::total_len;
use iommu_addr::{Addr, Iova, Location, Segment};

use crate::plan::addresses;

/// Segment pairs up to which the overlap check simply tries them all.
const FEW: usize = 16;

/// Whether a copy would write bytes that it also reads. Copying every byte onto itself does not count.
pub(crate) fn overlaps(src: &[Segment], dst: &[Segment]) -> bool {
    if let ([a], [b]) = (src, dst) {
        return a != b && touch(a, b);
    }
    if src == dst {
        return false;
    }
    if src.len().saturating_mul(dst.len()) <= FEW {
        return src.iter().any(|a| dst.iter().any(|b| touch(a, b)));
    }
    // Sweep over both lists in address order: an overlap is found where a segment begins before one of the other list has ended.
    let mut sorted: Vec<_> = src.iter().map(|s| (false, s)).chain(dst.iter().map(|s| (true, s))).collect();
    sorted.sort_by_key(|(_, segment)| place(segment));
    let mut ends = [None, None];
    for (is_dst, segment) in sorted {
        let (space, start) = place(segment);
        let last = start.saturating_add(segment.len.saturating_sub(1));
        let [src_end, dst_end] = &mut ends;
        let (own, other) = if is_dst { (dst_end, src_end) } else { (src_end, dst_end) };
        if *other >= Some((space, start)) {
            return true;
        }
        *own = (*own).max(Some((space, last)));
    }
    false
}

/// Space, and first address in it.
fn place(segment: &Segment) -> (u64, u64) {
    match segment.at {
        Location::Ram(gpa) => (0, gpa.raw()),
        Location::Aperture { endpoint, offset } => (u64::from(endpoint.to_raw()).saturating_add(1), offset.raw()),
    }
}

fn touch(a: &Segment, b: &Segment) -> bool {
    let ((space_a, start_a), (space_b, start_b)) = (place(a), place(b));
    let last = |start: u64, segment: &Segment| start.saturating_add(segment.len.saturating_sub(1));
    space_a == space_b && start_a <= last(start_b, b) && start_b <= last(start_a, a)
}

/// The first address of this side that touches registers in a way they do not have: all but one naturally aligned access of 4 or 8 bytes.
pub(crate) fn bad_register_access(start: Iova, side: &[Segment]) -> Option<Iova> {
    let (at, touched) = addresses(start, side).find(|(_, segment)| segment.at.is_registers())?;
    let Location::Aperture { offset, .. } = touched.at else { return None };
    let whole = total_len(side);
    let is_access = side.len() == 1 && matches!(whole, 4 | 8) && offset.raw().is_multiple_of(whole);
    (!is_access).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use iommu_addr::{ApertureOffset, EndpointId, Gpa, REGISTERS};
    use proptest::prelude::*;

    fn ram(gpa: u64, len: u64) -> Segment {
        Segment { at: Location::Ram(Gpa(gpa)), len }
    }

    fn device(id: u16, offset: u64, len: u64) -> Segment {
        let (endpoint, offset) = (EndpointId::local(id), ApertureOffset(offset));
        Segment { at: Location::Aperture { endpoint, offset }, len }
    }

    #[test]
    fn same_numbers_in_different_spaces_do_not_overlap() {
        assert!(!overlaps(&[ram(0, 8)], &[device(0, 0, 8)]));
        assert!(!overlaps(&[device(1, 0, 8)], &[device(0, 0, 8)]));
        assert!(overlaps(&[device(1, 0, 8)], &[device(1, 7, 8)]));
        assert!(!overlaps(&[ram(0, 8)], &[ram(8, 8)]));
        assert!(!overlaps(&[ram(0, 8)], &[ram(0, 8)]), "onto itself");
    }

    #[test]
    fn registers_take_one_aligned_access() {
        let at = |offset, len| bad_register_access(Iova(0x1000), &[device(0, REGISTERS.0 + offset, len)]);
        assert_eq!(at(8, 8), None);
        assert_eq!(at(4, 4), None);
        assert_eq!(at(4, 8), Some(Iova(0x1000)), "not aligned");
        assert_eq!(at(0, 2), Some(Iova(0x1000)), "too short");
        assert_eq!(at(0, 16), Some(Iova(0x1000)), "too long");
        let mixed = [ram(0, 4), device(0, REGISTERS.0, 4)];
        assert_eq!(bad_register_access(Iova(0x1000), &mixed), Some(Iova(0x1004)));
        assert_eq!(bad_register_access(Iova(0), &[ram(0, 3), device(0, 0, 7)]), None);
    }

    proptest! {
        #[test]
        fn overlap_is_a_shared_byte(
            src in proptest::collection::vec((0u64..400, 1u64..9), 1..12),
            dst in proptest::collection::vec((0u64..400, 1u64..9), 1..12),
        ) {
            let list = |spec: &[(u64, u64)]| spec.iter().map(|(gpa, len)| ram(*gpa, *len)).collect::<Vec<_>>();
            let bytes = |spec: &[(u64, u64)]| spec.iter().flat_map(|(gpa, len)| *gpa..gpa + len).collect::<Vec<_>>();
            let shared = bytes(&src).iter().any(|byte| bytes(&dst).contains(byte));
            prop_assert_eq!(overlaps(&list(&src), &list(&dst)), shared && src != dst);
        }
    }
}
