//! A crate imports only crates on a lower floor; siblings never import each other; nothing imports a test crate.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// The floor of each crate, as ARCHITECTURE.md draws it.
const FLOORS: &[(&str, u8)] = &[
    ("iommu_addr", 0),
    ("vdev_wire", 0),
    ("peergate_uapi", 0),
    ("iommu_core", 1),
    ("hw_engine", 1),
    ("hw_sim", 2),
    ("hw_host", 2),
    ("hw_vfio", 2),
    ("hw_cuda", 2),
    ("vdev_device", 3),
    ("peergate_guest", 3),
    ("vmm_vhost_user", 4),
    ("vmm_broker", 4),
    ("vmm_keeper", 4),
    ("vmm_control", 4),
    ("vmm_sandbox", 4),
    ("vmm_microvm", 4),
    ("pgctl", 4),
    ("vmm_daemon", 5),
];

/// Test crates may import everything and each other's libraries.
const TESTS: &[&str] = &["harness", "e2e", "abi", "layers", "xtask", "bench"];

/// Crates from outside that only some rooms may know.
const FENCED: &[(&str, &[&str])] = &[
    ("vhost", &["vmm_vhost_user", "vmm_microvm", "vmm_daemon"]),
    ("vhost-user-backend", &["vmm_vhost_user"]),
    ("virtio-queue", &["vdev_device", "vmm_vhost_user"]),
    ("kvm-ioctls", &["vmm_microvm"]),
    ("event-manager", &["vmm_daemon"]),
    ("toml_edit", &["vmm_daemon"]),
    ("seccompiler", &["vmm_sandbox"]),
    ("vfio-bindings", &["hw_vfio"]),
    ("iommufd-bindings", &["hw_vfio"]),
    ("libloading", &["hw_cuda"]),
    ("anyhow", &["vmm_daemon", "pgctl"]),
];

/// Crates that may hold `unsafe`; every other one forbids it.
const UNSAFE: &[&str] =
    &["hw_host", "hw_vfio", "hw_cuda", "vmm_vhost_user", "vmm_broker", "vmm_sandbox", "vmm_microvm", "peergate_guest"];

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version=1", "--offline"])
        .output()
        .expect("cargo metadata runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON")
}

fn packages(metadata: &Value) -> impl Iterator<Item = (&str, &Value)> {
    metadata["packages"].as_array().expect("packages").iter().map(|p| (p["name"].as_str().expect("name"), p))
}

fn dependencies(package: &Value) -> impl Iterator<Item = (&str, bool, bool)> {
    package["dependencies"].as_array().expect("dependencies").iter().map(|dependency| {
        let name = dependency["name"].as_str().expect("dependency name");
        (name, dependency["kind"] == "dev", !dependency["path"].is_null())
    })
}

#[test]
fn imports_run_downward_only() {
    let floors: BTreeMap<_, _> = FLOORS.iter().copied().collect();
    let mut wrong = Vec::new();
    for (name, package) in packages(&metadata()) {
        if TESTS.contains(&name) {
            continue;
        }
        let Some(floor) = floors.get(name) else {
            wrong.push(format!("{name} has no floor: give it one in this test and in ARCHITECTURE.md"));
            continue;
        };
        for (to, dev, _) in dependencies(package).filter(|(_, _, ours)| *ours) {
            let test_only = dev && !TESTS.contains(&to);
            if !test_only && floors.get(to).is_none_or(|below| below >= floor) {
                wrong.push(format!("{name} (floor {floor}) imports {to}"));
            }
        }
    }
    assert!(wrong.is_empty(), "imports run upward or sideways:\n{}", wrong.join("\n"));
}

#[test]
fn fenced_crates_stay_in_their_rooms() {
    let mut wrong = Vec::new();
    for (name, package) in packages(&metadata()).filter(|(name, _)| !TESTS.contains(name)) {
        for (to, _, _) in dependencies(package).filter(|(_, dev, _)| !dev) {
            if FENCED.iter().any(|(fenced, rooms)| *fenced == to && !rooms.contains(&name)) {
                wrong.push(format!("{name} imports {to}"));
            }
        }
    }
    assert!(wrong.is_empty(), "imports that the house forbids:\n{}", wrong.join("\n"));
}

#[test]
fn crates_without_a_licence_for_unsafe_forbid_it() {
    let mut wrong = Vec::new();
    for (name, package) in packages(&metadata()) {
        if TESTS.contains(&name) || UNSAFE.contains(&name) {
            continue;
        }
        for target in package["targets"].as_array().expect("targets") {
            let library_or_program = target["kind"].as_array().expect("kind").iter().any(|k| k == "lib" || k == "bin");
            let path = target["src_path"].as_str().expect("src_path");
            if library_or_program && !std::fs::read_to_string(path).expect("source").contains("#![forbid(unsafe_code)]")
            {
                wrong.push(path.to_owned());
            }
        }
    }
    assert!(wrong.is_empty(), "these must say #![forbid(unsafe_code)]:\n{}", wrong.join("\n"));
}

#[test]
fn every_crate_inherits_the_lint_table() {
    for (name, package) in packages(&metadata()) {
        let manifest = std::fs::read_to_string(package["manifest_path"].as_str().expect("path")).expect("manifest");
        assert!(manifest.contains("[lints]\nworkspace = true"), "{name} does not inherit the workspace lints");
    }
}

/// Lines of a source file before its tests.
fn production_lines(source: &str) -> usize {
    source.lines().take_while(|line| !line.trim_start().starts_with("#[cfg(test)]")).count()
}

#[test]
fn files_fit_in_a_head() {
    const MOST: usize = 450;
    let mut wrong = Vec::new();
    for (_, package) in packages(&metadata()) {
        let root = Path::new(package["manifest_path"].as_str().expect("path")).parent().expect("folder").join("src");
        let mut folders = vec![root];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let lines = production_lines(&std::fs::read_to_string(&path).expect("source"));
                    if lines > MOST {
                        wrong.push(format!("{}: {lines} lines", path.display()));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "split these (more than {MOST} lines before their tests):\n{}", wrong.join("\n"));
}
