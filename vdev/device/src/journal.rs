//! Which chains a queue has in hand, in words that outlive the process.
//!
//! Outstanding chains cannot be told from the rings alone: they go back in any order. So each is marked under its head when it is taken, with
//! a rising number, and the mark goes when the chain is back. Whoever starts the queue after the process has died finds the marks (`resume`).
//!
//! # Steps
//! A chain is taken: its head is read; **marked**; everything else. It goes back: the mark becomes **going**, with the used index of that
//! moment; used element; used index; the mark is **cleared**. The ring's lock is held meanwhile, so at most one mark of a queue is going. Whatever
//! step was the last one, the chain is either to be taken again (not marked), to be answered (marked, or going and the index has not moved), or
//! back (going and the index has moved): never two of these.
//!
//! The reader is another process, after the writer's death. What a thread stored before it died is there, and nothing that came later in its
//! program: a CPU completes instructions in that order even where others see them in another. So it is enough to keep the compiler from
//! moving stores: those that end something are release stores, and a compiler fence follows the mark.
//!
//! All of it may have been written by a hostile process, or be about another ring: nothing read here is an index or a count without a bound.
//!
//! Not here: what becomes of chains that were in hand; where the words live.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use vdev_wire::FIRST_SUBMIT_QUEUE;
use virtio_queue::{Queue, QueueT};

use crate::spec::MAX_SUBMIT_QUEUES;

/// Words that outlive the process, at least [`JOURNAL_WORDS`]. The first one zero makes them void: so does whoever knows that the next
/// connection is another one.
pub type JournalWords = Arc<dyn AsRef<[AtomicU64]> + Send + Sync>;

/// Words that a journal needs.
pub const JOURNAL_WORDS: usize = FIRST_MARK + QUEUES * MARKS;

/// In the first word: the rest counts.
const VALID: u64 = u64::from_le_bytes(*b"pgjrnl01");
const QUEUES: usize = MAX_SUBMIT_QUEUES as usize + FIRST_SUBMIT_QUEUE as usize;
/// Words about a queue besides its marks: its state, then [`RingId`].
const HEADER: usize = 8;
const FIRST_HEADER: usize = 8;
const FIRST_MARK: usize = 1024;
/// Marks of a queue; heads beyond are not marked.
const MARKS: usize = 1024;

const _: () = assert!(FIRST_HEADER + QUEUES * HEADER <= FIRST_MARK, "every queue has a header");

/// State: chains are taken and given back.
const ACTIVE: u64 = 1;
/// State: the queue was stopped, and every chain is back.
const STOPPED: u64 = 2;

const MARKED: u64 = 1;
const GOING: u64 = 2;
const USED_SHIFT: u32 = 2;
const ORDER_SHIFT: u32 = 18;

/// What tells one ring from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingId([u64; 3]);

impl RingId {
    pub(crate) fn of(queue: &Queue) -> Self {
        Self([u64::from(queue.size()), queue.desc_table(), queue.used_ring()])
    }
}

/// What the journal says about a ring that starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nothing: it is new, or was stopped with chains that are never answered.
    Nothing,
    /// It was stopped, and every chain was back.
    Stopped,
    /// It was in use when the process ended.
    InUse,
    /// Another ring was in use.
    Other,
}

/// The journal of one queue.
pub(crate) struct Journal {
    words: JournalWords,
    header: usize,
    marks: usize,
    /// Chains marked by this process.
    order: AtomicU64,
}

/// Makes void words a journal that says nothing. False if there are too few.
pub(crate) fn prepare(words: &JournalWords) -> bool {
    let words = (**words).as_ref();
    let (Some(valid), Some(headers)) = (words.first(), words.get(1..FIRST_MARK)) else { return false };
    if valid.load(Ordering::Relaxed) != VALID {
        headers.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        valid.store(VALID, Ordering::Release);
    }
    words.len() >= JOURNAL_WORDS
}

impl Journal {
    /// The journal of a queue; `None` if there is none for so many queues.
    pub(crate) fn of_queue(words: &JournalWords, queue: u16) -> Option<Self> {
        let queue = usize::from(queue);
        let header = queue.checked_mul(HEADER)?.checked_add(FIRST_HEADER)?;
        let marks = queue.checked_mul(MARKS)?.checked_add(FIRST_MARK)?;
        (queue < QUEUES).then(|| Self { words: Arc::clone(words), header, marks, order: AtomicU64::new(0) })
    }

    fn header(&self) -> Option<&[AtomicU64; HEADER]> {
        (*self.words).as_ref().get(self.header..)?.first_chunk()
    }

    fn marks(&self) -> &[AtomicU64] {
        let words = (*self.words).as_ref().get(self.marks..).unwrap_or_default();
        words.get(..MARKS).unwrap_or_default()
    }

    fn word(&self, head: u16) -> Option<&AtomicU64> {
        self.marks().get(usize::from(head))
    }

    /// What there is about a ring that starts.
    pub(crate) fn find(&self, ring: RingId) -> Found {
        let Some([state, id @ ..]) = self.header() else { return Found::Nothing };
        let same = id.iter().zip(ring.0).all(|(word, own)| word.load(Ordering::Relaxed) == own);
        match (state.load(Ordering::Acquire), same) {
            (ACTIVE, true) => Found::InUse,
            (ACTIVE, false) => Found::Other,
            (STOPPED, true) => Found::Stopped,
            _ => Found::Nothing,
        }
    }

    /// Whether it says anything.
    pub(crate) fn is_kept(&self) -> bool {
        self.header().is_some_and(|[state, ..]| matches!(state.load(Ordering::Relaxed), ACTIVE | STOPPED))
    }

    /// Begins anew: nothing is in hand.
    pub(crate) fn begin(&self, ring: RingId) {
        let Some([state, id @ ..]) = self.header() else { return };
        let size = ring.0.first().and_then(|size| usize::try_from(*size).ok()).unwrap_or(MARKS);
        self.marks().iter().take(size).for_each(|mark| mark.store(0, Ordering::Relaxed));
        id.iter().zip(ring.0).for_each(|(word, own)| word.store(own, Ordering::Relaxed));
        state.store(ACTIVE, Ordering::Release);
    }

    /// Goes on with what was found.
    pub(crate) fn go_on(&self) {
        self.set_state(ACTIVE);
    }

    /// The queue stops; `all_back` if no chain is in hand. Those that are will never be answered, so nothing is to be found of them.
    pub(crate) fn stop(&self, all_back: bool) {
        self.set_state(if all_back { STOPPED } else { 0 });
    }

    fn set_state(&self, to: u64) {
        if let Some([state, ..]) = self.header() {
            state.store(to, Ordering::Release);
        }
    }

    /// A chain is taken; nothing may have been done with it yet.
    pub(crate) fn mark(&self, head: u16) {
        // Under the ring's lock: a counter, not a contest.
        let order = self.order.load(Ordering::Relaxed);
        self.order.store(order.wrapping_add(1), Ordering::Relaxed);
        if let Some(word) = self.word(head) {
            word.store(order << ORDER_SHIFT | MARKED, Ordering::Relaxed);
        }
        // What is done with the chain comes after.
        compiler_fence(Ordering::SeqCst);
    }

    /// A chain is about to go back, as the one that moves the used index on from `used`.
    pub(crate) fn going(&self, head: u16, used: u16) {
        if let Some(word) = self.word(head) {
            let order = word.load(Ordering::Relaxed) >> ORDER_SHIFT << ORDER_SHIFT;
            word.store(order | u64::from(used) << USED_SHIFT | GOING | MARKED, Ordering::Relaxed);
        }
        // The used index, itself a release store, comes after; the used element may come before.
        compiler_fence(Ordering::Release);
    }

    /// A chain is back.
    pub(crate) fn back(&self, head: u16) {
        if let Some(word) = self.word(head) {
            // After the used index.
            word.store(0, Ordering::Release);
        }
    }

    /// A chain could not go back: the ring was not there.
    pub(crate) fn stays(&self, head: u16) {
        if let Some(word) = self.word(head) {
            word.store(word.load(Ordering::Relaxed) >> ORDER_SHIFT << ORDER_SHIFT | MARKED, Ordering::Relaxed);
        }
    }

    /// Heads of a ring of `size` whose chains are in hand while its used index is `used`, in the order in which they were taken. Clears the mark
    /// of one that has gone back.
    pub(crate) fn in_hand(&self, size: u16, used: u16) -> Vec<u16> {
        let mut found = Vec::new();
        for (head, word) in (0..size).zip(self.marks()) {
            let mark = word.load(Ordering::Relaxed);
            #[allow(clippy::cast_possible_truncation, reason = "it was stored with sixteen bits")]
            let before = (mark >> USED_SHIFT) as u16;
            if mark & MARKED == 0 {
                continue;
            }
            if mark & GOING != 0 && before.wrapping_add(1) == used {
                word.store(0, Ordering::Relaxed);
                continue;
            }
            found.push((mark >> ORDER_SHIFT, head));
        }
        found.sort_unstable();
        found.into_iter().map(|(_, head)| head).collect()
    }
}
