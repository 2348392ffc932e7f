//! A daemon for one proof: the `peergated` beside this program, in a directory of its own, with one tenant.
//!
//! Not here: what is proved with it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use tempfile::TempDir;
use vmm_microvm::PATIENCE;

const TENANT: &str = "selftest";
const CONFIG: &str = r#"
[[device]]
name = "gpu0"
kind = "gpu"
memory = "1MiB"

[[tenant]]
name = "selftest"

[[tenant.slice]]
device = "gpu0"
memory = "1MiB"
"#;

/// It runs until this is dropped.
pub(super) struct TemporaryDaemon {
    dir: TempDir,
    child: Child,
}

impl TemporaryDaemon {
    /// Starts it, and waits until a VM may connect.
    pub(super) fn start() -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("Cannot find this program")?.with_file_name("peergated");
        let dir = tempfile::Builder::new().prefix("peergate-selftest-").tempdir().context("Cannot make a directory")?;
        let (config, log) = (dir.path().join("peergated.toml"), dir.path().join("log"));
        let runtime = toml::Value::from(dir.path().join("run").to_string_lossy().as_ref());
        fs::write(&config, format!("[daemon]\nruntime_dir = {runtime}\n{CONFIG}"))
            .context("Cannot write a configuration")?;
        let log = File::create(log).context("Cannot make a log")?;
        let mut command = Command::new(&program);
        command.arg("--config").arg(&config).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let child = command.spawn().with_context(|| {
            format!("Cannot start {}; install it there, or pass --tenant to use a daemon that runs", program.display())
        })?;
        let mut daemon = Self { dir, child };
        daemon.wait_ready()?;
        Ok(daemon)
    }

    /// Where its tenant's VM connects.
    pub(super) fn socket(&self) -> PathBuf {
        self.dir.path().join("run").join(TENANT).with_extension("sock")
    }

    /// It prints a line once it is ready, and closes its output when it ends.
    fn wait_ready(&mut self) -> anyhow::Result<()> {
        let out = self.child.stdout.take().context("peergated has no output")?;
        let mut line = String::new();
        if is_ready(&out)? {
            BufReader::new(out).read_line(&mut line).context("Cannot read peergated's output")?;
        }
        if line.is_empty() {
            bail!("peergated does not become ready; it said: {}", self.last_words());
        }
        Ok(())
    }

    /// Ends it in good order.
    pub(super) fn end(mut self) -> anyhow::Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("peergated has no number")?;
        let process = pidfd_open(pid, PidfdFlags::empty()).context("Cannot wait for peergated")?;
        kill_process(pid, Signal::TERM).context("Cannot end peergated")?;
        if !is_ready(&process)? {
            bail!("peergated does not end; it said: {}", self.last_words());
        }
        let status = self.child.wait().context("Cannot wait for peergated")?;
        if !status.success() {
            bail!("peergated ended with {status}; it said: {}", self.last_words());
        }
        Ok(())
    }

    fn last_words(&self) -> String {
        let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        log.lines().next_back().unwrap_or("nothing").to_owned()
    }
}

impl Drop for TemporaryDaemon {
    fn drop(&mut self) {
        // Its children end with it. If it has ended already, there is nothing to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether there is something to read, or an end to see, in time.
fn is_ready(fd: impl AsFd) -> anyhow::Result<bool> {
    let patience = Timespec::try_from(PATIENCE).context("Cannot count so long")?;
    loop {
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&patience)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("Cannot wait for peergated"),
        }
    }
}
