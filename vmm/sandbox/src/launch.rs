//! Starting a role of this program, in namespaces of its own.
//!
//! A child is this program again, with other arguments, an empty environment, a process group of its own, one descriptor from its parent as
//! standard input, nothing as standard output, and its parent's standard error. It is killed when the thread that started it ends, from
//! before its first instruction on.
//!
//! It is in new user, mount, network, PID, IPC, UTS and cgroup namespaces. Its user 0 is another user of the host: an unprivileged one if this
//! process is root, else this process's own. Where user namespaces are forbidden and this process is root, the child is that unprivileged
//! user in the other namespaces. What it must be able to do in order to [`confine`](crate::confine()) itself it keeps until it has.
//!
//! Not here: watching and ending it; what it gives up by itself.

mod child;
mod plan;

use std::ffi::{CString, NulError, OsStr};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, fcntl_dupfd_cloexec, retry_on_intr};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};

use crate::Fence;
use child::{FAILURE, Forked, GO, MAPPED, Recipe, Stage};
use plan::Plan;

/// A process that cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The kernel or a security module forbids it.
    #[error(
        "This host lets peergated make no namespaces ({step}); run it as root, or allow unprivileged user namespaces (user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns), or set daemon.namespaces = \"off\""
    )]
    Forbidden {
        /// What it could not do.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The unprivileged user may not execute this program.
    #[error(
        "User {uid} of this host may not run this program; make it readable and executable for everyone, or set daemon.namespaces = \"off\" and run it as another user"
    )]
    Executable {
        /// Which user.
        uid: u32,
        /// Why.
        source: io::Error,
    },
    /// Anything else.
    #[error("Cannot {step} for a process to be started")]
    Step {
        /// What it could not do.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
    /// It ended before it had said why.
    #[error("A process ended while it was started")]
    Died,
    /// An argument cannot be handed over.
    #[error("An argument has a NUL byte")]
    Argument {
        /// Where.
        #[from]
        source: NulError,
    },
}

fn step(step: &'static str) -> impl Fn(Errno) -> LaunchError {
    move |error| LaunchError::Step { step, source: error.into() }
}

/// A process that was started; whoever has it ends and reaps it.
#[derive(Debug)]
pub struct Started {
    /// Its number here.
    pub pid: Pid,
    /// Readable once it has ended.
    pub pidfd: OwnedFd,
}

/// Starts processes, all in the same way.
#[derive(Debug)]
pub struct Launcher {
    plan: Plan,
    /// What its children may write their standard output to.
    null: OwnedFd,
}

impl Launcher {
    /// Finds out, by trying, how this process may fence in its children. An error says what the operator can do.
    ///
    /// To be called before the process confines itself, and while it has one thread.
    pub fn new(namespaces: Fence) -> Result<Self, LaunchError> {
        let null = rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(step("open /dev/null"))?;
        let mut launcher = Self { plan: Plan::Same, null: beyond_standard(null)? };
        let mut first = None;
        for plan in Plan::candidates(namespaces) {
            launcher.plan = plan;
            let tried = launcher.make(&[], launcher.null.as_fd(), false);
            match tried.and_then(|started| started.expect_success(plan)) {
                Ok(()) => return Ok(launcher),
                Err(error) => first = first.or(Some(error)),
            }
        }
        Err(first.unwrap_or(LaunchError::Died))
    }

    /// Starts this program with `args`, `channel` being its standard input. Returns when it is this program that runs.
    ///
    /// Its parent is the calling thread: it is killed when that ends. The process must have no other thread.
    pub fn start(&self, args: &[&str], channel: BorrowedFd<'_>) -> Result<Started, LaunchError> {
        let args = args.iter().map(|arg| CString::new(OsStr::new(arg).as_bytes())).collect::<Result<Vec<_>, _>>()?;
        self.make(&args, channel, true)
    }

    /// Starts a child that executes this program with `args`, or, if not to `execute`, ends at once if it could have.
    fn make(&self, args: &[CString], channel: BorrowedFd<'_>, execute: bool) -> Result<Started, LaunchError> {
        let plan = self.plan;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(step("make a socket pair"))?;
        let (ours, theirs) = (beyond_standard(ours)?, beyond_standard(theirs)?);
        let channel = beyond_standard(channel)?;
        let argv = [c"peergated".as_ptr()].into_iter().chain(args.iter().map(|arg| arg.as_ptr()));
        let recipe = Recipe {
            argv: argv.chain([std::ptr::null()]).collect(),
            parent: ours.as_fd(),
            sync: theirs.as_fd(),
            channel: channel.as_fd(),
            null: self.null.as_fd(),
            plan,
            execute,
        };
        // SAFETY: the child calls `become_role` only, which holds the contract; `argv` points into `args`, which are borrowed until it is done.
        let started = match unsafe { child::fork(plan.flags()) } {
            Err(error) if plan.flags() == 0 => return Err(step("make a process")(error)),
            Err(error) => return Err(LaunchError::Forbidden { step: "make namespaces", source: error.into() }),
            // SAFETY: this is the child, which has one thread.
            Ok(Forked::Child) => unsafe { child::become_role(&recipe) },
            Ok(Forked::Parent(started)) => started,
        };
        drop(recipe);
        drop(theirs);
        let outcome = attend(plan, &started, ours.as_fd());
        if outcome.is_err() {
            started.abandon();
        }
        outcome.map(|()| started)
    }

    /// Whether user namespaces, which were asked for, are forbidden, so that children are in the others only.
    pub fn lacks_user_namespaces(&self) -> bool {
        matches!(self.plan, Plan::Demoted { namespaces: true, .. })
    }
}

impl Started {
    /// Ends it, whatever it does, and waits until it has.
    fn abandon(&self) {
        // It may have ended already.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        let _ = self.wait();
    }

    fn wait(&self) -> Result<Option<i32>, Errno> {
        let status = retry_on_intr(|| waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED))?;
        Ok(status.and_then(|status| status.exit_status()))
    }

    /// For a child that only tries.
    fn expect_success(self, plan: Plan) -> Result<(), LaunchError> {
        match self.wait() {
            Ok(Some(0)) => Ok(()),
            Ok(_) => Err(LaunchError::Died),
            Err(error) => Err(failed(plan, Stage::Wait, error)),
        }
    }
}

/// Has the descriptor lie beyond the standard ones, so that the child can put it where it wants.
fn beyond_standard(fd: impl AsFd) -> Result<OwnedFd, LaunchError> {
    fcntl_dupfd_cloexec(fd, 3).map_err(step("duplicate a descriptor"))
}

/// The parent's half of what [`child::become_role`] does.
fn attend(plan: Plan, child: &Started, sync: BorrowedFd<'_>) -> Result<(), LaunchError> {
    plan.map_identities(child.pid)
        .map_err(|source| LaunchError::Forbidden { step: "map its users into it", source })?;
    let tell = |what: u8| match send(sync, &[what], SendFlags::NOSIGNAL) {
        // It has ended, having said why.
        Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
        Err(error) => Err(failed(plan, Stage::Wait, error)),
    };
    tell(MAPPED)?;
    if !hear(plan, sync)? {
        return Err(LaunchError::Died);
    }
    // It will be killed if this process ends from here on, and this process has not ended yet.
    tell(GO)?;
    match hear(plan, sync)? {
        // Closed by the execution of the program.
        false => Ok(()),
        true => Err(LaunchError::Died),
    }
}

/// Hears the child: true if it is as far as it should be, false if it has closed its end, else the error that it reports.
fn hear(plan: Plan, sync: BorrowedFd<'_>) -> Result<bool, LaunchError> {
    let mut message = [0; FAILURE];
    match retry_on_intr(|| rustix::io::read(sync, &mut message)) {
        Ok(0) | Err(Errno::CONNRESET) => Ok(false),
        Ok(FAILURE) => {
            let [stage, number @ ..] = message;
            Err(failed(plan, Stage::from_raw(stage), Errno::from_raw_os_error(i32::from_ne_bytes(number))))
        }
        Ok(_) => Ok(true),
        Err(error) => Err(failed(plan, Stage::Wait, error)),
    }
}

fn failed(plan: Plan, stage: Stage, error: Errno) -> LaunchError {
    let source = error.into();
    match (stage, plan.outside_uid()) {
        (Stage::Execute, Some(uid)) if error == Errno::ACCESS => LaunchError::Executable { uid, source },
        (Stage::Root, _) => LaunchError::Forbidden { step: stage.name(), source },
        _ => LaunchError::Step { step: stage.name(), source },
    }
}
