//! A process's ties: to its parent, and to what is left of it when it dies.
//!
//! Not here: filters of system calls.

use std::io;

use rustix::process::{DumpableBehavior, Signal, getppid, set_dumpable_behavior, set_parent_process_death_signal};

/// The parent was gone before the child could follow it.
#[derive(Debug, thiserror::Error)]
pub enum ParentError {
    /// Another process is the parent now.
    #[error("The process that started this one, {parent}, has ended")]
    Gone {
        /// Who it was.
        parent: u32,
    },
    /// The kernel refused.
    #[error("Cannot follow the parent process")]
    Prctl {
        /// Why.
        source: io::Error,
    },
}

/// Has the kernel kill this process, without asking it, when the thread that started it ends. `parent` is that thread's process.
pub fn follow_parent(parent: u32) -> Result<(), ParentError> {
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| ParentError::Prctl { source: error.into() })?;
    // The parent may have ended before the line above.
    match getppid() {
        Some(now) if u32::try_from(now.as_raw_nonzero().get()) == Ok(parent) => Ok(()),
        _ => Err(ParentError::Gone { parent }),
    }
}

/// Keeps descriptors that this process was started with, beyond the three standard ones, from every process it will start. A descriptor is
/// authority, whoever left it open.
pub fn keep_inherited_descriptors() -> io::Result<()> {
    // SAFETY: marks descriptors close-on-exec, and closes none.
    match unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Forbids core dumps of this process, and attaching to it without privileges: its memory is also a guest's.
pub fn forbid_core_dumps() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(())
}

/// Has the allocator work from its main arena alone. With more of them glibc reads files, now and then, from whatever thread happens to allocate or
/// free: how many processors there are, and the kernel's overcommit mode (glibc 2.36, malloc/arena.c: `arena_get2`, `shrink_heap`). No confined
/// thread may open files. Threads keep their own caches, so the arena's lock is no bottleneck.
pub(crate) fn use_one_arena() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number within the allocator, under the allocator's own lock.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
