//! The main job: bytes into GPU memory, across to the FPGA, through its cipher, and back the same way.
//!
//! The GPU gets the peer right to the FPGA's memory and makes both crossings itself; the FPGA touches its own memory alone.
//!
//! Not here: where the bytes come from and go to, and whether they are right.

use std::io::{Read, Write};
use std::time::Instant;

use anyhow::{Context, ensure};
use peergate_guest::{
    Access, EndpointInfo, Moved, PathReason, Progress, Session, TransferPath, copy_all, download, upload,
};

use crate::Meters;
use crate::fpga::{Cipher, Fpga};

/// Who does the job.
pub struct Job<'a> {
    /// The address space to do it in.
    pub session: &'a Session,
    /// Where the bytes start and end.
    pub gpu: &'a EndpointInfo,
    /// Who encrypts.
    pub fpga: &'a EndpointInfo,
    /// With what.
    pub cipher: Cipher,
    /// Where progress goes.
    pub meters: Meters,
}

/// Does a step, and tells how far it is.
type Action<'a> = &'a mut dyn FnMut(Progress<'_>) -> anyhow::Result<Moved>;

/// One step that is done.
#[derive(Clone, Debug)]
pub struct Step {
    /// What was done.
    pub name: &'static str,
    /// How much, how fast, which way.
    pub moved: Moved,
}

impl Job<'_> {
    /// Does it: `len` bytes of `input` go through, the result goes to `output`. Blocks until all is done.
    ///
    /// # Errors
    /// The first step's that fails.
    pub fn run(&self, input: &mut dyn Read, len: u64, output: &mut dyn Write) -> anyhow::Result<Vec<Step>> {
        ensure!(len > 0, "There are no bytes to encrypt");
        let Self { session, gpu, fpga, .. } = self;
        let at = |endpoint: &EndpointInfo| {
            let buffer = session.alloc(endpoint.number, len, Access::RW);
            buffer.with_context(|| format!("Could not allocate {len} bytes of {}", endpoint.name))
        };
        // First what costs nothing: most mistakes end here.
        let logic = Fpga::open(session, fpga)?;
        let (plain, result) = (at(gpu)?, at(gpu)?);
        let (source, destination) = (at(fpga)?, at(fpga)?);
        session.peer_enable(gpu.number, fpga.number, Access::RW).context("Could not enable the peer right")?;
        let stream = session.stream().by(gpu.number);
        let mut steps = Vec::new();
        let mut step = |name: &'static str, action: Action<'_>| {
            let mut meter = self.meters.start(name, len);
            let moved = action(&mut |done| meter.at(done)).with_context(|| format!("Step \"{name}\" failed"))?;
            steps.push(Step { name, moved });
            anyhow::Ok(())
        };
        step("upload", &mut |progress| Ok(upload(&stream, plain.iova(), input, len, progress)?))?;
        step("gpu-to-fpga", &mut |progress| Ok(copy_all(&stream, source.iova(), plain.iova(), len, progress)?))?;
        step("kernel", &mut |progress| {
            let started = Instant::now();
            logic.start(source.iova(), destination.iova(), len, &self.cipher)?;
            let bytes = logic.wait(&mut || progress(0))?.bytes()?;
            ensure!(bytes == len, "The kernel processed {bytes} of {len} bytes");
            let (path, reason) = (TransferPath::Local, PathReason::SameDevice);
            Ok(Moved { bytes, elapsed: started.elapsed(), path, reason, other: None })
        })?;
        step("fpga-to-gpu", &mut |progress| Ok(copy_all(&stream, result.iova(), destination.iova(), len, progress)?))?;
        step("download", &mut |progress| Ok(download(&stream, result.iova(), output, len, progress)?))?;
        Ok(steps)
    }
}
