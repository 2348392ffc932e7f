//! One message, one packet: a serialised value and its file descriptors over a `SOCK_SEQPACKET` socket pair.
//!
//! The payload is JSON of at most [`MAX_PAYLOAD`] bytes; descriptors go by `SCM_RIGHTS`, at most [`MAX_FDS`], exactly as many as the message
//! says it has. A packet that is longer, was cut, does not parse or has another number of descriptors is an error that names what is wrong,
//! and its descriptors are closed. Received descriptors are close-on-exec.
//!
//! Not here: what the messages mean.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair, sockopt,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Most bytes of one message.
pub const MAX_PAYLOAD: usize = 64 << 10;
/// Most descriptors of one message.
pub const MAX_FDS: usize = 72;

/// A value that travels together with descriptors.
pub trait Message: Serialize + DeserializeOwned {
    /// Whether such a message can have descriptors. If not, the kernel drops those that come with it: they never become the receiver's, whom
    /// closing a hostile one (a file of a file system in user space) would hold up.
    const HAS_FDS: bool;

    /// How many descriptors belong to it.
    fn fds(&self) -> usize;
}

/// A message that did not go or come.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The socket failed; `WouldBlock` if there is nothing to receive right now.
    #[error("The channel failed")]
    Socket {
        /// Why.
        #[from]
        source: io::Error,
    },
    /// The descriptor is not one end of a channel.
    #[error("The descriptor is not a packet socket")]
    NotAChannel,
    /// The message is longer than [`MAX_PAYLOAD`].
    #[error("The message is longer than {max} bytes", max = MAX_PAYLOAD)]
    TooLong,
    /// The message has more descriptors than [`MAX_FDS`], or some were lost on the way.
    #[error("The message has more than {max} descriptors, or the process has none left", max = MAX_FDS)]
    TooManyFds,
    /// The message has descriptors, but its kind has none.
    #[error("The message has descriptors, and must not")]
    UnwantedFds,
    /// The payload is not a message.
    #[error("The message is malformed")]
    Malformed {
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// The descriptors do not belong to the message.
    #[error("The message has {actual} descriptors in place of {wanted}")]
    Fds {
        /// As the message says.
        wanted: usize,
        /// As came.
        actual: usize,
    },
}

impl ChannelError {
    /// Whether there is just nothing to do right now.
    pub fn would_block(&self) -> bool {
        matches!(self, Self::Socket { source } if source.kind() == io::ErrorKind::WouldBlock)
    }
}

/// One end of a channel.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl Channel {
    /// Makes both ends, close-on-exec and blocking.
    pub fn pair() -> Result<(Self, Self), ChannelError> {
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(io::Error::from)?;
        Ok((Self { socket: one }, Self { socket: other }))
    }

    /// Adopts an end that another process made.
    pub fn from_fd(socket: OwnedFd) -> Result<Self, ChannelError> {
        match sockopt::socket_type(&socket) {
            Ok(SocketType::SEQPACKET) => Ok(Self { socket }),
            Ok(_) | Err(_) => Err(ChannelError::NotAChannel),
        }
    }

    /// Gives the end away.
    pub fn into_fd(self) -> OwnedFd {
        self.socket
    }

    /// Makes [`Channel::send`] and [`Channel::receive`] of this end fail with `WouldBlock` in place of blocking.
    pub fn set_nonblocking(&self) -> Result<(), ChannelError> {
        rustix::io::ioctl_fionbio(&self.socket, true).map_err(io::Error::from)?;
        Ok(())
    }

    /// Sends one message. Blocks while the other end is behind, unless told not to. Never raises `SIGPIPE`.
    pub fn send<M: Message>(&self, message: &M, fds: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        if fds.len() != message.fds() {
            return Err(ChannelError::Fds { wanted: message.fds(), actual: fds.len() });
        }
        if fds.len() > MAX_FDS {
            return Err(ChannelError::TooManyFds);
        }
        let payload = serde_json::to_vec(message).map_err(|source| ChannelError::Malformed { source })?;
        if payload.len() > MAX_PAYLOAD {
            return Err(ChannelError::TooLong);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(ChannelError::TooManyFds);
        }
        loop {
            match sendmsg(&self.socket, &[IoSlice::new(&payload)], &mut control, SendFlags::NOSIGNAL) {
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
                Ok(_) => return Ok(()),
            }
        }
    }

    /// Receives one message; `None` once the other end is closed. Blocks until there is one, unless told not to.
    pub fn receive<M: Message>(&self) -> Result<Option<(M, Vec<OwnedFd>)>, ChannelError> {
        let mut payload = vec![0; MAX_PAYLOAD];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(if M::HAS_FDS { &mut space[..] } else { &mut [] });
        let received = loop {
            let mut parts = [IoSliceMut::new(&mut payload)];
            match recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => {}
                // It was closed before it had received everything.
                Err(rustix::io::Errno::CONNRESET) => return Ok(None),
                Err(error) => return Err(io::Error::from(error).into()),
                Ok(received) => break received,
            }
        };
        // Take the descriptors first: whatever is wrong with the message, they are ours to close.
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(ChannelError::TooLong);
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(if M::HAS_FDS { ChannelError::TooManyFds } else { ChannelError::UnwantedFds });
        }
        if received.bytes == 0 {
            return Ok(None);
        }
        payload.truncate(received.bytes);
        let message: M = serde_json::from_slice(&payload).map_err(|source| ChannelError::Malformed { source })?;
        if fds.len() != message.fds() {
            return Err(ChannelError::Fds { wanted: message.fds(), actual: fds.len() });
        }
        Ok(Some((message, fds)))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
