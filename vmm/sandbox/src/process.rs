//! What a process leaves to others: descriptors, a core dump, the processor.
//!
//! Not here: filters of system calls, what else it gives up.

use std::io;

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

/// The shortest turn that the kernel gives, in nanoseconds.
const SHORT_TURN: u64 = 100_000;

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

/// Asks the kernel for turns of a tenth of a millisecond on the processor, for the calling thread and those that it will start, in place of some
/// milliseconds: a thread that mostly waits then runs soon after it is woken, also beside others that never wait. Its share of the processor stays
/// the same. Kernels before 6.12 take no notice (`kernel/sched/syscalls.c`: `__setparam_fair`, which also has the bounds, 0.1 to 100 ms).
pub fn take_short_turns() -> io::Result<()> {
    // SAFETY: all fields are plain numbers.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    attributes.size = libc::c_uint::try_from(size_of_val(&attributes)).unwrap_or(0);
    attributes.sched_policy = libc::SCHED_OTHER.cast_unsigned();
    attributes.sched_runtime = SHORT_TURN;
    // SAFETY: the kernel reads `size` bytes of the structure and writes none, but for `size` itself when it refuses.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw mut attributes, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
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
