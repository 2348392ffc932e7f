//! Changes that an operator makes while guests work, without a restart of the daemon: who is meant gets what is documented, nobody else notices, and what
//! was done is still so after the daemon was killed.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use e2e::load::{Load, Progress};
use harness::daemon::{children, is_running, open_files, resident};
use harness::{Binaries, Daemon, RawGuest};
use serde_json::Value;
use vdev_wire::{Attach, Opcode, Status};
use vmm_control::{DrainState, TenantState, TenantStatus};

/// Whom the operator means, and who must not notice.
const CHANGED: &str = "changed";
const BESIDE: &str = "beside";
/// One that comes and goes.
const GUEST: &str = "guest";
const ADD: [&str; 5] = ["tenant", "add", GUEST, "--slice", "gpu0=8MiB"];

const CONFIG: &str = r#"
[[device]]
name = "gpu0"
kind = "gpu"
memory = "32MiB"
KEYS

[[device]]
name = "gpu1"
kind = "gpu"
memory = "32MiB"

[[tenant]]
name = "changed"
[[tenant.slice]]
device = "gpu0"
memory = "8MiB"
[[tenant.slice]]
device = "gpu1"
memory = "8MiB"

[[tenant]]
name = "beside"
[[tenant.slice]]
device = "gpu0"
memory = "8MiB"
"#;

/// Descriptors of one chain of a load.
const BATCH: u64 = 4;
/// Descriptors that must end well before and after a change, so that it happens under load.
const UNDER_LOAD: u64 = 200;
/// How often a tenant comes and goes before every part has taken the memory that it keeps, and how often from then on.
const WARM: usize = 4;
const ROUNDS: usize = 8;
/// What a process may grow by all the same.
const SLACK: u64 = 2 << 20;
/// The operator's last connection may be open or closed when files are counted; a leak would be one a round.
const FILES: usize = 2;

fn count(number: &AtomicU64) -> u64 {
    number.load(Ordering::Relaxed)
}

/// A load that has had one session, and lost nothing in it.
fn is_undisturbed(load: &Load) -> Result<()> {
    let Progress { lost, sessions, .. } = &*load.progress;
    ensure!((count(lost), count(sessions)) == (0, 1), "{:?}", load.progress);
    Ok(())
}

/// What a tenant's VMM and guest could notice of a change.
fn noticed(tenant: &TenantStatus) -> (u32, Option<u32>, Option<u32>, u64) {
    (tenant.session, tenant.worker_pid, tenant.keeper_pid, tenant.failures)
}

struct Bed {
    daemon: Daemon,
    changed: Load,
    beside: Load,
}

impl Bed {
    fn new() -> Result<Self> {
        Self::with("")
    }

    /// With more keys for the first device.
    fn with(keys: &str) -> Result<Self> {
        let daemon = Daemon::start(&Binaries::build()?, &CONFIG.replace("KEYS", keys))?;
        let [changed, beside] = [CHANGED, BESIDE].map(|tenant| Load::start(&daemon.socket(tenant)));
        let bed = Self { daemon, changed: changed?, beside: beside? };
        bed.go_on()?;
        Ok(bed)
    }

    fn go_on(&self) -> Result<()> {
        self.changed.goes_on(UNDER_LOAD)?;
        self.beside.goes_on(UNDER_LOAD)
    }

    /// Runs the operator's command, which must end like that.
    fn operate(&self, args: &[&str], status: i32) -> Result<String> {
        let output = self.daemon.peergate(args)?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(status), "peergate {}: {}: {said}", args.join(" "), output.status);
        Ok(said)
    }

    /// Makes a change of which the tenant beside must not notice anything.
    fn change(&self, args: &[&str]) -> Result<()> {
        let before = self.daemon.tenant(BESIDE)?;
        self.operate(args, 0)?;
        self.beside_goes_on(&before).with_context(|| format!("After {args:?}"))
    }

    /// The tenant beside has noticed nothing, and its numbers go on.
    fn beside_goes_on(&self, before: &TenantStatus) -> Result<()> {
        self.beside.goes_on(UNDER_LOAD)?;
        let after = self.daemon.tenant(BESIDE)?;
        ensure!(noticed(&after) == noticed(before), "{before:?}, then {after:?}");
        ensure!(after.counters["ops"] > before.counters["ops"], "{before:?}, then {after:?}");
        is_undisturbed(&self.beside)
    }

    /// The same, and the tenant that is meant begins one new session on the connection that it has.
    fn begins_new_session(&mut self, args: &[&str]) -> Result<()> {
        let sessions = |progress: &Progress| count(&progress.sessions);
        let (before, had) = (self.daemon.tenant(CHANGED)?, sessions(&self.changed.progress));
        self.change(args)?;
        self.changed.wait_for(sessions, had + 1)?;
        self.changed.goes_on(UNDER_LOAD)?;
        let wanted = (before.session + 1, before.keeper_pid, before.failures, TenantState::Connected);
        self.daemon
            .wait_for("the next session", |daemon| Ok(daemon.tenant(CHANGED)?.state == TenantState::Connected))?;
        let after = self.daemon.tenant(CHANGED)?;
        ensure!((after.session, after.keeper_pid, after.failures, after.state) == wanted, "{before:?}, then {after:?}");
        ensure!(sessions(&self.changed.progress) == had + 1, "{:?}", self.changed.progress);
        Ok(())
    }

    /// The slices of a tenant as (name, device).
    fn slices(&self, tenant: &str) -> Result<Vec<(String, String)>> {
        let reply: Value = self.daemon.peergate_json(&["endpoints"])?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let all = reply["endpoints"].as_array().context("A list of slices")?;
        let own = all.iter().filter(|slice| slice["tenant"] == tenant);
        Ok(own.map(|slice| (text(&slice["name"]), text(&slice["device"]))).collect())
    }

    /// Everything that a command could have changed.
    fn state(&self) -> Result<String> {
        let ask = |what: &str| self.daemon.peergate_json::<Value>(&[what]);
        let tenants: Vec<_> =
            self.daemon.status()?.tenants.iter().map(|t| (t.name.clone(), t.drain == DrainState::Running)).collect();
        Ok(format!("{tenants:?} {} {} {}", ask("tenants")?, ask("endpoints")?, self.file()?))
    }

    fn file(&self) -> Result<String> {
        Ok(fs::read_to_string(self.daemon.config())?)
    }

    /// Ends the loads, each descriptor of which has had one outcome, and the daemon.
    fn finish(self) -> Result<()> {
        for load in [self.changed, self.beside] {
            let progress = Arc::clone(&load.progress);
            load.stop()?;
            ensure!(progress.outcomes() == count(&progress.submitted), "{progress:?}");
        }
        self.daemon.stop()?;
        Ok(())
    }
}

#[test]
fn a_drain_leaves_nothing_in_flight_and_a_resume_goes_on() -> Result<()> {
    // What the device has taken waits for its engine, and longer than a command takes.
    let bed = Bed::with("link = { latency = \"2ms\" }")?;
    for _ in 0..3 {
        let (before, beside) = (bed.daemon.tenant(CHANGED)?, bed.daemon.tenant(BESIDE)?);
        bed.operate(&["drain", CHANGED], 0)?;
        let drained = bed.daemon.tenant(CHANGED)?;
        ensure!((drained.drain, drained.gauges["in_flight"]) == (DrainState::Drained, 0), "{drained:?}");
        // Each chain that the device took has come back whole, and the guest finds it.
        let taken = drained.counters["chains"] * BATCH;
        ensure!(drained.counters["ops"] == taken, "{drained:?}");
        bed.changed.wait_for(Progress::outcomes, taken)?;
        bed.beside_goes_on(&beside)?;
        let later = bed.daemon.tenant(CHANGED)?;
        ensure!(later.counters == drained.counters && later.gauges["in_flight"] == 0, "{drained:?}, then {later:?}");
        ensure!(bed.changed.progress.outcomes() == taken, "{:?}, of {taken}", bed.changed.progress);
        bed.change(&["resume", CHANGED])?;
        bed.changed.goes_on(UNDER_LOAD)?;
        let after = bed.daemon.tenant(CHANGED)?;
        ensure!(noticed(&after) == noticed(&before), "{before:?}, then {after:?}");
        ensure!(after.drain == DrainState::Running, "{after:?}");
    }
    is_undisturbed(&bed.changed)?;
    bed.finish()
}

#[test]
fn slices_move_and_go_with_a_new_session_of_their_tenant_only() -> Result<()> {
    let mut bed = Bed::new()?;
    let slice = |name: &str, device: &str| (name.to_owned(), device.to_owned());
    bed.begins_new_session(&["slice", "move", CHANGED, "gpu0", "--to", "gpu1", "--force"])?;
    ensure!(bed.slices(CHANGED)? == [slice("gpu0", "gpu1"), slice("gpu1", "gpu1")]);
    bed.begins_new_session(&["slice", "remove", CHANGED, "gpu0", "--force"])?;
    ensure!(bed.slices(CHANGED)? == [slice("gpu1", "gpu1")]);
    let add = ["slice", "add", CHANGED, "--device", "gpu0", "--memory", "16MiB", "--name", "new", "--force"];
    bed.begins_new_session(&add)?;
    ensure!(bed.slices(CHANGED)? == [slice("gpu1", "gpu1"), slice("new", "gpu0")]);
    bed.finish()
}

#[test]
fn limits_change_without_a_new_session() -> Result<()> {
    let bed = Bed::new()?;
    let before = bed.daemon.tenant(CHANGED)?;
    for limits in
        [["max_domains=1", "weight=3"], ["max_mappings=64", "max_timeout=20s"], ["weight=default", "max_events=9"]]
    {
        bed.change(&["tenant", "limits", CHANGED, limits[0], limits[1]])?;
        bed.changed.goes_on(UNDER_LOAD)?;
    }
    let after = bed.daemon.tenant(CHANGED)?;
    ensure!(noticed(&after) == noticed(&before), "{before:?}, then {after:?}");
    is_undisturbed(&bed.changed)?;
    bed.finish()
}

/// What must not grow.
#[derive(Debug)]
struct Footprint {
    children: usize,
    /// Of supervisor and broker: open files and resident bytes.
    parts: [(usize, u64); 2],
}

impl Footprint {
    fn of(daemon: &Daemon) -> Result<Self> {
        let part = |pid: u32| -> Result<_> { Ok((open_files(pid)?, resident(pid)?)) };
        let parts = [part(daemon.pid())?, part(broker(daemon)?)?];
        Ok(Self { children: children(daemon.pid())?.len(), parts })
    }
}

fn broker(daemon: &Daemon) -> Result<u32> {
    daemon.status()?.daemon.broker_pid.context("There is a broker")
}

/// Files of that tenant's that a process holds.
fn holds(pid: u32, tenant: &str) -> Result<Vec<String>> {
    let links = fs::read_dir(format!("/proc/{pid}/fd"))?.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let names = links.map(|link| link.to_string_lossy().into_owned());
    Ok(names.filter(|name| name.contains(&format!("-{tenant}"))).collect())
}

/// A tenant comes, works and goes under the feet of its guest.
fn come_and_go(bed: &mut Bed) -> Result<()> {
    bed.change(&ADD)?;
    let guest = Load::start(&bed.daemon.socket(GUEST))?;
    guest.goes_on(UNDER_LOAD)?;
    let status = bed.daemon.tenant(GUEST)?;
    let holders = [bed.daemon.pid(), broker(&bed.daemon)?];
    ensure!(!holds(holders[0], GUEST)?.is_empty() && !holds(holders[1], GUEST)?.is_empty());
    bed.operate(&["tenant", "remove", GUEST], 3)?;
    guest.goes_on(UNDER_LOAD)?;
    bed.change(&["tenant", "remove", GUEST, "--force"])?;
    guest.gone()?;
    ensure!(!bed.daemon.socket(GUEST).exists() && bed.daemon.tenant(GUEST).is_err());
    for pid in [status.worker_pid, status.keeper_pid] {
        let pid = pid.context("It has both")?;
        bed.daemon.wait_for("the tenant's processes to end", |_| Ok(!is_running(pid)))?;
    }
    let closed = |_: &mut Daemon| Ok(holds(holders[0], GUEST)?.is_empty() && holds(holders[1], GUEST)?.is_empty());
    bed.daemon.wait_for("the tenant's files to be closed", closed)
}

#[test]
fn a_tenant_works_at_once_and_leaves_nothing_behind() -> Result<()> {
    let mut bed = Bed::new()?;
    for _ in 0..WARM {
        come_and_go(&mut bed)?;
    }
    let warm = Footprint::of(&bed.daemon)?;
    for _ in 0..ROUNDS {
        come_and_go(&mut bed)?;
    }
    let after = Footprint::of(&bed.daemon)?;
    ensure!(after.children == warm.children, "{warm:?}, then {after:?}");
    for ((files_before, bytes_before), (files, bytes)) in warm.parts.into_iter().zip(after.parts) {
        ensure!(files <= files_before + FILES && bytes <= bytes_before + SLACK, "{warm:?}, then {after:?}");
    }
    is_undisturbed(&bed.changed)?;
    bed.finish()
}

#[test]
fn a_refused_change_changes_nothing() -> Result<()> {
    let bed = Bed::new()?;
    let seen = || -> Result<_> {
        let tenants = bed.daemon.status()?.tenants;
        Ok((bed.state()?, tenants.iter().map(noticed).collect::<Vec<_>>()))
    };
    let before = seen()?;
    let refused: [(&[&str], i32, &str); 14] = [
        (&["slice", "move", CHANGED, "gpu7", "--to", "gpu1", "--force"], 1, "gpu7"),
        (&["slice", "move", CHANGED, "gpu0", "--to", "gpu7", "--force"], 1, "gpu7"),
        (&["slice", "move", CHANGED, "gpu0", "--to", "gpu1"], 3, "Drain it first, or pass --force"),
        (&["slice", "remove", CHANGED, "gpu7", "--force"], 1, "gpu7"),
        (&["slice", "remove", BESIDE, "gpu0", "--force"], 1, "Nothing was changed"),
        (&["slice", "add", CHANGED, "--device", "gpu0", "--memory", "32MiB", "--name", "x", "--force"], 1, "48 MiB"),
        (&["tenant", "add", "a/b", "--slice", "gpu0=4KiB"], 1, "a/b"),
        (&["tenant", "add", BESIDE, "--slice", "gpu0=4KiB"], 1, BESIDE),
        (&["tenant", "add", GUEST, "--slice", "gpu0=1GiB"], 1, "1040 MiB"),
        (&["tenant", "add", GUEST, "--slice", "gpu0=4KiB", "--vmm-socket", "/nowhere/s"], 1, "/nowhere/s"),
        (&["tenant", "remove", "nobody", "--force"], 1, "nobody"),
        (&["tenant", "limits", CHANGED, "max_mapings=1"], 1, "max_mappings"),
        (&["tenant", "limits", CHANGED, "max_batch=0"], 1, "max_batch"),
        (&["drain", "nobody"], 1, "There is no tenant \"nobody\""),
    ];
    for (args, status, reason) in refused {
        let said = bed.operate(args, status)?;
        ensure!(said.contains(reason), "{args:?}: {said}");
        ensure!(seen()? == before, "{args:?}");
    }
    bed.go_on()?;
    ensure!(seen()? == before);
    [&bed.changed, &bed.beside].into_iter().try_for_each(is_undisturbed)?;
    bed.finish()
}

/// How many domains the tenant's guest may have.
fn domains(socket: &Path) -> Result<u32> {
    let mut guest = RawGuest::connect(socket, 64)?;
    guest.hello()?;
    let attach = Attach { endpoint: 0.into(), flags: 0.into() };
    for domain in 0..3 {
        match guest.control(Opcode::Attach, domain + 1, &attach, 0)?.status {
            Status::Ok => {}
            _ => return Ok(domain),
        }
    }
    Ok(3)
}

#[test]
fn what_was_done_is_still_so_after_the_daemon_was_killed() -> Result<()> {
    let mut bed = Bed::new()?;
    let changes: [&[&str]; 8] = [
        &ADD,
        &["tenant", "limits", CHANGED, "max_domains=2"],
        &["slice", "move", CHANGED, "gpu0", "--to", "gpu1", "--force"],
        &["slice", "remove", CHANGED, "gpu1", "--force"],
        &["slice", "add", CHANGED, "--device", "gpu0", "--memory", "8MiB", "--name", "new", "--force"],
        &["drain", GUEST],
        &["resume", GUEST],
        &["tenant", "remove", GUEST, "--force"],
    ];
    let mut file = bed.file()?;
    for args in changes {
        bed.operate(args, 0)?;
        ensure!(bed.file()? != file, "{args:?} is written down");
        let done = bed.state()?;
        bed.daemon.kill_and_restart().with_context(|| format!("After {args:?}"))?;
        ensure!(bed.state()? == done, "{args:?}: {done}, then {}", bed.state()?);
        ensure!(bed.operate(&["reload"], 0)? == "Nothing to change.\n", "What runs is what the file says");
        file = bed.file()?;
        for (tenant, load) in [(CHANGED, &mut bed.changed), (BESIDE, &mut bed.beside)] {
            std::mem::replace(load, Load::start(&bed.daemon.socket(tenant))?).gone()?;
        }
        bed.go_on()?;
    }
    bed.changed.stop()?;
    bed.daemon.wait_ready(CHANGED)?;
    ensure!(domains(&bed.daemon.socket(CHANGED))? == 2, "The limit is in force");
    bed.beside.stop()?;
    let log = bed.daemon.stop()?;
    ensure!(!log.contains("ERROR"), "{log}");
    Ok(())
}
