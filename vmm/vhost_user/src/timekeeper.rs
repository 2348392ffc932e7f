//! The thread that looks after time: it collects what engines have finished, issues what waited for it, and expires deadlines.

use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle, park, park_timeout};
use std::{io, thread};

use vdev_device::Device;

use crate::backend::panic_text;
use crate::serve::{Hangup, Options, ThreadClass, enter};

pub(crate) struct Timekeeper {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Timekeeper {
    /// Starts the thread and tells the device how to wake it.
    pub(crate) fn start(device: &Arc<Device>, options: &Options, hangup: Arc<Hangup>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let thread = Builder::new().name("timekeeper".into()).spawn({
            let (device, stop, hook) = (Arc::clone(device), Arc::clone(&stop), Arc::clone(&options.thread_hook));
            move || {
                enter(&hook, ThreadClass::Timekeeper);
                // Engines say to the microsecond when it is worth looking; the kernel otherwise adds fifty.
                if let Err(error) = rustix::thread::set_current_timer_slack(NonZeroU64::new(1)) {
                    tracing::debug!(%error, "Transfers may end some 50 us late");
                }
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| keep_time(&device, &stop))) {
                    tracing::error!(panic = panic_text(&*panic), "The device failed while it collected finished work");
                    hangup.hang_up("The timekeeper ended");
                }
            }
        })?;
        let sleeper: thread::Thread = thread.thread().clone();
        device.on_progress(Arc::new(move || sleeper.unpark()));
        Ok(Self { stop, thread })
    }

    /// Ends the thread.
    pub(crate) fn stop(self) {
        self.stop.store(true, Ordering::Release);
        self.thread.thread().unpark();
        // It caught its own panics.
        let _ = self.thread.join();
    }
}

fn keep_time(device: &Device, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        match device.poll() {
            Some(rest) => park_timeout(rest),
            None => park(),
        }
    }
}
