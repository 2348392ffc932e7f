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
            one("tenant a", "limits", Effect::Now, &["default_timeout: 5000 ms -> default", "max_batch: default -> 7"]),
        ),
        (
            "submit_queues = 2",
            "submit_queues = 3",
            one("tenant a", "submit_queues", Effect::Disconnect, &["submit_queues: 2 -> 3"]),
        ),
        ("submit_queues = 2", "device_id = 40", one("tenant a", "device_id", Effect::Now, &["device_id: 37 -> 40"])),
        ("submit_queues = 2", "drained = true", one("tenant a", "drained", Effect::Now, &["drained: false -> true"])),
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
                &["slice g: 4 MiB of g, endpoint 0 -> ", "slice h: 1 MiB of h, endpoint 1 -> 1 MiB of h, endpoint 0"],
            ),
        ),
        (
            "kind = \"fpga\"",
            "kind = \"gpu\"\nengines = 2",
            one("device h", "device", Effect::NewSession, &["kind: fpga -> gpu", "engines: 1 -> 2"]),
        ),
        ("memory = \"8MiB\"", "memory = \"9MiB\"", one("device g", "memory", Effect::Now, &["memory: 8 MiB -> 9 MiB"])),
        ("name = \"a\"\n    submit_queues = 2", "submit_queues = 2\nname = \"a\"", Vec::new()),
    ];
    for (from, to, expected) in cases {
        assert_eq!(changes(from, to), expected, "{to}");
    }
}

#[test]
fn tenants_and_devices_come_and_go() {
    let (less, more) = (BASE.split("[[tenant]]\n    name = \"b\"").next().unwrap(), BASE);
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
        let concerned = if subject == Subject::Device("ssd".into()) { vec![("a", Effect::NewSession)] } else { vec![] };
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
