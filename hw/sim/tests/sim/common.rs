//! What the tests of the simulated engine share: endpoints, and a ledger with bandwidth.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hw_engine::conformance::APERTURES;
use hw_engine::{Direction, EndpointKind, EndpointSpec, LinkId, LinkLedger, Segments};
use hw_sim::{SimConfig, SimEndpoint};
use iommu_addr::{ApertureOffset, EndpointId, Gpa, Location, Segment};

pub(crate) const GPU: EndpointId = APERTURES[0].0;
pub(crate) const FPGA: EndpointId = APERTURES[1].0;

/// A GPU and an FPGA, as large as the suite's, each on a link of its own.
pub(crate) fn devices(latency: Duration, engines: u16) -> SimConfig {
    let kinds = [EndpointKind::Gpu, EndpointKind::Fpga];
    let endpoints = APERTURES.into_iter().zip(kinds).map(|((id, memory_len), kind)| SimEndpoint {
        spec: EndpointSpec {
            id,
            kind,
            name: format!("{kind}{id}"),
            memory_len,
            registers_len: if kind == EndpointKind::Fpga { 4096 } else { 0 },
            granularity: 4096,
            engines,
        },
        link: Some(LinkId(id.id)),
        latency,
    });
    SimConfig::new(endpoints.collect())
}

/// The same without links and latency.
pub(crate) fn instant() -> SimConfig {
    let mut config = devices(Duration::ZERO, 1);
    config.endpoints.iter_mut().for_each(|endpoint| endpoint.link = None);
    config
}

/// A ledger where every byte takes `per_byte` on every link.
pub(crate) struct Wires {
    per_byte: Duration,
    until: Mutex<HashMap<(LinkId, Direction), Duration>>,
}

impl Wires {
    pub(crate) fn new(per_byte: Duration) -> Arc<Self> {
        Arc::new(Self { per_byte, until: Mutex::default() })
    }
}

impl LinkLedger for Wires {
    fn reserve(&self, link: LinkId, direction: Direction, bytes: u64, now: Duration) -> Duration {
        let mut until = self.until.lock().unwrap();
        let until = until.entry((link, direction)).or_default();
        *until = now.max(*until) + self.per_byte * u32::try_from(bytes).unwrap();
        *until
    }
}

pub(crate) fn ram(gpa: u64, len: u64) -> Segments {
    [Segment { at: Location::Ram(Gpa(gpa)), len }][..].into()
}

pub(crate) fn own(endpoint: EndpointId, offset: u64, len: u64) -> Segments {
    [Segment { at: Location::Aperture { endpoint, offset: ApertureOffset(offset) }, len }][..].into()
}
