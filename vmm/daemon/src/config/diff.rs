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
mod tests {
    use std::path::Path;

    use super::*;

    const BASE: &str = r#"
        [[device]]
        name = "g"
        kind = "gpu"
        memory = "8MiB"
        [[device]]
        name = "h"
        kind = "fpga"
        memory = "8MiB"
        [[tenant]]
        name = "a"
        submit_queues = 2
        slice = [{ device = "g", memory = "4MiB" }, { device = "h", memory = "1MiB" }]
        limits = { max_domains = 3, default_timeout = "5s" }
        [[tenant]]
        name = "b"
        slice = [{ device = "h", memory = "4MiB" }]
    "#;

    fn parse(text: &str) -> Config {
        Config::parse(Path::new("t.toml"), text).unwrap()
    }

    /// What `BASE` with `from` replaced by `to` changes: subject, aspect, effect, `key from to`.
    fn changes(from: &str, to: &str) -> Vec<(String, String, Effect, Vec<String>)> {
        assert!(BASE.contains(from), "{from:?} is in the base");
        let changes = differences(&parse(BASE), &parse(&BASE.replacen(from, to, 1)));
        let told = |change: &Change| {
            let info = change.info();
            let keys = info.keys.iter().map(|key| {
                let side = |side: &Option<String>| side.clone().unwrap_or_default();
                format!("{}: {} -> {}", key.key, side(&key.from), side(&key.to))
            });
            (format!("{} {}", info.subject, info.name), info.what, info.effect, keys.collect())
        };
        changes.iter().map(told).collect()
    }

    fn one(subject: &str, what: &str, effect: Effect, keys: &[&str]) -> Vec<(String, String, Effect, Vec<String>)> {
        vec![(subject.into(), what.into(), effect, keys.iter().map(|key| (*key).to_owned()).collect())]
    }

    #[test]
    fn every_change_is_named_with_its_keys_and_its_effect() {
        let cases = [
            ("max_domains = 3", "max_domains = 4", one("tenant a", "limits", Effect::Now, &["max_domains: 3 -> 4"])),
            (
                "default_timeout = \"5s\"",
                "max_batch = 7",
                one(
                    "tenant a",
                    "limits",
                    Effect::Now,
                    &["default_timeout: 5000 ms -> default", "max_batch: default -> 7"],
                ),
            ),
            (
                "submit_queues = 2",
                "submit_queues = 3",
                one("tenant a", "submit_queues", Effect::Disconnect, &["submit_queues: 2 -> 3"]),
            ),
            (
                "submit_queues = 2",
                "device_id = 40",
                one("tenant a", "device_id", Effect::Now, &["device_id: 37 -> 40"]),
            ),
            (
                "submit_queues = 2",
                "drained = true",
                one("tenant a", "drained", Effect::Now, &["drained: false -> true"]),
            ),
            (
                "submit_queues = 2",
                "socket = \"x\"",
                one("tenant a", "socket", Effect::Disconnect, &["socket: /run/peergate/a.sock -> /run/peergate/x"]),
            ),
            (
                "submit_queues = 2",
                "socket_mode = 0o600",
                one("tenant a", "socket_mode", Effect::Now, &["socket_mode: 0o660 -> 0o600"]),
            ),
            (
                "submit_queues = 2",
                "unsealed_memory = \"refuse\"",
                one("tenant a", "unsealed_memory", Effect::NextSession, &["unsealed_memory: warn -> refuse"]),
            ),
            (
                "submit_queues = 2",
                "iommu = \"lazy\"",
                one("tenant a", "iommu", Effect::NewSession, &["iommu: strict -> lazy"]),
            ),
            (
                "submit_queues = 2",
                "reach = [{ from = \"g\", to = \"h\", path = \"staged\" }]",
                one("tenant a", "reach", Effect::NewSession, &["g to h:  -> staged"]),
            ),
            (
                "{ device = \"g\", memory = \"4MiB\" }, ",
                "",
                one(
                    "tenant a",
                    "slices",
                    Effect::NewSession,
                    &[
                        "slice g: 4 MiB of g, endpoint 0 -> ",
                        "slice h: 1 MiB of h, endpoint 1 -> 1 MiB of h, endpoint 0",
                    ],
                ),
            ),
            (
                "kind = \"fpga\"",
                "kind = \"gpu\"\nengines = 2",
                one("device h", "device", Effect::NewSession, &["kind: fpga -> gpu", "engines: 1 -> 2"]),
            ),
            (
                "memory = \"8MiB\"",
                "memory = \"9MiB\"",
                one("device g", "memory", Effect::Now, &["memory: 8 MiB -> 9 MiB"]),
            ),
            ("name = \"a\"\n        submit_queues = 2", "submit_queues = 2\nname = \"a\"", Vec::new()),
        ];
        for (from, to, expected) in cases {
            assert_eq!(changes(from, to), expected, "{to}");
        }
    }

    #[test]
    fn tenants_and_devices_come_and_go() {
        let (less, more) = (BASE.split("[[tenant]]\n        name = \"b\"").next().unwrap(), BASE);
        let told = |from: &str, to: &str| {
            let changes = differences(&parse(from), &parse(to));
            changes.iter().map(|change| (change.subject.clone(), change.what, change.effect())).collect::<Vec<_>>()
        };
        let b = || Subject::Tenant("b".into());
        assert_eq!(told(more, less), [(b(), What::Removed, Effect::Disconnect)]);
        assert_eq!(told(less, more), [(b(), What::Added, Effect::Now)]);
        let device = "[[device]]\nname = \"new\"\nkind = \"gpu\"\nmemory = \"4KiB\"\n".to_owned() + BASE;
        let new = || Subject::Device("new".into());
        assert_eq!(told(BASE, &device), [(new(), What::Added, Effect::Now)], "the others are where they were");
        assert_eq!(told(&device, BASE), [(new(), What::Removed, Effect::Now)]);
    }

    #[test]
    fn another_function_or_another_part_of_it_is_another_device() {
        const FUNCTIONS: &str = r#"
            [[device]]
            name = "ssd"
            kind = "nvme"
            address = "0000:01:00.0"
            memory = "8MiB"
            erase = true
            [[device]]
            name = "mem"
            kind = "memory"
            address = "0000:02:00.0"
            memory = "8MiB"
            erase = true
            [[tenant]]
            name = "a"
            slice = [{ device = "ssd", memory = "8MiB" }]
        "#;
        let running = parse(FUNCTIONS);
        for (from, to, subject, key) in [
            ("01:00.0", "05:00.1", "ssd", ["address", "0000:01:00.0", "0000:05:00.1"]),
            ("kind = \"nvme\"", "kind = \"nvme\"\nnamespace = 2", "ssd", ["part", "1", "2"]),
            ("kind = \"memory\"", "kind = \"memory\"\nbar = 0", "mem", ["part", "2", "0"]),
            ("kind = \"memory\"", "kind = \"memory\"\nunmapped = \"4KiB\"", "mem", ["unmapped", "0 B", "4 KiB"]),
        ] {
            let changes = differences(&running, &parse(&FUNCTIONS.replacen(from, to, 1)));
            let [key, old, new] = key.map(str::to_owned);
            let keys = vec![KeyInfo { key, from: Some(old), to: Some(new) }];
            let subject = Subject::Device(subject.into());
            let concerned =
                if subject == Subject::Device("ssd".into()) { vec![("a", Effect::NewSession)] } else { vec![] };
            assert_eq!(impact(&running, &changes).into_iter().collect::<Vec<_>>(), concerned);
            assert_eq!(changes, [Change { subject, what: What::Device, keys }]);
            assert_eq!(changes[0].effect(), Effect::NewSession);
        }
        let same = FUNCTIONS.replacen("0000:01:00.0", "1:0.0", 1);
        assert_eq!(differences(&running, &parse(&same)), [], "it is the same address");
    }

    #[test]
    fn another_gpu_or_another_way_to_notice_its_ends_is_a_new_session() {
        const GPU: &str = r#"
            [[device]]
            name = "h200"
            kind = "cuda"
            gpu = "0000:06:00.0"
            memory = "8MiB"
            [[tenant]]
            name = "a"
            slice = [{ device = "h200", memory = "8MiB" }]
        "#;
        let running = parse(GPU);
        for (from, to, key) in [
            ("06:00.0", "07:00.0", ["gpu", "0000:06:00.0", "0000:07:00.0"]),
            ("kind = \"cuda\"", "kind = \"cuda\"\ncompletion = \"spin\"", ["completion", "sleep", "spin"]),
        ] {
            let changes = differences(&running, &parse(&GPU.replacen(from, to, 1)));
            let [key, old, new] = key.map(str::to_owned);
            let keys = vec![KeyInfo { key, from: Some(old), to: Some(new) }];
            let impact: Vec<_> = impact(&running, &changes).into_iter().collect();
            assert_eq!(impact, [("a", Effect::NewSession)]);
            assert_eq!(changes, [Change { subject: Subject::Device("h200".into()), what: What::Device, keys }]);
        }
        let same = GPU.replacen("0000:06:00.0", "6:0.0", 1);
        assert_eq!(differences(&running, &parse(&same)), [], "it is the same address");
    }

    #[test]
    fn a_device_that_changes_concerns_the_tenants_that_have_slices_of_it() {
        let running = parse(BASE);
        let on = |from: &str, to: &str| {
            let changes = differences(&running, &parse(&BASE.replacen(from, to, 1)));
            let impact = impact(&running, &changes);
            impact.into_iter().map(|(tenant, effect)| (tenant.to_owned(), effect)).collect::<Vec<_>>()
        };
        assert_eq!(on("\"gpu\"", "\"fpga\""), [("a".to_owned(), Effect::NewSession)]);
        let both = [("a".to_owned(), Effect::NewSession), ("b".to_owned(), Effect::NewSession)];
        assert_eq!(on("\"fpga\"", "\"gpu\""), both);
        assert_eq!(on("memory = \"8MiB\"", "memory = \"9MiB\""), [], "there is only more to give");
    }

    #[test]
    fn nothing_of_a_tenant_changes_unseen() {
        let mut running = parse(BASE);
        // A new field must be told, too: then it belongs here and in `told`.
        let TenantConfig {
            name: _,
            socket,
            socket_mode,
            device_id,
            submit_queues,
            unsealed_memory,
            iommu,
            drained,
            limits,
            slices,
            staged,
        } = parse(BASE).tenants.swap_remove(0);
        let changed = [
            TenantConfig { socket: socket.join("x"), ..running.tenants[0].clone() },
            TenantConfig { socket_mode: socket_mode + 1, ..running.tenants[0].clone() },
            TenantConfig { device_id: device_id + 1, ..running.tenants[0].clone() },
            TenantConfig { submit_queues: submit_queues + 1, ..running.tenants[0].clone() },
            TenantConfig { unsealed_memory: UnsealedMemory::Refuse, ..running.tenants[0].clone() },
            TenantConfig { iommu: vmm_broker::IommuMode::Lazy, ..running.tenants[0].clone() },
            TenantConfig { drained: !drained, ..running.tenants[0].clone() },
            TenantConfig { limits: Limits { max_batch: Some(1), ..limits }, ..running.tenants[0].clone() },
            TenantConfig { slices: slices[1..].to_vec(), ..running.tenants[0].clone() },
            TenantConfig { staged: vec![vmm_broker::Staged { accessor: 1, owner: 0 }], ..running.tenants[0].clone() },
        ];
        assert_eq!((unsealed_memory, iommu, staged), (UnsealedMemory::Warn, vmm_broker::IommuMode::Strict, Vec::new()));
        let aspects: Vec<_> = changed
            .into_iter()
            .map(|tenant| {
                let mut wanted = running.clone();
                wanted.tenants[0] = tenant;
                let changes = differences(&running, &wanted);
                assert_eq!(changes.len(), 1, "{wanted:?}");
                changes[0].what
            })
            .collect();
        assert_eq!(aspects.len(), 10);
        assert_eq!(differences(&running.clone(), &running), []);
        running.tenants.reverse();
        assert_eq!(differences(&running, &parse(BASE)), [], "order is for people");
    }

    #[test]
    fn what_the_daemon_is_started_with_waits_for_its_restart() {
        let running = parse(BASE).daemon;
        assert_eq!(daemon(&running, &running), None);
        let text = "[daemon]\nlog = \"debug\"\nruntime_dir = \"/run/other\"\n".to_owned() + BASE;
        let (beside, wanted) = Config::parse_beside(Path::new("t.toml"), &text, &running).unwrap();
        assert_eq!(beside.daemon, running);
        assert_eq!(beside.tenants[0].socket, Path::new("/run/peergate/a.sock"), "where the daemon is now");
        let change = daemon(&running, &wanted).unwrap();
        let keys: Vec<_> = change.keys.iter().map(|key| key.key.as_str()).collect();
        assert_eq!((keys, change.effect()), (vec!["runtime_dir", "control", "log"], Effect::Restart));
    }
}
