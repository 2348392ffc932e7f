//! A VMM and workers made of sockets, around a keeper that does one turn at a time, all in one thread.
#![allow(clippy::unwrap_used, dead_code, reason = "a test fails by panicking, and no test needs all of this")]

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::event::Timespec;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use vmm_keeper::{Event, Keeper};

pub(crate) const GET_FEATURES: u32 = 1;
pub(crate) const SET_FEATURES: u32 = 2;
pub(crate) const SET_OWNER: u32 = 3;
pub(crate) const RESET_OWNER: u32 = 4;
pub(crate) const SET_MEM_TABLE: u32 = 5;
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
pub(crate) const SET_CONFIG: u32 = 25;
pub(crate) const RESET_DEVICE: u32 = 34;

pub(crate) const REQUEST: u32 = 1;
pub(crate) const ANSWER: u32 = 5;
pub(crate) const NEED_REPLY: u32 = 8;
pub(crate) const REPLY_ACK: u64 = 1 << 3;
pub(crate) const PROTOCOL: u64 = 1 << 30;

const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A frame's bytes.
pub(crate) fn frame(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).unwrap();
    let mut bytes = [code, flags, size].map(u32::to_ne_bytes).concat();
    bytes.extend_from_slice(payload);
    bytes
}

pub(crate) fn pair(index: u32, number: u32) -> Vec<u8> {
    [index, number].map(u32::to_ne_bytes).concat()
}

/// Sends bytes with descriptors; `WouldBlock` if there is no room.
pub(crate) fn send(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

/// A frame that came.
#[derive(Debug)]
pub(crate) struct Came {
    pub(crate) code: u32,
    pub(crate) flags: u32,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl Came {
    pub(crate) fn number(&self) -> u64 {
        u64::from_ne_bytes(self.payload[..8].try_into().unwrap())
    }

    pub(crate) fn index(&self) -> u32 {
        u32::from_ne_bytes(self.payload[..4].try_into().unwrap())
    }
}

/// One end of a stream, read a frame at a time and never waiting.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) socket: UnixStream,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl End {
    pub(crate) fn new(socket: UnixStream) -> Self {
        socket.set_nonblocking(true).unwrap();
        Self { socket, bytes: Vec::new(), fds: Vec::new() }
    }

    /// Sends a frame, all of it.
    pub(crate) fn send(&self, code: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let bytes = frame(code, flags, payload);
        assert_eq!(send(&self.socket, &bytes, fds), Ok(bytes.len()));
    }

    pub(crate) fn send_bytes(&self, bytes: &[u8]) {
        (&self.socket).write_all(bytes).unwrap();
    }

    /// The next frame, if it is there.
    pub(crate) fn receive(&mut self) -> Option<Came> {
        loop {
            let size = |bytes: &[u8]| u32::from_ne_bytes(bytes[8..12].try_into().unwrap()) as usize;
            let wanted = if self.bytes.len() < 12 { 12 } else { 12 + size(&self.bytes) };
            if self.bytes.len() == wanted {
                let word = |at: usize| u32::from_ne_bytes(self.bytes[at..at + 4].try_into().unwrap());
                let came = Came {
                    code: word(0),
                    flags: word(4),
                    payload: self.bytes[12..].to_vec(),
                    fds: std::mem::take(&mut self.fds),
                };
                self.bytes.clear();
                return Some(came);
            }
            let mut more = vec![0; wanted - self.bytes.len()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let got = recvmsg(&self.socket, &mut [IoSliceMut::new(&mut more)], &mut control, RecvFlags::CMSG_CLOEXEC);
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    self.fds.extend(rights);
                }
            }
            match got {
                Ok(got) if got.bytes > 0 => self.bytes.extend_from_slice(&more[..got.bytes]),
                Ok(_) | Err(Errno::AGAIN | Errno::CONNRESET) => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Every frame that is there.
    pub(crate) fn receive_all(&mut self) -> Vec<Came> {
        std::iter::from_fn(|| self.receive()).collect()
    }

    /// Reads what there is; whether the other side has closed after it.
    pub(crate) fn read_to_end(mut self) -> bool {
        self.receive_all();
        self.is_closed()
    }

    /// Whether the other side has closed, and nothing is left to read.
    pub(crate) fn is_closed(&self) -> bool {
        match (&self.socket).read(&mut [0; 1]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

/// A keeper at a socket of its own.
pub(crate) struct Bed {
    pub(crate) keeper: Keeper,
    dir: tempfile::TempDir,
    events: VecDeque<Event>,
}

impl Bed {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("sock")).unwrap();
        Self { keeper: Keeper::new(listener.into()).unwrap(), dir, events: VecDeque::new() }
    }

    /// Has the keeper do everything that there is.
    pub(crate) fn settle(&mut self) {
        for _ in 0..10_000 {
            if !self.keeper.turn(None, Some(&NOW)).unwrap().busy {
                self.events.extend(self.keeper.events());
                return;
            }
            self.events.extend(self.keeper.events());
        }
        panic!("the keeper is busy for ever");
    }

    /// One turn.
    pub(crate) fn turn(&mut self) {
        self.keeper.turn(None, Some(&NOW)).unwrap();
        self.events.extend(self.keeper.events());
    }

    pub(crate) fn events(&mut self) -> Vec<Event> {
        self.events.drain(..).collect()
    }

    /// A VMM, which need not have been accepted yet.
    pub(crate) fn connect(&mut self) -> End {
        End::new(UnixStream::connect(self.dir.path().join("sock")).unwrap())
    }

    /// The worker's end of a stream that the keeper was handed.
    pub(crate) fn add_worker(&mut self, session: u32, fresh: bool) -> End {
        let (keeper, worker) = UnixStream::pair().unwrap();
        self.keeper.add_worker(keeper.into(), session, fresh);
        End::new(worker)
    }

    /// A VMM and a worker that know nothing of each other.
    pub(crate) fn connected() -> (Self, End, End) {
        let mut bed = Self::new();
        let worker = bed.add_worker(1, true);
        let vmm = bed.connect();
        bed.settle();
        assert_eq!(bed.events(), [Event::Connected]);
        (bed, vmm, worker)
    }

    /// The same with the agreement that answers come to whoever asks for them.
    pub(crate) fn agreed() -> (Self, End, End) {
        let (mut bed, mut vmm, mut worker) = Self::connected();
        vmm.send(GET_FEATURES, REQUEST, &[], &[]);
        vmm.send(SET_PROTOCOL_FEATURES, REQUEST, &REPLY_ACK.to_ne_bytes(), &[]);
        bed.settle();
        assert_eq!(worker.receive_all().len(), 2);
        worker.send(GET_FEATURES, ANSWER, &PROTOCOL.to_ne_bytes(), &[]);
        bed.settle();
        assert_eq!(vmm.receive_all().len(), 1);
        (bed, vmm, worker)
    }
}

/// Answers everything that is there as a worker would that has nothing against it; returns it.
pub(crate) fn obey(bed: &mut Bed, worker: &mut End, acks: bool) -> Vec<Came> {
    let mut all = Vec::new();
    loop {
        bed.settle();
        let came = worker.receive_all();
        if came.is_empty() {
            return all;
        }
        for came in &came {
            match came.code {
                GET_FEATURES | GET_PROTOCOL_FEATURES | GET_QUEUE_NUM => {
                    worker.send(came.code, ANSWER, &PROTOCOL.to_ne_bytes(), &[]);
                }
                GET_VRING_BASE | GET_CONFIG => worker.send(came.code, ANSWER, &came.payload, &[]),
                _ if acks && came.flags & NEED_REPLY != 0 => worker.send(came.code, ANSWER, &[0; 8], &[]),
                _ => {}
            }
        }
        all.extend(came);
    }
}

pub(crate) fn as_fds(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}
