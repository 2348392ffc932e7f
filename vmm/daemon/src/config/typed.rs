//! What was typed: the file's keys, each in its own type, each still optional, nothing compared with anything else yet.
//!
//! Not here: defaults, names that refer to each other, sums.

use toml::de::DeTable;
use vmm_broker::{Completion, EndpointKind, IommuMode, Limits, UnsealedMemory};
use vmm_sandbox::{Fence, Mode};

use super::quantity::{RATE, SIZE, TIME};
use super::reader::{At, ConfigError, Section, Source};

/// A whole file.
#[derive(Debug)]
pub(crate) struct Typed {
    pub(crate) daemon: TypedDaemon,
    pub(crate) devices: Vec<TypedDevice>,
    pub(crate) tenants: Vec<TypedTenant>,
}

/// `[daemon]`.
#[derive(Debug, Default)]
pub(crate) struct TypedDaemon {
    pub(crate) runtime_dir: Option<At<String>>,
    pub(crate) control: Option<At<String>>,
    pub(crate) control_mode: Option<u32>,
    pub(crate) socket_mode: Option<u32>,
    pub(crate) seccomp: Option<Mode>,
    pub(crate) namespaces: Option<Fence>,
    pub(crate) landlock: Option<Fence>,
    pub(crate) core_dumps: Option<bool>,
    pub(crate) log: Option<At<String>>,
}

/// `[[device]]`.
#[derive(Debug)]
pub(crate) struct TypedDevice {
    pub(crate) line: usize,
    pub(crate) name: At<String>,
    pub(crate) kind: EndpointKind,
    pub(crate) memory: Option<At<u64>>,
    pub(crate) engines: Option<u32>,
    pub(crate) bandwidth: Option<u64>,
    pub(crate) latency: Option<At<u64>>,
    pub(crate) function: Option<TypedFunction>,
    pub(crate) gpu: Option<TypedGpu>,
}

/// The keys of a device that is a PCI function.
#[derive(Debug)]
pub(crate) struct TypedFunction {
    pub(crate) address: At<String>,
    /// The namespace or the BAR.
    pub(crate) part: u32,
    pub(crate) unmapped: Option<At<u64>>,
}

/// The keys of a device that is a GPU of the host.
#[derive(Debug)]
pub(crate) struct TypedGpu {
    pub(crate) which: At<String>,
    pub(crate) completion: Option<Completion>,
}

/// `[[tenant]]`.
#[derive(Debug)]
pub(crate) struct TypedTenant {
    pub(crate) line: usize,
    pub(crate) name: At<String>,
    pub(crate) socket: Option<At<String>>,
    pub(crate) socket_mode: Option<u32>,
    pub(crate) device_id: Option<u32>,
    pub(crate) submit_queues: Option<u32>,
    pub(crate) unsealed_memory: Option<UnsealedMemory>,
    pub(crate) iommu: Option<IommuMode>,
    pub(crate) drained: Option<bool>,
    pub(crate) limits: Option<At<Limits>>,
    pub(crate) slices: Vec<TypedSlice>,
    pub(crate) reach: Vec<TypedReach>,
}

/// `[[tenant.slice]]`.
#[derive(Debug)]
pub(crate) struct TypedSlice {
    pub(crate) line: usize,
    pub(crate) device: At<String>,
    pub(crate) memory: Option<At<u64>>,
    pub(crate) name: Option<At<String>>,
}

/// One entry of `reach`.
#[derive(Debug)]
pub(crate) struct TypedReach {
    pub(crate) line: usize,
    pub(crate) from: At<String>,
    pub(crate) to: At<String>,
    pub(crate) staged: bool,
}

/// Reads a file's text.
pub(crate) fn read(source: Source<'_>) -> Result<Typed, ConfigError> {
    let table = DeTable::parse(source.text).map_err(|error| {
        let line = error.span().map_or(1, |span| source.line(span.start));
        source.invalid(line, format!("Not TOML: {}", error.message()))
    })?;
    let mut root = Section::new(source, "the file", 1, table.get_ref());
    root.only(&["daemon", "device", "tenant"])?;
    let daemon = root.table("daemon", "[daemon]")?.map(daemon).transpose()?.unwrap_or_default();
    let devices = root.tables("device", "[[device]]")?.into_iter().map(device).collect::<Result<_, _>>()?;
    let tenants = root.tables("tenant", "[[tenant]]")?.into_iter().map(tenant).collect::<Result<_, _>>()?;
    Ok(Typed { daemon, devices, tenants })
}

fn daemon(mut section: Section<'_>) -> Result<TypedDaemon, ConfigError> {
    section.only(&[
        "runtime_dir",
        "control",
        "control_mode",
        "socket_mode",
        "seccomp",
        "namespaces",
        "landlock",
        "core_dumps",
        "log",
    ])?;
    Ok(TypedDaemon {
        runtime_dir: section.string("runtime_dir")?,
        control: section.string("control")?,
        control_mode: section.mode("control_mode")?,
        socket_mode: section.mode("socket_mode")?,
        seccomp: section.choice("seccomp", &Mode::ALL.map(|mode| (mode.name(), mode)))?,
        namespaces: section.choice("namespaces", &Fence::ALL.map(|fence| (fence.name(), fence)))?,
        landlock: section.choice("landlock", &Fence::ALL.map(|fence| (fence.name(), fence)))?,
        core_dumps: section.flag("core_dumps")?,
        log: section.string("log")?,
    })
}

/// Keys of every `[[device]]`, whatever its kind.
const DEVICE: &[&str] = &[
    "name",
    "kind",
    "memory",
    "engines",
    "link",
    "address",
    "namespace",
    "bar",
    "unmapped",
    "erase",
    "gpu",
    "completion",
];

fn device(mut section: Section<'_>) -> Result<TypedDevice, ConfigError> {
    section.only(DEVICE)?;
    let name = section.string("name")?;
    let kind = section.choice("kind", &EndpointKind::ALL.map(|kind| (kind.name(), kind)))?;
    let kind = section.require("kind", kind, "\"gpu\"")?;
    let keys: &'static [&'static str] = match kind {
        EndpointKind::Gpu | EndpointKind::Fpga => &["name", "kind", "memory", "engines", "link"],
        EndpointKind::Nvme => &["name", "kind", "memory", "address", "namespace", "erase"],
        EndpointKind::Memory => &["name", "kind", "memory", "address", "bar", "unmapped", "erase"],
        EndpointKind::Edu => &["name", "kind", "address"],
        EndpointKind::Cuda => &["name", "kind", "memory", "gpu", "completion"],
    };
    section.only_of(kind.name(), keys)?;
    let memory = match kind {
        EndpointKind::Edu => None,
        _ => Some(section.require("memory", section.quantity("memory", SIZE)?, SIZE.example)?),
    };
    let line = section.line();
    let name = section.require("name", name, "\"gpu0\"")?;
    let mut device = TypedDevice {
        line,
        name,
        kind,
        memory,
        engines: None,
        bandwidth: None,
        latency: None,
        function: None,
        gpu: None,
    };
    match kind {
        EndpointKind::Gpu | EndpointKind::Fpga => {
            device.engines = section.integer("engines", 1..=64)?;
            if let Some(link) = section.table("link", "{ bandwidth = \"16GB/s\", latency = \"1us\" }")? {
                (device.bandwidth, device.latency) = self::link(link)?;
            }
        }
        EndpointKind::Nvme | EndpointKind::Memory | EndpointKind::Edu => {
            device.function = Some(function(&section, kind)?);
        }
        EndpointKind::Cuda => device.gpu = Some(gpu(&section)?),
    }
    Ok(device)
}

/// What only a device that is a GPU of the host has.
fn gpu(section: &Section<'_>) -> Result<TypedGpu, ConfigError> {
    let which = section.string("gpu")?;
    Ok(TypedGpu {
        which: section.require("gpu", which, "\"0000:01:00.0\"")?,
        completion: section.choice("completion", &Completion::ALL.map(|completion| (completion.name(), completion)))?,
    })
}

/// What only a device that is a PCI function has.
fn function(section: &Section<'_>, kind: EndpointKind) -> Result<TypedFunction, ConfigError> {
    let address = section.string("address")?;
    let address = section.require("address", address, "\"0000:01:00.0\"")?;
    if kind == EndpointKind::Edu {
        return Ok(TypedFunction { address, part: 0, unmapped: None });
    }
    if section.flag("erase")? != Some(true) {
        return Err(section.refuse(
            "Whatever the device's memory holds is lost when a session of its tenant begins; if that is meant, add erase = true",
        ));
    }
    Ok(if kind == EndpointKind::Nvme {
        let namespace = section.integer("namespace", 1..=u32::MAX - 1)?;
        TypedFunction { address, part: namespace.unwrap_or(1), unmapped: None }
    } else {
        let bar = section.integer("bar", 0..=5)?;
        TypedFunction { address, part: bar.unwrap_or(2), unmapped: section.quantity("unmapped", SIZE)? }
    })
}

fn link(mut section: Section<'_>) -> Result<(Option<u64>, Option<At<u64>>), ConfigError> {
    section.only(&["bandwidth", "latency"])?;
    let bandwidth = section.quantity("bandwidth", RATE)?.map(|rate| rate.value);
    let latency = section.quantity("latency", TIME)?;
    Ok((bandwidth, latency))
}

fn tenant(mut section: Section<'_>) -> Result<TypedTenant, ConfigError> {
    section.only(&[
        "name",
        "socket",
        "socket_mode",
        "device_id",
        "submit_queues",
        "unsealed_memory",
        "iommu",
        "drained",
        "limits",
        "slice",
        "reach",
    ])?;
    let name = section.string("name")?;
    Ok(TypedTenant {
        line: section.line(),
        name: section.require("name", name, "\"vm0\"")?,
        socket: section.string("socket")?,
        socket_mode: section.mode("socket_mode")?,
        device_id: section.integer("device_id", 1..=65535)?,
        submit_queues: section.integer("submit_queues", 1..=super::MAX_SUBMIT_QUEUES)?,
        unsealed_memory: section
            .choice("unsealed_memory", &[("warn", UnsealedMemory::Warn), ("refuse", UnsealedMemory::Refuse)])?,
        iommu: section.choice("iommu", &IommuMode::ALL.map(|mode| (mode.name(), mode)))?,
        drained: section.flag("drained")?,
        limits: section.table("limits", "[tenant.limits]")?.map(limits).transpose()?,
        slices: section.tables("slice", "[[tenant.slice]]")?.into_iter().map(slice).collect::<Result<_, _>>()?,
        reach: section
            .tables("reach", "{ from = \"gpu0\", to = \"fpga0\", path = \"staged\" }")?
            .into_iter()
            .map(reach)
            .collect::<Result<_, _>>()?,
    })
}

fn slice(mut section: Section<'_>) -> Result<TypedSlice, ConfigError> {
    section.only(&["device", "memory", "name"])?;
    let device = section.string("device")?;
    let memory = section.quantity("memory", SIZE)?;
    Ok(TypedSlice {
        line: section.line(),
        device: section.require("device", device, "\"gpu0\"")?,
        memory,
        name: section.string("name")?,
    })
}

fn reach(mut section: Section<'_>) -> Result<TypedReach, ConfigError> {
    section.only(&["from", "to", "path"])?;
    let from = section.string("from")?;
    let to = section.string("to")?;
    let staged = section.choice("path", &[("staged", true), ("direct", false)])?;
    Ok(TypedReach {
        line: section.line(),
        from: section.require("from", from, "\"gpu0\"")?,
        to: section.require("to", to, "\"fpga0\"")?,
        staged: section.require("path", staged, "\"staged\"")?,
    })
}

/// Keys of `[tenant.limits]`.
pub(crate) const LIMITS: &[&str] = &[
    "max_domains",
    "max_mappings",
    "max_segments",
    "max_total_segments",
    "max_pinned_pages",
    "max_buffers",
    "stream_credits",
    "max_in_flight",
    "max_streams",
    "max_batch",
    "max_events",
    "control_rate",
    "default_timeout",
    "max_timeout",
    "weight",
];

fn limits(mut section: Section<'_>) -> Result<At<Limits>, ConfigError> {
    section.only(LIMITS)?;
    const ANY: std::ops::RangeInclusive<u32> = 1..=1 << 24;
    let limits = Limits {
        max_domains: section.integer("max_domains", ANY)?,
        max_mappings: section.integer("max_mappings", ANY)?,
        max_segments: section.integer("max_segments", 1..=1 << 16)?,
        max_total_segments: section.integer("max_total_segments", ANY)?,
        max_pinned_pages: section.integer("max_pinned_pages", 1..=u32::MAX)?,
        max_buffers: section.integer("max_buffers", ANY)?,
        stream_credits: section.integer("stream_credits", ANY)?,
        max_in_flight: section.integer("max_in_flight", ANY)?,
        max_streams: section.integer("max_streams", ANY)?,
        max_batch: section.integer("max_batch", 1..=1 << 12)?.and_then(|batch| u16::try_from(batch).ok()),
        max_events: section.integer("max_events", 1..=1 << 16)?,
        control_rate: section.integer("control_rate", 0..=1 << 24)?,
        default_timeout_ms: section.millis("default_timeout")?,
        max_timeout_ms: section.millis("max_timeout")?,
        weight: section.integer("weight", 1..=super::MAX_WEIGHT)?,
    };
    Ok(At { value: limits, line: section.line() })
}
