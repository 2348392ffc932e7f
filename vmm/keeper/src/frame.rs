//! A frame: twelve bytes of header, a payload, and descriptors.
//!
//! Not here: sockets; what a request does.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

/// Bytes of a header.
pub(crate) const HEADER: usize = 12;
/// Most bytes of a payload.
pub(crate) const MAX_PAYLOAD: usize = 4096;
/// Most descriptors of a frame.
pub(crate) const MAX_FDS: usize = 32;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 0b11;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
const KNOWN_FLAGS: u32 = VERSION_MASK | REPLY | NEED_REPLY;

/// Numbers of the requests that something here looks at.
pub(crate) mod request {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const RESET_OWNER: u32 = 4;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_LOG_BASE: u32 = 6;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const GET_VRING_BASE: u32 = 11;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const SET_VRING_ERR: u32 = 14;
    pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(crate) const GET_QUEUE_NUM: u32 = 17;
    pub(crate) const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(crate) const GET_CONFIG: u32 = 24;
    pub(crate) const CREATE_CRYPTO_SESSION: u32 = 26;
    pub(crate) const POSTCOPY_ADVISE: u32 = 28;
    pub(crate) const GET_INFLIGHT_FD: u32 = 31;
    pub(crate) const RESET_DEVICE: u32 = 34;
    pub(crate) const GET_MAX_MEM_SLOTS: u32 = 36;
    pub(crate) const GET_STATUS: u32 = 40;
    pub(crate) const GET_SHARED_OBJECT: u32 = 41;
    pub(crate) const SET_DEVICE_STATE_FD: u32 = 42;
    pub(crate) const CHECK_DEVICE_STATE: u32 = 43;
    pub(crate) const GET_SHMEM_CONFIG: u32 = 44;
}

/// A request of the other direction: the configuration space has changed.
pub(crate) const CONFIG_CHANGE_MSG: u32 = 2;

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("A frame claims {size} bytes of payload; at most {MAX_PAYLOAD} are possible")]
    TooLong { size: u32 },
    #[error("A frame has the flags {flags:#x}, which belong to no {}", direction.name())]
    Flags { flags: u32, direction: Direction },
    #[error("A frame has more than {MAX_FDS} descriptors, or this process has none left")]
    TooManyFds,
    #[error("A frame has descriptors where none belong")]
    UnwantedFds,
    #[error("Request {request} has a payload or descriptors that do not fit it")]
    Shape { request: u32 },
    #[error("An answer to request {request} came, and another one or none was due")]
    Unexpected { request: u32 },
    #[error("The answer to request {request} has a payload that does not fit it")]
    Answer { request: u32 },
    #[error("Request {request} was refused when it was repeated")]
    Refused { request: u32 },
    #[error("The socket failed")]
    Socket(#[from] io::Error),
}

/// Which way a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the VMM.
    Request,
    /// From the worker.
    Answer,
}

impl Direction {
    const fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Answer => "answer",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) request: u32,
    flags: u32,
    pub(crate) size: usize,
}

impl Header {
    /// Reads a header. A number of a request that nobody knows is none of its concerns.
    pub(crate) fn parse(bytes: [u8; HEADER], direction: Direction) -> Result<Self, FrameError> {
        let [request, flags, size] = [0, 4, 8].map(|at| {
            let mut number = [0; 4];
            number.copy_from_slice(&bytes[at..at + 4]);
            u32::from_ne_bytes(number)
        });
        let is_reply = flags & REPLY != 0;
        if flags & !KNOWN_FLAGS != 0 || flags & VERSION_MASK != VERSION || is_reply != (direction == Direction::Answer)
        {
            return Err(FrameError::Flags { flags, direction });
        }
        match usize::try_from(size) {
            Ok(size) if size <= MAX_PAYLOAD => Ok(Self { request, flags, size }),
            _ => Err(FrameError::TooLong { size }),
        }
    }

    pub(crate) fn bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        // No payload is longer than its limit.
        let size = u32::try_from(self.size).unwrap_or(u32::MAX);
        for (place, number) in bytes.chunks_exact_mut(4).zip([self.request, self.flags, size]) {
            place.copy_from_slice(&number.to_ne_bytes());
        }
        bytes
    }
}

/// A whole frame. Copies share the payload and the descriptors.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    header: Header,
    payload: Rc<[u8]>,
    fds: Rc<[OwnedFd]>,
}

impl Frame {
    /// `payload` has as many bytes as `header` says.
    pub(crate) fn new(header: Header, payload: Vec<u8>, fds: Vec<OwnedFd>) -> Self {
        Self { header, payload: payload.into(), fds: fds.into() }
    }

    /// A request of this process's own.
    pub(crate) fn request(request: u32, payload: Rc<[u8]>) -> Self {
        Self { header: Header { request, flags: VERSION, size: payload.len() }, payload, fds: Rc::new([]) }
    }

    /// The same request, answered or not as is needed here.
    pub(crate) fn needing_reply(mut self, needed: bool) -> Self {
        self.header.flags = VERSION | if needed { NEED_REPLY } else { 0 };
        self
    }

    pub(crate) fn header(&self) -> Header {
        self.header
    }

    pub(crate) fn code(&self) -> u32 {
        self.header.request
    }

    pub(crate) fn payload(&self) -> &Rc<[u8]> {
        &self.payload
    }

    pub(crate) fn fds(&self) -> &[OwnedFd] {
        &self.fds
    }

    pub(crate) fn len(&self) -> usize {
        HEADER.saturating_add(self.payload.len())
    }

    /// The payload, if it is one number.
    pub(crate) fn number(&self) -> Option<u64> {
        <[u8; 8]>::try_from(&*self.payload).ok().map(u64::from_ne_bytes)
    }

    /// The first four bytes of the payload: which ring, for those requests that say it there.
    pub(crate) fn index(&self) -> Option<u32> {
        self.payload.first_chunk::<4>().copied().map(u32::from_ne_bytes)
    }

    /// Whether an answer comes. `acks` is whether both sides have agreed on answers to requests that have none of their own.
    pub(crate) fn is_answered(&self, acks: bool) -> bool {
        has_answer(self.code()) || acks && self.header.flags & NEED_REPLY != 0
    }

    /// Whether this answer to `request` says that it was refused. Requests with an answer of their own cannot be.
    pub(crate) fn is_refusal_of(&self, request: &Self) -> bool {
        !has_answer(request.code()) && self.number() != Some(0)
    }

    /// Whether this can be the answer to `request`.
    pub(crate) fn check_answer_to(&self, request: &Self) -> Result<(), FrameError> {
        let code = request.code();
        if self.code() != code {
            return Err(FrameError::Unexpected { request: self.code() });
        }
        let fits = match code {
            request::GET_VRING_BASE => self.payload.len() == 8 && self.index() == request.index(),
            request::GET_FEATURES | request::GET_PROTOCOL_FEATURES => self.number().is_some(),
            code if !has_answer(code) => self.number().is_some(),
            _ => true,
        };
        if fits { Ok(()) } else { Err(FrameError::Answer { request: code }) }
    }
}

/// Whether a request has an answer of its own.
fn has_answer(code: u32) -> bool {
    matches!(
        code,
        request::GET_FEATURES
            | request::SET_LOG_BASE
            | request::GET_VRING_BASE
            | request::GET_PROTOCOL_FEATURES
            | request::GET_QUEUE_NUM
            | request::GET_CONFIG
            | request::CREATE_CRYPTO_SESSION
            | request::POSTCOPY_ADVISE
            | request::GET_INFLIGHT_FD
            | request::GET_MAX_MEM_SLOTS
            | request::GET_STATUS
            | request::GET_SHARED_OBJECT
            | request::SET_DEVICE_STATE_FD
            | request::CHECK_DEVICE_STATE
            | request::GET_SHMEM_CONFIG
    )
}
