//! Copies from the guest's memory into an endpoint's, through the kernel driver.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peergate_guest::uapi::{self, Completion, Work};
use peergate_guest::{Access, Buffer, HostBuffer, KernelDriver, Session, Status};

use super::{Rival, SIZE};

/// Copies of one call of [`Rival::some`].
const SOME: u64 = 128;
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) struct Copies {
    session: Session,
    host: HostBuffer,
    buffer: Buffer,
    depth: usize,
}

impl Copies {
    pub(super) fn open(device: &Path, depth: usize) -> Result<Self> {
        let session = Session::open(&KernelDriver::new(device))?;
        let endpoint = session.endpoints()?.first().context("The device has no endpoint")?.number;
        let len = u64::from(SIZE) * depth as u64;
        let (host, buffer) = (session.map(len, Access::READ)?, session.alloc(endpoint, len, Access::RW)?);
        Ok(Self { session, host, buffer, depth })
    }

    fn copy(&self, n: u64) -> Work {
        let place = n % self.depth as u64;
        let offset = place * u64::from(SIZE);
        Work {
            opcode: uapi::WORK_COPY,
            // Each place has a stream of its own, so that all may be on their way.
            stream: u32::try_from(place).unwrap_or(0),
            initiator: uapi::INITIATOR_ANY,
            cookie: n,
            source: self.host.iova() + offset,
            destination: self.buffer.iova() + offset,
            length: SIZE.into(),
            ..Work::default()
        }
    }
}

impl Rival for Copies {
    fn some(&mut self) -> Result<u64> {
        let (mut sent, mut done) = (0_u64, 0_u64);
        let mut ended = [Completion::default(); 64];
        while done < SOME {
            let room = (self.depth as u64 - (sent - done)).min(SOME - sent);
            if room > 0 {
                let work: Vec<Work> = (sent..sent + room).map(|n| self.copy(n)).collect();
                sent += self.session.channel().submit(0, &work)? as u64;
            }
            let count = self.session.channel().completions(&mut ended, 1, Instant::now() + PATIENCE)?;
            ensure!(count > 0, "No copy ended in time");
            for completion in &ended[..count] {
                let status = Status::from_raw(completion.status).context("A known status")?;
                ensure!(status == Status::Ok, "A copy ended with {}", status.name());
            }
            done += count as u64;
        }
        Ok(done)
    }
}
