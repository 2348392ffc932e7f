//! How long small copies take, and a flood for others to bear.
//!
//! The flood is as many threads as there are ways to be a nuisance, twice; each has an open of its own, and bounded memory.
//!
//! Not here: whether a latency is good.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use anyhow::Result;
use peergate_guest::{Access, Buffer, Driver, Error, Status, Stream, Ticket};
use serde_json::{Value, json};

use super::{Open, PAGE};

/// Bytes of a large copy of the flood.
const LARGE: u64 = 4 << 20;
/// Large copies of one thread in flight.
const WINDOW: usize = 8;
/// Streams that one thread has fault at a time.
const FAULTING: usize = 16;

/// Copies 4 KiB from GPU to FPGA `count` times, each waited for.
pub(super) fn latency(open: &Open, count: u64) -> Result<Value> {
    let source = open.session.alloc(open.gpu.number, PAGE, Access::RW)?;
    let destination = open.session.alloc(open.fpga.number, PAGE, Access::RW)?;
    let stream = open.session.stream().by(open.gpu.number);
    let mut times = Vec::new();
    for _ in 0..count {
        let started = Instant::now();
        stream.copy(destination.iova(), source.iova(), PAGE)?.wait()?;
        times.push(started.elapsed().as_nanos());
    }
    times.sort_unstable();
    let at = |percent: usize| times.get((times.len() * percent / 100).min(times.len() - 1)).copied().unwrap_or(0);
    Ok(json!({"count": times.len(), "p50": at(50), "p99": at(99), "max": at(100)}))
}

/// How calls and work ended, by status.
type Tally = BTreeMap<&'static str, u64>;

/// Ways to be a nuisance.
const KINDS: &[(&str, Nuisance)] = &[("requests", requests), ("faults", faults), ("copies", large_copies)];

/// Goes on until the counter says no.
type Nuisance = fn(&Open, &mut Counter);

/// Threads that make a nuisance of themselves until the flood is stopped or dropped.
pub(super) struct Flood {
    stop: Arc<AtomicBool>,
    threads: Vec<(&'static str, JoinHandle<Tally>)>,
}

impl Flood {
    pub(super) fn start(driver: &dyn Driver) -> Result<Self> {
        let mut flood = Self { stop: Arc::default(), threads: Vec::new() };
        for (kind, act) in KINDS.iter().chain(KINDS).copied() {
            let open = Open::new(driver)?;
            let mut counter = Counter { stop: Arc::clone(&flood.stop), tally: Tally::new() };
            let thread = thread::Builder::new().name(format!("flood-{kind}")).spawn(move || {
                act(&open, &mut counter);
                counter.tally
            })?;
            flood.threads.push((kind, thread));
        }
        Ok(flood)
    }

    /// Ends it and tells how everything ended.
    pub(super) fn stop(mut self) -> Value {
        let mut kinds: BTreeMap<&str, Tally> = BTreeMap::new();
        for (kind, tally) in self.join() {
            let sum = kinds.entry(kind).or_default();
            tally.into_iter().for_each(|(status, count)| *sum.entry(status).or_default() += count);
        }
        json!(kinds)
    }

    fn join(&mut self) -> Vec<(&'static str, Tally)> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.threads.drain(..);
        ended
            .map(|(kind, thread)| (kind, thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))))
            .collect()
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.join();
    }
}

struct Counter {
    stop: Arc<AtomicBool>,
    tally: Tally,
}

impl Counter {
    /// Counts how something ended; false once the flood is to end, or the device has lost its state.
    fn count<T>(&mut self, result: Result<T, Error>) -> bool {
        let status = match result {
            Ok(_) => Some(Status::Ok),
            Err(error) => error.status(),
        };
        *self.tally.entry(status.map_or("none", Status::name)).or_default() += 1;
        let over = matches!(status, None | Some(Status::Stale | Status::Lost));
        !over && !self.stop.load(Ordering::Relaxed)
    }
}

/// Control requests, as many as a thread can make.
fn requests(open: &Open, counter: &mut Counter) {
    let session = &open.session;
    while counter.count(session.peer_query(open.gpu.number, open.fpga.number))
        && counter.count(session.map(PAGE, Access::RW).and_then(|mut page| page.unmap()))
        && counter.count(session.alloc(open.gpu.number, PAGE, Access::RW).and_then(Buffer::free))
    {}
}

/// Writes to an address that nobody mapped, in many streams, which then have to be reset.
fn faults(open: &Open, counter: &mut Counter) {
    let session = &open.session;
    let unmapped = session.limits().iova_last & !(PAGE - 1);
    let streams: Vec<Stream> = (0..FAULTING).map(|_| session.stream().by(open.gpu.number)).collect();
    loop {
        let tickets: Vec<_> = streams.iter().map(|stream| stream.fill(unmapped, 0, PAGE)).collect();
        for ticket in tickets {
            if !counter.count(ticket.and_then(Ticket::wait)) {
                return;
            }
        }
        if !streams.iter().all(|stream| counter.count(stream.reset())) {
            return;
        }
    }
}

/// Large copies, several in flight.
fn large_copies(open: &Open, counter: &mut Counter) {
    let alloc = |endpoint: u32| open.session.alloc(endpoint, LARGE, Access::RW);
    let buffers = alloc(open.gpu.number).and_then(|source| Ok((source, alloc(open.fpga.number)?)));
    let (source, destination) = match buffers {
        Ok(buffers) => buffers,
        Err(error) => {
            counter.count::<()>(Err(error));
            return;
        }
    };
    let stream = open.session.stream().by(open.gpu.number);
    let mut going = true;
    while going {
        let tickets: Vec<_> = (0..WINDOW).map(|_| stream.copy(destination.iova(), source.iova(), LARGE)).collect();
        // All of them, for the memory goes next.
        for ticket in tickets {
            going &= counter.count(ticket.and_then(Ticket::wait));
        }
    }
}
