//! One process that the supervisor started: its number, its end, and a way to bring that about.
//!
//! This is the only place that starts processes. Not here: what they do, when there is to be one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::Context;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use vmm_broker::Channel;

use crate::config::DaemonConfig;

/// A process, waited for by its supervisor.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pidfd: OwnedFd,
}

impl Process {
    /// Starts this program in a role, with one end of a channel as its standard input. `words` are the role's own arguments.
    pub(crate) fn start(role: &str, words: &[&str], daemon: &DaemonConfig, channel: Channel) -> anyhow::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("peergated")
            .arg(role)
            .args(words)
            .args(["--seccomp", daemon.seccomp.name(), "--log", &daemon.log])
            .args(["--parent", &std::process::id().to_string()])
            .args(daemon.core_dumps.then_some("--core-dumps"))
            .env_clear()
            .stdin(Stdio::from(channel.into_fd()))
            .stdout(Stdio::null())
            // The terminal's signals are for the supervisor, which then ends the others in good order.
            .process_group(0);
        let child = command.spawn().with_context(|| format!("Cannot start a {role} process"))?;
        Self::watch(child)
    }

    /// Takes a child over. It does not stay if it cannot be watched.
    pub(crate) fn watch(mut child: Child) -> anyhow::Result<Self> {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let opened = pid.context("A process has no number").and_then(|pid| Ok(pidfd_open(pid, PidfdFlags::empty())?));
        match opened {
            Ok(pidfd) => Ok(Self { child, pidfd }),
            Err(error) => {
                child.kill().and_then(|()| child.wait()).context("Cannot end a process")?;
                Err(error.context("Cannot watch a process"))
            }
        }
    }

    /// Its number.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Readable once it has ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Ends it now.
    pub(crate) fn kill(&mut self) {
        if let Err(error) = self.child.kill() {
            tracing::error!(pid = self.child.id(), %error, "Cannot end a process");
        }
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        match self.child.try_wait() {
            Ok(status) => status,
            Err(error) => {
                tracing::error!(pid = self.child.id(), %error, "Cannot learn how a process ended");
                Some(ExitStatus::from_raw(1 << 8))
            }
        }
    }
}
