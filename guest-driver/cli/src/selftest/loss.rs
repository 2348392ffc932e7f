//! What is owed when a device loses its state: work in flight ends as LOST, requests of an open of before as STALE, nothing hangs, and a new open
//! works.
//!
//! Not here: making the device lose it. Somebody else does that, once told that work is in flight.

use std::collections::{BTreeSet, VecDeque};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use peergate_guest::{Access, Error, Session, Status, Ticket, copy_all, upload};

use super::moves::difference;
use super::{Bench, Row};
use crate::pattern::Pattern;

/// Copies that are in flight at any time.
const FLIGHT: usize = 8;
/// How long the device may keep its state.
const PATIENCE: Duration = Duration::from_secs(120);
const SEED: u64 = 0x1055;

/// Keeps copies and requests in flight until the device loses its state, calls `in_flight` when they are, and tries afterwards what must still
/// work.
pub(super) fn until_loss(bench: &Bench<'_>, in_flight: &mut dyn FnMut()) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let (gpu, fpga, size) = (bench.gpu.number, bench.fpga.number, bench.options.size);
    session.peer_enable(gpu, fpga, Access::WRITE)?;
    let source = session.alloc(gpu, size, Access::RW)?;
    let destination = session.alloc(fpga, size, Access::RW)?;
    let _pinned = session.map(size, Access::RW)?;
    let stream = session.stream().by(gpu);
    let until = Instant::now() + PATIENCE;
    let copy = || stream.copy(destination.iova(), source.iova(), size);

    let (work, request) = thread::scope(|scope| {
        let asking = scope.spawn(|| ask(&session, gpu, until));
        let work = copies(&copy, until, in_flight);
        (work, asking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let stale = |error: Error| error.status().map_or_else(|| error.to_string(), |status| status.name().to_owned());
    let refused = |result: Result<(), Error>| result.map_or_else(stale, |()| "OK".to_owned());
    let late = copy().and_then(|ticket| ticket.outcome(session.patience()));
    let late = late.map_or_else(stale, |outcome| outcome.status.name().to_owned());
    Ok(vec![
        Row::new("loss/work-in-flight", "LOST", work?),
        Row::new("loss/request-in-flight", "STALE", stale(request?)),
        Row::new("loss/work-of-the-old-open", "LOST", late),
        Row::new("loss/endpoints-of-the-old-open", "STALE", refused(session.endpoints().map(drop))),
        Row::new("loss/alloc-of-the-old-open", "STALE", refused(session.alloc(gpu, size, Access::RW).map(drop))),
        Row::new("loss/map-of-the-old-open", "STALE", refused(session.map(size, Access::RW).map(drop))),
        Row::new("loss/new-open", "works", new_open(bench)?),
    ])
}

/// Keeps copies in flight until one does not end well, and answers how that one and all behind it ended.
fn copies(copy: &dyn Fn() -> Result<Ticket, Error>, until: Instant, in_flight: &mut dyn FnMut()) -> Result<String> {
    let mut flight: VecDeque<Ticket> = (0..FLIGHT).map(|_| copy()).collect::<Result<_, _>>()?;
    in_flight();
    let mut ended = BTreeSet::new();
    while let Some(ticket) = flight.pop_front() {
        let status = ticket.outcome(until + PATIENCE)?.status;
        if status == Status::Ok && ended.is_empty() {
            ensure!(Instant::now() < until, "The device kept its state for {} s", PATIENCE.as_secs());
            flight.push_back(copy()?);
        } else {
            ended.insert(status.name());
        }
    }
    Ok(ended.into_iter().collect::<Vec<_>>().join(", "))
}

/// Allocates and frees until that is refused, and answers how.
fn ask(session: &Session, endpoint: u32, until: Instant) -> Result<Error> {
    loop {
        if let Err(error) = session.alloc(endpoint, 4096, Access::RW) {
            return Ok(error);
        }
        ensure!(Instant::now() < until, "The device kept its state for {} s", PATIENCE.as_secs());
    }
}

/// Opens the device anew and moves bytes.
fn new_open(bench: &Bench<'_>) -> Result<String> {
    let session = bench.session()?;
    let (gpu, fpga, size) = (bench.gpu.number, bench.fpga.number, bench.options.size);
    session.peer_enable(gpu, fpga, Access::WRITE)?;
    let source = session.alloc(gpu, size, Access::RW)?;
    let destination = session.alloc(fpga, size, Access::RW)?;
    let stream = session.stream().by(gpu);
    upload(&stream, source.iova(), &mut Pattern::new(SEED), size, &mut |_| {})?;
    copy_all(&stream, destination.iova(), source.iova(), size, &mut |_| {})?;
    let different = difference(&session, destination.iova(), size, Pattern::new(SEED))?;
    Ok(different.map_or_else(|| "works".to_owned(), |at| format!("byte {at} differs")))
}
