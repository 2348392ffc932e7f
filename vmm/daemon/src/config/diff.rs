//! What differs between the configuration that runs and the one that is wanted, and when each difference can count.
//!
//! A change of the daemon itself waits for its restart. A tenant's change counts at once where its guest need not notice; where the guest's
//! mappings or buffers would mean something else, the tenant begins a new session; where the VMM itself would have to know, it is
//! disconnected. A device changes for the tenants that have slices of it.
//!
//! Not here: carrying a change out, asking whether it may be.

use std::collections::BTreeMap;

use serde_json::Value;
use vmm_broker::{Function, Gpu, Limits, UnsealedMemory};
use vmm_control::{ChangeInfo, Effect, KeyInfo};

use super::quantity::{rate, size, time};
use super::{Config, DaemonConfig, DeviceConfig, SliceConfig, TenantConfig};

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// What is changed.
    pub subject: Subject,
    /// What about it.
    pub what: What,
    /// The keys that differ, for people.
    pub keys: Vec<KeyInfo>,
}

/// What is changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The daemon.
    Daemon,
    /// The device of that name.
    Device(String),
    /// The tenant of that name.
    Tenant(String),
}

/// What about it is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// It is new.
    Added,
    /// It goes.
    Removed,
    /// Keys of `[daemon]`.
    Daemon,
    /// How much memory a device has to give.
    Memory,
    /// What kind of device it is, its engines, its link.
    Device,
    /// What a guest may use.
    Limits,
    /// A tenant's slices.
    Slices,
    /// Which slices reach which.
    Reach,
    /// Where a tenant's socket is.
    Socket,
    /// The socket's permissions.
    SocketMode,
    /// How many submission queues there are.
    Queues,
    /// What the VMM is told to call the device.
    DeviceId,
    /// What to do about guest memory that could be truncated.
    UnsealedMemory,
    /// How long PCI functions reach what their commands needed.
    Iommu,
    /// Whether work is taken from the guest.
    Drained,
}

impl What {
    /// When a change of this counts.
    pub fn effect(self) -> Effect {
        match self {
            Self::Added | Self::Memory | Self::Limits | Self::SocketMode | Self::DeviceId | Self::Drained => {
                Effect::Now
            }
            Self::UnsealedMemory => Effect::NextSession,
            Self::Device | Self::Slices | Self::Reach | Self::Iommu => Effect::NewSession,
            Self::Removed | Self::Socket | Self::Queues => Effect::Disconnect,
            Self::Daemon => Effect::Restart,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Removed => "removed",
            Self::Daemon => "settings",
            Self::Memory => "memory",
            Self::Device => "device",
            Self::Limits => "limits",
            Self::Slices => "slices",
            Self::Reach => "reach",
            Self::Socket => "socket",
            Self::SocketMode => "socket_mode",
            Self::Queues => "submit_queues",
            Self::DeviceId => "device_id",
            Self::UnsealedMemory => "unsealed_memory",
            Self::Iommu => "iommu",
            Self::Drained => "drained",
        }
    }
}

impl Change {
    /// When it counts.
    pub fn effect(&self) -> Effect {
        match (&self.subject, self.what) {
            // No slice is left on it; what becomes of its tenants is said of them.
            (Subject::Device(_), What::Removed) => Effect::Now,
            (_, what) => what.effect(),
        }
    }

    /// The tenant that it is about.
    pub fn tenant(&self) -> Option<&str> {
        match &self.subject {
            Subject::Tenant(name) => Some(name),
            _ => None,
        }
    }

    /// As the operator is told.
    pub fn info(&self) -> ChangeInfo {
        let (subject, name) = match &self.subject {
            Subject::Daemon => ("daemon", ""),
            Subject::Device(name) => ("device", name.as_str()),
            Subject::Tenant(name) => ("tenant", name.as_str()),
        };
        ChangeInfo {
            subject: subject.to_owned(),
            name: name.to_owned(),
            what: self.what.name().to_owned(),
            keys: self.keys.clone(),
            effect: self.effect(),
        }
    }
}

/// Everything that `wanted` changes about `running`, but for the daemon itself.
pub fn differences(running: &Config, wanted: &Config) -> Vec<Change> {
    let mut changes = Vec::new();
    for (name, pair) in by_name(&running.devices, &wanted.devices, |device| &device.name) {
        changes.extend(device(name, pair));
    }
    for (name, pair) in by_name(&running.tenants, &wanted.tenants, |tenant| &tenant.name) {
        tenant(name, (running, pair.0), (wanted, pair.1), &mut changes);
    }
    changes
}

/// What each tenant of `running` or `wanted` notices of `changes`: the most that any of them does.
pub fn impact<'a>(running: &'a Config, changes: &'a [Change]) -> BTreeMap<&'a str, Effect> {
    let mut impact = BTreeMap::new();
    let mut note = |tenant: &'a str, effect: Effect| {
        let most = impact.entry(tenant).or_insert(effect);
        *most = effect.max(*most);
    };
    for change in changes {
        match &change.subject {
            Subject::Tenant(name) => note(name, change.effect()),
            Subject::Device(name) if change.what == What::Device => {
                let uses = |slice: &SliceConfig| running.devices.get(slice.device).is_some_and(|d| d.name == *name);
                let users = running.tenants.iter().filter(|tenant| tenant.slices.iter().any(uses));
                users.for_each(|tenant| note(&tenant.name, change.effect()));
            }
            Subject::Device(_) | Subject::Daemon => {}
        }
    }
    impact
}

/// What of the daemon itself differs.
pub fn daemon(running: &DaemonConfig, wanted: &DaemonConfig) -> Option<Change> {
    let told = |daemon: &DaemonConfig| {
        let DaemonConfig { runtime_dir, control, control_mode, seccomp, namespaces, landlock, core_dumps, log } =
            daemon;
        [
            ("runtime_dir", runtime_dir.display().to_string()),
            ("control", control.display().to_string()),
            ("control_mode", format!("{control_mode:#o}")),
            ("seccomp", seccomp.to_string()),
            ("namespaces", namespaces.to_string()),
            ("landlock", landlock.to_string()),
            ("core_dumps", core_dumps.to_string()),
            ("log", log.clone()),
        ]
    };
    let keys = keys(told(running), told(wanted));
    (!keys.is_empty()).then_some(Change { subject: Subject::Daemon, what: What::Daemon, keys })
}

/// What runs and what is wanted of one name.
type Pair<'a, T> = (Option<&'a T>, Option<&'a T>);

/// Those of `running` and `wanted` with the same name, in the order of `running` and then of `wanted`.
fn by_name<'a, T>(running: &'a [T], wanted: &'a [T], name: impl Fn(&T) -> &String) -> Vec<(String, Pair<'a, T>)> {
    let find = |list: &'a [T], wanted: &String| list.iter().find(|entry| name(entry) == wanted);
    let there = running.iter().map(|entry| (name(entry).clone(), (Some(entry), find(wanted, name(entry)))));
    let new = wanted.iter().filter(|entry| find(running, name(entry)).is_none());
    there.chain(new.map(|entry| (name(entry).clone(), (None, Some(entry))))).collect()
}

fn device(name: String, pair: Pair<'_, DeviceConfig>) -> Vec<Change> {
    let memory = |device: &DeviceConfig| [("memory", size(device.memory))];
    let rest = |device: &DeviceConfig| {
        let function = device.function.as_ref();
        let of = |told: fn(&Function) -> String| function.map_or_else(String::new, told);
        let of_gpu = |told: fn(&Gpu) -> String| device.gpu.as_ref().map_or_else(String::new, told);
        [
            ("address", of(|function| function.address.clone())),
            ("part", of(|function| function.part.to_string())),
            ("unmapped", of(|function| size(function.unmapped))),
            ("gpu", of_gpu(|gpu| gpu.which.clone())),
            ("completion", of_gpu(|gpu| gpu.completion.name().to_owned())),
            ("kind", device.kind.name().to_owned()),
            ("engines", device.engines.to_string()),
            ("bandwidth", rate(device.link.bandwidth)),
            ("latency", time(device.link.latency_ns)),
        ]
    };
    let all = |device: &DeviceConfig| memory(device).into_iter().chain(rest(device)).collect::<Vec<_>>();
    let found = match pair {
        (None, Some(new)) => vec![(What::Added, keys(Vec::new(), all(new)))],
        (Some(old), None) => vec![(What::Removed, keys(all(old), Vec::new()))],
        (Some(old), Some(new)) => {
            vec![(What::Memory, keys(memory(old), memory(new))), (What::Device, keys(rest(old), rest(new)))]
        }
        (None, None) => Vec::new(),
    };
    let subject = Subject::Device(name);
    let found = found.into_iter().filter(|(_, keys)| !keys.is_empty());
    found.map(|(what, keys)| Change { subject: subject.clone(), what, keys }).collect()
}

type Side<'a> = (&'a Config, Option<&'a TenantConfig>);

fn tenant(name: String, running: Side<'_>, wanted: Side<'_>, changes: &mut Vec<Change>) {
    let aspects = [
        What::Slices,
        What::Reach,
        What::Limits,
        What::Socket,
        What::SocketMode,
        What::Queues,
        What::DeviceId,
        What::UnsealedMemory,
        What::Iommu,
        What::Drained,
    ];
    let told = |(config, tenant): Side<'_>, what| tenant.map_or_else(Vec::new, |tenant| told(config, tenant, what));
    let subject = Subject::Tenant(name);
    let whole = match (running.1, wanted.1) {
        (None, _) => Some(What::Added),
        (_, None) => Some(What::Removed),
        _ => None,
    };
    if let Some(what) = whole {
        // Defaults go without saying.
        let shown = [What::Slices, What::Socket];
        let keys = shown.into_iter().flat_map(|what| keys(told(running, what), told(wanted, what))).collect();
        changes.push(Change { subject, what, keys });
        return;
    }
    for what in aspects {
        let keys = keys(told(running, what), told(wanted, what));
        if !keys.is_empty() {
            changes.push(Change { subject: subject.clone(), what, keys });
        }
    }
}

/// An aspect of a tenant, as keys and values.
fn told(config: &Config, tenant: &TenantConfig, what: What) -> Vec<(String, String)> {
    let one = |value: String| vec![(what.name().to_owned(), value)];
    match what {
        What::Slices => slices(config, tenant),
        What::Reach => {
            let name = |index: u16| tenant.slices.get(usize::from(index)).map_or("", |slice| slice.name.as_str());
            let rule = |pair: &vmm_broker::Staged| {
                (format!("{} to {}", name(pair.accessor), name(pair.owner)), "staged".to_owned())
            };
            tenant.staged.iter().map(rule).collect()
        }
        What::Limits => limits(&tenant.limits),
        What::Socket => one(tenant.socket.display().to_string()),
        What::SocketMode => one(format!("{:#o}", tenant.socket_mode)),
        What::Queues => one(tenant.submit_queues.to_string()),
        What::DeviceId => one(tenant.device_id.to_string()),
        What::UnsealedMemory => one(match tenant.unsealed_memory {
            UnsealedMemory::Warn => "warn".to_owned(),
            UnsealedMemory::Refuse => "refuse".to_owned(),
        }),
        What::Iommu => one(tenant.iommu.name().to_owned()),
        What::Drained => one(tenant.drained.to_string()),
        What::Added | What::Removed | What::Daemon | What::Memory | What::Device => Vec::new(),
    }
}

/// Each slice, and their order, which is that of the guest's endpoints.
fn slices(config: &Config, tenant: &TenantConfig) -> Vec<(String, String)> {
    let device = |slice: &SliceConfig| config.devices.get(slice.device).map_or("", |device| device.name.as_str());
    let told = |(number, slice): (usize, &SliceConfig)| {
        (format!("slice {}", slice.name), format!("{} of {}, endpoint {number}", size(slice.memory), device(slice)))
    };
    tenant.slices.iter().enumerate().map(told).collect()
}

/// Whatever limits there are, by the names that the file has for them.
fn limits(limits: &Limits) -> Vec<(String, String)> {
    let Ok(Value::Object(limits)) = serde_json::to_value(limits) else { return Vec::new() };
    let told = |(key, value): (String, Value)| match (key.strip_suffix("_ms"), value) {
        (short, Value::Null) => (short.unwrap_or(&key).to_owned(), "default".to_owned()),
        (Some(key), Value::Number(millis)) => (key.to_owned(), format!("{millis} ms")),
        (_, value) => (key, value.to_string()),
    };
    limits.into_iter().map(told).collect()
}

/// The keys whose values differ.
fn keys<K: Into<String>>(
    from: impl IntoIterator<Item = (K, String)>,
    to: impl IntoIterator<Item = (K, String)>,
) -> Vec<KeyInfo> {
    let from: Vec<(String, String)> = from.into_iter().map(|(key, value)| (key.into(), value)).collect();
    let mut to: Vec<(String, String)> = to.into_iter().map(|(key, value)| (key.into(), value)).collect();
    let mut keys = Vec::new();
    for (key, old) in from {
        let new = to.iter().position(|(other, _)| *other == key).map(|index| to.remove(index).1);
        if new.as_ref() != Some(&old) {
            keys.push(KeyInfo { key, from: Some(old), to: new });
        }
    }
    keys.extend(to.into_iter().map(|(key, new)| KeyInfo { key, from: None, to: Some(new) }));
    keys
}

#[cfg(test)]
mod tests;
