//! The thread of the processor: until the guest is done, reaches where nothing is, or is stopped.
//!
//! A guest that sleeps or turns in a circle never leaves the kernel by itself. A signal without effect interrupts it; it is sent again and again,
//! because one that comes just before the guest is entered has none. Not here: what the guest does.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use crate::program::DONE;
use crate::{Host, MicroVmError};

/// How long until the signal is sent again.
const AGAIN: Duration = Duration::from_millis(1);

/// How a guest ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Its program is done.
    Done,
    /// It stored `value` to `address`, where it has no memory. The store had no effect.
    Store {
        /// Guest-physical address.
        address: u64,
        /// What it wanted to be there.
        value: u16,
    },
    /// It was stopped.
    Stopped,
}

/// A guest that runs. It is stopped when this is dropped.
#[derive(Debug)]
pub struct Running {
    host: Arc<Host>,
    stop: Arc<AtomicBool>,
    exit: Receiver<Result<Exit, MicroVmError>>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub(crate) fn start(mut vcpu: VcpuFd, host: Arc<Host>) -> Result<Self, MicroVmError> {
        prepare_signal()?;
        let stop = Arc::new(AtomicBool::new(false));
        let (send, exit) = sync_channel(1);
        let (kept, stopped) = (Arc::clone(&host), Arc::clone(&stop));
        let run = move || {
            // Nobody may listen any more.
            let _ = send.send(run(&mut vcpu, &stopped));
            drop(vcpu);
            drop(kept);
        };
        let thread = std::thread::Builder::new().name("vcpu".into()).spawn(run);
        let thread = thread.map_err(MicroVmError::host("start a thread"))?;
        Ok(Self { host, stop, exit, thread: Some(thread) })
    }

    /// The host's side.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// Whether the guest's end is near or has come.
    pub fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the guest to end by itself. An error if it does not within `most`: then it is stopped.
    pub fn wait(self, most: Duration) -> Result<Exit, MicroVmError> {
        match self.exit.recv_timeout(most) {
            Ok(exit) => exit,
            Err(RecvTimeoutError::Timeout) => {
                Err(MicroVmError::Disproved(format!("The guest is not done after {} s", most.as_secs())))
            }
            Err(RecvTimeoutError::Disconnected) => Err(lost()),
        }
    }

    /// Stops the guest, unless it has ended by itself.
    pub fn stop(mut self) -> Result<Exit, MicroVmError> {
        self.end().unwrap_or_else(|| Err(lost()))
    }

    /// Ends the thread. What it says, if that has not been heard yet.
    fn end(&mut self) -> Option<Result<Exit, MicroVmError>> {
        let thread = self.thread.take()?;
        self.stop.store(true, Ordering::Release);
        let said = loop {
            // It has ended, if it cannot be reached.
            let _ = thread.kill(SIGRTMIN());
            match self.exit.recv_timeout(AGAIN) {
                Ok(exit) => break Some(exit),
                Err(RecvTimeoutError::Disconnected) => break None,
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        // It only runs a guest.
        let _ = thread.join();
        said
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

fn lost() -> MicroVmError {
    MicroVmError::Disproved("The thread of the processor ended without a word".to_owned())
}

/// The signal must not end the process.
fn prepare_signal() -> Result<(), MicroVmError> {
    extern "C" fn nothing(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {}
    static PREPARED: OnceLock<Result<(), c_int>> = OnceLock::new();
    let prepare =
        || register_signal_handler(SIGRTMIN(), nothing).map_err(|error: vmm_sys_util::errno::Error| error.errno());
    let prepared = PREPARED.get_or_init(prepare);
    prepared.map_err(std::io::Error::from_raw_os_error).map_err(MicroVmError::host("prepare a signal"))
}

fn run(vcpu: &mut VcpuFd, stop: &AtomicBool) -> Result<Exit, MicroVmError> {
    while !stop.load(Ordering::Acquire) {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(DONE, _)) => return Ok(Exit::Done),
            Ok(VcpuExit::MmioWrite(address, &[low, high])) => {
                return Ok(Exit::Store { address, value: u16::from_le_bytes([low, high]) });
            }
            Ok(other) => return Err(MicroVmError::Disproved(format!("The guest left with {other:?}"))),
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {}
            Err(error) => return Err(MicroVmError::kvm("run the guest")(error)),
        }
    }
    Ok(Exit::Stopped)
}
