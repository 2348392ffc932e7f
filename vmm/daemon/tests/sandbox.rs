//! How the daemon's processes are fenced in, as the kernel tells the supervisor and the supervisor the operator.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;

use vmm_control::{Capabilities, ProcessSandbox, Role, SandboxReply, TenantState};

use common::{CONFIG, Daemon, stderr, stdout};

const NOBODY: u32 = 65534;
/// Two tenants.
const CHILDREN: [(Role, Option<&str>); 5] = [
    (Role::Broker, None),
    (Role::Keeper, Some("vm0")),
    (Role::Worker, Some("vm0")),
    (Role::Keeper, Some("vm1")),
    (Role::Worker, Some("vm1")),
];

/// What `peergate status --sandbox --json` says while a VMM is connected: the supervisor, and its children.
fn ask(daemon: &Daemon) -> (ProcessSandbox, Vec<ProcessSandbox>) {
    let vmm = UnixStream::connect(daemon.runtime_dir().join("vm0.sock")).unwrap();
    let status = daemon.wait_for(|status| status.tenants[0].state == TenantState::Connected);
    let output = daemon.peergate(&["status", "--sandbox", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    drop(vmm);
    let reply: SandboxReply = serde_json::from_slice(&output.stdout).unwrap();
    assert!(reply.processes.iter().all(|process| process.unreadable.is_empty()), "{reply:#?}");
    let mut processes = reply.processes.into_iter();
    let supervisor = processes.next().unwrap();
    assert_eq!((supervisor.role, supervisor.pid), (Role::Supervisor, daemon.pid()));
    let children: Vec<_> = processes.collect();
    let who: Vec<_> = children.iter().map(|child| (child.role, child.tenant.as_deref())).collect();
    assert_eq!(who, CHILDREN);
    let known = status.tenants.iter().flat_map(|tenant| [tenant.keeper_pid, tenant.worker_pid]);
    let known: Vec<_> = [status.daemon.broker_pid].into_iter().chain(known).flatten().collect();
    assert_eq!(children.iter().map(|child| child.pid).collect::<Vec<_>>(), known);
    (supervisor, children)
}

/// What no thread has, whatever is configured.
fn has_no_privileges(child: &ProcessSandbox, user: u32) {
    let threads: usize = child.threads.iter().map(|group| group.names.len()).sum();
    assert!(threads >= if child.role == Role::Keeper { 1 } else { 2 }, "{child:#?}");
    for thread in &child.threads {
        assert_eq!((thread.uid, thread.no_new_privs, thread.seccomp), (user, true, 2), "{child:#?}");
        assert!(thread.seccomp_filters.is_none_or(|filters| filters >= 2), "its supervisor's, and its own: {child:#?}");
    }
    let limits = child.limits.unwrap();
    assert_eq!(limits.core, Some(0));
    assert!(limits.processes.is_some_and(|most| most == 0 || child.role != Role::Keeper));
}

/// What no process has that is in namespaces.
fn sees_nothing(children: &[ProcessSandbox]) {
    for child in children {
        assert!(child.threads.iter().all(|thread| thread.capabilities == Capabilities::default()), "{child:#?}");
        let root = child.root.unwrap();
        assert!(root.empty && root.read_only && root.mounts == 1, "{child:#?}");
    }
    for kind in ["user", "mnt", "net", "pid", "ipc", "uts", "cgroup"] {
        let all: Vec<_> = children.iter().map(|child| child.namespaces[kind]).collect();
        assert!(all.iter().all(|namespace| !namespace.shared), "{kind}: {all:?}");
        let ids: BTreeSet<_> = all.iter().map(|namespace| namespace.id).collect();
        assert_eq!(ids.len(), children.len(), "{kind}: {all:?}");
    }
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[test]
fn every_child_sees_nothing_and_can_do_nothing() {
    let daemon = Daemon::start();
    let (supervisor, children) = ask(&daemon);
    assert!(supervisor.namespaces.values().all(|namespace| namespace.shared));
    assert!(supervisor.threads.iter().all(|thread| (thread.uid, thread.seccomp) == (user(), 2)));
    assert!(!supervisor.root.unwrap().empty);
    children.iter().for_each(|child| has_no_privileges(child, if user() == 0 { NOBODY } else { user() }));
    sees_nothing(&children);
    let filters = |child: &ProcessSandbox| child.threads.iter().filter_map(|thread| thread.seccomp_filters).max();
    assert!(filters(&children[2]) > filters(&children[1]), "a worker's threads tighten further: {children:#?}");

    let text = daemon.peergate(&["status", "--sandbox"]);
    let text = stdout(&text);
    assert!(text.starts_with("Configured: namespaces enforce, landlock enforce, seccomp enforce\n"), "{text}");
    let row = text.lines().find(|line| line.starts_with("worker") && line.contains("vm1")).unwrap();
    assert!(row.contains("  own  ") && row.contains("  empty  "), "{text}");
    daemon.end();
}

#[test]
fn an_ordinary_user_can_run_it_and_its_children_are_fenced_in_alike() {
    if user() != 0 {
        return println!("not tried: only root can become another user, and every other test has tried this one");
    }
    let daemon = Daemon::start_as(NOBODY);
    let (supervisor, children) = ask(&daemon);
    assert!(supervisor.threads.iter().all(|thread| (thread.uid, thread.capabilities.effective) == (NOBODY, 0)));
    children.iter().for_each(|child| has_no_privileges(child, NOBODY));
    sees_nothing(&children);
    let log = daemon.log();
    assert!(!log.contains("ERROR") && !log.contains("WARN"), "{log}");
    daemon.end();
}

#[test]
fn without_namespaces_the_rest_is_given_up_all_the_same_and_the_operator_sees_the_difference() {
    let daemon = Daemon::start_with("namespaces = \"off\"", CONFIG);
    let (supervisor, children) = ask(&daemon);
    for child in &children {
        has_no_privileges(child, if user() == 0 { NOBODY } else { user() });
        assert!(child.namespaces.values().all(|namespace| namespace.shared), "{child:#?}");
        assert_eq!(child.root, supervisor.root);
        let usable = Capabilities { bounding: 0, ..child.threads[0].capabilities };
        assert_eq!(usable, Capabilities::default());
        assert!(user() != 0 || child.threads[0].capabilities.bounding == 0, "root can empty that set, too");
    }
    assert!(stdout(&daemon.peergate(&["status", "--sandbox"])).contains("the host's"));
    daemon.end();
}
