//! GPUs of the host behind three tenants: one has slices of two, and beside it two have a slice of one each.
//!
//! On a machine with two GPUs these are real ones, and everything that confines a worker does. Elsewhere they are those of `hw_cuda`'s own driver, which needs
//! system calls that a worker does not: there those are watched and not forbidden.

#[path = "../../../vmm/daemon/tests/common/fake.rs"]
mod fake;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::bed::copy;
use e2e::overhear::Overhear;
use e2e::scenario::{Scenario, operator_rows};
use harness::{Binaries, Daemon, DriverOptions, InProcessDriver};
use peergate_guest::uapi::{self, Alloc};
use peergate_guest::{Channel, Driver as _};
use pgctl::selftest;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempPath;
use vmm_control::FaultsReply;

const CONFIG: &str = r#"
[[device]]
name = "gpu0"
kind = "cuda"
gpu = "ONE"
memory = "128MiB"

[[device]]
name = "gpu1"
kind = "cuda"
gpu = "OTHER"
memory = "128MiB"

[[device]]
name = "fpga0"
kind = "fpga"
memory = "64MiB"

[[tenant]]
name = "both"
[[tenant.slice]]
device = "gpu0"
memory = "64MiB"
[[tenant.slice]]
device = "gpu1"
memory = "64MiB"
[[tenant.slice]]
device = "fpga0"
memory = "64MiB"

[[tenant]]
name = "one"
[[tenant.slice]]
device = "gpu0"
memory = "16MiB"

[[tenant]]
name = "other"
[[tenant.slice]]
device = "gpu1"
memory = "16MiB"
"#;
const PATIENCE: Duration = Duration::from_secs(60);
/// A policy of the operator's.
const STAGED: &str = r#"
reach = [{ from = "gpu0", to = "gpu1", path = "staged" }, { from = "gpu1", to = "gpu0", path = "staged" }]
"#;
/// How a worker's words of its proof are seen.
const TALKATIVE: &str = "log = \"info,vmm_daemon=debug\"\n";
/// Addresses that `hw_cuda`'s driver gives its GPUs.
const FAKE: [&str; 2] = ["0000:1a:00.0", "0000:1b:00.0"];

/// The self-test's cases between GPUs, with so many bytes.
fn between_gpus(size: u64) -> selftest::Options {
    let only = selftest::names().into_iter().filter(|name| name.starts_with("gpus/")).map(str::to_owned).collect();
    selftest::Options { only, size, ..selftest::Options::default() }
}

/// A daemon, and the libraries that it loads if those are not the machine's.
struct Bed {
    daemon: Daemon,
    is_real: bool,
    _libraries: Vec<TempPath>,
}

impl Bed {
    /// `None`, which is said, where there are neither GPUs nor a C compiler.
    fn new() -> Result<Option<Self>> {
        let binaries = Binaries::build()?;
        let config = |gpus: [&str; 2]| {
            CONFIG.replace("\"ONE\"", &format!("{:?}", gpus[0])).replace("\"OTHER\"", &format!("{:?}", gpus[1]))
        };
        let found = hw_cuda::Driver::load().and_then(|driver| driver.gpus()).unwrap_or_default();
        if let [one, other, ..] = found.as_slice() {
            println!("{} and {} at {} and {}", one.name, other.name, one.address, other.address);
            let daemon = Daemon::start_with(&binaries, TALKATIVE, &config([&one.address, &other.address]))?;
            return Ok(Some(Self { daemon, is_real: true, _libraries: Vec::new() }));
        }
        let (Some(driver), Some(nvml)) = (fake::driver("gpus=2"), fake::nvml()) else { return Ok(None) };
        let variables = vec![
            ("PEERGATE_CUDA_LIBRARY", driver.as_os_str().to_owned()),
            ("PEERGATE_NVML_LIBRARY", nvml.as_os_str().to_owned()),
        ];
        let daemon =
            Daemon::start_among(&binaries, variables, &format!("{TALKATIVE}seccomp = \"log\""), &config(FAKE))?;
        Ok(Some(Self { daemon, is_real: false, _libraries: vec![driver, nvml] }))
    }

    fn connect(&self, tenant: &str) -> Result<InProcessDriver> {
        InProcessDriver::connect(
            &self.daemon.socket(tenant),
            DriverOptions { ram: 32 << 20, ..DriverOptions::default() },
        )
    }

    /// The self-test between GPUs as tenant `both`, whose refusals the operator sees, too.
    fn try_gpus(&self) -> Result<()> {
        let options = between_gpus(if self.is_real { 8 << 20 } else { 1 << 20 });
        let driver = self.connect("both")?;
        let (overhear, mut rows) = (Overhear::new(&driver), Vec::new());
        selftest::run(&overhear, &options, &mut |row| rows.push(row.clone()))?;
        let seen: FaultsReply = self.daemon.peergate_json(&["faults", "--tenant", "both"])?;
        let complete = operator_rows(&overhear.heard(), &seen.faults).into_iter().next();
        rows.extend(complete);
        for row in &rows {
            println!(
                "{}: {}",
                row.name,
                row.moved.map_or_else(|| row.got.clone(), |moved| format!("{}, {:.1} GB/s", row.got, moved.gb_per_s()))
            );
        }
        let wrong: Vec<_> = rows
            .iter()
            .filter(|row| !row.ok)
            .map(|row| format!("{}: {}, expected {}", row.name, row.got, row.expected))
            .collect();
        ensure!(wrong.is_empty() && rows.len() >= 10, "{} of {} rows: {}", wrong.len(), rows.len(), wrong.join("; "));
        Ok(())
    }
}

/// A guest that moves bytes through its GPU's memory and compares them, all the time.
#[derive(Default)]
struct Restless {
    rounds: AtomicU64,
    is_over: AtomicBool,
}

impl Restless {
    fn run(&self, channel: &dyn Channel, seed: u8) -> Result<()> {
        const LEN: usize = 1 << 20;
        let host = channel.map(2 * LEN as u64, uapi::READ | uapi::WRITE)?;
        let endpoint = channel.endpoint(0)?.endpoint;
        let alloc = || {
            channel.alloc(Alloc { endpoint, flags: uapi::READ | uapi::WRITE, length: LEN as u64, ..Alloc::default() })
        };
        let (first, second) = (alloc()?, alloc()?);
        for round in (0..=u8::MAX).cycle().take_while(|_| !self.is_over.load(Ordering::Acquire)) {
            let bytes: Vec<u8> = (0..LEN).map(|at| u8::try_from(at % 253).unwrap_or(0) ^ seed ^ round).collect();
            host.write_at(0, &bytes)?;
            copy(channel, host.iova(), first.iova, LEN as u64)?;
            copy(channel, first.iova, second.iova, LEN as u64)?;
            copy(channel, second.iova, host.iova() + LEN as u64, LEN as u64)?;
            let mut back = vec![0; LEN];
            host.read_at(LEN as u64, &mut back)?;
            ensure!(back == bytes, "Round {round} brought other bytes back");
            self.rounds.fetch_add(1, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Waits until it has come round again.
    fn goes_on(&self) -> Result<()> {
        let (before, begun) = (self.rounds.load(Ordering::Acquire), Instant::now());
        while self.rounds.load(Ordering::Acquire) <= before + 1 {
            ensure!(begun.elapsed() < PATIENCE, "It does not go on after {before} rounds");
            thread::yield_now();
        }
        Ok(())
    }
}

/// Does something while tenants `one` and `other` are restless; how those end.
fn beside(bed: &mut Bed, what: impl FnOnce(&mut Bed, [&Restless; 2]) -> Result<()>) -> Result<[Result<()>; 2]> {
    let drivers = [bed.connect("one")?, bed.connect("other")?];
    let channels = [drivers[0].open()?, drivers[1].open()?];
    let loads = [Restless::default(), Restless::default()];
    let loads = loads.each_ref();
    thread::scope(|scope| {
        let guests: Vec<_> = loads
            .into_iter()
            .zip(&channels)
            .zip([0x11, 0x22])
            .map(|((load, channel), seed)| scope.spawn(move || load.run(&**channel, seed)))
            .collect();
        let tried = loads.iter().try_for_each(|load| load.goes_on()).and_then(|()| what(bed, loads));
        loads.iter().for_each(|load| load.is_over.store(true, Ordering::Release));
        let ends = guests.into_iter().map(|guest| guest.join().ok().context("A guest panicked"));
        let ends = ends.collect::<Result<Vec<_>>>()?;
        tried?;
        ends.try_into().ok().context("There are two")
    })
}

#[test]
fn two_gpus_of_one_tenant_are_peers_and_tenants_beside_it_notice_nothing() -> Result<()> {
    let Some(mut bed) = Bed::new()? else { return Ok(()) };
    let shown = String::from_utf8(bed.daemon.peergate(&["endpoints"])?.stdout)?;
    println!("{shown}");
    let pairs: Vec<_> = shown.lines().filter(|line| line.contains(" yes ")).collect();
    // Whether they reach each other is the machine's to say.
    ensure!(bed.is_real || pairs.len() == 2 && pairs.iter().all(|line| line.starts_with("both")), "{shown}");
    ensure!(bed.daemon.log().contains("Proved the endpoints to be peers pairs=6"), "{}", bed.daemon.log());
    let ends = beside(&mut bed, |bed, loads| {
        bed.try_gpus()?;
        loads.iter().try_for_each(|load| load.goes_on())
    })?;
    ends.into_iter().collect::<Result<()>>()?;
    for tenant in ["one", "other"] {
        let status = bed.daemon.wait_ready(tenant)?;
        ensure!(status.failures == 0 && bed.daemon.faults(tenant)?.is_empty(), "{status:?}");
    }
    bed.daemon.stop()?;
    Ok(())
}

#[test]
fn a_worker_that_dies_with_copies_under_way_takes_nothing_of_the_others_gpus_along() -> Result<()> {
    let Some(mut bed) = Bed::new()? else { return Ok(()) };
    let [one, other] = beside(&mut bed, |bed, [_, other]| {
        let worker = bed.daemon.tenant("one")?.worker_pid.context("It has a worker")?;
        kill_process(Pid::from_raw(i32::try_from(worker)?).context("A process")?, Signal::KILL)?;
        bed.daemon.wait_for("another worker", |daemon| Ok(daemon.tenant("one")?.session == 2))?;
        // On the same GPUs.
        bed.try_gpus()?;
        other.goes_on()
    })?;
    ensure!(one.is_err(), "what it had in hand is lost");
    other?;
    // Its next VM finds the GPU as it was.
    bed.daemon.wait_ready("one")?;
    e2e::bed::round_trip(&*bed.connect("one")?.open()?)?;
    ensure!(bed.daemon.tenant("other")?.failures == 0 && bed.daemon.tenant("both")?.failures == 0);
    bed.daemon.stop()?;
    Ok(())
}

#[test]
fn simulated_gpus_pass_the_same_and_so_do_those_that_are_staged() -> Result<()> {
    for policy in ["", STAGED] {
        let config = CONFIG
            .replace("kind = \"cuda\"\ngpu = \"ONE\"", "kind = \"gpu\"")
            .replace("kind = \"cuda\"\ngpu = \"OTHER\"", "kind = \"gpu\"");
        let config = config.replace("name = \"both\"\n", &format!("name = \"both\"\n{policy}"));
        let options = between_gpus(1 << 20);
        let scenario =
            Scenario { config, tenant: "both".to_owned(), options, ..Scenario::demo(Binaries::build()?, None) };
        let (mut failed, mut staged) = (Vec::new(), 0);
        scenario.run(&mut |row| {
            staged += usize::from(row.got == "staged");
            failed.extend((!row.ok).then(|| format!("{}: {}, expected {}", row.name, row.got, row.expected)));
        })?;
        ensure!(failed.is_empty(), "{policy}: {}", failed.join("; "));
        ensure!(staged == if policy.is_empty() { 0 } else { 2 }, "{staged} staged");
    }
    Ok(())
}
