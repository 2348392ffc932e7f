//! A root directory with nothing in it.
//!
//! Not here: the mount namespace that it needs.

use std::ffi::CStr;

use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount};
use rustix::process::{chdir, pivot_root};

/// A directory that every host has. What is mounted on it here is seen in this namespace only, until it is the root.
const PLACE: &CStr = c"/proc";

/// Has /proc tell of the processes of this process's own namespace, by the numbers that they have there.
pub(crate) fn mount_own_proc() -> Result<(), Errno> {
    mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount(c"proc", c"/proc", c"proc", flags, c"")
}

/// Makes an empty, read-only directory the root of this mount namespace and its only file system. System calls only, without allocation.
pub(crate) fn enter_empty_root() -> Result<(), Errno> {
    // Mounts and their ends are not to be seen outside.
    mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let flags =
        MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOSYMFOLLOW;
    mount(c"none", PLACE, c"tmpfs", flags, c"size=4k,nr_inodes=1,mode=0555")?;
    chdir(PLACE)?;
    // The old root lies on top of the new one then, and goes from there with all that is mounted in it.
    pivot_root(c".", c".")?;
    unmount(c".", UnmountFlags::DETACH)?;
    chdir(c"/")
}
