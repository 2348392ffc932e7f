//! The broker alone, asked by a supervisor that lies: it has a table of its own and refuses what does not fit.
//!
//! In the second act nothing asks the broker for too much, since the supervisor checks first. That must not be why nobody gets it.
//!
//! Not here: what tenants do with their memory.

use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::io::{pread, pwrite};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use vmm_broker::{Backing, BrokerDevice, Channel, FromBroker, Lease, LeaseSlice, ToBroker};

use super::programs::Programs;
use super::rows::{Row, Rows};

const DEVICE: &str = "gpu0";
const MIB: u64 = 1 << 20;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// A broker process. Dropping it ends it.
struct Broker {
    child: Child,
    channel: Channel,
}

/// Asks for what must be given and for what must not.
///
/// # Errors
/// When there is no broker to ask.
pub fn judge(programs: &Programs, rows: &mut Rows<'_>) -> Result<()> {
    let broker = Broker::start(programs)?;
    broker.send(&ToBroker::Devices {
        devices: vec![BrokerDevice { name: DEVICE.into(), memory: 64 * MIB, backing: Backing::File }],
        groups: Vec::new(),
    })?;
    let first = broker.lease("a", 1, DEVICE, 48)?;
    let mut row = |name: &str, expected: &str, got: &std::result::Result<OwnedFd, String>| {
        let got = got.as_ref().map_or_else(Clone::clone, |_| "given".to_owned());
        rows.add(Row::new(format!("tenants/broker/{name}"), expected, got));
    };
    row("lease", "given", &first);
    let too_much = format!(
        "Device {DEVICE:?} has {} bytes, of which others hold {}; {} are too many",
        64 * MIB,
        48 * MIB,
        32 * MIB
    );
    row("lease-of-what-others-hold", &too_much, &broker.lease("b", 1, DEVICE, 32)?);
    row("lease-of-no-device", "There is no device \"gpu9\"", &broker.lease("b", 1, "gpu9", 1)?);
    row(
        "lease-of-an-old-session",
        "Session 1 is not newer than the tenant's session 1",
        &broker.lease("a", 1, DEVICE, 1)?,
    );
    row("lease-of-the-rest", "given", &broker.lease("b", 1, DEVICE, 16)?);
    let Ok(first) = first else { return Ok(()) };
    pwrite(&first, b"secret", 0).context("Cannot write a slice's memory")?;
    let next = broker.lease("a", 2, DEVICE, 48)?;
    row("lease-of-the-next-session", "given", &next);
    let Ok(next) = next else { return Ok(()) };
    let mut bytes = [0xff; 6];
    pread(&next, &mut bytes, 0).context("Cannot read a slice's memory")?;
    rows.add(Row::new("tenants/broker/memory-of-the-next-session", format!("{:?}", [0; 6]), format!("{bytes:?}")));
    Ok(())
}

impl Broker {
    fn start(programs: &Programs) -> Result<Self> {
        let (channel, theirs) = Channel::pair()?;
        set_socket_timeout(&channel, Timeout::Recv, Some(PATIENCE)).context("Cannot bound the wait for a broker")?;
        // A role runs only where it ends together with who started it.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(programs.path("peergated")).arg("broker");
        command.args(["--seccomp", "enforce", "--namespaces", "off", "--landlock", "off", "--log", "error"]);
        let child = command.stdin(Stdio::from(theirs.into_fd())).stdout(Stdio::null()).spawn();
        Ok(Self { child: child.context("Cannot start a broker")?, channel })
    }

    fn send(&self, message: &ToBroker) -> Result<()> {
        Ok(self.channel.send(message, &[])?)
    }

    /// Asks for a lease of one slice: its memory, or why not.
    fn lease(
        &self,
        tenant: &str,
        session: u32,
        device: &str,
        mib: u64,
    ) -> Result<std::result::Result<OwnedFd, String>> {
        let slice = LeaseSlice { name: "slice".into(), device: device.into(), memory: mib * MIB };
        self.send(&ToBroker::Lease(Lease { tenant: tenant.into(), session, slices: vec![slice], container: false }))?;
        let (answer, mut fds) = self.channel.receive::<FromBroker>()?.context("The broker has gone")?;
        match answer {
            FromBroker::Refused { reason, .. } => Ok(Err(reason)),
            FromBroker::Leased { .. } => {
                ensure!(fds.len() == 1, "A lease of one slice came with {} files", fds.len());
                Ok(Ok(fds.swap_remove(0)))
            }
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // Both fail only for a process that has already been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
