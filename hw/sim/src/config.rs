//! What the simulated devices of a tenant are.

use std::fmt;
use std::time::Duration;

use hw_engine::{EndpointSpec, LinkId, ThreadHook};
use iommu_addr::EndpointId;

use crate::Flaw;

/// The devices of one tenant.
#[derive(Clone)]
pub struct SimConfig {
    /// The endpoints, each id once. More can never be added.
    pub endpoints: Vec<SimEndpoint>,
    /// Transfers that the engine holds at a time, for all endpoints together; at least 1.
    pub queue_depth: usize,
    /// What is wrong with the devices, for tests of who has to notice.
    pub flaws: Vec<Flaw>,
    /// Runs on the engine's thread before anything else does.
    pub thread_hook: Option<ThreadHook>,
}

impl fmt::Debug for SimConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { endpoints, queue_depth, flaws, thread_hook: _ } = self;
        f.debug_struct("SimConfig")
            .field("endpoints", endpoints)
            .field("queue_depth", queue_depth)
            .field("flaws", flaws)
            .finish_non_exhaustive()
    }
}

impl SimConfig {
    /// Devices with room for 256 transfers, and without flaws.
    pub fn new(endpoints: Vec<SimEndpoint>) -> Self {
        Self { endpoints, queue_depth: 256, flaws: Vec::new(), thread_hook: None }
    }
}

/// One simulated slice of a device.
#[derive(Clone, Debug)]
pub struct SimEndpoint {
    /// What the guest sees. `engines` is how many transfers the endpoint carries out side by side, at least 1. Registers exist on FPGAs.
    pub spec: EndpointSpec,
    /// The link between the device and the fabric, whose bandwidth is the ledger's; endpoints with the same link are the same device.
    /// `None`: as fast as memory.
    pub link: Option<LinkId>,
    /// Time from the last byte to the end, for each transfer that the endpoint initiates. A staged copy pays it twice.
    pub latency: Duration,
}

impl SimEndpoint {
    /// An endpoint whose transfers cost no time but that of moving the bytes.
    pub fn instant(spec: EndpointSpec) -> Self {
        Self { spec, link: None, latency: Duration::ZERO }
    }
}

/// Why an engine could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Two endpoints have one id.
    #[error("Endpoint {endpoint} is there twice; give each endpoint its own number")]
    Twice {
        /// The id.
        endpoint: EndpointId,
    },
    /// A number that must be at least 1 is 0.
    #[error("The {what} is 0; give at least 1")]
    Zero {
        /// Which number.
        what: &'static str,
    },
    /// The engine's thread did not start.
    #[error("The engine's thread cannot be started; check the limits on threads and memory")]
    Thread {
        /// What the system said.
        source: std::io::Error,
    },
}

impl SimConfig {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.queue_depth == 0 {
            return Err(ConfigError::Zero { what: "queue depth" });
        }
        for (index, endpoint) in self.endpoints.iter().enumerate() {
            if endpoint.spec.engines == 0 {
                return Err(ConfigError::Zero { what: "number of copy engines" });
            }
            if self.endpoints[..index].iter().any(|other| other.spec.id == endpoint.spec.id) {
                return Err(ConfigError::Twice { endpoint: endpoint.spec.id });
            }
        }
        Ok(())
    }
}
