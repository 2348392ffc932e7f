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
