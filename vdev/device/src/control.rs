//! The control queue: one request a chain, answered whenever it is done, in any order.
//!
//! Not here: what each request does; each family has a file.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vdev_wire::MapSegment;
use virtio_queue::QueueT;

use crate::RequestError;
use crate::complete::Completer;
use crate::device::Device;
use crate::domain::Domain;
use crate::observer::Counter;
use crate::port::Port;
use crate::queue::Visit;
use crate::request::{self, Control, Request};
use crate::turn::Turn;

/// Requests of one turn.
const REQUESTS: usize = 16;
/// Bytes of a request that is too long to be valid which are still looked at: all that says why.
const FRONT: usize = 32;
/// Bytes of a request, beside MAP's segments, that are certainly enough.
const HEAD: usize = 64;

/// What the control queue's thread keeps from turn to turn.
pub(crate) struct ControlState {
    pub(crate) turn: Turn,
    bytes: Vec<u8>,
}

impl ControlState {
    pub(crate) fn new() -> Self {
        Self { turn: Turn::new(), bytes: Vec::new() }
    }
}

/// A request that was taken.
struct Taken {
    completer: Completer,
    /// Bytes that the driver wrote, of which `bytes` has all or the front.
    len: usize,
    defect: Option<&'static str>,
}

impl Device {
    /// One turn of the control queue. True if there may be more to do at once.
    pub(crate) fn control_turn(&self, port: &Arc<Port>, state: &mut ControlState) -> bool {
        let ControlState { turn, bytes } = state;
        turn.begin();
        let mut more = true;
        for _ in 0..REQUESTS {
            if let Err(is_news) = self.pace.allow(turn.now) {
                // Nobody needs to say that there is something: the timekeeper comes.
                port.access(|queue, mem| {
                    let _ = queue.disable_notification(mem);
                    false
                });
                turn.wake |= is_news;
                more = false;
                break;
            }
            let Some(taken) = self.take_request(port, bytes, &mut more) else { break };
            self.pace.spend(turn.now);
            turn.changed = true;
            self.request(port, turn, bytes, taken);
        }
        self.settle(turn);
        more
    }

    /// Takes one request; if there is none, `more` becomes whether one came just now.
    fn take_request(&self, port: &Arc<Port>, bytes: &mut Vec<u8>, more: &mut bool) -> Option<Taken> {
        let mut taken = None;
        *more = false;
        port.access(|queue, mem| {
            let _ = queue.disable_notification(mem);
            let mut visit = Visit::new(queue, mem);
            let Some(popped) = port.pop(queue, &mut visit) else {
                *more = port.rest(queue, mem);
                return false;
            };
            *more = true;
            let (len, mut defect) = (popped.readable.len(), popped.defect);
            if defect.is_none() && !popped.readable.read_front(mem, bytes, self.request_front(len)) {
                defect = Some("its bytes are not in guest memory");
            }
            taken = Some(Taken { completer: Completer::new(port, popped, &self.observer), len, defect });
            false
        });
        taken
    }

    /// How much of a request of `len` bytes is read.
    fn request_front(&self, len: usize) -> usize {
        let segments = self.limits.max_segments.count().saturating_mul(size_of::<MapSegment>());
        if len <= segments.saturating_add(HEAD) { len } else { FRONT }
    }

    fn request(&self, port: &Port, turn: &mut Turn, bytes: &[u8], taken: Taken) {
        let Taken { completer, len, defect } = taken;
        let parsed = match defect {
            Some(what) => Err(RequestError::Malformed { what }),
            None => request::parse(bytes, len, completer.room_with_header()),
        };
        match parsed.and_then(|control| self.admit(control)) {
            Ok(control) => self.dispatch(turn, control, completer),
            Err(error) => {
                if let RequestError::Malformed { .. } = error {
                    turn.tally.add(Counter::MalformedChains, 1);
                    self.log_malformed(port, turn.now, &error);
                }
                completer.answer(Err(error));
            }
        }
    }

    /// What every request but HELLO needs: the right session, and an earlier HELLO.
    fn admit<'a>(&self, control: Control<'a>) -> Result<Control<'a>, RequestError> {
        if matches!(control.request, Request::Hello { .. }) {
            return Ok(control);
        }
        // First, so that a driver of an earlier session learns that it is one.
        let session = self.spec.session;
        if control.session != session {
            return Err(RequestError::Session { session });
        }
        if !self.greeted.load(Ordering::Acquire) {
            return Err(RequestError::BeforeHello);
        }
        Ok(control)
    }

    fn dispatch(&self, turn: &mut Turn, control: Control<'_>, completer: Completer) {
        let id = control.domain;
        match control.request {
            Request::Hello { version, features } => return self.hello(turn, version, features, completer),
            Request::Probe => {
                let room = completer.room();
                return completer.answer(Ok(self.probe(room)));
            }
            Request::Attach { endpoint } => return completer.answer(self.attach(id, endpoint)),
            _ => {}
        }
        let Some(domain) = self.domain(id) else {
            return completer.answer(Err(missing_domain(id)));
        };
        match control.request {
            Request::Detach { endpoint } => self.detach(turn, &domain, endpoint, completer),
            Request::Map { iova, access, count, segments } => {
                completer.answer(self.map(&domain, iova, access, count, segments));
            }
            Request::Unmap { range } => self.unmap(&domain, range, completer),
            Request::Flush => self.flush(&domain, completer),
            Request::Alloc { endpoint, access, registers, iova, len } => {
                completer.answer(self.alloc(&domain, endpoint, access, registers, (iova, len)));
            }
            Request::Free { handle } => self.free(turn, &domain, handle, completer),
            Request::Peer { change, accessor, owner, rights } => {
                self.peer(&domain, change, (accessor, owner), rights, completer);
            }
            Request::StreamReset { stream } => completer.answer(self.stream_reset(&domain, stream)),
            Request::Cancel { stream, cookie } => {
                let body = self.cancel_work(turn, &domain, stream, cookie);
                // The work's own ends first: the driver may look for them once this is answered.
                crate::complete::finish(&mut turn.done);
                completer.answer(Ok(body));
            }
            Request::Hello { .. } | Request::Probe | Request::Attach { .. } => {}
        }
    }

    /// A domain that exists and is not going away.
    pub(crate) fn domain(&self, id: iommu_addr::DomainId) -> Option<Arc<Domain>> {
        crate::sync::lock(&self.domains).get(&id).filter(|domain| !domain.is_closing()).map(Arc::clone)
    }
}

pub(crate) fn missing_domain(id: iommu_addr::DomainId) -> RequestError {
    RequestError::Missing { what: "domain", value: u64::from(id.0) }
}
