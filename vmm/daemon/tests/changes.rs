//! Changing what a daemon runs while it runs: all of a change or nothing, and the same after a restart.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use rustix::process::Signal;
use vhost::VhostBackend;
use vhost::vhost_user::Frontend;
use vmm_control::{Client, ClientError, Consent, DrainState, Edit, ErrorCode, Request, TenantState, TenantStatus};

use common::{CONFIG, Daemon, kill, peergated, process, stderr, stdout, wait_for_end, write_config};

fn config(daemon: &Daemon) -> PathBuf {
    daemon.dir.path().join("config.toml")
}

fn text(daemon: &Daemon) -> String {
    fs::read_to_string(config(daemon)).unwrap()
}

/// Changes the file as an operator with an editor would.
fn rewrite(daemon: &Daemon, from: &str, to: &str) {
    let old = text(daemon);
    assert!(old.contains(from), "{from:?} is in {old}");
    fs::write(config(daemon), old.replace(from, to)).unwrap();
}

/// Runs a command that must succeed, and gives what it says.
fn done(daemon: &Daemon, args: &[&str]) -> String {
    let output = daemon.peergate(args);
    assert!(output.status.success(), "{args:?}: {}{}", stdout(&output), stderr(&output));
    stdout(&output).to_owned()
}

/// Runs a command that must not succeed and must leave the file and every tenant as they are.
fn refused(daemon: &Daemon, args: &[&str], status: i32, reason: &str) -> Output {
    let state = |daemon: &Daemon| {
        let tenants = daemon.status().tenants.into_iter();
        let state: Vec<_> =
            tenants.map(|tenant| (tenant.name, tenant.session, tenant.worker_pid, tenant.drain)).collect();
        (text(daemon), state, sockets(daemon))
    };
    let before = state(daemon);
    let output = daemon.peergate(args);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {}{}", stdout(&output), stderr(&output));
    assert!(stderr(&output).contains(reason), "{args:?}: {}", stderr(&output));
    assert_eq!(state(daemon), before, "{args:?}");
    output
}

fn sockets(daemon: &Daemon) -> Vec<String> {
    let names =
        fs::read_dir(daemon.runtime_dir()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| !name.starts_with('.')).collect();
    names.sort();
    names
}

fn find(daemon: &Daemon, name: &str) -> Option<TenantStatus> {
    daemon.status().tenants.into_iter().find(|tenant| tenant.name == name)
}

/// Waits until a tenant waits for its VMM in the session.
fn waits(daemon: &Daemon, name: &str, session: u32) {
    let is_so = |tenant: &TenantStatus| {
        tenant.name == name && tenant.session == session && tenant.state == TenantState::Waiting
    };
    daemon.wait_for(|status| status.tenants.iter().any(is_so));
}

/// A VMM, and the daemon knows of it.
fn connect(daemon: &Daemon, name: &str) -> Frontend {
    let frontend = Frontend::connect(daemon.runtime_dir().join(format!("{name}.sock")), 4).unwrap();
    frontend.set_owner().unwrap();
    frontend.get_features().unwrap();
    let is_so = |tenant: &TenantStatus| tenant.name == name && tenant.state == TenantState::Connected;
    daemon.wait_for(|status| status.tenants.iter().any(is_so));
    frontend
}

/// What a command would have the file say.
fn ask(daemon: &Daemon, request: &Request) -> Result<vmm_control::Reply, ClientError> {
    Client::connect(&daemon.control()).unwrap().ask(request)
}

/// Ends the daemon and starts the next one on the same file.
fn restart(daemon: Daemon) -> Daemon {
    Daemon::start_in(daemon.end())
}

#[test]
fn a_tenant_comes_to_stay_and_can_be_connected_to_at_once() {
    let daemon = Daemon::start();
    rewrite(&daemon, "[[device]]\nname = \"gpu0\"", "# the big one\n[[device]]\nname = \"gpu0\"");
    rewrite(&daemon, "memory = \"8MiB\"\nengines", "memory = \"16MiB\"\nengines");
    assert_eq!(done(&daemon, &["reload"]), "~ device gpu0 memory (at once)\n    memory: 8 MiB -> 16 MiB\nDone.\n");
    let before = daemon.status();
    let add = ["tenant", "add", "vm2", "--slice", "gpu0=8MiB", "--limit", "max_mappings=7", "--socket-mode", "600"];
    let told = done(&daemon, &[&add[..], &["--iommu", "lazy"]].concat());
    let socket = daemon.runtime_dir().join("vm2.sock");
    let expected = format!(
        "+ tenant vm2 added (at once)\n    slice gpu0: 8 MiB of gpu0, endpoint 0\n    socket: {}\nDone.\n",
        socket.display()
    );
    assert_eq!(told, expected);
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let vmm = connect(&daemon, "vm2");
    for (before, after) in before.tenants.iter().zip(daemon.status().tenants) {
        assert_eq!((before.worker_pid, before.session), (after.worker_pid, after.session), "nobody else is concerned");
    }
    drop(vmm);
    waits(&daemon, "vm2", 2);
    let file = text(&daemon);
    assert!(file.contains("# the big one\n") && file.contains("\n[tenant.limits]\nmax_mappings = 7\n"), "{file}");

    let daemon = restart(daemon);
    assert_eq!(text(&daemon), file);
    let modes: Vec<_> = daemon.status().tenants.into_iter().map(|tenant| tenant.iommu).collect();
    assert_eq!(modes, ["strict", "strict", "lazy"]);
    drop(connect(&daemon, "vm2"));
    assert!(!daemon.log().contains("ERROR"), "{}", daemon.log());
}

#[test]
fn a_tenant_that_is_removed_leaves_nothing_behind_but_room() {
    let daemon = Daemon::start();
    let gone = find(&daemon, "vm1").unwrap();
    let gone = [gone.worker_pid, gone.keeper_pid].map(|pid| process(pid.unwrap()));
    refused(&daemon, &["tenant", "add", "vm2", "--slice", "gpu0=4MiB"], 1, "its slices take 12 MiB");
    let told = done(&daemon, &["tenant", "remove", "vm1"]);
    assert!(told.starts_with("- tenant vm1 removed (the VMM is disconnected)\n"), "{told}");
    assert_eq!(sockets(&daemon), ["control.sock", "vm0.sock"]);
    gone.iter().for_each(wait_for_end);
    assert_eq!(find(&daemon, "vm1"), None);

    // The same name and the same memory again, also while the other's processes are still ending.
    for session in 0..3 {
        done(&daemon, &["tenant", "add", "vm1", "--slice", "gpu0=4MiB"]);
        if session == 1 {
            waits(&daemon, "vm1", 1);
        }
        done(&daemon, &["tenant", "remove", "vm1"]);
    }
    done(&daemon, &["tenant", "add", "vm1", "--slice", "gpu0=4MiB"]);
    waits(&daemon, "vm1", 1);
    drop(connect(&daemon, "vm1"));
    assert_eq!(find(&daemon, "vm0").unwrap().session, 1);
    let log = daemon.log();
    assert!(!log.contains("ERROR"), "{log}");
    daemon.end();
}

#[test]
fn a_daemon_can_do_without_tenants_for_a_while() {
    let daemon = Daemon::start();
    for name in ["vm0", "vm1"] {
        done(&daemon, &["tenant", "remove", name]);
    }
    assert!(daemon.status().tenants.is_empty());
    refused(&daemon, &["tenant", "remove", "vm0"], 1, "There is no tenant \"vm0\"; there are: none");
    let daemon = restart(daemon);
    assert!(daemon.status().tenants.is_empty());
    done(&daemon, &["tenant", "add", "vm0", "--slice", "gpu0=8MiB"]);
    waits(&daemon, "vm0", 1);
}

#[test]
fn what_a_connected_guest_would_lose_takes_force_or_a_drain() {
    let daemon = Daemon::start();
    let vmm = connect(&daemon, "vm0");
    let mappings =
        "Tenant \"vm0\" is connected: the guest loses its mappings, buffers and work. Drain it first, or pass --force";
    refused(&daemon, &["slice", "remove", "vm0", "fpga0"], 3, mappings);
    refused(
        &daemon,
        &["slice", "add", "vm0", "--device", "fpga0", "--memory", "4KiB", "--name", "b"],
        1,
        "slices take 8196 KiB",
    );
    let device = "Tenant \"vm0\" is connected: the VMM is disconnected and the guest loses its device";
    refused(&daemon, &["tenant", "remove", "vm0"], 3, device);
    let shown = refused(&daemon, &["tenant", "remove", "vm0", "--force", "--dry-run"], 0, "");
    assert!(stdout(&shown).starts_with("- tenant vm0 removed"), "{}", stdout(&shown));

    // A new session on the same connection.
    done(&daemon, &["slice", "remove", "vm0", "fpga0", "--force"]);
    let served = |tenant: &TenantStatus| tenant.session == 2 && tenant.state == TenantState::Connected;
    let status = daemon.wait_for(|status| served(&status.tenants[0]));
    assert_eq!((status.tenants[0].failures, status.tenants[1].session), (0, 1));
    vmm.get_features().unwrap();
    assert!(!stdout(&daemon.peergate(&["endpoints"])).contains("vm0      1"));

    // Drained, it has agreed to it.
    done(&daemon, &["drain", "vm0"]);
    done(&daemon, &["slice", "move", "vm0", "gpu0", "--to", "fpga0"]);
    daemon.wait_for(|status| status.tenants[0].session == 3 && status.tenants[0].state == TenantState::Connected);
    vmm.get_features().unwrap();
    done(&daemon, &["tenant", "remove", "vm0"]);
    assert!(vmm.get_features().is_err(), "the connection is over");
    let log = daemon.log();
    assert!(!log.contains("ERROR"), "{log}");
}

#[test]
fn slices_that_change_places_wait_for_each_other_and_nobody_is_refused() {
    let daemon = Daemon::start();
    let whole = "[[tenant]]\nname = \"vm0\"\nslice = [{ device = \"gpu0\", memory = \"8MiB\" }]\n\
                 [[tenant]]\nname = \"vm1\"\nslice = [{ device = \"fpga0\", memory = \"8MiB\" }]\n";
    let devices = CONFIG.split("[[tenant]]").next().unwrap();
    write_config(daemon.dir.path(), "", &(devices.to_owned() + whole));
    done(&daemon, &["reload"]);
    waits(&daemon, "vm0", 2);
    waits(&daemon, "vm1", 2);
    let _vmm = connect(&daemon, "vm0");
    let swapped = whole.replace("gpu0", "x").replace("fpga0", "gpu0").replace("\"x\"", "\"fpga0\"");
    write_config(daemon.dir.path(), "", &(devices.to_owned() + &swapped));
    refused(&daemon, &["reload"], 3, "Tenant \"vm0\" is connected");
    let told = done(&daemon, &["reload", "--force"]);
    assert!(told.contains("slice gpu0: 8 MiB of gpu0, endpoint 0 -> -\n"), "{told}");
    daemon.wait_for(|status| status.tenants[0].session == 3 && status.tenants[0].state == TenantState::Connected);
    waits(&daemon, "vm1", 3);
    let log = daemon.log();
    assert!(!log.contains("ERROR"), "the broker was never asked for too much: {log}");
}

#[test]
fn limits_are_set_without_a_new_session() {
    let daemon = Daemon::start();
    let vmm = connect(&daemon, "vm1");
    let told = done(&daemon, &["tenant", "limits", "vm1", "max_mappings=9", "max_timeout=20s"]);
    let expected =
        "~ tenant vm1 limits (at once)\n    max_mappings: default -> 9\n    max_timeout: default -> 20000 ms\nDone.\n";
    assert_eq!(told, expected);
    assert_eq!(done(&daemon, &["tenant", "limits", "vm1", "max_mappings=9"]), "Nothing to change.\n");
    done(&daemon, &["tenant", "limits", "vm1", "max_mappings=default"]);
    refused(&daemon, &["tenant", "limits", "vm1", "max_mapings=9"], 1, "did you mean max_mappings?");
    refused(&daemon, &["tenant", "limits", "vm1", "max_timeout=5"], 1, "max_timeout is \"5\"; write a time");
    refused(&daemon, &["tenant", "limits", "vm1", "max_timeout"], 2, "write KEY=VALUE");
    vmm.get_features().unwrap();
    assert_eq!((find(&daemon, "vm1").unwrap().session, find(&daemon, "vm1").unwrap().failures), (1, 0));
    assert!(text(&daemon).ends_with("[tenant.limits]\nmax_timeout = \"20s\"\n"), "{}", text(&daemon));
}

#[test]
fn a_reload_prints_what_differs_names_what_it_refuses_and_then_applies_it() {
    let daemon = Daemon::start();
    assert_eq!(done(&daemon, &["reload"]), "Nothing to change.\n");
    rewrite(&daemon, "log = \"debug\"", "log = \"info\"");
    rewrite(&daemon, "name = \"mine\"", "name = \"mine\"\n[tenant.limits]\nmax_domains = 3");
    let differences = "~ tenant vm1 limits (at once)\n    max_domains: default -> 3\n\
                       ! daemon settings (refused: restart peergated for this)\n    log: debug -> info\n";
    let output = refused(&daemon, &["reload"], 3, "Parts of it wait for a restart of peergated; pass --partial");
    assert_eq!(stdout(&output), differences);
    let output = refused(&daemon, &["reload", "--partial", "--dry-run"], 0, "");
    assert_eq!(stdout(&output), differences);
    // It differs from what the daemon has read, so no command may build on it.
    refused(&daemon, &["drain", "vm0"], 1, "has been edited since peergated read it; run peergate reload first");
    assert_eq!(done(&daemon, &["reload", "--partial"]), differences.to_owned() + "Done.\n");
    // What waits for a restart stands in nobody's way.
    done(&daemon, &["tenant", "limits", "vm1", "max_domains=4"]);
    let output = daemon.peergate(&["reload", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &json["applied"]), (Some(3), &false.into()));
    assert_eq!(json["refused"][0]["keys"][0]["key"], "log");
    let daemon = restart(daemon);
    assert_eq!(done(&daemon, &["reload"]), "Nothing to change.\n");
}

#[test]
fn a_file_with_an_error_is_refused_as_a_whole_with_its_line() {
    let daemon = Daemon::start();
    rewrite(&daemon, "name = \"mine\"", "name = \"mine\"\nmemroy = 1\n[[tenant]]\nname = \"vm2\"");
    let output =
        refused(&daemon, &["reload"], 1, "config.toml:34: Unknown key \"memroy\" in [[tenant.slice]]; did you mean");
    assert_eq!(stdout(&output), "");
    fs::write(config(&daemon), "\u{0}").unwrap();
    refused(&daemon, &["reload"], 1, "config.toml:1: Not TOML");
    fs::remove_file(config(&daemon)).unwrap();
    let output = daemon.peergate(&["reload"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("Cannot read "), "{}", stderr(&output));
    assert_eq!(daemon.status().tenants.len(), 2);
}

#[test]
fn a_change_of_which_one_part_fails_changes_nothing() {
    let daemon = Daemon::start();
    // Two tenants could come, permissions change and a socket move; the third tenant's socket cannot be made.
    rewrite(&daemon, "name = \"vm0\"", "name = \"vm0\"\nsocket_mode = 0o600");
    rewrite(&daemon, "name = \"vm1\"", "name = \"vm1\"\nsocket = \"moved.sock\"");
    rewrite(&daemon, "memory = \"4MiB\"", "memory = \"1MiB\"");
    let tenant = |name: &str, socket: &str| {
        format!(
            "[[tenant]]\nname = {name:?}\nsocket = {socket:?}\nslice = [{{ device = \"gpu0\", memory = \"1MiB\" }}]\n"
        )
    };
    let good = text(&daemon) + &tenant("a", "a.sock") + &tenant("b", "b.sock");
    fs::write(config(&daemon), good.clone() + &tenant("c", "/nowhere/c.sock")).unwrap();
    let mode = || fs::metadata(daemon.runtime_dir().join("vm0.sock")).unwrap().permissions().mode() & 0o777;
    refused(&daemon, &["reload"], 1, "Nothing was changed: Cannot listen at /nowhere/c.sock");
    assert_eq!(mode(), 0o660);
    // A path goes from one tenant to the other in two steps.
    fs::write(config(&daemon), good.replace("socket = \"a.sock\"", "socket = \"vm1.sock\"")).unwrap();
    refused(&daemon, &["reload"], 1, "cannot go from tenant \"vm1\" to tenant \"a\" in one step");
    fs::write(config(&daemon), &good).unwrap();
    done(&daemon, &["reload"]);
    assert_eq!(sockets(&daemon), ["a.sock", "b.sock", "control.sock", "moved.sock", "vm0.sock"]);
    assert_eq!(mode(), 0o600);
    let moved = UnixStream::connect(daemon.runtime_dir().join("moved.sock")).unwrap();
    daemon.wait_for(|status| status.tenants[1].state == TenantState::Connected);
    drop(moved);
    waits(&daemon, "a", 1);
}

/// [`CONFIG`] with memory to spare.
fn roomy() -> String {
    ["gpu", "fpga"].iter().fold(CONFIG.to_owned(), |text, kind| {
        let device = |memory| format!("kind = {kind:?}\nmemory = \"{memory}\"");
        text.replace(&device("8MiB"), &device("64MiB"))
    })
}

#[test]
fn a_file_that_cannot_be_written_stays_and_so_does_everything_else() {
    let daemon = Daemon::start_with("", &roomy());
    // Also root cannot make a file where a folder is.
    let fresh = daemon.dir.path().join(".config.toml.peergated-new");
    fs::create_dir(&fresh).unwrap();
    let commands = [
        &["tenant", "add", "vm2", "--slice", "gpu0=4KiB"][..],
        &["tenant", "limits", "vm0", "max_domains=3"],
        &["slice", "add", "vm1", "--device", "fpga0", "--memory", "4KiB"],
        &["slice", "move", "vm1", "mine", "--to", "fpga0"],
        &["slice", "remove", "vm0", "fpga0"],
        &["drain", "vm0"],
        &["tenant", "remove", "vm1"],
    ];
    for args in commands {
        refused(&daemon, args, 1, "so nothing was changed; let peergated write there, or edit the file by hand");
    }
    fs::remove_dir(&fresh).unwrap();
    for args in commands {
        done(&daemon, args);
    }
    assert!(!fresh.exists());
}

#[test]
fn two_operators_do_not_undo_each_others_changes() {
    let daemon = Daemon::start();
    let vmm_control::Reply::Changes(shown) =
        ask(&daemon, &Request::Reload { consent: Consent { dry_run: true, ..Consent::default() } }).unwrap()
    else {
        panic!("an answer about changes")
    };
    done(&daemon, &["tenant", "limits", "vm0", "max_domains=3"]);
    let consent = Consent { file: Some(shown.file), ..Consent::default() };
    let Err(ClientError::Refused { reply }) = ask(&daemon, &Request::Reload { consent }) else { panic!("a refusal") };
    assert_eq!(reply.code, ErrorCode::Edited);
    // Whoever asks for nonsense learns so.
    let edit = Edit::TenantRemove { tenant: "\u{1b}[2J".into() };
    let Err(ClientError::Refused { reply }) = ask(&daemon, &Request::Change { edit, consent: Consent::default() })
    else {
        panic!("a refusal")
    };
    assert_eq!(reply.code, ErrorCode::Configuration);
    assert!(!reply.message.contains('\u{1b}'), "{reply:?}");
}

#[test]
fn a_drained_tenant_stays_drained_until_it_is_told_otherwise() {
    let daemon = Daemon::start();
    let drain = |daemon: &Daemon| find(daemon, "vm0").unwrap().drain;
    assert_eq!(drain(&daemon), DrainState::Running);
    assert_eq!(
        done(&daemon, &["drain", "vm0"]),
        "Tenant vm0 is drained; its guest's work waits until peergate resume vm0\n"
    );
    assert!(done(&daemon, &["status"]).contains("vm0     waiting, drained"));
    assert!(text(&daemon).contains("name = \"vm0\"\n"));
    done(&daemon, &["drain", "vm0"]);
    let vmm = connect(&daemon, "vm0");
    assert_eq!(drain(&daemon), DrainState::Drained, "a VMM may connect");
    kill(find(&daemon, "vm0").unwrap().worker_pid.unwrap(), Signal::KILL);
    daemon.wait_for(|status| status.tenants[0].session == 2 && status.tenants[0].state == TenantState::Connected);
    daemon.wait_for(|status| status.tenants[0].drain == DrainState::Drained);
    drop(vmm);
    let daemon = restart(daemon);
    daemon.wait_for(|status| status.tenants[0].drain == DrainState::Drained);
    assert_eq!(done(&daemon, &["resume", "vm0"]), "Tenant vm0 takes work\n");
    assert_eq!(drain(&daemon), DrainState::Running);
    let daemon = restart(daemon);
    assert_eq!(drain(&daemon), DrainState::Running);
    refused(&daemon, &["drain", "vm9"], 1, "There is no tenant \"vm9\"; there are: vm0, vm1");
    refused(&daemon, &["resume", "vm9"], 1, "There is no tenant \"vm9\"");
}

#[test]
fn a_worker_that_does_not_make_room_is_killed() {
    let daemon = Daemon::start();
    let worker = find(&daemon, "vm1").unwrap().worker_pid.unwrap();
    let watched = process(worker);
    kill(worker, Signal::STOP);
    done(&daemon, &["tenant", "remove", "vm1"]);
    done(&daemon, &["tenant", "add", "vm1", "--slice", "gpu0=4MiB"]);
    assert_eq!(find(&daemon, "vm1").unwrap().state, TenantState::Starting, "the other one has its memory still");
    wait_for_end(&watched);
    waits(&daemon, "vm1", 1);
    daemon.end();
}

#[test]
fn whenever_the_daemon_is_killed_the_file_is_one_that_it_can_be_started_with() {
    let mut daemon = Daemon::start_with("", &roomy());
    for _ in 0..16 {
        let had = find(&daemon, "vm2").is_some();
        let args: &[&str] =
            if had { &["tenant", "remove", "vm2"] } else { &["tenant", "add", "vm2", "--slice", "gpu0=4KiB"] };
        let mut command = Command::new(env!("CARGO_BIN_EXE_peergate"));
        command.arg("--socket").arg(daemon.control()).args(args).stdout(Stdio::null()).stderr(Stdio::null());
        let mut command = command.spawn().unwrap();
        daemon.signal(Signal::KILL);
        daemon.wait();
        let was_told = command.wait().unwrap().success();
        let dir = std::mem::replace(&mut daemon.dir, tempfile::tempdir().unwrap());
        let checked = peergated(dir.path()).arg("--check").output().unwrap();
        assert!(checked.status.success(), "{}", stderr(&checked));
        daemon = Daemon::start_in(dir);
        let has = find(&daemon, "vm2").is_some();
        assert!(!was_told || has != had, "who was told that it is done finds it done");
    }
}
