//! Configurations that are shipped, and what is said about ones that are wrong.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod hardware;

use std::path::Path;

use vmm_broker::{EndpointKind, IommuMode, Limits, Link, Staged, UnsealedMemory};
use vmm_daemon::config::{Config, DEFAULT};
use vmm_sandbox::{Fence, Mode};

/// A configuration that is right: the base of every wrong one.
const BASE: &str = r#"[daemon]
runtime_dir = "/run/test"

[[device]]
name = "gpu0"
kind = "gpu"
memory = "64MiB"

[[device]]
name = "fpga0"
kind = "fpga"
memory = "32MiB"

[[tenant]]
name = "vm0"

[[tenant.slice]]
device = "gpu0"
memory = "64MiB"

[[tenant.slice]]
device = "fpga0"
memory = "16MiB"
"#;

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(Path::new("t.toml"), text).map_err(|error| error.to_string())
}

/// What is said about `BASE` with `from` replaced by `to`.
fn refusal(from: &str, to: &str) -> String {
    refusal_of(BASE, from, to)
}

fn refusal_of(base: &str, from: &str, to: &str) -> String {
    assert!(base.contains(from), "{from:?} is in the base");
    parse(&base.replacen(from, to, 1)).unwrap_err()
}

#[test]
fn every_shipped_file_is_a_configuration() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let mut files = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            Config::load(&path).unwrap();
            files += 1;
        }
    }
    assert!(files >= 2);
}

/// The comments promise that a commented key shows its default.
#[test]
fn the_default_file_tells_the_defaults() {
    let bare = Config::parse(Path::new("bare.toml"), DEFAULT).unwrap();
    let mut shown = String::new();
    for line in DEFAULT.lines() {
        let uncommented = line.strip_prefix("# ").filter(|rest| rest.split_whitespace().nth(1) == Some("="));
        // The examples of a pair and of devices are no defaults.
        let default = uncommented.filter(|rest| !rest.starts_with("reach") && !rest.starts_with(' '));
        let header = line.strip_prefix("# ").filter(|rest| rest.starts_with("[tenant.limits]"));
        shown.push_str(default.or(header).unwrap_or(line));
        shown.push('\n');
    }
    let shown = Config::parse(Path::new("shown.toml"), &shown).unwrap();
    assert_eq!((bare.daemon, bare.devices), (shown.daemon, shown.devices));
    let (bare, shown) = (&bare.tenants[0], &shown.tenants[0]);
    assert_eq!((&bare.socket, bare.socket_mode, bare.device_id), (&shown.socket, shown.socket_mode, shown.device_id));
    assert_eq!((bare.submit_queues, bare.unsealed_memory), (shown.submit_queues, shown.unsealed_memory));
    assert_eq!((bare.drained, bare.iommu), (shown.drained, shown.iommu));
    assert_eq!(bare.slices, shown.slices);
    assert_eq!(bare.limits, Limits::default());
    assert_eq!(shown.limits.weight, Some(100));
    let (shown, own) = (shown.limits, vdev_device::Limits::default());
    let counts = [
        (shown.max_domains, own.max_domains),
        (shown.max_mappings, own.max_mappings),
        (shown.max_segments, own.max_segments),
        (shown.max_total_segments, own.max_total_segments),
        (shown.max_pinned_pages, own.max_pinned_pages),
        (shown.max_buffers, own.max_buffers),
        (shown.stream_credits, own.stream_credits),
        (shown.max_in_flight, own.max_in_flight),
        (shown.max_streams, own.max_streams),
        (shown.max_batch.map(u32::from), own.max_batch.into()),
        (shown.max_events, own.max_events),
        (shown.control_rate, own.control_rate),
    ];
    for (shown, own) in counts {
        assert_eq!(shown, Some(own));
    }
    let times = [(shown.default_timeout_ms, own.default_timeout), (shown.max_timeout_ms, own.max_timeout)];
    for (shown, own) in times {
        assert_eq!(shown.map(u128::from), Some(own.as_millis()));
    }
}

/// And those of its examples that are no keys of the devices that are there.
#[test]
fn the_examples_of_the_default_file_are_devices() {
    let example = |line: &str| -> Option<String> {
        let line = line.strip_prefix("#   ")?;
        (line == "[[device]]" || line.split_whitespace().nth(1) == Some("=")).then(|| format!("{line}\n"))
    };
    let examples: String = DEFAULT.lines().filter_map(example).collect();
    let shown = parse(&examples).unwrap().devices;
    assert_eq!(shown.iter().map(|device| device.kind.name()).collect::<Vec<_>>(), ["nvme", "memory", "edu", "cuda"]);
    let is_default =
        |line: &&str| ["namespace ", "bar ", "unmapped ", "completion "].iter().any(|key| line.starts_with(key));
    assert_eq!(examples.lines().filter(is_default).count(), 4);
    let bare: String = examples.lines().filter(|line| !is_default(line)).map(|line| format!("{line}\n")).collect();
    assert_eq!(parse(&bare).unwrap().devices, shown);
}

#[test]
fn what_is_not_typed_has_its_default() {
    let config = parse(BASE).unwrap();
    assert_eq!(config.daemon.control, Path::new("/run/test/control.sock"));
    assert_eq!((config.daemon.control_mode, config.daemon.core_dumps), (0o600, false));
    assert_eq!((config.daemon.seccomp, config.daemon.log.as_str()), (Mode::Enforce, "info"));
    assert_eq!((config.daemon.namespaces, config.daemon.landlock), (Fence::Enforce, Fence::Enforce));
    assert_eq!((config.devices[0].engines, config.devices[0].link), (1, Link { bandwidth: 0, latency_ns: 0 }));
    let tenant = &config.tenants[0];
    assert_eq!((tenant.socket.as_path(), tenant.socket_mode), (Path::new("/run/test/vm0.sock"), 0o660));
    assert_eq!((tenant.device_id, tenant.submit_queues), (37, 2));
    assert_eq!((tenant.unsealed_memory, tenant.limits), (UnsealedMemory::Warn, Limits::default()));
    assert_eq!(
        (tenant.slices[1].name.as_str(), tenant.slices[1].device, tenant.slices[1].memory),
        ("fpga0", 1, 16 << 20)
    );
    assert_eq!(tenant.iommu, IommuMode::Strict);
    assert!(tenant.staged.is_empty());
}

#[test]
fn everything_that_can_be_typed_is_understood() {
    let text = r#"
        [daemon]
        runtime_dir = "/tmp/x"
        control = "/tmp/other.sock"
        control_mode = 0o666
        socket_mode = 0o600
        seccomp = "log"
        namespaces = "off"
        landlock = "off"
        core_dumps = true
        log = "warn,vmm_daemon=debug"
        [[device]]
        name = "g"
        kind = "gpu"
        memory = 8388608
        engines = 4
        link = { bandwidth = "16GB/s", latency = "2us" }
        [[tenant]]
        name = "a"
        socket = "sub/a.sock"
        socket_mode = 0o666
        device_id = 42
        submit_queues = 4
        unsealed_memory = "refuse"
        iommu = "lazy"
        drained = true
        reach = [{ from = "one", to = "two", path = "staged" }, { from = "two", to = "one", path = "direct" }]
        slice = [{ device = "g", memory = "4MiB", name = "one" }, { device = "g", memory = "4MiB", name = "two" }]
        [tenant.limits]
        max_domains = 2
        max_batch = 16
        max_pinned_pages = 4294967295
        max_events = 1
        control_rate = 5000
        weight = 10000
        default_timeout = "500ms"
        max_timeout = "2s"
    "#;
    let config = parse(text).unwrap();
    assert_eq!((config.daemon.control.as_path(), config.daemon.control_mode), (Path::new("/tmp/other.sock"), 0o666));
    assert_eq!((config.daemon.seccomp, config.daemon.core_dumps), (Mode::Log, true));
    assert_eq!((config.daemon.namespaces, config.daemon.landlock), (Fence::Off, Fence::Off));
    let device = &config.devices[0];
    assert_eq!((device.kind, device.memory, device.engines), (EndpointKind::Gpu, 8 << 20, 4));
    assert_eq!(device.link, Link { bandwidth: 16_000_000_000, latency_ns: 2_000 });
    let tenant = &config.tenants[0];
    assert_eq!((tenant.socket.as_path(), tenant.socket_mode), (Path::new("/tmp/x/sub/a.sock"), 0o666));
    assert_eq!((tenant.device_id, tenant.submit_queues, tenant.unsealed_memory), (42, 4, UnsealedMemory::Refuse));
    assert!(tenant.drained && tenant.iommu == IommuMode::Lazy);
    assert_eq!(tenant.staged, [Staged { accessor: 0, owner: 1 }]);
    assert_eq!((tenant.limits.max_domains, tenant.limits.max_batch), (Some(2), Some(16)));
    let (pages, events, rate) = (tenant.limits.max_pinned_pages, tenant.limits.max_events, tenant.limits.control_rate);
    assert_eq!((pages, events, rate, tenant.limits.weight), (Some(u32::MAX), Some(1), Some(5000), Some(10_000)));
    assert_eq!((tenant.limits.default_timeout_ms, tenant.limits.max_timeout_ms), (Some(500), Some(2000)));
}

#[test]
fn unknown_keys_are_refused_with_their_line_and_the_nearest_name() {
    let cases = [
        ("runtime_dir", "runtimedir", "t.toml:2: Unknown key \"runtimedir\" in [daemon]; did you mean runtime_dir?"),
        ("memory", "memroy", "t.toml:7: Unknown key \"memroy\" in [[device]]; did you mean memory?"),
        ("memory = \"64MiB\"\n", "", "t.toml:4: [[device]] needs memory; add memory = \"64MiB\""),
        ("[[tenant]]", "[[tennant]]", "t.toml:14: Unknown key \"tennant\" in the file; did you mean tenant?"),
        (
            "memory = \"16MiB\"",
            "memory = \"16MiB\"\ncolour = 1",
            "t.toml:24: Unknown key \"colour\" in [[tenant.slice]]; there are: device, memory, name",
        ),
        (
            "name = \"vm0\"",
            "name = \"vm0\"\nsubmitqueues = 3",
            "t.toml:16: Unknown key \"submitqueues\" in [[tenant]]; did you mean submit_queues?",
        ),
    ];
    for (from, to, expected) in cases {
        assert_eq!(refusal(from, to), expected);
    }
}

#[test]
fn wrong_types_and_values_are_refused_with_what_to_write() {
    let cases = [
        (
            "memory = \"64MiB\"",
            "memory = \"64MB\"",
            "t.toml:7: memory is \"64MB\"; write a size, for example \"64MiB\" (units: B, KiB, MiB, GiB or TiB)",
        ),
        (
            "memory = \"64MiB\"",
            "memory = true",
            "t.toml:7: memory is true or false; write a size, for example \"64MiB\" (units: B, KiB, MiB, GiB or TiB)",
        ),
        (
            "memory = \"64MiB\"",
            "memory = 5000",
            "t.toml:7: memory is 5000 B; write a multiple of 4KiB from \"4KiB\" to \"64TiB\"",
        ),
        (
            "kind = \"gpu\"",
            "kind = \"gpuu\"",
            "t.toml:6: kind is \"gpuu\"; write \"gpu\" or \"fpga\" or \"nvme\" or \"memory\" or \"edu\" or \"cuda\"; did you mean \"gpu\"?",
        ),
        ("kind = \"gpu\"", "kind = 1", "t.toml:6: kind is a number; write a string in quotes"),
        ("kind = \"gpu\"", "kind = \"gpu\"\nengines = 0", "t.toml:7: engines is 0; write a whole number from 1 to 64"),
        (
            "kind = \"gpu\"",
            "kind = \"gpu\"\nengines = -1",
            "t.toml:7: engines is -1; write a whole number from 1 to 64",
        ),
        (
            "kind = \"gpu\"",
            "kind = \"gpu\"\nlink = { bandwidth = \"16GB\" }",
            "t.toml:7: bandwidth is \"16GB\"; write a bandwidth, for example \"16GB/s\" (units: B/s, kB/s, MB/s, GB/s, KiB/s, MiB/s or GiB/s)",
        ),
        (
            "kind = \"gpu\"",
            "kind = \"gpu\"\nlink = { latency = 5 }",
            "t.toml:7: latency is \"5\"; write a time, for example \"2us\" (units: ns, us, ms or s)",
        ),
        (
            "kind = \"gpu\"",
            "kind = \"gpu\"\nlink = \"16GB/s\"",
            "t.toml:7: link is a string; write a table { bandwidth = \"16GB/s\", latency = \"1us\" }",
        ),
        (
            "name = \"vm0\"",
            "name = \"../vm0\"",
            "t.toml:15: \"../vm0\" is no name for a tenant; write 1 to 31 of a-z, A-Z, 0-9, '-', '_' and '.', beginning with a letter or digit",
        ),
        (
            "name = \"vm0\"",
            "name = \"vm0\"\nsocket_mode = 660",
            "t.toml:16: socket_mode is 660; write the permissions in octal, for example 0o660",
        ),
        (
            "name = \"vm0\"",
            "name = \"vm0\"\nsubmit_queues = 63",
            "t.toml:16: submit_queues is 63; write a whole number from 1 to 62",
        ),
        (
            "name = \"vm0\"",
            "name = \"vm0\"\nlimits = { weight = 0 }",
            "t.toml:16: weight is 0; write a whole number from 1 to 10000",
        ),
        (
            "name = \"vm0\"",
            "name = \"vm0\"\nlimits = { control_rate = 16777217 }",
            "t.toml:16: control_rate is 16777217; write a whole number from 0 to 16777216",
        ),
        (
            "name = \"vm0\"",
            "name = \"vm0\"\nunsealed_memory = \"ignore\"",
            "t.toml:16: unsealed_memory is \"ignore\"; write \"warn\" or \"refuse\"",
        ),
        (
            "name = \"vm0\"",
            "name = \"vm0\"\niommu = \"off\"",
            "t.toml:16: iommu is \"off\"; write \"strict\" or \"lazy\"",
        ),
        (
            "name = \"vm0\"",
            "name = \"vm0\"\nlimits = { default_timeout = \"10us\" }",
            "t.toml:16: default_timeout is not in whole milliseconds up to 49 days; write \"500ms\" or \"10s\"",
        ),
        (
            "name = \"vm0\"",
            "name = \"vm0\"\nlimits = { max_timeout = \"1s\" }",
            "t.toml:16: default_timeout (10000 ms) is longer than max_timeout (1000 ms); set both",
        ),
        (
            "runtime_dir = \"/run/test\"",
            "seccomp = \"on\"",
            "t.toml:2: seccomp is \"on\"; write \"enforce\" or \"log\" or \"off\"",
        ),
        ("runtime_dir = \"/run/test\"", "core_dumps = \"no\"", "t.toml:2: core_dumps is a string; write true or false"),
        ("[daemon]\nruntime_dir = \"/run/test\"", "daemon = 1", "t.toml:1: daemon is a number; write a table [daemon]"),
        ("[[tenant]]", "[tenant]", "t.toml:14: tenant is a table; write a list of [[tenant]]"),
    ];
    for (from, to, expected) in cases {
        let said = refusal(from, to);
        assert_eq!(said, expected);
    }
}

#[test]
fn what_does_not_fit_together_is_refused_with_names_and_numbers() {
    let pair = |pair: &str| format!("name = \"vm0\"\nreach = [{pair}]");
    let cases = [
        (
            "device = \"fpga0\"",
            "device = \"fgpa0\"".to_owned(),
            "t.toml:22: There is no device \"fgpa0\"; did you mean \"fpga0\"?",
        ),
        (
            "device = \"fpga0\"",
            "device = \"nic\"".to_owned(),
            "t.toml:22: There is no device \"nic\"; there are: gpu0, fpga0",
        ),
        (
            "device = \"fpga0\"",
            "device = \"gpu0\"".to_owned(),
            "t.toml:21: The slice in line 17 is called \"gpu0\", too; give this one a name of its own",
        ),
        (
            "name = \"fpga0\"",
            "name = \"gpu0\"".to_owned(),
            "t.toml:10: There is another device \"gpu0\" in line 5; choose another name",
        ),
        (
            "memory = \"16MiB\"",
            "memory = \"48MiB\"".to_owned(),
            "t.toml:12: Device \"fpga0\" has 32 MiB, but its slices take 48 MiB (fpga0 of tenant \"vm0\": 48 MiB); make slices smaller or the device larger",
        ),
        (
            "name = \"vm0\"",
            "name = \"vm0\"\nsocket = \"control.sock\"".to_owned(),
            "t.toml:16: The socket /run/test/control.sock is also that of the control socket; choose another one for tenant \"vm0\"",
        ),
        (
            "name = \"vm0\"",
            pair("{ from = \"gpu0\", to = \"gpu0\", path = \"staged\" }"),
            "t.toml:16: A slice always reaches itself; name two different ones in place of \"gpu0\"",
        ),
        (
            "name = \"vm0\"",
            pair("{ from = \"gpu1\", to = \"fpga0\", path = \"staged\" }"),
            "t.toml:16: The tenant has no slice \"gpu1\"; did you mean \"gpu0\"?",
        ),
        (
            "name = \"vm0\"",
            pair("{ from = \"gpu0\", path = \"staged\" }"),
            "t.toml:16: { from = \"gpu0\", to = \"fpga0\", path = \"staged\" } needs to; add to = \"fpga0\"",
        ),
        (
            "name = \"vm0\"",
            pair(
                "{ from = \"gpu0\", to = \"fpga0\", path = \"staged\" }, { from = \"gpu0\", to = \"fpga0\", path = \"direct\" }",
            ),
            "t.toml:16: reach says twice how \"gpu0\" reaches \"fpga0\"; remove one",
        ),
    ];
    for (from, to, expected) in cases {
        assert_eq!(refusal(from, &to), expected);
    }
    let second =
        BASE.to_owned() + "[[tenant]]\nname = \"vm1\"\n[[tenant.slice]]\ndevice = \"gpu0\"\nmemory = \"32MiB\"\n";
    let said = parse(&second).unwrap_err();
    assert_eq!(
        said,
        "t.toml:7: Device \"gpu0\" has 64 MiB, but its slices take 96 MiB (gpu0 of tenant \"vm0\": 64 MiB, gpu0 of tenant \"vm1\": 32 MiB); make slices smaller or the device larger"
    );
}

#[test]
fn files_that_are_no_configuration_are_refused() {
    assert_eq!(parse("").unwrap_err(), "t.toml:1: There are 0 [[device]]; write 1 to 64");
    assert!(parse("[daemon\n").unwrap_err().starts_with("t.toml:1: Not TOML: "));
    assert!(parse("\n\nx = = 1").unwrap_err().starts_with("t.toml:3: Not TOML: "));
    assert!(parse("a = 1\na = 2\n").unwrap_err().starts_with("t.toml:2: Not TOML: "));
    let no_tenant = BASE.split("[[tenant]]").next().unwrap();
    assert!(parse(no_tenant).unwrap().tenants.is_empty(), "tenants may be added later");
    let no_slice = BASE.split("[[tenant.slice]]").next().unwrap();
    assert_eq!(parse(no_slice).unwrap_err(), "t.toml:14: Tenant \"vm0\" has 0 [[tenant.slice]]; write 1 to 32");
    let missing = Config::load(Path::new("/nowhere.toml")).unwrap_err();
    assert_eq!(
        missing.to_string(),
        "Cannot read the configuration /nowhere.toml; name another with --config, or make one with --print-default-config"
    );
}

proptest::proptest! {
    /// Whatever is typed, the answer is a configuration or a line.
    #[test]
    fn damaged_files_never_panic(at in 0..BASE.len(), len in 0..40_usize, put in "[ -~\n]{0,12}") {
        let end = (at + len).min(BASE.len());
        let damaged = format!("{}{put}{}", &BASE[..at], &BASE[end..]);
        if let Err(said) = parse(&damaged) {
            proptest::prop_assert!(said.starts_with("t.toml:"), "{said}");
        }
    }
}
