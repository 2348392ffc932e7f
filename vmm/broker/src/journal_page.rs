//! Which chains a tenant's worker has in hand: what makes work that was in flight when a worker died complete exactly once in the next one.
//!
//! The supervisor makes the page and hands it to each worker of the tenant. It looks at nothing in it; it says only, by [`JournalPage::clear`],
//! that the next worker meets another VM and must believe nothing. A worker must take every word for one that a hostile worker wrote.
//!
//! Not here: what the words mean. They are the device's, but for the first: while it is zero, the others are void.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::words::{SharedError, SharedWords};

/// Words in the page. Only those that are used take memory.
pub const JOURNAL_WORDS: usize = 68 * 1024;

/// The journal of one tenant's queues.
#[derive(Debug)]
pub struct JournalPage(SharedWords);

impl JournalPage {
    /// Makes a page with nothing in it.
    pub fn create(tenant: &str) -> Result<Self, SharedError> {
        Ok(Self(SharedWords::create(&format!("peergate-journal-{tenant}"), JOURNAL_WORDS)?))
    }

    /// Maps the page that another process made.
    pub fn open(page: OwnedFd) -> Result<Self, SharedError> {
        Ok(Self(SharedWords::open(page, JOURNAL_WORDS)?))
    }

    /// The page, to hand to another process.
    pub fn page(&self) -> BorrowedFd<'_> {
        self.0.file()
    }

    /// Makes all of it void. Only while no worker of the tenant runs.
    pub fn clear(&self) {
        if let Some(first) = self.0.words().first() {
            first.store(0, Ordering::Relaxed);
        }
    }
}

impl AsRef<[AtomicU64]> for JournalPage {
    fn as_ref(&self) -> &[AtomicU64] {
        self.0.words()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_worker_noted_the_next_one_finds_unless_it_is_cleared() {
        let page = JournalPage::create("test").unwrap();
        let open = || JournalPage::open(page.page().try_clone_to_owned().unwrap()).unwrap();
        let worker = open();
        worker.as_ref()[0].store(7, Ordering::Relaxed);
        worker.as_ref()[JOURNAL_WORDS - 1].store(8, Ordering::Relaxed);
        drop(worker);
        let next = open();
        let noted = || [0, JOURNAL_WORDS - 1].map(|index| next.as_ref()[index].load(Ordering::Relaxed));
        assert_eq!(noted(), [7, 8]);
        page.clear();
        assert_eq!(noted()[0], 0);
    }

    #[test]
    fn a_page_of_another_size_is_refused() {
        let small = SharedWords::create("test", JOURNAL_WORDS - 1).unwrap();
        assert!(JournalPage::open(small.file().try_clone_to_owned().unwrap()).is_err());
    }
}
