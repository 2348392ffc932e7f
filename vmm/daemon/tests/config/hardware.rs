//! Devices that are PCI functions and GPUs of the host.

use std::path::Path;

use vmm_broker::Completion;
use vmm_daemon::config::Config;

use super::{parse, refusal_of};

/// The same with devices that are PCI functions.
const FUNCTIONS: &str = r#"[[device]]
name = "ssd"
kind = "nvme"
address = "1:0.0"
namespace = 3
memory = "16MiB"
erase = true

[[device]]
name = "cmb"
kind = "memory"
address = "0000:01:00.0"
bar = 4
memory = "512KiB"
unmapped = "64KiB"
erase = true

[[device]]
name = "edu"
kind = "edu"
address = "0000:03:1f.7"

[[tenant]]
name = "vm0"

[[tenant.slice]]
device = "ssd"
memory = "8MiB"

[[tenant.slice]]
device = "cmb"
memory = "512KiB"

[[tenant.slice]]
device = "edu"
"#;

#[test]
fn devices_are_parts_of_functions() {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/lab-devices.toml");
    let lab = Config::load(&lab).unwrap();
    let meant = |config: &Config| -> Vec<_> {
        let told = |device: &vmm_daemon::config::DeviceConfig| {
            let part = device.function.as_ref().map(|of| (of.address.clone(), of.part, of.unmapped));
            (device.name.clone(), device.kind.name(), device.memory, part)
        };
        config.devices.iter().map(told).collect()
    };
    let of = |name: &str, kind, memory, address: &str, part, unmapped| {
        (name.to_owned(), kind, memory, Some((address.to_owned(), part, unmapped)))
    };
    assert_eq!(
        meant(&lab),
        [
            of("ssd0", "nvme", 16 << 20, "0000:01:00.0", 1, 0),
            of("cmb0", "memory", 512 << 10, "0000:01:00.0", 2, 64 << 10),
            of("ssd1", "nvme", 16 << 20, "0000:02:00.0", 1, 0),
            of("edu0", "edu", 0, "0000:03:00.0", 0, 0),
            of("mem0", "memory", 32 << 20, "0000:04:00.0", 2, 0),
            ("gpu0".to_owned(), "gpu", 1 << 20, None),
            ("fpga0".to_owned(), "fpga", 1 << 20, None),
        ]
    );
    let config = parse(FUNCTIONS).unwrap();
    assert_eq!(
        meant(&config),
        [
            of("ssd", "nvme", 16 << 20, "0000:01:00.0", 3, 0),
            of("cmb", "memory", 512 << 10, "0000:01:00.0", 4, 64 << 10),
            of("edu", "edu", 0, "0000:03:1f.7", 0, 0),
        ]
    );
    assert_eq!(config.tenants[0].slices.iter().map(|slice| slice.memory).collect::<Vec<_>>(), [8 << 20, 512 << 10, 0]);
    // Nothing, written down: as `peergate slice add` does.
    let nothing = parse(&(FUNCTIONS.to_owned() + "memory = \"0\"\n")).unwrap();
    assert_eq!(nothing, config);
}

#[test]
fn functions_are_refused_with_what_to_write() {
    let unknown = |line: usize, kind: &str, key: &str, keys: &str| {
        format!("t.toml:{line}: [[device]] of kind {kind:?} has no key {key:?}; there are: {keys}")
    };
    let address = |line: usize, typed: &str| {
        format!("t.toml:{line}: address is {typed:?}; write a PCI address as lspci -D does, such as \"0000:01:00.0\"")
    };
    let erase = |line: usize| {
        format!(
            "t.toml:{line}: Whatever the device's memory holds is lost when a session of its tenant begins; if that is meant, add erase = true"
        )
    };
    let unmapped = |typed: &str| {
        format!("t.toml:15: unmapped is {typed}; write a multiple of 4KiB, and no more than the device's memory")
    };
    let nvme = "name, kind, memory, address, namespace, erase";
    let memory = "name, kind, memory, address, bar, unmapped, erase";
    let edu = "name, kind, address";
    let needs_address =
        |line: usize| format!("t.toml:{line}: [[device]] needs address; add address = \"0000:01:00.0\"");
    let cases = [
        ("16MiB\"\nerase = true", "16MiB\"", erase(1)),
        ("16MiB\"\nerase = true", "16MiB\"\nerase = false", erase(1)),
        ("64KiB\"\nerase = true", "64KiB\"", erase(9)),
        ("erase = true", "erase = 1", "t.toml:7: erase is a number; write true or false".to_owned()),
        ("address = \"1:0.0\"\n", "", needs_address(1)),
        ("address = \"0000:01:00.0\"\n", "", needs_address(9)),
        ("address = \"0000:03:1f.7\"\n", "", needs_address(18)),
        ("1:0.0", "1:0", address(4, "1:0")),
        ("0000:01:00.0", "0000:01:20.0", address(12, "0000:01:20.0")),
        ("0000:03:1f.7", "../0000:03:1f.7", address(21, "../0000:03:1f.7")),
        ("namespace = 3", "bar = 3", unknown(5, "nvme", "bar", nvme)),
        ("namespace = 3", "unmapped = 0", unknown(5, "nvme", "unmapped", nvme)),
        ("namespace = 3", "engines = 3", unknown(5, "nvme", "engines", nvme)),
        (
            "namespace = 3",
            "namespace = 0",
            "t.toml:5: namespace is 0; write a whole number from 1 to 4294967294".to_owned(),
        ),
        ("bar = 4", "namespace = 4", unknown(13, "memory", "namespace", memory)),
        ("bar = 4", "link = { latency = \"1us\" }", unknown(13, "memory", "link", memory)),
        ("bar = 4", "bar = 6", "t.toml:13: bar is 6; write a whole number from 0 to 5".to_owned()),
        ("03:1f.7\"", "03:1f.7\"\nmemory = \"4KiB\"", unknown(22, "edu", "memory", edu)),
        ("03:1f.7\"", "03:1f.7\"\nerase = true", unknown(22, "edu", "erase", edu)),
        ("kind = \"nvme\"", "kind = \"gpu\"", unknown(4, "gpu", "address", "name, kind, memory, engines, link")),
        ("64KiB", "5000", unmapped("5000 B")),
        ("64KiB", "516KiB", unmapped("516 KiB")),
    ];
    for (from, to, expected) in cases {
        assert_eq!(refusal_of(FUNCTIONS, from, to), expected, "{to}");
    }
    // All of it is no more than all of it.
    assert!(parse(&FUNCTIONS.replacen("64KiB", "512KiB", 1)).is_ok());
}

#[test]
fn a_function_is_one_tenants_and_has_one_engine() {
    let second = "[[tenant]]\nname = \"vm1\"\n[[tenant.slice]]\ndevice = ";
    let device = |text: &str| format!("{text}\n[[tenant]]\nname = \"vm0\"");
    let ssd = |rest: &str| device(&format!("[[device]]\nname = \"more\"\nmemory = \"4MiB\"\nerase = true\n{rest}"));
    let tenant = "[[tenant]]\nname = \"vm0\"";
    let cases = [
        (
            tenant,
            ssd("kind = \"nvme\"\naddress = \"01:00.0\"\nnamespace = 3"),
            "t.toml:23: Device \"more\" is device \"ssd\" once more; remove one of them",
        ),
        (
            tenant,
            ssd("kind = \"memory\"\naddress = \"01:00.0\"\nbar = 4"),
            "t.toml:23: Device \"more\" is device \"cmb\" once more; remove one of them",
        ),
        (
            tenant,
            ssd("kind = \"nvme\"\naddress = \"01:00.0\""),
            "t.toml:23: Function 0000:01:00.0 has one engine, but \"ssd\" and \"more\" would each have it; leave one",
        ),
        (
            "0000:03:1f.7",
            "0000:01:00.0".to_owned(),
            "t.toml:18: Function 0000:01:00.0 has one engine, but \"ssd\" and \"edu\" would each have it; leave one",
        ),
        (
            tenant,
            format!("{second}\"ssd\"\nmemory = \"4MiB\"\n{tenant}"),
            "t.toml:1: Device \"ssd\" is a PCI function, which is given away as a whole, but has 2 slices; leave one",
        ),
        (
            "[[tenant.slice]]\ndevice = \"cmb\"",
            "[[tenant.slice]]\ndevice = \"edu\"\nname = \"again\"\n[[tenant.slice]]\ndevice = \"cmb\"".to_owned(),
            "t.toml:18: Device \"edu\" is a PCI function, which is given away as a whole, but has 2 slices; leave one",
        ),
        (
            "[[tenant.slice]]\ndevice = \"cmb\"",
            format!("{second}\"cmb\""),
            "t.toml:9: Function 0000:01:00.0 is one tenant's as a whole, but \"vm0\" and \"vm1\" have parts of it; give all to one",
        ),
        (
            "bar = 4",
            "bar = 0".to_owned(),
            "t.toml:9: Device \"cmb\" is the registers of function 0000:01:00.0, whose engine \"ssd\" has; give another BAR",
        ),
        ("memory = \"8MiB\"\n", String::new(), "t.toml:26: [[tenant.slice]] needs memory; add memory = \"64MiB\""),
        (
            "device = \"edu\"",
            "device = \"edu\"\nmemory = \"4KiB\"".to_owned(),
            "t.toml:36: Device \"edu\" has no memory; remove the key memory",
        ),
        (
            "memory = \"8MiB\"",
            "memory = \"20MiB\"".to_owned(),
            "t.toml:6: Device \"ssd\" has 16 MiB, but its slices take 20 MiB (ssd of tenant \"vm0\": 20 MiB); make slices smaller or the device larger",
        ),
    ];
    for (from, to, expected) in cases {
        assert_eq!(refusal_of(FUNCTIONS, from, &to), expected, "{to}");
    }
    // Another part of the same function that is memory may be one more device of the same tenant.
    let bar = ssd("kind = \"memory\"\naddress = \"01:00.0\"\nbar = 2");
    assert!(parse(&FUNCTIONS.replacen(tenant, &bar, 1)).is_ok());
    // The first BAR of a function that is nothing but memory may be memory.
    let bar = ssd("kind = \"memory\"\naddress = \"02:00.0\"\nbar = 0");
    assert!(parse(&FUNCTIONS.replacen(tenant, &bar, 1)).is_ok());
}

const GPUS: &str = r#"[[device]]
name = "h200"
kind = "cuda"
gpu = "6:0.0"
memory = "64GiB"
completion = "spin"
[[device]]
name = "other"
kind = "cuda"
gpu = "GPU-8F6D1C3A-02b4-4d5e-9f10-a1b2c3d4e5f6"
memory = "4MiB"
[[tenant]]
name = "vm0"
[[tenant.slice]]
device = "h200"
memory = "2GiB"
"#;

#[test]
fn devices_are_gpus_of_the_host() {
    let config = parse(GPUS).unwrap();
    let told = |device: &vmm_daemon::config::DeviceConfig| {
        (device.kind.name(), device.memory, device.gpu.as_ref().map(|gpu| (gpu.which.clone(), gpu.completion)))
    };
    let of = |which: &str, completion| Some((which.to_owned(), completion));
    assert_eq!(
        config.devices.iter().map(told).collect::<Vec<_>>(),
        [
            ("cuda", 64 << 30, of("0000:06:00.0", Completion::Spin)),
            ("cuda", 4 << 20, of("GPU-8f6d1c3a-02b4-4d5e-9f10-a1b2c3d4e5f6", Completion::Sleep)),
        ]
    );
    assert_eq!(config.tenants[0].slices[0].memory, 2 << 30);
    // Unlike a function it may be several tenants'.
    let second = "[[tenant]]\nname = \"vm1\"\n[[tenant.slice]]\ndevice = \"h200\"\nmemory = \"2MiB\"\n";
    assert!(parse(&(GPUS.to_owned() + second)).is_ok());
    let gpu = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/gpu.toml");
    assert_eq!(Config::load(&gpu).unwrap().devices.iter().filter(|device| device.gpu.is_some()).count(), 1);
}

#[test]
fn gpus_are_refused_with_what_to_write() {
    let gpu = |line: usize, typed: &str| {
        format!(
            "t.toml:{line}: gpu is {typed:?}; write a PCI address or a UUID as nvidia-smi -L does, such as \"0000:01:00.0\" or \"GPU-8f6d1c3a-02b4-4d5e-9f10-a1b2c3d4e5f6\""
        )
    };
    let memory = |line: usize, typed: &str| {
        format!("t.toml:{line}: memory is {typed}; write a multiple of 2MiB from \"2MiB\" to \"64TiB\"")
    };
    let unknown = |line: usize, key: &str| {
        let keys = "name, kind, memory, gpu, completion";
        format!("t.toml:{line}: [[device]] of kind \"cuda\" has no key {key:?}; there are: {keys}")
    };
    let cases = [
        ("gpu = \"6:0.0\"\n", "", "t.toml:1: [[device]] needs gpu; add gpu = \"0000:01:00.0\"".to_owned()),
        ("6:0.0", "0", gpu(4, "0")),
        ("6:0.0", "../6:0.0", gpu(4, "../6:0.0")),
        ("GPU-8F6D1C3A-02b4", "GPU-8F6D1C3A-02b", gpu(10, "GPU-8F6D1C3A-02b-4d5e-9f10-a1b2c3d4e5f6")),
        ("\"spin\"", "\"poll\"", "t.toml:6: completion is \"poll\"; write \"sleep\" or \"spin\"".to_owned()),
        ("completion = \"spin\"", "engines = 2", unknown(6, "engines")),
        ("completion = \"spin\"", "erase = true", unknown(6, "erase")),
        ("memory = \"64GiB\"\n", "", "t.toml:1: [[device]] needs memory; add memory = \"64MiB\"".to_owned()),
        ("64GiB", "5MiB", memory(5, "5 MiB")),
        ("2GiB", "64KiB", memory(16, "64 KiB")),
        ("2GiB", "0", memory(16, "0 B")),
        (
            "GPU-8F6D1C3A-02b4-4d5e-9f10-a1b2c3d4e5f6",
            "06:00.0",
            "t.toml:7: Device \"other\" is device \"h200\" once more; remove one of them".to_owned(),
        ),
        (
            "2GiB",
            "66GiB",
            "t.toml:5: Device \"h200\" has 64 GiB, but its slices take 66 GiB (h200 of tenant \"vm0\": 66 GiB); make slices smaller or the device larger".to_owned(),
        ),
    ];
    for (from, to, expected) in cases {
        assert_eq!(refusal_of(GPUS, from, to), expected, "{to}");
    }
}
