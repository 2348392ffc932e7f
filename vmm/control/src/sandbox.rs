//! How processes are fenced in: the numbers of the kernel's own files, by thread.
//!
//! Not here: reading them, judging them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// How the daemon's processes are fenced in, as the kernel says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxReply {
    /// What the configuration says. Whether Landlock is in force cannot be seen from outside a process; one that cannot apply it does not run.
    pub configured: ConfiguredFences,
    /// The supervisor first.
    pub processes: Vec<ProcessSandbox>,
}

/// What the configuration says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfiguredFences {
    /// `enforce` or `off`.
    pub namespaces: String,
    /// `enforce` or `off`.
    pub landlock: String,
    /// `enforce`, `log` or `off`.
    pub seccomp: String,
}

/// What a process is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Starts the others and answers the operator.
    Supervisor,
    /// Makes the memory of slices.
    Broker,
    /// Keeps a tenant's VMM while its workers change.
    Keeper,
    /// Serves a tenant's device.
    Worker,
}

/// How one process is fenced in. What could not be read is absent, and why stands in `unreadable`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessSandbox {
    /// What it is for.
    pub role: Role,
    /// Whom it serves, if it serves one tenant.
    pub tenant: Option<String>,
    /// Its number on the host.
    pub pid: u32,
    /// Its namespaces, by kind as in `/proc/PID/ns`.
    pub namespaces: BTreeMap<String, Namespace>,
    /// Its root directory.
    pub root: Option<Root>,
    /// What it may use.
    pub limits: Option<ResourceLimits>,
    /// Its threads, those together that are fenced in alike.
    pub threads: Vec<ThreadSandbox>,
    /// What could not be read, and why.
    pub unreadable: Vec<String>,
}

/// A namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Namespace {
    /// Number of the namespace on this host.
    pub id: u64,
    /// Whether the supervisor is in it, too.
    pub shared: bool,
}

/// What a process sees of file systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    /// File systems that are mounted.
    pub mounts: u32,
    /// Whether its root directory has no entry.
    pub empty: bool,
    /// Whether its root directory is read-only.
    pub read_only: bool,
}

/// What a process may use; absent is without limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceLimits {
    /// Processes and threads of its user.
    pub processes: Option<u64>,
    /// Open descriptors.
    pub descriptors: Option<u64>,
    /// Bytes of a core dump.
    pub core: Option<u64>,
}

/// How threads are fenced in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadSandbox {
    /// The names that they gave themselves, one a thread.
    pub names: Vec<String>,
    /// The host's user whose rights they have.
    pub uid: u32,
    /// The host's group whose rights they have.
    pub gid: u32,
    /// Capabilities by set, each one bit.
    pub capabilities: Capabilities,
    /// Whether they can gain no privileges by executing a program.
    pub no_new_privs: bool,
    /// 0 without seccomp, 1 strict, 2 by filters.
    pub seccomp: u32,
    /// Filters of system calls, the inherited ones included; absent with an old kernel.
    pub seccomp_filters: Option<u32>,
}

/// Sets of capabilities, each one bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// That are in force.
    pub effective: u64,
    /// That may be put in force.
    pub permitted: u64,
    /// That executed programs may inherit.
    pub inheritable: u64,
    /// That executed programs may have at most.
    pub bounding: u64,
    /// That executed programs have.
    pub ambient: u64,
}
