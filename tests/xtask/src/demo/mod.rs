//! The demo: a play in two acts, in guests under QEMU or in front-ends in processes of the host, and judged from both sides.
//!
//! `programs` builds what runs, `daemon` runs `peergated`. The first act is one guest's (`guest` boots it, what it tries is `pgctl selftest`); when
//! it is over, `operator` looks up each refusal in `peergate faults`. The second act (`act2`) is that of two tenants, whose guests (`stage`) take
//! orders (`actor`). The daemon must end with nothing left behind. Everything becomes [`Row`]s.
//!
//! Not here: what a guest tries (that is `pgctl`).

pub mod act2;
pub mod actor;
pub mod bench;
pub mod broker;
pub mod bundle;
pub mod daemon;
pub mod debug;
pub mod driver;
pub mod guest;
pub mod operator;
pub mod place;
pub mod programs;
pub mod rows;
pub mod stage;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::kit::Kit;
use actor::Actor;
use bundle::Bundle;
use daemon::Daemon;
use programs::Programs;
pub use rows::{Row, Rows};

/// Packages that the scenario needs without a guest.
pub const WITHOUT_VM: &[&str] = &["vmm_daemon", "e2e"];

/// The configuration of the first act, unless there is another one, and of the guest's tests.
const CONFIG: &str = include_str!("../../../../configs/demo.toml");
/// The tenant of such a configuration.
pub const TENANT: &str = "demo";

/// Which acts to play.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acts {
    /// One guest: everything it may do, and everything it is refused.
    First,
    /// Two guests: what one can do to the other, and what losing a worker does.
    Second,
    /// One after the other.
    Both,
}

/// What the first act is played with.
#[derive(Debug, Clone)]
pub struct Setting {
    /// The daemon's configuration: tenant `demo` has a GPU and an FPGA, and pieces that cross between them go direct.
    pub config: String,
    /// The file to move, of at least 8 MiB; without one, the guest's kernel image in a guest and a pattern without a guest.
    pub file: Option<PathBuf>,
}

impl Default for Setting {
    fn default() -> Self {
        Self { config: CONFIG.to_owned(), file: None }
    }
}

/// Plays in guests; a row is reported as soon as it is known. Blocks until everything has ended.
///
/// # Errors
/// When the play did not come to its end.
pub fn in_guest<'r>(
    bundle: &Bundle,
    acts: Acts,
    setting: &Setting,
    report: &'r mut dyn FnMut(&Row),
) -> Result<Rows<'r>> {
    let Bundle { kit, programs, module } = bundle;
    let mut rows = Rows::new(report);
    if acts != Acts::Second {
        let mut daemon = Daemon::start_with(programs, &setting.config)?;
        let plan = guest::Plan::demo(setting.file.clone().unwrap_or_else(|| kit.kernel_image()));
        guest::run(bundle, &mut daemon, &plan, &mut rows)?;
        finish(daemon, &mut rows)?;
    }
    if acts != Acts::First {
        let liar = stage::lying_module(kit)?;
        second_act(programs, &mut rows, |daemon| {
            eprintln!("booting two guests");
            let [a, b] = act2::TENANTS;
            let a = stage::start(kit, programs, module, daemon, a)?;
            let b = stage::start(kit, programs, &liar, daemon, b)?;
            Ok([a.actor()?, b.actor()?])
        })?;
    }
    Ok(rows)
}

/// Runs the scenario, and then the guest driver's own tests, in a guest whose links have a latency and a bandwidth: so transfers are really in
/// flight while things happen. There is a device that an operator can give the tenant a slice of. Blocks until everything has ended.
///
/// # Errors
/// When it could not run to its end.
pub fn guest_tests<'r>(kit: &Kit, report: &'r mut dyn FnMut(&Row)) -> Result<Rows<'r>> {
    let bundle = Bundle::build(kit)?;
    let link = "link = { bandwidth = \"256MB/s\", latency = \"20us\" }";
    let config = format!("{CONFIG}\n{}", operator::SPARE);
    let slow = config.lines().flat_map(|line| [line, if line.starts_with("kind = ") { link } else { "" }]);
    let slow = slow.collect::<Vec<_>>().join("\n");
    ensure!(slow.contains(link), "configs/demo.toml has no device to slow down");
    let mut daemon = Daemon::start_with(&bundle.programs, &slow)?;
    let mut rows = Rows::new(report);
    let plan = guest::Plan::tests(kit.kernel_image(), driver::dawdling_module(kit)?);
    guest::run(&bundle, &mut daemon, &plan, &mut rows)?;
    finish(daemon, &mut rows)?;
    Ok(rows)
}

/// Plays in processes of this host. Needs no kit.
///
/// # Errors
/// When the play did not come to its end.
pub fn without_vm<'r>(acts: Acts, setting: &Setting, report: &'r mut dyn FnMut(&Row)) -> Result<Rows<'r>> {
    play(&Programs::build(WITHOUT_VM)?, acts, setting, report)
}

/// As [`without_vm`], with programs that are already built.
///
/// # Errors
/// As there.
pub fn play<'r>(
    programs: &Programs,
    acts: Acts,
    setting: &Setting,
    report: &'r mut dyn FnMut(&Row),
) -> Result<Rows<'r>> {
    let mut rows = Rows::new(report);
    if acts != Acts::Second {
        let daemon = Daemon::start_with(programs, &setting.config)?;
        programs.scenario(&daemon, setting.file.as_deref(), &mut rows)?;
        finish(daemon, &mut rows)?;
    }
    if acts != Acts::First {
        second_act(programs, &mut rows, |daemon| {
            let [a, b] = act2::TENANTS.map(|tenant| Actor::in_process(programs, daemon, tenant));
            Ok([a?, b?])
        })?;
    }
    Ok(rows)
}

/// Has actors play the second act.
fn second_act(
    programs: &Programs,
    rows: &mut Rows<'_>,
    actors: impl FnOnce(&Daemon) -> Result<[Actor; 2]>,
) -> Result<()> {
    let rate = format!("control_rate = {}\n", act2::CONTROL_RATE);
    ensure!(act2::CONFIG.contains(&rate), "configs/two-tenants.toml does not read {rate:?}");
    let mut daemon = Daemon::start_with(programs, act2::CONFIG)?;
    let started = Instant::now();
    let played = actors(&daemon).and_then(|[mut a, mut b]| {
        act2::play(&mut daemon, &mut a, &mut b, rows)?;
        for actor in [a, b] {
            let tenant = actor.tenant.clone();
            let complaints = actor.end()?;
            rows.add(Row::new(format!("tenants/{tenant}-ends-without-complaints"), "", complaints.join("; ")));
        }
        Ok(())
    });
    broker::judge(programs, rows)?;
    played.with_context(|| format!("peergated's log:\n{}", daemon.log().join("\n")))?;
    eprintln!("the second act took {:.1} s", started.elapsed().as_secs_f64());
    for row in daemon.stop()? {
        rows.add(Row { name: format!("tenants/{}", row.name), ..row });
    }
    Ok(())
}

/// The operator's side, and the end of the daemon.
fn finish(daemon: Daemon, rows: &mut Rows<'_>) -> Result<()> {
    operator::judge(&daemon, rows)?;
    daemon.stop()?.into_iter().for_each(|row| rows.add(row));
    Ok(())
}
