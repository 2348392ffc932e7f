//! What must work: the main job, both directions at once, the path, clean memory.
//!
//! Not here: refusals.

use std::fs::File;
use std::io::{BufReader, Read};
use std::thread;

use anyhow::{Context, Result};
use peergate_guest::uapi::{self, Alloc};
use peergate_guest::{Access, Buffer, Moved, Session, Stream, TransferPath, copy_all, download, fill_all, upload};

use super::{Bench, Case, Row};
use crate::fpga::Cipher;
use crate::job::Job;
use crate::pattern::{Compare, Pattern};

/// Seed of the main job's pattern.
const SEED: u64 = 0x5eed;

pub(super) const CASES: &[(&str, Case)] = &[
    ("main-job", main_job),
    ("both-directions", both_directions),
    ("peer-path", peer_path),
    ("fresh-memory-zero", fresh_memory_zero),
];

/// A file, or a pattern, through the FPGA's cipher; the CPU computes the same.
fn main_job(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let len = match &bench.options.file {
        Some(path) => std::fs::metadata(path).with_context(|| format!("Could not look at {}", path.display()))?.len(),
        None => bench.options.size,
    };
    let open = || -> Result<Box<dyn Read>> {
        Ok(match &bench.options.file {
            Some(path) => Box::new(File::open(path).with_context(|| format!("Could not open {}", path.display()))?),
            None => Box::new(Pattern::new(SEED)),
        })
    };
    let cipher = Cipher { nonce: 1, ..Cipher::EXAMPLE };
    let (gpu, fpga) = (&bench.gpu, &bench.fpga);
    let job = Job { session: &session, gpu, fpga, cipher, meters: bench.options.meters };
    let mut compare = Compare::new(cipher.over(BufReader::new(open()?)));
    let steps = job.run(&mut *open()?, len, &mut compare)?;
    let got = compare.first_difference().map_or_else(|| equal(len), |at| format!("byte {at} differs from the CPU's"));
    let mut rows = vec![Row::new(name, equal(len), got)];
    for step in steps {
        let crosses = ["gpu-to-fpga", "fpga-to-gpu"].contains(&step.name);
        let path = if crosses { bench.path } else { TransferPath::Local };
        rows.push(Row::moved(&format!("{name}/{}", step.name), path, step.moved));
    }
    Ok(rows)
}

fn equal(len: u64) -> String {
    format!("{len} bytes equal to the CPU's ChaCha20")
}

/// Reads `len` bytes at `address` back and answers where they differ from what `expected` yields.
pub(super) fn difference(session: &Session, address: u64, len: u64, expected: impl Read) -> Result<Option<u64>> {
    let mut compare = Compare::new(expected);
    download(&session.stream(), address, &mut compare, len, &mut |_| {})?;
    Ok(compare.first_difference())
}

/// From the GPU to its peer and back at the same time, on two streams.
pub(super) fn both_directions(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let size = bench.options.size;
    let ways = [(&bench.gpu, &bench.peer, 11), (&bench.peer, &bench.gpu, 12)];
    let mut ready = Vec::new();
    for (from, to, seed) in ways {
        session.peer_enable(from.number, to.number, Access::WRITE)?;
        let source = session.alloc(from.number, size, Access::RW)?;
        let destination = session.alloc(to.number, size, Access::RW)?;
        let stream = session.stream().by(from.number);
        upload(&stream, source.iova(), &mut Pattern::new(seed), size, &mut |_| {})?;
        ready.push((source, destination, stream));
    }
    let moved: Vec<Result<Moved, _>> = thread::scope(|scope| {
        let copy = |(source, destination, stream): &(Buffer, Buffer, Stream)| {
            copy_all(stream, destination.iova(), source.iova(), size, &mut |_| {})
        };
        let running: Vec<_> = ready.iter().map(|way| scope.spawn(move || copy(way))).collect();
        running.into_iter().map(|way| way.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let mut rows = Vec::new();
    let mut wrong = Vec::new();
    for (((from, to, seed), (_, destination, _)), moved) in ways.iter().zip(&ready).zip(moved) {
        let way = format!("{}-to-{}", from.name, to.name);
        rows.push(Row::moved(&format!("{name}/{way}"), bench.path, moved?));
        if let Some(at) = difference(&session, destination.iova(), size, Pattern::new(*seed))? {
            wrong.push(format!("{way}: byte {at} differs"));
        }
    }
    let all = format!("2 times {size} bytes as sent");
    let got = if wrong.is_empty() { all.clone() } else { wrong.join(", ") };
    rows.insert(0, Row::new(name, all, got));
    Ok(rows)
}

/// The completion of a peer copy, and what PEER_QUERY says beforehand.
pub(super) fn peer_path(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let (gpu, peer) = (bench.gpu.number, bench.peer.number);
    session.peer_enable(gpu, peer, Access::WRITE)?;
    let source = session.alloc(gpu, 4096, Access::RW)?;
    let destination = session.alloc(peer, 4096, Access::RW)?;
    let promised = session.peer_query(gpu, peer)?.path;
    let taken = session.stream().copy(destination.iova(), source.iova(), 4096)?.wait()?.path;
    let words =
        |promised: TransferPath, taken: TransferPath| format!("promised {}, taken {}", promised.name(), taken.name());
    Ok(vec![Row::new(name, words(bench.path, bench.path), words(promised, taken))])
}

/// What one process leaves in device memory, no process reads: neither the same nor another.
pub(super) fn fresh_memory_zero(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let mut wrong = Vec::new();
    for endpoint in [&bench.gpu, &bench.peer] {
        let len = bench.options.size.min(endpoint.memory_free / 2);
        let mut dirty = |session: &Session, after: &str| -> Result<()> {
            let request =
                Alloc { endpoint: endpoint.number, flags: uapi::READ | uapi::WRITE, length: len, ..Alloc::default() };
            let Alloc { handle, iova, .. } = session.channel().alloc(request)?;
            let found = difference(session, iova, len, std::io::repeat(0))?;
            wrong.extend(found.map(|at| format!("{}: byte {at} is not 0 after {after}", endpoint.name)));
            fill_all(&session.stream(), iova, u64::MAX, len, &mut |_| {})?;
            if after != "FREE by another process" {
                session.channel().free(handle)?;
            }
            Ok(())
        };
        let session = bench.session()?;
        dirty(&session, "others")?;
        dirty(&session, "FREE")?;
        let other = bench.session()?;
        dirty(&other, "FREE by another process")?;
        drop(other);
        dirty(&session, "the end of a process")?;
    }
    let got = if wrong.is_empty() { "zero".to_owned() } else { wrong.join(", ") };
    Ok(vec![Row::new(name, "zero", got)])
}
