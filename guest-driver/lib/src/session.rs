//! One open of a device, shared by everything that lives in it.
//!
//! Completions arrive in one ring for all streams; whoever waits takes what is there, keeps the outcomes of others for them, and wakes them.
//! One waiter at a time sits in the driver, the rest on a condition variable.
//!
//! Not here: buffers ([`crate::Buffer`], [`crate::HostBuffer`]) and streams ([`crate::Stream`]), which hold a session and act through it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use iommu_addr::Access;
use peergate_uapi::{Completion, Endpoint, Info, Peer, Work};
use vdev_wire::{EndpointKind, PathReason, Status, TransferPath};

use crate::outcome::{access_bits, access_from_bits};
use crate::{Buffer, Channel, Driver, Error, HostBuffer, Notice, Outcome, Registers, Stream};

/// How long a waiter waits beyond the longest deadline of the device before it gives up.
const GRACE: Duration = Duration::from_secs(10);
/// Completions taken from the driver at a time.
const REAP: usize = 64;

/// One endpoint that this session can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointInfo {
    /// Its number in every call.
    pub number: u32,
    /// Its name; control characters are replaced.
    pub name: String,
    /// What it is a slice of; none if this library does not know the kind.
    pub kind: Option<EndpointKind>,
    /// Copy engines that work side by side.
    pub engines: u16,
    /// Memory in bytes.
    pub memory_len: u64,
    /// Bytes that are not allocated now.
    pub memory_free: u64,
    /// Size of the register page, 0 if there is none.
    pub registers_len: u64,
    /// Granule of its memory in bytes.
    pub granularity: u64,
}

impl EndpointInfo {
    fn from_uapi(endpoint: &Endpoint) -> Self {
        let name = endpoint.name.split(|byte| *byte == 0).next().unwrap_or_default();
        let name = String::from_utf8_lossy(name).replace(char::is_control, "\u{fffd}");
        Self {
            number: endpoint.endpoint,
            name,
            kind: EndpointKind::from_raw(endpoint.kind),
            engines: endpoint.engines,
            memory_len: endpoint.memory_len,
            memory_free: endpoint.memory_free,
            registers_len: endpoint.registers_len,
            granularity: endpoint.granularity,
        }
    }
}

/// A peer right, and the way that transfers under it take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerRight {
    /// Rights in force.
    pub access: Access,
    /// How bytes would go.
    pub path: TransferPath,
    /// Why so.
    pub reason: PathReason,
}

/// One open of a device: one I/O address space. Clones share it; it ends with the last of them and of what they made.
#[derive(Clone)]
pub struct Session {
    shared: Arc<Shared>,
}

struct Shared {
    channel: Box<dyn Channel>,
    info: Info,
    next_cookie: AtomicU64,
    next_stream: AtomicU32,
    book: Mutex<Book>,
    arrived: Condvar,
}

/// What was submitted through the session and has not been handed to its waiter.
#[derive(Default)]
struct Book {
    /// By cookie; `None` until it completes.
    outcomes: HashMap<u64, Option<Outcome>>,
    /// Whether a waiter sits in the driver.
    reaping: bool,
}

impl Session {
    /// Opens `driver` once more. Blocks while the device creates the domain.
    ///
    /// # Errors
    /// What [`Driver::open`] and [`Channel::info`] answer.
    pub fn open(driver: &dyn Driver) -> Result<Self, Error> {
        let channel = driver.open()?;
        let info = channel.info()?;
        let shared = Shared {
            channel,
            info,
            next_cookie: AtomicU64::new(1),
            next_stream: AtomicU32::new(1),
            book: Mutex::default(),
            arrived: Condvar::new(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The channel underneath, for calls this type does not offer. Completions taken from it directly are lost to the session.
    pub fn channel(&self) -> &dyn Channel {
        &*self.shared.channel
    }

    /// What the device offered when the session was opened.
    pub fn limits(&self) -> &Info {
        &self.shared.info
    }

    /// How long any transfer can take until the device ends it, with some grace: a sound deadline for [`Ticket::wait`].
    pub fn patience(&self) -> Instant {
        Instant::now() + Duration::from_millis(self.shared.info.max_timeout_ms.into()) + GRACE
    }

    /// Every endpoint, with the memory that is free now.
    ///
    /// # Errors
    /// What [`Channel::endpoint`] answers.
    pub fn endpoints(&self) -> Result<Vec<EndpointInfo>, Error> {
        let count = self.shared.info.endpoints;
        (0..count).map(|index| Ok(EndpointInfo::from_uapi(&self.channel().endpoint(index)?))).collect()
    }

    /// The endpoint called `name`, which is a name or a number; a name that is a number goes first.
    ///
    /// # Errors
    /// [`Error::NoEndpoint`] if there is none.
    pub fn endpoint(&self, name: &str) -> Result<EndpointInfo, Error> {
        let endpoints = self.endpoints()?;
        let by_name = endpoints.iter().find(|endpoint| endpoint.name == name);
        let by_number = || endpoints.iter().find(|endpoint| name.parse() == Ok(endpoint.number));
        by_name.or_else(by_number).cloned().ok_or_else(|| Error::NoEndpoint {
            name: name.to_owned(),
            known: endpoints.iter().map(|endpoint| endpoint.name.as_str()).collect::<Vec<_>>().join(", "),
        })
    }

    /// Allocates at least `len` bytes of `endpoint`'s memory, which every endpoint of the session may use as `access` says. It reads zero.
    ///
    /// # Errors
    /// [`Error::Refused`] with NOMEM, QUOTA, NOENT or INVAL.
    pub fn alloc(&self, endpoint: u32, len: u64, access: Access) -> Result<Buffer, Error> {
        Buffer::new(self.clone(), endpoint, len, access_bits(access))
    }

    /// Maps `len` bytes (rounded up to whole pages) of fresh, zeroed host memory for the endpoints, which may use it as `access` says.
    ///
    /// # Errors
    /// [`Error::Refused`] with NOMEM (also where RLIMIT_MEMLOCK is reached), QUOTA or INVAL.
    pub fn map(&self, len: u64, access: Access) -> Result<HostBuffer, Error> {
        HostBuffer::new(self.clone(), len, access_bits(access))
    }

    /// Opens the register page of `endpoint` for loads and stores.
    ///
    /// # Errors
    /// [`Error::NoRegisters`] if it has none; [`Error::Refused`] as for [`Self::alloc`].
    pub fn registers(&self, endpoint: &EndpointInfo) -> Result<Registers, Error> {
        Registers::new(self, endpoint)
    }

    /// A stream that this session has not used before. Nothing happens on the device until work is submitted to it.
    pub fn stream(&self) -> Stream {
        Stream::new(self.clone(), self.shared.next_stream.fetch_add(1, Ordering::Relaxed))
    }

    /// Lets `accessor` reach the memory of `owner`, also what is allocated later. One direction only.
    ///
    /// # Errors
    /// [`Error::Refused`] with ALREADY if nothing would change, NOENT, INVAL or DENIED.
    pub fn peer_enable(&self, accessor: u32, owner: u32, access: Access) -> Result<PeerRight, Error> {
        self.peer(peergate_uapi::PEER_ENABLE, accessor, owner, access)
    }

    /// Withdraws rights. Blocks until no transfer relies on them.
    ///
    /// # Errors
    /// [`Error::Refused`] with NOENT or INVAL.
    pub fn peer_disable(&self, accessor: u32, owner: u32, access: Access) -> Result<PeerRight, Error> {
        self.peer(peergate_uapi::PEER_DISABLE, accessor, owner, access)
    }

    /// The rights in force, and the path that a transfer would take.
    ///
    /// # Errors
    /// [`Error::Refused`] with NOENT or INVAL.
    pub fn peer_query(&self, accessor: u32, owner: u32) -> Result<PeerRight, Error> {
        self.peer(peergate_uapi::PEER_QUERY, accessor, owner, Access::NONE)
    }

    fn peer(&self, op: u32, accessor: u32, owner: u32, access: Access) -> Result<PeerRight, Error> {
        let request = Peer { op, accessor, owner, rights: access_bits(access), ..Peer::default() };
        let answer = self.channel().peer(request)?;
        let path = u8::try_from(answer.path).ok().and_then(TransferPath::from_raw);
        let reason = u8::try_from(answer.reason).ok().and_then(PathReason::from_raw);
        Ok(PeerRight {
            access: access_from_bits(answer.rights),
            path: path.unwrap_or(TransferPath::None),
            reason: reason.unwrap_or(PathReason::None),
        })
    }

    /// The next event, or `None` once `deadline` has passed; blocks until then.
    ///
    /// # Errors
    /// [`Error::Gone`] or [`Error::System`].
    pub fn event(&self, deadline: Instant) -> Result<Option<Notice>, Error> {
        Ok(self.channel().event(deadline)?.map(|event| Notice::from_event(&event)))
    }

    /// Submits one piece of work; the session chooses its cookie. Blocks only while driver or queue have no room, until something completes.
    ///
    /// # Errors
    /// [`Error::Refused`]; with BUSY if there is no room and nothing of this session that could make some.
    pub fn submit(&self, work: Work) -> Result<Ticket, Error> {
        let mut tickets = self.submit_all(&[work])?;
        tickets.pop().ok_or(Error::Refused { call: "SUBMIT", status: Status::Busy })
    }

    /// Submits several in order, as [`Self::submit`]. If it fails, what was taken before goes on and its outcomes are dropped.
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub fn submit_all(&self, work: &[Work]) -> Result<Vec<Ticket>, Error> {
        let Some(first) = work.first() else { return Ok(Vec::new()) };
        let queue = first.stream % self.shared.info.submit_queues.max(1);
        let mut work = work.to_vec();
        let mut tickets = Vec::with_capacity(work.len());
        {
            let mut book = self.book();
            for item in &mut work {
                item.cookie = self.shared.next_cookie.fetch_add(1, Ordering::Relaxed);
                book.outcomes.insert(item.cookie, None);
                tickets.push(Ticket { session: self.clone(), cookie: item.cookie });
            }
        }
        let mut rest = work.as_slice();
        while !rest.is_empty() {
            match self.channel().submit(queue, rest) {
                Ok(taken) => rest = rest.get(taken..).unwrap_or_default(),
                Err(error) if error.status() == Some(Status::Busy) && self.make_room(rest.len())? => {}
                Err(error) => return Err(error),
            }
        }
        Ok(tickets)
    }

    /// Waits for a completion while any but the `unsent` newest pieces of work are to complete; answers whether one may have made room.
    fn make_room(&self, unsent: usize) -> Result<bool, Error> {
        let book = self.book();
        let pending = book.outcomes.values().filter(|outcome| outcome.is_none()).count();
        let deadline = if pending > unsent { self.patience() } else { Instant::now() };
        self.reap(book, deadline)
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.shared.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes completions until there is at least one new, or `deadline`, or another waiter has taken some. Answers whether there may be any.
    /// Goes on from the state that its caller looked at: what arrived since is not waited for again.
    fn reap(&self, mut book: MutexGuard<'_, Book>, deadline: Instant) -> Result<bool, Error> {
        if book.reaping {
            let left = deadline.saturating_duration_since(Instant::now());
            drop(self.shared.arrived.wait_timeout(book, left).unwrap_or_else(PoisonError::into_inner));
            return Ok(true);
        }
        book.reaping = true;
        drop(book);
        let mut arrived = [Completion::default(); REAP];
        let result = self.channel().completions(&mut arrived, 1, deadline);
        let mut book = self.book();
        book.reaping = false;
        for completion in arrived.iter().take(*result.as_ref().unwrap_or(&0)) {
            // Nobody waits for a cookie that is not in the book any more.
            if let Some(outcome) = book.outcomes.get_mut(&completion.cookie) {
                *outcome = Some(Outcome::from_completion(completion));
            }
        }
        self.shared.arrived.notify_all();
        result.map(|taken| taken > 0)
    }
}

/// Work that was submitted. Dropping it forgets the outcome, not the work.
#[must_use = "work that nobody waits for may still be running"]
pub struct Ticket {
    session: Session,
    cookie: u64,
}

impl Ticket {
    /// The cookie; fault events of the work carry it.
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    /// Blocks until the work has ended and tells how, good or bad.
    ///
    /// # Errors
    /// [`Error::Deadline`] if `deadline` passes first: the work may still be running. [`Error::Gone`] or [`Error::System`] from the driver.
    pub fn outcome(&self, deadline: Instant) -> Result<Outcome, Error> {
        loop {
            let book = self.session.book();
            if let Some(outcome) = book.outcomes.get(&self.cookie).copied().flatten() {
                return Ok(outcome);
            }
            if deadline <= Instant::now() {
                return Err(Error::Deadline { what: "The transfer" });
            }
            self.session.reap(book, deadline)?;
        }
    }

    /// Blocks until the work has ended well, as long as [`Session::patience`] says.
    ///
    /// # Errors
    /// [`Error::Transfer`] if it ended badly; else as [`Self::outcome`].
    pub fn wait(self) -> Result<Outcome, Error> {
        self.outcome(self.session.patience())?.ok()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.session.book().outcomes.remove(&self.cookie);
    }
}
