//! The pin word: one atomic number that says whether a thing may be used, who uses it, and when its end has come.
//!
//! ```text
//! 63        32 31     30        29        28      0
//! generation  CLOSED  DRAINING  overflow  pins
//! ```
//!
//! * Open: neither flag. A pin counts.
//! * Draining: both flags. No new pin counts; the word waits for the last one to go.
//! * Free: CLOSED alone. Nothing is held, nothing is waited for; the generation has moved on.
//!
//! A pin is one `fetch_add`, then a look at what was there: another generation, a flag or an overflow means that it never was a pin, and it is
//! taken back. What is taken back can be what a drain waited for, so both ways down lead to the same **claim**: a compare-exchange from "draining,
//! no pins" to "free, next generation". It succeeds once, and who succeeds owes the world the end of the drain.
//!
//! Closing comes before anything else of an unmap, so a pin by a remembered generation can never succeed afterwards: neither while the word drains
//! (flags), nor when it serves something new (generation).
//!
//! Not here: what a word guards, where it lives, who waits for it.

use crate::sync::{AtomicU64, Ordering};

const CLOSED: u64 = 1 << 31;
const DRAINING: u64 = 1 << 30;
/// Also the overflow bit, which a pin must find clear like the flags: half a billion pins are in nobody's reach, and would be refused.
const PINS: u64 = (1 << 30) - 1;
const COUNTED: u64 = PINS >> 1;
const GENERATION_SHIFT: u32 = 32;

/// What became of an attempt to pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pin {
    /// Held; owes an [`Word::unpin`].
    Held,
    /// Not held, nothing owed.
    Refused,
    /// Not held, and taking the attempt back was what a drain waited for: the caller owes its end.
    RefusedAndClaimed,
}

/// A pin word. Starts free, with generation 0.
#[derive(Debug)]
pub(crate) struct Word(AtomicU64);

impl Word {
    /// A free word.
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(CLOSED))
    }

    /// The generation that is, or the next one if the word is free. Only stable for whoever keeps the word from being opened and closed.
    pub(crate) fn generation(&self) -> u32 {
        generation(self.0.load(Ordering::Acquire))
    }

    /// Whether pins count now. Only a hint unless the caller keeps the word from being opened and closed.
    pub(crate) fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire) & (CLOSED | DRAINING) == 0
    }

    /// Lets pins count. Everything written before is seen by whoever pins. The word must be free and the caller its only owner.
    pub(crate) fn open(&self) {
        self.0.fetch_and(!CLOSED, Ordering::AcqRel);
    }

    /// Pins, if the word is open in `generation`.
    #[inline]
    pub(crate) fn pin(&self, generation: u32) -> Pin {
        let before = self.0.fetch_add(1, Ordering::AcqRel);
        if before & !COUNTED == u64::from(generation) << GENERATION_SHIFT { Pin::Held } else { self.take_back() }
    }

    /// Pins, if the word is open in whatever generation.
    pub(crate) fn pin_any(&self) -> Pin {
        let before = self.0.fetch_add(1, Ordering::AcqRel);
        if before & (CLOSED | DRAINING | PINS & !COUNTED) == 0 { Pin::Held } else { self.take_back() }
    }

    #[cold]
    fn take_back(&self) -> Pin {
        if self.unpin() { Pin::RefusedAndClaimed } else { Pin::Refused }
    }

    /// Lets a pin go. True if that was what a drain waited for: the caller owes its end.
    #[inline]
    pub(crate) fn unpin(&self) -> bool {
        let before = self.0.fetch_sub(1, Ordering::AcqRel);
        before & (DRAINING | PINS) == DRAINING | 1 && self.claim(before & !PINS)
    }

    /// Stops pins from counting. True if nothing is pinned, which leaves the word free: the caller owes the end. False if a drain has begun, whose
    /// end the last pin will owe. The word must be open and the caller the only one to close it.
    pub(crate) fn close(&self) -> bool {
        let before = self.0.fetch_or(CLOSED | DRAINING, Ordering::AcqRel);
        before & PINS == 0 && self.claim(before | CLOSED | DRAINING)
    }

    /// Makes a free word old.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn set_generation(&self, generation: u32) {
        self.0.store(CLOSED | u64::from(generation) << GENERATION_SHIFT, Ordering::Relaxed);
    }

    fn claim(&self, drained: u64) -> bool {
        let free = (drained & !DRAINING).wrapping_add(1 << GENERATION_SHIFT);
        self.0.compare_exchange(drained, free, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

#[allow(clippy::cast_possible_truncation, reason = "32 bits are left")]
fn generation(word: u64) -> u32 {
    (word >> GENERATION_SHIFT) as u32
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn pin_counts_only_in_its_generation_and_while_open() {
        let word = Word::new();
        assert_eq!(word.pin(0), Pin::Refused, "free");
        word.open();
        assert_eq!(word.pin(1), Pin::Refused, "another generation");
        assert_eq!(word.pin(0), Pin::Held);
        assert!(!word.close(), "a pin is left");
        assert_eq!(word.pin(0), Pin::Refused, "draining");
        assert!(word.unpin(), "the last pin owes the end");
        assert_eq!(word.pin(0), Pin::Refused, "free");
        word.open();
        assert_eq!(word.pin(0), Pin::Refused, "remembered from before");
        assert_eq!(word.pin(1), Pin::Held);
        assert!(!word.unpin());
        assert!(word.close(), "nothing pinned");
    }

    #[test]
    fn last_generation_is_followed_by_zero_and_flags_stay_whole() {
        let word = Word::new();
        word.set_generation(u32::MAX);
        word.open();
        assert_eq!(word.generation(), u32::MAX);
        assert!(word.close());
        assert_eq!(word.generation(), 0);
        assert!(!word.is_open());
    }

    #[test]
    fn overflowing_pins_are_refused_and_leave_the_flags_alone() {
        let word = Word(AtomicU64::new(COUNTED));
        assert_eq!(word.pin(0), Pin::Held, "the last that fits");
        assert_eq!(word.pin(0), Pin::Refused);
        assert_eq!(word.pin_any(), Pin::Refused);
        assert!(word.is_open());
    }
}
