//! A daemon of a test's own, in a directory of its own.
#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod fake;

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use tempfile::TempDir;
use vmm_control::{Client, ClientError, Reply, Request, StatusReply, TenantState, TenantStatus};

/// Long enough for a loaded machine; only a failing test waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two tenants that share a GPU; the first one has an FPGA, too.
pub(crate) const CONFIG: &str = r#"
[[device]]
name = "gpu0"
kind = "gpu"
memory = "8MiB"
engines = 2
link = { bandwidth = "16GB/s", latency = "2us" }

[[device]]
name = "fpga0"
kind = "fpga"
memory = "8MiB"

[[tenant]]
name = "vm0"
reach = [{ from = "fpga0", to = "gpu0", path = "staged" }]
[[tenant.slice]]
device = "gpu0"
memory = "4MiB"
[[tenant.slice]]
device = "fpga0"
memory = "8MiB"

[[tenant]]
name = "vm1"
[[tenant.slice]]
device = "gpu0"
memory = "4MiB"
name = "mine"
"#;

pub(crate) struct Daemon {
    pub(crate) dir: TempDir,
    child: Child,
}

impl Daemon {
    /// Starts a daemon with [`CONFIG`] and waits until every tenant waits for its VMM.
    pub(crate) fn start() -> Self {
        Self::start_with("", CONFIG)
    }

    /// Starts a daemon with further keys of `[daemon]`, and waits until every tenant waits for its VMM.
    pub(crate) fn start_with(keys: &str, rest: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_config(dir.path(), keys, rest);
        Self::start_in(dir)
    }

    /// Starts a daemon as an ordinary user, who has what an operator hands over: the program, a configuration to read, and a directory for
    /// the sockets.
    pub(crate) fn start_as(user: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let program = dir.path().join("peergated");
        fs::copy(env!("CARGO_BIN_EXE_peergated"), &program).unwrap();
        write_config(dir.path(), "", CONFIG);
        let run = dir.path().join("run");
        fs::create_dir(&run).unwrap();
        chown(&run, Some(user), Some(user)).unwrap();
        let mut command = Command::new(program);
        command.arg("--config").arg(dir.path().join("config.toml")).stdin(Stdio::null()).uid(user).gid(user);
        let log = fs::File::create(dir.path().join("log")).unwrap();
        Self::run(dir, command, log)
    }

    /// Starts a daemon on a directory that has its configuration.
    pub(crate) fn start_in(dir: TempDir) -> Self {
        let log = fs::File::options().create(true).append(true).open(dir.path().join("log")).unwrap();
        Self::start_logging_to(dir, log)
    }

    /// The same with its standard error elsewhere.
    pub(crate) fn start_logging_to(dir: TempDir, log: impl Into<Stdio>) -> Self {
        let command = peergated(dir.path());
        Self::run(dir, command, log)
    }

    /// Runs a daemon's command, and waits until every tenant waits for its VMM.
    pub(crate) fn run(dir: TempDir, command: Command, log: impl Into<Stdio>) -> Self {
        let daemon = Self::run_only(dir, command, log);
        daemon.wait_for(|status| status.tenants.iter().all(|tenant| tenant.state == TenantState::Waiting));
        daemon
    }

    /// Runs a daemon's command, and waits until it answers.
    pub(crate) fn run_only(dir: TempDir, mut command: Command, log: impl Into<Stdio>) -> Self {
        let child = command.stdout(Stdio::null()).stderr(log).process_group(0).spawn().unwrap();
        let daemon = Self { dir, child };
        daemon.wait_for(|_| true);
        daemon
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn runtime_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub(crate) fn control(&self) -> PathBuf {
        self.runtime_dir().join("control.sock")
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub(crate) fn status(&self) -> StatusReply {
        match Client::connect(&self.control()).unwrap().ask(&Request::Status).unwrap() {
            Reply::Status(status) => status,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn tenant(&self, index: usize) -> TenantStatus {
        self.status().tenants.swap_remove(index)
    }

    /// Asks until `right` is true.
    pub(crate) fn wait_for(&self, right: impl Fn(&StatusReply) -> bool) -> StatusReply {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let answer = Client::connect(&self.control()).and_then(|mut client| client.ask(&Request::Status));
            match answer {
                Ok(Reply::Status(status)) if right(&status) => return status,
                Ok(_) | Err(ClientError::Connect { .. }) if Instant::now() < deadline => std::thread::yield_now(),
                other => panic!("{other:?}\n{}", self.log()),
            }
        }
    }

    /// Runs `peergate` against this daemon.
    pub(crate) fn peergate(&self, args: &[&str]) -> Output {
        peergate(&self.control(), args)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(pid(self.pid()), signal).unwrap();
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// Ends the daemon, and gives the directory back.
    pub(crate) fn end(mut self) -> TempDir {
        self.signal(Signal::TERM);
        assert!(self.wait().success(), "{}", self.log());
        std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Workers follow.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn write_config(dir: &Path, keys: &str, rest: &str) {
    let run = dir.join("run");
    let config = format!("[daemon]\nruntime_dir = {:?}\nlog = \"debug\"\n{keys}\n{rest}", run.to_str().unwrap());
    fs::write(dir.join("config.toml"), config).unwrap();
}

/// `peergated` with the configuration in `dir`.
pub(crate) fn peergated(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_peergated"));
    command.arg("--config").arg(dir.join("config.toml")).stdin(Stdio::null());
    command
}

pub(crate) fn peergate(socket: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_peergate")).arg("--socket").arg(socket).args(args).output().unwrap()
}

pub(crate) fn pid(raw: u32) -> Pid {
    Pid::from_raw(i32::try_from(raw).unwrap()).unwrap()
}

pub(crate) fn kill(raw: u32, signal: Signal) {
    kill_process(pid(raw), signal).unwrap();
}

/// Every process but the supervisor, to wait for.
pub(crate) fn children(status: &StatusReply) -> Vec<OwnedFd> {
    let tenants = status.tenants.iter().flat_map(|tenant| [tenant.worker_pid, tenant.keeper_pid]);
    let all: Vec<_> = tenants.chain([status.daemon.broker_pid]).map(Option::unwrap).collect();
    all.into_iter().map(process).collect()
}

/// A process, to wait for.
pub(crate) fn process(raw: u32) -> OwnedFd {
    pidfd_open(pid(raw), PidfdFlags::empty()).unwrap()
}

/// Waits until a process has ended, whoever's child it is.
pub(crate) fn wait_for_end(process: &OwnedFd) {
    let patience = Timespec { tv_sec: i64::try_from(PATIENCE.as_secs()).unwrap(), tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&patience)).unwrap(), 1, "it is still there");
}

pub(crate) fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

pub(crate) fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}
