//! What must be refused: addresses, rights, handles, lengths.
//!
//! Not here: refusals between processes ([`super::isolation`]) and of registers ([`super::registers`]).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::Result;
use peergate_guest::{Access, Buffer, FaultReason, HostBuffer, Session, Status, Stream, Ticket, download};

use super::moves::difference;
use super::witness::{Refusal, ends_with, refused, refused_free, status_of};
use super::{Bench, Case, Row};
use crate::pattern::Compare;

const PAGE: u64 = 4096;
/// Streams that copy while a right is withdrawn.
const LOADS: usize = 2;

pub(super) const CASES: &[(&str, Case)] = &[
    ("unmapped-read", unmapped_read),
    ("unmapped-write", unmapped_write),
    ("write-to-read-only", write_to_read_only),
    ("read-of-write-only", read_of_write_only),
    ("write-to-read-only-buffer", write_to_read_only_buffer),
    ("past-the-end", past_the_end),
    ("unknown-endpoint", unknown_endpoint),
    ("peer-right-missing", peer_right_missing),
    ("peer-right-one-way", peer_right_one_way),
    ("peer-read-only", peer_read_only),
    ("peer-right-withdrawn", peer_right_withdrawn),
    ("peer-right-withdrawn-under-load", peer_right_withdrawn_under_load),
    ("peer-right-twice", peer_right_twice),
    ("freed-handle", freed_handle),
    ("freed-address", freed_address),
    ("zero-length", zero_length),
    ("length-overflow", length_overflow),
];

/// Host memory and GPU memory, and a stream on which the GPU acts.
struct Scene {
    session: Session,
    gpu: u32,
    stream: Stream,
    host: HostBuffer,
    memory: Buffer,
}

impl Scene {
    fn new(bench: &Bench<'_>) -> Result<Self> {
        Self::with(bench, Access::RW)
    }

    /// With host memory that endpoints may use as `access` says.
    fn with(bench: &Bench<'_>, access: Access) -> Result<Self> {
        let session = bench.session()?;
        let gpu = bench.gpu.number;
        let host = session.map(PAGE, access)?;
        let memory = session.alloc(gpu, PAGE, Access::RW)?;
        let stream = session.stream().by(gpu);
        Ok(Self { session, gpu, stream, host, memory })
    }

    /// The first address behind everything that is mapped.
    fn hole(&self) -> u64 {
        (self.host.iova() + self.host.len()).max(self.memory.iova() + self.memory.len())
    }

    fn refusal(&self, reason: FaultReason, address: u64, access: Access) -> Refusal {
        Refusal { status: Status::Fault, reason, address, access, accessor: self.gpu }
    }
}

fn unmapped_read(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let scene = Scene::new(bench)?;
    let expected = scene.refusal(FaultReason::Mapping, scene.hole(), Access::READ);
    let work = scene.stream.copy_work(scene.memory.iova(), scene.hole(), 64);
    Ok(vec![refused(name, &scene.session, work, &expected)?])
}

fn unmapped_write(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let scene = Scene::new(bench)?;
    let expected = scene.refusal(FaultReason::Mapping, scene.hole(), Access::WRITE);
    let work = scene.stream.fill_work(scene.hole(), 1, 64);
    Ok(vec![refused(name, &scene.session, work, &expected)?])
}

fn write_to_read_only(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let scene = Scene::with(bench, Access::READ)?;
    let expected = scene.refusal(FaultReason::Permission, scene.host.iova(), Access::WRITE);
    let work = scene.stream.copy_work(scene.host.iova(), scene.memory.iova(), 64);
    Ok(vec![refused(name, &scene.session, work, &expected)?])
}

fn read_of_write_only(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let scene = Scene::with(bench, Access::WRITE)?;
    let expected = scene.refusal(FaultReason::Permission, scene.host.iova() + 8, Access::READ);
    let work = scene.stream.copy_work(scene.memory.iova(), scene.host.iova() + 8, 64);
    Ok(vec![refused(name, &scene.session, work, &expected)?])
}

fn write_to_read_only_buffer(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let scene = Scene::new(bench)?;
    let buffer = scene.session.alloc(scene.gpu, PAGE, Access::READ)?;
    let expected = scene.refusal(FaultReason::Permission, buffer.iova(), Access::WRITE);
    let work = scene.stream.fill_work(buffer.iova(), 1, 8);
    Ok(vec![refused(name, &scene.session, work, &expected)?])
}

/// One byte too many: refused at exactly that byte; nothing is written, neither before it nor into the memory of another process.
fn past_the_end(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let (before, after) = (Scene::new(bench)?, bench.session()?);
    let session = bench.session()?;
    let gpu = bench.gpu.number;
    // The only mapping of its address space, so that nothing is mapped behind it.
    let buffer = session.alloc(gpu, PAGE, Access::RW)?;
    let behind = after.alloc(gpu, PAGE, Access::RW)?;
    let end = buffer.iova() + buffer.len();
    let expected = Refusal {
        status: Status::Fault,
        reason: FaultReason::Mapping,
        address: end,
        access: Access::WRITE,
        accessor: gpu,
    };
    let stream = session.stream().by(gpu);
    let refused = refused(name, &session, stream.fill_work(buffer.iova(), u64::MAX, buffer.len() + 1), &expected)?;
    let mut written = Vec::new();
    for (whose, session, buffer) in [
        ("the buffer itself", &session, &buffer),
        ("an older process", &before.session, &before.memory),
        ("a younger process", &after, &behind),
    ] {
        let mut compare = Compare::new(std::io::repeat(0));
        download(&session.stream(), buffer.iova(), &mut compare, buffer.len(), &mut |_| {})?;
        written.extend(compare.first_difference().map(|at| format!("byte {at} of {whose}")));
    }
    let got = if written.is_empty() { "nothing".to_owned() } else { written.join(", ") };
    Ok(vec![refused, Row::new(&format!("{name}/written"), "nothing", got)])
}

/// Work in the name of an endpoint that the guest does not have.
fn unknown_endpoint(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    const NOBODY: u32 = 0x7ffe;
    let scene = Scene::new(bench)?;
    let expected = Refusal {
        status: Status::Fault,
        reason: FaultReason::Domain,
        address: 0,
        access: Access::NONE,
        accessor: NOBODY,
    };
    let work = scene.session.stream().by(NOBODY).fill_work(scene.memory.iova(), 1, 8);
    Ok(vec![refused(name, &scene.session, work, &expected)?])
}

/// Memory of the GPU and of its peer without any right between them.
struct Peers {
    session: Session,
    gpu: u32,
    peer: u32,
    on_gpu: Buffer,
    on_peer: Buffer,
}

impl Peers {
    fn new(bench: &Bench<'_>) -> Result<Self> {
        let session = bench.session()?;
        let (gpu, peer) = (bench.gpu.number, bench.peer.number);
        let on_gpu = session.alloc(gpu, PAGE, Access::RW)?;
        let on_peer = session.alloc(peer, PAGE, Access::RW)?;
        Ok(Self { session, gpu, peer, on_gpu, on_peer })
    }

    /// The GPU writes to its peer, and must not.
    fn gpu_denied(&self, name: &str) -> Result<Row> {
        let address = self.on_peer.iova() + 64;
        let work = self.session.stream().by(self.gpu).copy_work(address, self.on_gpu.iova(), 64);
        refused(name, &self.session, work, &denied(address, Access::WRITE, self.gpu))
    }
}

fn denied(address: u64, access: Access, accessor: u32) -> Refusal {
    Refusal { status: Status::Denied, reason: FaultReason::Peer, address, access, accessor }
}

pub(super) fn peer_right_missing(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    Ok(vec![Peers::new(bench)?.gpu_denied(name)?])
}

pub(super) fn peer_right_one_way(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let peers = Peers::new(bench)?;
    peers.session.peer_enable(peers.gpu, peers.peer, Access::RW)?;
    let address = peers.on_gpu.iova();
    let work = peers.session.stream().by(peers.peer).copy_work(address, peers.on_peer.iova(), 64);
    Ok(vec![refused(name, &peers.session, work, &denied(address, Access::WRITE, peers.peer))?])
}

pub(super) fn peer_read_only(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let peers = Peers::new(bench)?;
    peers.session.peer_enable(peers.gpu, peers.peer, Access::READ)?;
    let stream = peers.session.stream().by(peers.gpu);
    stream.copy(peers.on_gpu.iova(), peers.on_peer.iova(), 64)?.wait()?;
    Ok(vec![peers.gpu_denied(name)?])
}

pub(super) fn peer_right_withdrawn(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let peers = Peers::new(bench)?;
    peers.session.peer_enable(peers.gpu, peers.peer, Access::RW)?;
    let stream = peers.session.stream().by(peers.gpu);
    stream.copy(peers.on_peer.iova(), peers.on_gpu.iova(), 64)?.wait()?;
    peers.session.peer_disable(peers.gpu, peers.peer, Access::WRITE)?;
    Ok(vec![peers.gpu_denied(name)?])
}

/// The right is withdrawn while copies run: once that is answered, nothing is written any more, and what comes is refused.
pub(super) fn peer_right_withdrawn_under_load(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let (gpu, peer, len) = (bench.gpu.number, bench.peer.number, bench.options.size / 8);
    let (from, to) = (session.alloc(gpu, len, Access::RW)?, session.alloc(peer, len, Access::RW)?);
    session.peer_enable(gpu, peer, Access::WRITE)?;
    let (made, is_answered) = (AtomicUsize::new(0), AtomicBool::new(false));
    // Until one is refused, at the latest among those that come after the answer.
    let copies = |stream: Stream| -> Result<Status> {
        loop {
            let is_last = is_answered.load(Ordering::Acquire);
            let tickets = session.submit_all(&[stream.copy_work(to.iova(), from.iova(), len); 4])?;
            let deadline = session.patience();
            for ticket in tickets {
                match ticket.outcome(deadline)?.status {
                    Status::Ok => made.fetch_add(1, Ordering::AcqRel),
                    status => return Ok(status),
                };
            }
            if is_last {
                return Ok(Status::Ok);
            }
        }
    };
    let (ends, written) = thread::scope(|scope| {
        let streams = [0; LOADS].map(|_| session.stream().by(gpu));
        let threads = streams.map(|stream| scope.spawn(|| copies(stream)));
        let deadline = session.patience();
        while made.load(Ordering::Acquire) < 2 * LOADS && Instant::now() < deadline {
            thread::yield_now();
        }
        let withdrawn = session.peer_disable(gpu, peer, Access::WRITE);
        is_answered.store(true, Ordering::Release);
        let marked = session.stream().by(peer).fill(to.iova(), u64::MAX, len).and_then(Ticket::wait);
        let ends = threads.map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        withdrawn?;
        marked?;
        Ok::<_, anyhow::Error>((ends, difference(&session, to.iova(), len, std::io::repeat(0xff))?))
    })?;
    let mut got = Vec::new();
    for end in ends {
        got.push(end?.name().to_owned());
    }
    got.push(written.map_or_else(|| "nothing".to_owned(), |at| format!("byte {at}")));
    let words =
        |got: &[String]| format!("copies end {}, and write {} after the answer", got[..LOADS].join(" "), got[LOADS]);
    let denied = Status::Denied.name().to_owned();
    let expected = [denied.clone(), denied, "nothing".to_owned()];
    Ok(vec![Row::new(name, words(&expected), words(&got))])
}

fn peer_right_twice(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let peers = Peers::new(bench)?;
    peers.session.peer_enable(peers.gpu, peers.peer, Access::RW)?;
    let got = status_of(peers.session.peer_enable(peers.gpu, peers.peer, Access::READ))?;
    Ok(vec![Row::new(name, Status::Already.name(), got)])
}

fn freed_handle(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let scene = Scene::new(bench)?;
    let buffer = scene.session.alloc(scene.gpu, PAGE, Access::RW)?;
    let handle = buffer.handle();
    buffer.free()?;
    Ok(vec![refused_free(name, &scene.session, handle, Status::Stale, FaultReason::Stale)?])
}

fn freed_address(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let scene = Scene::new(bench)?;
    let buffer = scene.session.alloc(scene.gpu, PAGE, Access::RW)?;
    let address = buffer.iova();
    scene.stream.copy(address, scene.host.iova(), 64)?.wait()?;
    buffer.free()?;
    let work = scene.stream.copy_work(address, scene.host.iova(), 64);
    let expected = scene.refusal(FaultReason::Mapping, address, Access::WRITE);
    Ok(vec![refused(name, &scene.session, work, &expected)?])
}

fn zero_length(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let scene = Scene::new(bench)?;
    let work = scene.stream.copy_work(scene.memory.iova(), scene.host.iova(), 0);
    Ok(vec![ends_with(name, &scene.session, work, Status::Inval)?])
}

fn length_overflow(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let scene = Scene::new(bench)?;
    let work = scene.stream.copy_work(scene.memory.iova(), scene.host.iova(), u64::MAX);
    Ok(vec![ends_with(name, &scene.session, work, Status::Range)?])
}
