//! What holds between the GPU and its peer, once more between two GPUs, where the device has two.
//!
//! Not here: what is tried.

use anyhow::Result;
use peergate_guest::{Access, AtomicOp, EndpointKind, PathReason, TransferPath, Width};

use super::atomics::{add_together, is_able, sum};
use super::{Bench, Case, Row, moves, refusals};

pub(super) const CASES: &[(&str, Case)] = &[
    ("gpus/both-directions", |bench, name| between(bench, name, moves::both_directions)),
    ("gpus/peer-path", |bench, name| between(bench, name, moves::peer_path)),
    ("gpus/fresh-memory-zero", |bench, name| between(bench, name, moves::fresh_memory_zero)),
    ("gpus/peer-right-missing", |bench, name| between(bench, name, refusals::peer_right_missing)),
    ("gpus/peer-right-one-way", |bench, name| between(bench, name, refusals::peer_right_one_way)),
    ("gpus/peer-read-only", |bench, name| between(bench, name, refusals::peer_read_only)),
    ("gpus/peer-right-withdrawn", |bench, name| between(bench, name, refusals::peer_right_withdrawn)),
    ("gpus/atomics", |bench, name| between(bench, name, atomics)),
    ("gpus/peer-right-withdrawn-under-load", |bench, name| {
        between(bench, name, refusals::peer_right_withdrawn_under_load)
    }),
];

/// Both add to the same words, one in the memory of each, at the same time: none is lost, and each word is reached as the device promises.
fn atomics(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let both = [&bench.gpu, &bench.peer];
    let (mut expected, mut got) = (Vec::new(), Vec::new());
    for (owner, other) in [(both[0], both[1]), (both[1], both[0])] {
        session.peer_enable(other.number, owner.number, Access::RW)?;
        let memory = session.alloc(owner.number, 4096, Access::RW)?;
        let word = memory.iova();
        if !is_able(&session, owner.number, word)? {
            continue;
        }
        let value = add_together(&session, word, &both.map(|gpu| gpu.number))?;
        let taken = session.stream().by(other.number).atomic(word, Width::Eight, AtomicOp::Add(1))?.wait()?;
        // Without native atomics between the two, the owner makes it.
        let is_native = taken.reason != PathReason::EngineCannot;
        let path = if is_native { session.peer_query(other.number, owner.number)?.path } else { TransferPath::Staged };
        let words = |value: u64, path: TransferPath| {
            format!("{value} of {} additions in {}, by {} {}", sum(2), owner.name, other.name, path.name())
        };
        expected.push(words(sum(2), path));
        got.push(words(value, taken.path));
    }
    Ok(vec![Row::new(name, expected.join("; "), got.join("; "))])
}

/// Tries a case between the first two GPUs; no rows without a second one. The path is to be the one that the device promises.
fn between(bench: &Bench<'_>, name: &str, case: Case) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let endpoints = session.endpoints()?;
    let mut gpus = endpoints.into_iter().filter(|endpoint| endpoint.kind == Some(EndpointKind::Gpu));
    let Some(peer) = gpus.find(|other| other.number != bench.gpu.number) else { return Ok(Vec::new()) };
    let path = session.peer_query(bench.gpu.number, peer.number)?.path;
    drop(session);
    let (gpu, fpga) = (bench.gpu.clone(), bench.fpga.clone());
    case(&Bench { driver: bench.driver, gpu, fpga, peer, path, options: bench.options }, name)
}
