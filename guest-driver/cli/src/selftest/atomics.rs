//! Atomic operations: what they do, that none is lost, and what they are refused.
//!
//! Not here: those between GPUs ([`super::gpus`]).

use std::thread;

use anyhow::Result;
use peergate_guest::{Access, AtomicOp, FaultReason, Session, Status, Stream, Width};

use super::witness::{Refusal, ends_with, refused};
use super::{Bench, Case, Row};

const PAGE: u64 = 4096;
/// Additions of each who adds.
const EACH: u64 = 500;
/// How many are under way at a time.
const AT_ONCE: usize = 50;

pub(super) const CASES: &[(&str, Case)] = &[
    ("atomic-results", results),
    ("atomic-all-count", all_count),
    ("atomic-misaligned", misaligned),
    ("atomic-read-only", read_only),
    ("atomic-right-missing", right_missing),
];

/// Every operation on words of both lengths, in guest memory and in each device's.
fn results(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let host = session.map(PAGE, Access::RW)?;
    let on_gpu = session.alloc(bench.gpu.number, PAGE, Access::RW)?;
    let on_peer = session.alloc(bench.peer.number, PAGE, Access::RW)?;
    let places = [
        ("guest memory", bench.gpu.number, host.iova() + 16),
        (&*bench.gpu.name, bench.gpu.number, on_gpu.iova() + 16),
        (&*bench.peer.name, bench.peer.number, on_peer.iova() + 16),
    ];
    let mut wrong = Vec::new();
    for (place, by, at) in places {
        if !is_able(&session, by, at)? {
            continue;
        }
        for (width, most) in [(Width::Four, u64::from(u32::MAX)), (Width::Eight, u64::MAX)] {
            let steps = [
                (AtomicOp::Swap(most), 0),
                (AtomicOp::Add(6), most),
                (AtomicOp::CompareSwap { expected: 6, new: 7 }, 5),
                (AtomicOp::CompareSwap { expected: 5, new: 8 }, 5),
                (AtomicOp::Swap(0), 8),
            ];
            for (op, expected) in steps {
                let was = session.stream().by(by).atomic(at, width, op)?.wait()?.value;
                if was != expected {
                    wrong.push(format!("{op:?} in {place} found {was:#x}, not {expected:#x}"));
                }
            }
        }
    }
    let all = "each finds what the one before has left";
    let got = if wrong.is_empty() { all.to_owned() } else { wrong.join(", ") };
    Ok(vec![Row::new(name, all, got)])
}

/// Whether there are atomic operations on a word: memory behind a BAR has none, nor has a GPU whose driver compiles no programs.
pub(super) fn is_able(session: &Session, by: u32, at: u64) -> Result<bool> {
    let tried = session.stream().by(by).atomic(at, Width::Eight, AtomicOp::Add(0))?.outcome(session.patience())?;
    Ok(if tried.status == Status::Unsupp { false } else { tried.ok().map(|_| true)? })
}

/// Adds to a word as each of these, all at the same time; answers what it is in the end.
pub(super) fn add_together(session: &Session, at: u64, all: &[u32]) -> Result<u64> {
    let one = |stream: Stream| -> Result<()> {
        let work = [stream.atomic_work(at, Width::Eight, AtomicOp::Add(1)); AT_ONCE];
        for _ in 0..EACH / AT_ONCE as u64 {
            let deadline = session.patience();
            for ticket in session.submit_all(&work)? {
                ticket.outcome(deadline)?.ok()?;
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = all.iter().map(|by| scope.spawn(move || one(session.stream().by(*by)))).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    Ok(session.stream().atomic(at, Width::Eight, AtomicOp::Add(0))?.wait()?.value)
}

/// What so many who add make together.
pub(super) fn sum(of: u64) -> u64 {
    EACH * of
}

/// Both add to the same word at the same time, in the GPU's memory and in the guest's: none is lost.
fn all_count(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let (gpu, peer) = (bench.gpu.number, bench.peer.number);
    session.peer_enable(peer, gpu, Access::RW)?;
    let (memory, host) = (session.alloc(gpu, PAGE, Access::RW)?, session.map(PAGE, Access::RW)?);
    let (mut expected, mut got) = (Vec::new(), Vec::new());
    for (place, at) in [(&*bench.gpu.name, memory.iova()), ("guest memory", host.iova())] {
        let words = |value: u64| format!("{value} of {} additions in {place}", sum(4));
        if is_able(&session, gpu, at)? {
            expected.push(words(sum(4)));
            got.push(words(add_together(&session, at, &[gpu, peer, gpu, peer])?));
        }
    }
    Ok(vec![Row::new(name, expected.join(", "), got.join(", "))])
}

fn misaligned(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let buffer = session.alloc(bench.gpu.number, PAGE, Access::RW)?;
    let stream = session.stream();
    Ok(vec![ends_with(
        name,
        &session,
        stream.atomic_work(buffer.iova() + 4, Width::Eight, AtomicOp::Add(1)),
        Status::Inval,
    )?])
}

fn read_only(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let gpu = bench.gpu.number;
    let buffer = session.alloc(gpu, PAGE, Access::READ)?;
    let work = session.stream().by(gpu).atomic_work(buffer.iova(), Width::Four, AtomicOp::Swap(1));
    let (address, access, reason) = (buffer.iova(), Access::RW, FaultReason::Permission);
    let expected = Refusal { status: Status::Fault, reason, address, access, accessor: gpu };
    Ok(vec![refused(name, &session, work, &expected)?])
}

/// The right to write alone does not do: what was there is told.
fn right_missing(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let (gpu, peer) = (bench.gpu.number, bench.peer.number);
    session.peer_enable(gpu, peer, Access::WRITE)?;
    let buffer = session.alloc(peer, PAGE, Access::RW)?;
    let work = session.stream().by(gpu).atomic_work(buffer.iova() + 8, Width::Eight, AtomicOp::Add(1));
    let (address, access, reason) = (buffer.iova() + 8, Access::RW, FaultReason::Peer);
    let expected = Refusal { status: Status::Denied, reason, address, access, accessor: gpu };
    Ok(vec![refused(name, &session, work, &expected)?])
}
