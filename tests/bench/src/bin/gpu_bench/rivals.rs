//! How bytes get from a GPU into another owner's aperture, and back, without Peergate.
//!
//! - **bare**: the driver's own call on the aperture, which this process has registered itself: what Peergate adds its checks to.
//! - **pageable**: through an ordinary buffer, which the driver stages once more.
//! - **pinned**: through a registered buffer, one copy after another.
//! - **fair**: through registered buffers by several threads, each of which copies one piece while the GPU moves its next.
//!
//! Not here: Peergate.

use std::ptr;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::raw::{Cuda, Registered, Way};

/// Longest buffer that a rival stages through.
pub(crate) const BUFFER: u64 = 64 << 20;

/// Transfers, one after another in memory: number `n` goes from `device + n * len` to `aperture + n * len`, or back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) device: u64,
    pub(crate) aperture: u64,
    pub(crate) len: u64,
    pub(crate) count: u64,
    pub(crate) way: Way,
}

impl Job {
    pub(crate) fn bytes(self) -> u64 {
        self.len * self.count
    }

    /// The first half one way, the second half the other.
    pub(crate) fn both(self) -> [Self; 2] {
        let count = self.count / 2;
        let by = count * self.len;
        let back = Self { device: self.device + by, aperture: self.aperture + by, way: Way::In, count, ..self };
        [Self { way: Way::Out, count, ..self }, back]
    }
}

/// The driver's call on registered memory.
pub(crate) fn bare(cuda: &Arc<Cuda>, jobs: &[Job]) -> Result<Duration> {
    let streams = jobs.iter().map(|_| cuda.stream()).collect::<Result<Vec<_>>>()?;
    let most = jobs.iter().map(|job| job.count).max().unwrap_or(0);
    let start = Instant::now();
    for n in 0..most {
        for (job, stream) in jobs.iter().zip(&streams).filter(|(job, _)| n < job.count) {
            stream.copy(job.aperture + n * job.len, job.device + n * job.len, job.len, job.way)?;
        }
    }
    streams.iter().try_for_each(crate::raw::Stream::wait)?;
    Ok(start.elapsed())
}

/// Through one buffer, which is registered or not.
pub(crate) fn staged(cuda: &Arc<Cuda>, buffer: &mut [u8], is_registered: bool, job: Job) -> Result<Duration> {
    let registered = is_registered.then(|| Registered::new(cuda, buffer)).transpose()?;
    let buffer = registered.as_ref().map(Registered::address);
    let mut pageable = Vec::new();
    let at = match buffer {
        Some(at) => at,
        None => {
            pageable.resize(usize::try_from(job.len.min(BUFFER))?, 1);
            pageable.as_ptr() as u64
        }
    };
    let stream = cuda.stream()?;
    let hop = |device, len| match is_registered {
        true => stream.copy(at, device, len, job.way).and_then(|()| stream.wait()),
        false => cuda.pageable(at, device, len, job.way),
    };
    let start = Instant::now();
    for n in 0..job.count {
        let mut done = 0;
        while done < job.len {
            let (at_byte, len) = (n * job.len + done, (job.len - done).min(BUFFER));
            if job.way == Way::In {
                memcpy(at, job.aperture + at_byte, len);
            }
            hop(job.device + at_byte, len)?;
            if job.way == Way::Out {
                memcpy(job.aperture + at_byte, at, len);
            }
            done += len;
        }
    }
    Ok(start.elapsed())
}

/// How the fair rival works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Shape {
    pub(crate) threads: usize,
    pub(crate) piece: u64,
}

impl Shape {
    /// What is tried for transfers of a length.
    pub(crate) fn all(len: u64, most_threads: usize) -> Vec<Self> {
        let pieces =
            [64 << 10, 256 << 10, 1 << 20, 4 << 20].into_iter().filter(|piece| *piece < len).chain([len.min(4 << 20)]);
        let mut pieces: Vec<u64> = pieces.collect();
        pieces.dedup();
        let threads = [1, 2, 4, 8, 12, 16].into_iter().filter(|count| *count <= most_threads);
        threads.flat_map(|threads| pieces.iter().map(move |piece| Self { threads, piece: *piece })).collect()
    }
}

/// Through registered buffers of several threads, two each.
pub(crate) fn fair(cuda: &Arc<Cuda>, buffers: &mut [u8], shape: Shape, jobs: &[Job]) -> Result<Duration> {
    let piece = usize::try_from(shape.piece)?;
    let mine = buffers.chunks_exact_mut(2 * piece).take(shape.threads);
    let (ready, go) = (Barrier::new(shape.threads + 1), Barrier::new(shape.threads + 1));
    std::thread::scope(|scope| {
        let threads: Vec<_> = mine
            .enumerate()
            .map(|(thread, buffer)| {
                let (ready, go) = (&ready, &go);
                scope.spawn(move || -> Result<()> {
                    // Whoever fails lets the others go on all the same.
                    let made = set_up(cuda, buffer);
                    ready.wait();
                    go.wait();
                    let (buffer, streams) = made?;
                    let at = [buffer.address(), buffer.address() + shape.piece];
                    work(jobs, shape, thread, at, &streams)
                })
            })
            .collect();
        ready.wait();
        let start = Instant::now();
        go.wait();
        for thread in threads {
            thread.join().ok().context("A thread panicked")??;
        }
        Ok(start.elapsed())
    })
}

fn set_up<'a>(cuda: &Arc<Cuda>, buffer: &'a mut [u8]) -> Result<(Registered<'a>, [crate::raw::Stream; 2])> {
    cuda.enter()?;
    Ok((Registered::new(cuda, buffer)?, [cuda.stream()?, cuda.stream()?]))
}

/// One thread's share: while it copies a piece, the GPU moves its next.
fn work(jobs: &[Job], shape: Shape, thread: usize, at: [u64; 2], streams: &[crate::raw::Stream; 2]) -> Result<()> {
    let pieces = jobs.iter().flat_map(|job| {
        let each = job.len.div_ceil(shape.piece);
        (0..job.count * each).map(move |n| {
            let offset = n / each * job.len + n % each * shape.piece;
            (job, offset, shape.piece.min(job.len - n % each * shape.piece))
        })
    });
    let mut open: [Option<(&Job, u64, u64)>; 2] = [None, None];
    for (turn, (job, offset, len)) in pieces.skip(thread).step_by(shape.threads).enumerate() {
        let slot = turn % 2;
        settle(&mut open[slot], at[slot], &streams[slot])?;
        if job.way == Way::In {
            memcpy(at[slot], job.aperture + offset, len);
        }
        streams[slot].copy(at[slot], job.device + offset, len, job.way)?;
        open[slot] = Some((job, offset, len));
    }
    (0..2).try_for_each(|slot| settle(&mut open[slot], at[slot], &streams[slot]))
}

fn settle(open: &mut Option<(&Job, u64, u64)>, at: u64, stream: &crate::raw::Stream) -> Result<()> {
    let Some((job, offset, len)) = open.take() else { return Ok(()) };
    stream.wait()?;
    if job.way == Way::Out {
        memcpy(job.aperture + offset, at, len);
    }
    Ok(())
}

pub(crate) fn memcpy(dst: u64, src: u64, len: u64) {
    // SAFETY: the callers' buffers and the aperture's mapping are that long, and do not overlap.
    unsafe { ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, usize::try_from(len).unwrap_or(0)) }
}
