//! How processes are fenced in, as text.
//!
//! Not here: JSON, which is the answer itself.

use vmm_control::{ProcessSandbox, Role, SandboxReply, ThreadSandbox};

use super::show::table;

/// `peergate status --sandbox`.
pub(crate) fn text(reply: &SandboxReply) -> String {
    let configured = &reply.configured;
    let mut text = format!(
        "Configured: namespaces {}, landlock {}, seccomp {}\n\n",
        configured.namespaces, configured.landlock, configured.seccomp
    );
    let rows: Vec<_> = reply.processes.iter().flat_map(rows).collect();
    text += &table(
        &[
            "PROCESS",
            "TENANT",
            ">PID",
            "NAMESPACES",
            "ROOT",
            ">FILES",
            ">UID",
            "EFFECTIVE",
            "BOUNDING",
            "NEW PRIVILEGES",
            "SECCOMP",
            "THREADS",
        ],
        &rows,
    );
    for process in &reply.processes {
        for what in &process.unreadable {
            text += &format!("Cannot read of {} {}: {what}\n", role(process.role), process.pid);
        }
    }
    text
}

/// A row for threads that are alike; what concerns the whole process is in the first one.
fn rows(process: &ProcessSandbox) -> Vec<Vec<String>> {
    let root = process.root.map(|root| match (root.empty, root.read_only) {
        (true, true) => "empty".to_owned(),
        (true, false) => "empty, writable".to_owned(),
        (false, _) => format!("{} mounts", root.mounts),
    });
    let descriptors = process.limits.map(|limits| limits.descriptors.map_or("any".to_owned(), |most| most.to_string()));
    let whole = [
        role(process.role).to_owned(),
        process.tenant.clone().unwrap_or_else(|| "-".to_owned()),
        process.pid.to_string(),
        namespaces(process),
        root.unwrap_or_else(|| "?".to_owned()),
        descriptors.unwrap_or_else(|| "?".to_owned()),
    ];
    if process.threads.is_empty() {
        return vec![whole.to_vec()];
    }
    let first = std::iter::once(whole).chain(std::iter::repeat([const { String::new() }; 6]));
    first.zip(&process.threads).map(|(whole, thread)| whole.into_iter().chain(of_thread(thread)).collect()).collect()
}

fn namespaces(process: &ProcessSandbox) -> String {
    let shared: Vec<_> = process.namespaces.iter().filter(|(_, it)| it.shared).map(|(kind, _)| kind.as_str()).collect();
    match (process.namespaces.len(), shared.len()) {
        (0, _) => "?".to_owned(),
        (_, 0) => "own".to_owned(),
        (all, shared) if all == shared => "the host's".to_owned(),
        _ => format!("shared: {}", shared.join(",")),
    }
}

fn of_thread(thread: &ThreadSandbox) -> [String; 6] {
    let set = |set: u64| if set == 0 { "none".to_owned() } else { format!("{set:x}") };
    let seccomp = match (thread.seccomp, thread.seccomp_filters) {
        (0, _) => "off".to_owned(),
        (1, _) => "strict".to_owned(),
        (_, Some(1)) => "1 filter".to_owned(),
        (_, Some(filters)) => format!("{filters} filters"),
        (_, None) => "filters".to_owned(),
    };
    [
        thread.uid.to_string(),
        set(thread.capabilities.effective),
        set(thread.capabilities.bounding),
        if thread.no_new_privs { "never" } else { "possible" }.to_owned(),
        seccomp,
        names(&thread.names),
    ]
}

/// Names, those of one beginning and a number each together: "queue x3".
fn names(names: &[String]) -> String {
    let mut kinds: Vec<(&str, usize)> = Vec::new();
    for name in names {
        let kind = name.trim_end_matches(|c: char| c.is_ascii_digit());
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    let all =
        kinds.iter().map(|(kind, count)| if *count == 1 { (*kind).to_owned() } else { format!("{kind} x{count}") });
    all.collect::<Vec<_>>().join(", ")
}

fn role(role: Role) -> &'static str {
    match role {
        Role::Supervisor => "supervisor",
        Role::Broker => "broker",
        Role::Keeper => "keeper",
        Role::Worker => "worker",
    }
}

#[cfg(test)]
mod tests {
    use vmm_control::{Capabilities, ConfiguredFences, Namespace, ResourceLimits, Root};

    use super::*;

    #[test]
    fn what_is_shared_open_or_unknown_is_seen() {
        let thread = |names: &[&str], filters| ThreadSandbox {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            uid: 65534,
            gid: 65534,
            capabilities: Capabilities::default(),
            no_new_privs: true,
            seccomp: 2,
            seccomp_filters: Some(filters),
        };
        let namespace = |kind: &str, shared| (kind.to_owned(), Namespace { id: 1, shared });
        let all = Capabilities { effective: 0x1ff, bounding: 0x1ff, ..Capabilities::default() };
        let limits = |descriptors| Some(ResourceLimits { processes: None, descriptors, core: Some(0) });
        let reply = SandboxReply {
            configured: ConfiguredFences {
                namespaces: "enforce".into(),
                landlock: "off".into(),
                seccomp: "enforce".into(),
            },
            processes: vec![
                ProcessSandbox {
                    role: Role::Supervisor,
                    tenant: None,
                    pid: 7,
                    namespaces: [namespace("user", true), namespace("mnt", true)].into(),
                    root: Some(Root { mounts: 20, empty: false, read_only: false }),
                    limits: limits(None),
                    threads: vec![ThreadSandbox { uid: 0, capabilities: all, seccomp: 0, ..thread(&["peergated"], 0) }],
                    unreadable: Vec::new(),
                },
                ProcessSandbox {
                    role: Role::Keeper,
                    tenant: Some("vm0".into()),
                    pid: 8,
                    namespaces: [namespace("user", true), namespace("mnt", false)].into(),
                    root: None,
                    limits: None,
                    threads: Vec::new(),
                    unreadable: vec!["threads: gone".into()],
                },
                ProcessSandbox {
                    role: Role::Worker,
                    tenant: Some("vm0".into()),
                    pid: 900,
                    namespaces: [namespace("user", false), namespace("mnt", false)].into(),
                    root: Some(Root { mounts: 1, empty: true, read_only: true }),
                    limits: limits(Some(2048)),
                    threads: vec![thread(&["peergated"], 3), thread(&["serve", "queue2", "queue3"], 4)],
                    unreadable: Vec::new(),
                },
            ],
        };
        let expected = "\
Configured: namespaces enforce, landlock off, seccomp enforce

PROCESS     TENANT  PID  NAMESPACES    ROOT       FILES    UID  EFFECTIVE  BOUNDING  NEW PRIVILEGES  SECCOMP    THREADS
supervisor  -         7  the host's    20 mounts    any      0  1ff        1ff       never           off        peergated
keeper      vm0       8  shared: user  ?              ?
worker      vm0     900  own           empty       2048  65534  none       none      never           3 filters  peergated
                                                         65534  none       none      never           4 filters  serve, queue x2
Cannot read of keeper 8: threads: gone
";
        assert_eq!(text(&reply), expected);
    }
}
