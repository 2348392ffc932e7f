//! A vring that cannot be made to block.
//!
//! The front-end chooses the descriptors that kick a queue and that the queue's interrupts are written to. Here both must be event counters:
//! anything else is dropped with a log line and leaves the queue without a kick (never started) or without interrupts. A kick is read with
//! `RWF_NOWAIT` and an interrupt is written to a descriptor in non-blocking mode, so that neither holds up a thread. A kick that is readable
//! but yields no count marks the vring as broken, which ends the connection: its events could not be silenced otherwise.
//!
//! Everything else is `VringMutex`'s. The transport keeps its vrings to itself; [`made_by`] learns of them as they are made.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags};
use vhost_user_backend::{VringMutex, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::Error as QueueError;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

/// The memory that the transport hands to its vrings.
pub(crate) type Memory = GuestMemoryAtomic<GuestMemoryMmap>;

/// Readable but empty, so many times in a row: the event belongs to another descriptor than the one in force.
const EMPTY_KICKS: u32 = 64;

/// `VringMutex` with checked descriptors.
#[derive(Clone)]
pub(crate) struct Vring {
    inner: VringMutex<Memory>,
    health: Arc<Health>,
}

thread_local! {
    /// Vrings that this thread has made, while somebody wants to know.
    static MADE: RefCell<Option<Vec<Vring>>> = const { RefCell::new(None) };
}

/// Runs `make`, and gives the vrings made meanwhile on this thread, in that order.
pub(crate) fn made_by<T>(make: impl FnOnce() -> T) -> (T, Vec<Vring>) {
    MADE.set(Some(Vec::new()));
    let made = make();
    (made, MADE.take().unwrap_or_default())
}

#[derive(Default)]
struct Health {
    broken: AtomicBool,
    empty: AtomicU32,
}

impl Vring {
    /// Whether the kick misbehaved; the connection must end.
    pub(crate) fn is_broken(&self) -> bool {
        self.health.broken.load(Ordering::Relaxed)
    }

    fn read_kick_once(&self, kick: BorrowedFd<'_>) {
        match read_nowait(kick, &mut [0; 8]) {
            Ok(8) => self.health.empty.store(0, Ordering::Relaxed),
            Err(Errno::AGAIN | Errno::INTR) => {
                if self.health.empty.fetch_add(1, Ordering::Relaxed) >= EMPTY_KICKS {
                    self.health.broken.store(true, Ordering::Relaxed);
                }
            }
            Ok(_) | Err(_) => self.health.broken.store(true, Ordering::Relaxed),
        }
    }
}

/// Reads without waiting, whatever mode the descriptor is in.
fn read_nowait(fd: BorrowedFd<'_>, into: &mut [u8]) -> rustix::io::Result<usize> {
    rustix::io::preadv2(fd, &mut [IoSliceMut::new(into)], u64::MAX, ReadWriteFlags::NOWAIT)
}

/// The file, if it is an event counter. Asks without consuming a count: only such descriptors refuse a read of one byte as too short.
fn event_counter(file: Option<File>, role: &str) -> Option<File> {
    let file = file?;
    if read_nowait(file.as_fd(), &mut [0; 1]) == Err(Errno::INVAL) {
        return Some(file);
    }
    tracing::warn!(role, "The front-end sent a descriptor that is not an eventfd; it is not used");
    None
}

fn set_nonblocking(file: &File) -> rustix::io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    rustix::fs::fcntl_setfl(file, flags | OFlags::NONBLOCK)
}

fn borrow(fd: &RawFd) -> BorrowedFd<'_> {
    // SAFETY: the number comes from a descriptor that a vring owns, and the caller holds that vring's lock, under which alone it is closed.
    unsafe { BorrowedFd::borrow_raw(*fd) }
}

impl<'a> VringStateGuard<'a, Memory> for Vring {
    type G = <VringMutex<Memory> as VringStateGuard<'a, Memory>>::G;
}

impl<'a> VringStateMutGuard<'a, Memory> for Vring {
    type G = <VringMutex<Memory> as VringStateMutGuard<'a, Memory>>::G;
}

impl VringT<Memory> for Vring {
    fn new(mem: Memory, max_queue_size: u16) -> Result<Self, QueueError> {
        let vring = Self { inner: VringMutex::new(mem, max_queue_size)?, health: Arc::default() };
        MADE.with_borrow_mut(|made| made.iter_mut().for_each(|made| made.push(vring.clone())));
        Ok(vring)
    }

    fn get_ref(&self) -> <Self as VringStateGuard<'_, Memory>>::G {
        self.inner.get_ref()
    }

    fn get_mut(&self) -> <Self as VringStateMutGuard<'_, Memory>>::G {
        self.inner.get_mut()
    }

    fn add_used(&self, desc_index: u16, len: u32) -> Result<(), QueueError> {
        self.inner.add_used(desc_index, len)
    }

    fn signal_used_queue(&self) -> io::Result<()> {
        self.inner.signal_used_queue()
    }

    fn enable_notification(&self) -> Result<bool, QueueError> {
        self.inner.enable_notification()
    }

    fn disable_notification(&self) -> Result<(), QueueError> {
        self.inner.disable_notification()
    }

    fn needs_notification(&self) -> Result<bool, QueueError> {
        self.inner.needs_notification()
    }

    fn set_enabled(&self, enabled: bool) {
        self.inner.set_enabled(enabled);
    }

    fn set_queue_info(&self, desc_table: u64, avail_ring: u64, used_ring: u64) -> Result<(), QueueError> {
        self.inner.set_queue_info(desc_table, avail_ring, used_ring)
    }

    fn queue_next_avail(&self) -> u16 {
        self.inner.queue_next_avail()
    }

    fn set_queue_next_avail(&self, base: u16) {
        self.inner.set_queue_next_avail(base);
    }

    fn set_queue_next_used(&self, idx: u16) {
        self.inner.set_queue_next_used(idx);
    }

    fn queue_used_idx(&self) -> Result<u16, QueueError> {
        self.inner.queue_used_idx()
    }

    fn set_queue_size(&self, num: u16) {
        self.inner.set_queue_size(num);
    }

    fn set_queue_event_idx(&self, enabled: bool) {
        self.inner.set_queue_event_idx(enabled);
    }

    fn set_queue_ready(&self, ready: bool) {
        self.inner.set_queue_ready(ready);
    }

    fn set_kick(&self, file: Option<File>) {
        self.inner.set_kick(event_counter(file, "kick"));
    }

    /// Never fails and never waits. True makes the event loop call the backend, which is where a broken vring is noticed.
    fn read_kick(&self) -> io::Result<bool> {
        let state = self.inner.get_ref();
        if let Some(kick) = state.get_kick() {
            self.read_kick_once(borrow(&kick.as_raw_fd()));
        }
        Ok(state.is_enabled() || self.is_broken())
    }

    fn set_call(&self, file: Option<File>) {
        let file = event_counter(file, "call");
        if let Some(Err(error)) = file.as_ref().map(set_nonblocking) {
            tracing::warn!(%error, "The interrupt's eventfd stays as the front-end made it");
        }
        self.inner.set_call(file);
    }

    fn set_err(&self, file: Option<File>) {
        self.inner.set_err(event_counter(file, "err"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::io::Write;

    fn vring() -> Vring {
        let vring = Vring::new(Memory::new(GuestMemoryMmap::new()), 8).unwrap();
        vring.set_enabled(true);
        vring
    }

    fn counter() -> File {
        File::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap())
    }

    #[test]
    fn kick_in_blocking_mode_is_read_without_waiting() {
        let vring = vring();
        let kick = counter();
        vring.set_kick(Some(kick.try_clone().unwrap()));
        assert!(vring.read_kick().unwrap(), "an empty counter must not block");
        (&kick).write_all(&3u64.to_ne_bytes()).unwrap();
        assert!(vring.read_kick().unwrap());
        assert_eq!(read_nowait(kick.as_fd(), &mut [0; 8]), Err(Errno::AGAIN), "the count is consumed");
        assert!(!vring.is_broken());
    }

    #[test]
    fn probing_a_kick_consumes_no_count() {
        let kick = counter();
        (&kick).write_all(&1u64.to_ne_bytes()).unwrap();
        let kick = event_counter(Some(kick), "kick").expect("an eventfd is accepted");
        assert_eq!(read_nowait(kick.as_fd(), &mut [0; 8]), Ok(8));
    }

    #[test]
    fn only_event_counters_are_accepted() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let refused = [
            File::open("/dev/null").unwrap(),
            File::open("/").unwrap(),
            File::open("/proc/self/exe").unwrap(),
            File::from(std::os::fd::OwnedFd::from(reader)),
            File::from(std::os::fd::OwnedFd::from(socket)),
        ];
        for file in refused {
            let shown = format!("{file:?}");
            assert!(event_counter(Some(file), "kick").is_none(), "{shown}");
        }
        let vring = vring();
        vring.set_kick(Some(File::open("/dev/null").unwrap()));
        assert!(vring.get_ref().get_kick().is_none());
    }

    #[test]
    fn events_of_another_descriptor_break_the_vring() {
        let vring = vring();
        vring.set_kick(Some(counter()));
        for _ in 0..=EMPTY_KICKS {
            assert!(!vring.is_broken());
            vring.read_kick().unwrap();
        }
        assert!(vring.is_broken());
    }

    #[test]
    fn interrupt_on_a_full_counter_does_not_wait() {
        let vring = vring();
        let call = counter();
        vring.set_call(Some(call.try_clone().unwrap()));
        (&call).write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert_eq!(vring.signal_used_queue().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
