//! Changes while the daemon runs: all of one, or nothing.
//!
//! What is wanted is always a text of the configuration file: an edit of it, or what stands there now. It is checked as at the start and
//! compared with what runs. Then, in this order: whatever can fail is prepared (sockets are bound, pages made); the file is replaced, which is
//! the moment of the change; and what was prepared is put to use, which cannot fail. A failure before that moment undoes the preparation, so
//! there is nothing to put back; a daemon that dies after it finds the new file when it is started again.
//!
//! Not here: what an edit does to the text (`config::edit`), what a change is (`config::diff`), how a tenant adapts (`tenant::adapt`).

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use vdev_device::Gauge;
use vmm_broker::PLACES;
use vmm_control::{
    ChangesReply, Consent, DrainReply, DrainState, Edit, Effect, ErrorCode, ErrorReply, Reply, SocketFile,
};

use super::Supervisor;
use super::answers::unknown_tenant;
use super::groups::Groups;
use super::tenant::Tenant;
use super::tenant::adapt::on;
use crate::config::diff::{self, Change, What, differences, impact};
use crate::config::edit::edit;
use crate::config::store::{StoreError, fingerprint};
use crate::config::{Config, ConfigError, TenantConfig};

/// What is to run in place of what runs.
struct Wanted {
    text: String,
    config: Config,
    changes: Vec<Change>,
    /// What waits for a restart.
    refused: Vec<Change>,
    /// The text is to be written; else it is what the file has.
    write: bool,
    /// Which state of the file it comes from.
    file: String,
}

/// What a change needs and what could not be had. Dropped, it leaves nothing behind.
#[derive(Default)]
struct Prepared {
    tenants: Vec<Tenant>,
    sockets: BTreeMap<String, SocketFile>,
    modes: Vec<Mode>,
    groups: Groups,
}

/// Permissions of a socket, which come back unless they are kept.
struct Mode {
    path: PathBuf,
    before: Option<u32>,
}

impl Drop for Mode {
    fn drop(&mut self) {
        if let Some(mode) = self.before {
            // Nobody has used the new ones for anything yet.
            let _ = fs::set_permissions(&self.path, Permissions::from_mode(mode));
        }
    }
}

fn error(code: ErrorCode, message: impl Into<String>) -> ErrorReply {
    ErrorReply { code, message: message.into() }
}

fn of_store(failed: StoreError) -> ErrorReply {
    let code = if matches!(failed, StoreError::Edited { .. }) { ErrorCode::Edited } else { ErrorCode::Failed };
    error(code, format!("{:#}", anyhow::Error::from(failed)))
}

impl Supervisor {
    /// Edits the file and does what it says then.
    pub(super) fn change(&mut self, what: &Edit, consent: &Consent) -> Reply {
        let wanted = self.wanted_by_edit(what);
        let outcome = wanted.and_then(|wanted| self.apply(wanted, consent));
        outcome.map_or_else(Reply::Error, Reply::Changes)
    }

    /// Does what the file says now.
    pub(super) fn reload(&mut self, consent: &Consent) -> Reply {
        let wanted = self.wanted_by_file();
        let outcome = wanted.and_then(|wanted| self.apply(wanted, consent));
        outcome.map_or_else(Reply::Error, Reply::Changes)
    }

    /// Takes no more work from a tenant's guest, or takes it again.
    pub(super) fn drain(&mut self, name: &str, drained: bool) -> Reply {
        let find = |tenants: &[Tenant]| tenants.iter().position(|tenant| tenant.config.name == name);
        let Some(found) = find(&self.tenants).and_then(|index| self.tenants.get(index)) else {
            return Reply::Error(unknown_tenant(&self.tenants, name));
        };
        if found.config.drained != drained {
            let what = Edit::Drained { tenant: name.to_owned(), drained };
            if let Reply::Error(refusal) = self.change(&what, &Consent::default()) {
                return Reply::Error(refusal);
            }
        }
        let Some(tenant) = find(&self.tenants).and_then(|index| self.tenants.get_mut(index)) else {
            return Reply::Error(unknown_tenant(&self.tenants, name));
        };
        tenant.hear_worker();
        let in_flight = tenant.page.gauge(Gauge::InFlight as usize);
        Reply::Drain(DrainReply { tenant: name.to_owned(), drain: tenant.drain_state(), in_flight })
    }

    fn wanted_by_edit(&self, what: &Edit) -> Result<Wanted, ErrorReply> {
        self.store.check_unedited().map_err(of_store)?;
        let text =
            edit(self.store.text(), what).map_err(|failed| error(ErrorCode::Configuration, failed.to_string()))?;
        let (config, _) = self.store.parse(&text, &self.config.daemon).map_err(|failed| match failed {
            // The line is one of a text that nobody has seen.
            ConfigError::Invalid { problem, .. } => {
                error(ErrorCode::Configuration, format!("Nothing was changed: {problem}"))
            }
            ConfigError::Read { .. } => error(ErrorCode::Configuration, failed.to_string()),
        })?;
        let changes = differences(&self.config, &config);
        if changes.iter().any(|change| change.tenant() != Some(what.tenant())) {
            let message = "The file is written in a way that this edit would change more than it should; edit it by hand \
                           and run peergate reload";
            return Err(error(ErrorCode::Configuration, message));
        }
        let file = fingerprint(self.store.text());
        Ok(Wanted { text, config, changes, refused: Vec::new(), write: true, file })
    }

    fn wanted_by_file(&self) -> Result<Wanted, ErrorReply> {
        let text = self.store.read().map_err(of_store)?;
        let parsed = self.store.parse(&text, &self.config.daemon);
        let (config, daemon) =
            parsed.map_err(|failed| error(ErrorCode::Configuration, format!("Nothing was changed: {failed}")))?;
        let changes = differences(&self.config, &config);
        let refused = diff::daemon(&self.config.daemon, &daemon).into_iter().collect();
        let file = fingerprint(&text);
        Ok(Wanted { text, config, changes, refused, write: false, file })
    }

    fn apply(&mut self, wanted: Wanted, consent: &Consent) -> Result<ChangesReply, ErrorReply> {
        if self.ending.is_some() {
            return Err(error(ErrorCode::Failed, "The daemon is about to end"));
        }
        if consent.file.as_ref().is_some_and(|file| *file != wanted.file) {
            let message = "The configuration file has changed in the meantime; look at the differences again";
            return Err(error(ErrorCode::Edited, message));
        }
        let mut reply = ChangesReply {
            applied: false,
            file: wanted.file.clone(),
            changes: wanted.changes.iter().map(Change::info).collect(),
            refused: wanted.refused.iter().map(Change::info).collect(),
            losses: self.losses(&wanted.changes),
        };
        let allowed = (consent.force || reply.losses.is_empty()) && (consent.partial || reply.refused.is_empty());
        if consent.dry_run || !allowed {
            return Ok(reply);
        }
        reply.file = fingerprint(&wanted.text);
        self.carry_out(wanted)?;
        reply.applied = true;
        Ok(reply)
    }

    /// What guests lose that are connected and not drained.
    fn losses(&mut self, changes: &[Change]) -> Vec<String> {
        let Self { config, tenants, .. } = self;
        let mut losses = Vec::new();
        for (name, effect) in impact(config, changes) {
            let loses = match effect {
                Effect::NewSession => "the guest loses its mappings, buffers and work",
                Effect::Disconnect => "the VMM is disconnected and the guest loses its device",
                Effect::Now | Effect::NextSession | Effect::Restart => continue,
            };
            let found = tenants.iter_mut().find(|tenant| tenant.config.name == name);
            if found.is_some_and(|tenant| tenant.is_connected() && tenant.drain_state() != DrainState::Drained) {
                losses.push(format!("Tenant {name:?} is connected: {loses}"));
            }
        }
        losses
    }

    fn carry_out(&mut self, mut wanted: Wanted) -> Result<(), ErrorReply> {
        wanted.config.keep_numbers(&self.config);
        let prepared = self.prepare(&wanted.config, &wanted.changes);
        let prepared =
            prepared.map_err(|failed| error(ErrorCode::Failed, format!("Nothing was changed: {failed:#}")))?;
        if wanted.write {
            self.store.replace(wanted.text).map_err(of_store)?;
        } else {
            self.store.accept(wanted.text);
        }
        for change in &wanted.changes {
            let info = change.info();
            tracing::info!(name = info.name, effect = ?info.effect, "Changed: {} {}", info.subject, info.what);
        }
        self.commit(wanted.config, &wanted.changes, prepared);
        Ok(())
    }

    /// Whatever can fail.
    fn prepare(&mut self, config: &Config, changes: &[Change]) -> anyhow::Result<Prepared> {
        let mut prepared = Prepared { groups: self.groups.for_config(config)?, ..Prepared::default() };
        for change in changes {
            let Some(tenant) = change.tenant().and_then(|name| config.tenants.iter().find(|known| known.name == name))
            else {
                continue;
            };
            match change.what {
                What::Added => {
                    self.check_path(tenant)?;
                    let (id, place) = (self.free_id(&prepared.tenants), self.free_place(&prepared.tenants));
                    let socket = vmm_control::listen(&tenant.socket, tenant.socket_mode)?;
                    prepared.tenants.push(Tenant::new(id, place, tenant.clone(), socket)?);
                }
                What::Socket => {
                    self.check_path(tenant)?;
                    let socket = vmm_control::listen(&tenant.socket, tenant.socket_mode)?;
                    prepared.sockets.insert(tenant.name.clone(), socket);
                }
                // A new socket has its permissions.
                What::SocketMode if !prepared.sockets.contains_key(&tenant.name) => {
                    prepared.modes.push(set_mode(tenant)?);
                }
                _ => {}
            }
        }
        Ok(prepared)
    }

    /// A socket's path must be free before another tenant can have it.
    fn check_path(&self, tenant: &TenantConfig) -> anyhow::Result<()> {
        let has = |other: &&Tenant| other.config.socket == tenant.socket;
        if let Some(other) = self.tenants.iter().find(has) {
            let (path, name, other) = (tenant.socket.display(), &tenant.name, &other.config.name);
            bail!(
                "{path} cannot go from tenant {other:?} to tenant {name:?} in one step; remove it from {other:?} first"
            );
        }
        Ok(())
    }

    /// A number that no tenant has, and that none had until long ago.
    fn free_id(&mut self, prepared: &[Tenant]) -> u16 {
        loop {
            let id = self.next_id;
            self.next_id = self.next_id.wrapping_add(1);
            if self.everybody().chain(prepared).all(|tenant| tenant.id != id) {
                return id;
            }
        }
    }

    fn free_place(&self, prepared: &[Tenant]) -> u16 {
        let taken: Vec<_> = self.everybody().chain(prepared).map(|tenant| usize::from(tenant.place)).collect();
        let free = (0..PLACES).find(|place| !taken.contains(place));
        free.and_then(|place| u16::try_from(place).ok()).unwrap_or(0)
    }

    /// Puts what was prepared to use.
    fn commit(&mut self, config: Config, changes: &[Change], mut prepared: Prepared) {
        let impact = impact(&self.config, changes);
        let mut before = std::mem::take(&mut self.tenants);
        let mut new = std::mem::take(&mut prepared.tenants);
        let take = |list: &mut Vec<Tenant>, name: &str| {
            let index = list.iter().position(|tenant| tenant.config.name == name);
            index.map(|index| list.swap_remove(index))
        };
        for wanted in &config.tenants {
            if let Some(mut tenant) = take(&mut before, &wanted.name) {
                // Also if nothing of it changes, devices may stand elsewhere now.
                let effect = impact.get(wanted.name.as_str()).copied().unwrap_or(Effect::Now);
                tenant.adapt(wanted.clone(), effect, prepared.sockets.remove(&wanted.name));
                self.tenants.push(tenant);
            } else if let Some(tenant) = take(&mut new, &wanted.name) {
                self.tenants.push(tenant);
            }
        }
        for mut tenant in before {
            tenant.stop();
            self.leaving.push(tenant);
        }
        prepared.modes.iter_mut().for_each(|mode| mode.before = None);
        self.config = config;
        self.groups = prepared.groups;
        self.broker.set_devices(&self.config, &self.groups);
    }

    /// Gives back leases that are not needed any more, forgets tenants of which nothing is left, and looks who may have memory.
    pub(super) fn tidy(&mut self, now: Instant) {
        let Self { config, tenants, leaving, broker, .. } = self;
        for tenant in tenants.iter_mut().chain(leaving.iter_mut()) {
            tenant.kill_overdue(now);
            if tenant.gives_lease_back(config) {
                broker.release(&tenant.config.name);
            }
        }
        leaving.retain(|tenant| !tenant.is_gone());
        let mut free: BTreeMap<_, _> =
            config.devices.iter().map(|device| (device.name.as_str(), device.memory)).collect();
        for (device, free) in &mut free {
            for lease in tenants.iter().chain(leaving.iter()).filter_map(|tenant| tenant.holds.as_ref()) {
                *free = free.saturating_sub(on(lease, device));
            }
        }
        for tenant in tenants {
            // The broker knows tenants by their names.
            if leaving.iter().any(|other| other.config.name == tenant.config.name) {
                tenant.note_no_room();
            } else {
                tenant.note_room(config, &free);
            }
        }
    }
}

fn set_mode(tenant: &TenantConfig) -> anyhow::Result<Mode> {
    let path = tenant.socket.clone();
    let failed = || format!("Cannot change the permissions of {}", path.display());
    let before = fs::symlink_metadata(&path).with_context(failed)?.permissions().mode() & 0o7777;
    fs::set_permissions(&path, Permissions::from_mode(tenant.socket_mode)).with_context(failed)?;
    Ok(Mode { path, before: Some(before) })
}
