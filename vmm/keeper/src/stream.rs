//! Whole frames through stream sockets that never block.
//!
//! A frame is read exactly, header first: what a single call returns then belongs to one frame, and so do the descriptors that come with it.
//! They may come with the header only, as the protocol has it. Frames leave in one call each if the socket has room.
//!
//! Not here: what a frame means, when to read.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::frame::{Direction, Frame, FrameError, HEADER, Header, MAX_FDS};

/// What a socket had.
#[derive(Debug)]
pub(crate) enum Read {
    Frame(Frame),
    /// Nothing, or a part of a frame, which is kept.
    Nothing,
    /// Whoever sends has gone. A part of a frame is dropped.
    End,
}

/// The frame that is being received.
#[derive(Debug)]
pub(crate) struct Inbox {
    direction: Direction,
    header: [u8; HEADER],
    /// Once the header is complete.
    parsed: Option<Header>,
    payload: Vec<u8>,
    have: usize,
    fds: Vec<OwnedFd>,
}

impl Inbox {
    pub(crate) fn new(direction: Direction) -> Self {
        Self { direction, header: [0; HEADER], parsed: None, payload: Vec::new(), have: 0, fds: Vec::new() }
    }

    /// Reads until a frame is complete or there is nothing more.
    pub(crate) fn read(&mut self, socket: BorrowedFd<'_>) -> Result<Read, FrameError> {
        loop {
            // A worker holds nothing that it should hand to a VMM: the kernel drops what it sends.
            let may_have_fds = self.parsed.is_none() && self.direction == Direction::Request;
            let into = if self.parsed.is_none() { &mut self.header[..] } else { &mut self.payload[..] };
            let wanted = into.len();
            if self.have < wanted {
                match receive(socket, &mut into[self.have..], may_have_fds.then_some(&mut self.fds)) {
                    Ok(0) => return Ok(Read::End),
                    Ok(count) => self.have = self.have.saturating_add(count),
                    Err(FrameError::Socket(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                        return Ok(Read::Nothing);
                    }
                    // It closed before it had read everything.
                    Err(FrameError::Socket(error)) if error.kind() == io::ErrorKind::ConnectionReset => {
                        return Ok(Read::End);
                    }
                    Err(error) => return Err(error),
                }
            }
            if self.have < wanted {
                continue;
            }
            self.have = 0;
            match self.parsed.take() {
                None => {
                    let header = Header::parse(self.header, self.direction)?;
                    self.payload = vec![0; header.size];
                    self.parsed = Some(header);
                }
                Some(header) => {
                    let (payload, fds) = (std::mem::take(&mut self.payload), std::mem::take(&mut self.fds));
                    return Ok(Read::Frame(Frame::new(header, payload, fds)));
                }
            }
        }
    }
}

/// Receives bytes, and descriptors if there may be some.
fn receive(socket: BorrowedFd<'_>, into: &mut [u8], fds: Option<&mut Vec<OwnedFd>>) -> Result<usize, FrameError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(if fds.is_some() { &mut space[..] } else { &mut [] });
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, flags) {
            Err(Errno::INTR) => {}
            result => break result.map_err(io::Error::from)?,
        }
    };
    let came = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    let Some(fds) = fds else {
        return if received.flags.contains(ReturnFlags::CTRUNC) {
            Err(FrameError::UnwantedFds)
        } else {
            Ok(received.bytes)
        };
    };
    fds.extend(came.flatten());
    if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
        return Err(FrameError::TooManyFds);
    }
    Ok(received.bytes)
}

/// Frames that wait for room in a socket.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    queue: VecDeque<Frame>,
    /// Of the first one.
    sent: usize,
    bytes: usize,
    fds: usize,
    stalled: bool,
}

impl Outbox {
    pub(crate) fn push(&mut self, frame: Frame) {
        self.bytes = self.bytes.saturating_add(frame.len());
        self.fds = self.fds.saturating_add(frame.fds().len());
        self.queue.push_back(frame);
    }

    pub(crate) fn frames(&self) -> usize {
        self.queue.len()
    }

    /// Of whole frames: one that was sent in part counts in full.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn fds(&self) -> usize {
        self.fds
    }

    /// Whether it makes sense to wait until the socket has room.
    pub(crate) fn wants_room(&self) -> bool {
        !self.queue.is_empty() && !self.stalled
    }

    /// Whether the kernel carries as many descriptors of this user's processes as it will, so that it makes sense to try again after a while.
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Takes everything out.
    #[cfg(test)]
    pub(crate) fn clear(&mut self) -> Vec<Frame> {
        std::mem::take(self).queue.into()
    }

    /// Sends as much as there is room for.
    pub(crate) fn write(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.stalled = false;
        while let Some(frame) = self.queue.front() {
            match send(socket, frame, self.sent) {
                Ok(count) => self.sent = self.sent.saturating_add(count),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::TOOMANYREFS) => {
                    self.stalled = true;
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
            if self.sent >= frame.len() {
                self.bytes = self.bytes.saturating_sub(frame.len());
                self.fds = self.fds.saturating_sub(frame.fds().len());
                self.sent = 0;
                self.queue.pop_front();
            }
        }
        Ok(())
    }
}

/// Sends a frame from byte `from` on. Descriptors go with the first byte.
fn send(socket: BorrowedFd<'_>, frame: &Frame, from: usize) -> rustix::io::Result<usize> {
    let header = frame.header().bytes();
    let head = header.get(from..).unwrap_or_default();
    let body = frame.payload().get(from.saturating_sub(HEADER)..).unwrap_or_default();
    let fds: Vec<_> = frame.fds().iter().filter(|_| from == 0).map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        // No frame has more than there is space for.
        return Err(Errno::INVAL);
    }
    sendmsg(socket, &[IoSlice::new(head), IoSlice::new(body)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}
