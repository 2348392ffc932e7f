//! A `peergated` of our own, in a folder of its own, ended with the caller.
//!
//! Not here: what it serves.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::Row;
use super::programs::Programs;

/// How long the daemon may take to be ready, and to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// The head of the daemon's own table.
const DAEMON: &str = "\n[daemon]\n";

/// What the log says of a worker that was killed.
const KILLED: &str = "The worker has failed: signal: 9";

/// A running daemon. Dropping it kills it.
pub struct Daemon {
    child: Child,
    programs: Programs,
    dir: TempDir,
    log: Arc<Mutex<Vec<String>>>,
    ended: Receiver<()>,
    /// Workers that were killed.
    killed: usize,
}

impl Daemon {
    /// Starts `peergated` on a configuration given as text, in a runtime directory of its own, and waits until it says that it is ready.
    ///
    /// # Errors
    /// When it does not start; the message has its log.
    pub fn start_with(programs: &Programs, config: &str) -> Result<Self> {
        let dir = TempDir::with_prefix("peergate-").context("Cannot create a temporary folder")?;
        let file = dir.path().join("peergated.toml");
        let run = dir.path().join("run");
        fs::write(&file, with_runtime_dir(config, &run)).context("Cannot write the configuration")?;
        let mut child = programs
            .command("peergated")
            .arg("--config")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("Cannot start peergated")?;
        let log = Arc::new(Mutex::new(Vec::new()));
        let (ended_sender, ended) = channel();
        let (ready_sender, ready) = channel();
        if let (Some(output), Some(complaints)) = (child.stdout.take(), child.stderr.take()) {
            let shared = Arc::clone(&log);
            thread::spawn(move || {
                for line in BufReader::new(complaints).lines().map_while(Result::ok) {
                    shared.lock().map(|mut log| log.push(line)).unwrap_or_default();
                }
                let _ = ended_sender.send(());
            });
            thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if line.contains("ready") {
                        let _ = ready_sender.send(());
                    }
                }
            });
        }
        let daemon = Self { child, programs: programs.clone(), dir, log, ended, killed: 0 };
        if ready.recv_timeout(PATIENCE).is_err() {
            bail!("peergated did not become ready; its log:\n{}", daemon.log().join("\n"));
        }
        Ok(daemon)
    }

    /// Its runtime directory.
    #[must_use]
    pub fn runtime_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Where a tenant's VMM connects.
    #[must_use]
    pub fn tenant_socket(&self, tenant: &str) -> PathBuf {
        self.runtime_dir().join(format!("{tenant}.sock"))
    }

    /// A folder for the caller's files; removed with the daemon.
    #[must_use]
    pub fn scratch(&self) -> &Path {
        self.dir.path()
    }

    /// Log lines so far.
    #[must_use]
    pub fn log(&self) -> Vec<String> {
        self.log.lock().map(|log| log.clone()).unwrap_or_default()
    }

    /// What `peergate WORDS --json` answers.
    ///
    /// # Errors
    /// When it fails or prints no JSON.
    pub fn ask(&self, words: &[&str]) -> Result<Value> {
        let mut command: Command = self.programs.command("peergate");
        command.arg("--socket").arg(self.runtime_dir().join("control.sock")).arg("--json").args(words);
        let output = command.output().context("Cannot run peergate")?;
        if !output.status.success() {
            bail!("peergate {} failed: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        serde_json::from_slice(&output.stdout).context("peergate printed no JSON")
    }

    /// What `peergate status` says of a tenant.
    ///
    /// # Errors
    /// As for [`Daemon::ask`]; when there is no such tenant.
    pub fn tenant(&self, name: &str) -> Result<Value> {
        let status = self.ask(&["status"])?;
        let tenants = status["tenants"].as_array().context("peergate status has no tenants")?;
        let found = tenants.iter().find(|tenant| tenant["name"] == name);
        found.cloned().with_context(|| format!("peergate status has no tenant {name}"))
    }

    /// A tenant's worker.
    ///
    /// # Errors
    /// When it has none.
    pub fn worker(&self, tenant: &str) -> Result<Pid> {
        let id = self.tenant(tenant)?["worker_pid"].as_u64().and_then(|id| i32::try_from(id).ok());
        id.and_then(Pid::from_raw).with_context(|| format!("Tenant {tenant} has no worker"))
    }

    /// Kills a tenant's worker.
    ///
    /// # Errors
    /// When it has none.
    pub fn kill_worker(&mut self, tenant: &str) -> Result<()> {
        kill_process(self.worker(tenant)?, Signal::KILL)
            .with_context(|| format!("Cannot kill tenant {tenant}'s worker"))?;
        self.killed += 1;
        Ok(())
    }

    /// Ends it as an operator would, and says whether anything is left: rows about its end.
    ///
    /// # Errors
    /// When it cannot be told to end.
    pub fn stop(mut self) -> Result<Vec<Row>> {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("peergated has no process id")?;
        kill_process(id, Signal::TERM).context("Cannot end peergated")?;
        // Its workers hold its standard error too, so the end of the stream is the end of them all.
        let all_ended = self.ended.recv_timeout(PATIENCE).is_ok();
        let status = if all_ended {
            self.child.wait().context("Cannot wait for peergated")?.to_string()
        } else {
            "still running".into()
        };
        let left: Vec<String> = fs::read_dir(self.runtime_dir())
            .map(|entries| entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
            .unwrap_or_default();
        let left = if left.is_empty() { "nothing".to_owned() } else { left.join(", ") };
        let bad: Vec<String> =
            self.log().into_iter().filter(|line| line.contains("panicked") || line.contains(" ERROR ")).collect();
        let (told, bad): (Vec<_>, Vec<_>) = bad.into_iter().partition(|line| line.contains(KILLED));
        let complaints = |killed: usize, others: &[String]| match (killed, others) {
            (0, []) => "none".to_owned(),
            (killed, []) => format!("{killed} workers killed"),
            (killed, others) => format!("{killed} workers killed; {}", others.join("; ")),
        };
        Ok(vec![
            Row::new("daemon/ends-on-sigterm", "exit status: 0", status),
            Row::new("daemon/leaves-behind", "nothing", left),
            Row::new("daemon/errors-logged", complaints(self.killed, &[]), complaints(told.len(), &bad)),
        ])
    }
}

/// The configuration with a runtime directory, in its `[daemon]` table if it has one.
fn with_runtime_dir(config: &str, dir: &Path) -> String {
    let config = format!("\n{config}");
    let (before, after) = config.split_once(DAEMON).unwrap_or(("", &config));
    format!("{before}{DAEMON}runtime_dir = {:?}\n{after}", dir.display().to_string())
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Both fail only for a process that has already been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_dir_goes_into_the_daemons_table_wherever_it_is() {
        for config in
            ["", "[[device]]\nname = \"[daemon]\"\n", "# Why\n[daemon]\nlog = \"debug\"\n[x]\n", "[x]\n\n[daemon]\n"]
        {
            let mut expected: toml::Table = config.parse().unwrap();
            let daemon = expected.entry("daemon").or_insert_with(|| toml::Table::new().into());
            daemon.as_table_mut().unwrap().insert("runtime_dir".into(), "/run/x".into());
            assert_eq!(with_runtime_dir(config, Path::new("/run/x")).parse::<toml::Table>().unwrap(), expected);
        }
    }
}
