//! A started queue as the device sees it.
//!
//! The memory is the last table that passed the checks, not the one that the transport has just been sent. A panic of the device inside the
//! lock is carried out of it first, so that the lock is not poisoned for the front-end's messages.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use vdev_device::Ring;
use vhost_user_backend::VringT;
use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;

use crate::vring::Vring;

pub(crate) struct QueueRing {
    vring: Vring,
    memory: Arc<ArcSwap<GuestMemoryMmap>>,
    open: AtomicBool,
}

impl QueueRing {
    pub(crate) fn new(vring: Vring, memory: Arc<ArcSwap<GuestMemoryMmap>>) -> Self {
        Self { vring, memory, open: AtomicBool::new(true) }
    }

    /// Nobody touches the ring any more once this returns.
    pub(crate) fn close(&self) {
        let _held = self.vring.get_mut();
        self.open.store(false, Ordering::Relaxed);
    }
}

impl Ring for QueueRing {
    fn with(&self, f: &mut dyn FnMut(&mut Queue, &GuestMemoryMmap)) -> bool {
        let mut state = self.vring.get_mut();
        if !self.open.load(Ordering::Relaxed) {
            return false;
        }
        let memory = self.memory.load();
        let outcome = catch_unwind(AssertUnwindSafe(|| f(state.get_queue_mut(), &memory)));
        drop(state);
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        true
    }

    fn signal(&self) {
        // A counter that is full has an interrupt pending already; nothing else can go wrong with an event counter.
        let _ = self.vring.signal_used_queue();
    }
}
