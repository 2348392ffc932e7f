//! A daemon with two tenants: one that is abused, and one that must not notice.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use harness::daemon::{open_files, resident};
use harness::{Binaries, Daemon, DriverOptions, InProcessDriver};
use peergate_guest::uapi::{self, Alloc, Completion, Work};
use peergate_guest::{Channel, Driver, Status};

/// The tenant whose VM misbehaves.
pub const ABUSED: &str = "abused";
/// The tenant beside it.
pub const BESIDE: &str = "beside";

const CONFIG: &str = r#"
[[device]]
name = "gpu0"
kind = "gpu"
memory = "32MiB"

[[device]]
name = "fpga0"
kind = "fpga"
memory = "32MiB"

[[tenant]]
name = "abused"
KEYS

[[tenant.slice]]
device = "gpu0"
memory = "16MiB"

[[tenant.slice]]
device = "fpga0"
memory = "16MiB"

[[tenant]]
name = "beside"

[[tenant.slice]]
device = "gpu0"
memory = "16MiB"

[[tenant.slice]]
device = "fpga0"
memory = "16MiB"
"#;

const PATIENCE: Duration = Duration::from_secs(20);

/// The daemon with both.
#[derive(Debug)]
pub struct Bed {
    /// The daemon.
    pub daemon: Daemon,
}

impl Bed {
    /// Starts it.
    pub fn new() -> Result<Self> {
        Self::with("")
    }

    /// Starts it with more keys for the abused tenant.
    pub fn with(keys: &str) -> Result<Self> {
        let daemon = Daemon::start(&Binaries::build()?, &CONFIG.replace("KEYS", keys))?;
        Ok(Self { daemon })
    }

    /// Both tenants serve a guest, the abused one after it has been left alone.
    pub fn check(&mut self) -> Result<()> {
        self.daemon.wait_ready(ABUSED)?;
        for tenant in [ABUSED, BESIDE] {
            self.serves(tenant).with_context(|| format!("Tenant {tenant} does not serve"))?;
            self.daemon.wait_ready(tenant)?;
        }
        Ok(())
    }

    /// Checks both tenants and that the daemon ends well.
    pub fn finish(mut self) -> Result<String> {
        self.check()?;
        self.daemon.stop()
    }

    /// A guest connects, moves bytes through a GPU's memory and back, and leaves.
    pub fn serves(&self, tenant: &str) -> Result<()> {
        let options = DriverOptions { ram: 16 << 20, ..DriverOptions::default() };
        let driver = InProcessDriver::connect(&self.daemon.socket(tenant), options)?;
        round_trip(&*driver.open()?)
    }

    /// Open files and resident bytes of the daemon.
    pub fn footprint(&self) -> Result<(usize, u64)> {
        Ok((open_files(self.daemon.pid())?, resident(self.daemon.pid())?))
    }
}

/// Moves bytes from the guest's memory through that of the first endpoint and back.
pub fn round_trip(channel: &dyn Channel) -> Result<()> {
    const LEN: usize = 64 << 10;
    let host = channel.map(2 * LEN as u64, uapi::READ | uapi::WRITE)?;
    let endpoint = channel.endpoint(0)?.endpoint;
    let buffer =
        channel.alloc(Alloc { endpoint, flags: uapi::READ | uapi::WRITE, length: LEN as u64, ..Alloc::default() })?;
    let bytes: Vec<u8> = (0..LEN).map(|i| u8::try_from(i * 31 % 251).unwrap_or(0)).collect();
    host.write_at(0, &bytes)?;
    copy(channel, host.iova(), buffer.iova, LEN as u64)?;
    copy(channel, buffer.iova, host.iova() + LEN as u64, LEN as u64)?;
    let mut back = vec![0; LEN];
    host.read_at(LEN as u64, &mut back)?;
    ensure!(back == bytes, "The bytes came back changed");
    channel.free(buffer.handle)?;
    channel.unmap(host.iova(), host.len())?;
    Ok(())
}

/// One copy on stream 0, waited for.
pub fn copy(channel: &dyn Channel, source: u64, destination: u64, length: u64) -> Result<()> {
    let work = Work {
        opcode: uapi::WORK_COPY,
        initiator: uapi::INITIATOR_ANY,
        source,
        destination,
        length,
        ..Work::default()
    };
    channel.submit(0, &[work])?;
    let completion = next_completion(channel)?;
    let status = Status::from_raw(completion.status).context("A known status")?;
    ensure!(status == Status::Ok, "A copy ended with {}", status.name());
    Ok(())
}

/// The next completion, which must come.
pub fn next_completion(channel: &dyn Channel) -> Result<Completion> {
    let mut completion = [Completion::default()];
    ensure!(channel.completions(&mut completion, 1, Instant::now() + PATIENCE)? == 1, "Nothing completed in time");
    Ok(completion[0])
}
