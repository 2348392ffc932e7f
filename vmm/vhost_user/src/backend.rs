//! What the front-end's messages do, and how the queues run.
//!
//! Every method takes `&self`: the connection's thread, the queues' threads and the timekeeper work side by side. A queue starts when the
//! transport first runs it (which happens when it becomes enabled), and stops at GET_VRING_BASE or at a reset. `queues[i]` is locked for the
//! moment of starting and stopping only, never while the device works. A queue that an earlier process left in use is started before it stops.

use std::any::Any;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use arc_swap::ArcSwap;
use hw_engine::RamMap;
use vdev_device::Device;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackend, VringT};
use virtio_queue::QueueT;
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier};

use crate::MAX_QUEUE_SIZE;
use crate::memory::{self, UnsealedPolicy};
use crate::ring::QueueRing;
use crate::serve::{Hangup, Options, ThreadClass, ThreadHook, enter};
use crate::vring::{Memory, Vring};

const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

#[derive(Default)]
struct QueueState {
    /// Present from start to stop.
    ring: Option<Arc<QueueRing>>,
    /// The device panicked on it, or it cannot be started: it rests until the front-end stops it.
    failed: bool,
}

pub(crate) struct Backend {
    device: Arc<Device>,
    ram: Arc<dyn RamMap>,
    unsealed: UnsealedPolicy,
    hook: ThreadHook,
    hangup: Arc<Hangup>,
    memory: Arc<ArcSwap<GuestMemoryMmap>>,
    acked: AtomicU64,
    queues: Vec<Mutex<QueueState>>,
    /// Of every queue, once they are made.
    vrings: OnceLock<Vec<Vring>>,
    exits: Mutex<Vec<RawFd>>,
    /// The way back to the front-end. Nothing is sent on it, but QEMU complains if it is closed.
    way_back: Mutex<Option<vhost::vhost_user::Backend>>,
}

impl Backend {
    pub(crate) fn new(device: Arc<Device>, ram: Arc<dyn RamMap>, options: &Options, hangup: Arc<Hangup>) -> Self {
        let queues = (0..device.num_queues()).map(|_| Mutex::default()).collect();
        Self {
            device,
            ram,
            unsealed: options.unsealed_memory,
            hook: Arc::clone(&options.thread_hook),
            hangup,
            memory: Arc::new(ArcSwap::from_pointee(GuestMemoryMmap::new())),
            acked: AtomicU64::new(0),
            queues,
            vrings: OnceLock::new(),
            exits: Mutex::new(Vec::new()),
            way_back: Mutex::default(),
        }
    }

    /// Stops a queue until the front-end starts it again. Returns when its ring is not touched any more.
    fn stop(&self, index: u16) {
        let Some(mut state) = self.queue(index) else { return };
        if state.ring.is_none() && self.device.must_resume(index) {
            self.start_to_stop(index, &mut state);
        }
        let was = std::mem::take(&mut *state);
        drop(state);
        if let Some(ring) = was.ring {
            attempt(index, "stop", || self.device.stop_queue(index));
            ring.close();
        }
    }

    /// What an earlier process had in hand is answered also if the queue is not to run any more.
    fn start_to_stop(&self, index: u16, state: &mut QueueState) {
        let Some(vring) = self.vrings.get().and_then(|vrings| vrings.get(usize::from(index))) else { return };
        let in_memory = {
            let mut held = vring.get_mut();
            let queue = held.get_queue_mut();
            let was_ready = queue.ready();
            queue.set_ready(true);
            let in_memory = queue.is_valid(&**self.memory.load());
            queue.set_ready(was_ready);
            in_memory
        };
        if in_memory {
            self.start(index, vring, state);
        } else {
            self.device.stop_queue(index);
        }
    }

    fn start(&self, index: u16, vring: &Vring, state: &mut QueueState) {
        let ring = Arc::new(QueueRing::new(vring.clone(), Arc::clone(&self.memory)));
        state.ring = Some(Arc::clone(&ring));
        // Under the lock of the state, so that a stop cannot overtake it.
        state.failed = attempt(index, "start", || self.device.start_queue(index, ring)).is_none();
    }

    /// Learns of the transport's vrings, in the order of their queues.
    pub(crate) fn know(&self, vrings: Vec<Vring>) {
        // Told once.
        let _ = self.vrings.set(vrings);
    }

    /// Closes what the transport leaves open: it forgets the exit events it was handed.
    ///
    /// # Safety
    /// The transport's threads have ended, and nothing reads the exit events any more.
    pub(crate) unsafe fn close_exit_events(&self) {
        for raw in std::mem::take(&mut *lock(&self.exits)) {
            // SAFETY: `exit_event` released this descriptor to the transport, which gave up the ownership without closing it; the caller
            // promises that nothing uses it.
            drop(unsafe { OwnedFd::from_raw_fd(raw) });
        }
    }

    fn queue(&self, index: u16) -> Option<MutexGuard<'_, QueueState>> {
        self.queues.get(usize::from(index)).map(lock)
    }

    /// Whether the queue may run; starts it if it has not been.
    fn is_running(&self, index: u16, vring: &Vring) -> bool {
        let Some(mut state) = self.queue(index) else { return false };
        let held = vring.get_ref();
        if state.failed || !held.is_enabled() || !held.get_queue().ready() {
            return false;
        }
        if state.ring.is_some() {
            return true;
        }
        let version_1 = self.acked.load(Ordering::Relaxed) & VERSION_1 != 0;
        let in_memory = held.get_queue().is_valid(&**self.memory.load());
        drop(held);
        if !version_1 || !in_memory {
            tracing::warn!(queue = index, version_1, in_memory, "The queue cannot start");
            state.failed = true;
            return false;
        }
        self.start(index, vring, &mut state);
        !state.failed
    }

    /// One turn of a queue. True if it has more to do.
    fn drain(&self, index: u16) -> bool {
        attempt(index, "drain", || self.device.drain(index)).unwrap_or_else(|| {
            if let Some(mut state) = self.queue(index) {
                state.failed = true;
            }
            self.device.rest();
            false
        })
    }
}

/// Runs device code for a queue; a panic ends neither the thread nor the connection.
fn attempt<T>(index: u16, doing: &str, work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work))
        .inspect_err(|panic| {
            tracing::error!(queue = index, doing, panic = panic_text(&**panic), "The device failed; the queue rests");
        })
        .ok()
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a message")
}

/// The data behind these locks is valid after any panic: it is replaced, never edited.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VhostUserBackend for Backend {
    type Bitmap = ();
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        self.queues.len()
    }

    fn max_queue_size(&self) -> usize {
        usize::from(MAX_QUEUE_SIZE)
    }

    fn features(&self) -> u64 {
        enter(&self.hook, ThreadClass::Connection);
        VERSION_1 | EVENT_IDX | INDIRECT_DESC | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn acked_features(&self, features: u64) {
        self.acked.store(features, Ordering::Relaxed);
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        enter(&self.hook, ThreadClass::Connection);
        VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::BACKEND_SEND_FD
            | VhostUserProtocolFeatures::RESET_DEVICE
    }

    fn reset_device(&self) {
        enter(&self.hook, ThreadClass::Connection);
        for index in 0..self.device.num_queues() {
            self.stop(index);
        }
    }

    fn set_backend_req_fd(&self, way_back: vhost::vhost_user::Backend) {
        *lock(&self.way_back) = Some(way_back);
    }

    fn set_event_idx(&self, _enabled: bool) {
        // Each vring knows already.
    }

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        enter(&self.hook, ThreadClass::Connection);
        self.device.read_config(offset, size)
    }

    fn update_memory(&self, table: Memory) -> io::Result<()> {
        enter(&self.hook, ThreadClass::Connection);
        let next = table.memory().into_inner();
        let outcome = memory::check(&next, self.unsealed)
            .map_err(io::Error::other)
            .and_then(|checked| self.ram.replace(&checked.regions).map(|()| checked.unsealed));
        match outcome {
            Ok(unsealed) => {
                if !unsealed.is_empty() {
                    tracing::warn!(
                        regions = unsealed.len(),
                        "Guest memory is not sealed against shrinking: use seal=on"
                    );
                }
                self.memory.store(next);
                Ok(())
            }
            Err(error) => {
                // The transport looks at ring indices by itself: it must not find the refused regions.
                table.lock().unwrap_or_else(PoisonError::into_inner).replace(GuestMemoryMmap::new());
                Err(error)
            }
        }
    }

    fn queues_per_thread(&self) -> Vec<u64> {
        std::iter::once(0b11).chain((2..self.queues.len()).map(|queue| 1 << queue)).collect()
    }

    fn exit_event(&self, _thread: usize) -> Option<(EventConsumer, EventNotifier)> {
        let (consumer, notifier) = new_event_consumer_and_notifier(EventFlag::NONBLOCK | EventFlag::CLOEXEC)
            .inspect_err(|error| tracing::error!(%error, "No exit event for a queue's thread"))
            .ok()?;
        lock(&self.exits).push(consumer.as_raw_fd());
        Some((consumer, notifier))
    }

    fn stop_vring(&self, queue: u32) -> io::Result<()> {
        enter(&self.hook, ThreadClass::Connection);
        if let Ok(index) = u16::try_from(queue) {
            self.stop(index);
        }
        Ok(())
    }

    /// Runs every queue of the thread until none has more to do. Fails only for a kick that cannot be silenced, after hanging up.
    fn handle_event(&self, _event: u16, _set: EventSet, vrings: &[Vring], thread: usize) -> io::Result<()> {
        enter(&self.hook, ThreadClass::Queue);
        if vrings.iter().any(Vring::is_broken) {
            self.hangup.hang_up("A kick is readable but holds no count");
            return Err(io::ErrorKind::InvalidData.into());
        }
        let first = if thread == 0 { 0 } else { thread + 1 };
        let mut more = true;
        while more {
            more = false;
            for (index, vring) in (first..).zip(vrings) {
                let Ok(index) = u16::try_from(index) else { continue };
                if self.is_running(index, vring) {
                    more |= self.drain(index);
                } else {
                    self.device.rest();
                }
            }
        }
        Ok(())
    }
}
