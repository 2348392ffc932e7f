//! Workers that die at any moment: killed, or by a guest's memory that its VMM has truncated. Nobody else notices, nothing is lost or done twice, nothing
//! is left behind.
//!
//! PEERGATE_KILL_ROUNDS sets the number of rounds, PEERGATE_KILL_SEED who dies when.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use e2e::load::Load;
use harness::daemon::{children, kill, open_files, resident};
use harness::raw::PATIENCE;
use harness::{Binaries, Daemon};
use vmm_control::{TenantState, TenantStatus};

const TENANTS: [&str; 3] = ["one", "two", "three"];
const ROUNDS: u64 = 100;
/// Every so many rounds it is the memory that goes.
const TRUNCATED: u64 = 4;
/// Rounds after which every part has taken the memory that it keeps.
const WARM: u64 = 5;
/// What a process may grow by all the same.
const SLACK: u64 = 4 << 20;
const FILES: usize = 4;
/// Descriptors that must end well before and after a worker's death, so that it happens under load.
const UNDER_LOAD: u64 = 200;

fn config() -> String {
    let mut text = String::from("[[device]]\nname = \"gpu0\"\nkind = \"gpu\"\nmemory = \"48MiB\"\n");
    for tenant in TENANTS {
        text += &format!("[[tenant]]\nname = \"{tenant}\"\n[[tenant.slice]]\ndevice = \"gpu0\"\nmemory = \"16MiB\"\n");
    }
    text
}

fn number(variable: &str, default: u64) -> Result<u64> {
    std::env::var(variable).map_or(Ok(default), |text| text.parse().with_context(|| format!("{variable} is no number")))
}

struct Bed {
    daemon: Daemon,
    loads: Vec<Load>,
}

/// What must not grow.
#[derive(Debug)]
struct Footprint {
    children: usize,
    /// Of supervisor and broker: open files and resident bytes.
    parts: BTreeMap<&'static str, (usize, u64)>,
}

impl Bed {
    fn new() -> Result<Self> {
        let daemon = Daemon::start(&Binaries::build()?, &config())?;
        let loads = TENANTS.map(|tenant| Load::start(&daemon.socket(tenant)));
        Ok(Self { daemon, loads: loads.into_iter().collect::<Result<_>>()? })
    }

    fn footprint(&self) -> Result<Footprint> {
        let supervisor = self.daemon.pid();
        let broker = self.daemon.status()?.daemon.broker_pid.context("There is a broker")?;
        let part = |pid: u32| -> Result<_> { Ok((open_files(pid)?, resident(pid)?)) };
        let parts = BTreeMap::from([("supervisor", part(supervisor)?), ("broker", part(broker)?)]);
        Ok(Footprint { children: children(supervisor)?.len(), parts })
    }

    /// Waits until a number of a tenant's load has grown by `by`.
    fn wait(&self, tenant: usize, what: fn(&Load) -> &AtomicU64, by: u64) -> Result<()> {
        let counter = || what(&self.loads[tenant]).load(Ordering::Relaxed);
        let wanted = counter() + by;
        let deadline = Instant::now() + PATIENCE * 2;
        while counter() < wanted {
            if self.loads.iter().any(Load::has_ended) {
                bail!("A load has failed");
            }
            ensure!(Instant::now() < deadline, "The load of tenant {} stands still", TENANTS[tenant]);
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Waits until a tenant's worker serves its VM.
    fn connected(&mut self, tenant: usize) -> Result<TenantStatus> {
        let name = TENANTS[tenant];
        self.daemon
            .wait_for("the VM to be served", |daemon| Ok(daemon.tenant(name)?.state == TenantState::Connected))?;
        self.daemon.tenant(name)
    }

    fn round(&mut self, victim: usize, truncate: bool) -> Result<()> {
        self.wait(victim, |load| &load.progress.ok, UNDER_LOAD)?;
        let before = self.connected(victim)?;
        let others: Vec<usize> = (0..TENANTS.len()).filter(|tenant| *tenant != victim).collect();
        let seen: Vec<_> = others.iter().map(|other| self.daemon.tenant(TENANTS[*other])).collect::<Result<_>>()?;
        if truncate {
            self.loads[victim].truncate();
            self.wait(victim, |load| &load.progress.vms, 1)?;
        } else {
            kill(before.worker_pid.context("A connected tenant has a worker")?)?;
            self.wait(victim, |load| &load.progress.sessions, 1)?;
        }
        self.wait(victim, |load| &load.progress.ok, UNDER_LOAD)?;
        let after = self.connected(victim)?;
        ensure!(after.session > before.session && after.failures > before.failures, "{before:?}, then {after:?}");
        for (other, seen) in others.into_iter().zip(seen) {
            self.wait(other, |load| &load.progress.ok, 1)?;
            let now = self.daemon.tenant(TENANTS[other])?;
            let same = (now.session, now.worker_pid, now.keeper_pid, now.failures)
                == (seen.session, seen.worker_pid, seen.keeper_pid, seen.failures);
            ensure!(same, "Tenant {} is another's victim: {seen:?}, then {now:?}", TENANTS[other]);
        }
        Ok(())
    }
}

#[test]
fn a_worker_may_die_at_any_moment() -> Result<()> {
    let (rounds, seed) = (number("PEERGATE_KILL_ROUNDS", ROUNDS)?, number("PEERGATE_KILL_SEED", 0x5eed)?);
    let mut random = seed | 1;
    let mut bed = Bed::new()?;
    let mut warm = None;
    for round in 0..rounds {
        if round == WARM {
            warm = Some(bed.footprint()?);
        }
        // xorshift64, Marsaglia 2003.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let victim = usize::try_from(random >> 32)? % TENANTS.len();
        let outcome = bed.round(victim, round % TRUNCATED == TRUNCATED - 1);
        if let Err(error) = outcome {
            let failed: Vec<_> = bed.loads.drain(..).filter_map(|load| load.stop().err()).collect();
            bail!("Round {round} of seed {seed}: {error:#}; {failed:?}; the daemon said:\n{}", bed.daemon.log());
        }
    }
    let after = bed.footprint()?;
    if let Some(warm) = warm {
        ensure!(after.children == warm.children, "Processes: {warm:?}, then {after:?}");
        for (part, (files, bytes)) in &after.parts {
            let (files_before, bytes_before) = warm.parts[part];
            // The operator's last connection may be open or closed at either moment; a leak would be one a round.
            ensure!(*files <= files_before + FILES, "Open files of the {part}: {files_before}, then {files}");
            ensure!(*bytes <= bytes_before + SLACK, "Memory of the {part}: {bytes_before}, then {bytes}");
        }
    }
    for load in std::mem::take(&mut bed.loads) {
        let progress = std::sync::Arc::clone(&load.progress);
        load.stop()?;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let outcomes = count(&progress.ok) + count(&progress.lost) + count(&progress.forsaken);
        ensure!(outcomes == count(&progress.submitted), "{progress:?}");
        println!("{progress:?}");
    }
    bed.daemon.stop()?;
    Ok(())
}

#[test]
fn the_broker_may_die_and_nobody_notices() -> Result<()> {
    let mut bed = Bed::new()?;
    for tenant in 0..TENANTS.len() {
        bed.connected(tenant)?;
    }
    let broker = |bed: &Bed| bed.daemon.status().map(|status| status.daemon.broker_pid);
    for _ in 0..3 {
        let before = bed.daemon.status()?;
        let old = before.daemon.broker_pid.context("There is a broker")?;
        kill(old)?;
        bed.daemon.wait_for("another broker", |daemon| {
            Ok(daemon.status()?.daemon.broker_pid.is_some_and(|pid| pid != old))
        })?;
        for (tenant, seen) in before.tenants.iter().enumerate() {
            bed.wait(tenant, |load| &load.progress.ok, UNDER_LOAD)?;
            let now = bed.daemon.tenant(&seen.name)?;
            ensure!((now.session, now.failures) == (seen.session, seen.failures), "{seen:?}, then {now:?}");
        }
        // The new one knows what the workers hold, and gives out what is asked of it.
        bed.round(0, false)?;
    }
    ensure!(broker(&bed)?.is_some());
    bed.loads.drain(..).try_for_each(Load::stop)?;
    bed.daemon.stop()?;
    Ok(())
}

#[test]
fn a_keeper_that_dies_takes_its_vms_connection_and_nothing_else() -> Result<()> {
    let mut bed = Bed::new()?;
    for tenant in 0..TENANTS.len() {
        bed.connected(tenant)?;
    }
    bed.wait(0, |load| &load.progress.ok, UNDER_LOAD)?;
    let before = bed.daemon.status()?;
    kill(before.tenants[0].keeper_pid.context("A tenant has a keeper")?)?;
    bed.loads.remove(0).gone()?;
    bed.daemon.wait_ready(TENANTS[0])?;
    bed.loads.insert(0, Load::start(&bed.daemon.socket(TENANTS[0]))?);
    bed.round(0, false)?;
    for seen in &before.tenants[1..] {
        let now = bed.daemon.tenant(&seen.name)?;
        let same = (now.session, now.failures, now.keeper_pid) == (seen.session, seen.failures, seen.keeper_pid);
        ensure!(same, "{seen:?}, then {now:?}");
    }
    bed.loads.drain(..).try_for_each(Load::stop)?;
    bed.daemon.stop()?;
    Ok(())
}
