//! A drain: the device takes no more work, and the supervisor is told when nothing is left of what it took.
//!
//! Not here: what a pause of the device is.

use rustix::time::Timespec;
use vdev_device::Device;
use vmm_broker::{Channel, ChannelError, ToSupervisor};

/// How often a device is looked at while work of it goes on: its end wakes nobody else, and deadlines bound how long that is.
const GLANCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// Whom to tell.
#[derive(Debug, Default)]
pub(crate) struct Drain {
    /// Which question is still to be answered.
    asked: Option<u32>,
}

impl Drain {
    pub(crate) fn begin(&mut self, device: &Device, turn: u32) {
        device.pause();
        self.asked = Some(turn);
    }

    pub(crate) fn end(&mut self, device: &Device) {
        self.asked = None;
        device.unpause();
    }

    /// Answers once there is something to say.
    pub(crate) fn look(&mut self, device: &Device, channel: &Channel) -> Result<(), ChannelError> {
        if let Some(turn) = self.asked
            && device.is_quiet()
        {
            self.asked = None;
            // Whoever hears that nothing is in flight must not read other numbers afterwards.
            device.await_turns();
            channel.send(&ToSupervisor::Drained { turn }, &[])?;
        }
        Ok(())
    }

    /// How long to wait before the next look.
    pub(crate) fn glance(&self) -> Option<&'static Timespec> {
        self.asked.map(|_| &GLANCE)
    }
}
