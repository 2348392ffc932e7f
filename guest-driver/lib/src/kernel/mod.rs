//! The kernel driver's file, `/dev/peergateN`, as a [`Driver`].
//!
//! Each open of the file is a channel: ioctls for calls (`calls`), one mapped ring for completions (`ring`), anonymous memory for mappings
//! (`memory`), `read` for events. The file is opened nonblocking, and every wait is a `poll` or a WAIT with the caller's deadline.
//!
//! Not here: policy. What is called is what is done.

mod calls;
mod memory;
mod ring;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use peergate_uapi::{
    Alloc, Completion, Endpoint, Event, Free, Info, Map, Peer, RingSetup, Stream, Submit, Unmap, Wait, Work,
};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::time::ClockId;
use vdev_wire::Status;
use zerocopy::{FromZeros, IntoBytes};

use crate::{Channel, Driver, Error, HostMemory};
use calls::call;
use memory::Pages;
use ring::CompletionRing;

/// Completion ring entries that the user interface allows.
const RING_ENTRIES: std::ops::RangeInclusive<u32> = 64..=65536;

/// The kernel driver, by the path of its file.
#[derive(Clone, Debug)]
pub struct KernelDriver {
    path: PathBuf,
}

impl KernelDriver {
    /// The driver behind `path`, such as `/dev/peergate0`. Opens nothing yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The path given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Every device file there is, by number.
    ///
    /// # Errors
    /// If `/dev` cannot be read.
    pub fn devices() -> io::Result<Vec<PathBuf>> {
        let mut numbers = Vec::new();
        for entry in std::fs::read_dir("/dev")? {
            let name = entry?.file_name();
            numbers.extend(name.to_str().and_then(device_number));
        }
        numbers.sort_unstable();
        Ok(numbers.into_iter().map(|number| PathBuf::from(format!("/dev/peergate{number}"))).collect())
    }
}

fn device_number(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("peergate")?;
    digits.parse().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()))
}

impl Driver for KernelDriver {
    fn open(&self) -> Result<Box<dyn Channel>, Error> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open(&self.path, flags, Mode::empty()).map_err(|errno| open_error(&self.path, errno))?;
        let file = File::from(file);
        let mut info = Info::new_zeroed();
        call(&file, &mut info)?;
        let (first, last) = RING_ENTRIES.into_inner();
        let entries = info.max_in_flight.clamp(first, last / 2 + 1).next_power_of_two();
        let mut setup = RingSetup { entries, ..RingSetup::new_zeroed() };
        call(&file, &mut setup)?;
        let ring = CompletionRing::map(&file, setup.length)?;
        Ok(Box::new(KernelChannel { file, ring: Mutex::new(ring) }))
    }
}

/// EDQUOT of `open` is an answer of the device; everything else is about the file.
fn open_error(path: &Path, errno: Errno) -> Error {
    match errno {
        Errno::DQUOT => Error::Refused { call: "ATTACH", status: Status::Quota },
        errno => Error::Open { path: path.to_owned(), source: errno.into() },
    }
}

/// One open file.
struct KernelChannel {
    file: File,
    ring: Mutex<CompletionRing>,
}

impl KernelChannel {
    /// Takes what is in the ring now.
    fn take(&self, into: &mut [Completion]) -> usize {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner).take(into)
    }

    /// One event if there is one.
    fn read_event(&self) -> Result<Option<Event>, Error> {
        let mut event = Event::new_zeroed();
        match rustix::io::read(&self.file, event.as_mut_bytes()) {
            Ok(read) if read == size_of::<Event>() => Ok(Some(event)),
            Ok(_) | Err(Errno::NODEV) => Err(Error::Gone),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(errno) => Err(Error::System { call: "Reading events", source: errno.into() }),
        }
    }
}

impl Channel for KernelChannel {
    fn info(&self) -> Result<Info, Error> {
        let mut info = Info::new_zeroed();
        call(&self.file, &mut info)?;
        Ok(info)
    }

    fn endpoint(&self, index: u32) -> Result<Endpoint, Error> {
        let mut endpoint = Endpoint { index, ..Endpoint::new_zeroed() };
        call(&self.file, &mut endpoint)?;
        Ok(endpoint)
    }

    fn map(&self, len: u64, flags: u32) -> Result<Box<dyn HostMemory>, Error> {
        let pages = Pages::new(len)?;
        let mut map = Map { flags, address: pages.address(), length: len, ..Map::new_zeroed() };
        call(&self.file, &mut map)?;
        Ok(Box::new(pages.mapped_at(map.iova)))
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), Error> {
        call(&self.file, &mut Unmap { iova, length: len, ..Unmap::new_zeroed() })
    }

    fn alloc(&self, mut request: Alloc) -> Result<Alloc, Error> {
        call(&self.file, &mut request)?;
        Ok(request)
    }

    fn free(&self, handle: u64) -> Result<(), Error> {
        call(&self.file, &mut Free { handle, ..Free::new_zeroed() })
    }

    fn peer(&self, mut request: Peer) -> Result<Peer, Error> {
        call(&self.file, &mut request)?;
        Ok(request)
    }

    fn submit(&self, queue: u32, work: &[Work]) -> Result<usize, Error> {
        let count = u32::try_from(work.len()).unwrap_or(u32::MAX);
        let mut submit = Submit { work: work.as_ptr() as u64, count, queue, ..Submit::new_zeroed() };
        call(&self.file, &mut submit)?;
        Ok(usize::try_from(submit.count).unwrap_or(work.len()).min(work.len()))
    }

    fn completions(&self, into: &mut [Completion], at_least: usize, deadline: Instant) -> Result<usize, Error> {
        let at_least = at_least.min(into.len());
        let mut taken = 0;
        loop {
            taken += self.take(&mut into[taken..]);
            if taken >= at_least || deadline <= Instant::now() {
                return Ok(taken);
            }
            let count = u32::try_from(at_least - taken).unwrap_or(u32::MAX);
            let mut wait = Wait { count, deadline_ns: monotonic_ns(deadline), ..Wait::new_zeroed() };
            match call(&self.file, &mut wait) {
                Ok(()) | Err(Error::Refused { status: Status::Timeout, .. }) => {}
                // What has completed is not lost with a device that goes: the next call tells that it went.
                Err(error) => match taken + self.take(&mut into[taken..]) {
                    0 => return Err(error),
                    taken => return Ok(taken),
                },
            }
        }
    }

    fn stream(&self, mut request: Stream) -> Result<Stream, Error> {
        call(&self.file, &mut request)?;
        Ok(request)
    }

    fn event(&self, deadline: Instant) -> Result<Option<Event>, Error> {
        loop {
            if let Some(event) = self.read_event()? {
                return Ok(Some(event));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let mut fds = [PollFd::new(&self.file, PollFlags::IN)];
            match rustix::event::poll(&mut fds, Some(&timespec(left))) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Error::System { call: "Waiting for events", source: error.into() }),
            }
            if fds[0].revents().contains(PollFlags::HUP) && !fds[0].revents().contains(PollFlags::IN) {
                return Err(Error::Gone);
            }
        }
    }
}

/// A point in time as nanoseconds of CLOCK_MONOTONIC, never 0.
fn monotonic_ns(deadline: Instant) -> u64 {
    let now = rustix::time::clock_gettime(ClockId::Monotonic);
    let now = Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0));
    let at = now.saturating_add(deadline.saturating_duration_since(Instant::now()));
    u64::try_from(at.as_nanos()).unwrap_or(u64::MAX).max(1)
}

fn timespec(left: Duration) -> Timespec {
    // A day is as good as for ever: the caller looks at its deadline again.
    let left = left.min(Duration::from_secs(86_400));
    Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(0), tv_nsec: left.subsec_nanos().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_numbers_name_a_device() {
        assert_eq!(device_number("peergate12"), Some(12));
        for name in ["peergate", "peergate+1", "peergate1a", "xpeergate1", "peergate-1"] {
            assert_eq!(device_number(name), None, "{name}");
        }
    }

    #[test]
    fn a_missing_device_is_named_in_the_error() {
        let error = KernelDriver::new("/dev/peergate-none").open().err().expect("there is no such device");
        assert!(error.to_string().contains("/dev/peergate-none"), "{error}");
    }

    #[test]
    fn a_far_deadline_does_not_overflow() {
        assert!(monotonic_ns(Instant::now() + Duration::from_secs(1 << 40)) > 0);
        assert_eq!(timespec(Duration::MAX).tv_sec, 86_400);
    }
}
