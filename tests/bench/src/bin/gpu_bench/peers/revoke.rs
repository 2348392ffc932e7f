//! Rights that are taken back while copies between two GPUs run: once that is answered, nothing is written any more.
//!
//! Not here: how long it takes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use peergate_guest::uapi::{self, Completion, Work};
use peergate_guest::{Error, Status};

use super::world::{Job, World};
use crate::world::{DEPTH, PATIENCE};

/// What is taken back.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Take {
    /// The right to reach the other GPU's slice.
    Right,
    /// The buffer that is written to.
    Buffer,
}

/// What the owner writes after the answer, at the beginning of each destination.
const MARK: [u8; 4096] = [0xa5; 4096];
/// Destinations.
const PLACES: u64 = 8;

/// What has become of the copies so far, and whether there are to be no more.
#[derive(Default)]
struct Load {
    made: AtomicUsize,
    refused: AtomicUsize,
    is_over: AtomicBool,
}

/// How many copies were made and how many refused, in a world that is good for nothing else afterwards.
pub(crate) fn revoke(world: &World, half: u64, take: Take) -> Result<(usize, usize)> {
    let job = Job { from: 0, len: half / PLACES, count: 1, half };
    let (load, channel) = (Load::default(), &*world.sides[0].channel);
    std::thread::scope(|scope| -> Result<()> {
        let copies = scope.spawn(|| load.run(world, job));
        let taken = load.under_way().and_then(|()| match take {
            Take::Right => world.peer(uapi::PEER_DISABLE, 0),
            Take::Buffer => Ok(channel.free(world.sides[0].to.handle)?),
        });
        let places = || (0..PLACES).map(|number| job.at(number).1);
        let marked = taken.and_then(|()| places().try_for_each(|at| world.write(1, at, &MARK)));
        load.is_over.store(true, Ordering::Release);
        copies.join().ok().context("A thread panicked")??;
        marked?;
        for at in places() {
            ensure!(world.read(1, at, MARK.len())? == MARK, "{take:?}: a copy wrote after the answer");
        }
        Ok(())
    })?;
    Ok((load.made.into_inner(), load.refused.into_inner()))
}

impl Load {
    /// Waits until as many are under way as may be.
    fn under_way(&self) -> Result<()> {
        let begun = Instant::now();
        while self.made.load(Ordering::Acquire) < 2 * usize::try_from(DEPTH)? {
            ensure!(begun.elapsed() < PATIENCE, "The device copies nothing");
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Copies until it is over, and once as many as may be under way after that.
    fn run(&self, world: &World, job: Job) -> Result<()> {
        let (mut sent, mut done, mut last) = (0_u64, 0_u64, None);
        let mut ended = vec![Completion::default(); usize::try_from(DEPTH)?];
        while last != Some(done) {
            if self.is_over.load(Ordering::Acquire) && last.is_none() {
                last = Some(sent + DEPTH);
            }
            let most = last.unwrap_or(u64::MAX).min(done + DEPTH);
            let next: Vec<Work> = (sent..most).map(|index| world.work(index, job, index % PLACES)).collect();
            if !next.is_empty() {
                match world.sides[job.from].channel.submit(0, &next) {
                    Ok(taken) => sent += taken as u64,
                    Err(Error::Refused { status: Status::Busy, .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            let count = world.sides[job.from].channel.completions(&mut ended, 1, Instant::now() + PATIENCE)?;
            ensure!(count > 0, "The device completed nothing in time");
            for completion in &ended[..count] {
                let is_made = Status::from_raw(completion.status) == Some(Status::Ok);
                if is_made { &self.made } else { &self.refused }.fetch_add(1, Ordering::AcqRel);
            }
            done += count as u64;
        }
        Ok(())
    }
}
