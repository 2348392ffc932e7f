//! A GPU's slice and apertures of other owners behind one device, which a front-end in this process drives.
//!
//! An aperture is memory of a file that somebody else could have: what a VFIO device's BAR would be, with memory of the host in place of the BAR. So a copy
//! between the GPU and an aperture is one by the GPU's copy engine from or to memory of the host that another owner has mapped. It is no copy over PCIe
//! from one device to another.
//!
//! Not here: what is measured.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use harness::rig::{EndpointKind, Recorder, endpoint, journal_words};
use harness::{DriverOptions, InProcessDriver, Rig};
use hw_cuda::{CudaEngine, Driver, Gpu, Settings, Slice};
use hw_engine::conformance::Noise;
use hw_engine::{DmaEngine, EndpointSpec, Fleet, JobId, Member, Memory, RamMap, Route, Segments, Transfer};
use hw_host::{HostEngine, HostMemory};
use iommu_addr::{ApertureOffset, DomainId, EndpointId, Location, Segment};
use peergate_guest::uapi::{self, Alloc, Completion, Peer, Work};
use peergate_guest::{Channel, Driver as _, Error, Status, TransferPath};
use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags};
use vdev_device::{Device, DeviceSpec, Limits, Observer, Reach};

use crate::raw::{Cuda, Way};
use crate::rivals::Job;

/// Bytes of the GPU's slice, of the first aperture, and of each other one.
pub(crate) const SLICE: u64 = 1 << 30;
pub(crate) const OTHER: u64 = 64 << 20;
pub(crate) const APERTURES: usize = 8;

/// Work that is on its way at a time.
pub(crate) const DEPTH: u64 = 128;
/// Streams of the guest's, so that work need not wait for work before it.
pub(crate) const STREAMS: u64 = 64;
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// An aperture, as its owner and as the device has it.
pub(crate) struct Aperture {
    /// Where its owner has it mapped.
    pub(crate) address: u64,
    pub(crate) len: u64,
    endpoint: u32,
    iova: u64,
}

pub(crate) struct World {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) cuda: Arc<Cuda>,
    /// The slice's address on the GPU.
    pub(crate) device: u64,
    pub(crate) apertures: Vec<Aperture>,
    /// What the device hands its transfers to.
    pub(crate) engine: Arc<Fleet>,
    slice: Alloc,
    channel: Box<dyn Channel>,
    _driver: InProcessDriver,
    _rig: Rig,
}

impl World {
    pub(crate) fn new(which: Option<&str>, settings: Settings) -> Result<Self> {
        let driver = Driver::load()?;
        let first = driver.gpus()?.first().context("There is no GPU")?.address.clone();
        let gpu = Gpu::open(&driver, which.unwrap_or(&first))?;
        let cuda = Cuda::new(gpu.info().ordinal)?;
        let slice = Slice::new(&gpu, SLICE)?;
        let device = slice.base();
        let memory = Arc::new(HostMemory::new());
        let mut specs = vec![EndpointSpec { granularity: Slice::GRANULE, ..endpoint(0, EndpointKind::Gpu, SLICE) }];
        let mut mapped = Vec::new();
        for number in 1..=APERTURES {
            let len = if number == 1 { SLICE } else { OTHER };
            let spec = endpoint(u16::try_from(number)?, EndpointKind::Fpga, len);
            let file = harness::ram::memory_file(len, SealFlags::SHRINK)?;
            memory.add_aperture(spec.id, &file, len)?;
            let address = map(&file, len)?;
            cuda.register(address, len)?;
            mapped.push((address, len));
            specs.push(spec);
        }
        let (device_of, ram, engine) = serve(vec![slice], specs, memory, settings, 1)?;
        let serve = vmm_vhost_user::Options { journal: Some(journal_words()), ..vmm_vhost_user::Options::default() };
        let recorder = Arc::new(Recorder::default());
        let rig = Rig::over(device_of, ram, recorder, serve)?;
        let options = DriverOptions { polling: true, ram: 16 << 20, ..DriverOptions::default() };
        let driver = InProcessDriver::connect(&rig.socket(), options)?;
        let channel = driver.open()?;
        let slice = alloc(&*channel, 0, SLICE)?;
        let mut apertures = Vec::new();
        for (index, (address, len)) in mapped.into_iter().enumerate() {
            let buffer = alloc(&*channel, u32::try_from(index + 1)?, len)?;
            let rights = uapi::READ | uapi::WRITE;
            let peer = Peer {
                op: uapi::PEER_ENABLE,
                accessor: slice.endpoint,
                owner: buffer.endpoint,
                rights,
                ..Peer::default()
            };
            channel.peer(peer)?;
            apertures.push(Aperture { address, len, endpoint: buffer.endpoint, iova: buffer.iova });
        }
        Ok(Self { gpu, cuda, device, apertures, engine, slice, channel, _driver: driver, _rig: rig })
    }

    /// Transfers between the beginnings of the slice and the first aperture, as many as make up `bytes`.
    pub(crate) fn job(&self, len: u64, bytes: u64, way: Way) -> Job {
        let count = (bytes / len).max(1);
        Job { device: self.device, aperture: self.apertures[0].address, len, count, way }
    }

    fn iova(&self, aperture: u64) -> u64 {
        let found = self.apertures.iter().find(|it| (it.address..it.address + it.len).contains(&aperture));
        found.map_or(0, |it| it.iova + (aperture - it.address))
    }

    /// Has the device make the transfers, and waits until all have ended.
    pub(crate) fn direct(&self, jobs: &[Job]) -> Result<Duration> {
        let most = jobs.iter().map(|job| job.count).max().unwrap_or(0);
        let all = (0..most).flat_map(|n| jobs.iter().filter(move |job| n < job.count).map(move |job| (n, job)));
        let work: Vec<Work> = all.enumerate().map(|(index, (n, job))| self.copy(index as u64, n, job)).collect();
        drive(vec![Lot::new(&*self.channel, 0, work)])
    }

    /// Has the device copy eight bytes within an aperture, which the processor does at once: what the way through the device takes by itself.
    pub(crate) fn through(&self) -> Result<Duration> {
        let [aperture, ..] = &self.apertures[..] else { anyhow::bail!("There is an aperture") };
        let mut work = self.copy(0, 0, &self.job(8, 8, Way::Out));
        (work.source, work.destination) = (aperture.iova, aperture.iova + 4096);
        work.initiator = aperture.endpoint;
        drive(vec![Lot::new(&*self.channel, 0, vec![work])])
    }

    /// Has the engine make one transfer, without a device in front of it, which must be idle.
    pub(crate) fn alone(&self, job: &Job) -> Result<Duration> {
        let place = |endpoint, offset| Segment {
            at: Location::Aperture { endpoint: EndpointId::local(endpoint), offset: ApertureOffset(offset) },
            len: job.len,
        };
        let (own, other) = (place(0, job.device - self.device), place(1, job.aperture - self.apertures[0].address));
        let (src, dst) = if job.way == Way::Out { (own, other) } else { (other, own) };
        let [src, dst] = [src, dst].map(|segment| Segments::from_iter([segment]));
        let work = hw_engine::Work::Copy { src, dst, route: Route::Direct };
        let transfer = Transfer { job: JobId(u64::MAX), domain: DomainId(0), initiator: EndpointId::local(0), work };
        let start = Instant::now();
        self.engine.submit(&transfer)?;
        self.engine.doorbell();
        let mut ended = Vec::new();
        while ended.is_empty() {
            self.engine.poll(&mut ended);
        }
        ended[0].result?;
        Ok(start.elapsed())
    }

    fn copy(&self, index: u64, n: u64, job: &Job) -> Work {
        let device = self.slice.iova + (job.device - self.device) + n * job.len;
        let aperture = self.iova(job.aperture) + n * job.len;
        let (source, destination) = match job.way {
            Way::Out => (device, aperture),
            Way::In => (aperture, device),
        };
        Work {
            opcode: uapi::WORK_COPY,
            stream: u32::try_from(index % STREAMS).unwrap_or(0),
            initiator: self.slice.endpoint,
            cookie: index,
            source,
            destination,
            length: job.len,
            ..Work::default()
        }
    }

    /// Moves bytes that nobody could guess there and back, and compares them as the aperture's owner has them.
    pub(crate) fn verify(&self, len: u64) -> Result<()> {
        let aperture = &self.apertures[0];
        let pattern = Noise::new(len).bytes(usize::try_from(len)?);
        crate::rivals::memcpy(aperture.address, pattern.as_ptr() as u64, len);
        self.direct(&[self.job(len, len, Way::In)])?;
        crate::rivals::memcpy(aperture.address, vec![0; pattern.len()].as_ptr() as u64, len);
        self.direct(&[self.job(len, len, Way::Out)])?;
        let mut got = vec![0; pattern.len()];
        crate::rivals::memcpy(got.as_mut_ptr() as u64, aperture.address, len);
        ensure!(got == pattern, "{len} bytes came back changed");
        Ok(())
    }
}

/// A device, whom to tell of memory, and what carries its transfers out.
pub(crate) type Served = (Arc<Device>, Arc<dyn RamMap>, Arc<Fleet>);

/// What a channel has a queue carry out, and how far it is.
pub(crate) struct Lot<'a> {
    channel: &'a dyn Channel,
    queue: u32,
    work: Vec<Work>,
    sent: usize,
    done: usize,
}

impl<'a> Lot<'a> {
    pub(crate) fn new(channel: &'a dyn Channel, queue: u32, work: Vec<Work>) -> Self {
        Self { channel, queue, work, sent: 0, done: 0 }
    }

    fn is_done(&self) -> bool {
        self.done == self.work.len()
    }

    /// Submits as much as may be under way.
    fn submit(&mut self) -> Result<()> {
        let room = usize::try_from(DEPTH)? - (self.sent - self.done);
        let next = &self.work[self.sent..(self.sent + room).min(self.work.len())];
        if next.is_empty() {
            return Ok(());
        }
        match self.channel.submit(self.queue, next) {
            Ok(taken) => self.sent += taken,
            Err(Error::Refused { status: Status::Busy, .. }) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Takes what has ended, which must be well and directly; waits for some if it may.
    fn take(&mut self, ended: &mut [Completion], may_wait: bool) -> Result<()> {
        let count = self.channel.completions(ended, usize::from(may_wait), Instant::now() + PATIENCE)?;
        ensure!(count > 0 || !may_wait, "The device completed nothing in time");
        for completion in &ended[..count] {
            let (status, path) = (Status::from_raw(completion.status), TransferPath::from_raw(completion.path));
            ensure!(status == Some(Status::Ok), "A copy ended with {status:?}");
            let is_at_once = matches!(path, Some(TransferPath::Direct | TransferPath::Local));
            ensure!(is_at_once, "A copy went {path:?}");
        }
        self.done += count;
        Ok(())
    }
}

/// Has a device carry out lots of work side by side, and waits until all of it has ended well and directly.
pub(crate) fn drive(mut lots: Vec<Lot<'_>>) -> Result<Duration> {
    let mut ended = vec![Completion::default(); usize::try_from(DEPTH)?];
    let may_wait = lots.len() == 1;
    let start = Instant::now();
    let (mut done, mut last) = (0, start);
    while !lots.iter().all(Lot::is_done) {
        for lot in &mut lots {
            lot.submit()?;
            if !lot.is_done() {
                lot.take(&mut ended, may_wait)?;
            }
        }
        let now = lots.iter().map(|lot| lot.done).sum();
        if now > done {
            (done, last) = (now, Instant::now());
        }
        ensure!(last.elapsed() < PATIENCE, "The device completed nothing in time");
    }
    Ok(start.elapsed())
}

/// The device over slices, each of which is the endpoint of its number, the apertures, and the guest's memory.
pub(crate) fn serve(
    slices: Vec<Slice>,
    endpoints: Vec<EndpointSpec>,
    memory: Arc<HostMemory>,
    settings: Settings,
    submit_queues: u16,
) -> Result<Served> {
    let slices: Vec<_> = (0..).map(EndpointId::local).zip(slices).collect();
    let ids: Vec<_> = slices.iter().map(|(id, _)| *id).collect();
    let cuda = Arc::new(CudaEngine::new(slices, memory.clone() as Arc<dyn Memory>, settings, None)?);
    let member = |endpoint| Member { endpoint, engine: cuda.clone(), same_function: Vec::new() };
    let rest = Arc::new(HostEngine::new(memory.clone()));
    let fleet = Fleet::new(ids.into_iter().map(member).collect(), Vec::new(), rest, memory.clone(), None)?;
    let fleet = Arc::new(fleet);
    let spec = DeviceSpec {
        linger: DeviceSpec::LINGER,
        endpoints,
        limits: Limits::default(),
        reach: Reach::all(),
        session: 1,
        submit_queues,
    };
    let device = Device::new(spec, fleet.clone(), memory.clone(), Arc::new(Recorder::default()) as Arc<dyn Observer>)?;
    Ok((device, memory, fleet))
}

/// An owner's own mapping, with all of its pages there.
fn map(file: &std::fs::File, len: u64) -> Result<u64> {
    let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
    // SAFETY: the kernel chooses the place; the mapping stays as long as the process.
    let at: *mut c_void = unsafe { rustix::mm::mmap(ptr::null_mut(), usize::try_from(len)?, rights, flags, file, 0)? };
    Ok(at as u64)
}

pub(crate) fn alloc(channel: &dyn Channel, index: u32, length: u64) -> Result<Alloc> {
    let endpoint = channel.endpoint(index)?.endpoint;
    let request = Alloc { endpoint, flags: uapi::READ | uapi::WRITE, length, ..Alloc::default() };
    Ok(channel.alloc(request)?)
}

/// What a run was made on.
pub(crate) fn machine(gpu: &Gpu, driver: &str) -> Result<BTreeMap<String, serde_json::Value>> {
    let cpu = std::fs::read_to_string("/proc/cpuinfo")?;
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let cpus = std::thread::available_parallelism()?.get();
    Ok(BTreeMap::from([
        ("gpu".into(), gpu.info().name.clone().into()),
        ("driver".into(), driver.into()),
        ("processor".into(), model.map_or("unknown", |(_, name)| name).into()),
        ("processors".into(), cpus.into()),
        ("kernel".into(), kernel.trim().into()),
    ]))
}
