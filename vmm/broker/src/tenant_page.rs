//! What the operator sees of one tenant: numbers, the fault log.
//!
//! The worker writes, the supervisor reads at any time; both hold the page, so a worker that is busy, stuck or dead costs no answer and
//! loses no record. Counters only grow, also from one worker to the next; gauges belong to the worker and are cleared after it.
//!
//! A guest may fault, and make its worker write log lines, as often as it likes: how many of them are kept is limited for the tenant, not for
//! a worker, and the rest is counted.
//!
//! Not here: which counter has which index, names.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::bucket::Rate;
use crate::faults::{FaultEntry, FaultLog, LOG_WORDS, Ring};
use crate::ledger::monotonic_now;
use crate::words::{SharedError, SharedWords};

/// Counters in a page.
pub const COUNTERS: usize = 64;
/// Gauges in a page.
pub const GAUGES: usize = 64;

const FIRST_COUNTER: usize = 8;
const FIRST_GAUGE: usize = FIRST_COUNTER + COUNTERS;
const FIRST_LOG: usize = FIRST_GAUGE + GAUGES;
/// Bucket of fault records.
const FAULT_BUCKET: usize = FIRST_LOG + LOG_WORDS;
const FIRST_SUPPRESSED: usize = FAULT_BUCKET + 1;
/// For each kind of line its bucket, then how many were left out.
const FIRST_LINE: usize = FIRST_SUPPRESSED + FAULT_REASONS;
/// How many lines were left out in all.
const SUPPRESSED_LINES: usize = FIRST_LINE + 2 * LINE_KINDS;
const WORDS: usize = SUPPRESSED_LINES + 1;

/// Reasons whose suppressed faults are counted apart; what has a higher number counts as number 0.
pub const FAULT_REASONS: usize = 16;
/// Kinds of log lines that are limited apart.
pub const LINE_KINDS: usize = 4;
/// Records of faults that may come at once.
pub const FAULT_BURST: u64 = 256;
const FAULTS: Rate = Rate { burst: FAULT_BURST, refill: 1_000_000 };
/// Lines of one kind that may come at once; one more may every second.
pub const LINE_BURST: u64 = 32;
const LINES: Rate = Rate { burst: LINE_BURST, refill: 1_000_000_000 };

/// One tenant's page.
#[derive(Debug)]
pub struct TenantPage {
    words: SharedWords,
    /// Held while a fault is recorded, so that threads of one worker do not mix their records.
    recording: Mutex<()>,
}

impl TenantPage {
    /// Makes a page with every number zero.
    pub fn create(tenant: &str) -> Result<Self, SharedError> {
        Ok(Self::over(SharedWords::create(&format!("peergate-page-{tenant}"), WORDS)?))
    }

    /// Maps the page that another process made.
    pub fn open(page: OwnedFd) -> Result<Self, SharedError> {
        Ok(Self::over(SharedWords::open(page, WORDS)?))
    }

    fn over(words: SharedWords) -> Self {
        Self { words, recording: Mutex::new(()) }
    }

    /// The page, to hand to another process.
    pub fn page(&self) -> BorrowedFd<'_> {
        self.words.file()
    }

    /// Adds to a counter; one beyond [`COUNTERS`] is nobody's and not counted. Wraps after 2^64.
    pub fn count(&self, counter: usize, by: u64) {
        if let Some(word) = self.counters().get(counter) {
            word.fetch_add(by, Ordering::Relaxed);
        }
    }

    /// Reads a counter; one beyond [`COUNTERS`] is 0.
    pub fn counter(&self, counter: usize) -> u64 {
        self.counters().get(counter).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Sets a gauge; one beyond [`GAUGES`] is nobody's and not set.
    pub fn set_gauge(&self, gauge: usize, value: u64) {
        if let Some(word) = self.gauges().get(gauge) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Reads a gauge; one beyond [`GAUGES`] is 0.
    pub fn gauge(&self, gauge: usize) -> u64 {
        self.gauges().get(gauge).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Forgets what belonged to a worker that is gone: every gauge.
    pub fn clear_worker(&self) {
        for gauge in self.gauges() {
            gauge.store(0, Ordering::Relaxed);
        }
    }

    /// Appends to the fault log, or counts the fault as suppressed if there were too many of late: [`FAULT_BURST`] records come at once, then
    /// 1000 a second. `number` of the entry is not used. Takes a fixed, small number of stores.
    pub fn record(&self, entry: FaultEntry) {
        self.record_at(entry, now());
    }

    fn record_at(&self, entry: FaultEntry, now: u64) {
        if !FAULTS.take(&self.words.words()[FAULT_BUCKET], now) {
            let suppressed = self.suppressed_words();
            let reason = suppressed.get(usize::from(entry.reason)).or(suppressed.first());
            if let Some(word) = reason {
                word.fetch_add(1, Ordering::Relaxed);
            }
            return;
        }
        let _recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ring) = self.ring() {
            ring.push(entry);
        }
    }

    /// The last `last` entries of the fault log.
    pub fn faults(&self, last: usize) -> FaultLog {
        self.ring().map_or_else(FaultLog::default, |ring| ring.read(last))
    }

    /// The first `most` entries of the fault log after number `after`.
    pub fn faults_after(&self, after: u64, most: usize) -> FaultLog {
        self.ring().map_or_else(FaultLog::default, |ring| ring.read_after(after, most))
    }

    /// Faults that have no record because there were too many, by reason.
    pub fn suppressed(&self) -> [u64; FAULT_REASONS] {
        let mut counts = [0; FAULT_REASONS];
        for (count, word) in counts.iter_mut().zip(self.suppressed_words()) {
            *count = word.load(Ordering::Relaxed);
        }
        counts
    }

    /// Asks to write one more log line of a kind that the tenant can cause. `None` if there were too many of late, else how many were left out
    /// before it. Kinds beyond [`LINE_KINDS`] share one.
    pub fn take_line(&self, kind: usize) -> Option<u64> {
        self.take_line_at(kind, now())
    }

    fn take_line_at(&self, kind: usize, now: u64) -> Option<u64> {
        let [bucket, left_out] =
            self.words.words()[FIRST_LINE..SUPPRESSED_LINES].as_chunks().0.get(kind.min(LINE_KINDS - 1))?;
        if LINES.take(bucket, now) {
            Some(left_out.swap(0, Ordering::Relaxed))
        } else {
            left_out.fetch_add(1, Ordering::Relaxed);
            self.words.words()[SUPPRESSED_LINES].fetch_add(1, Ordering::Relaxed);
            None
        }
    }

    /// Log lines that were left out because there were too many, since the page was made.
    pub fn suppressed_lines(&self) -> u64 {
        self.words.words()[SUPPRESSED_LINES].load(Ordering::Relaxed)
    }

    fn suppressed_words(&self) -> &[AtomicU64] {
        &self.words.words()[FIRST_SUPPRESSED..FIRST_LINE]
    }

    fn counters(&self) -> &[AtomicU64] {
        &self.words.words()[FIRST_COUNTER..FIRST_GAUGE]
    }

    fn gauges(&self) -> &[AtomicU64] {
        &self.words.words()[FIRST_GAUGE..FIRST_LOG]
    }

    fn ring(&self) -> Option<Ring<'_>> {
        Ring::new(&self.words.words()[FIRST_LOG..])
    }
}

/// Nanoseconds of the host's monotonic clock.
fn now() -> u64 {
    u64::try_from(monotonic_now().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn supervisor_and_worker() -> (TenantPage, TenantPage) {
        let page = TenantPage::create("test").unwrap();
        let other = TenantPage::open(page.page().try_clone_to_owned().unwrap()).unwrap();
        (page, other)
    }

    #[test]
    fn what_a_worker_wrote_survives_it() {
        let (page, worker) = supervisor_and_worker();
        worker.count(3, 5);
        worker.set_gauge(3, 9);
        worker.record(FaultEntry { address: 0x1000, ..FaultEntry::default() });
        drop(worker);
        page.clear_worker();
        assert_eq!((page.counter(3), page.gauge(3)), (5, 0));
        assert_eq!(page.faults(1).records[0].address, 0x1000);
    }

    #[test]
    fn counters_gauges_and_log_do_not_overlap() {
        let (page, _) = supervisor_and_worker();
        (0..COUNTERS).for_each(|index| page.count(index, 1));
        (0..GAUGES).for_each(|index| page.set_gauge(index, 2));
        page.record(FaultEntry::default());
        (0..LINE_KINDS).for_each(|kind| assert_eq!(page.take_line(kind), Some(0)));
        assert!((0..COUNTERS).all(|index| page.counter(index) == 1));
        assert!((0..GAUGES).all(|index| page.gauge(index) == 2));
        assert_eq!((page.faults(9).total, page.suppressed()), (1, [0; FAULT_REASONS]));
    }

    #[test]
    fn indices_beyond_the_page_change_nothing() {
        let (page, _) = supervisor_and_worker();
        page.count(COUNTERS, 1);
        page.set_gauge(GAUGES, 1);
        page.set_gauge(usize::MAX, 1);
        assert_eq!((page.counter(COUNTERS), page.gauge(GAUGES), page.gauge(0), page.faults(1).total), (0, 0, 0, 0));
    }

    #[test]
    fn threads_that_record_at_the_same_time_lose_and_mix_nothing() {
        let (page, worker) = supervisor_and_worker();
        std::thread::scope(|scope| {
            for thread in 0..4_u32 {
                let worker = &worker;
                scope.spawn(move || {
                    for cookie in 0..60 {
                        worker.record(FaultEntry { stream: thread, domain: thread, cookie, ..FaultEntry::default() });
                    }
                });
            }
        });
        let log = page.faults(240);
        assert_eq!((log.total, log.torn, log.records.len()), (240, 0, 240));
        for thread in 0..4 {
            let cookies: Vec<_> =
                log.records.iter().filter(|entry| entry.stream == thread).map(|entry| entry.cookie).collect();
            assert_eq!(cookies, (0..60).collect::<Vec<_>>());
        }
        assert!(log.records.iter().all(|entry| entry.stream == entry.domain));
    }

    #[test]
    fn a_flood_leaves_a_burst_and_then_a_thousand_a_second_and_counts_the_rest_by_reason() {
        let (page, worker) = supervisor_and_worker();
        let flood = |reason, count: u64, now| {
            (0..count).for_each(|_| worker.record_at(FaultEntry { reason, ..FaultEntry::default() }, now));
        };
        let start = 1 << 40;
        flood(2, 1000, start);
        assert_eq!((page.faults(0).total, page.suppressed()[2]), (256, 744));
        let next = TenantPage::open(page.page().try_clone_to_owned().unwrap()).unwrap();
        next.record_at(FaultEntry { reason: 4, ..FaultEntry::default() }, start);
        assert_eq!((page.faults(0).total, page.suppressed()[4]), (256, 1), "the next worker has no burst of its own");
        flood(200, 3, start);
        flood(2, 1000, start + 1_000_000_000);
        assert_eq!((page.faults(0).total, page.suppressed()[2]), (512, 1488), "a burst is all that is saved up");
        (0..1000).for_each(|ms| flood(2, 10, start + 1_000_000_000 + ms * 1_000_000));
        assert_eq!((page.faults(0).total, page.suppressed()[2]), (512 + 999, 1488 + 9001));
        assert_eq!(page.suppressed().iter().sum::<u64>(), 1 + 3 + 10_489);
        assert_eq!(page.suppressed()[0], 3, "a reason that nobody knows");
    }

    #[test]
    fn lines_of_a_kind_are_limited_for_the_tenant_and_say_how_many_did_not_come() {
        let (page, worker) = supervisor_and_worker();
        let start = 1 << 40;
        assert_eq!((0..1000).filter(|_| worker.take_line_at(1, start) == Some(0)).count(), 32);
        assert_eq!(worker.take_line_at(2, start), Some(0), "another kind has room of its own");
        drop(worker);
        let next = TenantPage::open(page.page().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(next.take_line_at(1, start), None, "the next worker has none");
        assert_eq!(next.take_line_at(1, start + 1_000_000_000), Some(969));
        assert_eq!(next.take_line_at(1, start + 2_000_000_000), Some(0));
        assert_eq!(next.take_line_at(LINE_KINDS, start), Some(0));
        assert_eq!((0..40).filter_map(|_| next.take_line_at(usize::MAX, start)).count(), 31);
        assert_eq!(page.suppressed_lines(), 968 + 1 + 9, "also what a later line has told of");
    }

    #[test]
    fn a_page_of_another_size_is_refused() {
        let small = SharedWords::create("test", 8).unwrap();
        assert!(TenantPage::open(small.file().try_clone_to_owned().unwrap()).is_err());
    }
}
