//! The signals that ask a daemon to end, as a descriptor to wait on.
//!
//! Not here: what ending means.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// Signals that ask for an end.
const STOP: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// SIGTERM, SIGINT and SIGHUP, blocked for this thread and the ones it will start, and readable here.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
}

impl Signals {
    /// Blocks the signals. Call it before any other thread is started.
    pub fn block() -> io::Result<Self> {
        let set = stop_set();
        mask(libc::SIG_BLOCK, &set)?;
        // SAFETY: the set is initialised; -1 asks for a new descriptor.
        let raw = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just made this descriptor, and nobody else has it.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(raw) } })
    }

    /// Lets the signals act again, in a process that was started by one that had blocked them.
    pub fn unblock() -> io::Result<()> {
        mask(libc::SIG_UNBLOCK, &stop_set())
    }

    /// Takes one pending signal, by name; `None` if there is none. Does not block.
    pub fn take(&self) -> io::Result<Option<&'static str>> {
        let mut info = [0_u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.fd, &mut info) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
            Ok(_) => {
                // The number comes first.
                let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
                Ok(Some(match number {
                    libc::SIGTERM => "SIGTERM",
                    libc::SIGINT => "SIGINT",
                    _ => "SIGHUP",
                }))
            }
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn stop_set() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the set may be uninitialised; that is what the call is for.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: initialised by the line above, which cannot fail.
    let mut set = unsafe { set.assume_init() };
    for signal in STOP {
        // SAFETY: the set is initialised and the signal exists.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    set
}

fn mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: the set is initialised; the old mask is not asked for.
    match unsafe { libc::pthread_sigmask(how, &raw const *set, std::ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}
