//! What the device tells the operator, into the tenant's page.
//!
//! Not here: reading it.

use std::time::{SystemTime, UNIX_EPOCH};

use iommu_addr::{Access, Addr, EndpointId};
use vdev_device::{Counter, FaultRecord, Gauge, Observer, Provenance};
use vdev_wire::{ACCESS_READ, ACCESS_WRITE, FaultReason, OWNER_HIDDEN};
use vmm_broker::{COUNTERS, FAULT_REASONS, FaultEntry, FaultMapping, GAUGES, TenantPage};

const _: () = {
    assert!(Counter::ALL.len() <= COUNTERS && Gauge::ALL.len() <= GAUGES, "the page has room for every number");
    assert!(FaultReason::ALL.len() < FAULT_REASONS, "and for every reason, which are numbered from 1");
};

/// Writes to a page.
#[derive(Debug)]
pub(crate) struct PageObserver {
    pub(crate) page: std::sync::Arc<TenantPage>,
    pub(crate) session: u32,
}

impl Observer for PageObserver {
    fn fault(&self, record: &FaultRecord) {
        let raw = |endpoint: Option<EndpointId>| endpoint.map_or(OWNER_HIDDEN, EndpointId::to_raw);
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.page.record(FaultEntry {
            number: 0,
            time_ns: u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
            session: self.session,
            domain: record.domain.0,
            accessor: raw(record.accessor),
            owner: raw(record.owner),
            address: record.address.0,
            access: rights(record.access),
            reason: record.reason as u8,
            stream: record.stream,
            status: record.status.to_raw(),
            cookie: record.cookie,
            value: record.value,
            mapping: record.mapping.map_or_else(FaultMapping::default, mapping),
        });
    }

    fn count(&self, counter: Counter, by: u64) {
        self.page.count(counter as usize, by);
    }

    fn gauge(&self, gauge: Gauge, value: u64) {
        self.page.set_gauge(gauge as usize, value);
    }
}

fn rights(access: Access) -> u8 {
    let right = |has: bool, bit: u8| if has { bit } else { 0 };
    right(access.read, ACCESS_READ) | right(access.write, ACCESS_WRITE)
}

fn mapping(of: Provenance) -> FaultMapping {
    FaultMapping {
        relation: of.relation as u8,
        kind: of.kind as u8,
        access: rights(of.access),
        is_draining: of.is_draining,
        first: of.range.start().raw(),
        last: of.range.last().raw(),
        request: of.request,
    }
}

#[cfg(test)]
mod tests {
    use iommu_addr::{DomainId, Iova, Range};
    use vdev_device::{MappingKind, Relation};
    use vdev_wire::Status;

    use super::*;

    #[test]
    fn what_the_device_says_stands_in_the_page() {
        let page = std::sync::Arc::new(TenantPage::create("test").unwrap());
        let observer = PageObserver { page: std::sync::Arc::clone(&page), session: 4 };
        observer.count(Counter::Ops, 3);
        observer.count(Counter::Timeouts, 1);
        observer.gauge(Gauge::InFlight, 9);
        observer.fault(&FaultRecord {
            domain: DomainId(5),
            accessor: Some(EndpointId::local(1)),
            owner: None,
            address: Iova(0x1000),
            access: Access::WRITE,
            reason: FaultReason::Peer,
            stream: 6,
            cookie: 7,
            status: Status::Denied,
            value: 8,
            mapping: Some(Provenance {
                relation: Relation::Held,
                kind: MappingKind::Registers,
                range: Range::new(Iova(0x1000), Iova(0x1fff)).unwrap(),
                access: Access::READ,
                request: 9,
                is_draining: true,
            }),
            is_foreign: true,
        });
        assert_eq!((page.counter(Counter::Ops as usize), page.counter(Counter::Timeouts as usize)), (3, 1));
        assert_eq!(page.gauge(Gauge::InFlight as usize), 9);
        let log = page.faults(1);
        let expected = FaultEntry {
            number: 1,
            time_ns: log.records[0].time_ns,
            session: 4,
            domain: 5,
            accessor: 1,
            owner: OWNER_HIDDEN,
            address: 0x1000,
            access: ACCESS_WRITE,
            reason: FaultReason::Peer as u8,
            stream: 6,
            status: Status::Denied.to_raw(),
            cookie: 7,
            value: 8,
            mapping: FaultMapping {
                relation: Relation::Held as u8,
                kind: MappingKind::Registers as u8,
                access: ACCESS_READ,
                is_draining: true,
                first: 0x1000,
                last: 0x1fff,
                request: 9,
            },
        };
        assert_eq!(log.records, [expected]);
        assert!(expected.time_ns > 0);
    }
}
