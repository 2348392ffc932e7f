//! How bytes get from one GPU to another without Peergate.
//!
//! - **bare**: the driver's own call on plain memory, with peer access: what Peergate adds its checks to.
//! - **driver**: the same call without peer access, which the driver stages as it likes.
//! - **fair**: through registered buffers of this process by several threads, each of which only begins copies: one GPU's out of it and the other's into it
//!   wait for each other by events, and several pieces are under way.
//!
//! Not here: Peergate.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::world::Job;
use crate::raw::{Cuda, Event, Stream, Way};
use crate::rivals::Shape;

/// Longest piece that is staged.
const PIECE: u64 = 4 << 20;
/// Buffers of a thread, each way.
const SLOTS: usize = 4;

/// Plain memory of two GPUs in contexts of theirs.
pub(crate) struct Plain {
    sides: [Side; 2],
}

struct Side {
    cuda: Arc<Cuda>,
    memory: u64,
    streams: [Stream; 2],
}

impl Plain {
    /// Of so many bytes each; a context reaches the memory of the other one, or does not.
    pub(crate) fn new(ordinals: [i32; 2], len: u64, has_access: bool) -> Result<Self> {
        let side = |ordinal| -> Result<Side> {
            let cuda = if has_access { Cuda::new(ordinal)? } else { Cuda::apart(ordinal)? };
            let (memory, streams) = (cuda.allocate(len)?, [cuda.stream()?, cuda.stream()?]);
            Ok(Side { cuda, memory, streams })
        };
        let sides = [side(ordinals[0])?, side(ordinals[1])?];
        if has_access {
            sides[0].cuda.enable_peer(&sides[1].cuda)?;
            sides[1].cuda.enable_peer(&sides[0].cuda)?;
        }
        Ok(Self { sides })
    }

    /// The driver's call, on one or two streams of the GPU that has the source.
    pub(crate) fn copy(&self, jobs: &[Job], streams: usize) -> Result<Duration> {
        let most = jobs.iter().map(|job| job.count).max().unwrap_or(0);
        let mut entered = None;
        let start = Instant::now();
        for n in 0..most {
            let stream = usize::try_from(n)? % streams;
            for job in jobs.iter().filter(|job| n < job.count) {
                let (from, to, (source, destination)) = (&self.sides[job.from], &self.sides[job.to()], job.at(n));
                if entered.replace(job.from) != Some(job.from) {
                    from.cuda.enter()?;
                }
                let (from_at, to_at) = (from.memory + source, to.memory + destination);
                from.streams[stream].copy_peer((&to.cuda, to_at), (&from.cuda, from_at), job.len)?;
            }
        }
        for side in jobs.iter().map(|job| &self.sides[job.from]) {
            side.cuda.enter()?;
            side.streams.iter().try_for_each(Stream::wait)?;
        }
        Ok(start.elapsed())
    }

    /// The same with a thread for each job.
    pub(crate) fn copy_apart(&self, jobs: &[Job], streams: usize) -> Result<Duration> {
        together(jobs.iter().map(|job| move || self.copy(std::slice::from_ref(job), streams).map(drop)))
    }
}

/// Buffers that all threads of the fair rival share out.
pub(crate) struct Buffers {
    bytes: Vec<u8>,
    pub(crate) threads: usize,
}

impl Buffers {
    pub(crate) fn new(plain: &Plain) -> Result<Self> {
        let threads = std::thread::available_parallelism()?.get().min(16);
        let len = PIECE * 2 * SLOTS as u64 * threads as u64;
        let bytes = vec![1; usize::try_from(len)?];
        plain.sides[0].cuda.register(bytes.as_ptr() as u64, len)?;
        Ok(Self { bytes, threads })
    }

    /// A thread's buffer one way.
    fn at(&self, thread: usize, from: usize, slot: usize) -> u64 {
        self.bytes.as_ptr() as u64 + ((thread * 2 + from) * SLOTS + slot) as u64 * PIECE
    }
}

/// One thread's way from one GPU to the other.
struct Line {
    out: Stream,
    into: Stream,
    slots: Vec<Slot>,
    begun: usize,
}

struct Slot {
    at: u64,
    /// The piece has come into the buffer; it has left it.
    full: Event,
    free: Event,
}

impl Line {
    fn new(plain: &Plain, buffers: &Buffers, thread: usize, from: usize) -> Result<Self> {
        let [source, destination] = [from, 1 - from].map(|side| &plain.sides[side].cuda);
        let slot = |slot| -> Result<Slot> {
            Ok(Slot { at: buffers.at(thread, from, slot), full: source.event()?, free: destination.event()? })
        };
        let slots = (0..SLOTS).map(slot).collect::<Result<_>>()?;
        source.enter()?;
        let out = source.stream()?;
        destination.enter()?;
        Ok(Self { out, into: destination.stream()?, slots, begun: 0 })
    }

    /// Begins a piece's way from one address to another.
    fn begin(&mut self, source: u64, destination: u64, len: u64) -> Result<()> {
        let slot = &self.slots[self.begun % SLOTS];
        self.out.enter()?;
        if self.begun >= SLOTS {
            self.out.await_event(&slot.free)?;
        }
        self.out.copy(slot.at, source, len, Way::Out)?;
        self.out.record(&slot.full)?;
        self.into.enter()?;
        self.into.await_event(&slot.full)?;
        self.into.copy(slot.at, destination, len, Way::In)?;
        self.into.record(&slot.free)?;
        self.begun += 1;
        Ok(())
    }
}

/// Has threads that begin at the same time do something each, and says how long all of it took. Whoever fails lets the others go on all the same.
pub(crate) fn together<F: FnOnce() -> Result<()> + Send>(what: impl ExactSizeIterator<Item = F>) -> Result<Duration> {
    let (ready, go) = (Barrier::new(what.len() + 1), Barrier::new(what.len() + 1));
    std::thread::scope(|scope| {
        let body = |what: F| {
            let (ready, go) = (&ready, &go);
            move || {
                ready.wait();
                go.wait();
                what()
            }
        };
        let threads: Vec<_> = what.map(|what| scope.spawn(body(what))).collect();
        ready.wait();
        let start = Instant::now();
        go.wait();
        for thread in threads {
            thread.join().ok().context("A thread panicked")??;
        }
        Ok(start.elapsed())
    })
}

/// Through registered buffers, by the shape's threads; one is the calling thread.
pub(crate) fn fair(plain: &Plain, buffers: &Buffers, shape: Shape, jobs: &[Job]) -> Result<Duration> {
    let lines = |thread| [0, 1].map(|from| Line::new(plain, buffers, thread, from));
    if shape.threads == 1 {
        let [one, other] = lines(0);
        let mut lines = [one?, other?];
        let start = Instant::now();
        work(plain, shape, 0, &mut lines, jobs)?;
        return Ok(start.elapsed());
    }
    let all = (0..shape.threads).map(|thread| {
        let [one, other] = lines(thread);
        Ok((thread, [one?, other?]))
    });
    let all: Vec<(usize, [Line; 2])> = all.collect::<Result<_>>()?;
    together(all.into_iter().map(|(thread, mut lines)| move || work(plain, shape, thread, &mut lines, jobs)))
}

/// One thread's share of the pieces, of all jobs in turns.
fn work(plain: &Plain, shape: Shape, thread: usize, lines: &mut [Line; 2], jobs: &[Job]) -> Result<()> {
    let each = |job: &Job| job.len.div_ceil(shape.piece);
    let most = jobs.iter().map(|job| job.count * each(job)).max().unwrap_or(0);
    for n in (u64::try_from(thread)?..most).step_by(shape.threads) {
        for job in jobs.iter().filter(|job| n < job.count * each(job)) {
            let (source, destination) = job.at(n / each(job));
            let offset = n % each(job) * shape.piece;
            let (from, to) = (plain.sides[job.from].memory + source, plain.sides[job.to()].memory + destination);
            lines[job.from].begin(from + offset, to + offset, shape.piece.min(job.len - offset))?;
        }
    }
    for line in lines {
        line.into.enter()?;
        line.into.wait()?;
    }
    Ok(())
}
