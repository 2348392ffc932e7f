//! From a [`Setup`] and its descriptors to a device: memory, engines, who reaches whom, limits.
//!
//! This is the registry of engines: a kind of device in the configuration becomes an engine here. Not here: threads, the connection.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use hw_cuda::CudaEngine;
use hw_engine::proof::PLACES;
use hw_engine::{DmaEngine, EndpointKind, EndpointSpec, Fleet, LinkId, Memory, RamMap, ThreadHook};
use hw_host::HostMemory;
use hw_sim::{Clock, SimConfig, SimEndpoint, SimEngine};
use hw_vfio::Function;
use iommu_addr::EndpointId;
use vdev_device::{Device, DeviceSpec, Limits, Reach};
use vdev_wire::{PAGE_SIZE, PathReason};
use vmm_broker::{Endpoint, FunctionFds, LinkTable, Setup, TenantPage};
use vmm_sandbox::{Class, Sandbox};

use super::functions::{Functions, Hardware};
use super::gpus::{self, Gpus, Told};
use super::observer::PageObserver;
use super::prove::{prove, stage_what_takes_two_hops};

/// Register page of an FPGA in bytes.
const FPGA_REGISTERS: u64 = PAGE_SIZE;

/// Bytes that each copy of a proof moves: enough to tell, and no time on any link.
const PROOF_UNIT: u64 = 64;
/// How long all proofs of a session may take. A worker must be ready in 5 s, one with hardware in 30 s, and an engine may take one to give up what it has.
const PROOF_TIME: Duration = Duration::from_millis(3500);
/// The same for hardware: whole blocks of any device, unless a slice is too small for that, and time for the slowest.
const HARDWARE_UNIT: u64 = PAGE_SIZE;
const HARDWARE_TIME: Duration = Duration::from_secs(20);

/// A device and the memory it works on.
pub(crate) struct Built {
    pub(crate) device: Arc<Device>,
    pub(crate) ram: Arc<dyn RamMap>,
    /// The tenant's view of the host's links.
    pub(crate) links: Arc<LinkTable>,
    /// The engine of the GPUs, if there are some.
    pub(crate) cuda: Option<Arc<CudaEngine>>,
    /// What must stay open.
    pub(crate) open: Vec<Function>,
}

/// Makes the tenant's device. Starts the engines' threads, which confine themselves.
pub(crate) fn build(
    setup: &Setup,
    ledger: OwnedFd,
    slices: Vec<OwnedFd>,
    functions: Option<FunctionFds>,
    gpus: &Gpus,
    page: &Arc<TenantPage>,
    sandbox: &Arc<Sandbox>,
) -> anyhow::Result<Built> {
    let bandwidths: Vec<_> = setup.links.iter().map(|link| link.bandwidth).collect();
    let links = LinkTable::open(ledger, &bandwidths, setup.place).context("Cannot map the ledger of links")?;
    links.set_weight(setup.limits.weight);
    let links = Arc::new(links);
    let memory = Arc::new(HostMemory::new());
    let specs: Vec<_> = setup.endpoints.iter().zip(0..).map(|(of, id)| spec(of, EndpointId::local(id))).collect();
    let simulated = simulated(setup, &specs, slices, &memory)?;
    let confined = |class| {
        let sandbox = Arc::clone(sandbox);
        Arc::new(move || crate::role::confine(&sandbox, class)) as ThreadHook
    };
    let mut config = SimConfig::new(simulated);
    config.thread_hook = Some(confined(Class::Timekeeper));
    let simulator = SimEngine::new(&config, memory.clone(), links.clone(), Clock::Monotonic);
    let mut engine: Arc<dyn DmaEngine> = Arc::new(simulator.context("Cannot start the engines")?);
    let mut view: Arc<dyn Memory> = memory.clone();
    let mut reach = reach(setup);
    let mut proof = (PROOF_UNIT, PROOF_TIME);
    let hook = confined(Class::Engine);
    let (Hardware { members, idle, open }, cuda) = hardware(setup, functions, gpus, &memory, &hook)?;
    if !members.is_empty() || !idle.is_empty() {
        let fleet = Fleet::new(members, idle, engine, memory.clone(), Some(hook));
        let fleet = fleet.context("There is no thread for the engines; check the limits on threads")?;
        view = fleet.memory();
        engine = Arc::new(fleet);
        let unit = hardware_unit(&specs);
        proof = (unit, HARDWARE_TIME);
        stage_what_takes_two_hops(&*engine, &specs, unit, &mut reach);
    }
    prove(&*engine, &*view, &specs, proof, &mut reach);
    let spec = DeviceSpec {
        linger: DeviceSpec::LINGER,
        endpoints: specs,
        limits: limits(&setup.limits),
        reach,
        session: setup.session,
        submit_queues: setup.submit_queues,
    };
    let observer = Arc::new(PageObserver { page: Arc::clone(page), session: setup.session });
    let device = Device::new(spec, engine, memory.clone(), observer).context("Cannot make the device")?;
    let ram: Arc<dyn RamMap> = match &cuda {
        Some(engine) => Arc::new(Told { memory, engine: Arc::clone(engine) }),
        None => memory,
    };
    Ok(Built { device, ram, links, cuda, open })
}

/// What there is besides simulated devices.
fn hardware(
    setup: &Setup,
    functions: Option<FunctionFds>,
    gpus: &Gpus,
    memory: &Arc<HostMemory>,
    hook: &ThreadHook,
) -> anyhow::Result<(Hardware, Option<Arc<CudaEngine>>)> {
    let mut hardware = Hardware::default();
    if let Some(fds) = functions {
        let functions = Functions::open(setup, fds)?;
        functions.map(memory)?;
        hardware = functions.engines(memory, hook)?;
    }
    let cuda = gpus.engine(setup, memory, hook)?;
    hardware.members.extend(cuda.iter().flat_map(|engine| gpus::members(setup, engine)));
    Ok((hardware, cuda))
}

/// As much as each slice can lend for a proof.
fn hardware_unit(specs: &[EndpointSpec]) -> u64 {
    let lens = specs.iter().map(|spec| spec.memory_len / PLACES).filter(|len| *len > 0);
    lens.min().and_then(u64::checked_ilog2).map_or(HARDWARE_UNIT, |log| HARDWARE_UNIT.min(1 << log))
}

/// Maps the slices of simulated devices.
fn simulated(
    setup: &Setup,
    specs: &[EndpointSpec],
    slices: Vec<OwnedFd>,
    memory: &HostMemory,
) -> anyhow::Result<Vec<SimEndpoint>> {
    let endpoints = setup.endpoints.iter().zip(specs).filter(|(endpoint, _)| endpoint.is_simulated());
    let made = endpoints.zip(slices).map(|((endpoint, spec), slice)| {
        memory
            .add_aperture(spec.id, &File::from(slice), spec.memory_len)
            .with_context(|| format!("Cannot map the memory of slice {:?}", endpoint.name))?;
        Ok(sim_endpoint(setup, endpoint, spec.clone()))
    });
    made.collect()
}

fn spec(endpoint: &Endpoint, id: EndpointId) -> EndpointSpec {
    let (kind, registers_len) = match endpoint.kind {
        vmm_broker::EndpointKind::Gpu | vmm_broker::EndpointKind::Cuda => (EndpointKind::Gpu, 0),
        vmm_broker::EndpointKind::Fpga => (EndpointKind::Fpga, FPGA_REGISTERS),
        vmm_broker::EndpointKind::Nvme => (EndpointKind::Storage, 0),
        vmm_broker::EndpointKind::Memory => (EndpointKind::Memory, 0),
        vmm_broker::EndpointKind::Edu => (EndpointKind::Engine, 0),
    };
    EndpointSpec {
        id,
        kind,
        name: endpoint.name.clone(),
        memory_len: endpoint.memory_len,
        registers_len,
        granularity: PAGE_SIZE,
        engines: endpoint.engines,
    }
}

/// A link that costs no time is no link, so that transfers over it need no clock.
fn sim_endpoint(setup: &Setup, endpoint: &Endpoint, spec: EndpointSpec) -> SimEndpoint {
    match setup.links.get(usize::from(endpoint.link)) {
        Some(link) if link.bandwidth != 0 || link.latency_ns != 0 => {
            SimEndpoint { spec, link: Some(LinkId(endpoint.link)), latency: Duration::from_nanos(link.latency_ns) }
        }
        _ => SimEndpoint::instant(spec),
    }
}

/// The device's own limits, but for those that the operator set.
pub(crate) fn limits(set: &vmm_broker::Limits) -> Limits {
    let own = Limits::default();
    let millis = |set: Option<u32>, own| set.map_or(own, |millis| Duration::from_millis(millis.into()));
    Limits {
        max_domains: set.max_domains.unwrap_or(own.max_domains),
        max_mappings: set.max_mappings.unwrap_or(own.max_mappings),
        max_segments: set.max_segments.unwrap_or(own.max_segments),
        max_total_segments: set.max_total_segments.unwrap_or(own.max_total_segments),
        max_pinned_pages: set.max_pinned_pages.unwrap_or(own.max_pinned_pages),
        max_buffers: set.max_buffers.unwrap_or(own.max_buffers),
        stream_credits: set.stream_credits.unwrap_or(own.stream_credits),
        max_in_flight: set.max_in_flight.unwrap_or(own.max_in_flight),
        max_streams: set.max_streams.unwrap_or(own.max_streams),
        max_batch: set.max_batch.unwrap_or(own.max_batch),
        max_events: set.max_events.unwrap_or(own.max_events),
        control_rate: set.control_rate.unwrap_or(own.control_rate),
        default_timeout: millis(set.default_timeout_ms, own.default_timeout),
        max_timeout: millis(set.max_timeout_ms, own.max_timeout),
        iova: own.iova,
    }
}

fn reach(setup: &Setup) -> Reach {
    let mut reach = Reach::all();
    for pair in &setup.staged {
        let (accessor, owner) = (EndpointId::local(pair.accessor), EndpointId::local(pair.owner));
        reach.deny(accessor, owner, PathReason::PeerUnreachable);
    }
    reach
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_takes_no_more_than_the_smallest_slice_has() {
        let unit = |lens: &[u64]| {
            let endpoint = |memory_len: &u64| Endpoint {
                name: "x".into(),
                kind: vmm_broker::EndpointKind::Memory,
                memory_len: *memory_len,
                engines: 1,
                link: 0,
                function: None,
                gpu: None,
            };
            let specs: Vec<_> = lens.iter().map(|len| spec(&endpoint(len), EndpointId::local(0))).collect();
            hardware_unit(&specs)
        };
        assert_eq!([unit(&[]), unit(&[0]), unit(&[16 << 20, 0, 12 << 10])], [4096; 3]);
        assert_eq!([unit(&[16 << 20, 8 << 10]), unit(&[4096])], [2048, 1024]);
    }
}
