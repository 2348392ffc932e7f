//! Memory of a device behind a BAR: not cached, so each access is one transaction on the bus.
//!
//! Accesses are aligned words of eight bytes, and bytes at the ends. The processor's string moves, which `memcpy` may use, may be of any width and in
//! any order there (Intel SDM 3A, 13.3: uncacheable memory is accessed as the program says, and no more often).
//!
//! Not here: registers, which have widths of their own.

use std::ptr::NonNull;

const WORD: usize = size_of::<u64>();

/// Bytes up to the first aligned word, whole words, and bytes behind them.
fn parts(at: NonNull<u8>, len: usize) -> (usize, usize) {
    let head = at.as_ptr().align_offset(WORD).min(len);
    (head, (len - head) / WORD)
}

/// Reads `into.len()` bytes. All of them are mapped.
pub(crate) fn read(from: NonNull<u8>, into: &mut [u8]) {
    let (head, words) = parts(from, into.len());
    let byte = |at: usize| {
        // SAFETY: the caller's bytes are mapped, and `at` is one of them.
        let place = unsafe { from.add(at) };
        // SAFETY: as above; any byte is a valid one.
        unsafe { place.as_ptr().read_volatile() }
    };
    let (first, rest) = into.split_at_mut(head);
    let (whole, last) = rest.split_at_mut(words * WORD);
    first.iter_mut().enumerate().for_each(|(at, to)| *to = byte(at));
    for (n, to) in whole.chunks_exact_mut(WORD).enumerate() {
        // SAFETY: the caller's bytes are mapped, and so is this whole word of them.
        let place = unsafe { from.add(head + n * WORD) };
        // SAFETY: as above; `head` made it aligned.
        to.copy_from_slice(&unsafe { place.cast::<u64>().as_ptr().read_volatile() }.to_ne_bytes());
    }
    last.iter_mut().enumerate().for_each(|(at, to)| *to = byte(head + words * WORD + at));
}

/// Writes `from.len()` bytes. All of them are mapped.
pub(crate) fn write(to: NonNull<u8>, from: &[u8]) {
    let (head, words) = parts(to, from.len());
    let byte = |at: usize, byte: u8| {
        // SAFETY: the caller's bytes are mapped, and `at` is one of them.
        let place = unsafe { to.add(at) };
        // SAFETY: as above.
        unsafe { place.as_ptr().write_volatile(byte) }
    };
    let (first, rest) = from.split_at(head);
    let (whole, last) = rest.split_at(words * WORD);
    first.iter().enumerate().for_each(|(at, from)| byte(at, *from));
    for (n, word) in whole.as_chunks::<WORD>().0.iter().enumerate() {
        // SAFETY: the caller's bytes are mapped, and so is this whole word of them.
        let place = unsafe { to.add(head + n * WORD) };
        // SAFETY: as above; `head` made it aligned.
        unsafe { place.cast::<u64>().as_ptr().write_volatile(u64::from_ne_bytes(*word)) }
    }
    last.iter().enumerate().for_each(|(at, from)| byte(head + words * WORD + at, *from));
}
