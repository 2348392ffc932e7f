//! Workers with GPUs, whose driver is one without a GPU: it is `hw_cuda`'s own.
//!
//! That driver makes memory of files and starts threads where the real one asks the kernel's driver, so system calls are watched here and not forbidden;
//! everything else that confines a worker does.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use vmm_control::TenantState;

use common::fake::{driver, nvml};
use common::{Daemon, kill, peergated, stderr, stdout, write_config};

const CONFIG: &str = r#"
[[device]]
name = "cuda0"
kind = "cuda"
gpu = "0000:1a:00.0"
memory = "16MiB"

[[device]]
name = "fpga0"
kind = "fpga"
memory = "8MiB"

[[tenant]]
name = "vm0"
[[tenant.slice]]
device = "cuda0"
memory = "4MiB"
[[tenant.slice]]
device = "fpga0"
memory = "4MiB"
"#;

/// A daemon with `config`, whose workers load that driver.
fn start(config: &str, library: &Path, wait: bool) -> Daemon {
    start_with(config, library, Path::new("/nowhere/libnvidia-ml.so.1"), wait)
}

fn start_with(config: &str, library: &Path, nvml: &Path, wait: bool) -> Daemon {
    let dir = tempfile::tempdir().unwrap();
    // So that this test needs no privileges to look into workers.
    write_config(dir.path(), "seccomp = \"log\"\ncore_dumps = true", config);
    let log = fs::File::create(dir.path().join("log")).unwrap();
    let mut command = peergated(dir.path());
    command.env("PEERGATE_CUDA_LIBRARY", library).env("PEERGATE_NVML_LIBRARY", nvml);
    if wait { Daemon::run(dir, command, log) } else { Daemon::run_only(dir, command, log) }
}

#[test]
fn a_tenants_gpu_is_proved_and_every_thread_of_its_driver_is_confined() {
    let Some(library) = driver("") else { return };
    let daemon = start(CONFIG, &library, true);
    assert!(daemon.log().contains("Proved the endpoints to be peers pairs=2"), "{}", daemon.log());
    let worker = daemon.tenant(0).worker_pid.unwrap();
    let mut threads = Vec::new();
    for thread in fs::read_dir(format!("/proc/{worker}/task")).unwrap() {
        let state = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        let field =
            |name: &str| state.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned();
        assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".into(), "2".into()), "{state}");
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(field(set), "0000000000000000", "{state}");
        }
        // The supervisor's and the worker's two, at least.
        assert!(field("Seccomp_filters:").parse::<u32>().is_ok_and(|filters| filters >= 3), "{state}");
        threads.push(field("Name:"));
    }
    assert!(threads.iter().any(|name| name == "cuda-events"), "{threads:?}");
    let files = |pid: u32| {
        let links = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let links = links.map(|entry| fs::read_link(entry.unwrap().path()).unwrap_or_default());
        links.map(|link| link.display().to_string()).collect::<Vec<_>>().join("\n")
    };
    let broker = files(daemon.status().daemon.broker_pid.unwrap());
    assert!(broker.contains("peergate-vm0-fpga0") && !broker.contains("peergate-vm0-cuda0"), "{broker}");
    assert!(stdout(&daemon.peergate(&["endpoints"])).contains("cuda"), "the operator sees what it is");
    let log = daemon.log();
    daemon.end();
    assert!(!log.contains("ERROR"), "{log}");
}

/// A second GPU, of which the tenant has a slice, too.
const TWO: &str = r#"
[[tenant.slice]]
device = "cuda1"
memory = "4MiB"

[[device]]
name = "cuda1"
kind = "cuda"
gpu = "0000:1b:00.0"
memory = "16MiB"
"#;

#[test]
fn how_a_tenants_gpus_reach_each_other_is_shown() {
    let Some(nvml) = nvml() else { return };
    let config = CONFIG.to_owned() + TWO;
    for (settings, library, told, pairs) in [
        ("gpus=2", Some(&*nvml), ["yes     yes         0  NVLink (18 links)"; 2], 6),
        ("gpus=2 peer_rank=2 peer_atomics=0", None, ["yes     no          2  unknown"; 2], 6),
        // Then they are staged, and not proved.
        ("gpus=2 peers=0", None, ["no      no          0  unknown"; 2], 4),
    ] {
        let Some(driver) = driver(settings) else { return };
        let daemon = start_with(&config, &driver, library.unwrap_or(Path::new("/nowhere/libnvidia-ml.so.1")), true);
        let expected = format!(
            "\nTENANT  NAME   PEER   ACCESS  ATOMICS  RANK  LINK\nvm0     cuda0  cuda1  {}\nvm0     cuda1  cuda0  {}\n",
            told[0], told[1]
        );
        let shown = daemon.peergate(&["endpoints"]);
        assert!(stdout(&shown).ends_with(&expected), "{settings}: {}", stdout(&shown));
        let proved = format!("Proved the endpoints to be peers pairs={pairs}");
        assert!(daemon.log().contains(&proved), "{settings}: {}", daemon.log());
        let json = daemon.peergate(&["--json", "endpoints"]);
        assert_eq!(stdout(&json).matches("\"peers\"").count(), 2, "{}", stdout(&json));
        // Nothing of it stays loaded.
        let maps = fs::read_to_string(format!("/proc/{}/maps", daemon.tenant(0).worker_pid.unwrap())).unwrap();
        assert!(!maps.contains(&nvml.display().to_string()), "{maps}");
        daemon.end();
    }
}

#[test]
fn slices_of_a_gpu_come_and_go_and_are_counted() {
    let Some(library) = driver("") else { return };
    let daemon = start(CONFIG, &library, true);
    let refused = daemon.peergate(&["slice", "add", "vm0", "--device", "cuda0", "--memory", "1MiB", "--name", "more"]);
    assert!(stderr(&refused).contains("write a multiple of 2MiB"), "{}", stderr(&refused));
    let refused = daemon.peergate(&["slice", "add", "vm0", "--device", "cuda0", "--memory", "14MiB", "--name", "more"]);
    assert!(
        stderr(&refused).contains("Device \"cuda0\" has 16 MiB, but its slices take 18 MiB"),
        "{}",
        stderr(&refused)
    );
    let added = daemon.peergate(&["slice", "add", "vm0", "--device", "cuda0", "--memory", "12MiB", "--name", "more"]);
    assert!(added.status.success(), "{}", stderr(&added));
    daemon.wait_for(|status| status.tenants[0].session == 2 && status.tenants[0].state == TenantState::Waiting);
    assert!(stdout(&daemon.peergate(&["endpoints"])).contains("more"));
    // The last one goes, and with it the worker's driver.
    for (name, session) in [("more", 3), ("cuda0", 4)] {
        assert!(daemon.peergate(&["slice", "remove", "vm0", name]).status.success());
        daemon
            .wait_for(|status| status.tenants[0].session == session && status.tenants[0].state == TenantState::Waiting);
    }
    let worker = daemon.tenant(0).worker_pid.unwrap();
    let maps = fs::read_to_string(format!("/proc/{worker}/maps")).unwrap();
    assert!(!maps.contains(&library.display().to_string()), "{maps}");
    assert_eq!(daemon.tenant(0).failures, 0, "{}", daemon.log());
}

#[test]
fn a_worker_that_dies_is_followed_by_one_with_the_gpu() {
    let Some(library) = driver("") else { return };
    let daemon = start(CONFIG, &library, true);
    kill(daemon.tenant(0).worker_pid.unwrap(), Signal::KILL);
    daemon.wait_for(|status| status.tenants[0].session == 2 && status.tenants[0].state == TenantState::Waiting);
    assert_eq!(daemon.log().matches("Proved the endpoints to be peers pairs=2").count(), 2);
}

/// Waits until a worker has failed, and says what `peergate status` then says of it.
fn failure(config: &str, library: &Path) -> String {
    let daemon = start(config, library, false);
    daemon.wait_for(|status| status.tenants[0].last_failure.is_some());
    let status = daemon.status();
    assert_eq!(status.tenants[0].state, TenantState::Restarting);
    let shown = stdout(&daemon.peergate(&["status"])).to_owned();
    let reason = status.tenants[0].last_failure.clone().unwrap();
    assert!(shown.contains(&format!("vm0: the last worker failed, because {reason:?}")), "{shown}");
    reason
}

#[test]
fn a_gpu_that_cannot_be_opened_is_told_of() {
    let nowhere = PathBuf::from("/nowhere/libcuda.so.1");
    let reason = failure(CONFIG, &nowhere);
    assert!(
        reason.starts_with("A GPU cannot be used: This machine has no CUDA driver (/nowhere/libcuda.so.1)"),
        "{reason}"
    );
    let Some(library) = driver("") else { return };
    let reason = failure(&CONFIG.replace("1a:00.0", "77:00.0"), &library);
    assert!(reason.starts_with("A GPU cannot be used: There is no GPU 0000:77:00.0; this machine has"), "{reason}");
    let Some(library) = driver("gpus=2") else { return };
    let uuid = "GPU-00112233-4455-6677-8899-aabbccddee00";
    let reason = failure(&(CONFIG.to_owned() + &TWO.replace("0000:1b:00.0", uuid)), &library);
    let expected =
        format!("A GPU cannot be used: {uuid} and 0000:1a:00.0 are the same one; remove one of the two devices");
    assert_eq!(reason, expected);
    let Some(library) = driver("oom=1") else { return };
    let reason = failure(CONFIG, &library);
    assert!(reason.starts_with("Slice \"cuda0\" has no memory: GPU "), "{reason}");
}

#[test]
fn a_gpu_that_fails_for_good_ends_its_worker_with_the_reason() {
    // The slice is zeroed by then.
    let Some(library) = driver("fault_after=4") else { return };
    let reason = failure(CONFIG, &library);
    assert!(reason.starts_with("A GPU is lost: "), "{reason}");
}
