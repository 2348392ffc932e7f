//! The real daemon, in a directory of its own: started, asked, ended, and looked after if a test fails.
//!
//! [`Binaries::build`] makes sure that the programs are those of this checkout. What the daemon logs is kept and shown when something
//! goes wrong. Waiting is for a condition, with a deadline; log lines wake the waiter.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use tempfile::TempDir;
use vmm_control::{Client, FaultInfo, Reply, Request, StatusReply, TenantState, TenantStatus};

use crate::virtqueue::wait_readable;

/// How long the daemon may take for anything.
const PATIENCE: Duration = Duration::from_secs(30);
/// Where its directory is if the host has that, in memory as `/run` is: on a disk, a change would wait for whatever others write there.
const MEMORY: &str = "/dev/shm";
/// Name of its configuration file.
const CONFIG: &str = "peergated.toml";
/// How long a condition that no log line announces may stay unnoticed.
const LOOK: Duration = Duration::from_millis(10);

/// The programs under test.
#[derive(Clone, Debug)]
pub struct Binaries {
    /// `peergated`.
    pub peergated: PathBuf,
    /// `peergate`.
    pub peergate: PathBuf,
}

impl Binaries {
    /// The programs in `dir`.
    pub fn in_dir(dir: &Path) -> Result<Self> {
        let [peergated, peergate] = ["peergated", "peergate"].map(|name| dir.join(name));
        for program in [&peergated, &peergate] {
            ensure!(program.is_file(), "There is no {}; build it first: cargo build -p vmm_daemon", program.display());
        }
        Ok(Self { peergated, peergate })
    }

    /// Builds the programs beside the running one, with its profile, unless PEERGATE_BIN_DIR says where they are.
    pub fn build() -> Result<Self> {
        if let Some(dir) = std::env::var_os("PEERGATE_BIN_DIR") {
            return Self::in_dir(Path::new(&dir));
        }
        let running = std::env::current_exe()?;
        let mut dir = running.parent().context("A program lies in a directory")?;
        if dir.ends_with("deps") {
            dir = dir.parent().context("A program lies in a directory")?;
        }
        let profile = match dir.file_name().and_then(|name| name.to_str()) {
            Some("debug") | None => "dev",
            Some(name) => name,
        };
        let target = dir.parent().context("A profile lies in a directory")?;
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let built = Command::new(cargo)
            .args(["build", "--quiet", "--package", "vmm_daemon", "--bins", "--profile", profile, "--target-dir"])
            .arg(target)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .context("Cannot run cargo")?;
        ensure!(built.success(), "The daemon does not build");
        Self::in_dir(dir)
    }
}

/// A daemon that runs until it is dropped.
pub struct Daemon {
    binaries: Binaries,
    dir: TempDir,
    variables: Vec<(&'static str, OsString)>,
    child: Child,
    log: Arc<Log>,
    readers: Vec<JoinHandle<()>>,
}

impl Daemon {
    /// Starts it with `config`, which has no `[daemon]` table, and waits until every tenant's VMM may connect.
    pub fn start(binaries: &Binaries, config: &str) -> Result<Self> {
        Self::start_with(binaries, "", config)
    }

    /// The same with more keys for the `[daemon]` table.
    pub fn start_with(binaries: &Binaries, keys: &str, config: &str) -> Result<Self> {
        Self::start_among(binaries, Vec::new(), keys, config)
    }

    /// The same with more variables in its environment.
    pub fn start_among(
        binaries: &Binaries,
        variables: Vec<(&'static str, OsString)>,
        keys: &str,
        config: &str,
    ) -> Result<Self> {
        let memory = Path::new(MEMORY);
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let dir = tempfile::Builder::new().prefix("peergate-test-").tempdir_in(parent)?;
        let runtime = dir.path().join("run");
        fs::write(
            dir.path().join(CONFIG),
            format!("[daemon]\nruntime_dir = \"{}\"\n{keys}\n{config}", runtime.display()),
        )?;
        let log = Arc::new(Log::default());
        let (child, readers) = spawn(binaries, dir.path(), &variables, &log)?;
        let mut daemon = Self { binaries: binaries.clone(), dir, variables, child, log, readers };
        daemon.wait_all_ready()?;
        Ok(daemon)
    }

    /// Kills it and starts the next one on the same configuration file, at once.
    pub fn kill_and_restart(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        let (child, readers) = spawn(&self.binaries, self.dir.path(), &self.variables, &self.log)?;
        self.child = child;
        self.readers.extend(readers);
        self.wait_all_ready()
    }

    fn wait_all_ready(&mut self) -> Result<()> {
        self.wait_for("every tenant to be ready", |daemon| {
            if let Some(status) = daemon.child.try_wait()? {
                bail!("The daemon ended at once: {status}");
            }
            let Ok(status) = daemon.status() else { return Ok(false) };
            Ok(status.tenants.iter().all(|tenant| tenant.state == TenantState::Waiting))
        })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its configuration file.
    pub fn config(&self) -> PathBuf {
        self.dir.path().join(CONFIG)
    }

    /// The directory of its sockets.
    pub fn runtime_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// A tenant's socket.
    pub fn socket(&self, tenant: &str) -> PathBuf {
        self.runtime_dir().join(format!("{tenant}.sock"))
    }

    /// The operator's socket.
    pub fn control_socket(&self) -> PathBuf {
        self.runtime_dir().join("control.sock")
    }

    /// Everything it has logged.
    pub fn log(&self) -> String {
        self.log.lock().join("\n")
    }

    /// Asks the operator's socket.
    pub fn ask(&self, request: &Request) -> Result<Reply> {
        Ok(Client::connect(&self.control_socket())?.ask(request)?)
    }

    /// How everything is doing.
    pub fn status(&self) -> Result<StatusReply> {
        match self.ask(&Request::Status)? {
            Reply::Status(status) => Ok(status),
            other => bail!("Asked for the status, the daemon answered {other:?}"),
        }
    }

    /// How one tenant is doing.
    pub fn tenant(&self, name: &str) -> Result<TenantStatus> {
        let tenant = self.status()?.tenants.into_iter().find(|tenant| tenant.name == name);
        tenant.with_context(|| format!("The daemon knows no tenant \"{name}\""))
    }

    /// Waits until a VMM may connect to a tenant: the one before has gone and its memory is clean.
    pub fn wait_ready(&mut self, tenant: &str) -> Result<TenantStatus> {
        self.wait_for("the tenant to be ready", |daemon| Ok(daemon.tenant(tenant)?.state == TenantState::Waiting))?;
        self.tenant(tenant)
    }

    /// Refusals that the operator sees, oldest first.
    pub fn faults(&self, tenant: &str) -> Result<Vec<FaultInfo>> {
        match self.ask(&Request::Faults { tenant: Some(tenant.to_owned()), last: None, since: None })? {
            Reply::Faults(reply) => Ok(reply.faults),
            other => bail!("Asked for faults, the daemon answered {other:?}"),
        }
    }

    /// Runs the operator's command.
    pub fn peergate(&self, args: &[&str]) -> Result<Output> {
        Ok(self.peergate_command(args).output()?)
    }

    /// The operator's command, not run yet.
    pub fn peergate_command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.binaries.peergate);
        command.arg("--socket").arg(self.control_socket()).args(args).stdin(Stdio::null());
        command
    }

    /// Runs the operator's command, which must succeed, and reads its JSON.
    pub fn peergate_json<T: serde::de::DeserializeOwned>(&self, args: &[&str]) -> Result<T> {
        let output = self.peergate(&[&["--json"], args].concat())?;
        let shown = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "peergate {}: {}: {shown}", args.join(" "), output.status);
        serde_json::from_slice(&output.stdout).with_context(|| format!("peergate {} printed no JSON", args.join(" ")))
    }

    /// Waits until `done` says so.
    pub fn wait_for(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let log = Arc::clone(&self.log);
        loop {
            let seen = log.lock().len();
            let outcome = done(self);
            match outcome {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => {
                    return Err(error.context(format!("Waiting for {what}; the daemon said:\n{}", self.log())));
                }
            }
            ensure!(Instant::now() < deadline, "Waited in vain for {what}; the daemon said:\n{}", self.log());
            log.wait(seen, LOOK);
        }
    }

    /// Ends it as an operator would, and checks that it ended well and left nothing behind: no process, no socket, no panic in the log.
    pub fn stop(mut self) -> Result<String> {
        let workers: Vec<u32> = self.status()?.tenants.iter().filter_map(|tenant| tenant.worker_pid).collect();
        let status = self.terminate()?;
        for reader in self.readers.drain(..) {
            // It only reads.
            let _ = reader.join();
        }
        let log = self.log();
        ensure!(status.success(), "The daemon ended with {status}; it said:\n{log}");
        ensure!(!log.contains("panicked"), "The daemon panicked:\n{log}");
        for pid in workers {
            ensure!(!is_running(pid), "Worker {pid} outlives its daemon; the daemon said:\n{log}");
        }
        let left: Vec<_> = fs::read_dir(self.runtime_dir())
            .map(|entries| entries.flatten().map(|entry| entry.file_name()).collect())
            .unwrap_or_default();
        let sockets: Vec<_> = left.iter().filter(|name| name.to_string_lossy().ends_with(".sock")).collect();
        ensure!(sockets.is_empty(), "The daemon left sockets behind: {sockets:?}");
        Ok(log)
    }

    fn terminate(&mut self) -> Result<ExitStatus> {
        let pid = process(self.child.id())?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        kill_process(pid, Signal::TERM)?;
        ensure!(wait_readable(&pidfd, Instant::now() + PATIENCE)?, "The daemon does not end; it said:\n{}", self.log());
        Ok(self.child.wait()?)
    }
}

/// Starts the program on the configuration in `dir`; threads keep what it says in `log`.
fn spawn(
    binaries: &Binaries,
    dir: &Path,
    variables: &[(&'static str, OsString)],
    log: &Arc<Log>,
) -> Result<(Child, Vec<JoinHandle<()>>)> {
    let mut child = Command::new(&binaries.peergated)
        .arg("--config")
        .arg(dir.join(CONFIG))
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("Cannot start {}", binaries.peergated.display()))?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let readers = [out.map(|out| log.read(out)), err.map(|err| log.read(err))].into_iter().flatten().collect();
    Ok((child, readers))
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            // A test failed: workers end with their supervisor.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!("The daemon said:\n{}", self.log());
        }
    }
}

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Daemon").field("pid", &self.child.id()).field("dir", &self.dir.path()).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Log {
    lines: Mutex<Vec<String>>,
    more: Condvar,
}

impl Log {
    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the lines of a stream until it ends.
    fn read(self: &Arc<Self>, stream: impl Read + Send + 'static) -> JoinHandle<()> {
        let log = Arc::clone(self);
        std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(std::io::Result::ok) {
                log.lock().push(line);
                log.more.notify_all();
            }
        })
    }

    /// Waits for a line after the first `seen`, but no longer than `most`.
    fn wait(&self, seen: usize, most: Duration) {
        let lines = self.lock();
        drop(self.more.wait_timeout_while(lines, most, |lines| lines.len() == seen));
    }
}

/// Open descriptors of a process.
pub fn open_files(pid: u32) -> Result<usize> {
    Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

/// Resident memory of a process, in bytes.
pub fn resident(pid: u32) -> Result<u64> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm"))?;
    let pages: u64 = statm.split_whitespace().nth(1).context("statm has fields")?.parse()?;
    Ok(pages * rustix::param::page_size() as u64)
}

/// Whether a process exists and is no zombie.
pub fn is_running(pid: u32) -> bool {
    // Name and state: "7 (name) S"; the name may hold anything, so the state is sought from the end of it.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z') && !rest.starts_with('X'))
}

/// Processes that another one has started and that have not been waited for.
pub fn children(parent: u32) -> Result<Vec<u32>> {
    let stat = |pid: u32| fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    let parent_of = |pid: u32| stat(pid)?.rsplit_once(") ")?.1.split_whitespace().nth(1)?.parse().ok();
    let processes = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    Ok(processes.filter(|pid| parent_of(*pid) == Some(parent)).collect())
}

/// Kills a process as the kernel's out-of-memory killer would.
pub fn kill(pid: u32) -> Result<()> {
    Ok(kill_process(process(pid)?, Signal::KILL)?)
}

fn process(pid: u32) -> Result<Pid> {
    Pid::from_raw(i32::try_from(pid)?).context("A process has a number")
}
