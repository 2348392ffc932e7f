//! One connection, from accept to the last thread's end.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use hw_engine::RamMap;
use rustix::event::{PollFd, PollFlags, poll};
use vdev_device::{Device, JournalWords};
use vhost::vhost_user::{Error as ProtocolError, Listener};
use vhost_user_backend::{Error as DaemonError, ShutdownHandle, VhostUserDaemon};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use crate::MAX_QUEUES;
use crate::backend::{Backend, panic_text};
use crate::memory::UnsealedPolicy;
use crate::timekeeper::Timekeeper;
use crate::vring::{self, Vring};

/// How long a hang-up may take before the session is given up.
const TEARDOWN: Duration = Duration::from_secs(20);

/// What a thread of the session does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ThreadClass {
    /// Answers the front-end's messages; maps guest memory.
    Connection,
    /// Runs queues: parses what the guest wrote and copies.
    Queue,
    /// Collects finished work and expires deadlines.
    Timekeeper,
}

/// Called once on each thread of a session, before that thread handles anything from outside: the place for a tighter filter of system
/// calls.
pub(crate) type ThreadHook = Arc<dyn Fn(ThreadClass) + Send + Sync>;

thread_local! {
    static ENTERED: Cell<bool> = const { Cell::new(false) };
}

/// Runs the hook if this thread has not run it.
pub(crate) fn enter(hook: &ThreadHook, class: ThreadClass) {
    if !ENTERED.replace(true) {
        hook(class);
    }
}

/// How to serve.
#[derive(Clone)]
pub struct Options {
    /// Guest memory that could be cut off while in use.
    pub unsealed_memory: UnsealedPolicy,
    /// Called once on each thread of the session, before that thread handles anything from outside: the place for a tighter filter of
    /// system calls. The thread that calls [`serve()`] is not among them.
    pub thread_hook: Arc<dyn Fn(ThreadClass) + Send + Sync>,
    /// Memory that outlives the process, with which the device's queues resume what an earlier one of the same connection had in hand.
    pub journal: Option<JournalWords>,
}

impl Default for Options {
    fn default() -> Self {
        Self { unsealed_memory: UnsealedPolicy::default(), thread_hook: Arc::new(|_| {}), journal: None }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options").field("unsealed_memory", &self.unsealed_memory).finish_non_exhaustive()
    }
}

/// Why a session could not begin or did not end by itself.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The device has more queues than the transport can name.
    #[error("The device has {queues} queues; at most {MAX_QUEUES} are possible, so configure fewer submission queues")]
    TooManyQueues {
        /// How many it has.
        queues: u16,
    },
    /// The listening socket failed.
    #[error("Cannot accept a connection")]
    Accept {
        /// What the socket said.
        source: io::Error,
    },
    /// A thread could not be started.
    #[error("Cannot start the session's threads")]
    Start {
        /// What the system said.
        source: io::Error,
    },
    /// The front-end broke the protocol, or the memory it offered was refused.
    #[error("The front-end was disconnected: {reason}")]
    FrontEnd {
        /// What the transport said.
        reason: String,
    },
    /// A bug: the device panicked while the session ended.
    #[error("The device failed at the end of the session: {panic}")]
    Panicked {
        /// What the panic said.
        panic: String,
    },
    /// A thread did not end; the process must.
    #[error("The session did not end within {seconds} s; end the process")]
    Stuck {
        /// How long it was given.
        seconds: u64,
    },
}

/// Ends the connection from any thread, also before it is known.
#[derive(Default)]
pub(crate) struct Hangup(Mutex<HangupState>);

#[derive(Default)]
struct HangupState {
    reason: Option<&'static str>,
    handle: Option<ShutdownHandle>,
}

impl Hangup {
    /// Closes the connection; the first reason stays.
    pub(crate) fn hang_up(&self, reason: &'static str) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tracing::debug!("{reason}; closing the connection");
        state.reason.get_or_insert(reason);
        if let Some(handle) = &state.handle {
            handle.shutdown();
        }
    }

    fn connect(&self, handle: Option<ShutdownHandle>) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(_), Some(handle)) = (state.reason, &handle) {
            handle.shutdown();
        }
        state.handle = handle;
    }

    fn reason(&self) -> Option<&'static str> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).reason
    }
}

/// Serves exactly one connection on `listener` and returns when the front-end is gone, the device is shut down and every thread has ended.
///
/// Blocks. `connected` is called when the front-end has connected. `ram` learns of every memory table that passes the checks.
///
/// # Errors
/// A session that ended because the VMM hung up is a success. See [`ServeError`] for the rest; after [`ServeError::Stuck`] threads of the
/// session still run.
pub fn serve(
    listener: OwnedFd,
    device: Arc<Device>,
    ram: Arc<dyn RamMap>,
    options: &Options,
    connected: impl FnOnce(),
) -> Result<(), ServeError> {
    let queues = device.num_queues();
    if queues > MAX_QUEUES {
        return Err(ServeError::TooManyQueues { queues });
    }
    if let Some(words) = &options.journal {
        device.keep_journal(Arc::clone(words));
    }
    let hangup = Arc::new(Hangup::default());
    let backend = Arc::new(Backend::new(Arc::clone(&device), ram, options, Arc::clone(&hangup)));
    let memory = GuestMemoryAtomic::<GuestMemoryMmap>::new(GuestMemoryMmap::new());
    let (daemon, vrings) = vring::made_by(|| VhostUserDaemon::new("connection".into(), Arc::clone(&backend), memory));
    let mut daemon = daemon.map_err(|error| ServeError::Start { source: io::Error::other(error.to_string()) })?;
    backend.know(vrings);
    let timekeeper =
        Timekeeper::start(&device, options, Arc::clone(&hangup)).map_err(|source| ServeError::Start { source })?;
    let session = converse(listener, &mut daemon, &hangup, connected);
    teardown(device, backend, daemon, timekeeper)?;
    session
}

/// Accepts, and waits for the front-end to go.
fn converse(
    listener: OwnedFd,
    daemon: &mut VhostUserDaemon<Arc<Backend>>,
    hangup: &Hangup,
    connected: impl FnOnce(),
) -> Result<(), ServeError> {
    wait_readable(&listener).map_err(|source| ServeError::Accept { source })?;
    let mut listener = Listener::from(UnixListener::from(listener));
    daemon.start(&mut listener).map_err(|error| ServeError::Accept { source: io::Error::other(error.to_string()) })?;
    drop(listener);
    hangup.connect(daemon.shutdown_handle());
    connected();
    let outcome = daemon.wait();
    hangup.connect(None);
    if let Some(reason) = hangup.reason() {
        return Err(ServeError::FrontEnd { reason: reason.into() });
    }
    match outcome {
        Ok(()) | Err(DaemonError::HandleRequest(ProtocolError::Disconnected | ProtocolError::PartialMessage)) => Ok(()),
        Err(DaemonError::WaitDaemon(panic)) => Err(ServeError::Panicked { panic: panic_text(&*panic).into() }),
        // Its own words, without those of the layers between.
        Err(DaemonError::HandleRequest(ProtocolError::ReqHandlerError(error))) => {
            Err(ServeError::FrontEnd { reason: error.to_string() })
        }
        Err(error) => Err(ServeError::FrontEnd { reason: error.to_string() }),
    }
}

/// Ends the device and the threads, or gives up after a while: a front-end can hold a thread in a page of memory that never comes.
fn teardown(
    device: Arc<Device>,
    backend: Arc<Backend>,
    daemon: VhostUserDaemon<Arc<Backend>>,
    timekeeper: Timekeeper,
) -> Result<(), ServeError> {
    let (done, ended) = mpsc::channel();
    let end = move || {
        let shut = catch_unwind(AssertUnwindSafe(|| device.shutdown()));
        timekeeper.stop();
        // Tells the queues' threads to end, and joins them.
        drop(daemon);
        // SAFETY: the line above joined every thread of the transport.
        unsafe { backend.close_exit_events() };
        let result = shut.map_err(|panic| ServeError::Panicked { panic: panic_text(&*panic).into() });
        // Nobody listens any more once the wait was given up.
        let _ = done.send(result);
    };
    thread::Builder::new().name("teardown".into()).spawn(end).map_err(|source| ServeError::Start { source })?;
    ended.recv_timeout(TEARDOWN).unwrap_or(Err(ServeError::Stuck { seconds: TEARDOWN.as_secs() }))
}

fn wait_readable(listener: &OwnedFd) -> io::Result<()> {
    loop {
        match poll(&mut [PollFd::new(listener, PollFlags::IN)], None) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

// The transport moves vrings between its threads.
const _: () = {
    const fn is_send_sync<T: Send + Sync>() {}
    is_send_sync::<Vring>();
    is_send_sync::<Backend>();
};
