//! The child between its making and the program that it executes.
//!
//! It is a copy of a process that may be in the middle of anything, so it does nothing but system calls: no allocation, no lock, no unwinding.
//! What it needs was made before. A failure goes to the parent as a stage and an error number, over a socket that the execution closes.
//!
//! Not here: the parent's half.

use std::convert::Infallible;
use std::ffi::c_char;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::fs::{Access, access};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Gid, Pid, Signal, Uid, set_parent_process_death_signal, setpgid};
use rustix::stdio::{dup2_stdin, dup2_stdout};
use rustix::thread::{
    CapabilitySet, CapabilitySets, configure_capability_in_ambient_set, set_capabilities, set_keep_capabilities,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

use super::Started;
use super::plan::{Plan, UNPRIVILEGED};
use crate::root::enter_empty_root;

/// The parent has said who the child is.
pub(super) const MAPPED: u8 = 1;
/// The child follows its parent now.
const FOLLOWS: u8 = 2;
/// The parent lives.
pub(super) const GO: u8 = 3;
/// Length of a message that tells of a failure: a stage and an error number. The others have one byte.
pub(super) const FAILURE: usize = 5;

const SELF: &std::ffi::CStr = c"/proc/self/exe";

/// Where it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Stage {
    Group,
    Wait,
    Groups,
    Identity,
    Capabilities,
    Follow,
    Descriptors,
    Execute,
    Root,
}

impl Stage {
    const ALL: [Self; 9] = [
        Self::Group,
        Self::Wait,
        Self::Groups,
        Self::Identity,
        Self::Capabilities,
        Self::Follow,
        Self::Descriptors,
        Self::Execute,
        Self::Root,
    ];

    pub(super) fn from_raw(raw: u8) -> Self {
        Self::ALL.into_iter().find(|stage| *stage as u8 == raw).unwrap_or(Self::Wait)
    }

    /// Completes "Cannot".
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Group => "make a process group",
            Self::Wait => "talk to the other process",
            Self::Groups => "give up the supplementary groups",
            Self::Identity => "change the user",
            Self::Capabilities => "keep capabilities",
            Self::Follow => "arrange the end together with the parent",
            Self::Descriptors => "arrange the descriptors",
            Self::Execute => "execute /proc/self/exe",
            Self::Root => "make an empty root directory",
        }
    }
}

/// All that a child needs.
pub(super) struct Recipe<'a> {
    /// Arguments, and a null pointer.
    pub(super) argv: Vec<*const c_char>,
    /// The parent's end of `sync`.
    pub(super) parent: BorrowedFd<'a>,
    pub(super) sync: BorrowedFd<'a>,
    pub(super) channel: BorrowedFd<'a>,
    pub(super) null: BorrowedFd<'a>,
    pub(super) plan: Plan,
    pub(super) execute: bool,
}

/// Who one is after [`fork`].
pub(super) enum Forked {
    Parent(Started),
    Child,
}

/// Makes a process in the namespaces of `flags`.
///
/// # Safety
///
/// The child is a copy of the calling thread alone, and whatever the other threads had locked stays locked in it: it may call only what is
/// async-signal-safe.
pub(super) unsafe fn fork(flags: u64) -> Result<Forked, Errno> {
    let mut pidfd: RawFd = -1;
    // SAFETY: all of it is numbers, of which 0 says "none".
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = flags | u64::from(libc::CLONE_PIDFD.cast_unsigned());
    args.pidfd = (&raw mut pidfd).addr() as u64;
    args.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    // SAFETY: without CLONE_VM the child goes on with a copy of this memory on a copy of this stack; the kernel writes to `pidfd` only.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of_val(&args)) };
    match i32::try_from(pid).ok().filter(|pid| *pid >= 0).map(Pid::from_raw) {
        None => Err(last_error()),
        Some(None) => Ok(Forked::Child),
        Some(Some(pid)) => {
            // SAFETY: the kernel just made this descriptor, and nobody else has it.
            Ok(Forked::Parent(Started { pid, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } }))
        }
    }
}

/// What a failed call of the C library left.
fn last_error() -> Errno {
    // SAFETY: always succeeds; the place belongs to this thread.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    Errno::from_raw_os_error(unsafe { *place })
}

/// Goes from a copy of the parent to the program of `recipe`.
///
/// # Safety
///
/// To be called in the child of [`fork`], whose only thread it is.
pub(super) unsafe fn become_role(recipe: &Recipe<'_>) -> ! {
    // SAFETY: as of this function.
    let (stage, error) = match unsafe { prepare(recipe) } {
        Ok(()) => (Stage::Wait, 0),
        Err((stage, error)) => (stage, error.raw_os_error()),
    };
    if error != 0 {
        let [a, b, c, d] = error.to_ne_bytes();
        // The parent sees the end in any case.
        let _ = rustix::io::write(recipe.sync, &[stage as u8, a, b, c, d]);
    }
    // SAFETY: ends the process, and runs nothing of it before.
    unsafe { libc::_exit(i32::from(error != 0)) }
}
type Failure = (Stage, Errno);

fn at(stage: Stage) -> impl Fn(Errno) -> Failure {
    move |error| (stage, error)
}

/// # Safety
///
/// As of [`become_role`].
unsafe fn prepare(recipe: &Recipe<'_>) -> Result<(), Failure> {
    // Otherwise this process would not see its parent's end.
    // SAFETY: a copy of the parent's descriptor, which nobody uses in this process.
    unsafe { libc::close(recipe.parent.as_raw_fd()) };
    // The terminal's signals are for the parent, which then ends its children in good order.
    setpgid(None, None).map_err(at(Stage::Group))?;
    wait_for(MAPPED, recipe)?;
    match recipe.plan {
        Plan::Users { keeps_groups, .. } => become_user(0, !keeps_groups)?,
        Plan::Demoted { keeps, .. } => demote(keeps)?,
        Plan::Same => {}
    }
    follow_parent(recipe)?;
    if !recipe.execute {
        access(SELF, Access::EXEC_OK).map_err(at(Stage::Execute))?;
        return if recipe.plan.flags() == 0 { Ok(()) } else { enter_empty_root().map_err(at(Stage::Root)) };
    }
    dup2_stdin(recipe.channel).map_err(at(Stage::Descriptors))?;
    dup2_stdout(recipe.null).map_err(at(Stage::Descriptors))?;
    close_on_execution().map_err(at(Stage::Descriptors))?;
    // SAFETY: as of this function.
    let Err(error) = unsafe { execute(&recipe.argv) };
    Err((Stage::Execute, error))
}

fn wait_for(what: u8, recipe: &Recipe<'_>) -> Result<(), Failure> {
    let mut message = [0];
    match retry_on_intr(|| rustix::io::read(recipe.sync, &mut message)) {
        Ok(1) if message == [what] => Ok(()),
        Ok(_) => Err((Stage::Wait, Errno::PIPE)),
        Err(error) => Err((Stage::Wait, error)),
    }
}

fn become_user(id: u32, clears_groups: bool) -> Result<(), Failure> {
    if clears_groups {
        set_thread_groups(&[]).map_err(at(Stage::Groups))?;
    }
    let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
    set_thread_res_gid(gid, gid, gid).map_err(at(Stage::Identity))?;
    set_thread_res_uid(uid, uid, uid).map_err(at(Stage::Identity))
}

/// Becomes the unprivileged user, and has `keeps` survive the execution of a program.
fn demote(keeps: CapabilitySet) -> Result<(), Failure> {
    set_keep_capabilities(true).map_err(at(Stage::Capabilities))?;
    become_user(UNPRIVILEGED, true)?;
    let sets = CapabilitySets { effective: keeps, permitted: keeps, inheritable: keeps };
    set_capabilities(None, sets).map_err(at(Stage::Capabilities))?;
    for capability in keeps {
        configure_capability_in_ambient_set(capability, true).map_err(at(Stage::Capabilities))?;
    }
    Ok(())
}

/// Has the kernel kill this process when its parent ends. Comes after the last change of users, which would undo it. The parent answers
/// after that, so it had not ended before.
fn follow_parent(recipe: &Recipe<'_>) -> Result<(), Failure> {
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(at(Stage::Follow))?;
    rustix::io::write(recipe.sync, &[FOLLOWS]).map_err(at(Stage::Wait))?;
    wait_for(GO, recipe)
}

fn close_on_execution() -> Result<(), Errno> {
    // SAFETY: marks descriptors, and closes none.
    match unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) } {
        0 => Ok(()),
        _ => Err(last_error()),
    }
}

/// # Safety
///
/// `argv` ends with a null pointer; the others point to strings.
unsafe fn execute(argv: &[*const c_char]) -> Result<Infallible, Errno> {
    let environment = [std::ptr::null()];
    // SAFETY: as of this function.
    unsafe { libc::execve(SELF.as_ptr(), argv.as_ptr(), environment.as_ptr()) };
    Err(last_error())
}
