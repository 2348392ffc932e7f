//! A VMM's side of the vhost-user socket, message by message, in the order QEMU 11.1 sends them.
//!
//! [`FrontEnd::connect`] and [`FrontEnd::negotiate`] are what happens when a VM is created, [`FrontEnd::start`] what happens when the guest's
//! driver is ready. A budget of messages ([`FrontEnd::with_budget`]) cuts the conversation off anywhere, for hostile tests.

use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserVirtioFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use crate::ram::GuestRam;
use crate::virtqueue::{Negotiated, Virtqueue};

/// VIRTIO_F_INDIRECT_DESC.
pub const INDIRECT_DESC: u64 = 1 << 28;
/// VIRTIO_F_EVENT_IDX.
pub const EVENT_IDX: u64 = 1 << 29;
/// VIRTIO_F_VERSION_1.
pub const VERSION_1: u64 = 1 << 32;

/// One connection.
pub struct FrontEnd {
    /// For messages that no well-behaved VMM sends; they are not counted.
    pub vhost: Frontend,
    stream: UnixStream,
    /// The front-end's end of the backend's request channel.
    requests: UnixStream,
    requests_peer: Option<UnixStream>,
    budget: usize,
    features: u64,
    queues: u16,
    spare_calls: Vec<EventFd>,
}

impl FrontEnd {
    /// Connects and says nothing yet.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).with_context(|| format!("Cannot connect to {}", socket.display()))?;
        let (requests, peer) = UnixStream::pair()?;
        Ok(Self {
            vhost: Frontend::from_stream(stream.try_clone()?, u64::from(vmm_vhost_user::MAX_QUEUES)),
            stream,
            requests,
            requests_peer: Some(peer),
            budget: usize::MAX,
            features: 0,
            queues: 0,
            spare_calls: Vec::new(),
        })
    }

    /// Fails instead of sending more than `messages` messages.
    #[must_use]
    pub fn with_budget(mut self, messages: usize) -> Self {
        self.budget = messages;
        self
    }

    /// What is left of the budget.
    pub fn budget(&self) -> usize {
        self.budget
    }

    /// Queues of the device.
    pub fn queues(&self) -> u16 {
        self.queues
    }

    /// What the features in force mean for a queue.
    pub fn rules(&self) -> Negotiated {
        Negotiated { event_idx: self.features & EVENT_IDX != 0, indirect: self.features & INDIRECT_DESC != 0 }
    }

    /// The socket, for waiting until the other side hangs up.
    pub fn socket(&self) -> &UnixStream {
        &self.stream
    }

    /// The channel on which the device says that its configuration has changed.
    pub fn request_channel(&self) -> &UnixStream {
        &self.requests
    }

    fn message(&mut self) -> Result<&mut Frontend> {
        self.budget = self.budget.checked_sub(1).context("The budget of messages is spent")?;
        Ok(&mut self.vhost)
    }

    /// Everything until the guest's driver takes over; keeps `wanted` of the features offered.
    pub fn negotiate(&mut self, wanted: u64) -> Result<()> {
        let offered = self.message()?.get_features()?;
        ensure!(offered & VERSION_1 != 0, "The device does not offer VERSION_1");
        let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        ensure!(offered & protocol != 0, "The device does not offer protocol features");
        self.features = offered & wanted | protocol;
        let offered = self.message()?.get_protocol_features()?;
        self.message()?.set_protocol_features(offered)?;
        self.vhost.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        self.queues = u16::try_from(self.message()?.get_queue_num()?)?;
        let peer = self.requests_peer.take();
        if let Some(peer) = peer {
            self.message()?.set_backend_request_fd(&peer)?;
        }
        self.message()?.set_owner()?;
        self.message()?.get_features()?;
        for queue in 0..usize::from(self.queues) {
            let call = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
            self.message()?.set_vring_call(queue, &call)?;
            self.spare_calls.push(call);
        }
        Ok(())
    }

    /// A field of configuration space.
    pub fn config(&mut self, offset: u32, len: u32) -> Result<Vec<u8>> {
        let room = vec![0; len as usize];
        let (_, bytes) = self.message()?.get_config(offset, len, VhostUserConfigFlags::WRITABLE, &room)?;
        Ok(bytes)
    }

    /// Features, memory and every queue: the guest's driver is ready.
    pub fn start(&mut self, ram: &GuestRam, queues: &[&Virtqueue]) -> Result<()> {
        let features = self.features;
        self.message()?.set_features(features)?;
        self.set_memory(ram)?;
        for (index, queue) in queues.iter().enumerate() {
            self.start_queue(ram, index, queue, 0)?;
        }
        for index in 0..queues.len() {
            self.message()?.set_vring_enable(index, true)?;
        }
        Ok(())
    }

    /// The memory table.
    pub fn set_memory(&mut self, ram: &GuestRam) -> Result<()> {
        let regions = ram.regions()?;
        self.message()?.set_mem_table(&regions)?;
        Ok(())
    }

    /// Everything about one queue but that it is enabled. `base` is where the device goes on: 0, or what [`FrontEnd::stop_queue`] said.
    pub fn start_queue(&mut self, ram: &GuestRam, index: usize, queue: &Virtqueue, base: u16) -> Result<()> {
        let [table, avail, used] = queue.addresses();
        let addresses = VringConfigData {
            queue_max_size: queue.size(),
            queue_size: queue.size(),
            flags: 0,
            desc_table_addr: ram.host_address(table)?,
            used_ring_addr: ram.host_address(used)?,
            avail_ring_addr: ram.host_address(avail)?,
            log_addr: None,
        };
        self.message()?.set_vring_num(index, queue.size())?;
        self.message()?.set_vring_base(index, base)?;
        self.message()?.set_vring_addr(index, &addresses)?;
        self.message()?.set_vring_kick(index, queue.kick_fd())?;
        self.message()?.set_vring_call(index, queue.call_fd())?;
        Ok(())
    }

    /// Enables or disables a queue.
    pub fn enable(&mut self, index: usize, on: bool) -> Result<()> {
        self.message()?.set_vring_enable(index, on)?;
        Ok(())
    }

    /// Stops a queue as for a pause of the VM; answers the index at which it goes on. Blocks until the device has let go of the ring.
    pub fn stop_queue(&mut self, index: usize) -> Result<u16> {
        self.message()?.set_vring_enable(index, false)?;
        Ok(u16::try_from(self.message()?.get_vring_base(index)?)?)
    }

    /// Stops every queue and starts it where it stopped, as for a pause of the VM.
    pub fn pause_and_resume(&mut self, ram: &GuestRam, queues: &[&Virtqueue]) -> Result<()> {
        let bases: Vec<u16> = (0..queues.len()).map(|index| self.stop_queue(index)).collect::<Result<_>>()?;
        for (index, (queue, base)) in queues.iter().zip(bases).enumerate() {
            self.start_queue(ram, index, queue, base)?;
        }
        (0..queues.len()).try_for_each(|index| self.enable(index, true))
    }

    /// RESET_DEVICE.
    pub fn reset(&mut self) -> Result<()> {
        self.message()?.reset_device()?;
        Ok(())
    }

    /// Waits until the other side has hung up. False if it has not by then.
    pub fn wait_hangup(&self, deadline: std::time::Instant) -> Result<bool> {
        crate::virtqueue::wait_readable(&self.stream, deadline)
    }

    /// Hands any descriptor over as a kick.
    pub fn kick_with(&mut self, index: usize, fd: RawFd) -> Result<()> {
        self.with_raw_eventfd(fd, |vhost, fd| vhost.set_vring_kick(index, fd))
    }

    /// Hands any descriptor over as an interrupt.
    pub fn call_with(&mut self, index: usize, fd: RawFd) -> Result<()> {
        self.with_raw_eventfd(fd, |vhost, fd| vhost.set_vring_call(index, fd))
    }

    fn with_raw_eventfd(
        &mut self,
        fd: RawFd,
        send: impl FnOnce(&mut Frontend, &EventFd) -> vhost::Result<()>,
    ) -> Result<()> {
        use std::os::fd::FromRawFd;
        // SAFETY: a duplicate of a descriptor that the caller keeps open.
        let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            bail!("Cannot duplicate descriptor {fd}: {}", std::io::Error::last_os_error());
        }
        // SAFETY: the duplicate is ours alone; the type only closes it and tells its number.
        let event = unsafe { EventFd::from_raw_fd(copy) };
        send(self.message()?, &event)?;
        Ok(())
    }
}

impl AsRawFd for FrontEnd {
    fn as_raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

impl std::fmt::Debug for FrontEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FrontEnd").field("stream", &self.stream).field("queues", &self.queues).finish_non_exhaustive()
    }
}

/// A front-end with the memory and the queues of a guest, none of them running yet.
pub fn make_queues(front: &FrontEnd, ram: &Arc<GuestRam>, size: u16) -> Result<Vec<Virtqueue>> {
    (0..front.queues()).map(|_| Virtqueue::new(ram, size, front.rules())).collect()
}
