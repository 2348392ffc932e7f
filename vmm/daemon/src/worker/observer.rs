//! What the device tells the operator, into the tenant's page.
//!
//! Not here: reading it.

use std::time::{SystemTime, UNIX_EPOCH};

use iommu_addr::EndpointId;
use vdev_device::{Counter, FaultRecord, Gauge, Observer};
use vdev_wire::{ACCESS_READ, ACCESS_WRITE, OWNER_HIDDEN};
use vmm_broker::{COUNTERS, FaultEntry, GAUGES, TenantPage};

const _: () =
    assert!(Counter::ALL.len() <= COUNTERS && Gauge::ALL.len() <= GAUGES, "the page has room for every number");

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
        let right = |has: bool, bit: u8| if has { bit } else { 0 };
        self.page.record(FaultEntry {
            number: 0,
            time_ns: u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
            session: self.session,
            domain: record.domain.0,
            accessor: raw(record.accessor),
            owner: raw(record.owner),
            address: record.address.0,
            access: right(record.access.read, ACCESS_READ) | right(record.access.write, ACCESS_WRITE),
            reason: record.reason as u8,
            stream: record.stream,
            status: record.status.to_raw(),
            cookie: record.cookie,
            value: record.value,
        });
    }

    fn count(&self, counter: Counter, by: u64) {
        self.page.count(counter as usize, by);
    }

    fn gauge(&self, gauge: Gauge, value: u64) {
        self.page.set_gauge(gauge as usize, value);
    }
}

#[cfg(test)]
mod tests {
    use iommu_addr::{Access, DomainId, Iova};
    use vdev_wire::{FaultReason, Status};

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
            mapping: None,
            is_foreign: false,
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
        };
        assert_eq!(log.records, [expected]);
        assert!(expected.time_ns > 0);
    }
}
