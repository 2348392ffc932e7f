//! The fault log: a ring of fixed-size records in shared words.
//!
//! A record begins with its number and ends with it; in between is the payload. The writer puts the first number, then the payload, then the
//! last number, then the total: a record whose writer died half-way, or that is being overwritten while it is read, has two different
//! numbers, and the reader leaves it out. Numbers count from 1, so an unused slot is no record. Records survive their writer.
//!
//! One writer at a time (see [`crate::TenantPage`]); any number of readers, who never hold the writer up. Writing takes a fixed number of
//! stores, whatever happens.
//!
//! Not here: what the numbers in a record mean (they are the wire's and the virtual IOMMU's), names, time formats, how often somebody may write.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Records that the ring holds.
pub const FAULT_SLOTS: usize = 1024;

const PAYLOAD: usize = 11;
const SLOT: usize = PAYLOAD + 2;
/// The total, then the slots.
pub(crate) const LOG_WORDS: usize = 1 + FAULT_SLOTS * SLOT;

/// One refused access, in the numbers of the wire and, for its mapping, of the virtual IOMMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultEntry {
    /// Number of the record since the supervisor started, from 1. Chosen by the log.
    pub number: u64,
    /// When, in nanoseconds since 1970.
    pub time_ns: u64,
    /// Which worker's device.
    pub session: u32,
    /// Whose address space.
    pub domain: u32,
    /// Endpoint that acted; `0xffff_ffff` if none is known.
    pub accessor: u32,
    /// Endpoint whose memory it was; `0xffff_ffff` if none is known.
    pub owner: u32,
    /// First address that was refused.
    pub address: u64,
    /// Bit 0 read, bit 1 write.
    pub access: u8,
    /// Why.
    pub reason: u8,
    /// Stream of the work.
    pub stream: u32,
    /// Status that the guest was told.
    pub status: u32,
    /// Cookie of the work.
    pub cookie: u64,
    /// Handle of a stale fault; else zero.
    pub value: u64,
    /// The mapping that it is about.
    pub mapping: FaultMapping,
}

/// A mapping that a refusal is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultMapping {
    /// How it lies to the address; 0 if there is no such mapping.
    pub relation: u8,
    /// What it is of.
    pub kind: u8,
    /// Bit 0 read, bit 1 write.
    pub access: u8,
    /// It was being removed.
    pub is_draining: bool,
    /// Its first address.
    pub first: u64,
    /// Its last address.
    pub last: u64,
    /// Which of the session's mappings it is, from 1.
    pub request: u64,
}

impl FaultMapping {
    fn bits(self) -> u32 {
        u32::from_be_bytes([u8::from(self.is_draining), self.relation, self.kind, self.access])
    }

    fn from_words(bits: u32, [first, last, request]: [u64; 3]) -> Self {
        let [draining, relation, kind, access] = bits.to_be_bytes();
        Self { relation, kind, access, is_draining: draining != 0, first, last, request }
    }
}

impl FaultEntry {
    fn to_words(self) -> [u64; PAYLOAD] {
        [
            self.time_ns,
            pair(self.session, self.domain),
            pair(self.accessor, self.owner),
            self.address,
            pair(u32::from(self.access) << 8 | u32::from(self.reason), self.stream),
            pair(self.mapping.bits(), self.status),
            self.cookie,
            self.value,
            self.mapping.first,
            self.mapping.last,
            self.mapping.request,
        ]
    }

    #[allow(clippy::cast_possible_truncation, reason = "each number is cut to the width it was stored with")]
    fn from_words(number: u64, words: &[u64; PAYLOAD]) -> Self {
        let [time_ns, who, parties, address, what, status, cookie, value, first, last, request] = *words;
        Self {
            number,
            time_ns,
            session: (who >> 32) as u32,
            domain: who as u32,
            accessor: (parties >> 32) as u32,
            owner: parties as u32,
            address,
            access: (what >> 40) as u8,
            reason: (what >> 32) as u8,
            stream: what as u32,
            status: status as u32,
            cookie,
            value,
            mapping: FaultMapping::from_words((status >> 32) as u32, [first, last, request]),
        }
    }
}

fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// What a reader found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultLog {
    /// Records since the supervisor started.
    pub total: u64,
    /// Records that have made room for later ones.
    pub overwritten: u64,
    /// Those of them that had been asked for.
    pub missed: u64,
    /// Records among the ones asked for that were being written, or whose writer died half-way.
    pub torn: u64,
    /// Number of the last record that was looked at: what comes after it is new to the reader.
    pub next: u64,
    /// Whole records, oldest first.
    pub records: Vec<FaultEntry>,
}

/// The ring, over [`LOG_WORDS`] words.
pub(crate) struct Ring<'a> {
    total: &'a AtomicU64,
    slots: &'a [AtomicU64],
}

impl<'a> Ring<'a> {
    /// `None` if there are too few words.
    pub(crate) fn new(words: &'a [AtomicU64]) -> Option<Self> {
        let (total, slots) = words.get(..LOG_WORDS)?.split_first()?;
        Some(Self { total, slots })
    }

    /// Appends a record; its `number` is not used. The caller sees to it that no one else writes.
    pub(crate) fn push(&self, entry: FaultEntry) {
        let number = self.total.load(Ordering::Relaxed).wrapping_add(1);
        let Some((begin, payload, end)) = self.slot(number) else { return };
        begin.store(number, Ordering::Relaxed);
        // A reader that sees a word of the new payload also sees the new first number.
        fence(Ordering::Release);
        for (word, value) in payload.iter().zip(entry.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
        // A reader that sees the last number sees the whole payload.
        end.store(number, Ordering::Release);
        self.total.store(number, Ordering::Release);
    }

    /// The last `last` records.
    pub(crate) fn read(&self, last: usize) -> FaultLog {
        let total = self.total.load(Ordering::Acquire);
        let kept = total.min(FAULT_SLOTS as u64);
        self.read_up_to(total, total - kept.min(last as u64), FAULT_SLOTS)
    }

    /// The first `most` records after number `after`.
    pub(crate) fn read_after(&self, after: u64, most: usize) -> FaultLog {
        self.read_up_to(self.total.load(Ordering::Acquire), after, most)
    }

    /// The first `most` records after number `after`, `total` being the last one.
    fn read_up_to(&self, total: u64, after: u64, most: usize) -> FaultLog {
        let overwritten = total.saturating_sub(FAULT_SLOTS as u64);
        let from = after.clamp(overwritten, total);
        let next = total.min(from.saturating_add(most as u64));
        let missed = from.saturating_sub(after);
        let mut log = FaultLog { total, overwritten, missed, next, ..FaultLog::default() };
        for number in from..next {
            match self.get(number + 1) {
                Some(entry) => log.records.push(entry),
                None => log.torn += 1,
            }
        }
        log
    }

    fn get(&self, number: u64) -> Option<FaultEntry> {
        let (begin, payload, end) = self.slot(number)?;
        let last = end.load(Ordering::Acquire);
        let mut words = [0; PAYLOAD];
        for (value, word) in words.iter_mut().zip(payload) {
            *value = word.load(Ordering::Relaxed);
        }
        fence(Ordering::Acquire);
        let first = begin.load(Ordering::Relaxed);
        (first == number && last == number).then(|| FaultEntry::from_words(number, &words))
    }

    /// First number, payload, last number.
    fn slot(&self, number: u64) -> Option<(&'a AtomicU64, &'a [AtomicU64], &'a AtomicU64)> {
        let index = usize::try_from(number % FAULT_SLOTS as u64).ok()?;
        match self.slots.chunks_exact(SLOT).nth(index)? {
            [begin, payload @ .., end] => Some((begin, payload, end)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> Vec<AtomicU64> {
        (0..LOG_WORDS).map(|_| AtomicU64::new(0)).collect()
    }

    fn numbered(n: u64) -> FaultEntry {
        let low = u32::try_from(n & 0xffff_ffff).unwrap();
        FaultEntry {
            number: 0,
            time_ns: n,
            session: low,
            domain: !low,
            accessor: low ^ 1,
            owner: low ^ 2,
            address: !n,
            access: 3,
            reason: 7,
            stream: low ^ 4,
            status: low ^ 8,
            cookie: n ^ 16,
            value: n ^ 32,
            mapping: FaultMapping {
                relation: n.to_le_bytes()[0],
                kind: n.to_le_bytes()[1],
                access: n.to_le_bytes()[2],
                is_draining: n % 2 == 1,
                first: n ^ 64,
                last: n ^ 128,
                request: n ^ 256,
            },
        }
    }

    #[test]
    fn every_field_survives_the_ring() {
        let words = words();
        let ring = Ring::new(&words).unwrap();
        ring.push(numbered(0x1234_5678_9abc));
        let log = ring.read(10);
        assert_eq!(log.records, [FaultEntry { number: 1, ..numbered(0x1234_5678_9abc) }]);
        assert_eq!((log.total, log.overwritten, log.torn), (1, 0, 0));
    }

    #[test]
    fn the_oldest_make_room_and_are_counted() {
        let words = words();
        let ring = Ring::new(&words).unwrap();
        (1..=1500).for_each(|n| ring.push(numbered(n)));
        let log = ring.read(usize::MAX);
        assert_eq!((log.total, log.overwritten, log.torn, log.records.len()), (1500, 476, 0, FAULT_SLOTS));
        assert_eq!((log.records[0].number, log.records[0].time_ns), (477, 477));
        assert_eq!(log.records.last().unwrap().number, 1500);
        let last: Vec<_> = ring.read(2).records.iter().map(|entry| entry.number).collect();
        assert_eq!(last, [1499, 1500]);
    }

    #[test]
    fn a_record_whose_writer_died_half_way_is_left_out_and_the_next_writer_goes_on() {
        let words = words();
        let ring = Ring::new(&words).unwrap();
        (1..=1025).for_each(|n| ring.push(numbered(n)));
        // Number 1026 takes the slot of number 2; its writer dies after the first word of the payload.
        let (begin, payload, _) = ring.slot(1026).unwrap();
        begin.store(1026, Ordering::Relaxed);
        payload[0].store(1026, Ordering::Relaxed);
        let log = ring.read(usize::MAX);
        assert_eq!((log.total, log.torn, log.records.len()), (1025, 1, FAULT_SLOTS - 1));
        assert!(log.records.iter().all(|entry| entry.number != 2));

        ring.push(numbered(9));
        let log = ring.read(1);
        assert_eq!((log.total, log.torn), (1026, 0));
        assert_eq!(log.records, [FaultEntry { number: 1026, ..numbered(9) }]);
    }

    #[test]
    fn a_hostile_total_costs_a_bounded_read_and_shows_no_record_that_is_not_there() {
        let words = words();
        let ring = Ring::new(&words).unwrap();
        ring.push(numbered(1));
        for total in [u64::MAX, u64::MAX - 1, 1 << 63] {
            words[0].store(total, Ordering::Relaxed);
            let log = ring.read(usize::MAX);
            assert_eq!((log.torn, log.records.len()), (FAULT_SLOTS as u64, 0));
        }
        words[0].store(u64::MAX, Ordering::Relaxed);
        ring.push(numbered(2));
        assert_eq!(ring.read(usize::MAX).total, 0);
    }

    #[test]
    fn a_reader_beside_a_writer_sees_only_whole_records() {
        let words = words();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let ring = Ring::new(&words).unwrap();
                (1..=200_000).for_each(|n| ring.push(numbered(n)));
            });
            let ring = Ring::new(&words).unwrap();
            while !writer.is_finished() {
                for entry in ring.read(64).records {
                    assert_eq!(entry, FaultEntry { number: entry.number, ..numbered(entry.number) });
                }
            }
        });
        assert_eq!(Ring::new(&words).unwrap().read(64).torn, 0);
    }

    #[test]
    fn a_reader_that_comes_back_gets_each_record_once_and_is_told_what_it_missed() {
        let words = words();
        let ring = Ring::new(&words).unwrap();
        let numbers = |log: &FaultLog| log.records.iter().map(|entry| entry.number).collect::<Vec<_>>();
        (1..=5).for_each(|n| ring.push(numbered(n)));
        let log = ring.read_after(0, 3);
        assert_eq!((numbers(&log), log.next, log.missed), (vec![1, 2, 3], 3, 0));
        let log = ring.read_after(log.next, 3);
        assert_eq!((numbers(&log), log.next, log.missed), (vec![4, 5], 5, 0));
        assert_eq!(ring.read_after(5, 3).records, []);
        assert_eq!((ring.read(2).next, ring.read(0).next), (5, 5), "where to go on after the newest");
        (6..=2000).for_each(|n| ring.push(numbered(n)));
        let log = ring.read_after(5, 3);
        assert_eq!((numbers(&log), log.next, log.missed), (vec![977, 978, 979], 979, 971));
        let log = ring.read_after(3000, 3);
        assert_eq!((log.records.len(), log.next, log.missed, log.total), (0, 2000, 0, 2000), "the counter went back");
    }

    #[test]
    fn too_few_words_are_no_ring() {
        assert!(Ring::new(&words()[1..]).is_none());
    }
}
