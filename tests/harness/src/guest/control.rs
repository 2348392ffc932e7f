//! Control requests: many at a time, answered in any order.

use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use vdev_wire::{ControlHeader, ControlReply, Opcode, Status};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::ram::{GuestRam, Pages};
use crate::virtqueue::{Buffer, Used, Virtqueue};

/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// An answer.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Outcome.
    pub status: Status,
    /// What the status is about.
    pub detail: u64,
    /// Bytes after [`ControlReply`].
    pub body: Vec<u8>,
}

impl Reply {
    /// The body as a structure.
    pub fn parse<T: FromBytes>(&self) -> Result<T> {
        T::read_from_prefix(&self.body)
            .map(|(value, _)| value)
            .ok()
            .with_context(|| format!("The answer has {} bytes, too few", self.body.len()))
    }
}

/// The bytes of a request.
pub fn request(opcode: Opcode, domain: u32, session: u32, body: &(impl IntoBytes + Immutable + ?Sized)) -> Vec<u8> {
    let header = ControlHeader {
        opcode: (opcode as u16).into(),
        flags: 0.into(),
        domain: domain.into(),
        session: session.into(),
        reserved: 0.into(),
    };
    [header.as_bytes(), body.as_bytes()].concat()
}

/// Sends one request on a queue that nobody else uses, and waits for the answer.
pub fn exchange(ram: &Arc<GuestRam>, queue: &mut Virtqueue, request: &[u8], room: usize) -> Result<Reply> {
    let pages = place(ram, request, room)?;
    let head = queue.add(&buffers(&pages, request, room)?)?.context("The control queue is full")?;
    queue.publish()?;
    let used = queue.wait(Instant::now() + PATIENCE)?.context("The device did not answer a control request")?;
    ensure!(used.head == head, "The device answered another request");
    read_reply(&pages, request, room, used)
}

/// Where the answer begins.
fn reply_offset(request: &[u8]) -> u64 {
    (request.len() as u64).next_multiple_of(16)
}

fn place(ram: &Arc<GuestRam>, request: &[u8], room: usize) -> Result<Pages> {
    let pages = ram.alloc(reply_offset(request) + reply_len(room)?)?;
    pages.write(0, request)?;
    Ok(pages)
}

fn reply_len(room: usize) -> Result<u64> {
    Ok((size_of::<ControlReply>() + room).try_into()?)
}

fn buffers(pages: &Pages, request: &[u8], room: usize) -> Result<[Buffer; 2]> {
    Ok([
        Buffer::readable(pages.gpa(), request.len().try_into()?),
        Buffer::writable(pages.gpa() + reply_offset(request), reply_len(room)?.try_into()?),
    ])
}

fn read_reply(pages: &Pages, request: &[u8], room: usize, used: Used) -> Result<Reply> {
    let mut bytes = vec![0; size_of::<ControlReply>() + room];
    pages.read(reply_offset(request), &mut bytes)?;
    let written = usize::try_from(used.len)?;
    let (header, body) = ControlReply::read_from_prefix(&bytes).ok().context("Room for an answer")?;
    ensure!(
        (size_of::<ControlReply>()..=bytes.len()).contains(&written),
        "The device wrote {written} bytes of an answer"
    );
    let length = usize::try_from(header.length.get())?;
    ensure!(
        length == written - size_of::<ControlReply>(),
        "The answer says {length} bytes, but {written} were written in all"
    );
    let status = Status::from_raw(header.status.get()).context("The answer has an unknown status")?;
    Ok(Reply { status, detail: header.detail.get(), body: body[..length].to_vec() })
}

struct Held<'a>(MutexGuard<'a, State>);

impl Deref for Held<'_> {
    type Target = Virtqueue;

    fn deref(&self) -> &Virtqueue {
        &self.0.queue
    }
}

/// The control queue of a guest with several threads.
#[derive(Debug)]
pub(super) struct Control {
    ram: Arc<GuestRam>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    queue: Virtqueue,
    /// Requests that the device has, by the head of their chain, with their number. Pages stay here while it may write them.
    sent: HashMap<u16, (u64, Pages)>,
    /// Answers that nobody has fetched yet, by number.
    answers: HashMap<u64, (Pages, Used)>,
    /// Numbers whose answers nobody will fetch.
    abandoned: HashSet<u64>,
    next: u64,
    gone: bool,
}

impl Control {
    pub(super) fn new(ram: &Arc<GuestRam>, queue: Virtqueue) -> Self {
        let state = State {
            queue,
            sent: HashMap::new(),
            answers: HashMap::new(),
            abandoned: HashSet::new(),
            next: 0,
            gone: false,
        };
        Self { ram: Arc::clone(ram), state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request and waits for its answer.
    pub(super) fn call(&self, request: &[u8], room: usize) -> Result<Reply> {
        let deadline = Instant::now() + PATIENCE;
        let pages = place(&self.ram, request, room)?;
        let buffers = buffers(&pages, request, room)?;
        let mut state = self.lock();
        let head = loop {
            ensure!(!state.gone, "The device is gone");
            if let Some(head) = state.queue.add(&buffers)? {
                break head;
            }
            state = self.sleep(state, deadline)?;
        };
        let number = state.next;
        state.next += 1;
        state.sent.insert(head, (number, pages));
        state.queue.publish()?;
        let (pages, used) = loop {
            Self::reap(&mut state)?;
            if let Some(answer) = state.answers.remove(&number) {
                break answer;
            }
            ensure!(!state.gone, "The device is gone");
            state = match self.sleep(state, deadline) {
                Ok(state) => state,
                Err(error) => {
                    self.abandon(number);
                    return Err(error);
                }
            };
        };
        drop(state);
        self.changed.notify_all();
        read_reply(&pages, request, room, used)
    }

    fn sleep<'a>(&'a self, mut state: MutexGuard<'a, State>, deadline: Instant) -> Result<MutexGuard<'a, State>> {
        if state.queue.want_interrupt()? {
            Self::reap(&mut state)?;
            self.changed.notify_all();
            return Ok(state);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        ensure!(!left.is_zero(), "The device did not answer a control request in time");
        Ok(self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0)
    }

    fn abandon(&self, number: u64) {
        let mut state = self.lock();
        if state.answers.remove(&number).is_none() {
            state.abandoned.insert(number);
        }
    }

    fn reap(state: &mut State) -> Result<()> {
        while let Some(used) = state.queue.pop()? {
            let (number, pages) = state.sent.remove(&used.head).context("The request was sent")?;
            if !state.abandoned.remove(&number) {
                state.answers.insert(number, (pages, used));
            }
        }
        Ok(())
    }

    /// The queue's interrupt.
    pub(super) fn interrupt(&self) -> Result<()> {
        let mut state = self.lock();
        let outcome = Self::reap(&mut state);
        drop(state);
        self.changed.notify_all();
        outcome
    }

    /// Nothing will be answered any more.
    pub(super) fn gone(&self) {
        self.lock().gone = true;
        self.changed.notify_all();
    }

    /// The queue itself, while nobody uses it.
    pub(super) fn hold(&self) -> impl Deref<Target = Virtqueue> + '_ {
        Held(self.lock())
    }

    /// The descriptor of the interrupt.
    pub(super) fn call_fd(&self) -> Result<vmm_sys_util::eventfd::EventFd> {
        Ok(self.lock().queue.call_fd().try_clone()?)
    }
}
