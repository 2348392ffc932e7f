//! A process of the supervisor's and the channel to it.
//!
//! Whatever comes over the channel may be the work of somebody who has taken the process over: a message that makes no sense, or too many of them, end
//! the process. Not here: what messages mean.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use vmm_broker::{Channel, Message};

use super::process::{Process, Starter};

/// Messages that a process may send at once.
const BURST: u32 = 32;
/// Time after which it may send one more.
const REFILL: Duration = Duration::from_millis(20);
/// Characters of a process's reason that are kept.
const MAX_REASON: usize = 400;

/// A process that is talked to.
#[derive(Debug)]
pub(crate) struct Child {
    process: Process,
    started: Instant,
    /// When it is killed if it has not ended, once it was asked to.
    end_by: Option<Instant>,
    /// When it is killed for what it has not done by then.
    expected: Option<(Instant, &'static str)>,
    /// When it may send a whole [`BURST`] again.
    rested_at: Instant,
    /// Why it fails, as it says.
    pub(crate) reason: Option<String>,
    /// `None` once the process has closed its end, or is not listened to any more.
    channel: Option<Channel>,
}

/// What a channel had.
#[derive(Debug)]
pub(crate) enum Heard<M> {
    /// A message with its descriptors; there may be more.
    Message(M, Vec<OwnedFd>),
    /// Nothing, for now.
    Nothing,
    /// The process has closed its end, or has been killed for what it said: there will be nothing more.
    Closed,
}

impl Child {
    /// Starts this program in a role.
    pub(crate) fn start(role: &str, words: &[&str], starter: &Starter) -> anyhow::Result<Self> {
        let (ours, theirs) = Channel::pair()?;
        ours.set_nonblocking()?;
        Ok(Self::new(Process::start(role, words, starter, &theirs)?, ours))
    }

    pub(crate) fn new(process: Process, channel: Channel) -> Self {
        let now = Instant::now();
        Self {
            process,
            started: now,
            end_by: None,
            expected: None,
            rested_at: now,
            reason: None,
            channel: Some(channel),
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// How long it has been there.
    pub(crate) fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Readable once it has ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.pidfd()
    }

    /// Readable when it has said something.
    pub(crate) fn channel(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_ref().map(AsFd::as_fd)
    }

    /// Listens no more, and gives the channel away to be closed.
    pub(crate) fn take_channel(&mut self) -> Option<Channel> {
        self.channel.take()
    }

    /// Tells it something. A process that cannot be told is of no use and is ended.
    pub(crate) fn tell<M: Message>(&mut self, message: &M, fds: &[BorrowedFd<'_>]) -> bool {
        let Some(channel) = &self.channel else {
            self.kill();
            return false;
        };
        let Err(error) = channel.send(message, fds) else { return true };
        tracing::debug!(
            pid = self.pid(),
            "Cannot tell a process what to do; ending it: {:#}",
            anyhow::Error::from(error)
        );
        self.kill();
        false
    }

    /// Takes one message, if there is one. `who` is for the log.
    pub(crate) fn hear<M: Message>(&mut self, who: &str) -> Heard<M> {
        let Some(channel) = &self.channel else { return Heard::Nothing };
        match channel.receive::<M>() {
            Err(error) if error.would_block() => return Heard::Nothing,
            Ok(Some((message, fds))) => {
                if self.may_speak(Instant::now()) {
                    return Heard::Message(message, fds);
                }
                tracing::error!(who, "The process talks too much; ending it");
            }
            // An end at the end of its life, or a process that can no longer be told to end.
            Ok(None) => tracing::debug!(who, "The process has closed its channel"),
            Err(error) => {
                tracing::error!(who, "The process makes no sense; ending it: {:#}", anyhow::Error::from(error));
            }
        }
        self.kill();
        Heard::Closed
    }

    fn may_speak(&mut self, now: Instant) -> bool {
        let next = self.rested_at.max(now) + REFILL;
        let may = next <= now + REFILL * BURST;
        if may {
            self.rested_at = next;
        }
        may
    }

    /// Keeps why it fails, as far as anybody wants to read.
    pub(crate) fn failed(&mut self, reason: &str) {
        self.reason = Some(reason.chars().take(MAX_REASON).collect());
    }

    /// Asks it to end, and gives it so long.
    pub(crate) fn end<M: Message>(&mut self, message: &M, patience: Duration) {
        if self.end_by.is_none() && self.tell(message, &[]) {
            self.end_by = Some(Instant::now() + patience);
        }
    }

    /// Whether it was asked to end.
    pub(crate) fn is_ending(&self) -> bool {
        self.end_by.is_some()
    }

    /// Gives it so long for something, from now on. `failure` says, once it is killed, what it has not done.
    pub(crate) fn expect(&mut self, patience: Duration, failure: &'static str) {
        self.expected = Some((Instant::now() + patience, failure));
    }

    /// It has done what it was expected to do.
    pub(crate) fn has_done(&mut self) {
        self.expected = None;
    }

    /// When it is to be killed.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.end_by.into_iter().chain(self.expected.map(|(at, _)| at)).min()
    }

    /// Kills it if it has not done what it was expected to do, or not ended although it was asked to.
    pub(crate) fn kill_if_due(&mut self, now: Instant) {
        if let Some((_, failure)) = self.expected.take_if(|(at, _)| *at <= now) {
            self.failed(failure);
            self.kill();
        }
        if self.end_by.is_some_and(|at| at <= now) {
            tracing::warn!(pid = self.pid(), "A process does not end; killing it");
            self.end_by = None;
            self.kill();
        }
    }

    /// Ends it now.
    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.process.ended()
    }
}

/// Why a process ended, for the log: what it said itself, quoted because whoever wrote it may be hostile, and what its end hints at.
pub(crate) fn why(reason: Option<&str>, status: ExitStatus) -> (String, &'static str) {
    let hint = match status.signal().and_then(Signal::from_named_raw) {
        Some(Signal::BUS) => "; the VMM has probably truncated its guest's memory",
        Some(Signal::SYS) => "; it made a system call that is on no list, see the kernel's audit log",
        // The kernel lets the first process of a namespace not abort.
        Some(Signal::SEGV) => "; a process that gave itself up ends so, too, see its last line",
        _ => "",
    };
    (reason.map(|reason| format!(", because {reason:?}")).unwrap_or_default(), hint)
}
