//! Walking two segment lists side by side.
//!
//! [`Pairs`] cuts two lists into pieces that are contiguous on both sides; the functions here move the bytes of each piece through a
//! [`Memory`], in order, and count what was moved before an error. Not here: choosing a route, rights, overlap between pieces.

use std::cell::Cell;

use iommu_addr::{Location, Segment};

use crate::{Memory, MemoryError, Route};

/// Bytes that a staged copy holds on their way, at most, for each thread.
const BOUNCE_LEN: usize = 64 << 10;

thread_local! {
    static BOUNCE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// An error after some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Memory failed after {bytes} bytes")]
pub struct CopyError {
    /// Bytes moved before.
    pub bytes: u64,
    /// What failed.
    pub source: MemoryError,
}

/// Bytes in a list; saturates, which no list of real memory can reach.
pub fn total_len(segments: &[Segment]) -> u64 {
    segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.len))
}

/// Copies `src` to `dst`. Answers the bytes moved: the shorter total of the two. A staged copy goes through a small buffer of the calling
/// thread, so that no more than 64 KiB are on their way at a time.
pub fn copy_segments(memory: &dyn Memory, dst: &[Segment], src: &[Segment], route: Route) -> Result<u64, CopyError> {
    match route {
        Route::Direct => count(Pairs::new(dst, src), |piece| memory.copy(piece.dst, piece.src, piece.len)),
        Route::Staged => {
            let mut bounce = BOUNCE.take();
            bounce.resize(BOUNCE_LEN, 0);
            let moved = stage_segments(memory, dst, src, &mut bounce);
            BOUNCE.set(bounce);
            moved
        }
    }
}

/// Fills `dst`; the pattern runs on across segments. Answers the bytes filled.
pub fn fill_segments(memory: &dyn Memory, dst: &[Segment], pattern: u64) -> Result<u64, CopyError> {
    let mut bytes = 0;
    for segment in dst {
        // The pattern's phase at this segment: as many bytes in as were filled before it.
        let turned = pattern.rotate_right(u32::try_from(bytes % 8 * 8).unwrap_or(0));
        memory.fill(segment.at, segment.len, turned).map_err(|source| CopyError { bytes, source })?;
        bytes = bytes.saturating_add(segment.len);
    }
    Ok(bytes)
}

fn stage_segments(memory: &dyn Memory, dst: &[Segment], src: &[Segment], bounce: &mut [u8]) -> Result<u64, CopyError> {
    count(Pairs::new(dst, src).at_most(bounce.len() as u64), |piece| {
        let part = &mut bounce[..usize::try_from(piece.len).unwrap_or(usize::MAX)];
        memory.read(piece.src, part)?;
        memory.write(piece.dst, part)
    })
}

fn count(pairs: Pairs<'_>, mut step: impl FnMut(Pair) -> Result<(), MemoryError>) -> Result<u64, CopyError> {
    let mut bytes = 0;
    for piece in pairs {
        step(piece).map_err(|source| CopyError { bytes, source })?;
        bytes += piece.len;
    }
    Ok(bytes)
}

/// `len` bytes that are contiguous in the source and in the destination. `len` is never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Where to write.
    pub dst: Location,
    /// Where to read.
    pub src: Location,
    /// Length in bytes.
    pub len: u64,
}

/// The pieces of two lists, in order, until the shorter list ends.
#[derive(Clone, Debug)]
pub struct Pairs<'a> {
    dst: Cursor<'a>,
    src: Cursor<'a>,
    most: u64,
}

impl<'a> Pairs<'a> {
    /// The longest pieces that the two lists allow.
    pub fn new(dst: &'a [Segment], src: &'a [Segment]) -> Self {
        Self { dst: Cursor::new(dst), src: Cursor::new(src), most: u64::MAX }
    }

    /// No piece longer than `bytes`, which must not be 0.
    #[must_use]
    pub fn at_most(self, bytes: u64) -> Self {
        Self { most: bytes.max(1), ..self }
    }

    /// Leaves out the first `bytes`.
    #[must_use]
    pub fn skip_bytes(mut self, bytes: u64) -> Self {
        self.dst.skip(bytes);
        self.src.skip(bytes);
        self
    }
}

impl Iterator for Pairs<'_> {
    type Item = Pair;

    fn next(&mut self) -> Option<Pair> {
        let ((dst, dst_left), (src, src_left)) = (self.dst.peek()?, self.src.peek()?);
        let len = dst_left.min(src_left).min(self.most);
        self.dst.skip(len);
        self.src.skip(len);
        Some(Pair { dst, src, len })
    }
}

#[derive(Clone, Debug)]
struct Cursor<'a> {
    segments: &'a [Segment],
    done: u64,
}

impl<'a> Cursor<'a> {
    fn new(segments: &'a [Segment]) -> Self {
        Self { segments, done: 0 }
    }

    fn peek(&mut self) -> Option<(Location, u64)> {
        while let [first, rest @ ..] = self.segments {
            if self.done < first.len {
                return Some((first.at.checked_add(self.done)?, first.len - self.done));
            }
            self.done -= first.len;
            self.segments = rest;
        }
        None
    }

    fn skip(&mut self, bytes: u64) {
        self.done = self.done.saturating_add(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::FlatMemory;
    use iommu_addr::{ApertureOffset, EndpointId, Gpa};
    use proptest::prelude::*;

    fn ram(gpa: u64, len: u64) -> Segment {
        Segment { at: Location::Ram(Gpa(gpa)), len }
    }

    fn aperture(offset: u64, len: u64) -> Segment {
        Segment { at: Location::Aperture { endpoint: EndpointId::local(0), offset: ApertureOffset(offset) }, len }
    }

    /// A world of one run of guest memory, whose bytes are their own low address.
    fn counting(len: u64) -> (FlatMemory, Vec<u8>) {
        let memory = FlatMemory::default();
        memory.add(Location::Ram(Gpa(0)), len);
        let bytes: Vec<u8> = (0..len).map(|at| at.to_le_bytes()[0]).collect();
        memory.write(Location::Ram(Gpa(0)), &bytes).expect("just added");
        (memory, bytes)
    }

    fn bytes_of(memory: &FlatMemory) -> Vec<u8> {
        memory.runs().remove(0).1
    }

    fn addresses(segments: &[Segment]) -> Vec<usize> {
        let first = |segment: &Segment| match segment.at {
            Location::Ram(gpa) => usize::try_from(gpa.0).unwrap(),
            Location::Aperture { .. } => unreachable!("the tests use guest memory"),
        };
        segments.iter().flat_map(|s| first(s)..first(s) + usize::try_from(s.len).unwrap()).collect()
    }

    /// Segment lists within `from..from + span`.
    fn lists(from: u64, span: u64) -> impl Strategy<Value = Vec<Segment>> {
        let one = (0..span).prop_flat_map(move |at| (Just(at), 0..=(span - at).min(40)));
        prop::collection::vec(one.prop_map(move |(at, len)| ram(from + at, len)), 0..6)
    }

    proptest! {
        #[test]
        fn a_copy_moves_what_a_walk_byte_by_byte_moves(
            src in lists(0, 200), dst in lists(200, 200), bounce in 1usize..50, staged: bool,
        ) {
            let (memory, mut want) = counting(400);
            let moved = if staged {
                stage_segments(&memory, &dst, &src, &mut vec![0; bounce])
            } else {
                copy_segments(&memory, &dst, &src, Route::Direct)
            };
            let (from, to) = (addresses(&src), addresses(&dst));
            from.iter().zip(&to).for_each(|(&from, &to)| want[to] = want[from]);
            prop_assert_eq!(moved, Ok(from.len().min(to.len()) as u64));
            prop_assert_eq!(bytes_of(&memory), want);
        }

        #[test]
        fn pieces_are_the_rest_after_what_is_left_out(
            src in lists(0, 200), dst in lists(200, 200), skip in 0u64..300, most in 1u64..50,
        ) {
            let pieces: Vec<_> = Pairs::new(&dst, &src).skip_bytes(skip).at_most(most).collect();
            prop_assert!(pieces.iter().all(|piece| 0 < piece.len && piece.len <= most));
            let flat = |side: fn(&Pair) -> Location| {
                addresses(&pieces.iter().map(|piece| Segment { at: side(piece), len: piece.len }).collect::<Vec<_>>())
            };
            let whole = addresses(&src).len().min(addresses(&dst).len());
            let rest = |all: Vec<usize>| all[..whole].iter().copied().skip(usize::try_from(skip).unwrap()).collect::<Vec<_>>();
            prop_assert_eq!(flat(|piece| piece.src), rest(addresses(&src)));
            prop_assert_eq!(flat(|piece| piece.dst), rest(addresses(&dst)));
        }

        #[test]
        fn a_fill_repeats_the_pattern_from_the_first_byte_on(dst in lists(0, 200), pattern: u64) {
            let (memory, mut want) = counting(200);
            let filled = fill_segments(&memory, &dst, pattern);
            addresses(&dst).iter().enumerate().for_each(|(n, &at)| want[at] = pattern.to_le_bytes()[n % 8]);
            prop_assert_eq!(filled, Ok(total_len(&dst)));
            prop_assert_eq!(bytes_of(&memory), want);
        }

        #[test]
        fn an_error_counts_exactly_the_bytes_before_it(good in 0u64..150, bad in 1u64..100, bounce in 1usize..50, way in 0..3) {
            let (memory, mut want) = counting(400);
            let there = [ram(0, good), aperture(0, bad)];
            let outcome = match way {
                0 => copy_segments(&memory, &[ram(200, good + bad)], &there, Route::Direct),
                1 => copy_segments(&memory, &there, &[ram(200, good + bad)], Route::Direct),
                _ => stage_segments(&memory, &[ram(200, good + bad)], &there, &mut vec![0; bounce]),
            };
            let good = usize::try_from(good).unwrap();
            if way == 1 { want.copy_within(200..200 + good, 0) } else { want.copy_within(0..good, 200) }
            prop_assert_eq!(outcome.map_err(|error| error.bytes), Err(good as u64));
            prop_assert_eq!(bytes_of(&memory), want);
        }
    }

    #[test]
    fn a_segment_past_the_end_of_its_space_is_an_error() {
        let (memory, _) = counting(100);
        let wild = Segment { at: Location::Ram(Gpa(u64::MAX)), len: 50 };
        assert_eq!(copy_segments(&memory, &[ram(0, 50)], &[wild], Route::Direct).map_err(|error| error.bytes), Err(0));
        assert_eq!(copy_segments(&memory, &[wild], &[ram(0, 50)], Route::Staged).map_err(|error| error.bytes), Err(0));
    }

    #[test]
    fn the_total_of_a_list_saturates() {
        assert_eq!(total_len(&[ram(0, u64::MAX), ram(0, 2)]), u64::MAX);
        assert_eq!(total_len(&[]), 0);
    }
}
