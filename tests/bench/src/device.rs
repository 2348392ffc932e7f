//! The device through its socket: copies between two GPUs, and mappings.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use harness::rig::{EndpointKind, endpoint};
use harness::{DriverOptions, GuestRam, InProcessDriver, Rig, RigOptions};
use peergate_guest::uapi::{self, Alloc, Completion, Peer, Work};
use peergate_guest::{Channel, Driver, Error, HostMemory, Status};

use crate::Report;
use crate::cpu::{device_time, own_time};

const GPU_MEMORY: u64 = 160 << 20;
const SMALL: u64 = 32 << 20;
const LARGE: u64 = 64 << 20;
/// Work that is on its way at a time, over all streams.
const DEPTH: usize = 256;
const STREAMS: u32 = 4;
/// Work of one stream that follows on each other.
const BATCH: u32 = 32;
const NAMES: [&str; 9] = [
    "copy_64b_batch32",
    "copy_64b_one_a_chain",
    "copy_4k_batch32",
    "copy_4k_one_a_chain",
    "copy_1m",
    "memcpy_1m",
    "copy_64m",
    "memcpy_64m",
    "map_unmap_control",
];
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn run(report: &mut Report) -> Result<()> {
    if !report.wants(&NAMES) {
        return Ok(());
    }
    let gpus = [0, 1].map(|id| endpoint(id, EndpointKind::Gpu, GPU_MEMORY));
    let rig = Rig::start(&RigOptions { endpoints: gpus.to_vec(), ..RigOptions::default() })?;
    let options = DriverOptions { polling: true, ram: 256 << 20, ..DriverOptions::default() };
    let driver = InProcessDriver::connect(&rig.socket(), options)?;
    let channel = driver.open()?;
    let bench = Bench::new(&*channel)?;
    let small = [("copy_64b_batch32", 64, BATCH), ("copy_64b_one_a_chain", 64, 1)];
    let page = [("copy_4k_batch32", 4096, BATCH), ("copy_4k_one_a_chain", 4096, 1)];
    for (name, len, batch) in small.into_iter().chain(page) {
        report.rate(name, "copies/s", device_time, || bench.copies(len, batch))?;
    }
    let ram = GuestRam::new(2 * LARGE)?;
    let baseline = ram.alloc(2 * LARGE)?;
    for (names, len) in [(["copy_1m", "memcpy_1m"], 1 << 20), (["copy_64m", "memcpy_64m"], LARGE)] {
        // As many bytes a turn for both, over as much memory.
        let turns = LARGE / len;
        let memcpy = || {
            for turn in 0..turns {
                let at = baseline.gpa() + turn * len;
                ram.copy(at + LARGE, at, usize::try_from(len)?)?;
            }
            Ok(LARGE)
        };
        report.bandwidth(names, [device_time, own_time], || bench.stream(len, turns), memcpy)?;
    }
    let mapping: Box<dyn HostMemory> = channel.map(4096, uapi::READ)?;
    report.rate("map_unmap_control", "pairs/s", device_time, || {
        let extra = channel.map(4096, uapi::READ | uapi::WRITE)?;
        channel.unmap(extra.iova(), extra.len())?;
        Ok(1)
    })?;
    drop((mapping, channel, driver));
    rig.finish()??;
    Ok(())
}

struct Bench<'a> {
    channel: &'a dyn Channel,
    from: Alloc,
    to: Alloc,
}

impl<'a> Bench<'a> {
    /// Two buffers of different GPUs, the first of which may write the second's memory.
    fn new(channel: &'a dyn Channel) -> Result<Self> {
        let [from, to] = [0, 1].map(|index| -> Result<Alloc> {
            let endpoint = channel.endpoint(index)?.endpoint;
            let request = Alloc { endpoint, flags: uapi::READ | uapi::WRITE, length: 2 * LARGE, ..Alloc::default() };
            Ok(channel.alloc(request)?)
        });
        let (from, to) = (from?, to?);
        let peer = Peer {
            op: uapi::PEER_ENABLE,
            accessor: from.endpoint,
            owner: to.endpoint,
            rights: uapi::READ | uapi::WRITE,
            ..Peer::default()
        };
        channel.peer(peer)?;
        let bench = Self { channel, from, to };
        // Memory that nobody has touched has no pages yet.
        bench.stream(1 << 20, (2 * LARGE) >> 20)?;
        Ok(bench)
    }

    /// Many small copies, `batch` in a chain.
    fn copies(&self, len: u64, batch: u32) -> Result<u64> {
        const TOTAL: u64 = 1 << 14;
        let (mut next, mut done) = (0u64, 0u64);
        let mut work = Vec::with_capacity(batch as usize);
        let mut ended = [Completion::default(); DEPTH];
        while done < TOTAL {
            while next < TOTAL && next - done + u64::from(batch) <= DEPTH as u64 {
                work.clear();
                for n in next..next + u64::from(batch) {
                    work.push(self.copy(n, n * len % SMALL, len));
                }
                match self.channel.submit(0, &work) {
                    Ok(taken) => next += taken as u64,
                    Err(Error::Refused { status: Status::Busy, .. }) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            done += self.collect(&mut ended)? as u64;
        }
        Ok(TOTAL)
    }

    /// `turns` copies of `len` bytes that together walk over the buffers.
    fn stream(&self, len: u64, turns: u64) -> Result<u64> {
        let mut ended = [Completion::default(); DEPTH];
        let work: Vec<Work> = (0..turns).map(|n| self.copy(n, n * len, len)).collect();
        let (mut sent, mut done) = (0, 0);
        while done < work.len() {
            if sent < work.len() {
                match self.channel.submit(0, &work[sent..]) {
                    Ok(taken) => sent += taken,
                    Err(Error::Refused { status: Status::Busy, .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            done += self.collect(&mut ended)?;
        }
        Ok(len * turns)
    }

    fn copy(&self, n: u64, offset: u64, len: u64) -> Work {
        Work {
            opcode: uapi::WORK_COPY,
            stream: u32::try_from(n / u64::from(BATCH) % u64::from(STREAMS)).unwrap_or(0),
            initiator: self.from.endpoint,
            cookie: n,
            source: self.from.iova + offset,
            destination: self.to.iova + offset,
            length: len,
            ..Work::default()
        }
    }

    fn collect(&self, ended: &mut [Completion]) -> Result<usize> {
        let count = self.channel.completions(ended, 1, Instant::now() + PATIENCE)?;
        ensure!(count > 0, "The device completed nothing in time");
        for completion in &ended[..count] {
            let status = Status::from_raw(completion.status).context("A known status")?;
            ensure!(status == Status::Ok, "A copy ended with {}", status.name());
        }
        Ok(count)
    }
}
