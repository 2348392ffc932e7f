//! What a process leaves to others: descriptors, and a core dump.
//!
//! Not here: filters of system calls, what else it gives up.

use std::io;

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

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
