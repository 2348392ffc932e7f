//! One process that the supervisor started: its number, its end, and a way to bring that about.
//!
//! This is the only place that starts processes. Not here: what they do, when there is to be one, how they are fenced in.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use anyhow::Context;
use rustix::process::{
    Resource, Signal, WaitId, WaitIdOptions, WaitIdStatus, getrlimit, pidfd_send_signal, setrlimit, waitid,
};
use vmm_broker::Channel;
use vmm_sandbox::{Launcher, Started};

use crate::config::DaemonConfig;

/// Starts processes of this program, all with the same fences.
#[derive(Debug)]
pub(crate) struct Starter {
    launcher: Launcher,
    /// What every role is told.
    words: Vec<String>,
    /// Other libraries for workers that have GPUs, as words for them: tests have some.
    libraries: Vec<(&'static str, String)>,
}

/// What names such libraries, to the supervisor only, as roles have no environment; and the word for it.
const LIBRARIES: [(&str, &str); 2] =
    [("PEERGATE_CUDA_LIBRARY", "--cuda-library"), ("PEERGATE_NVML_LIBRARY", "--nvml-library")];

impl Starter {
    /// Finds out what this host lets a process be fenced in by. To be called before the supervisor confines itself.
    pub(crate) fn new(daemon: &DaemonConfig) -> anyhow::Result<Self> {
        vmm_sandbox::check_landlock(daemon.landlock)?;
        let launcher = Launcher::new(daemon.namespaces)?;
        if launcher.lacks_user_namespaces() {
            tracing::warn!("User namespaces are forbidden here; processes share this one, as an unprivileged user");
        }
        let mut words: Vec<_> = [
            ("--seccomp", daemon.seccomp.name()),
            ("--namespaces", daemon.namespaces.name()),
            ("--landlock", daemon.landlock.name()),
            ("--log", &daemon.log),
        ]
        .into_iter()
        .flat_map(|(key, value)| [key.to_owned(), value.to_owned()])
        .collect();
        words.extend(daemon.core_dumps.then(|| "--core-dumps".to_owned()));
        let library = |(variable, word)| Some((word, std::env::var(variable).ok()?));
        Ok(Self { launcher, words, libraries: LIBRARIES.into_iter().filter_map(library).collect() })
    }

    /// What a worker that has these GPUs is told of them.
    pub(crate) fn gpu_words<'a>(&'a self, gpus: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
        let mut words: Vec<_> = gpus.flat_map(|gpu| ["--gpu", gpu]).collect();
        if !words.is_empty() {
            words.extend(self.libraries.iter().flat_map(|(word, library)| [*word, library]));
        }
        words
    }
}

/// Raises this process's limit of descriptors as far as it may: each slice is one.
pub(crate) fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "Cannot raise the limit of open files");
    }
}

/// A process, waited for by its supervisor.
#[derive(Debug)]
pub(crate) struct Process {
    started: Started,
    /// Once it is known.
    status: Option<ExitStatus>,
}

impl Process {
    /// Starts this program in a role, with one end of a channel as its standard input. `words` are the role's own arguments.
    pub(crate) fn start(role: &str, words: &[&str], starter: &Starter, channel: &Channel) -> anyhow::Result<Self> {
        let common = starter.words.iter().map(String::as_str);
        let args: Vec<_> = [role].into_iter().chain(words.iter().copied()).chain(common).collect();
        let started = starter.launcher.start(&args, channel.as_fd());
        Ok(Self::new(started.with_context(|| format!("Cannot start a {role} process"))?))
    }

    fn new(started: Started) -> Self {
        Self { started, status: None }
    }

    /// Takes over another program, whose pipes stay open.
    #[cfg(test)]
    pub(crate) fn watch(child: std::process::Child) -> Self {
        use rustix::process::{Pid, PidfdFlags, pidfd_open};
        let pid = Pid::from_child(&child);
        std::mem::forget(child);
        Self::new(Started { pid, pidfd: pidfd_open(pid, PidfdFlags::empty()).unwrap() })
    }

    /// Its number.
    pub(crate) fn pid(&self) -> u32 {
        self.started.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Readable once it has ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.started.pidfd.as_fd()
    }

    /// Ends it now.
    pub(crate) fn kill(&mut self) {
        // One that has been reaped is no more.
        if self.status.is_none()
            && let Err(error) = pidfd_send_signal(self.pidfd(), Signal::KILL)
        {
            tracing::error!(pid = self.pid(), %error, "Cannot end a process");
        }
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = match waitid(WaitId::PidFd(self.pidfd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
                Ok(status) => status.map(|status| exit_status(&status)),
                Err(error) => {
                    tracing::error!(pid = self.pid(), %error, "Cannot learn how a process ended");
                    Some(ExitStatus::from_raw(1 << 8))
                }
            };
        }
        self.status
    }
}

/// The same in the encoding of `wait`.
fn exit_status(status: &WaitIdStatus) -> ExitStatus {
    const DUMPED: i32 = 0x80;
    let raw = match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => (code & 0xff) << 8,
        (None, signal) => signal.unwrap_or(1) | if status.dumped() { DUMPED } else { 0 },
    };
    ExitStatus::from_raw(raw)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn shell(script: &str) -> Process {
        Process::watch(Command::new("sh").args(["-c", script]).stdin(Stdio::null()).spawn().unwrap())
    }

    fn status(mut process: Process) -> ExitStatus {
        loop {
            if let Some(status) = process.ended() {
                assert_eq!(process.ended(), Some(status), "it is remembered");
                process.kill();
                return status;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_end_is_told_as_it_was() {
        assert_eq!(status(shell("exit 0")).code(), Some(0));
        assert_eq!(status(shell("exit 255")).code(), Some(255));
        assert_eq!(status(shell("kill -SEGV $$")).signal(), Some(11));
        let mut endless = shell("while :; do :; done");
        assert_eq!(endless.ended(), None);
        endless.kill();
        assert_eq!(status(endless).signal(), Some(9));
    }
}
