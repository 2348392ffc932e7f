//! What the operator is told, read from tenants' pages and the configuration.
//!
//! Pages are written by workers: whatever number stands there becomes a name or is shown as it is. Not here: the connection.

use iommu_addr::EndpointId;
use vdev_device::{Counter, Gauge};
use vdev_wire::{ACCESS_READ, ACCESS_WRITE, FaultReason, OWNER_HIDDEN, Status};
use vmm_broker::{FAULT_SLOTS, FaultEntry, UnsealedMemory};
use vmm_control::{
    DaemonStatus, EndpointInfo, EndpointsReply, ErrorCode, ErrorReply, FaultInfo, FaultTotals, FaultsReply, Party,
    Reply, Request, StatusReply, TenantInfo, TenantStatus, TenantsReply,
};

use super::Supervisor;
use super::child::Child;
use super::tenant::Tenant;
use crate::config::{Config, TenantConfig};

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
            },
            tenants: tenants.iter().map(status).collect(),
        }),
        Request::Tenants => Reply::Tenants(TenantsReply { tenants: config.tenants.iter().map(tenant_info).collect() }),
        Request::Endpoints => {
            let endpoints = config.tenants.iter().flat_map(|tenant| endpoints(config, tenant)).collect();
            Reply::Endpoints(EndpointsReply { endpoints })
        }
        Request::Faults { tenant, last } => faults(tenants, tenant.as_deref(), last),
    }
}

fn status(tenant: &Tenant) -> TenantStatus {
    let page = &tenant.page;
    let counters = Counter::ALL.iter().map(|counter| (counter.name().to_owned(), page.counter(*counter as usize)));
    let gauges = Gauge::ALL.iter().map(|gauge| (gauge.name().to_owned(), page.gauge(*gauge as usize)));
    TenantStatus {
        name: tenant.config.name.clone(),
        state: tenant.state(),
        session: tenant.session,
        worker_pid: tenant.worker().map(Child::pid),
        keeper_pid: tenant.keeper().map(Child::pid),
        last_outage_us: tenant.last_outage.and_then(|outage| u64::try_from(outage.as_micros()).ok()),
        failures: tenant.failures,
        faults: page.faults(0).total,
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
        endpoints: u32::try_from(tenant.slices.len()).unwrap_or(u32::MAX),
        memory: tenant.slices.iter().fold(0, |sum, slice| sum.saturating_add(slice.memory)),
    }
}

fn endpoints(config: &Config, tenant: &TenantConfig) -> Vec<EndpointInfo> {
    let info = |(id, slice): (u32, &crate::config::SliceConfig)| {
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
        })
    };
    (0..).zip(&tenant.slices).filter_map(info).collect()
}

fn faults(tenants: &[Tenant], only: Option<&str>, last: Option<u32>) -> Reply {
    let chosen: Vec<_> = tenants.iter().filter(|tenant| only.is_none_or(|name| tenant.config.name == name)).collect();
    if let (Some(name), true) = (only, chosen.is_empty()) {
        let names: Vec<_> = tenants.iter().map(|tenant| tenant.config.name.as_str()).collect();
        let message = format!("There is no tenant {name:?}; there are: {}", names.join(", "));
        return Reply::Error(ErrorReply { code: ErrorCode::UnknownTenant, message });
    }
    let most = last.map_or(FAULT_SLOTS, |last| usize::try_from(last).unwrap_or(usize::MAX)).min(FAULT_SLOTS);
    let mut reply = FaultsReply { tenants: Vec::new(), faults: Vec::new() };
    for tenant in chosen {
        let log = tenant.page.faults(most);
        let name = &tenant.config.name;
        reply.tenants.push(FaultTotals {
            tenant: name.clone(),
            total: log.total,
            overwritten: log.overwritten,
            torn: log.torn,
        });
        reply.faults.extend(log.records.iter().map(|entry| fault(&tenant.config, entry)));
    }
    reply.faults.sort_by_key(|fault| fault.time_ns);
    let surplus = reply.faults.len().saturating_sub(most);
    reply.faults.drain(..surplus);
    Reply::Faults(reply)
}

fn fault(tenant: &TenantConfig, entry: &FaultEntry) -> FaultInfo {
    let reason = FaultReason::from_raw(entry.reason).map(FaultReason::name);
    let status = Status::from_raw(entry.status).map(Status::name);
    FaultInfo {
        tenant: tenant.name.clone(),
        number: entry.number,
        time_ns: entry.time_ns,
        session: entry.session,
        domain: entry.domain,
        accessor: party(tenant, entry.accessor),
        owner: party(tenant, entry.owner),
        address: entry.address,
        access: match (entry.access & ACCESS_READ != 0, entry.access & ACCESS_WRITE != 0) {
            (true, true) => "read-write",
            (true, false) => "read",
            (false, true) => "write",
            (false, false) => "none",
        }
        .to_owned(),
        reason: reason.map_or_else(|| format!("reason {}", entry.reason), str::to_owned),
        status: status.map_or_else(|| format!("status {}", entry.status), str::to_owned),
        stream: entry.stream,
        cookie: entry.cookie,
        value: entry.value,
    }
}

fn party(tenant: &TenantConfig, raw: u32) -> Option<Party> {
    if raw == OWNER_HIDDEN {
        return None;
    }
    let EndpointId { host, id } = EndpointId::from_raw(raw);
    let slice = tenant.slices.get(usize::from(id)).filter(|_| host == 0);
    Some(Party { endpoint: raw, name: slice.map(|slice| slice.name.clone()) })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn tenant() -> TenantConfig {
        let config = Config::parse(Path::new("demo.toml"), include_str!("../../../../configs/demo.toml")).unwrap();
        config.tenants.into_iter().next().unwrap()
    }

    #[test]
    fn a_fault_is_told_in_names() {
        let entry = FaultEntry {
            accessor: 0,
            owner: 1,
            access: ACCESS_WRITE,
            reason: FaultReason::Peer as u8,
            status: Status::Denied.to_raw(),
            ..FaultEntry::default()
        };
        let told = fault(&tenant(), &entry);
        assert_eq!(told.accessor, Some(Party { endpoint: 0, name: Some("gpu0".into()) }));
        assert_eq!(told.owner, Some(Party { endpoint: 1, name: Some("fpga0".into()) }));
        assert_eq!((told.access.as_str(), told.reason.as_str(), told.status.as_str()), ("write", "PEER", "DENIED"));
    }

    #[test]
    fn numbers_that_mean_nothing_are_shown_as_they_are() {
        let entry = FaultEntry {
            accessor: OWNER_HIDDEN,
            owner: 0x0001_0000,
            access: 0xfc,
            reason: 0xee,
            status: 0xdead_beef,
            ..FaultEntry::default()
        };
        let told = fault(&tenant(), &entry);
        assert_eq!(told.accessor, None);
        assert_eq!(
            told.owner,
            Some(Party { endpoint: 0x0001_0000, name: None }),
            "another host's endpoint 0 is not ours"
        );
        assert_eq!((told.access.as_str(), told.reason.as_str()), ("none", "reason 238"));
        assert_eq!(told.status, "status 3735928559");
    }
}
