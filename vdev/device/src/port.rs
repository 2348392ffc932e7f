//! A ring while it is in use: from `start_queue` to `stop_queue`.
//!
//! Chains remember the port they came from, so that one that outlives its ring ends nowhere instead of in the ring's successor.
//!
//! Not here: what chains mean.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, RwLock};
use std::time::Duration;

use virtio_queue::{Queue, QueueT};
use vm_memory::GuestMemoryMmap;

use crate::Ring;
use crate::journal::Journal;
use crate::queue::{Pop, Popped, Visit};
use crate::sync::{lock, read, write};

/// One ring in use.
pub(crate) struct Port {
    pub(crate) index: u16,
    ring: Arc<dyn Ring>,
    pub(crate) journal: Option<Journal>,
    /// False for ever once the ring must not be touched any more.
    live: RwLock<bool>,
    /// False once no more chains are to be taken: the queue stops, or its ring makes no sense.
    taking: AtomicBool,
    /// Chains taken and not yet back.
    open: AtomicUsize,
    idle: (Mutex<()>, Condvar),
}

impl Port {
    pub(crate) fn new(index: u16, ring: Arc<dyn Ring>, journal: Option<Journal>) -> Arc<Self> {
        Arc::new(Self {
            index,
            ring,
            journal,
            live: RwLock::new(true),
            taking: AtomicBool::new(true),
            open: AtomicUsize::new(0),
            idle: (Mutex::new(()), Condvar::new()),
        })
    }

    /// Runs `f` on the ring if it may still be touched, and interrupts the driver if `f` says that it used chains and the driver wants to
    /// know. `f` must not touch any port.
    pub(crate) fn access(&self, mut f: impl FnMut(&mut Queue, &GuestMemoryMmap) -> bool) -> bool {
        let live = read(&self.live);
        if !*live {
            return false;
        }
        let mut signal = false;
        let ran = self.ring.with(&mut |queue, mem| {
            if f(queue, mem) {
                signal = queue.needs_notification(mem).unwrap_or(true);
            }
        });
        if signal {
            self.ring.signal();
        }
        ran
    }

    /// Takes the next chain; `None` if there is none or the queue takes no more. Within [`Port::access`].
    pub(crate) fn pop(&self, queue: &mut Queue, visit: &mut Visit<'_>) -> Option<Popped> {
        if !self.taking() {
            return None;
        }
        // More open chains than the ring has heads: some head was made available twice.
        if self.open.load(Ordering::Relaxed) >= usize::from(queue.size()) {
            return self.give_up("more chains are open than it has heads");
        }
        let mark = |head| {
            if let Some(journal) = &self.journal {
                journal.mark(head);
            }
        };
        match visit.pop(queue, mark) {
            Pop::Chain(popped) => {
                self.open.fetch_add(1, Ordering::Relaxed);
                Some(popped)
            }
            Pop::Empty => None,
            Pop::Broken => self.give_up("its index or a head is out of range"),
        }
    }

    /// Takes nothing more from a ring that makes no sense.
    fn give_up(&self, what: &'static str) -> Option<Popped> {
        tracing::warn!(queue = self.index, what, "The driver broke a ring; it is out of use until it is started anew");
        self.stop_taking();
        None
    }

    /// The queue found nothing: asks the driver to notify. True if there is something all the same. Within [`Port::access`].
    pub(crate) fn rest(&self, queue: &mut Queue, mem: &GuestMemoryMmap) -> bool {
        self.taking() && queue.ready() && queue.enable_notification(mem).unwrap_or(false)
    }

    /// Gives a chain back, `len` bytes written. Within [`Port::access`].
    pub(crate) fn give_back(&self, queue: &mut Queue, mem: &GuestMemoryMmap, head: u16, len: usize) {
        if let Some(journal) = &self.journal {
            journal.going(head, queue.next_used());
        }
        // The head is one of the ring's, and memory that the front-end took away has no reader left.
        let gone = queue.add_used(mem, head, u32::try_from(len).unwrap_or(u32::MAX)).is_ok();
        match &self.journal {
            Some(journal) if gone => journal.back(head),
            Some(journal) => journal.stays(head),
            None => {}
        }
        if self.open.fetch_sub(1, Ordering::AcqRel) == 1 && !self.taking() {
            let _guard = lock(&self.idle.0);
            self.idle.1.notify_all();
        }
    }

    /// Counts a chain that an earlier process took. Within [`Port::access`].
    pub(crate) fn adopt(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    /// Interrupts the driver whether it asked to be or not. Outside [`Port::access`].
    pub(crate) fn interrupt(&self) {
        self.ring.signal();
    }

    /// Whether more chains are to be taken.
    pub(crate) fn taking(&self) -> bool {
        self.taking.load(Ordering::Relaxed)
    }

    /// Takes no more chains.
    pub(crate) fn stop_taking(&self) {
        self.taking.store(false, Ordering::Relaxed);
    }

    /// Whether every chain is back.
    pub(crate) fn is_idle(&self) -> bool {
        self.open.load(Ordering::Acquire) == 0
    }

    /// Waits until every chain is back, or for `most`.
    pub(crate) fn wait_idle(&self, most: Duration) {
        let guard = lock(&self.idle.0);
        if !self.is_idle() {
            drop(self.idle.1.wait_timeout(guard, most));
        }
    }

    /// The queue was stopped and the port is closed: a start that follows goes on where it stopped.
    pub(crate) fn stop_journal(&self) {
        if let Some(journal) = &self.journal {
            journal.stop(self.is_idle());
        }
    }

    /// From its return on the ring is not touched any more.
    pub(crate) fn close(&self) {
        self.stop_taking();
        *write(&self.live) = false;
    }
}
