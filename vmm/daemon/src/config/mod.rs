//! The configuration: what was typed, and what it means.
//!
//! `reader` and `typed` turn the file into values that know their line; this module checks them against each other, fills in defaults and
//! answers a [`Config`] that needs no further checking. Every refusal names file, line, what is wrong and what to write instead.
//!
//! Not here: acting on it.

pub mod diff;
pub mod edit;
mod functions;
mod gpus;
mod numbers;
pub(crate) mod quantity;
pub(crate) mod reader;
pub mod store;
pub(crate) mod typed;
mod written;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use vmm_broker::{EndpointKind, Function, Gpu, IommuMode, Limits, Link, Staged, UnsealedMemory};
use vmm_sandbox::{Fence, Mode};

pub use reader::ConfigError;
use reader::{At, Source, nearest};
use typed::{Typed, TypedDaemon, TypedDevice, TypedSlice, TypedTenant};

/// The configuration that is shipped: every key, its default and its meaning.
pub const DEFAULT: &str = include_str!("../../../../configs/peergated.toml");
/// Where the runtime directory is unless the file says otherwise.
pub const RUNTIME_DIR: &str = "/run/peergate";
/// Name of the control socket within it.
pub const CONTROL: &str = "control.sock";
/// Most submission queues: the transport takes 64 queues, two of which are control and events.
pub(crate) const MAX_SUBMIT_QUEUES: u32 = 62;

/// Largest weight of a tenant.
const MAX_WEIGHT: u32 = 10_000;
const MAX_DEVICES: usize = 64;
const MAX_TENANTS: usize = 128;
const MAX_SLICES: usize = 32;
// A group for each device, and the kernel's log; a set-up's own four, a container, and two for each function.
const _: () = assert!(MAX_DEVICES < vmm_broker::MAX_FDS && 4 + 1 + 2 * MAX_SLICES <= vmm_broker::MAX_FDS);
/// Granule of a slice's size.
const PAGE: u64 = vdev_wire::PAGE_SIZE;
/// Most memory of one device: far below where registers begin.
const MAX_MEMORY: u64 = 1 << 46;
/// Longest latency of a link.
const MAX_LATENCY: u64 = 1_000_000_000;

/// What the operator wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The daemon itself.
    pub daemon: DaemonConfig,
    /// Devices of the host.
    pub devices: Vec<DeviceConfig>,
    /// Tenants.
    pub tenants: Vec<TenantConfig>,
}

/// The daemon itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaemonConfig {
    /// Directory of the sockets, absolute.
    pub runtime_dir: PathBuf,
    /// The operator's socket.
    pub control: PathBuf,
    /// Its permissions.
    pub control_mode: u32,
    /// What happens to system calls that are on no list.
    pub seccomp: Mode,
    /// Whether every process has namespaces of its own.
    pub namespaces: Fence,
    /// Whether Landlock denies every process what it knows.
    pub landlock: Fence,
    /// Whether a worker that crashes may leave a core dump.
    pub core_dumps: bool,
    /// Which log lines are written: a level, or a filter as of `RUST_LOG`.
    pub log: String,
}

/// A simulated device, a part of a PCI function, or memory of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: EndpointKind,
    /// Memory in bytes.
    pub memory: u64,
    /// The part of a PCI function that it is, if it is one.
    pub function: Option<Function>,
    /// The GPU of the host that it is, if it is one.
    pub gpu: Option<Gpu>,
    /// Copy engines.
    pub engines: u16,
    /// Its link to the fabric.
    pub link: Link,
    /// Number of that link among the host's: its place, unless the daemon was running already, see [`Config::keep_numbers`].
    pub number: u16,
}

/// A tenant: one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantConfig {
    /// Its name.
    pub name: String,
    /// Where its VMM connects.
    pub socket: PathBuf,
    /// Permissions of that socket.
    pub socket_mode: u32,
    /// The virtio device id that its VMM should use.
    pub device_id: u32,
    /// Submission queues.
    pub submit_queues: u16,
    /// What to do about guest memory that the VMM could truncate.
    pub unsealed_memory: UnsealedMemory,
    /// How long its PCI functions reach what their commands needed.
    pub iommu: IommuMode,
    /// No work is taken from its guest.
    pub drained: bool,
    /// Limits that differ from the device's own.
    pub limits: Limits,
    /// Its slices; a slice's place is its endpoint's number.
    pub slices: Vec<SliceConfig>,
    /// Ordered pairs of slices that do not reach each other.
    pub staged: Vec<Staged>,
}

/// A slice of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceConfig {
    /// Its name, unique within the tenant.
    pub name: String,
    /// Place of its device.
    pub device: usize,
    /// Memory in bytes.
    pub memory: u64,
}

impl Config {
    /// Reads and checks the file at `path`.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(path, &text)
    }

    /// Checks a file's text; `path` is for messages.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let source = Source { path, text };
        Meaning { source }.config(&typed::read(source)?, None)
    }

    /// Checks a file's text beside a daemon that runs: as [`Config::parse`], but with `running` in place of what the file says about the
    /// daemon, which is returned apart. Whatever depends on it, such as where sockets are, is as it would be now.
    pub fn parse_beside(path: &Path, text: &str, running: &DaemonConfig) -> Result<(Self, DaemonConfig), ConfigError> {
        let source = Source { path, text };
        let (typed, meaning) = (typed::read(source)?, Meaning { source });
        let wanted = meaning.config(&typed, None)?;
        Ok((meaning.config(&typed, Some(running))?, wanted.daemon))
    }
}

/// Turns what was typed into what it means.
#[derive(Clone, Copy)]
struct Meaning<'a> {
    source: Source<'a>,
}

type Checked<T> = Result<T, ConfigError>;

impl Meaning<'_> {
    fn config(self, typed: &Typed, running: Option<&DaemonConfig>) -> Checked<Config> {
        let daemon = running.cloned().map_or_else(|| self.daemon(&typed.daemon), Ok)?;
        if typed.devices.is_empty() || typed.devices.len() > MAX_DEVICES {
            let problem = format!("There are {} [[device]]; write 1 to {MAX_DEVICES}", typed.devices.len());
            return self.refuse(typed.devices.get(MAX_DEVICES).map_or(1, |device| device.line), problem);
        }
        if typed.tenants.len() > MAX_TENANTS {
            let problem = format!("There are {} [[tenant]]; write {MAX_TENANTS} or less", typed.tenants.len());
            return self.refuse(typed.tenants.get(MAX_TENANTS).map_or(1, |tenant| tenant.line), problem);
        }
        self.unique("device", typed.devices.iter().map(|device| &device.name))?;
        self.unique("tenant", typed.tenants.iter().map(|tenant| &tenant.name))?;
        let devices = (0..).zip(&typed.devices).map(|(number, device)| self.device(number, device));
        let devices = devices.collect::<Checked<Vec<_>>>()?;
        let tenant = |tenant| self.tenant(tenant, &typed.daemon, &daemon, &devices);
        let tenants = typed.tenants.iter().map(tenant).collect::<Checked<Vec<_>>>()?;
        self.sockets(typed, &daemon, &tenants)?;
        self.memory(typed, &devices, &tenants)?;
        self.functions(typed, &devices, &tenants)?;
        self.registers(typed, &devices)?;
        self.gpus(typed, &devices)?;
        Ok(Config { daemon, devices, tenants })
    }

    fn refuse<T>(self, line: usize, problem: impl Into<String>) -> Checked<T> {
        Err(self.source.invalid(line, problem))
    }

    fn daemon(self, typed: &TypedDaemon) -> Checked<DaemonConfig> {
        let runtime_dir = match &typed.runtime_dir {
            None => PathBuf::from(RUNTIME_DIR),
            Some(At { value, line }) => std::path::absolute(value)
                .map_err(|error| self.source.invalid(*line, format!("runtime_dir is not a path: {error}")))?,
        };
        let log = typed.log.as_ref().map_or("info", |log| &log.value).to_owned();
        if let Err(error) = crate::log::filter(&log) {
            return self.refuse(typed.log.as_ref().map_or(1, |log| log.line), format!("log: {error}"));
        }
        Ok(DaemonConfig {
            control: runtime_dir.join(typed.control.as_ref().map_or(CONTROL, |control| &control.value)),
            control_mode: typed.control_mode.unwrap_or(0o600),
            runtime_dir,
            seccomp: typed.seccomp.unwrap_or_default(),
            namespaces: typed.namespaces.unwrap_or_default(),
            landlock: typed.landlock.unwrap_or_default(),
            core_dumps: typed.core_dumps.unwrap_or(false),
            log,
        })
    }

    fn device(self, number: u16, typed: &TypedDevice) -> Checked<DeviceConfig> {
        let memory = typed.memory.as_ref().map_or(Ok(0), |memory| self.memory_of(typed.kind, memory))?;
        let latency_ns = match &typed.latency {
            Some(At { value, line }) if *value > MAX_LATENCY => {
                return self.refuse(*line, "latency is longer than a second; write \"2us\" or so");
            }
            latency => latency.as_ref().map_or(0, |latency| latency.value),
        };
        Ok(DeviceConfig {
            name: self.name("device", &typed.name)?,
            kind: typed.kind,
            memory,
            function: typed.function.as_ref().map(|function| self.function(function, memory)).transpose()?,
            gpu: typed.gpu.as_ref().map(|gpu| self.gpu(gpu)).transpose()?,
            engines: typed.engines.and_then(|engines| u16::try_from(engines).ok()).unwrap_or(1),
            link: Link { bandwidth: typed.bandwidth.unwrap_or(0), latency_ns },
            number,
        })
    }

    fn tenant(
        self,
        typed: &TypedTenant,
        defaults: &TypedDaemon,
        daemon: &DaemonConfig,
        devices: &[DeviceConfig],
    ) -> Checked<TenantConfig> {
        let name = self.name("tenant", &typed.name)?;
        if typed.slices.is_empty() || typed.slices.len() > MAX_SLICES {
            let problem =
                format!("Tenant {name:?} has {} [[tenant.slice]]; write 1 to {MAX_SLICES}", typed.slices.len());
            return self.refuse(typed.slices.get(MAX_SLICES).map_or(typed.line, |slice| slice.line), problem);
        }
        let slices = typed.slices.iter().map(|slice| self.slice(slice, devices)).collect::<Checked<Vec<_>>>()?;
        self.unique_slices(typed, &slices)?;
        Ok(TenantConfig {
            socket: match &typed.socket {
                Some(socket) => daemon.runtime_dir.join(&socket.value),
                None => daemon.runtime_dir.join(format!("{name}.sock")),
            },
            socket_mode: typed.socket_mode.or(defaults.socket_mode).unwrap_or(0o660),
            device_id: typed.device_id.unwrap_or(vdev_wire::DEFAULT_DEVICE_ID),
            submit_queues: typed.submit_queues.and_then(|queues| u16::try_from(queues).ok()).unwrap_or(2),
            unsealed_memory: typed.unsealed_memory.unwrap_or_default(),
            iommu: typed.iommu.unwrap_or_default(),
            drained: typed.drained.unwrap_or(false),
            limits: self.limits(typed)?,
            staged: self.staged(typed, &slices)?,
            slices,
            name,
        })
    }

    fn limits(self, typed: &TypedTenant) -> Checked<Limits> {
        let Some(At { value: limits, line }) = &typed.limits else { return Ok(Limits::default()) };
        let own = vdev_device::Limits::default();
        let millis = |time: std::time::Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        let default = limits.default_timeout_ms.unwrap_or(millis(own.default_timeout));
        let longest = limits.max_timeout_ms.unwrap_or(millis(own.max_timeout));
        if default > longest {
            let problem = format!("default_timeout ({default} ms) is longer than max_timeout ({longest} ms); set both");
            return self.refuse(*line, problem);
        }
        Ok(*limits)
    }

    fn slice(self, typed: &TypedSlice, devices: &[DeviceConfig]) -> Checked<SliceConfig> {
        let wanted = &typed.device.value;
        let found = devices.iter().enumerate().find(|(_, device)| device.name == *wanted);
        let Some((device, DeviceConfig { kind, memory: of_device, .. })) = found else {
            let hint = unknown(wanted, devices.iter().map(|device| device.name.as_str()));
            return self.refuse(typed.device.line, format!("There is no device {wanted:?}; {hint}"));
        };
        let has_memory = *of_device > 0;
        let memory = match &typed.memory {
            Some(memory) if has_memory => self.memory_of(*kind, memory)?,
            Some(memory) if memory.value > 0 => {
                return self.refuse(memory.line, format!("Device {wanted:?} has no memory; remove the key memory"));
            }
            None if has_memory => {
                return self.refuse(typed.line, "[[tenant.slice]] needs memory; add memory = \"64MiB\"");
            }
            _ => 0,
        };
        Ok(SliceConfig { name: self.name("slice", typed.name.as_ref().unwrap_or(&typed.device))?, device, memory })
    }

    fn staged(self, typed: &TypedTenant, slices: &[SliceConfig]) -> Checked<Vec<Staged>> {
        let endpoint = |name: &At<String>| {
            let index = slices.iter().position(|slice| slice.name == name.value);
            index.and_then(|index| u16::try_from(index).ok()).ok_or_else(|| {
                let hint = unknown(&name.value, slices.iter().map(|slice| slice.name.as_str()));
                self.source.invalid(name.line, format!("The tenant has no slice {:?}; {hint}", name.value))
            })
        };
        let mut seen = HashMap::new();
        for rule in &typed.reach {
            let (accessor, owner) = (endpoint(&rule.from)?, endpoint(&rule.to)?);
            let (from, to) = (&rule.from.value, &rule.to.value);
            if accessor == owner {
                return self.refuse(
                    rule.line,
                    format!("A slice always reaches itself; name two different ones in place of {from:?}"),
                );
            }
            if seen.insert((accessor, owner), rule.staged).is_some() {
                return self.refuse(rule.line, format!("reach says twice how {from:?} reaches {to:?}; remove one"));
            }
        }
        let mut staged: Vec<_> = seen
            .into_iter()
            .filter(|(_, staged)| *staged)
            .map(|((accessor, owner), _)| Staged { accessor, owner })
            .collect();
        staged.sort_unstable_by_key(|pair| (pair.accessor, pair.owner));
        Ok(staged)
    }

    fn memory_of(self, kind: EndpointKind, memory: &At<u64>) -> Checked<u64> {
        let bytes = memory.value;
        let (granule, least) = if kind == EndpointKind::Cuda { (gpus::GRANULE, "2MiB") } else { (PAGE, "4KiB") };
        if bytes == 0 || !bytes.is_multiple_of(granule) || bytes > MAX_MEMORY {
            let problem = format!(
                "memory is {}; write a multiple of {least} from \"{least}\" to \"{}TiB\"",
                quantity::size(bytes),
                MAX_MEMORY >> 40
            );
            return self.refuse(memory.line, problem);
        }
        Ok(bytes)
    }

    /// Names become parts of paths and of the guest's view, where 31 bytes fit.
    fn name(self, what: &str, name: &At<String>) -> Checked<String> {
        let text = &name.value;
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if text.len() > 31 || !text.starts_with(|c: char| c.is_ascii_alphanumeric()) || !text.chars().all(fits) {
            let problem = format!(
                "{text:?} is no name for a {what}; write 1 to 31 of a-z, A-Z, 0-9, '-', '_' and '.', beginning with a letter or digit"
            );
            return self.refuse(name.line, problem);
        }
        Ok(text.clone())
    }

    fn unique<'a>(self, what: &str, names: impl Iterator<Item = &'a At<String>>) -> Checked<()> {
        let mut seen = HashMap::new();
        for name in names {
            if let Some(first) = seen.insert(&name.value, name.line) {
                let problem = format!("There is another {what} {:?} in line {first}; choose another name", name.value);
                return self.refuse(name.line, problem);
            }
        }
        Ok(())
    }

    fn unique_slices(self, typed: &TypedTenant, slices: &[SliceConfig]) -> Checked<()> {
        let mut seen = HashMap::new();
        for (slice, typed) in slices.iter().zip(&typed.slices) {
            if let Some(first) = seen.insert(&slice.name, typed.line) {
                let name = &slice.name;
                let problem =
                    format!("The slice in line {first} is called {name:?}, too; give this one a name of its own");
                return self.refuse(typed.line, problem);
            }
        }
        Ok(())
    }

    /// No two sockets at one path.
    fn sockets(self, typed: &Typed, daemon: &DaemonConfig, tenants: &[TenantConfig]) -> Checked<()> {
        let mut seen = HashMap::from([(&daemon.control, "the control socket".to_owned())]);
        for (tenant, typed) in tenants.iter().zip(&typed.tenants) {
            let whose = format!("tenant {:?}", tenant.name);
            if let Some(other) = seen.insert(&tenant.socket, whose) {
                let line = typed.socket.as_ref().map_or(typed.line, |socket| socket.line);
                let path = tenant.socket.display();
                let problem = format!(
                    "The socket {path} is also that of {other}; choose another one for tenant {:?}",
                    tenant.name
                );
                return self.refuse(line, problem);
            }
        }
        Ok(())
    }

    /// No device gives away more memory than it has.
    fn memory(self, typed: &Typed, devices: &[DeviceConfig], tenants: &[TenantConfig]) -> Checked<()> {
        for (index, device) in devices.iter().enumerate() {
            let slices: Vec<_> = tenants
                .iter()
                .flat_map(|tenant| tenant.slices.iter().map(move |slice| (tenant, slice)))
                .filter(|(_, slice)| slice.device == index)
                .collect();
            // At most 2^12 slices of at most 2^46 bytes each.
            let total: u64 = slices.iter().map(|(_, slice)| slice.memory).sum();
            if total > device.memory {
                let list: Vec<_> = slices
                    .iter()
                    .map(|(tenant, slice)| {
                        format!("{} of tenant {:?}: {}", slice.name, tenant.name, quantity::size(slice.memory))
                    })
                    .collect();
                let problem = format!(
                    "Device {:?} has {}, but its slices take {} ({}); make slices smaller or the device larger",
                    device.name,
                    quantity::size(device.memory),
                    quantity::size(total),
                    list.join(", ")
                );
                let line = |device: &TypedDevice| device.memory.as_ref().map_or(device.line, |memory| memory.line);
                return self.refuse(typed.devices.get(index).map_or(1, line), problem);
            }
        }
        Ok(())
    }
}

fn unknown<'a>(typed: &str, names: impl Iterator<Item = &'a str> + Clone) -> String {
    match nearest(typed, names.clone()) {
        Some(near) => format!("did you mean {near:?}?"),
        None => format!("there are: {}", names.collect::<Vec<_>>().join(", ")),
    }
}
