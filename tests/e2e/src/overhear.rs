//! A driver that remembers every refusal that passes through it, to be compared with what the operator saw.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use peergate_guest::uapi::{self, Alloc, Completion, Endpoint, Event, Info, Peer, Stream, Work};
use peergate_guest::{Channel, Driver, Error, HostMemory};

/// What a guest was told of one refused access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Address space.
    pub domain: u32,
    /// Cookie of the work.
    pub cookie: u64,
    /// First address refused.
    pub address: u64,
    /// Reason, numbered as on the wire.
    pub reason: u8,
}

/// Passes every call on to another driver.
pub struct Overhear<'a> {
    inner: &'a dyn Driver,
    heard: Arc<Mutex<Vec<Refusal>>>,
}

impl<'a> Overhear<'a> {
    /// Listens to `inner`.
    pub fn new(inner: &'a dyn Driver) -> Self {
        Self { inner, heard: Arc::default() }
    }

    /// Every refusal so far. One that came as a completion and as an event is there twice.
    pub fn heard(&self) -> Vec<Refusal> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Driver for Overhear<'_> {
    fn open(&self) -> Result<Box<dyn Channel>, Error> {
        let inner = self.inner.open()?;
        let domain = inner.info()?.domain;
        Ok(Box::new(Overheard { inner, domain, heard: Arc::clone(&self.heard) }))
    }
}

struct Overheard {
    inner: Box<dyn Channel>,
    domain: u32,
    heard: Arc<Mutex<Vec<Refusal>>>,
}

impl Overheard {
    fn note(&self, cookie: u64, address: u64, reason: u8) {
        let refusal = Refusal { domain: self.domain, cookie, address, reason };
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).push(refusal);
    }
}

impl Channel for Overheard {
    fn info(&self) -> Result<Info, Error> {
        self.inner.info()
    }

    fn endpoint(&self, index: u32) -> Result<Endpoint, Error> {
        self.inner.endpoint(index)
    }

    fn map(&self, len: u64, flags: u32) -> Result<Box<dyn HostMemory>, Error> {
        self.inner.map(len, flags)
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), Error> {
        self.inner.unmap(iova, len)
    }

    fn alloc(&self, request: Alloc) -> Result<Alloc, Error> {
        self.inner.alloc(request)
    }

    fn free(&self, handle: u64) -> Result<(), Error> {
        self.inner.free(handle)
    }

    fn peer(&self, request: Peer) -> Result<Peer, Error> {
        self.inner.peer(request)
    }

    fn submit(&self, queue: u32, work: &[Work]) -> Result<usize, Error> {
        self.inner.submit(queue, work)
    }

    fn completions(&self, into: &mut [Completion], at_least: usize, deadline: Instant) -> Result<usize, Error> {
        let count = self.inner.completions(into, at_least, deadline)?;
        for completion in into[..count].iter().filter(|completion| completion.fault_reason != 0) {
            self.note(completion.cookie, completion.fault_address, completion.fault_reason);
        }
        Ok(count)
    }

    fn stream(&self, request: Stream) -> Result<Stream, Error> {
        self.inner.stream(request)
    }

    fn event(&self, deadline: Instant) -> Result<Option<Event>, Error> {
        let event = self.inner.event(deadline)?;
        if let Some(event) = event.filter(|event| event.kind == uapi::EVENT_FAULT) {
            self.note(event.cookie, event.address, event.reason);
        }
        Ok(event)
    }
}
