//! What a tenant does when its configuration changes while it runs: a new session, another socket, a drain, its end.
//!
//! Nothing here fails: whatever can fail has been done before. A worker that must make room ends as if it had been killed, so that the next one,
//! which gets what the configuration says by then, answers what was on its way; a keeper that is asked to end closes its VMM's connection.
//!
//! Not here: whether a change may be made (`supervisor::change`).

use std::collections::BTreeMap;
use std::time::Duration;

use vmm_broker::{Lease, ToKeeper, ToWorker};
use vmm_control::{DrainState, Effect, SocketFile};

use super::{Stage, Tenant};
use crate::config::{Config, TenantConfig};

/// How long a process may take to end before it is killed.
const PATIENCE: Duration = Duration::from_secs(5);

impl Tenant {
    /// The keeper holds a VMM's connection.
    pub(crate) fn is_connected(&mut self) -> bool {
        self.hear_keeper();
        self.connected
    }

    /// Takes another configuration. `effect` is the most that it does; `socket` is in place of the one so far.
    pub(crate) fn adapt(&mut self, config: TenantConfig, effect: Effect, socket: Option<SocketFile>) {
        let old = std::mem::replace(&mut self.config, config);
        self.socket = socket.or(self.socket.take());
        match effect {
            Effect::NewSession => self.renew(),
            Effect::Disconnect => {
                self.end_keeper();
                self.renew();
            }
            Effect::Now | Effect::NextSession | Effect::Restart => {
                if old.limits != self.config.limits
                    && let Stage::Running { worker, .. } = &mut self.stage
                {
                    worker.tell(&ToWorker::Limits(self.config.limits), &[]);
                }
                if old.drained != self.config.drained {
                    self.say_whether_drained();
                }
            }
        }
    }

    /// The session ends, and the next one begins with the configuration of then.
    pub(crate) fn renew(&mut self) {
        match &mut self.stage {
            Stage::Running { worker, .. } => worker.end(&ToWorker::MakeRoom {}, PATIENCE),
            // A lease that is on its way is for another configuration.
            Stage::Leasing => self.pause_for(Duration::ZERO),
            Stage::Pause { .. } | Stage::Over => {}
        }
    }

    /// The broker has gone, and with it whoever told this tenant's functions what the IOMMU has stopped: they need the next broker, so a new session.
    pub(crate) fn broker_lost(&mut self) {
        if self.holds.as_ref().is_some_and(|lease| lease.container) {
            self.renew();
        }
    }

    /// Accepts nobody any more, and asks its processes to end.
    pub(crate) fn stop(&mut self) {
        self.socket = None;
        self.end_keeper();
        match &mut self.stage {
            Stage::Running { worker, .. } => worker.end(&ToWorker::Shutdown {}, PATIENCE),
            // The broker's answer must not be taken for one to somebody else's question.
            Stage::Leasing => {}
            stage => *stage = Stage::Over,
        }
    }

    fn end_keeper(&mut self) {
        if let Some(keeper) = &mut self.keeper {
            keeper.end(&ToKeeper::Shutdown {}, PATIENCE);
        }
    }

    fn say_whether_drained(&mut self) {
        let Stage::Running { worker, .. } = &mut self.stage else { return };
        self.drain_turn = self.drain_turn.wrapping_add(1);
        self.quiet = false;
        let turn = self.drain_turn;
        worker.tell(&if self.config.drained { ToWorker::Drain { turn } } else { ToWorker::Resume {} }, &[]);
    }

    /// Whether work is taken from the guest.
    pub(crate) fn drain_state(&self) -> DrainState {
        match &self.stage {
            _ if !self.config.drained => DrainState::Running,
            Stage::Running { .. } if !self.quiet => DrainState::Draining,
            // Nobody is there to work.
            _ => DrainState::Drained,
        }
    }

    /// Gives up a lease that no worker uses and that is not what the next one needs. True if there was one.
    pub(crate) fn gives_lease_back(&mut self, config: &Config) -> bool {
        if self.worker().is_some() || matches!(self.stage, Stage::Leasing) {
            return false;
        }
        let stays = |held: &Lease| !self.is_over() && held.slices == self.lease(config).slices;
        if self.holds.as_ref().is_none_or(stays) {
            return false;
        }
        self.holds = None;
        true
    }

    /// There will be no worker, and there is none.
    fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }

    /// Whether nothing is left of a tenant that was stopped.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_over() && self.processes() == 0
    }

    /// Notes whether its next worker may have its memory yet: others may hold some of it still, `free` is what nobody holds. Until then nothing
    /// is due.
    pub(crate) fn note_room(&mut self, config: &Config, free: &BTreeMap<&str, u64>) {
        let wanted = self.lease(config);
        let own = |device: &str| self.holds.as_ref().map_or(0, |held| on(held, device));
        let fits = |device: &str| {
            let left = free.get(device).copied().unwrap_or(0);
            on(&wanted, device) <= left.saturating_add(own(device))
        };
        self.has_room = wanted.slices.iter().all(|slice| fits(&slice.device));
    }

    /// Its next worker may have nothing yet.
    pub(crate) fn note_no_room(&mut self) {
        self.has_room = false;
    }
}

/// Bytes of a device.
pub(crate) fn on(lease: &Lease, device: &str) -> u64 {
    let slices = lease.slices.iter().filter(|slice| slice.device == device);
    slices.fold(0, |sum, slice| sum.saturating_add(slice.memory))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;
    use std::time::Instant;

    use vmm_broker::{Channel, Limits, ToSupervisor};

    use super::super::tests::{KILLED, ended_by, process, running, tenant};
    use super::*;

    /// What a process is told, in order.
    fn told<M: vmm_broker::Message>(channel: &Channel) -> Vec<M> {
        channel.set_nonblocking().unwrap();
        std::iter::from_fn(|| channel.receive::<M>().ok().flatten().map(|(message, _)| message)).collect()
    }

    /// What worker and keeper are told of a change.
    fn adapted(change: impl FnOnce(&mut TenantConfig), effect: Effect) -> (Vec<ToWorker>, Vec<ToKeeper>) {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, keeper, worker) = running(dir.path());
        let mut config = tenant.config.clone();
        change(&mut config);
        tenant.adapt(config.clone(), effect, None);
        assert!(tenant.config == config && dir.path().join("t.sock").exists());
        let all = (told(&worker), told(&keeper));
        tenant.kill();
        ended_by(&mut tenant);
        all
    }

    #[test]
    fn each_change_is_told_to_those_who_must_know_and_to_nobody_else() {
        let limits = Limits { max_domains: Some(3), ..Limits::default() };
        let nothing = || (Vec::new(), Vec::new());
        assert_eq!(adapted(|_| {}, Effect::Now), nothing());
        assert_eq!(adapted(|config| config.device_id = 99, Effect::Now), nothing());
        assert_eq!(adapted(|config| config.limits = limits, Effect::Now), (vec![ToWorker::Limits(limits)], Vec::new()));
        assert_eq!(
            adapted(|config| config.drained = true, Effect::Now),
            (vec![ToWorker::Drain { turn: 1 }], Vec::new())
        );
        let both = |config: &mut TenantConfig| (config.limits, config.drained) = (limits, true);
        let expected = vec![ToWorker::Limits(limits), ToWorker::Drain { turn: 1 }];
        assert_eq!(adapted(both, Effect::NextSession), (expected, Vec::new()));
        // The next worker has all of it from its set-up.
        assert_eq!(adapted(both, Effect::NewSession), (vec![ToWorker::MakeRoom {}], Vec::new()));
        let expected = (vec![ToWorker::MakeRoom {}], vec![ToKeeper::Shutdown {}]);
        assert_eq!(adapted(|config| config.submit_queues += 1, Effect::Disconnect), expected);
    }

    #[test]
    fn a_drain_is_over_when_the_worker_answers_the_last_question() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, _keeper, worker) = running(dir.path());
        let drain = |tenant: &mut Tenant, drained| {
            tenant.adapt(TenantConfig { drained, ..tenant.config.clone() }, Effect::Now, None);
            tenant.drain_state()
        };
        let answer = |tenant: &mut Tenant, turn| {
            worker.send(&ToSupervisor::Drained { turn }, &[]).unwrap();
            tenant.hear_worker();
            tenant.drain_state()
        };
        assert_eq!(drain(&mut tenant, true), DrainState::Draining);
        assert_eq!(answer(&mut tenant, 1), DrainState::Drained);
        assert_eq!(drain(&mut tenant, false), DrainState::Running);
        assert_eq!(drain(&mut tenant, true), DrainState::Draining);
        assert_eq!(answer(&mut tenant, 1), DrainState::Draining, "that was the first question");
        assert_eq!(answer(&mut tenant, 3), DrainState::Drained);
        let expected = [ToWorker::Drain { turn: 1 }, ToWorker::Resume {}, ToWorker::Drain { turn: 3 }];
        assert_eq!(told::<ToWorker>(&worker), expected);
        tenant.kill();
        assert_eq!(ended_by(&mut tenant), KILLED);
        assert_eq!(tenant.drain_state(), DrainState::Drained, "nobody is there to work");
    }

    #[test]
    fn a_new_session_waits_for_no_lease_of_the_old_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, config) = tenant(dir.path());
        let (keeper, _says) = process();
        tenant.keeper = Some(keeper);
        let first = tenant.wants_lease(&config, Instant::now()).unwrap();
        assert!(tenant.is_asking(&first.tenant));
        tenant.renew();
        assert!(!tenant.is_asking(&first.tenant), "the answer is for nobody");
        let second = tenant.wants_lease(&config, Instant::now()).unwrap();
        assert_eq!((first.session, second.session), (1, 2));
        tenant.kill();
    }

    #[test]
    fn the_brokers_end_is_a_new_session_for_who_has_functions_and_for_nobody_else() {
        for container in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let (mut tenant, _keeper, worker) = running(dir.path());
            tenant.holds = Some(Lease { tenant: "t".into(), session: 1, slices: Vec::new(), container });
            tenant.broker_lost();
            let expected = if container { vec![ToWorker::MakeRoom {}] } else { Vec::new() };
            assert_eq!(told::<ToWorker>(&worker), expected);
            tenant.kill();
            ended_by(&mut tenant);
        }
    }

    #[test]
    fn a_worker_that_makes_no_room_is_killed_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, _keeper, _worker) = running(dir.path());
        tenant.renew();
        let due = tenant.due().unwrap();
        // Asked again, it has no more time.
        tenant.renew();
        assert_eq!(tenant.due(), Some(due));
        tenant.kill_overdue(Instant::now());
        assert!(tenant.reap_worker().is_none());
        tenant.kill_overdue(due);
        assert_eq!(ended_by(&mut tenant), KILLED);
    }

    #[test]
    fn another_socket_takes_the_place_of_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tenant, _keeper, _worker) = running(dir.path());
        let (old, new) = (dir.path().join("t.sock"), dir.path().join("new.sock"));
        let socket = vmm_control::listen(&new, 0o600).unwrap();
        let inode = |path: &Path| std::fs::metadata(path).unwrap().ino();
        let made = inode(&new);
        tenant.adapt(TenantConfig { socket: new.clone(), ..tenant.config.clone() }, Effect::Disconnect, Some(socket));
        assert_eq!((old.exists(), inode(&new)), (false, made));
        tenant.kill();
    }

    #[test]
    fn a_lease_is_given_back_once_it_is_not_what_the_next_worker_needs() {
        let dir = tempfile::tempdir().unwrap();
        let (_, config) = tenant(tempfile::tempdir().unwrap().path());
        let (mut tenant, _keeper, _worker) = running(dir.path());
        let mut other = tenant.config.clone();
        other.slices[0].memory /= 2;
        tenant.adapt(other, Effect::NewSession, None);
        assert!(!tenant.gives_lease_back(&config), "a worker uses it");
        tenant.kill();
        ended_by(&mut tenant);
        assert!(tenant.holds.is_some() && tenant.gives_lease_back(&config));
        assert!(tenant.holds.is_none() && !tenant.gives_lease_back(&config), "once");

        // Room is what nobody holds and what it holds itself.
        let slice = |index: usize| tenant.config.slices[index].memory;
        let device = |index: usize| config.devices[tenant.config.slices[index].device].name.as_str();
        let free = BTreeMap::from([(device(0), slice(0)), (device(1), slice(1))]);
        let less = BTreeMap::from([(device(0), slice(0)), (device(1), slice(1) - 1)]);
        tenant.note_room(&config, &less);
        assert!(!tenant.has_room);
        tenant.note_room(&config, &free);
        assert!(tenant.has_room);
        tenant.holds = Some(tenant.lease(&config));
        tenant.note_room(&config, &BTreeMap::new());
        assert!(tenant.has_room);
    }
}
