//! What the channels of a guest share: the connection, the queues, the session, and the interrupt thread.

use std::collections::HashMap;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, ensure};
use peergate_guest::uapi::Work;
use peergate_guest::{Channel, Driver, Error, Status};
use rustix::event::{PollFd, PollFlags, poll};
use vdev_wire::{
    CONFIG_MAGIC, CONFIG_SIZE, Config, EndpointInfo, FIRST_SUBMIT_QUEUE, Hello, HelloReply, Opcode, ProbeReply, VERSION,
};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::channel::{DomainChannel, Inbox, system};
use super::control::{Control, Reply, exchange, request};
use super::events::{EventQueue, guest_event};
use super::options::DriverOptions;
use super::submit::SubmitQueue;
use crate::frontend::{FrontEnd, make_queues};
use crate::ram::{GuestRam, PAGE, Pages};
use crate::virtqueue::Virtqueue;

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG.
const CONFIG_CHANGE: [u8; 4] = [2, 0, 0, 0];
/// Endpoints that an answer to PROBE has room for.
const MAX_ENDPOINTS: usize = 64;

/// The guest's driver. Dropping it (with every channel) hangs up.
#[derive(Debug)]
pub struct InProcessDriver {
    core: Arc<Core>,
}

impl InProcessDriver {
    /// Connects to a device and says HELLO.
    pub fn connect(socket: &Path, options: DriverOptions) -> Result<Self> {
        Self::connect_on(socket, GuestRam::new(options.ram)?, options)
    }

    /// The same on memory of the caller's, which other devices may have too.
    pub fn connect_on(socket: &Path, ram: Arc<GuestRam>, options: DriverOptions) -> Result<Self> {
        let mut front = FrontEnd::connect(socket)?;
        front.negotiate(options.features)?;
        let bytes = front.config(0, u32::try_from(CONFIG_SIZE)?)?;
        let config = Config::read_from_bytes(&bytes).ok().context("Configuration space is too short")?;
        ensure!(config.magic == CONFIG_MAGIC, "The device is not ours: it starts with {:x?}", config.magic);
        let mut queues = make_queues(&front, &ram, options.queue_size)?;
        let events = EventQueue::new(&ram, queues.remove(1))?;
        {
            let mut all: Vec<&Virtqueue> = queues.iter().collect();
            all.insert(1, &events.queue);
            front.start(&ram, &all)?;
        }
        let mut control = queues.remove(0);
        let session = hello(|body, room| exchange(&ram, &mut control, body, room))?;
        let (limits, endpoints) = probe(|body, room| exchange(&ram, &mut control, body, room), session)?;
        let batch = usize::from(limits.max_batch.get());
        let submit = queues
            .into_iter()
            .map(|queue| SubmitQueue::new(&ram, queue, batch, options.polling))
            .collect::<Result<_>>()?;
        let core = Core {
            control: Control::new(&ram, control),
            ram,
            options,
            front: Mutex::new(front),
            submit,
            events: Mutex::new(events),
            session: AtomicU32::new(session),
            following: AtomicBool::new(false),
            begin: Mutex::default(),
            forged: AtomicU32::new(0),
            limits,
            endpoints,
            inboxes: Mutex::default(),
            next_domain: AtomicU32::new(1),
            gone: AtomicBool::new(false),
            stop: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            interrupts: Mutex::new(None),
        };
        let core = Arc::new(core);
        core.start_interrupts()?;
        Ok(Self { core })
    }

    /// The guest's memory.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.core.ram
    }

    /// The connection, for what a VMM does while the guest runs: pauses, new memory tables.
    pub fn front_end(&self) -> MutexGuard<'_, FrontEnd> {
        lock(&self.core.front)
    }

    /// Stops every queue and starts it again, as a VMM does around a pause. The guest's own threads wait meanwhile.
    pub fn pause_and_resume(&self) -> Result<()> {
        let core = &*self.core;
        let control = core.control.hold();
        let events = lock(&core.events);
        let submit: Vec<_> = core.submit.iter().map(SubmitQueue::hold).collect();
        let mut queues: Vec<&Virtqueue> = vec![&*control, &events.queue];
        queues.extend(submit.iter().map(|queue| &**queue));
        lock(&core.front).pause_and_resume(&core.ram, &queues)
    }

    /// The session that the last HELLO began.
    pub fn session(&self) -> u32 {
        self.core.session()
    }

    /// Acts in this domain in place of each channel's own from now on, as only a kernel could; `None` takes that back.
    pub fn act_as(&self, domain: Option<u32>) {
        self.core.forged.store(domain.unwrap_or(0), Ordering::Relaxed);
    }

    /// Submission queues.
    pub fn submit_queues(&self) -> usize {
        self.core.submit.len()
    }

    /// Any control request, as only a kernel could make it.
    pub fn control(
        &self,
        opcode: Opcode,
        domain: u32,
        body: &(impl IntoBytes + Immutable + ?Sized),
        room: usize,
    ) -> Result<Reply> {
        self.core.control.call(&request(opcode, domain, self.core.session(), body), room)
    }
}

impl Driver for InProcessDriver {
    fn open(&self) -> Result<Box<dyn Channel>, Error> {
        let opened = match DomainChannel::open(&self.core) {
            // The device began a new session and could not tell yet, or waits for HELLO.
            Err(Error::Refused { status: Status::Stale | Status::Inval, .. }) => {
                self.core.follow().map_err(|error| system("HELLO", &error))?;
                DomainChannel::open(&self.core)
            }
            opened => opened,
        };
        Ok(Box::new(opened?))
    }
}

impl Drop for InProcessDriver {
    fn drop(&mut self) {
        // Channels keep the core; they find the device gone once this has hung up.
        self.core.end();
    }
}

fn hello(send: impl FnOnce(&[u8], usize) -> Result<Reply>) -> Result<u32> {
    let body = Hello { version: VERSION.into(), reserved0: 0.into(), reserved: 0.into(), features: 0.into() };
    let reply = send(&request(Opcode::Hello, 0, 0, &body), size_of::<HelloReply>())?;
    ensure!(reply.status == Status::Ok, "HELLO was refused: {}", reply.status.name());
    Ok(reply.parse::<HelloReply>()?.session.get())
}

fn probe(send: impl FnOnce(&[u8], usize) -> Result<Reply>, session: u32) -> Result<(ProbeReply, Vec<EndpointInfo>)> {
    let room = size_of::<ProbeReply>() + MAX_ENDPOINTS * size_of::<EndpointInfo>();
    let reply = send(&request(Opcode::Probe, 0, session, &[0u8; 0]), room)?;
    ensure!(reply.status == Status::Ok, "PROBE was refused: {}", reply.status.name());
    let limits: ProbeReply = reply.parse()?;
    let rest = &reply.body[size_of::<ProbeReply>()..];
    let endpoints: Vec<_> = rest
        .chunks_exact(size_of::<EndpointInfo>())
        .filter_map(|bytes| EndpointInfo::read_from_bytes(bytes).ok())
        .collect();
    ensure!(endpoints.len() == usize::from(limits.endpoint_count.get()), "PROBE lists {} endpoints", endpoints.len());
    Ok((limits, endpoints))
}

#[derive(Debug)]
pub(super) struct Core {
    ram: Arc<GuestRam>,
    options: DriverOptions,
    front: Mutex<FrontEnd>,
    control: Control,
    submit: Vec<SubmitQueue>,
    events: Mutex<EventQueue>,
    session: AtomicU32,
    /// Whether somebody is about to look for a new session.
    following: AtomicBool,
    /// One HELLO at a time.
    begin: Mutex<()>,
    /// Domain to act in whoever acts, if not 0.
    forged: AtomicU32,
    limits: ProbeReply,
    endpoints: Vec<EndpointInfo>,
    inboxes: Mutex<HashMap<u32, Weak<Inbox>>>,
    next_domain: AtomicU32,
    gone: AtomicBool,
    stop: EventFd,
    interrupts: Mutex<Option<JoinHandle<()>>>,
}

impl Core {
    pub(super) fn session(&self) -> u32 {
        self.session.load(Ordering::Acquire)
    }

    /// Begins a new session if the device has lost its state since the last HELLO.
    pub(super) fn follow(&self) -> Result<()> {
        let _one = lock(&self.begin);
        self.following.store(false, Ordering::Release);
        let bytes = lock(&self.front).config(0, u32::try_from(CONFIG_SIZE)?)?;
        let config = Config::read_from_bytes(&bytes).ok().context("Configuration space is too short")?;
        if config.session.get() != self.session() {
            let session = hello(|body, room| self.control.call(body, room))?;
            self.session.store(session, Ordering::Release);
        }
        Ok(())
    }

    /// Has [`Core::follow`] done by a thread: who waits for answers must not be the one that takes interrupts.
    fn suspect(self: &Arc<Self>) -> Result<()> {
        if self.following.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let core = Arc::clone(self);
        thread::Builder::new().name("guest-session".into()).spawn(move || {
            if let (Err(error), Ok(())) = (core.follow(), core.check()) {
                eprintln!("The guest could not begin a new session: {error:#}");
            }
        })?;
        Ok(())
    }

    fn domain(&self, own: u32) -> u32 {
        match self.forged.load(Ordering::Relaxed) {
            0 => own,
            forged => forged,
        }
    }

    pub(super) fn limits(&self) -> &ProbeReply {
        &self.limits
    }

    pub(super) fn endpoints(&self) -> &[EndpointInfo] {
        &self.endpoints
    }

    pub(super) fn submit_queues(&self) -> usize {
        self.submit.len()
    }

    pub(super) fn polling(&self) -> bool {
        self.options.polling
    }

    pub(super) fn alloc(&self, len: u64) -> Result<Pages> {
        // A MAP has room for so many segments.
        let shortest = (len / u64::from(self.limits.max_segments.get().max(1))).next_multiple_of(PAGE) + PAGE;
        self.ram.alloc_scattered(len, self.options.longest_run.max(shortest))
    }

    /// Gives a new domain its number and the events of that number to `inbox`.
    pub(super) fn enter(&self, inbox: &Arc<Inbox>) -> u32 {
        let mut inboxes = lock(&self.inboxes);
        loop {
            let domain = self.next_domain.fetch_add(1, Ordering::Relaxed);
            if domain != 0 && !inboxes.contains_key(&domain) {
                inboxes.insert(domain, Arc::downgrade(inbox));
                return domain;
            }
        }
    }

    pub(super) fn leave(&self, domain: u32) {
        lock(&self.inboxes).remove(&domain);
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        if self.gone.load(Ordering::Acquire) { Err(Error::Gone) } else { Ok(()) }
    }

    /// One control request; a refusal is an error.
    pub(super) fn request(
        &self,
        call: &'static str,
        opcode: Opcode,
        (domain, session): (u32, u32),
        body: &(impl IntoBytes + Immutable + ?Sized),
        room: usize,
    ) -> Result<Reply, Error> {
        self.check()?;
        let outcome = self.control.call(&request(opcode, self.domain(domain), session, body), room);
        let reply = outcome.map_err(|error| self.check().err().unwrap_or_else(|| system(call, &error)))?;
        if reply.status == Status::Ok { Ok(reply) } else { Err(Error::Refused { call, status: reply.status }) }
    }

    /// Limits and endpoints as they are now.
    pub(super) fn probe(&self) -> Result<(ProbeReply, Vec<EndpointInfo>), Error> {
        self.check()?;
        probe(|body, room| self.control.call(body, room), self.session()).map_err(|error| system("PROBE", &error))
    }

    pub(super) fn submit(
        &self,
        queue: u32,
        inbox: &Arc<Inbox>,
        (domain, session): (u32, u32),
        work: &[Work],
    ) -> Result<usize, Error> {
        let refused = Error::Refused { call: "SUBMIT", status: Status::Inval };
        let queue = self.submit.get(queue as usize).ok_or(refused)?;
        queue.send(inbox, self.domain(domain), session, work).map_err(|error| system("SUBMIT", &error))
    }

    /// Looks for completions on the submission queues whose bits are set in `which`.
    pub(super) fn reap(&self, which: u64) -> Result<(), Error> {
        let mut queues = (0..).zip(&self.submit).filter(|(queue, _)| which & bit(*queue) != 0);
        queues.try_for_each(|(_, queue)| queue.reap()).map_err(|error| system("completions", &error))
    }

    fn start_interrupts(self: &Arc<Self>) -> Result<()> {
        let mut calls = vec![self.control.call_fd()?, lock(&self.events).queue.call_fd().try_clone()?];
        for queue in &self.submit {
            calls.push(queue.call_fd()?);
        }
        let front = lock(&self.front);
        let (socket, requests) = (front.socket().try_clone()?, front.request_channel().try_clone()?);
        drop(front);
        let stop = self.stop.try_clone()?;
        let core = Arc::downgrade(self);
        let thread = thread::Builder::new().name("guest-interrupts".into()).spawn(move || {
            if let Err(error) = take_interrupts(&core, &calls, (&socket, &requests), &stop) {
                eprintln!("The guest's interrupt thread ended: {error:#}");
            }
            if let Some(core) = core.upgrade() {
                core.device_gone();
            }
        })?;
        *lock(&self.interrupts) = Some(thread);
        // Chains that came before somebody listened.
        self.interrupt(0)?;
        self.interrupt(1)
    }

    fn interrupt(&self, index: usize) -> Result<()> {
        match index {
            0 => self.control.interrupt(),
            1 => self.take_events(),
            _ => self.submit[index - usize::from(FIRST_SUBMIT_QUEUE)].reap(),
        }
    }

    fn take_events(&self) -> Result<()> {
        let mut queue = lock(&self.events);
        let inboxes = lock(&self.inboxes);
        queue.take(|event| match inboxes.get(&event.domain.get()).and_then(Weak::upgrade) {
            Some(inbox) => inbox.event(guest_event(event)),
            // Of no domain in particular: of all.
            None if event.domain.get() == 0 => {
                inboxes.values().filter_map(Weak::upgrade).for_each(|inbox| inbox.event(guest_event(event)));
            }
            None => {}
        })
    }

    fn device_gone(&self) {
        self.gone.store(true, Ordering::Release);
        self.control.gone();
        lock(&self.inboxes).values().filter_map(Weak::upgrade).for_each(|inbox| inbox.gone());
    }

    fn end(&self) {
        // A counter that is full stops just as well.
        let _ = self.stop.write(1);
        if let Some(thread) = lock(&self.interrupts).take() {
            // It reports its own errors.
            let _ = thread.join();
        }
        // The device may be gone already.
        let _ = lock(&self.front).socket().shutdown(std::net::Shutdown::Both);
        self.device_gone();
    }
}

/// Runs until told to stop or until the other side hangs up.
fn take_interrupts(
    core: &Weak<Core>,
    calls: &[EventFd],
    (socket, mut requests): (&UnixStream, &UnixStream),
    stop: &EventFd,
) -> Result<()> {
    loop {
        let mut fds = vec![PollFd::from_borrowed_fd(borrow(stop), PollFlags::IN)];
        // Nothing is ever readable here: replies are read by whoever asked. Only the end is of interest.
        fds.push(PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::RDHUP));
        fds.push(PollFd::from_borrowed_fd(requests.as_fd(), PollFlags::IN));
        fds.extend(calls.iter().map(|call| PollFd::from_borrowed_fd(borrow(call), PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let Some(core) = core.upgrade() else { return Ok(()) };
        if ready[0] || ready[1] {
            return Ok(());
        }
        if ready[2] {
            let mut header = [0; 12];
            requests.read_exact(&mut header).context("Cannot read what the device asks for")?;
            // Of all that a device may ask for, this one says only that its configuration has changed.
            ensure!(header[..4] == CONFIG_CHANGE, "The device asks for something else: {header:x?}");
            core.suspect()?;
        }
        for (index, call) in calls.iter().enumerate() {
            if ready[index + 3] {
                // Empty is fine: somebody looked already.
                let _ = call.read();
                core.interrupt(index)?;
            }
        }
    }
}

fn borrow(fd: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the eventfd lives as long as the borrow.
    unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The bit of a submission queue in a set of them. Queues that share one are looked at together.
pub(super) fn bit(queue: u32) -> u64 {
    1 << (queue % 64)
}
