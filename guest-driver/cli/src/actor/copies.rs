//! Copies that go on until they are stopped, or until one does not end OK.
//!
//! One thread keeps a few in flight, small ones between two devices and large ones into host memory by turns. What ended OK must have moved:
//! the last bytes of each large copy are looked at.
//!
//! Not here: why a copy did not end OK.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use peergate_guest::{Access, Buffer, Error, HostBuffer, Session, Status, Stream, Ticket, upload};
use serde_json::{Value, json};

use super::{Open, PAGE};
use crate::chain;
use crate::pattern::Pattern;

/// Bytes of a large copy.
const LARGE: u64 = 1 << 20;
/// Large copies in flight; as many small ones are.
const SLOTS: usize = 4;
/// Bytes at the end of a large copy that are looked at.
const TAIL: usize = 8;
const SEED: u64 = 0x00c0_91e5;
/// How long copies may take to do what is waited for: longer than any of them can take.
const PATIENCE: Duration = Duration::from_secs(90);

/// The copies, and the thread that makes them. Dropping it stops them.
pub(super) struct Copies {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    tally: Mutex<Tally>,
    changed: Condvar,
}

#[derive(Default)]
struct Tally {
    ok: u64,
    lost: u64,
    /// Ended otherwise.
    other: u64,
    /// Ended OK, but the bytes are not there.
    wrong: u64,
    /// Why there are no more.
    error: Option<String>,
    stop: bool,
    over: bool,
}

impl Tally {
    fn counts(&self) -> Value {
        json!({"ended_ok": self.ok, "lost": self.lost, "other": self.other, "wrong": self.wrong, "failure": self.error})
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `there` says so.
    fn wait(&self, there: impl Fn(&Tally) -> bool) -> Result<MutexGuard<'_, Tally>> {
        let deadline = Instant::now() + PATIENCE;
        let mut tally = self.lock();
        while !there(&tally) {
            let left = deadline.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "The copies did not get there in {} s: {}", PATIENCE.as_secs(), tally.counts());
            tally = self.changed.wait_timeout(tally, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(tally)
    }
}

impl Copies {
    pub(super) fn start(open: &Open) -> Result<Self> {
        let mut work = Work::new(open)?;
        let shared = Arc::<Shared>::default();
        let tally = Arc::clone(&shared);
        let thread = thread::Builder::new().name("copies".into()).spawn(move || {
            let ended = work.go_on(&tally);
            let mut state = tally.lock();
            state.error = ended.err().map(|error| chain(&error));
            state.over = true;
            drop(state);
            tally.changed.notify_all();
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Waits until `count` more have ended OK.
    pub(super) fn more(&self, count: u64) -> Result<Value> {
        let wanted = self.shared.lock().ok.saturating_add(count);
        let tally = self.shared.wait(|tally| tally.ok >= wanted || tally.over)?;
        if tally.ok < wanted {
            bail!("There are no more copies: {}", tally.counts());
        }
        Ok(tally.counts())
    }

    /// Waits until all have ended because one did not end OK.
    pub(super) fn lost(&self) -> Result<Value> {
        Ok(self.shared.wait(|tally| tally.over)?.counts())
    }

    pub(super) fn stop(mut self) -> Value {
        self.end();
        self.shared.lock().counts()
    }

    fn end(&mut self) {
        self.shared.lock().stop = true;
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.end();
    }
}

/// What the thread has.
struct Work {
    session: Session,
    gpu: Buffer,
    fpga: Buffer,
    slots: Vec<HostBuffer>,
    small: Stream,
    large: Stream,
    tail: Vec<u8>,
}

impl Work {
    fn new(open: &Open) -> Result<Self> {
        let session = open.session.clone();
        let gpu = session.alloc(open.gpu.number, LARGE, Access::RW)?;
        let fpga = session.alloc(open.fpga.number, PAGE, Access::RW)?;
        upload(&session.stream(), gpu.iova(), &mut Pattern::new(SEED), LARGE, &mut |_| {})?;
        let tail = Pattern::bytes(SEED, usize::try_from(LARGE)?).split_off(usize::try_from(LARGE)? - TAIL);
        let slots = (0..SLOTS).map(|_| session.map(LARGE, Access::WRITE)).collect::<Result<_, Error>>()?;
        let stream = || session.stream().by(open.gpu.number);
        let (small, large) = (stream(), stream());
        Ok(Self { session, gpu, fpga, slots, small, large, tail })
    }

    fn go_on(&mut self, shared: &Shared) -> Result<()> {
        let mut flight: VecDeque<(Ticket, Option<usize>)> = VecDeque::new();
        let mut going = true;
        for number in 0.. {
            if going {
                flight.push_back(self.launch(number)?);
            }
            if going && flight.len() < 2 * SLOTS {
                continue;
            }
            let Some((ticket, slot)) = flight.pop_front() else { break };
            let status = ticket.outcome(self.session.patience())?.status;
            let arrived = status != Status::Ok || self.arrived(slot)?;
            let mut tally = shared.lock();
            match status {
                Status::Ok if arrived => tally.ok += 1,
                Status::Ok => tally.wrong += 1,
                Status::Lost => tally.lost += 1,
                _ => tally.other += 1,
            }
            going &= status == Status::Ok && !tally.stop;
            drop(tally);
            shared.changed.notify_all();
        }
        Ok(())
    }

    /// Submits copy `number`. Its slot is free: it was that of a copy that has ended.
    fn launch(&self, number: usize) -> Result<(Ticket, Option<usize>), Error> {
        if number.is_multiple_of(2) {
            return Ok((self.small.copy(self.fpga.iova(), self.gpu.iova(), PAGE)?, None));
        }
        let slot = number / 2 % SLOTS;
        let place = &self.slots[slot];
        place.write_at(LARGE - TAIL as u64, &[0; TAIL])?;
        Ok((self.large.copy(place.iova(), self.gpu.iova(), LARGE)?, Some(slot)))
    }

    fn arrived(&self, slot: Option<usize>) -> Result<bool, Error> {
        let Some(slot) = slot else { return Ok(true) };
        let mut tail = [0; TAIL];
        self.slots[slot].read_at(LARGE - TAIL as u64, &mut tail)?;
        Ok(tail[..] == self.tail)
    }
}
