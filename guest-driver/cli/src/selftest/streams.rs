//! Order, errors, teardown under load and credits.
//!
//! Not here: what single transfers must be refused for.

use std::collections::HashSet;
use std::time::Instant;

use anyhow::{Result, ensure};
use peergate_guest::uapi::Completion;
use peergate_guest::{Access, Error, FaultReason, HostBuffer, Session, Status, Ticket};

use super::witness::{Refusal, refused};
use super::{Bench, Case, Row};

const PAGE: u64 = 4096;
/// How many long copies stand before the short pieces of work.
const LONG_COUNT: usize = 16;
/// How often memory is unmapped under a copy.
const UNMAP_ROUNDS: usize = 8;

pub(super) const CASES: &[(&str, Case)] = &[
    ("stream-error", stream_error),
    ("stream-independent", stream_independent),
    ("unmap-in-use", unmap_in_use),
    ("credits", credits),
];

/// The name of every outcome, in order.
fn outcomes(session: &Session, tickets: &[Ticket]) -> Result<String> {
    let deadline = session.patience();
    let names: Result<Vec<&str>, Error> =
        tickets.iter().map(|ticket| Ok(ticket.outcome(deadline)?.status.name())).collect();
    Ok(names?.join(" "))
}

/// An error stops its stream until it is reset.
fn stream_error(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let buffer = session.alloc(bench.gpu.number, PAGE, Access::RW)?;
    let stream = session.stream();
    let good = stream.fill_work(buffer.iova(), 1, 8);
    let bad = stream.fill_work(buffer.iova() + buffer.len() + (1 << 30), 1, 8);
    let first = outcomes(&session, &session.submit_all(&[good, bad, good, good])?)?;
    let later = outcomes(&session, &[session.submit(good)?])?;
    stream.reset()?;
    let reset = outcomes(&session, &[session.submit(good)?])?;
    let words = |first: &str, later: &str, reset: &str| format!("{first}, then {later}, after the reset {reset}");
    Ok(vec![Row::new(name, words("OK FAULT CANCELLED CANCELLED", "CANCELLED", "OK"), words(&first, &later, &reset))])
}

/// An error leaves other streams alone.
fn stream_independent(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let buffer = session.alloc(bench.gpu.number, PAGE, Access::RW)?;
    let (broken, whole) = (session.stream(), session.stream());
    let bad = broken.fill_work(buffer.iova() + buffer.len() + (1 << 30), 1, 8);
    let good = whole.fill_work(buffer.iova(), 1, 8);
    let got = outcomes(&session, &session.submit_all(&[bad, good, bad, good])?)?;
    Ok(vec![Row::new(name, "FAULT OK CANCELLED OK", got)])
}

/// UNMAP under load: once it has answered, the memory does not change any more, and its address faults.
fn unmap_in_use(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let len = bench.options.size.saturating_mul(2).min(bench.gpu.memory_free / 4);
    let source = session.alloc(bench.gpu.number, len, Access::RW)?;
    session.stream().fill(source.iova(), u64::MAX, len)?.wait()?;
    let mut got = "not written any more".to_owned();
    let mut address = 0;
    for _ in 0..UNMAP_ROUNDS {
        let mut host = session.map(len, Access::RW)?;
        address = host.iova();
        // A stream of its own each time: the copies that come after UNMAP put it into error.
        let copy = session.stream().by(bench.gpu.number).copy_work(address, source.iova(), len);
        let tickets = session.submit_all(&[copy, copy])?;
        await_first_byte(&session, &host)?;
        host.unmap()?;
        // Bytes go up from the first address on: a copy that still ran would reach the last ones after this.
        host.write_at(len - 8, &[0; 8])?;
        let ended = outcomes(&session, &tickets)?;
        let mut last = [0; 8];
        host.read_at(len - 8, &mut last)?;
        if last != [0; 8] {
            got = "written after UNMAP had answered".to_owned();
        } else if !ended.split(' ').all(|status| ["OK", "FAULT", "CANCELLED"].contains(&status)) {
            got = format!("work ended with {ended}");
        }
    }
    let quiet = Row::new(name, "not written any more", got);
    let gpu = bench.gpu.number;
    let expected =
        Refusal { status: Status::Fault, reason: FaultReason::Mapping, address, access: Access::WRITE, accessor: gpu };
    let after = session.stream().by(gpu).fill_work(address, 1, 8);
    Ok(vec![quiet, refused(&format!("{name}/after"), &session, after, &expected)?])
}

/// Waits until a copy has begun to write into zeroed memory.
fn await_first_byte(session: &Session, host: &HostBuffer) -> Result<()> {
    let deadline = session.patience();
    let mut first = [0; 1];
    while first == [0] {
        ensure!(Instant::now() < deadline, "The copy did not begin in time");
        std::thread::yield_now();
        host.read_at(0, &mut first)?;
    }
    Ok(())
}

/// More work than a stream has credits for: what is too much ends as BUSY, and everything taken completes exactly once.
fn credits(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let gpu = bench.gpu.number;
    let len = bench.options.size.saturating_mul(4).min(bench.gpu.memory_free / 4);
    let (a, b) = (session.alloc(gpu, len, Access::RW)?, session.alloc(gpu, len, Access::RW)?);
    let stream = session.stream().by(gpu);
    let limit = session.limits().stream_credits.min(session.limits().max_in_flight);
    let count = usize::try_from(limit)?.saturating_mul(2).saturating_add(LONG_COUNT);
    let mut work = vec![stream.copy_work(a.iova(), b.iova(), len); LONG_COUNT];
    work.resize(count, stream.fill_work(a.iova(), 1, 8));
    for (cookie, item) in (1..).zip(&mut work) {
        item.cookie = cookie;
    }
    let mut tally = Tally::default();
    let mut sent = 0;
    while sent < work.len() && !tally.submit_busy {
        match session.channel().submit(0, &work[sent..]) {
            Ok(taken) => sent += taken,
            Err(error) if error.status() == Some(Status::Busy) => tally.submit_busy = true,
            Err(error) => return Err(error.into()),
        }
    }
    tally.collect(&session, sent)?;
    let again = stream.fill(a.iova(), 1, 8)?.outcome(session.patience())?.status;
    let expected = "every piece completes once, some BUSY, the next OK";
    Ok(vec![Row::new(name, expected, tally.words(sent, again))])
}

/// Completions of a burst.
#[derive(Default)]
struct Tally {
    seen: HashSet<u64>,
    twice: usize,
    busy: usize,
    other: Vec<u32>,
    submit_busy: bool,
}

impl Tally {
    /// Takes the completions of `sent` pieces of work, whose cookies count from 1.
    fn collect(&mut self, session: &Session, sent: usize) -> Result<()> {
        let deadline = session.patience();
        let mut room = vec![Completion::default(); 256];
        let mut taken = 0;
        while taken < sent {
            let got = session.channel().completions(&mut room, 1, deadline)?;
            ensure!(got > 0 || Instant::now() < deadline, "{taken} of {sent} pieces of work completed in time");
            for completion in &room[..got] {
                self.twice += usize::from(!self.seen.insert(completion.cookie));
                match Status::from_raw(completion.status) {
                    Some(Status::Ok) => {}
                    Some(Status::Busy) => self.busy += 1,
                    _ => self.other.push(completion.status),
                }
            }
            taken += got;
        }
        self.seen.retain(|cookie| *cookie >= 1 && usize::try_from(*cookie).is_ok_and(|cookie| cookie <= sent));
        Ok(())
    }

    fn words(&self, sent: usize, again: Status) -> String {
        if self.twice > 0 || self.seen.len() != sent {
            format!("{} of {sent} pieces complete, {} of them more than once", self.seen.len(), self.twice)
        } else if let Some(status) = self.other.first() {
            format!("{} pieces end with neither OK nor BUSY, the first with {status:#x}", self.other.len())
        } else if self.busy == 0 && !self.submit_busy {
            format!("all {sent} pieces are taken, none BUSY")
        } else {
            format!("every piece completes once, some BUSY, the next {}", again.name())
        }
    }
}
