//! What a worker has been told, as the frames that told it, and the frames that tell it to the next one.
//!
//! Each thing that can be set is one slot, which holds the last frame that set it; a slot's content is never looked into, except for the
//! number of a ring and the few bits that say which slots a frame empties.
//!
//! Not here: which frames are under way.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use crate::frame::{Frame, FrameError, request};

/// The feature bit that says that there are protocol features. Without it, SET_FEATURES also enables every ring.
const PROTOCOL_FEATURES: u64 = 1 << 30;
/// The protocol feature that has any request answered that asks for it.
const REPLY_ACK: u64 = 1 << 3;
/// In the payload of a ring's descriptor: which ring, and that there is no descriptor.
const INDEX: u64 = 0xff;
const NO_FD: u64 = 1 << 8;

const MEMORY_HEADER: usize = 8;
const MEMORY_REGION: usize = 32;

/// Whether both sides have agreed that requests are answered that ask for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Acks {
    /// A worker looks at the agreement only once it has said what it offers.
    asked: bool,
    agreed: bool,
}

impl Acks {
    pub(crate) fn see(&mut self, frame: &Frame) {
        match frame.code() {
            request::GET_FEATURES => self.asked = true,
            request::SET_PROTOCOL_FEATURES => self.agreed = frame.number().is_some_and(|bits| bits & REPLY_ACK != 0),
            _ => {}
        }
    }

    pub(crate) fn on(self) -> bool {
        self.asked && self.agreed
    }
}

#[derive(Debug, Default)]
struct Ring {
    num: Option<Frame>,
    base: Option<Frame>,
    addr: Option<Frame>,
    err: Option<Frame>,
    call: Option<Frame>,
    kick: Option<Frame>,
    enable: Option<Frame>,
    /// It was stopped, and its addresses are from before that: a new memory table need not have them.
    stopped: bool,
}

/// What a worker knows.
#[derive(Debug, Default)]
pub(crate) struct Record {
    acks: Acks,
    protocol: Option<Frame>,
    owner: Option<Frame>,
    /// The last features that enabled every ring.
    enabling: Option<Frame>,
    features: Option<Frame>,
    memory: Option<Frame>,
    backend: Option<Frame>,
    rings: BTreeMap<u8, Ring>,
}

/// Whether a frame that has to do with the record has the shape that its request demands. Others may have any.
pub(crate) fn check(frame: &Frame) -> Result<(), FrameError> {
    let (payload, fds) = (frame.payload().len(), frame.fds().len());
    let fits = match frame.code() {
        request::SET_OWNER | request::RESET_OWNER | request::RESET_DEVICE => payload == 0 && fds == 0,
        request::SET_FEATURES | request::SET_PROTOCOL_FEATURES => payload == 8 && fds == 0,
        request::SET_MEM_TABLE => {
            let regions = payload.checked_sub(MEMORY_HEADER).map(|rest| (rest / MEMORY_REGION, rest % MEMORY_REGION));
            regions == Some((fds, 0)) && frame.index().and_then(|count| usize::try_from(count).ok()) == Some(fds)
        }
        request::SET_VRING_NUM | request::SET_VRING_BASE | request::SET_VRING_ENABLE | request::GET_VRING_BASE => {
            payload == 8 && fds == 0 && ring_index(frame).is_some()
        }
        request::SET_VRING_ADDR => payload == 40 && fds == 0 && ring_index(frame).is_some(),
        request::SET_VRING_KICK | request::SET_VRING_CALL | request::SET_VRING_ERR => {
            frame.number().is_some_and(|number| fds == usize::from(number & NO_FD == 0))
        }
        request::SET_BACKEND_REQ_FD => fds == 1,
        _ => true,
    };
    if fits { Ok(()) } else { Err(FrameError::Shape { request: frame.code() }) }
}

/// Which ring a frame is about. There are at most 256.
fn ring_index(frame: &Frame) -> Option<u8> {
    match frame.code() {
        request::SET_VRING_KICK | request::SET_VRING_CALL | request::SET_VRING_ERR => {
            frame.number().and_then(|number| u8::try_from(number & INDEX).ok())
        }
        _ => frame.index().and_then(|index| u8::try_from(index).ok()),
    }
}

impl Record {
    /// Remembers a frame that passed [`check`] and that a worker has taken, together with its answer if it has one.
    pub(crate) fn apply(&mut self, frame: Frame, answer: Option<&Frame>) {
        self.acks.see(&frame);
        match frame.code() {
            request::SET_OWNER => self.owner = Some(frame),
            request::RESET_OWNER => {
                self.owner = None;
                self.reset();
            }
            request::RESET_DEVICE => self.reset(),
            request::SET_FEATURES => self.set_features(frame),
            request::SET_PROTOCOL_FEATURES => self.protocol = Some(frame),
            request::SET_MEM_TABLE => {
                self.memory = Some(frame);
                self.rings.values_mut().filter(|ring| ring.stopped).for_each(|ring| ring.addr = None);
            }
            request::SET_BACKEND_REQ_FD => self.backend = Some(frame),
            _ => self.apply_to_ring(frame, answer),
        }
    }

    fn reset(&mut self) {
        self.enabling = None;
        self.features = None;
        self.rings.clear();
    }

    fn set_features(&mut self, frame: Frame) {
        if frame.number().is_some_and(|bits| bits & PROTOCOL_FEATURES == 0) {
            self.rings.values_mut().for_each(|ring| ring.enable = None);
            self.enabling = Some(frame.clone());
        }
        self.features = Some(frame);
    }

    fn apply_to_ring(&mut self, frame: Frame, answer: Option<&Frame>) {
        let slot: fn(&mut Ring) -> &mut Option<Frame> = match frame.code() {
            request::SET_VRING_NUM => |ring| &mut ring.num,
            request::SET_VRING_ADDR => |ring| &mut ring.addr,
            request::SET_VRING_BASE | request::GET_VRING_BASE => |ring| &mut ring.base,
            request::SET_VRING_KICK => |ring| &mut ring.kick,
            request::SET_VRING_CALL => |ring| &mut ring.call,
            request::SET_VRING_ERR => |ring| &mut ring.err,
            request::SET_VRING_ENABLE => |ring| &mut ring.enable,
            _ => return,
        };
        let Some(index) = ring_index(&frame) else { return };
        let ring = self.rings.entry(index).or_default();
        let code = frame.code();
        let starts = code == request::SET_VRING_KICK && !frame.fds().is_empty();
        if code == request::GET_VRING_BASE {
            // The answer is where the ring goes on, in the same words in which that would be set.
            let base = answer.map(|answer| Frame::request(request::SET_VRING_BASE, Rc::clone(answer.payload())));
            *slot(ring) = base;
            (ring.kick, ring.call) = (None, None);
        } else {
            *slot(ring) = Some(frame);
        }
        match code {
            request::GET_VRING_BASE => ring.stopped = true,
            // A ring that runs has its addresses in whatever memory there is, also where they were not set anew.
            request::SET_VRING_ADDR => ring.stopped = false,
            _ if starts => ring.stopped = false,
            _ => {}
        }
    }

    /// Everything, in an order that a worker accepts: what is agreed, then memory, then each ring, which its kick starts. The last frame asks
    /// something harmless: its answer says that all before it was taken, also where nothing else is answered.
    pub(crate) fn replay(&self) -> Vec<Frame> {
        let empty = || Rc::new([]);
        let asked = self.acks.asked.then(|| Frame::request(request::GET_FEATURES, empty()));
        let enabling =
            self.enabling.clone().filter(|_| self.features.as_ref().and_then(Frame::number) != self.enabled_by());
        let whole = [&self.protocol, &self.owner, &enabling, &self.features, &self.memory, &self.backend];
        let rings = self
            .rings
            .values()
            .flat_map(|ring| [&ring.num, &ring.base, &ring.addr, &ring.err, &ring.call, &ring.kick, &ring.enable]);
        let told = whole.into_iter().chain(rings).flatten().map(|frame| frame.clone().needing_reply(self.acks.on()));
        let fence = Frame::request(request::GET_PROTOCOL_FEATURES, empty());
        asked.into_iter().chain(told).chain([fence]).collect()
    }

    fn enabled_by(&self) -> Option<u64> {
        self.enabling.as_ref().and_then(Frame::number)
    }

    /// Whether a worker answers what [`Record::replay`] repeats.
    pub(crate) fn acks(&self) -> Acks {
        self.acks
    }

    /// The kicks of the rings that were started and not stopped.
    pub(crate) fn kicks(&self) -> impl Iterator<Item = &OwnedFd> {
        self.rings.values().filter_map(|ring| ring.kick.as_ref()?.fds().first())
    }

    /// The socket on which a worker may ask something of the VMM.
    pub(crate) fn way_back(&self) -> Option<&OwnedFd> {
        self.backend.as_ref()?.fds().first()
    }
}
