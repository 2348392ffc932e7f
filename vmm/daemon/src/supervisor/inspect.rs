//! How the daemon's processes are fenced in, from the kernel's own files.
//!
//! Children are looked at by number, which is safe: they are reaped here and nowhere else, so no number passes to another process meanwhile.
//! What a process can write there, the names of its threads, is shown without control characters. Not here: judging any of it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use vmm_control::{
    Capabilities, ConfiguredFences, Namespace, ProcessSandbox, ResourceLimits, Role, Root, SandboxReply, ThreadSandbox,
};

use super::Supervisor;
use super::child::Child;

/// Kinds of namespaces, as `/proc/PID/ns` names them.
const KINDS: [&str; 7] = ["user", "mnt", "net", "pid", "ipc", "uts", "cgroup"];
/// Most bytes that are read of a file.
const MOST: u64 = 4 << 20;

/// Looks at every process there is.
pub(crate) fn inspect(supervisor: &Supervisor) -> SandboxReply {
    let daemon = &supervisor.config.daemon;
    let own = std::process::id();
    let child = |role, tenant: Option<&str>, child: Option<&Child>| {
        child.map(|child| (role, tenant.map(str::to_owned), child.pid()))
    };
    let tenants = supervisor.tenants.iter().flat_map(|tenant| {
        let name = Some(tenant.config.name.as_str());
        [child(Role::Keeper, name, tenant.keeper()), child(Role::Worker, name, tenant.worker())]
    });
    let children = [child(Role::Broker, None, supervisor.broker.child())].into_iter().chain(tenants).flatten();
    let shared = namespaces(&directory(own)).unwrap_or_default();
    let look = |(role, tenant, pid)| process(role, tenant, pid, &shared);
    SandboxReply {
        configured: ConfiguredFences {
            namespaces: daemon.namespaces.to_string(),
            landlock: daemon.landlock.to_string(),
            seccomp: daemon.seccomp.to_string(),
        },
        processes: [(Role::Supervisor, None, own)].into_iter().chain(children).map(look).collect(),
    }
}

fn directory(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}

fn process(role: Role, tenant: Option<String>, pid: u32, shared: &BTreeMap<String, u64>) -> ProcessSandbox {
    let dir = directory(pid);
    let mut unreadable = Vec::new();
    let mut note = |what: &str, error: &io::Error| unreadable.push(format!("{what}: {error}"));
    let namespaces = namespaces(&dir).inspect_err(|error| note("namespaces", error)).unwrap_or_default();
    let root = root(&dir).inspect_err(|error| note("root directory", error)).ok();
    let limits = read(&dir.join("limits")).map(|text| limits(&text)).inspect_err(|error| note("limits", error)).ok();
    let threads = threads(&dir).inspect_err(|error| note("threads", error)).unwrap_or_default();
    let namespace = |(kind, id): (String, u64)| {
        let namespace = Namespace { id, shared: shared.get(&kind) == Some(&id) };
        (kind, namespace)
    };
    let namespaces = namespaces.into_iter().map(namespace).collect();
    ProcessSandbox { role, tenant, pid, namespaces, root, limits, threads, unreadable }
}

fn read(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MOST).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the kernel's file has another form than is known")
}

/// The numbers of its namespaces: each is a link to "mnt:[4026531832]".
fn namespaces(dir: &Path) -> io::Result<BTreeMap<String, u64>> {
    let number = |kind: &str| {
        let link = fs::read_link(dir.join("ns").join(kind))?;
        let text = link.to_string_lossy();
        let number = text.strip_prefix(kind).and_then(|rest| rest.strip_prefix(":[")?.strip_suffix(']')?.parse().ok());
        Ok((kind.to_owned(), number.ok_or_else(malformed)?))
    };
    KINDS.into_iter().map(number).collect()
}

fn root(dir: &Path) -> io::Result<Root> {
    let (mounts, read_only) = mounts(&read(&dir.join("mountinfo"))?);
    let empty = fs::read_dir(dir.join("root"))?.next().is_none();
    Ok(Root { mounts, empty, read_only })
}

/// How many file systems there are, and whether the root is read-only. A line is: numbers, device, root within it, mount point, options, ...
fn mounts(text: &str) -> (u32, bool) {
    let place = |line: &str| {
        let mut fields = line.split(' ').skip(4);
        (fields.next() == Some("/")).then(|| fields.next().is_some_and(|options| options.split(',').any(|o| o == "ro")))
    };
    // The last one that was mounted there is the one that is seen.
    let read_only = text.lines().filter_map(place).next_back().unwrap_or(false);
    (u32::try_from(text.lines().count()).unwrap_or(u32::MAX), read_only)
}

/// A line is: name, the limit in force, the highest one, unit.
fn limits(text: &str) -> ResourceLimits {
    let limit = |name: &str| {
        let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
        rest.split_whitespace().next()?.parse().ok()
    };
    ResourceLimits {
        processes: limit("Max processes"),
        descriptors: limit("Max open files"),
        core: limit("Max core file size"),
    }
}

/// Its threads, by how they are fenced in.
fn threads(dir: &Path) -> io::Result<Vec<ThreadSandbox>> {
    let mut groups: Vec<ThreadSandbox> = Vec::new();
    for entry in fs::read_dir(dir.join("task"))? {
        let text = match read(&entry?.path().join("status")) {
            // It has just ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH) => continue,
            text => text?,
        };
        let mut one = thread(&text).ok_or_else(malformed)?;
        let names = std::mem::take(&mut one.names);
        match groups.iter_mut().find(|group| ThreadSandbox { names: Vec::new(), ..(*group).clone() } == one) {
            Some(group) => group.names.extend(names),
            None => groups.push(ThreadSandbox { names, ..one }),
        }
    }
    Ok(groups)
}

const ESRCH: i32 = rustix::io::Errno::SRCH.raw_os_error();

/// From a thread's `status`.
fn thread(text: &str) -> Option<ThreadSandbox> {
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    let set = |name: &str| u64::from_str_radix(field(name)?, 16).ok();
    let number = |name: &str| field(name)?.parse::<u32>().ok();
    // Real, effective, saved, and that for files.
    let effective = |name: &str| field(name)?.split_whitespace().nth(1)?.parse().ok();
    let name = field("Name")?.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    Some(ThreadSandbox {
        names: vec![name],
        uid: effective("Uid")?,
        gid: effective("Gid")?,
        capabilities: Capabilities {
            effective: set("CapEff")?,
            permitted: set("CapPrm")?,
            inheritable: set("CapInh")?,
            bounding: set("CapBnd")?,
            ambient: set("CapAmb")?,
        },
        no_new_privs: number("NoNewPrivs")? != 0,
        seccomp: number("Seccomp")?,
        seccomp_filters: number("Seccomp_filters"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_read_as_they_are_meant() {
        let text = "Name:\ta\u{1b}[2J: b\nUmask:\t0022\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nCapInh:\t0000000000000001\n\
                    CapPrm:\t0000000000000002\nCapEff:\t000001fffeffffff\nCapBnd:\t0000000000000004\nCapAmb:\t0000000000000008\n\
                    NoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t3\n";
        let expected = ThreadSandbox {
            names: vec!["a?[2J: b".into()],
            uid: 2,
            gid: 6,
            capabilities: Capabilities {
                effective: 0x01ff_feff_ffff,
                permitted: 2,
                inheritable: 1,
                bounding: 4,
                ambient: 8,
            },
            no_new_privs: true,
            seccomp: 2,
            seccomp_filters: Some(3),
        };
        assert_eq!(thread(text), Some(expected.clone()));
        let older = text.replace("Seccomp_filters:\t3\n", "");
        assert_eq!(thread(&older), Some(ThreadSandbox { seccomp_filters: None, ..expected }));
        assert_eq!(thread("Name:\tx\n"), None);
        let limited = "Limit                     Soft Limit           Hard Limit           Units\n\
                       Max core file size        0                    0                    bytes\n\
                       Max processes             unlimited            unlimited            processes\n\
                       Max open files            2048                 2049                 files\n";
        assert_eq!(limits(limited), ResourceLimits { processes: None, descriptors: Some(2048), core: Some(0) });
        assert_eq!(mounts("87 42 0:42 / / ro,nosuid - tmpfs none rw,size=4k\n"), (1, true));
        assert_eq!(
            mounts("1 1 0:1 / / ro - x y z\n2 1 8:1 / / rw,relatime - ext4 y ro\n3 2 0:2 / /proc ro - proc p rw\n"),
            (3, false)
        );
    }

    #[test]
    fn a_process_can_look_at_itself() {
        let own = std::process::id();
        let shared = namespaces(&directory(own)).unwrap();
        let seen = process(Role::Supervisor, None, own, &shared);
        assert_eq!((seen.unreadable.as_slice(), seen.namespaces.len()), (&[][..], 7));
        assert!(seen.namespaces.values().all(|namespace| namespace.shared && namespace.id != 0));
        let threads: usize = seen.threads.iter().map(|group| group.names.len()).sum();
        assert!(threads >= 2, "the test's own and the harness's");
        assert!(!seen.root.unwrap().empty);
        let gone = process(Role::Worker, None, u32::MAX, &shared);
        assert_eq!((gone.unreadable.len(), gone.threads.len(), gone.root), (4, 0, None), "{gone:?}");
    }
}
