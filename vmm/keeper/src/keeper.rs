//! The sockets of a keeper: who is there, who is read when.
//!
//! Not here: what goes through them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::{io, mem};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use crate::frame::{CONFIG_CHANGE_MSG, Direction, Frame, FrameError};
use crate::kick;
use crate::session::{MAX_FAILURES, Session};
use crate::stream::{Inbox, Outbox, Read};

/// Something that whoever runs a keeper should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A VMM has connected; nothing of it has been forwarded yet.
    Connected,
    /// It has gone, and the worker's stream is closed.
    Disconnected,
    /// The worker of that session knows what its predecessor knew, and has answered what that one still owed.
    Replayed {
        /// As [`Keeper::add_worker`] was told.
        session: u32,
    },
    /// [`MAX_FAILURES`] workers in a row failed to take over, and the VMM's connection is closed. `Disconnected` follows.
    GaveUp {
        /// One line, for the operator.
        reason: String,
    },
}

/// What a turn was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The descriptor that the caller watches too can be read.
    pub told: bool,
    /// There was something to do, for the caller or here.
    pub busy: bool,
}

#[derive(Debug)]
struct Worker {
    stream: OwnedFd,
    inbox: Inbox,
    number: u32,
}

#[derive(Debug)]
struct Vmm {
    stream: OwnedFd,
    inbox: Inbox,
    session: Session,
}

/// One tenant's connections. Nothing here blocks but [`Keeper::turn`], and that as long as it is told to.
#[derive(Debug)]
pub struct Keeper {
    listener: OwnedFd,
    worker: Option<Worker>,
    vmm: Option<Vmm>,
    events: Vec<Event>,
}

/// What was found ready.
#[derive(Clone, Copy, Debug)]
struct Ready {
    told: bool,
    busy: bool,
    caller: bool,
    vmm: PollFlags,
    worker: PollFlags,
}

/// How long to wait with descriptors that the kernel does not carry now.
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

const GONE: PollFlags = PollFlags::HUP.union(PollFlags::ERR).union(PollFlags::NVAL);

impl Keeper {
    /// Takes the socket that VMMs connect to, and puts it into non-blocking mode.
    pub fn new(listener: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&listener, true)?;
        Ok(Self { listener, worker: None, vmm: None, events: Vec::new() })
    }

    /// Takes a stream that is connected to a worker, in place of the one there may be.
    ///
    /// A `fresh` worker knows of no VMM and may serve a new one. One that is not takes over a VMM; if that has gone meanwhile, the stream is
    /// closed.
    pub fn add_worker(&mut self, stream: OwnedFd, session: u32, fresh: bool) {
        self.drop_worker("another took its place");
        match &mut self.vmm {
            Some(vmm) => vmm.session.attach(),
            None if fresh => {}
            None => {
                tracing::debug!(session, "The worker has nobody to take over");
                return;
            }
        }
        self.worker = Some(Worker { stream, inbox: Inbox::new(Direction::Answer), number: session });
        self.write_worker();
    }

    /// What has happened since the last call, oldest first.
    pub fn events(&mut self) -> Vec<Event> {
        mem::take(&mut self.events)
    }

    /// Waits, for `timeout` or for ever, until there is something to do or `caller` can be read; does what there is. To be followed by
    /// [`Keeper::events`]: nothing of a VMM is forwarded in the turn in which it connects, and there is no turn while an event is not told.
    ///
    /// # Errors
    /// The keeper cannot go on.
    pub fn turn(&mut self, caller: Option<BorrowedFd<'_>>, timeout: Option<&Timespec>) -> io::Result<Turn> {
        if !self.events.is_empty() {
            return Ok(Turn { told: false, busy: true });
        }
        let ready = self.wait(caller, timeout)?;
        if ready.vmm.intersects(GONE) {
            self.drop_vmm("it has gone");
        }
        if !ready.worker.is_empty() {
            self.read_worker();
        }
        if ready.vmm.contains(PollFlags::IN) {
            self.read_vmm();
        }
        self.write_worker();
        self.write_vmm();
        if ready.caller {
            self.accept()?;
        }
        Ok(Turn { told: ready.told, busy: ready.busy })
    }

    fn wait(&self, caller: Option<BorrowedFd<'_>>, timeout: Option<&Timespec>) -> io::Result<Ready> {
        let flag = |wanted, flag| if wanted { flag } else { PollFlags::empty() };
        let mut fds = Vec::with_capacity(4);
        let mut add = |fd, flags| {
            fds.push(PollFd::from_borrowed_fd(fd, flags));
            fds.len().saturating_sub(1)
        };
        let told = caller.map(|caller| add(caller, PollFlags::IN));
        let listener = (self.worker.is_some() && self.vmm.is_none()).then(|| add(self.listener.as_fd(), PollFlags::IN));
        let session = self.vmm.as_ref().map(|vmm| &vmm.session);
        let worker = self.worker.as_ref().map(|worker| {
            let unsent = session.is_some_and(|session| session.to_worker.wants_room());
            add(worker.stream.as_fd(), PollFlags::IN | flag(unsent, PollFlags::OUT))
        });
        // Also with no wish at all, the kernel says when the VMM has gone.
        let vmm = self.vmm.as_ref().map(|vmm| {
            let wishes = flag(vmm.session.wants_request(), PollFlags::IN);
            add(vmm.stream.as_fd(), wishes | flag(vmm.session.to_vmm.wants_room(), PollFlags::OUT))
        });
        let stalled = session.is_some_and(|session| session.to_worker.is_stalled());
        let timeout =
            if stalled { Some(timeout.map_or(RETRY, |timeout| RETRY.min(*timeout))) } else { timeout.copied() };
        let busy = match poll(&mut fds, timeout.as_ref()) {
            Err(Errno::INTR) => false,
            result => result? > 0,
        };
        let found = |at: Option<usize>| {
            at.filter(|_| busy).and_then(|at| fds.get(at)).map_or(PollFlags::empty(), PollFd::revents)
        };
        Ok(Ready {
            told: !found(told).is_empty(),
            busy,
            caller: !found(listener).is_empty(),
            vmm: found(vmm),
            worker: found(worker),
        })
    }

    fn accept(&mut self) -> io::Result<()> {
        if self.worker.is_none() || self.vmm.is_some() {
            return Ok(());
        }
        match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(stream) => {
                self.vmm = Some(Vmm { stream, inbox: Inbox::new(Direction::Request), session: Session::new() });
                self.events.push(Event::Connected);
                Ok(())
            }
            // It has gone before it was accepted.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn read_vmm(&mut self) {
        let (Some(vmm), Some(_)) = (&mut self.vmm, &self.worker) else { return };
        while vmm.session.wants_request() {
            let taken = match vmm.inbox.read(vmm.stream.as_fd()) {
                Ok(Read::Frame(frame)) => vmm.session.request(frame),
                Ok(Read::Nothing) => return,
                Ok(Read::End) => return self.drop_vmm("it has gone"),
                Err(error) => Err(error),
            };
            if let Err(error) = taken {
                tracing::warn!("The VMM broke the protocol: {}", text(&error));
                return self.drop_vmm("it broke the protocol");
            }
        }
    }

    fn read_worker(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        let ended = loop {
            let taken = match (worker.inbox.read(worker.stream.as_fd()), &mut self.vmm) {
                (Ok(Read::Frame(frame)), Some(vmm)) => vmm.session.answer(frame),
                (Ok(Read::Frame(frame)), None) => Err(FrameError::Unexpected { request: frame.code() }),
                (Ok(Read::Nothing), _) => return,
                (Ok(Read::End), _) => break "it has ended".to_owned(),
                (Err(error), _) => Err(error),
            };
            match (taken, &self.vmm) {
                (Ok(true), Some(vmm)) => {
                    self.events.push(Event::Replayed { session: worker.number });
                    vmm.wake();
                }
                (Ok(_), _) => {}
                (Err(error), _) => {
                    let reason = text(&error);
                    tracing::warn!(session = worker.number, "The worker broke the protocol: {reason}");
                    break reason;
                }
            }
        };
        self.drop_worker(&ended);
    }

    fn write_worker(&mut self) {
        let (Some(vmm), Some(worker)) = (&mut self.vmm, &self.worker) else { return };
        if vmm.session.to_worker.write(worker.stream.as_fd()).is_err() {
            // It may have answered before it closed.
            self.read_worker();
            self.drop_worker("it has ended");
        }
    }

    fn write_vmm(&mut self) {
        if let Some(vmm) = &mut self.vmm
            && vmm.session.to_vmm.write(vmm.stream.as_fd()).is_err()
        {
            self.drop_vmm("it has gone");
        }
    }

    fn drop_worker(&mut self, reason: &str) {
        let Some(worker) = self.worker.take() else { return };
        tracing::debug!(session = worker.number, reason, "The worker's stream is closed");
        if let Some(vmm) = &mut self.vmm
            && vmm.session.detach()
        {
            let reason =
                format!("{MAX_FAILURES} workers in a row could not take over from the one before; the last: {reason}");
            self.events.push(Event::GaveUp { reason });
            self.drop_vmm("no worker can take over");
        }
    }

    fn drop_vmm(&mut self, reason: &str) {
        if self.vmm.take().is_some() {
            tracing::debug!(reason, "The VMM's connection is closed");
            self.drop_worker("its VMM has gone");
            self.events.push(Event::Disconnected);
        }
    }
}

impl Vmm {
    /// Has the new worker look at every queue that was started, and the VMM at the configuration space.
    fn wake(&self) {
        self.session.kicks().for_each(|fd| kick::wake(fd.as_fd()));
        if let Some(way_back) = self.session.way_back() {
            let mut message = Outbox::default();
            message.push(Frame::request(CONFIG_CHANGE_MSG, Rc::new([])));
            // A VMM that does not read has no use for one more.
            let _ = message.write(way_back.as_fd());
        }
    }
}

/// An error and its causes on one line.
fn text(error: &FrameError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
