//! A tenant with processes that do as the test says.

use std::io::IoSlice;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use vmm_broker::{Channel, GpuPeer, LinkTable, ToWorker};
use vmm_sandbox::Fence;

use super::start::{TAKE_OVER, TAKE_OVER_HARDWARE};
use super::*;
use crate::config::{Config, DaemonConfig};
use crate::supervisor::process::Process;

pub(super) const CONFIG: &str = include_str!("../../../../../configs/demo.toml");

/// A process that waits for the end of its input, and its end of a channel.
pub(super) fn process() -> (Child, Channel) {
    let (ours, theirs) = Channel::pair().unwrap();
    ours.set_nonblocking().unwrap();
    let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    (Child::new(Process::watch(child), ours), theirs)
}

pub(super) fn tenant(dir: &Path) -> (Tenant, Config) {
    let mut config = Config::parse(Path::new("demo.toml"), CONFIG).unwrap();
    config.tenants[0].socket = dir.join("t.sock");
    let socket = vmm_control::listen(&config.tenants[0].socket, 0o600).unwrap();
    (Tenant::new(0, 0, config.tenants[0].clone(), socket).unwrap(), config)
}

/// A tenant that has a keeper and a worker, and their ends of the channels.
pub(super) fn running(dir: &Path) -> (Tenant, Channel, Channel) {
    let (mut tenant, config) = tenant(dir);
    let (keeper, keeper_says) = process();
    let (worker, worker_says) = process();
    tenant.keeper = Some(keeper);
    assert_eq!(tenant.wants_lease(&config, Instant::now()).unwrap().session, 1);
    tenant.take(worker);
    (tenant, keeper_says, worker_says)
}

/// Waits for the worker's end, and says which signal it was.
pub(super) fn ended_by(tenant: &mut Tenant) -> Option<i32> {
    loop {
        if let Some((_, status)) = tenant.reap_worker() {
            return status.signal();
        }
        std::thread::yield_now();
    }
}

pub(super) const KILLED: Option<i32> = Some(9);

#[test]
fn a_worker_that_makes_no_sense_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut tenant, _keeper, worker) = running(dir.path());
    assert!(!tenant.hear_worker());
    let garbage = [IoSlice::new(b"{\"reboot\":{}}")];
    sendmsg(&worker, &garbage, &mut SendAncillaryBuffer::default(), SendFlags::empty()).unwrap();
    assert!(tenant.hear_worker());
    assert_eq!(ended_by(&mut tenant), KILLED);
    assert_eq!((tenant.failures, tenant.state()), (1, TenantState::Restarting));
}

#[test]
fn a_process_that_talks_without_end_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut tenant, _keeper, worker) = running(dir.path());
    let reason = "\u{1b}[2J\n".repeat(1000);
    let mut closed = false;
    // The bucket may refill while this runs.
    for _ in 0..10_000 {
        if worker.send(&ToSupervisor::Failed { reason: reason.clone() }, &[]).is_err() {
            break;
        }
        closed |= tenant.hear_worker();
        if closed {
            break;
        }
    }
    assert!(closed);
    assert_eq!(ended_by(&mut tenant), KILLED);
}

#[test]
fn a_worker_that_hangs_up_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut tenant, _keeper, worker) = running(dir.path());
    drop(worker);
    // A process that another test is just starting may still hold a copy.
    while !tenant.hear_worker() {}
    assert_eq!(ended_by(&mut tenant), KILLED);
}

#[test]
fn a_tenant_is_connected_once_its_worker_knows_what_the_last_one_knew() {
    let dir = tempfile::tempdir().unwrap();
    let (mut tenant, keeper, worker) = running(dir.path());
    assert_eq!(tenant.state(), TenantState::Starting);
    worker.send(&ToSupervisor::Ready {}, &[]).unwrap();
    tenant.hear_worker();
    assert_eq!(tenant.state(), TenantState::Waiting);
    keeper.send(&FromKeeper::Connected {}, &[]).unwrap();
    tenant.hear_keeper();
    assert_eq!(tenant.state(), TenantState::Connected);

    tenant.kill();
    assert_eq!(ended_by(&mut tenant), KILLED);
    assert_eq!(tenant.state(), TenantState::Restarting);
    let (next, says) = process();
    tenant.session = 2;
    tenant.take(next);
    says.send(&ToSupervisor::Ready {}, &[]).unwrap();
    tenant.hear_worker();
    assert_eq!(tenant.state(), TenantState::Restarting, "it does not know enough yet");
    keeper.send(&FromKeeper::Replayed { session: 1 }, &[]).unwrap();
    tenant.hear_keeper();
    assert_eq!((tenant.state(), tenant.last_outage), (TenantState::Restarting, None), "that was another one");
    keeper.send(&FromKeeper::Replayed { session: 2 }, &[]).unwrap();
    tenant.hear_keeper();
    assert_eq!(tenant.state(), TenantState::Connected);
    assert!(tenant.last_outage.is_some());
}

#[test]
fn what_a_worker_says_of_its_gpus_goes_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let (mut tenant, _keeper, worker) = running(dir.path());
    tenant.peers = Peers::of(["a", "b"].into_iter());
    let peer = GpuPeer { accessor: 0, owner: 1, access: true, atomics: false, rank: 1, link: None };
    worker.send(&ToSupervisor::Peers { peers: vec![peer.clone()] }, &[]).unwrap();
    tenant.hear_worker();
    assert_eq!(tenant.peers.get("a", "b"), Some(&peer));
    tenant.kill();
    assert_eq!(ended_by(&mut tenant), KILLED);
    assert_eq!(tenant.peers.get("a", "b"), None);
}

#[test]
fn without_a_keeper_there_is_no_worker_and_its_end_ends_the_connection() {
    let dir = tempfile::tempdir().unwrap();
    let (mut tenant, config) = tenant(dir.path());
    assert!(tenant.wants_lease(&config, Instant::now()).is_none());
    let (keeper, says) = process();
    tenant.keeper = Some(keeper);
    says.send(&FromKeeper::Connected {}, &[]).unwrap();
    tenant.hear_keeper();
    assert!(tenant.connected);
    tenant.kill();
    while tenant.reap_keeper().is_none() {
        std::thread::yield_now();
    }
    assert!(!tenant.connected);
    assert!(tenant.due().is_some(), "there will be another");
}

#[test]
fn a_lease_for_another_session_starts_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (mut tenant, config) = tenant(dir.path());
    let (keeper, _says) = process();
    tenant.keeper = Some(keeper);
    let links = LinkTable::create(&[0, 0]).unwrap();
    let starter = Starter::new(&DaemonConfig { namespaces: Fence::Off, landlock: Fence::Off, ..config.daemon.clone() });
    let starter = starter.unwrap();
    assert!(!tenant.start(0, &[], &config, &links, &starter), "none was asked for");
    tenant.wants_lease(&config, Instant::now()).unwrap();
    assert!(!tenant.start(7, &[], &config, &links, &starter));
    tenant.lease_refused(7, "not yours");
    assert!(matches!(tenant.stage, Stage::Leasing));
    tenant.lease_refused(1, "no memory");
    assert!(matches!(tenant.stage, Stage::Pause { .. }));
    tenant.kill();
}

#[test]
fn a_stopped_tenant_accepts_nobody_and_gets_no_further_worker() {
    let dir = tempfile::tempdir().unwrap();
    let (mut tenant, keeper, worker) = running(dir.path());
    tenant.stop();
    assert!(!dir.path().join("t.sock").exists());
    assert_eq!(worker.receive::<ToWorker>().unwrap().unwrap().0, ToWorker::Shutdown {});
    assert_eq!(keeper.receive::<ToKeeper>().unwrap().unwrap().0, ToKeeper::Shutdown {});
    tenant.kill();
    assert_eq!(ended_by(&mut tenant), KILLED);
    while tenant.reap_keeper().is_none() {
        std::thread::yield_now();
    }
    assert!(matches!(tenant.stage, Stage::Over));
    assert_eq!((tenant.processes(), tenant.due(), tenant.state()), (0, None, TenantState::Stopped));
}

/// The moment in which that much time has passed from now on.
fn after(patience: Duration) -> Instant {
    Instant::now() + patience
}

#[test]
fn a_worker_that_does_not_take_over_in_time_is_killed_and_has_failed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut tenant, keeper, _worker) = running(dir.path());
    keeper.send(&FromKeeper::Connected {}, &[]).unwrap();
    tenant.hear_keeper();
    assert_eq!(tenant.due(), None, "the first one has nobody to take over");
    tenant.kill();
    assert_eq!(ended_by(&mut tenant), KILLED);

    let (next, _says) = process();
    tenant.session = 2;
    tenant.take(next);
    assert!(tenant.due().is_some_and(|due| due <= after(TAKE_OVER)));
    tenant.kill_overdue(Instant::now());
    assert_eq!((tenant.failures, tenant.reap_worker().is_some()), (1, false), "it has time");
    tenant.kill_overdue(after(TAKE_OVER));
    assert_eq!(tenant.due(), None, "it is killed once");
    assert_eq!(tenant.worker().unwrap().reason.as_deref(), Some("it did not take over its VM within 5 s"));
    assert_eq!(ended_by(&mut tenant), KILLED);
    assert_eq!((tenant.failures, tenant.state()), (2, TenantState::Restarting));

    let (next, _says) = process();
    tenant.session = 3;
    tenant.take(next);
    keeper.send(&FromKeeper::Replayed { session: 3 }, &[]).unwrap();
    tenant.hear_keeper();
    assert_eq!(tenant.due(), None, "it has taken over");
    tenant.kill();
}

#[test]
fn a_worker_that_has_hardware_may_take_longer() {
    let dir = tempfile::tempdir().unwrap();
    let (mut tenant, keeper, _worker) = running(dir.path());
    keeper.send(&FromKeeper::Connected {}, &[]).unwrap();
    tenant.hear_keeper();
    tenant.kill();
    assert_eq!(ended_by(&mut tenant), KILLED);

    let (next, _says) = process();
    tenant.session = 2;
    tenant.has_hardware = true;
    tenant.take(next);
    tenant.kill_overdue(after(TAKE_OVER));
    assert_eq!((tenant.failures, tenant.reap_worker().is_some()), (1, false), "it has time");
    tenant.kill_overdue(after(TAKE_OVER_HARDWARE));
    assert_eq!(tenant.worker().unwrap().reason.as_deref(), Some("it did not take over its VM within 30 s"));
    assert_eq!(ended_by(&mut tenant), KILLED);
}

#[test]
fn a_worker_that_stays_when_its_vm_has_gone_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut tenant, keeper, _worker) = running(dir.path());
    keeper.send(&FromKeeper::Connected {}, &[]).unwrap();
    keeper.send(&FromKeeper::Disconnected {}, &[]).unwrap();
    tenant.hear_keeper();
    tenant.kill_overdue(after(TAKE_OVER));
    assert!(tenant.reap_worker().is_none(), "it may have much to end");
    assert!(tenant.due().is_some_and(|due| due <= after(TEARDOWN)));
    tenant.kill_overdue(after(TEARDOWN));
    assert_eq!(ended_by(&mut tenant), KILLED);
    assert_eq!(tenant.failures, 1);
}
