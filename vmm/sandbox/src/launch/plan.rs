//! How a child is fenced in before it executes anything: which namespaces, and as whom.
//!
//! Not here: doing it.

use std::fs;
use std::io;

use rustix::process::{Pid, getegid, geteuid};
use rustix::thread::{CapabilitySet, capabilities};

use crate::Fence;

/// User and group without rights to anything, "nobody", whom a child of root becomes.
pub(super) const UNPRIVILEGED: u32 = 65534;

/// All but the user namespace, which is for its own plan.
const OTHERS: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// What needs to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// New namespaces of all kinds; user and group 0 of the new user namespace are these ones of the host.
    Users {
        uid: u32,
        gid: u32,
        /// The child cannot give up its supplementary groups: an unprivileged process could thereby gain what is denied to a group.
        keeps_groups: bool,
    },
    /// The unprivileged user of the host, who keeps some capabilities, perhaps in new namespaces of the other kinds.
    Demoted { namespaces: bool, keeps: CapabilitySet },
    /// As this process is.
    Same,
}

impl Plan {
    /// The plans worth trying, best first.
    pub(super) fn candidates(namespaces: Fence) -> Vec<Self> {
        let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
        let has = capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
        let can_become = uid == 0 && has.contains(CapabilitySet::SETUID | CapabilitySet::SETGID);
        let own = Self::Users { uid, gid, keeps_groups: true };
        let demoted = |namespaces| {
            let keeps =
                CapabilitySet::SETPCAP | if namespaces { CapabilitySet::SYS_ADMIN } else { CapabilitySet::empty() };
            Self::Demoted { namespaces, keeps: keeps & has }
        };
        match (namespaces, can_become) {
            (Fence::Enforce, true) => {
                let other = Self::Users { uid: UNPRIVILEGED, gid: UNPRIVILEGED, keeps_groups: false };
                vec![other, demoted(true), own]
            }
            (Fence::Enforce, false) => vec![own],
            (Fence::Off, true) => vec![demoted(false), Self::Same],
            (Fence::Off, false) => vec![Self::Same],
        }
    }

    /// For `clone3`.
    pub(super) fn flags(self) -> u64 {
        let flags = match self {
            Self::Users { .. } => OTHERS | libc::CLONE_NEWUSER,
            Self::Demoted { namespaces: true, .. } => OTHERS,
            Self::Demoted { namespaces: false, .. } | Self::Same => 0,
        };
        u64::from(flags.cast_unsigned())
    }

    /// The user of the host that the child will be, if another one than now.
    pub(super) fn outside_uid(self) -> Option<u32> {
        match self {
            Self::Users { uid, .. } => Some(uid),
            Self::Demoted { .. } => Some(UNPRIVILEGED),
            Self::Same => None,
        }
    }

    /// Says in the host who the users of the child's namespace are. The child waits for it.
    pub(super) fn map_identities(self, child: Pid) -> io::Result<()> {
        let Self::Users { uid, gid, keeps_groups } = self else { return Ok(()) };
        let write = |file: &str, text: &str| fs::write(format!("/proc/{}/{file}", child.as_raw_nonzero()), text);
        if keeps_groups {
            write("setgroups", "deny")?;
        }
        write("gid_map", &format!("0 {gid} 1"))?;
        write("uid_map", &format!("0 {uid} 1"))
    }
}
