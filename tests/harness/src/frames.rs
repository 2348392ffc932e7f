//! A keeper between a VMM and workers that say and do anything.
//!
//! Promises that are checked: the keeper goes on and comes to rest; what a VMM hears are whole answers, no more of them than it asked for;
//! what a worker hears are whole requests; and what is told of the VMM makes sense in that order.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vmm_keeper::{Event, Keeper};

use crate::fuzz::Bytes;

const STEPS: usize = 200;
/// Turns in which a keeper must have come to rest.
const TURNS: usize = 2000;
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

const REQUEST: u32 = 1;
const ANSWER: u32 = 5;
const NEED_REPLY: u32 = 8;
const MAX_PAYLOAD: usize = 4096;

/// One end of a stream that never waits.
struct End {
    socket: UnixStream,
    heard: Vec<u8>,
}

/// A frame that came: its request, its flags and its payload.
struct Came {
    code: u32,
    flags: u32,
    payload: Vec<u8>,
}

impl End {
    fn new(socket: UnixStream) -> Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket, heard: Vec::new() })
    }

    /// Sends what there is room for.
    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        // Whoever it was for may have gone.
        let _ = sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    }

    fn answer(&self, code: u32, payload: &[u8]) {
        let _ = (&self.socket).write(&frame(code, ANSWER, payload));
    }

    /// Reads what there is. Descriptors are dropped.
    fn listen(&mut self) {
        let mut bytes = [0; 8192];
        loop {
            match (&self.socket).read(&mut bytes) {
                Ok(0) => return,
                Ok(count) => self.heard.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    /// The next whole frame.
    fn next(&mut self) -> Option<Came> {
        self.listen();
        let word = |at: usize| Some(u32::from_ne_bytes(self.heard.get(at..at + 4)?.try_into().ok()?));
        let (code, flags, size) = (word(0)?, word(4)?, word(8)? as usize);
        assert!(size <= MAX_PAYLOAD, "a frame of {size} bytes");
        let payload = self.heard.get(12..12 + size)?.to_vec();
        self.heard.drain(..12 + size);
        Some(Came { code, flags, payload })
    }
}

fn frame(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let mut bytes = [code, flags, size].map(u32::to_ne_bytes).concat();
    bytes.extend_from_slice(payload);
    bytes
}

struct World {
    keeper: Keeper,
    address: SocketAddr,
    vmm: Option<End>,
    worker: Option<End>,
    /// As was told.
    connected: bool,
    session: u32,
    /// Bytes that this VMM said: each request has at least twelve, and at most one answer.
    said: usize,
    heard: usize,
    fds: Vec<OwnedFd>,
}

/// Frames from two sides, and their ends.
///
/// # Panics
/// If the keeper breaks a promise.
pub fn frames(data: &[u8]) {
    run(&mut Bytes(data)).expect("the harness works");
}

fn run(bytes: &mut Bytes<'_>) -> Result<()> {
    static NAMES: AtomicU64 = AtomicU64::new(0);
    let name = format!("peergate-fuzz-{}-{}", std::process::id(), NAMES.fetch_add(1, Ordering::Relaxed));
    let address = SocketAddr::from_abstract_name(name)?;
    let listener = UnixListener::bind_addr(&address)?;
    let (reader, writer) = std::io::pipe()?;
    let full = eventfd(0, EventfdFlags::CLOEXEC)?;
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes())?;
    let (socket, _peer) = UnixStream::pair()?;
    let counter = eventfd(0, EventfdFlags::CLOEXEC)?;
    let mut world = World {
        keeper: Keeper::new(listener.into())?,
        address,
        vmm: None,
        worker: None,
        connected: false,
        session: 0,
        said: 0,
        heard: 0,
        fds: vec![counter, socket.into(), full, reader.into(), writer.into()],
    };
    for _ in 0..STEPS {
        if bytes.is_empty() {
            break;
        }
        world.step(bytes)?;
    }
    world.settle()?;
    world.hear();
    drop(world.vmm.take());
    world.settle()?;
    assert!(!world.connected, "the VMM's going is told");
    Ok(())
}

impl World {
    fn step(&mut self, bytes: &mut Bytes<'_>) -> Result<()> {
        match bytes.byte() % 16 {
            0..=5 => {
                let (frame, fds) = request(bytes);
                self.say(&frame, fds);
            }
            6 => {
                let len = usize::from(bytes.byte());
                let fds = bytes.pick(&[0, 0, 0, 1, 2, 33]);
                let raw = bytes.take(len).to_vec();
                self.say(&raw, fds);
            }
            7..=9 => self.work(bytes),
            10 => {
                let len = usize::from(bytes.byte());
                let raw = bytes.take(len);
                let fds = if bytes.byte().is_multiple_of(8) { vec![self.fds[0].as_fd()] } else { Vec::new() };
                if let Some(worker) = &self.worker {
                    worker.send(raw, &fds);
                }
            }
            11 => self.turn().map(drop)?,
            12 => {
                self.settle()?;
                self.hear();
            }
            13 => self.worker = None,
            14 => {
                let (worker, theirs) = UnixStream::pair()?;
                self.session += 1;
                self.keeper.add_worker(theirs.into(), self.session, bytes.byte().is_multiple_of(4));
                self.worker = Some(End::new(worker)?);
                self.told()?;
            }
            _ => self.come_or_go(bytes)?,
        }
        Ok(())
    }

    /// A VMM that has gone is noticed before the next one comes: what is counted here is one VMM's.
    fn come_or_go(&mut self, bytes: &mut Bytes<'_>) -> Result<()> {
        if self.vmm.take().is_some() && !bytes.byte().is_multiple_of(4) {
            return Ok(());
        }
        self.settle()?;
        (self.said, self.heard) = (0, 0);
        self.vmm = Some(End::new(UnixStream::connect_addr(&self.address).context("There is room for one")?)?);
        self.settle()
    }

    fn say(&mut self, frame: &[u8], fds: usize) {
        if let Some(vmm) = &self.vmm {
            let fds: Vec<_> = (0..fds).map(|n| self.fds[(n + frame.len()) % self.fds.len()].as_fd()).collect();
            vmm.send(frame, &fds);
            self.said += frame.len();
        }
    }

    fn hear(&mut self) {
        while let Some(came) = self.vmm.as_mut().and_then(End::next) {
            self.heard += 1;
            assert_eq!(came.flags, ANSWER, "request {} has an answer", came.code);
            assert!(self.heard * 12 <= self.said, "{} answers to {} bytes of requests", self.heard, self.said);
        }
    }

    /// The worker answers a frame, in most cases rightly.
    fn work(&mut self, bytes: &mut Bytes<'_>) {
        let refused = bytes.byte().is_multiple_of(8);
        let Some((worker, came)) = self.worker.as_mut().and_then(|worker| {
            let came = worker.next()?;
            Some((worker, came))
        }) else {
            return;
        };
        assert!(came.flags & !NEED_REPLY == REQUEST, "request {} has the flags {}", came.code, came.flags);
        let payload = match came.code {
            11 | 24 => came.payload,
            1 | 15 | 17 => (1_u64 << 30).to_ne_bytes().to_vec(),
            _ if came.flags & NEED_REPLY != 0 => u64::from(refused).to_ne_bytes().to_vec(),
            _ => return,
        };
        worker.answer(came.code, &payload);
    }

    fn turn(&mut self) -> Result<bool> {
        let busy = self.keeper.turn(None, Some(&NOW))?.busy;
        self.told()?;
        Ok(busy)
    }

    fn settle(&mut self) -> Result<()> {
        for _ in 0..TURNS {
            if !self.turn()? {
                return Ok(());
            }
        }
        panic!("the keeper does not come to rest");
    }

    fn told(&mut self) -> Result<()> {
        let events = self.keeper.events();
        for (at, event) in events.iter().enumerate() {
            let (before, after) = match event {
                Event::Connected => (false, true),
                Event::Disconnected => (true, false),
                Event::Replayed { session } => {
                    ensure!(*session <= self.session, "A worker that is to come has taken over");
                    (true, true)
                }
                Event::GaveUp { .. } => {
                    ensure!(events.get(at + 1) == Some(&Event::Disconnected), "A VMM is given up and not closed");
                    (true, true)
                }
            };
            assert_eq!(self.connected, before, "{event:?}");
            self.connected = after;
        }
        Ok(())
    }
}

/// A request that a keeper looks at, in most cases of the right shape, and the number of its descriptors.
fn request(bytes: &mut Bytes<'_>) -> (Vec<u8>, usize) {
    let code = bytes.pick(&[1, 2, 3, 4, 5, 8, 9, 10, 11, 11, 12, 12, 13, 14, 15, 16, 16, 17, 18, 21, 24, 25, 34, 99]);
    let flags = bytes.pick(&[REQUEST, REQUEST, REQUEST, REQUEST | NEED_REPLY, REQUEST | NEED_REPLY, 0, ANSWER]);
    let ring = u64::from(bytes.pick(&[0_u32, 1, 2, 7, 255, 256]));
    let (payload, fds) = match code {
        2 => (bytes.long().to_ne_bytes().to_vec(), 0),
        16 => (bytes.pick(&[8_u64, 8, 0, u64::MAX]).to_ne_bytes().to_vec(), 0),
        5 => {
            let regions = bytes.pick(&[1_u8, 2, 8, 32, 0]);
            let head = u64::from(regions).to_ne_bytes().to_vec();
            ([head, vec![9; usize::from(regions) * 32]].concat(), usize::from(regions))
        }
        8 | 10 | 18 => ((ring | u64::from(bytes.byte()) << 32).to_ne_bytes().to_vec(), 0),
        11 => (ring.to_ne_bytes().to_vec(), 0),
        9 => ([ring.to_ne_bytes().to_vec(), vec![bytes.byte(); 32]].concat(), 0),
        12..=14 => {
            let none = bytes.byte().is_multiple_of(4);
            ((ring & 0xff | u64::from(none) << 8).to_ne_bytes().to_vec(), usize::from(!none))
        }
        21 => (Vec::new(), 1),
        24 | 25 | 99 => (vec![7; usize::from(bytes.short()) % (MAX_PAYLOAD + 2)], 0),
        _ => (Vec::new(), 0),
    };
    let fds = if bytes.byte().is_multiple_of(32) { fds + 1 } else { fds };
    (frame(code, flags, &payload), fds)
}
