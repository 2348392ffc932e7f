//! What the operator is told, read from tenants' pages and the configuration.
//!
//! Pages are written by workers: whatever number stands there becomes a name or is shown as it is. Not here: the connection.

use std::collections::BTreeMap;

use vdev_device::{Counter, Gauge};
use vmm_broker::UnsealedMemory;
use vmm_control::{
    DaemonStatus, EndpointInfo, EndpointsReply, ErrorCode, ErrorReply, PeerInfo, Reply, Request, StatusReply,
    TenantInfo, TenantStatus, TenantsReply,
};

use super::Supervisor;
use super::child::Child;
use super::faults::{self, Source};
use super::inspect;
use super::tenant::Tenant;
use crate::config::{Config, SliceConfig, TenantConfig};

/// Counter of faults that were not recorded, besides those of the device.
pub(crate) const SUPPRESSED: &str = "faults_suppressed";
/// Counter of log lines of workers that were left out.
pub(crate) const SUPPRESSED_LINES: &str = "lines_suppressed";

/// Answers one request.
pub(crate) fn answer(supervisor: &Supervisor, request: Request) -> Reply {
    let Supervisor { config, tenants, .. } = supervisor;
    match request {
        Request::Status => Reply::Status(StatusReply {
            daemon: DaemonStatus {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid: std::process::id(),
                uptime_ms: u64::try_from(supervisor.started.elapsed().as_millis()).unwrap_or(u64::MAX),
                runtime_dir: config.daemon.runtime_dir.clone(),
                seccomp: config.daemon.seccomp.to_string(),
                broker_pid: supervisor.broker.child().map(Child::pid),
                broker_failures: supervisor.broker.failures,
            },
            tenants: tenants.iter().map(status).collect(),
        }),
        Request::Sandbox => Reply::Sandbox(inspect::inspect(supervisor)),
        Request::Tenants => Reply::Tenants(TenantsReply { tenants: config.tenants.iter().map(tenant_info).collect() }),
        Request::Endpoints => {
            let endpoints = tenants.iter().flat_map(|tenant| endpoints(config, tenant)).collect();
            Reply::Endpoints(EndpointsReply { endpoints })
        }
        Request::Faults { tenant, last, since } => faults(tenants, tenant.as_deref(), last, since.as_ref()),
        Request::Change { .. } | Request::Reload { .. } | Request::Drain { .. } | Request::Resume { .. } => {
            let message = "A change is no question".to_owned();
            Reply::Error(ErrorReply { code: ErrorCode::Malformed, message })
        }
    }
}

/// There is no such tenant.
pub(crate) fn unknown_tenant(tenants: &[Tenant], name: &str) -> ErrorReply {
    let names: Vec<_> = tenants.iter().map(|tenant| tenant.config.name.as_str()).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    ErrorReply { code: ErrorCode::UnknownTenant, message: format!("There is no tenant {name:?}; there are: {names}") }
}

fn status(tenant: &Tenant) -> TenantStatus {
    let page = &tenant.page;
    let suppressed = page.suppressed().iter().fold(0, |sum: u64, count| sum.saturating_add(*count));
    let counters = Counter::ALL.iter().map(|counter| (counter.name().to_owned(), page.counter(*counter as usize)));
    let counters =
        counters.chain([(SUPPRESSED.to_owned(), suppressed), (SUPPRESSED_LINES.to_owned(), page.suppressed_lines())]);
    let gauges = Gauge::ALL.iter().map(|gauge| (gauge.name().to_owned(), page.gauge(*gauge as usize)));
    TenantStatus {
        name: tenant.config.name.clone(),
        state: tenant.state(),
        drain: tenant.drain_state(),
        iommu: tenant.config.iommu.name().to_owned(),
        session: tenant.session,
        worker_pid: tenant.worker().map(Child::pid),
        keeper_pid: tenant.keeper().map(Child::pid),
        last_outage_us: tenant.last_outage.and_then(|outage| u64::try_from(outage.as_micros()).ok()),
        failures: tenant.failures,
        last_failure: tenant.last_failure.clone(),
        keeper_failures: tenant.keeper_failures,
        faults: page.faults(0).total.saturating_add(suppressed),
        counters: counters.collect(),
        gauges: gauges.collect(),
    }
}

fn tenant_info(tenant: &TenantConfig) -> TenantInfo {
    TenantInfo {
        name: tenant.name.clone(),
        socket: tenant.socket.clone(),
        device_id: tenant.device_id,
        submit_queues: tenant.submit_queues,
        max_queue_size: u32::from(vmm_vhost_user::MAX_QUEUE_SIZE),
        config_size: u32::try_from(vdev_wire::CONFIG_SIZE).unwrap_or(u32::MAX),
        unsealed_memory: match tenant.unsealed_memory {
            UnsealedMemory::Warn => "warn",
            UnsealedMemory::Refuse => "refuse",
        }
        .to_owned(),
        iommu: tenant.iommu.name().to_owned(),
        endpoints: u32::try_from(tenant.slices.len()).unwrap_or(u32::MAX),
        memory: tenant.slices.iter().fold(0, |sum, slice| sum.saturating_add(slice.memory)),
    }
}

fn endpoints(config: &Config, Tenant { config: tenant, peers, .. }: &Tenant) -> Vec<EndpointInfo> {
    let gpu = |slice: &SliceConfig| Some(config.devices.get(slice.device)?.gpu.as_ref()?.which.as_str());
    let reaches = |slice: &SliceConfig, other: &SliceConfig| {
        let peer = peers.get(gpu(slice)?, gpu(other)?)?;
        let link = peer.link.clone().unwrap_or_else(|| "unknown".to_owned());
        let (name, rank) = (other.name.clone(), peer.rank);
        Some(PeerInfo { name, access: peer.access, atomics: peer.atomics, rank, link })
    };
    let info = |(id, slice): (u32, &SliceConfig)| {
        let device = config.devices.get(slice.device)?;
        let staged = tenant.staged.iter().filter(|pair| u32::from(pair.accessor) == id);
        let name = |index: u16| tenant.slices.get(usize::from(index)).map(|slice| slice.name.clone());
        Some(EndpointInfo {
            tenant: tenant.name.clone(),
            endpoint: id,
            name: slice.name.clone(),
            device: device.name.clone(),
            kind: device.kind.name().to_owned(),
            memory: slice.memory,
            engines: u32::from(device.engines),
            bandwidth: device.link.bandwidth,
            latency_ns: device.link.latency_ns,
            staged_to: staged.filter_map(|pair| name(pair.owner)).collect(),
            peers: tenant.slices.iter().filter_map(|other| reaches(slice, other)).collect(),
        })
    };
    (0..).zip(&tenant.slices).filter_map(info).collect()
}

fn faults(tenants: &[Tenant], only: Option<&str>, last: Option<u32>, since: Option<&BTreeMap<String, u64>>) -> Reply {
    let chosen: Vec<_> = tenants
        .iter()
        .filter(|tenant| only.is_none_or(|name| tenant.config.name == name))
        .map(|tenant| Source { config: &tenant.config, session: tenant.session, page: &tenant.page })
        .collect();
    if let (Some(name), true) = (only, chosen.is_empty()) {
        return Reply::Error(unknown_tenant(tenants, name));
    }
    Reply::Faults(faults::faults(&chosen, last, since))
}
