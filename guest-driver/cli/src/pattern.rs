//! Bytes to move and to compare: a pattern that tells every word from every other, and writers that compare and that hash.
//!
//! Not here: randomness. The same seed gives the same bytes, so that whoever reads them back needs no copy.

use std::io::{self, Read, Write};

/// Endless bytes, different for every seed and place.
#[derive(Clone, Debug)]
pub struct Pattern {
    seed: u64,
    at: u64,
}

impl Pattern {
    /// The pattern of `seed`, from its first byte.
    pub fn new(seed: u64) -> Self {
        Self { seed, at: 0 }
    }

    /// Its first `len` bytes.
    pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
        let mut pattern = Self::new(seed);
        let mut bytes = vec![0; len];
        pattern.fill(&mut bytes);
        bytes
    }

    fn fill(&mut self, mut into: &mut [u8]) {
        while !into.is_empty() {
            let word = mix(self.seed ^ mix(self.at / 8)).to_le_bytes();
            let skip = usize::try_from(self.at % 8).unwrap_or(0);
            let len = (8 - skip).min(into.len());
            let (now, later) = into.split_at_mut(len);
            now.copy_from_slice(&word[skip..skip + len]);
            self.at = self.at.wrapping_add(len as u64);
            into = later;
        }
    }
}

/// The finaliser of SplitMix64: every bit of the input changes every bit of the output with even odds.
fn mix(mut word: u64) -> u64 {
    word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl Read for Pattern {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.fill(into);
        Ok(into.len())
    }
}

/// Takes bytes and compares them with what `expected` yields.
pub struct Compare<R> {
    expected: R,
    buffer: Vec<u8>,
    at: u64,
    wrong: Option<u64>,
}

impl<R: Read> Compare<R> {
    /// Compares with `expected`, from its first byte.
    pub fn new(expected: R) -> Self {
        Self { expected, buffer: Vec::new(), at: 0, wrong: None }
    }

    /// The offset of the first byte that differed.
    pub fn first_difference(&self) -> Option<u64> {
        self.wrong
    }
}

impl<R: Read> Write for Compare<R> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.resize(bytes.len(), 0);
        self.expected.read_exact(&mut self.buffer)?;
        if self.wrong.is_none() {
            let differs = self.buffer.iter().zip(bytes).position(|(expected, got)| expected != got);
            self.wrong = differs.map(|place| self.at + place as u64);
        }
        self.at += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A 64-bit hash of what is written, in pieces of any size: words of eight bytes, chained by splitmix64, the length last. It tells bytes that
/// went astray, not bytes that somebody chose to deceive.
#[derive(Clone, Debug, Default)]
pub struct Digest {
    state: u64,
    word: [u8; 8],
    len: u64,
}

impl Digest {
    /// The hash of what was written so far.
    pub fn value(&self) -> u64 {
        let held = usize::try_from(self.len % 8).unwrap_or(0);
        let mut word = [0; 8];
        word[..held].copy_from_slice(&self.word[..held]);
        mix(mix(self.state ^ u64::from_le_bytes(word)) ^ self.len)
    }
}

impl Write for Digest {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for byte in bytes {
            let place = usize::try_from(self.len % 8).unwrap_or(0);
            self.word[place] = *byte;
            self.len = self.len.wrapping_add(1);
            if place == 7 {
                self.state = mix(self.state ^ u64::from_le_bytes(self.word));
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes to both.
pub struct Tee<A, B>(pub A, pub B);

impl<A: Write, B: Write> Write for Tee<A, B> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write_all(bytes)?;
        self.1.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()?;
        self.1.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_any_size_give_the_same_bytes() {
        let whole = Pattern::bytes(7, 1000);
        let mut pattern = Pattern::new(7);
        let mut pieces = Vec::new();
        for len in (1..).take_while(|len| len * (len + 1) / 2 <= 1000) {
            let mut piece = vec![0; len];
            pattern.read_exact(&mut piece).expect("endless");
            pieces.extend(piece);
        }
        assert_eq!(pieces, whole[..pieces.len()]);
        assert_ne!(Pattern::bytes(8, 1000), whole);
    }

    #[test]
    fn the_first_difference_is_found_and_kept() {
        let mut bytes = Pattern::bytes(1, 100);
        bytes[70] ^= 1;
        bytes[90] ^= 1;
        let mut compare = Compare::new(Pattern::new(1));
        for piece in bytes.chunks(33) {
            compare.write_all(piece).expect("endless");
        }
        assert_eq!(compare.first_difference(), Some(70));
    }

    #[test]
    fn a_hash_depends_on_every_byte_and_on_the_length_but_not_on_the_pieces() {
        let hash = |pieces: &[&[u8]]| {
            let mut digest = Digest::default();
            pieces.iter().for_each(|piece| digest.write_all(piece).expect("takes everything"));
            digest.value()
        };
        let bytes = Pattern::bytes(3, 100);
        let whole = hash(&[&bytes]);
        assert_eq!(hash(&[&bytes[..3], &bytes[3..3], &bytes[3..77], &bytes[77..]]), whole);
        let mut seen = vec![whole];
        for place in 0..bytes.len() {
            let mut other = bytes.clone();
            other[place] ^= 1;
            seen.push(hash(&[&other]));
            seen.push(hash(&[&bytes[..place]]));
            seen.push(hash(&[&[0; 200][..place + 1]]));
        }
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), count);
    }

    #[test]
    fn more_bytes_than_expected_are_an_error() {
        let mut compare = Compare::new(&b"abc"[..]);
        assert!(compare.write_all(b"abcd").is_err());
    }
}
