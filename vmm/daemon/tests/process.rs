//! The daemon as processes: what it starts, what it survives, what it leaves behind.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::Signal;
use vhost::VhostBackend;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vmm_control::{Client, Request, TenantState, TenantStatus};

use common::{CONFIG, Daemon, children, kill, peergate, peergated, stderr, stdout, wait_for_end, write_config};

#[test]
fn a_daemon_serves_every_tenant_and_leaves_nothing_behind() {
    let mut daemon = Daemon::start();
    let status = daemon.status();
    assert_eq!((status.daemon.pid, status.daemon.seccomp.as_str()), (daemon.pid(), "enforce"));
    let workers: Vec<_> = status.tenants.iter().map(|tenant| tenant.worker_pid.unwrap()).collect();
    assert_eq!(status.tenants.iter().map(|tenant| tenant.name.as_str()).collect::<Vec<_>>(), ["vm0", "vm1"]);
    for tenant in &status.tenants {
        assert_eq!((tenant.session, tenant.failures, tenant.faults), (1, 0, 0));
        assert_eq!(tenant.counters["ops"], 0);
        assert_eq!(tenant.gauges["domains"], 0);
    }
    let mode = |name: &str| fs::metadata(daemon.runtime_dir().join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("control.sock"), mode("vm0.sock"), mode("vm1.sock")), (0o600, 0o660, 0o660));

    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
    assert!(!daemon.runtime_dir().exists(), "no socket, no directory");
    for worker in workers {
        assert!(!Path::new(&format!("/proc/{worker}")).exists(), "the worker is gone and reaped");
    }
    let log = daemon.log();
    assert!(!log.contains("ERROR") && !log.contains("WARN"), "{log}");
}

#[test]
fn it_says_once_when_every_tenant_can_be_connected_to() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), "", CONFIG);
    let mut child = peergated(dir.path()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let control = dir.path().join("run/control.sock");
    let expected = format!("peergated is ready; control socket {}", control.display());
    assert_eq!(lines.next().unwrap().unwrap(), expected);
    let status = peergate(&control, &["status", "--json"]);
    assert_eq!(stdout(&status).matches("\"waiting\"").count(), 2);
    kill(child.id(), Signal::TERM);
    assert!(child.wait().unwrap().success());
    assert!(lines.next().is_none());
}

#[test]
fn a_daemon_without_tenants_says_that_it_is_ready_too() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), "", CONFIG.split("[[tenant]]").next().unwrap());
    let mut child = peergated(dir.path()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let control = dir.path().join("run/control.sock");
    while Client::connect(&control).and_then(|mut client| client.ask(&Request::Status)).is_err() {
        assert!(child.try_wait().unwrap().is_none(), "it has ended");
        std::thread::yield_now();
    }
    kill(child.id(), Signal::TERM);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(stdout(&output), format!("peergated is ready; control socket {}\n", control.display()));
}

#[test]
fn sigint_and_sighup_end_it_in_good_order_too() {
    for signal in [Signal::INT, Signal::HUP] {
        let mut daemon = Daemon::start();
        daemon.signal(signal);
        assert!(daemon.wait().success());
        assert!(!daemon.runtime_dir().exists());
    }
}

#[test]
fn a_worker_that_dies_is_replaced_with_the_next_session_on_the_same_socket() {
    let daemon = Daemon::start();
    let before = daemon.tenant(0);
    kill(before.worker_pid.unwrap(), Signal::KILL);
    let waits_again = |tenant: &vmm_control::TenantStatus| tenant.session == 2 && tenant.state == TenantState::Waiting;
    let after = daemon.wait_for(|status| waits_again(&status.tenants[0])).tenants.swap_remove(0);
    assert_eq!(after.failures, 1);
    assert_ne!(after.worker_pid, before.worker_pid);
    assert_eq!(daemon.tenant(1).session, 1, "the other tenant is not concerned");
    assert!(daemon.log().contains("The worker has failed: signal: 9 (SIGKILL)"), "{}", daemon.log());

    let connection = UnixStream::connect(daemon.runtime_dir().join("vm0.sock")).unwrap();
    daemon.wait_for(|status| status.tenants[0].state == TenantState::Connected);
    drop(connection);
}

#[test]
fn each_session_begins_with_a_proof_of_every_pair_that_goes_direct() {
    let daemon = Daemon::start();
    let proved = |pairs: usize| {
        let is_proof = |line: &&str| line.contains("Proved the endpoints to be peers");
        let end = format!(" pairs={pairs} ");
        daemon.log().lines().filter(is_proof).filter(|line| line.contains(&end)).count()
    };
    // Of the first tenant's two pairs one is staged; the second tenant has one slice. A worker that waits for its VMM has proved them.
    assert_eq!((proved(1), proved(0)), (1, 1), "{}", daemon.log());
    kill(daemon.tenant(0).worker_pid.unwrap(), Signal::KILL);
    daemon.wait_for(|status| status.tenants[0].session == 2 && status.tenants[0].state == TenantState::Waiting);
    assert_eq!((proved(1), proved(0)), (2, 1), "{}", daemon.log());
}

#[test]
fn a_worker_that_does_not_take_over_is_killed_and_its_vm_goes_on() {
    let daemon = Daemon::start();
    let frontend = Frontend::connect(daemon.runtime_dir().join("vm0.sock"), 4).unwrap();
    frontend.set_owner().unwrap();
    frontend.get_features().unwrap();
    let before = daemon.wait_for(|status| status.tenants[0].state == TenantState::Connected).tenants.swap_remove(0);
    // The next worker is told nothing, as one is that hangs.
    kill(before.keeper_pid.unwrap(), Signal::STOP);
    kill(before.worker_pid.unwrap(), Signal::KILL);
    daemon.wait_for(|status| status.tenants[0].failures == 2);
    let reason = "signal: 9 (SIGKILL), because \"it did not take over its VM within 5 s\"";
    assert_eq!(daemon.log().matches(reason).count(), 1, "{}", daemon.log());
    kill(before.keeper_pid.unwrap(), Signal::CONT);
    let after = daemon.wait_for(|status| status.tenants[0].state == TenantState::Connected).tenants.swap_remove(0);
    assert!(after.session > 2 && after.keeper_pid == before.keeper_pid, "{after:?}");
    frontend.get_features().unwrap();
    assert_eq!(daemon.tenant(1).session, 1);
}

#[test]
fn failures_of_broker_and_keepers_are_counted_and_shown() {
    let daemon = Daemon::start();
    assert!(!stdout(&daemon.peergate(&["status"])).contains("failed"));
    let before = daemon.status();
    kill(before.daemon.broker_pid.unwrap(), Signal::KILL);
    kill(before.tenants[1].keeper_pid.unwrap(), Signal::KILL);
    let waits = |tenant: &TenantStatus| tenant.state == TenantState::Waiting;
    let after = daemon.wait_for(|status| {
        let counted = (status.daemon.broker_failures, status.tenants[1].keeper_failures) == (1, 1);
        counted && status.daemon.broker_pid.is_some() && status.tenants.iter().all(waits)
    });
    assert_eq!((after.tenants[0].keeper_failures, after.tenants[1].failures), (0, 0), "nobody else has failed");
    let shown = daemon.peergate(&["status"]);
    assert!(
        stdout(&shown).ends_with("\n\nbroker: failed 1 times\nvm1: 1 failures of the keeper\n"),
        "{}",
        stdout(&shown)
    );
    daemon.end();
}

#[test]
fn no_byte_of_a_session_is_left_in_the_next() {
    let daemon = Daemon::start();
    let broker = daemon.status().daemon.broker_pid.unwrap();
    let old = memory_file(broker, "peergate-vm0-gpu0");
    old.write_all_at(b"secret", 4096).unwrap();
    kill(daemon.tenant(0).worker_pid.unwrap(), Signal::KILL);
    daemon.wait_for(|status| status.tenants[0].session == 2 && status.tenants[0].state == TenantState::Waiting);
    let read = |file: &fs::File| {
        let mut bytes = [0xff; 6];
        file.read_exact_at(&mut bytes, 4096).unwrap();
        bytes
    };
    // Also for whoever has kept the old file.
    daemon.wait_for(|_| read(&old) == [0; 6]);
    assert_eq!(read(&memory_file(broker, "peergate-vm0-gpu0")), [0; 6]);
}

/// Opens a memory file that a process holds.
fn memory_file(pid: u32, name: &str) -> fs::File {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let named = |path: &PathBuf| fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains(name));
    let path = links.map(|entry| entry.unwrap().path()).find(named).unwrap();
    fs::File::options().read(true).write(true).open(path).unwrap()
}

#[test]
fn a_vmm_that_connects_is_served_and_its_going_begins_the_next_session() {
    let daemon = Daemon::start();
    let mut frontend = Frontend::connect(daemon.runtime_dir().join("vm0.sock"), 4).unwrap();
    frontend.set_owner().unwrap();
    let features = frontend.get_features().unwrap();
    frontend.set_features(features).unwrap();
    let offered = frontend.get_protocol_features().unwrap();
    frontend.set_protocol_features(offered).unwrap();
    assert_eq!(frontend.get_queue_num().unwrap(), 4);
    let config = vhost::vhost_user::message::VhostUserConfigFlags::WRITABLE;
    let (_, space) = frontend.get_config(0, 16, config, &[0; 16]).unwrap();
    assert_eq!(&space[..8], b"PEERGATE");
    assert_eq!(space[12..16], 1_u32.to_le_bytes(), "the session");
    daemon.wait_for(|status| status.tenants[0].state == TenantState::Connected);

    drop(frontend);
    let status =
        daemon.wait_for(|status| status.tenants[0].session == 2 && status.tenants[0].state == TenantState::Waiting);
    assert_eq!(status.tenants[0].failures, 0);
    let frontend = Frontend::connect(daemon.runtime_dir().join("vm0.sock"), 4).unwrap();
    frontend.set_owner().unwrap();
    frontend.get_features().unwrap();
    drop(frontend);
    let log = daemon.log();
    assert!(!log.contains("ERROR"), "{log}");
}

#[test]
fn a_log_that_nobody_reads_any_more_ends_nothing() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), "", CONFIG);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let daemon = Daemon::start_logging_to(dir, writer);
    kill(daemon.tenant(0).worker_pid.unwrap(), Signal::KILL);
    daemon.wait_for(|status| status.tenants[0].session == 2 && status.tenants[0].state == TenantState::Waiting);
    daemon.end();
}

/// A vhost-user message without flags but its version.
fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap();
    [&request.to_le_bytes()[..], &1_u32.to_le_bytes(), &len.to_le_bytes(), payload].concat()
}

#[test]
fn a_vmm_that_breaks_the_protocol_is_told_of_in_one_line() {
    let daemon = Daemon::start();
    let mut vmm = UnixStream::connect(daemon.runtime_dir().join("vm0.sock")).unwrap();
    vmm.write_all(&[0xff; 64]).unwrap();
    let status = daemon.wait_for(|status| status.tenants[0].session == 2);
    assert_eq!(status.tenants[0].failures, 0, "that is no worker's fault");
    let log = daemon.log();
    assert_eq!(log.matches("The VMM broke the protocol").count(), 1, "{log}");
}

#[test]
fn a_vmm_cannot_flood_the_log() {
    const SET_OWNER: u32 = 3;
    const SET_VRING_CALL: u32 = 13;
    let daemon = Daemon::start();
    let mut vmm = UnixStream::connect(daemon.runtime_dir().join("vm0.sock")).unwrap();
    vmm.write_all(&message(SET_OWNER, &[])).unwrap();
    let (no_counter, call) = (fs::File::open("/dev/null").unwrap(), message(SET_VRING_CALL, &[0; 8]));
    for _ in 0..2000 {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [no_counter.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        assert_eq!(sendmsg(&vmm, &[IoSlice::new(&call)], &mut control, SendFlags::empty()).unwrap(), call.len());
    }
    drop(vmm);
    daemon.wait_for(|status| status.tenants[0].session == 2);
    let lines = daemon.log().matches("not an eventfd").count();
    assert!((1..100).contains(&lines), "{lines} lines");
}

#[test]
fn every_thread_of_a_worker_is_confined_and_holds_its_own_tenants_slices_only() {
    // As a process that allows core dumps, so that this test needs no privileges to look.
    let daemon = Daemon::start_with("core_dumps = true", CONFIG);
    let status = daemon.status();
    for (tenant, other) in [(0, "peergate-vm1"), (1, "peergate-vm0")] {
        let pid = status.tenants[tenant].worker_pid.unwrap();
        for thread in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let state = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
            let field = |name: &str| {
                state.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned()
            };
            assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".into(), "2".into()), "{state}");
        }
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        assert!(!maps.contains(other), "{maps}");
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
            let link = fs::read_link(entry.unwrap().path()).unwrap_or_default();
            assert!(!link.to_string_lossy().contains(other), "{link:?}");
        }
    }
}

#[test]
fn a_descriptor_that_the_daemon_was_started_with_is_not_handed_to_workers() {
    let (_reader, writer) = std::io::pipe().unwrap();
    // Whatever this test process starts from here on inherits it.
    rustix::io::fcntl_setfd(&writer, rustix::io::FdFlags::empty()).unwrap();
    let daemon = Daemon::start_with("core_dumps = true", CONFIG);
    let inherited = fs::read_link(format!("/proc/self/fd/{}", writer.as_raw_fd())).unwrap();
    let has = |pid: u32| {
        let links = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        links.map(|entry| entry.unwrap().path()).any(|path| fs::read_link(path).is_ok_and(|link| link == inherited))
    };
    assert!(has(daemon.pid()));
    assert!(!has(daemon.tenant(0).worker_pid.unwrap()));
}

#[test]
fn every_process_follows_a_supervisor_that_is_killed_and_the_next_daemon_takes_its_place() {
    let mut daemon = Daemon::start();
    let children = children(&daemon.status());
    assert_eq!(children.len(), 5);
    // Not even one that does nothing any more is left.
    kill(daemon.tenant(0).worker_pid.unwrap(), Signal::STOP);
    daemon.signal(Signal::KILL);
    daemon.wait();
    children.iter().for_each(wait_for_end);
    assert!(daemon.control().exists(), "nobody could remove it");

    let dir = std::mem::replace(&mut daemon.dir, tempfile::tempdir().unwrap());
    let next = Daemon::start_in(dir);
    assert_eq!(next.tenant(0).session, 1);
    next.end();
}

#[test]
fn a_daemon_waits_for_what_is_left_of_the_one_before() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), "", CONFIG);
    fs::create_dir(dir.path().join("run")).unwrap();
    let left = ["vm0.sock", "vm1.sock"].map(|name| UnixListener::bind(dir.path().join("run").join(name)).unwrap());
    let _worker = UnixListener::bind(dir.path().join("run/.worker-1")).unwrap();
    // Each ends once the next daemon has found it.
    let ends = left.map(|left| std::thread::spawn(move || drop(left.accept().unwrap())));
    let daemon = Daemon::start_in(dir);
    ends.into_iter().for_each(|end| end.join().unwrap());
    let log = daemon.log();
    assert_eq!(log.matches("Waiting for what may be left of an earlier daemon to end").count(), 2, "{log}");
    assert!(!log.contains("ERROR"), "{log}");
    daemon.end();
}

#[test]
fn a_daemon_does_not_wait_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), "", CONFIG);
    let path = dir.path().join("run/vm1.sock");
    fs::create_dir(dir.path().join("run")).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    let output = peergated(dir.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let expected = format!(
        "peergated: Waited 5 s for what may be left of an earlier daemon: Another process listens at {}; end it, or choose another path\n",
        path.display()
    );
    assert!(stderr(&output).ends_with(&expected), "{}", stderr(&output));
}

#[test]
fn a_worker_that_does_not_end_is_killed_at_the_second_signal() {
    let mut daemon = Daemon::start();
    let worker = daemon.tenant(0).worker_pid.unwrap();
    kill(worker, Signal::STOP);
    daemon.signal(Signal::TERM);
    // Its socket goes first.
    while daemon.control().exists() {
        std::thread::yield_now();
    }
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
    assert!(!Path::new(&format!("/proc/{worker}")).exists());
    assert!(!daemon.runtime_dir().exists());
}

#[test]
fn a_second_daemon_on_the_same_directory_is_refused_and_disturbs_nothing() {
    let daemon = Daemon::start();
    let second = peergated(daemon.dir.path()).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let expected = format!(
        "peergated: Another peergated uses {}; end it, or set daemon.runtime_dir to another directory\n",
        daemon.runtime_dir().display()
    );
    assert!(stderr(&second).ends_with(&expected), "{}", stderr(&second));
    assert_eq!(daemon.tenant(0).session, 1);
    assert!(daemon.control().exists());
}

#[test]
fn a_wrong_configuration_or_command_line_is_exit_status_2() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), "secomp = \"off\"", CONFIG);
    for check in [true, false] {
        let output = peergated(dir.path()).args(check.then_some("--check")).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let path = dir.path().join("config.toml");
        let expected =
            format!("peergated: {}:4: Unknown key \"secomp\" in [daemon]; did you mean seccomp?\n", path.display());
        assert_eq!(stderr(&output), expected);
    }
    assert!(!dir.path().join("run").exists());
    write_config(dir.path(), "", CONFIG);
    for args in [["--log", "=x="], ["--log", "loud"], ["--colour", "red"]] {
        assert_eq!(peergated(dir.path()).args(args).output().unwrap().status.code(), Some(2), "{args:?}");
    }
    let missing = peergated(Path::new("/nowhere")).output().unwrap();
    assert_eq!(missing.status.code(), Some(2));
    assert!(
        stderr(&missing)
            .starts_with("peergated: Cannot read the configuration /nowhere/config.toml; name another with --config"),
        "{}",
        stderr(&missing)
    );
}

#[test]
fn the_default_configuration_is_printed_and_good() {
    let dir = tempfile::tempdir().unwrap();
    let printed = peergated(dir.path()).arg("--print-default-config").output().unwrap();
    assert!(printed.status.success());
    fs::write(dir.path().join("config.toml"), &printed.stdout).unwrap();
    let checked = peergated(dir.path()).arg("--check").output().unwrap();
    assert!(checked.status.success(), "{}", stderr(&checked));
    let expected = format!(
        "{}: good\ntenant demo: gpu0 64 MiB, fpga0 64 MiB at /run/peergate/demo.sock\n",
        dir.path().join("config.toml").display()
    );
    assert_eq!(stdout(&checked), expected);
}

#[test]
fn a_socket_that_cannot_be_made_ends_the_start_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let taken = dir.path().join("taken");
    fs::write(&taken, "precious").unwrap();
    write_config(dir.path(), &format!("control = {:?}", taken.to_str().unwrap()), CONFIG);
    let output = peergated(dir.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let expected =
        format!("peergated: {} exists and is not a socket; remove it, or choose another path\n", taken.display());
    assert_eq!(stderr(&output), expected);
    assert_eq!(fs::read_to_string(&taken).unwrap(), "precious");
    assert!(!dir.path().join("run").exists());
}

#[test]
fn a_worker_started_by_hand_says_so() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_peergated"))
        .args(["worker", "--tenant", "x", "--seccomp", "enforce", "--log", "info"])
        .args(["--namespaces", "enforce", "--landlock", "enforce"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("This process is started by peergated only"), "{}", stderr(&output));
}

#[test]
fn hostile_operators_hold_up_nobody() {
    let daemon = Daemon::start();
    // Far more clients than are kept, each half-way through a request.
    let idle: Vec<_> = (0..64)
        .map(|_| {
            let mut client = UnixStream::connect(daemon.control()).unwrap();
            // The ones before it are dropped in the meantime, and so may this one be.
            let _ = client.write_all(b"{\"version\":1,");
            client
        })
        .collect();
    for garbage in [&b"\0\0\0\0\n"[..], &[b'x'; 100_000], b"GET / HTTP/1.1\r\n\r\n", b"\n\n\n\n"] {
        let mut client = UnixStream::connect(daemon.control()).unwrap();
        let _ = client.write_all(garbage);
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer);
        assert!(answer.starts_with(b"{\"version\":1,\"reply\":\"error\""), "{garbage:?}");
    }
    // Asks much and reads nothing.
    let mut greedy = UnixStream::connect(daemon.control()).unwrap();
    greedy.write_all(&b"{\"version\":1,\"request\":\"status\"}\n".repeat(100)).unwrap();
    assert_eq!(daemon.status().tenants.len(), 2);
    drop((idle, greedy));
    assert_eq!(daemon.tenant(1).session, 1);
    daemon.end();
}

#[test]
fn the_operators_command_answers_as_text_and_as_json() {
    let daemon = Daemon::start();
    let status = daemon.peergate(&["status"]);
    assert!(status.status.success());
    assert!(stdout(&status).contains("\nvm0     waiting        1"), "{}", stdout(&status));

    let json = |args: &[&str]| -> serde_json::Value {
        let output = daemon.peergate(&[args, &["--json"]].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let status = json(&["status"]);
    assert_eq!(status["daemon"]["pid"], daemon.pid());
    assert_eq!(status["tenants"][1]["state"], "waiting");
    let endpoints = json(&["endpoints"]);
    let first = serde_json::json!({
        "tenant": "vm0", "endpoint": 1, "name": "fpga0", "device": "fpga0", "kind": "fpga", "memory": 8 << 20, "engines": 1,
        "bandwidth": 0, "latency_ns": 0, "staged_to": ["gpu0"],
    });
    assert_eq!(endpoints["endpoints"][1], first);
    assert_eq!(endpoints["endpoints"][2]["name"], "mine");
    assert_eq!(json(&["tenants"])["tenants"][0]["submit_queues"], 2);
    assert_eq!(json(&["tenants"])["tenants"][0]["iommu"], "strict");
    assert_eq!(
        json(&["faults"])["tenants"][0],
        serde_json::json!({
            "tenant": "vm0", "session": 1, "total": 0, "recorded": 0, "overwritten": 0, "suppressed": 0,
            "suppressed_by_reason": {}, "missed": 0, "torn": 0, "next": 0,
        })
    );
    assert_eq!(stdout(&daemon.peergate(&["faults", "--tenant", "vm1", "--last", "5"])), "vm1: 0 faults in all\n");

    let socket = daemon.runtime_dir().join("vm0.sock");
    let attach = json(&["attach", "vm0", "--memory", "512M"]);
    let device = "vhost-user-test-device-pci,chardev=peergate-socket,virtio-id=37,num_vqs=4,vq_size=256,config_size=64";
    assert_eq!(attach.as_array().unwrap().last().unwrap(), device);
    let attach = daemon.peergate(&["attach", "vm0", "--vmm", "cloud-hypervisor", "--queues", "1"]);
    let expected = format!(
        "--memory size=2048M,shared=on \\\n--generic-vhost-user 'device_type=37,socket={},queue_sizes=[256,256,256]'\n",
        socket.display()
    );
    assert_eq!(stdout(&attach), expected);
}

#[test]
fn the_operators_command_fails_with_a_reason_and_a_status() {
    let daemon = Daemon::start();
    let failed = |args: &[&str], status: i32, reason: &str| {
        let output = daemon.peergate(args);
        assert_eq!(output.status.code(), Some(status), "{args:?}");
        assert!(stderr(&output).contains(reason), "{args:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty());
    };
    failed(&["faults", "--tenant", "vm9"], 1, "peergate: There is no tenant \"vm9\"; there are: vm0, vm1\n");
    failed(&["attach", "vm9"], 1, "peergate: There is no tenant \"vm9\"; there are: vm0, vm1\n");
    failed(&["attach", "vm0", "--queues", "3"], 1, "peergate: Tenant \"vm0\" has 2 submission queues");
    failed(&["attach", "vm0", "--device-id", "42"], 1, "peergate: QEMU aborts with virtio id 42");
    failed(&["attach", "vm0", "--queue-size", "2048"], 1, "peergate: A queue of 2048 entries is too long");
    failed(&["attach", "vm0", "--memory", "lots"], 2, "units: KiB, MiB");
    failed(&["faults", "--last", "-1"], 2, "");
    failed(&["reboot"], 2, "unrecognized subcommand");
    let control = daemon.control();
    drop(daemon.end());
    let gone = peergate(&control, &["status"]);
    assert_eq!(gone.status.code(), Some(1));
    assert!(stderr(&gone).starts_with("peergate: Cannot reach peergated at "), "{}", stderr(&gone));
}

#[test]
fn an_answer_to_a_pipe_that_nobody_reads_is_no_failure() {
    let daemon = Daemon::start();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = std::process::Command::new(env!("CARGO_BIN_EXE_peergate"))
        .arg("--socket")
        .arg(daemon.control())
        .arg("status")
        .stdout(writer)
        .status()
        .unwrap();
    assert!(status.success());
}

#[test]
fn requests_of_one_connection_are_answered_in_turn() {
    let daemon = Daemon::start();
    let mut client = Client::connect(&daemon.control()).unwrap();
    for _ in 0..3 {
        client.ask(&Request::Status).unwrap();
        client.ask(&Request::Faults { tenant: None, last: Some(1), since: None }).unwrap();
    }
}
