//! What the operator sees of one tenant: numbers, the fault log.
//!
//! The worker writes, the supervisor reads at any time; both hold the page, so a worker that is busy, stuck or dead costs no answer and
//! loses no record. Counters only grow, also from one worker to the next; gauges belong to the worker and are cleared after it.
//!
//! Not here: which counter has which index, names.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::faults::{FaultEntry, FaultLog, LOG_WORDS, Ring};
use crate::words::{SharedError, SharedWords};

/// Counters in a page.
pub const COUNTERS: usize = 64;
/// Gauges in a page.
pub const GAUGES: usize = 64;

const FIRST_COUNTER: usize = 8;
const FIRST_GAUGE: usize = FIRST_COUNTER + COUNTERS;
const FIRST_LOG: usize = FIRST_GAUGE + GAUGES;
const WORDS: usize = FIRST_LOG + LOG_WORDS;

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

    /// Appends to the fault log; `number` of the entry is not used. Takes a fixed, small number of stores.
    pub fn record(&self, entry: FaultEntry) {
        let _recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ring) = self.ring() {
            ring.push(entry);
        }
    }

    /// The last `last` entries of the fault log.
    pub fn faults(&self, last: usize) -> FaultLog {
        self.ring().map_or_else(FaultLog::default, |ring| ring.read(last))
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
        assert!((0..COUNTERS).all(|index| page.counter(index) == 1));
        assert!((0..GAUGES).all(|index| page.gauge(index) == 2));
        assert_eq!(page.faults(9).total, 1);
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
                    for cookie in 0..200 {
                        worker.record(FaultEntry { stream: thread, domain: thread, cookie, ..FaultEntry::default() });
                    }
                });
            }
        });
        let log = page.faults(FAULTS);
        assert_eq!((log.total, log.torn, log.records.len()), (800, 0, FAULTS));
        for thread in 0..4 {
            let cookies: Vec<_> =
                log.records.iter().filter(|entry| entry.stream == thread).map(|entry| entry.cookie).collect();
            assert_eq!(cookies, (0..200).collect::<Vec<_>>());
        }
        assert!(log.records.iter().all(|entry| entry.stream == entry.domain));
    }

    const FAULTS: usize = 800;

    #[test]
    fn a_page_of_another_size_is_refused() {
        let small = SharedWords::create("test", 8).unwrap();
        assert!(TenantPage::open(small.file().try_clone_to_owned().unwrap()).is_err());
    }
}
