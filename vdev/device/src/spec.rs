//! What a device is made from: endpoints, limits, and which endpoints reach each other.
//!
//! Not here: where these come from (configuration, topology).

use std::collections::HashMap;
use std::time::Duration;

use hw_engine::EndpointSpec;
use iommu_addr::{EndpointId, Iova, Range};
use vdev_wire::{PAGE_SIZE, PathReason, TransferPath};

/// Most endpoints of one device.
pub const MAX_ENDPOINTS: usize = 64;
/// Most submission queues of one device.
pub const MAX_SUBMIT_QUEUES: u16 = 64;

/// Most events that may wait: each takes 64 bytes.
const MAX_EVENTS: u32 = 1 << 16;

/// Limits of one tenant. Everything a guest can make the device remember is bounded by one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Domains at a time, those that are being destroyed included.
    pub max_domains: u32,
    /// Mappings at a time, MAP and ALLOC and all domains together; no more than [`hw_engine::EngineCaps::max_mappings`] in any case.
    pub max_mappings: u32,
    /// Segments in one MAP.
    pub max_segments: u32,
    /// Runs of consecutive memory in all mappings together; the device takes up to 32 bytes of memory for each.
    pub max_total_segments: u32,
    /// Pages of guest memory in all mappings together, each counted as often as it is mapped.
    pub max_pinned_pages: u32,
    /// Buffers at a time, all domains together.
    pub max_buffers: u32,
    /// Work descriptors that wait or run in one stream.
    pub stream_credits: u32,
    /// Work descriptors that wait or run in all streams together.
    pub max_in_flight: u32,
    /// Streams of one domain that have work or an error.
    pub max_streams: u32,
    /// Work descriptors in one chain.
    pub max_batch: u16,
    /// Events that wait for buffers; later ones are dropped.
    pub max_events: u32,
    /// Control requests that are taken in a second; the others wait in their queue. 0: as many as its thread can.
    pub control_rate: u32,
    /// Deadline of work that names none; whole milliseconds.
    pub default_timeout: Duration,
    /// Longest deadline; whole milliseconds.
    pub max_timeout: Duration,
    /// I/O virtual addresses that may be mapped; whole pages.
    pub iova: Range<Iova>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_domains: 64,
            max_mappings: 16384,
            max_segments: 512,
            max_total_segments: 1 << 18,
            max_pinned_pages: 1 << 28,
            max_buffers: 4096,
            stream_credits: 256,
            max_in_flight: 4096,
            max_streams: 64,
            max_batch: 128,
            max_events: 256,
            control_rate: 0,
            default_timeout: Duration::from_secs(10),
            max_timeout: Duration::from_secs(60),
            iova: Range::new(Iova(PAGE_SIZE), Iova((1 << 48) - 1)).unwrap_or(Range::all()),
        }
    }
}

/// How endpoints reach each other's memory, per ordered pair. Whoever is not named reaches it directly.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reach(HashMap<(EndpointId, EndpointId), (TransferPath, PathReason)>);

impl Reach {
    /// Everyone reaches everyone.
    pub fn all() -> Self {
        Self::default()
    }

    /// `accessor` does not reach `owner`'s memory itself, for this reason: the host stages.
    pub fn deny(&mut self, accessor: EndpointId, owner: EndpointId, reason: PathReason) {
        self.0.insert((accessor, owner), (TransferPath::Staged, reason));
    }

    /// `accessor` gets no right to `owner`'s memory, for this reason: nothing goes between them, nor is it staged.
    pub fn refuse(&mut self, accessor: EndpointId, owner: EndpointId, reason: PathReason) {
        self.0.insert((accessor, owner), (TransferPath::None, reason));
    }

    /// How bytes go between `accessor` and the memory of `owner`, and why. None do between those that are refused.
    pub fn verdict(&self, accessor: EndpointId, owner: EndpointId) -> (TransferPath, PathReason) {
        if accessor == owner {
            return (TransferPath::Local, PathReason::SameDevice);
        }
        self.0.get(&(accessor, owner)).copied().unwrap_or((TransferPath::Direct, PathReason::PeerReachable))
    }
}

/// Everything that a device is made from.
#[derive(Clone, Debug)]
pub struct DeviceSpec {
    /// Endpoints of this host, at most [`MAX_ENDPOINTS`], ids unique.
    pub endpoints: Vec<EndpointSpec>,
    /// Limits of the tenant.
    pub limits: Limits,
    /// Who reaches whom.
    pub reach: Reach,
    /// The session word of configuration space.
    pub session: u32,
    /// Submission queues, from 1 to [`MAX_SUBMIT_QUEUES`].
    pub submit_queues: u16,
    /// How long a submission queue's thread goes on looking for work after the last there was, before it asks to be woken. A wake-up costs tens of
    /// microseconds of both sides; more than about as long is spent in vain. Zero: not at all.
    pub linger: Duration,
}

/// A specification that makes no device.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// None, or too many.
    #[error("The device has {count} endpoints; give it 1 to {MAX_ENDPOINTS}")]
    EndpointCount {
        /// How many.
        count: usize,
    },
    /// An id used twice, or one of another host.
    #[error("Endpoint {endpoint} is named twice or belongs to another host; number them 0 to 65534 once each")]
    EndpointId {
        /// Which.
        endpoint: EndpointId,
    },
    /// Sizes that do not fit together.
    #[error(
        "Endpoint {endpoint}: the granularity must be a power of two of at least {PAGE_SIZE}, the memory a multiple of it \
         and the registers a multiple of {PAGE_SIZE}, both below 2^52 bytes"
    )]
    EndpointSize {
        /// Which.
        endpoint: EndpointId,
    },
    /// A name longer than 31 bytes.
    #[error("The name of endpoint {endpoint} is longer than 31 bytes; shorten it")]
    EndpointName {
        /// Which.
        endpoint: EndpointId,
    },
    /// None, or too many.
    #[error("The device has {count} submission queues; give it 1 to {MAX_SUBMIT_QUEUES}")]
    SubmitQueues {
        /// How many.
        count: u16,
    },
    /// Limits that the virtual IOMMU does not take.
    #[error("The virtual IOMMU cannot be made")]
    Iommu {
        /// Which.
        source: iommu_core::LimitsError,
    },
    /// A limit that no driver can live with.
    #[error(
        "The limit {limit} is out of range; every limit but control_rate is at least 1, and the default timeout at most the longest"
    )]
    Limit {
        /// Which.
        limit: &'static str,
    },
}

impl DeviceSpec {
    /// A [`DeviceSpec::linger`] for queues that a VM drives.
    pub const LINGER: Duration = Duration::from_micros(20);

    pub(crate) fn check(&self) -> Result<(), SpecError> {
        let count = self.endpoints.len();
        if count == 0 || count > MAX_ENDPOINTS {
            return Err(SpecError::EndpointCount { count });
        }
        for (index, endpoint) in self.endpoints.iter().enumerate() {
            check_endpoint(endpoint)?;
            if self.endpoints.iter().take(index).any(|other| other.id == endpoint.id) {
                return Err(SpecError::EndpointId { endpoint: endpoint.id });
            }
        }
        if self.submit_queues == 0 || self.submit_queues > MAX_SUBMIT_QUEUES {
            return Err(SpecError::SubmitQueues { count: self.submit_queues });
        }
        self.limits.check()
    }
}

fn check_endpoint(spec: &EndpointSpec) -> Result<(), SpecError> {
    let endpoint = spec.id;
    if endpoint.host != 0 || endpoint.id == u16::MAX {
        return Err(SpecError::EndpointId { endpoint });
    }
    let granule = spec.granularity;
    let fits = granule.is_power_of_two()
        && granule >= PAGE_SIZE
        && spec.memory_len.is_multiple_of(granule)
        && spec.registers_len.is_multiple_of(PAGE_SIZE)
        && spec.memory_len < iommu_addr::REGISTERS.0
        && spec.registers_len < iommu_addr::REGISTERS.0;
    if !fits {
        return Err(SpecError::EndpointSize { endpoint });
    }
    if spec.name.len() > 31 {
        return Err(SpecError::EndpointName { endpoint });
    }
    Ok(())
}

impl Limits {
    pub(crate) fn check(&self) -> Result<(), SpecError> {
        let counts = [
            ("max_domains", self.max_domains),
            ("max_mappings", self.max_mappings),
            ("max_segments", self.max_segments),
            ("max_total_segments", self.max_total_segments),
            ("max_pinned_pages", self.max_pinned_pages),
            ("max_buffers", self.max_buffers),
            ("stream_credits", self.stream_credits),
            ("max_in_flight", self.max_in_flight),
            ("max_streams", self.max_streams),
            ("max_batch", u32::from(self.max_batch)),
            ("max_events", self.max_events),
            ("default_timeout", millis(self.default_timeout)),
        ];
        for (limit, value) in counts {
            if value == 0 {
                return Err(SpecError::Limit { limit });
            }
        }
        if self.max_segments > 1 << 16 {
            return Err(SpecError::Limit { limit: "max_segments" });
        }
        if self.max_events > MAX_EVENTS {
            return Err(SpecError::Limit { limit: "max_events" });
        }
        if self.default_timeout > self.max_timeout || self.max_timeout > Duration::from_millis(u64::from(u32::MAX)) {
            return Err(SpecError::Limit { limit: "max_timeout" });
        }
        if !self.iova.is_aligned(PAGE_SIZE) {
            return Err(SpecError::Limit { limit: "iova" });
        }
        Ok(())
    }
}

/// Whole milliseconds, as the wire has them.
pub(crate) fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hw_engine::EndpointKind;

    fn endpoint(id: u16) -> EndpointSpec {
        EndpointSpec {
            id: EndpointId::local(id),
            kind: EndpointKind::Gpu,
            name: "gpu".into(),
            memory_len: 1 << 20,
            registers_len: 0,
            granularity: 4096,
            engines: 1,
        }
    }

    fn spec(endpoints: Vec<EndpointSpec>) -> DeviceSpec {
        DeviceSpec {
            endpoints,
            limits: Limits::default(),
            reach: Reach::all(),
            session: 1,
            submit_queues: 1,
            linger: Duration::ZERO,
        }
    }

    #[test]
    fn defaults_make_a_device() {
        assert_eq!(spec(vec![endpoint(0), endpoint(1)]).check(), Ok(()));
    }

    #[test]
    fn what_makes_no_device_is_named() {
        assert_eq!(spec(vec![]).check(), Err(SpecError::EndpointCount { count: 0 }));
        let twice = EndpointId::local(3);
        assert_eq!(spec(vec![endpoint(3), endpoint(3)]).check(), Err(SpecError::EndpointId { endpoint: twice }));
        let odd = EndpointSpec { memory_len: 4097, ..endpoint(3) };
        assert_eq!(spec(vec![odd]).check(), Err(SpecError::EndpointSize { endpoint: twice }));
        let long = EndpointSpec { name: "n".repeat(32), ..endpoint(3) };
        assert_eq!(spec(vec![long]).check(), Err(SpecError::EndpointName { endpoint: twice }));
        let mut unlimited = spec(vec![endpoint(0)]);
        unlimited.limits.max_streams = 0;
        assert_eq!(unlimited.check(), Err(SpecError::Limit { limit: "max_streams" }));
    }

    #[test]
    fn denied_pair_is_staged_one_way_only() {
        let (a, b) = (EndpointId::local(0), EndpointId::local(1));
        let mut reach = Reach::all();
        reach.deny(a, b, PathReason::Policy);
        assert_eq!(reach.verdict(a, b), (TransferPath::Staged, PathReason::Policy));
        assert_eq!(reach.verdict(b, a), (TransferPath::Direct, PathReason::PeerReachable));
        assert_eq!(reach.verdict(a, a), (TransferPath::Local, PathReason::SameDevice));
        reach.refuse(b, a, PathReason::Unproven);
        assert_eq!(reach.verdict(b, a), (TransferPath::None, PathReason::Unproven));
    }
}
