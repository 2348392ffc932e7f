//! What supervisor and worker say to each other.
//!
//! Both are one binary, so the messages carry no version; a message that does not fit is an error of the program, or of a worker that has
//! been taken over, and never more than that.
//!
//! Numbers are as the operator typed them: a limit that is `None` is the device's own default. Not here: how they travel, what they mean.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::channel::Message;

/// From the supervisor to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToWorker {
    /// First message, with descriptors as [`SetupFds`] has them.
    Setup(Box<Setup>),
    /// The limits from now on, in place of those of the set-up.
    Limits(Limits),
    /// Take no more work from submission queues, and answer [`ToSupervisor::Drained`] once what was taken is over.
    Drain {
        /// Comes back in the answer.
        turn: u32,
    },
    /// Take work again.
    Resume {},
    /// Exit at once and answer nothing that is on its way: the next worker of the same connection does.
    MakeRoom {},
    /// End the connection in good order and exit.
    Shutdown {},
}

/// From a worker to the supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToSupervisor {
    /// The worker accepts connections from now on.
    Ready {},
    /// To [`ToWorker::Drain`], or, with turn 0, to [`Setup::drained`].
    Drained {
        /// Of the question.
        turn: u32,
    },
    /// How the tenant's GPUs reach each other, at most [`GpuPeer::MOST`] pairs in a message. Comes before [`ToSupervisor::Ready`].
    Peers {
        /// Some pairs; those that were told of before stay.
        peers: Vec<GpuPeer>,
    },
    /// The worker cannot go on and exits; the reason, for the operator.
    Failed {
        /// One line.
        reason: String,
    },
}

/// Everything a worker needs to serve its tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// The operator's name for the tenant.
    pub tenant: String,
    /// How many workers the tenant has had, this one included.
    pub session: u32,
    /// Submission queues.
    pub submit_queues: u16,
    /// The tenant's slices; slice n is endpoint n.
    pub endpoints: Vec<Endpoint>,
    /// Every link of the host, link n being number n of the ledger.
    pub links: Vec<Link>,
    /// Ordered pairs of endpoints that do not reach each other.
    pub staged: Vec<Staged>,
    /// The tenant's place in the ledger of links; no two workers have the same one at a time.
    pub place: u16,
    /// Limits of the tenant.
    pub limits: Limits,
    /// Take no work until [`ToWorker::Resume`].
    pub drained: bool,
    /// What to do about guest memory that a VMM could truncate.
    pub unsealed_memory: UnsealedMemory,
    /// How long PCI functions reach what their commands needed.
    pub iommu: IommuMode,
}

/// A slice of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// The operator's name for the slice.
    pub name: String,
    /// Kind of device.
    pub kind: EndpointKind,
    /// Memory of the slice in bytes.
    pub memory_len: u64,
    /// Copy engines.
    pub engines: u16,
    /// The device's link.
    pub link: u16,
    /// The part of a PCI function that it is, if it is one.
    pub function: Option<Function>,
    /// The GPU that it is memory of, if it is of one.
    pub gpu: Option<Gpu>,
}

impl Endpoint {
    /// Whether its device is simulated; then its memory is a file of the broker's.
    pub fn is_simulated(&self) -> bool {
        self.function.is_none() && self.gpu.is_none()
    }
}

/// A GPU of the host. Several tenants may have memory of it: each one's worker makes its own, and the broker counts it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Its PCI address, such as `0000:01:00.0`, or its UUID, such as `GPU-` and 32 hexadecimal digits in groups.
    pub which: String,
    /// How the ends of its copies are noticed.
    pub completion: Completion,
}

/// How one GPU of a tenant reaches another one's memory, for the operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuPeer {
    /// Who acts, by the order in which the worker's command line names GPUs.
    pub accessor: u16,
    /// Whose memory.
    pub owner: u16,
    /// Its engines reach there without a stop.
    pub access: bool,
    /// Atomic operations of its programs are atomic there.
    pub atomics: bool,
    /// How fast the way is among those of the host; 0 is the fastest.
    pub rank: i32,
    /// What is between the two, in a few words, if that is known.
    pub link: Option<String>,
}

impl GpuPeer {
    /// Pairs that fit into a message.
    pub const MOST: usize = 256;
}

/// How a worker notices that a GPU has ended a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Completion {
    /// It sleeps a while between looks.
    #[default]
    Sleep,
    /// It looks without a pause while there are copies: sooner, and a processor is busy with it.
    Spin,
}

impl Completion {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Sleep, Self::Spin];

    /// As configurations write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sleep => "sleep",
            Self::Spin => "spin",
        }
    }
}

/// A part of a PCI function of the host. The function belongs to one tenant as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Function {
    /// Its PCI address, such as `0000:01:00.0`.
    pub address: String,
    /// Of an NVMe controller the namespace, of memory the BAR; else 0.
    pub part: u32,
    /// So many bytes at the end of the slice are never mapped in the IOMMU: an operator's test.
    pub unmapped: u64,
}

/// What kind of device an endpoint is a slice of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndpointKind {
    /// A simulated GPU.
    Gpu,
    /// A simulated FPGA.
    Fpga,
    /// A namespace of an NVMe controller.
    Nvme,
    /// Memory behind a BAR.
    Memory,
    /// QEMU's `edu`: a DMA engine and no memory.
    Edu,
    /// A GPU of NVIDIA's, through its driver.
    Cuda,
}

impl EndpointKind {
    /// Every kind.
    pub const ALL: [Self; 6] = [Self::Gpu, Self::Fpga, Self::Nvme, Self::Memory, Self::Edu, Self::Cuda];

    /// Name for the operator.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Fpga => "fpga",
            Self::Nvme => "nvme",
            Self::Memory => "memory",
            Self::Edu => "edu",
            Self::Cuda => "cuda",
        }
    }
}

/// The link between a device and the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bytes a second each way; 0 is as fast as memory.
    pub bandwidth: u64,
    /// Nanoseconds from one end to the other.
    pub latency_ns: u64,
}

/// One ordered pair of endpoints whose transfers go through host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Staged {
    /// Who acts.
    pub accessor: u16,
    /// Whose memory.
    pub owner: u16,
}

/// Limits of a tenant and its share, as many as the operator set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Domains at a time.
    pub max_domains: Option<u32>,
    /// Mappings at a time.
    pub max_mappings: Option<u32>,
    /// Segments in one MAP.
    pub max_segments: Option<u32>,
    /// Segments in all mappings together.
    pub max_total_segments: Option<u32>,
    /// Pages of guest memory in all mappings together.
    pub max_pinned_pages: Option<u32>,
    /// Buffers at a time.
    pub max_buffers: Option<u32>,
    /// Work descriptors that wait or run in one stream.
    pub stream_credits: Option<u32>,
    /// Work descriptors that wait or run in all.
    pub max_in_flight: Option<u32>,
    /// Streams in one domain.
    pub max_streams: Option<u32>,
    /// Work descriptors in one chain.
    pub max_batch: Option<u16>,
    /// Events that wait for buffers.
    pub max_events: Option<u32>,
    /// Control requests in a second; 0 is no limit.
    pub control_rate: Option<u32>,
    /// Deadline of work that names none, in milliseconds.
    pub default_timeout_ms: Option<u32>,
    /// Longest deadline, in milliseconds.
    pub max_timeout_ms: Option<u32>,
    /// Share of a link that several tenants want at a time, in proportion to theirs.
    pub weight: Option<u32>,
}

/// What to do about guest memory whose file could be truncated under the worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnsealedMemory {
    /// Say so once and go on: a truncation ends the worker, and nobody else.
    #[default]
    Warn,
    /// End the connection.
    Refuse,
}

/// How long the host's IOMMU lets a PCI function reach what a command of its needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IommuMode {
    /// As long as the command runs.
    #[default]
    Strict,
    /// A moment longer, for the next command: faster, but a function that misbehaves reaches memory that was used a moment ago.
    Lazy,
}

impl IommuMode {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Strict, Self::Lazy];

    /// As configurations write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Lazy => "lazy",
        }
    }
}

/// The descriptors that come with [`ToWorker::Setup`].
#[derive(Debug)]
pub struct SetupFds {
    /// The tenant's listening socket.
    pub listener: OwnedFd,
    /// The tenant's page.
    pub page: OwnedFd,
    /// The ledger of the host's links.
    pub ledger: OwnedFd,
    /// The journal of the tenant's queues.
    pub journal: OwnedFd,
    /// One memory file for each endpoint of a simulated device.
    pub slices: Vec<OwnedFd>,
    /// What the endpoints of PCI functions need, if there are any.
    pub functions: Option<FunctionFds>,
}

/// The descriptors of a tenant's PCI functions.
#[derive(Debug)]
pub struct FunctionFds {
    /// The IOMMU domain that they are in.
    pub container: OwnedFd,
    /// Each function, in the order of [`Setup::functions`], and where to ask whether the IOMMU has stopped it.
    pub functions: Vec<(OwnedFd, OwnedFd)>,
}

impl Setup {
    /// The addresses of the tenant's PCI functions, each once, in the order of the endpoints that first name them.
    pub fn functions(&self) -> Vec<&str> {
        distinct(self.endpoints.iter().filter_map(|endpoint| endpoint.function.as_ref()).map(|of| of.address.as_str()))
    }

    /// The GPUs that the tenant has memory of, each once, in the order of the endpoints that first name them.
    pub fn gpus(&self) -> Vec<&str> {
        distinct(self.endpoints.iter().filter_map(|endpoint| endpoint.gpu.as_ref()).map(|of| of.which.as_str()))
    }

    fn simulated(&self) -> usize {
        self.endpoints.iter().filter(|endpoint| endpoint.is_simulated()).count()
    }

    fn function_fds(&self) -> usize {
        function_fds(self.functions().len())
    }
}

/// Each once, in the order in which they first come.
pub(crate) fn distinct<'a>(addresses: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut distinct = Vec::new();
    for address in addresses {
        if !distinct.contains(&address) {
            distinct.push(address);
        }
    }
    distinct
}

/// How many descriptors come with so many functions: the container, and two for each.
pub(crate) fn function_fds(functions: usize) -> usize {
    if functions == 0 { 0 } else { 1 + 2 * functions }
}

/// Descriptors that do not fit the message.
#[derive(Debug, thiserror::Error)]
#[error("The set-up came with {actual} descriptors in place of {wanted}")]
pub struct WrongFds {
    /// What the message needs.
    pub wanted: usize,
    /// What came.
    pub actual: usize,
}

/// Listener, page, ledger, journal.
const FIXED_FDS: usize = 4;

impl SetupFds {
    /// Sorts the descriptors of a received set-up; the order is that of the fields.
    pub fn sort(setup: &Setup, fds: Vec<OwnedFd>) -> Result<Self, WrongFds> {
        let (wanted, actual) = (FIXED_FDS + setup.simulated() + setup.function_fds(), fds.len());
        let mut fds = fds.into_iter();
        match (fds.next(), fds.next(), fds.next(), fds.next()) {
            (Some(listener), Some(page), Some(ledger), Some(journal)) if wanted == actual => {
                let slices = fds.by_ref().take(setup.simulated()).collect();
                let functions = fds.next().map(|container| {
                    let functions = std::iter::from_fn(|| Some((fds.next()?, fds.next()?))).collect();
                    FunctionFds { container, functions }
                });
                Ok(Self { listener, page, ledger, journal, slices, functions })
            }
            _ => Err(WrongFds { wanted, actual }),
        }
    }
}

impl Message for ToWorker {
    const HAS_FDS: bool = true;

    fn fds(&self) -> usize {
        match self {
            Self::Setup(setup) => FIXED_FDS + setup.simulated() + setup.function_fds(),
            Self::Limits(_) | Self::Drain { .. } | Self::Resume {} | Self::MakeRoom {} | Self::Shutdown {} => 0,
        }
    }
}

impl Message for ToSupervisor {
    const HAS_FDS: bool = false;

    fn fds(&self) -> usize {
        0
    }
}
