//! A slice of each of two GPUs behind one device, which a front-end in this process drives.
//!
//! Not here: what is measured.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use harness::rig::{EndpointKind, Recorder, endpoint, journal_words};
use harness::{DriverOptions, InProcessDriver, Rig};
use hw_cuda::{Gpu, Settings, Slice};
use hw_engine::conformance::Noise;
use hw_engine::{EndpointSpec, Fleet};
use hw_host::HostMemory;
use iommu_addr::{ApertureOffset, EndpointId, Location};
use peergate_guest::uapi::{self, Alloc, Peer, Work};
use peergate_guest::{Channel, Driver as _};

use super::rivals::together;
use crate::world::{Lot, STREAMS, alloc, drive, serve};

/// Transfers from one GPU to the other, one after another in memory: sources are in the first half of a GPU's memory, destinations in the second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    /// Which GPU has the source, 0 or 1.
    pub(crate) from: usize,
    pub(crate) len: u64,
    pub(crate) count: u64,
    /// Bytes of a half. Where they are not enough, it begins anew.
    pub(crate) half: u64,
}

impl Job {
    pub(crate) fn bytes(self) -> u64 {
        self.len * self.count
    }

    pub(crate) fn to(self) -> usize {
        1 - self.from
    }

    /// Where the source and the destination of a transfer are.
    pub(crate) fn at(self, number: u64) -> (u64, u64) {
        let offset = number % (self.half / self.len).max(1) * self.len;
        (offset, self.half + offset)
    }
}

/// Who copies one way: a channel with queue, buffers and rights of its own, as a program in a guest has them.
pub(crate) struct Side {
    pub(crate) channel: Box<dyn Channel>,
    from: Alloc,
    pub(crate) to: Alloc,
}

pub(crate) struct World {
    /// By the GPU that has the source.
    pub(crate) sides: [Side; 2],
    /// What the device hands its transfers to.
    engine: Arc<Fleet>,
    half: u64,
    _driver: InProcessDriver,
    _rig: Rig,
}

impl World {
    /// `half` is a multiple of what a GPU gives memory out in.
    pub(crate) fn new(gpus: &[Arc<Gpu>; 2], half: u64, settings: Settings) -> Result<Self> {
        let len = 2 * half;
        let slices = gpus.iter().map(|gpu| Ok(Slice::new(gpu, len)?)).collect::<Result<Vec<_>>>()?;
        let spec = |id| EndpointSpec { granularity: Slice::GRANULE, ..endpoint(id, EndpointKind::Gpu, len) };
        let memory = Arc::new(HostMemory::new());
        let (device, ram, engine) = serve(slices, vec![spec(0), spec(1)], memory, settings, 2)?;
        let options = vmm_vhost_user::Options { journal: Some(journal_words()), ..Default::default() };
        let rig = Rig::over(device, ram, Arc::new(Recorder::default()), options)?;
        let options = DriverOptions { polling: true, ram: 16 << 20, ..DriverOptions::default() };
        let driver = InProcessDriver::connect(&rig.socket(), options)?;
        let channels = [driver.open()?, driver.open()?];
        // Sources first, so that those are in the first half of each slice.
        let from = [alloc(&*channels[0], 0, half)?, alloc(&*channels[1], 1, half)?];
        let to = [alloc(&*channels[0], 1, half)?, alloc(&*channels[1], 0, half)?];
        let mut sides = channels.into_iter().zip(from.into_iter().zip(to));
        let mut side = || sides.next().map(|(channel, (from, to))| Side { channel, from, to });
        let sides = side().zip(side()).map(<[Side; 2]>::from).context("There are two sides")?;
        let world = Self { sides, engine, half, _driver: driver, _rig: rig };
        world.peer(uapi::PEER_ENABLE, 0)?;
        world.peer(uapi::PEER_ENABLE, 1)?;
        Ok(world)
    }

    /// Enables or disables that whoever has the source reaches the other's memory.
    pub(crate) fn peer(&self, op: u32, from: usize) -> Result<()> {
        let Side { channel, from, to } = &self.sides[from];
        let (accessor, owner) = (from.endpoint, to.endpoint);
        let peer = channel.peer(Peer { op, accessor, owner, rights: uapi::READ | uapi::WRITE, ..Peer::default() });
        let path = peer?.path;
        ensure!(op != uapi::PEER_ENABLE || path == uapi::PATH_DIRECT, "The GPUs do not reach each other: path {path}");
        Ok(())
    }

    /// The work that is a transfer of a job. Whose memory the source is acts.
    pub(crate) fn work(&self, index: u64, job: Job, number: u64) -> Work {
        let Side { from, to, .. } = &self.sides[job.from];
        let (source, destination) = job.at(number);
        Work {
            opcode: uapi::WORK_COPY,
            stream: u32::try_from(index % STREAMS).unwrap_or(0),
            initiator: from.endpoint,
            cookie: index,
            source: from.iova + source,
            destination: to.iova + destination - self.half,
            length: job.len,
            ..Work::default()
        }
    }

    fn lot(&self, job: Job) -> Lot<'_> {
        let queue = u32::from(job.from == 1);
        Lot::new(&*self.sides[job.from].channel, queue, (0..job.count).map(|n| self.work(n, job, n)).collect())
    }

    /// Has the device make the transfers, those of each job for a thread of its own if there are many, and waits until all have ended.
    pub(crate) fn direct(&self, jobs: &[Job]) -> Result<Duration> {
        let lots: Vec<_> = jobs.iter().map(|job| self.lot(*job)).collect();
        if lots.len() == 1 || jobs.iter().all(|job| job.count == 1) {
            return drive(lots);
        }
        together(lots.into_iter().map(|lot| || drive(vec![lot]).map(drop)))
    }

    /// Moves bytes that nobody could guess from one GPU to the other. They are written and read on each GPU's own side.
    pub(crate) fn verify(&self, from: usize, len: u64) -> Result<()> {
        let pattern = Noise::new(len).bytes(usize::try_from(len)?);
        let job = Job { from, len, count: 1, half: self.half };
        let (source, destination) = job.at(0);
        self.write(from, source, &pattern)?;
        self.write(job.to(), destination, &vec![0; pattern.len()])?;
        self.direct(&[job])?;
        ensure!(
            self.read(job.to(), destination, pattern.len())? == pattern,
            "{len} bytes from GPU {from} arrived changed"
        );
        Ok(())
    }

    pub(crate) fn write(&self, gpu: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        Ok(self.engine.memory().write(place(gpu, offset)?, bytes)?)
    }

    pub(crate) fn read(&self, gpu: usize, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.engine.memory().read(place(gpu, offset)?, &mut bytes)?;
        Ok(bytes)
    }
}

/// As the slice's owner has it.
fn place(gpu: usize, offset: u64) -> Result<Location> {
    Ok(Location::Aperture { endpoint: EndpointId::local(u16::try_from(gpu)?), offset: ApertureOffset(offset) })
}
