//! A tenant's PCI functions: from descriptors to memory and engines.
//!
//! Whatever a function's memory held is lost before anybody reaches it: nothing of one session is seen in the next.
//!
//! Not here: what a driver does, which pairs are proved.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use hw_engine::{Member, Memory, Place, ThreadHook};
use hw_host::{DeviceArea, HostMemory};
use hw_vfio::{FaultWatch, Function, Hole, Host, Kind, Lazy, MapSink, Slice, Unwatched, VfioEngine};
use iommu_addr::{ApertureOffset, EndpointId, Location};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use vmm_broker::{Endpoint, EndpointKind, FunctionFds, IommuMode, Setup};

/// How long the watcher may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The functions of a tenant, none of which an engine has yet.
pub(crate) struct Functions<'a> {
    endpoints: Vec<(EndpointId, &'a Endpoint, &'a vmm_broker::Function)>,
    host: Arc<Host>,
    iommu: IommuMode,
    free: BTreeMap<String, (Function, OwnedFd)>,
}

/// What there is besides simulated devices.
#[derive(Default)]
pub(crate) struct Hardware {
    /// Endpoints that have an engine.
    pub(crate) members: Vec<Member>,
    /// Endpoints that have none.
    pub(crate) idle: Vec<EndpointId>,
    /// Functions without an engine, which answer as long as they are open.
    pub(crate) open: Vec<Function>,
}

impl<'a> Functions<'a> {
    /// Opens them.
    pub(crate) fn open(setup: &'a Setup, fds: FunctionFds) -> anyhow::Result<Self> {
        let host = Arc::new(Host::new(fds.container));
        let mut free = BTreeMap::new();
        for (address, (device, watch)) in setup.functions().into_iter().zip(fds.functions) {
            free.insert(address.to_owned(), (Function::new(&host, device, address)?, watch));
        }
        let endpoints = setup.endpoints.iter().zip(0..);
        let endpoints = endpoints.filter_map(|(of, id)| Some((EndpointId::local(id), of, of.function.as_ref()?)));
        Ok(Self { endpoints: endpoints.collect(), host, iommu: setup.iommu, free })
    }

    /// Maps the memory that is behind BARs, and erases it.
    pub(crate) fn map(&self, memory: &HostMemory) -> anyhow::Result<()> {
        for (id, endpoint, part) in self.of_kind(EndpointKind::Memory) {
            let (function, _) = self.free.get(&part.address).context("The function is not there")?;
            let failed = || format!("The memory of slice {:?} cannot be used", endpoint.name);
            let (file, offset) = function.bar_file(part.part).with_context(failed)?;
            let mut areas = Vec::new();
            for area in function.areas(part.part).into_iter().filter(|area| area.start < endpoint.memory_len) {
                let len = area.len.min(endpoint.memory_len - area.start);
                areas.push(DeviceArea {
                    start: area.start,
                    file: &file,
                    offset: offset + area.start,
                    len,
                    buffer: None,
                });
            }
            let mapped: u64 = areas.iter().map(|area| area.len).sum();
            ensure!(
                mapped == endpoint.memory_len,
                "Of BAR {} of function {} only {mapped} of {} bytes can be mapped; give slice {:?} less",
                part.part,
                part.address,
                endpoint.memory_len,
                endpoint.name
            );
            memory.add_device(id, &areas).with_context(failed)?;
            memory.fill(at(id, 0), endpoint.memory_len, 0).with_context(failed)?;
        }
        Ok(())
    }

    /// Starts the engines, and erases what memory they have.
    pub(crate) fn engines(mut self, memory: &Arc<HostMemory>, hook: &ThreadHook) -> anyhow::Result<Hardware> {
        let mut holes = Vec::new();
        for (id, endpoint, part) in self.of_kind(EndpointKind::Memory) {
            let start = endpoint.memory_len.saturating_sub(part.unmapped);
            holes.extend(runs(&**memory, id, start..endpoint.memory_len)?);
        }
        let host: Arc<dyn MapSink> = Arc::new(Hole::new(Arc::clone(&self.host), holes));
        // Memory has no engine, also if the function that it is of has one.
        let idle = self.of_kind(EndpointKind::Memory).map(|(id, _, _)| id).collect();
        let memories: Vec<_> = self.of_kind(EndpointKind::Memory).map(|(id, _, part)| (id, &part.address)).collect();
        let behind = |address| memories.iter().filter(|(_, of)| *of == address).map(|(id, _)| *id).collect();
        let mut members: Vec<Member> = Vec::new();
        for (id, endpoint, part) in std::mem::take(&mut self.endpoints) {
            let kind = match endpoint.kind {
                EndpointKind::Nvme => Kind::Nvme { namespace: part.part },
                EndpointKind::Edu => Kind::Edu,
                EndpointKind::Memory => continue,
                EndpointKind::Gpu | EndpointKind::Fpga | EndpointKind::Cuda => {
                    bail!("Slice {:?} is no function", endpoint.name)
                }
            };
            let failed = || format!("Slice {:?} has no engine", endpoint.name);
            let (function, watch) = self.free.remove(&part.address).with_context(failed)?;
            let own = (endpoint.memory_len > 0).then_some(Slice { endpoint: id, start: 0, len: endpoint.memory_len });
            let watch: Box<dyn FaultWatch> = Box::new(Watch { socket: Some(watch) });
            let hook = Some(Arc::clone(hook));
            let host = match self.iommu {
                IommuMode::Strict => Arc::clone(&host),
                IommuMode::Lazy => Arc::new(Lazy::new(Arc::clone(&host), Lazy::LINGER)),
            };
            let engine = VfioEngine::open(kind, function, host, own, memory.clone(), Some(watch), hook);
            let engine = engine.with_context(failed)?;
            engine.erase_own().with_context(failed)?;
            members.push(Member { endpoint: id, engine: Arc::new(engine), same_function: behind(&part.address) });
        }
        Ok(Hardware { members, idle, open: self.free.into_values().map(|(function, _)| function).collect() })
    }

    fn of_kind(
        &self,
        kind: EndpointKind,
    ) -> impl Iterator<Item = (EndpointId, &'a Endpoint, &'a vmm_broker::Function)> {
        self.endpoints.iter().copied().filter(move |(_, endpoint, _)| endpoint.kind == kind)
    }
}

/// Where a part of an endpoint's memory is in this process.
fn runs(memory: &dyn Memory, endpoint: EndpointId, part: Range<u64>) -> anyhow::Result<Vec<Place>> {
    let mut runs: Vec<Place> = Vec::new();
    let mut start = part.start;
    while start < part.end {
        let run = memory.place(at(endpoint, start), part.end - start).context("The memory is not mapped")?;
        start += run.len;
        runs.push(run);
    }
    Ok(runs)
}

fn at(endpoint: EndpointId, offset: u64) -> Location {
    Location::Aperture { endpoint, offset: ApertureOffset(offset) }
}

/// The broker's watcher, from here.
struct Watch {
    /// `None` once it has not answered: an answer that comes late would be taken for one to the next question.
    socket: Option<OwnedFd>,
}

impl FaultWatch for Watch {
    fn count(&mut self) -> Result<u64, Unwatched> {
        let count = self.socket.as_ref().and_then(ask);
        if count.is_none() && self.socket.take().is_some() {
            tracing::error!("{Unwatched}");
        }
        count.ok_or(Unwatched)
    }
}

fn ask(socket: &OwnedFd) -> Option<u64> {
    send(socket, &[0], SendFlags::NOSIGNAL).ok()?;
    let patience = Timespec::try_from(PATIENCE).ok()?;
    loop {
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&patience)) {
            Err(Errno::INTR) => {}
            Ok(1..) => break,
            _ => return None,
        }
    }
    let mut answer = [0; 8];
    let received = recv(socket, &mut answer, RecvFlags::DONTWAIT).ok()?;
    (received.1 == answer.len()).then(|| u64::from_le_bytes(answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_is_all_of_what_it_is_to_be() {
        let (memory, endpoint) = (HostMemory::new(), EndpointId::local(0));
        let files = [0, 1].map(|_| tempfile::tempfile().unwrap());
        files.iter().for_each(|file| file.set_len(0x4000).unwrap());
        let areas = [(0, &files[0]), (0x4000, &files[1])];
        let areas = areas.map(|(start, file)| DeviceArea { start, file, offset: 0, len: 0x4000, buffer: None });
        memory.add_device(endpoint, &areas).unwrap();
        let lens = |part| runs(&memory, endpoint, part).map(|runs| runs.iter().map(|run| run.len).collect::<Vec<_>>());
        assert_eq!(lens(0x3000..0x8000).unwrap(), [0x1000, 0x4000]);
        assert!(lens(0x8000..0x8000).unwrap().is_empty());
        assert!(lens(0x3000..0x9000).is_err());
    }
}
