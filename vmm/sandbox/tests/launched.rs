//! Started processes can do what they are for, and nothing else, and end with who started them.
//!
//! Without the test harness: only a process with one thread may start others so, and those are this program again, told by their arguments
//! what to do. As root, everything is tried once more as an ordinary user.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus, waitid};
use rustix::thread::CapabilitySet;
use vmm_sandbox::{Class, ConfineError, Confinement, Fence, Launcher, Mode, Sandbox, confine};

const PATIENCE: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };
const NOBODY: u32 = 65534;

const CASES: &[(&str, fn())] = &[
    ("a_process_has_its_arguments_and_its_channel_and_nothing_more", has_nothing_more),
    ("a_process_in_namespaces_sees_and_reaches_nothing", in_namespaces),
    ("landlock_alone_lets_nothing_be_opened_reached_or_signalled", landlock_alone),
    ("an_empty_root_alone_lets_nothing_be_opened", root_alone),
    ("a_filter_ends_a_process_even_the_first_of_its_namespace", filtered),
    ("a_process_that_is_confined_as_a_supervisor_starts_others_that_confine_themselves", supervised),
    ("a_process_ends_with_the_one_that_started_it_at_whatever_moment_that_ends", follows),
    ("root_without_user_namespaces_uses_the_others_and_an_unprivileged_user", without_user_namespaces),
    ("an_operator_is_told_what_to_do_where_namespaces_are_forbidden", told),
    ("a_process_started_in_another_way_does_not_confine_itself", by_hand),
    ("what_cannot_be_handed_over_is_refused", refused),
];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["probe", namespaces, landlock, parent] => return probe(namespaces, landlock, parent),
        ["filtered", namespaces] => return breaks_the_filter(namespaces),
        ["supervises"] => return supervises(),
        ["waits", namespaces] => return waits(namespaces),
        ["starts", namespaces] => return starts(namespaces),
        ["tries-namespaces"] => return tries_namespaces(),
        ["forbidden"] => return forbidden(),
        ["no-namespaces"] => return no_namespaces(),
        ["fails-to-confine"] => return fails_to_confine(),
        _ => {}
    }
    for (name, case) in
        CASES.iter().filter(|(name, _)| args.iter().all(|arg| arg.starts_with('-') || name.contains(arg)))
    {
        case();
        println!("test {name} ... ok");
    }
    if rustix::process::geteuid().is_root() {
        println!("once more as user {NOBODY}");
        let again = Command::new("/proc/self/exe").args(args).uid(NOBODY).gid(NOBODY).status().unwrap();
        assert!(again.success(), "as user {NOBODY}: {again}");
    }
}

/// Whether this machine lets a process make namespaces at all, asked without what is tested here.
fn can_make_namespaces() -> bool {
    let status = Command::new("/proc/self/exe").arg("tries-namespaces").status().unwrap();
    if !status.success() {
        println!("not tried: this machine lets no namespaces be made");
    }
    status.success()
}

fn tries_namespaces() {
    use rustix::thread::UnshareFlags;
    // SAFETY: this process has one thread.
    let outcome = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS) };
    std::process::exit(i32::from(outcome.is_err()));
}

/// Whether this machine has Landlock, asked without what is tested here.
fn has_landlock() -> bool {
    // SAFETY: asks for the version, with no memory involved.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) };
    if version < 1 {
        println!("not tried: this machine has no Landlock");
    }
    version >= 1
}

/// The fences that can be tried here.
fn namespaces() -> impl Iterator<Item = Fence> + Clone {
    let can = can_make_namespaces();
    Fence::ALL.into_iter().filter(move |fence| can || *fence == Fence::Off)
}

fn landlock() -> Fence {
    if has_landlock() { Fence::Enforce } else { Fence::Off }
}

fn confinement(namespaces: Fence, landlock: Fence) -> Confinement {
    Confinement { namespaces, landlock, core_dumps: false, threads: 4096, descriptors: Some(64) }
}

/// What a process says that is started with `args`, and how it ends.
fn run(launcher: &Launcher, args: &[&str]) -> (BTreeMap<String, String>, WaitIdStatus) {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let started = launcher.start(args, theirs.as_fd()).unwrap();
    drop(theirs);
    let mut said = String::new();
    ours.read_to_string(&mut said).unwrap();
    let status = waitid(WaitId::PidFd(started.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap().unwrap();
    let line = |line: &str| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    (said.lines().filter_map(line).collect(), status)
}

/// What a process of these fences says.
fn probed(namespaces: Fence, landlock: Fence) -> BTreeMap<String, String> {
    let launcher = Launcher::new(namespaces).unwrap();
    let listener = UnixListener::bind_addr(&address(std::process::id())).unwrap();
    let parent = std::process::id().to_string();
    let (said, status) = run(&launcher, &["probe", namespaces.name(), landlock.name(), &parent]);
    assert_eq!(status.exit_status(), Some(0), "{said:#?}");
    drop(listener);
    said
}

/// Of an abstract socket.
fn address(pid: u32) -> SocketAddr {
    SocketAddr::from_abstract_name(format!("peergate-launched-{pid}")).unwrap()
}

/// A process that tries what it should not be able to do, and says what came of it.
fn probe(namespaces: &str, landlock: &str, parent: &str) {
    let channel = std::io::stdin();
    let mut channel = UnixStream::from(channel.as_fd().try_clone_to_owned().unwrap());
    let to = confinement(namespaces.parse().unwrap(), landlock.parse().unwrap());
    let user = |file: &str| fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
    // Where the empty root hides it, later.
    let (uids, groups) = (user("uid_map"), rustix::process::getgroups().unwrap().len());
    let open: Vec<_> = (0..64).filter(|fd| is_open(*fd)).map(|fd| fd.to_string()).collect();
    confine(&to).unwrap();

    let mut say = |name: &str, value: &str| writeln!(channel, "{name}={}", value.trim()).unwrap();
    say("open", &open.join(" "));
    say("environment", &std::env::vars_os().count().to_string());
    say("user", &rustix::process::getuid().as_raw().to_string());
    say("users", &uids.split_whitespace().collect::<Vec<_>>().join(" "));
    say("groups", &groups.to_string());
    say("read a file", &outcome(fs::read("/etc/passwd").map(drop)));
    say("read the root", &outcome(fs::read_dir("/").map(|entries| assert_eq!(entries.count(), 0))));
    say("read processes", &outcome(fs::read("/proc/self/status").map(drop)));
    say("write the root", &outcome(fs::write("/x", b"")));
    let pid: u32 = parent.parse().unwrap();
    say("connect", &outcome(UnixStream::connect_addr(&address(pid)).map(drop)));
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    say("signal the parent", &outcome(rustix::process::test_kill_process(pid).map_err(Into::into)));
    say(
        "mount",
        &outcome(rustix::mount::mount_change("/", rustix::mount::MountPropagationFlags::SHARED).map_err(Into::into)),
    );
    say("trace the parent", &outcome(trace(pid)));
    say("change the user", &outcome(rustix::thread::set_thread_res_uid(uid(1), uid(1), uid(1)).map_err(Into::into)));
    say("raise a limit", &outcome(raise_limit()));
    let sets = rustix::thread::capabilities(None).unwrap();
    say("capabilities", &(sets.effective | sets.permitted | sets.inheritable).bits().to_string());
    let bounding = |n: &u32| {
        let capability = CapabilitySet::from_bits_retain(1 << n);
        rustix::thread::capability_is_in_bounding_set(capability) == Ok(true)
    };
    say("bounding", &(0..64).filter(bounding).count().to_string());
    say("secure bits", &format!("{:#x}", rustix::thread::capabilities_secure_bits().unwrap().bits()));
    say("no new privileges", &rustix::thread::no_new_privs().unwrap().to_string());
    say("dumpable", &format!("{:?}", rustix::process::dumpable_behavior().unwrap()));
}

fn outcome(result: std::io::Result<()>) -> String {
    let Err(error) = result else { return "done".to_owned() };
    let name = match error.raw_os_error() {
        Some(libc::EPERM) => "PERM",
        Some(libc::ENOENT) => "NOENT",
        Some(libc::ESRCH) => "SRCH",
        Some(libc::EACCES) => "ACCESS",
        Some(libc::EINVAL) => "INVAL",
        Some(libc::EROFS) => "ROFS",
        Some(libc::ECONNREFUSED) => "CONNREFUSED",
        _ => return error.to_string(),
    };
    name.to_owned()
}

fn uid(raw: u32) -> rustix::process::Uid {
    rustix::process::Uid::from_raw(raw)
}

fn is_open(fd: i32) -> bool {
    // SAFETY: only asked whether it exists.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    rustix::io::fcntl_getfd(fd).is_ok()
}

fn trace(pid: Pid) -> std::io::Result<()> {
    // SAFETY: a process that is traced stops; nothing of this one's memory is used.
    match unsafe { libc::ptrace(libc::PTRACE_ATTACH, pid.as_raw_nonzero().get(), 0, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn raise_limit() -> std::io::Result<()> {
    let limit = rustix::process::Rlimit { current: Some(65), maximum: Some(65) };
    Ok(rustix::process::setrlimit(rustix::process::Resource::Nofile, limit)?)
}

#[track_caller]
fn expect(said: &BTreeMap<String, String>, expected: &[(&str, &[&str])]) {
    for (name, values) in expected {
        let value = said.get(*name).map_or("nothing", String::as_str);
        assert!(values.contains(&value), "{name}: {value} in place of {values:?}; {said:#?}");
    }
}

fn has_nothing_more() {
    for namespaces in namespaces() {
        // Left open for everybody by whoever started this.
        let left = rustix::io::fcntl_dupfd_cloexec(std::io::stderr(), 32).unwrap();
        rustix::io::fcntl_setfd(&left, rustix::io::FdFlags::empty()).unwrap();
        let said = probed(namespaces, landlock());
        // 3 is the copy that it says so over.
        expect(&said, &[("open", &["0 1 2 3"]), ("environment", &["0"])]);
        drop(left);
    }
}

/// What holds in any case. Without privileges and without a namespace there are no capabilities, but the bounding set stays.
fn gives_up(said: &BTreeMap<String, String>, whole: bool) {
    expect(
        said,
        &[
            ("capabilities", &["0"]),
            ("no new privileges", &["true"]),
            ("dumpable", &["NotDumpable"]),
            ("mount", &["PERM"]),
            ("change the user", &["PERM", "INVAL"]),
            ("raise a limit", &["PERM"]),
            ("trace the parent", &["PERM", "SRCH"]),
        ],
    );
    if whole {
        expect(said, &[("bounding", &["0"]), ("secure bits", &["0xef"])]);
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn in_namespaces() {
    if !can_make_namespaces() || !has_landlock() {
        return;
    }
    let said = probed(Fence::Enforce, Fence::Enforce);
    gives_up(&said, true);
    let (users, groups) = if is_root() {
        (format!("0 {NOBODY} 1"), "0".to_owned())
    } else {
        (
            format!("0 {} 1", rustix::process::geteuid().as_raw()),
            rustix::process::getgroups().unwrap().len().to_string(),
        )
    };
    expect(
        &said,
        &[
            ("users", &[&users]),
            ("groups", &[&groups]),
            ("read a file", &["NOENT"]),
            ("read the root", &["ACCESS"]),
            ("read processes", &["NOENT"]),
            ("write the root", &["ACCESS", "ROFS"]),
            ("connect", &["CONNREFUSED"]),
            ("signal the parent", &["SRCH"]),
        ],
    );
}

fn landlock_alone() {
    if !has_landlock() {
        return;
    }
    let said = probed(Fence::Off, Fence::Enforce);
    gives_up(&said, is_root());
    expect(
        &said,
        &[
            ("read a file", &["ACCESS"]),
            ("read the root", &["ACCESS"]),
            ("read processes", &["ACCESS"]),
            ("write the root", &["ACCESS"]),
            ("connect", &["PERM"]),
            ("signal the parent", &["PERM"]),
        ],
    );
}

fn root_alone() {
    if !can_make_namespaces() {
        return;
    }
    let said = probed(Fence::Enforce, Fence::Off);
    gives_up(&said, true);
    expect(
        &said,
        &[
            ("read a file", &["NOENT"]),
            ("read the root", &["done"]),
            ("read processes", &["NOENT"]),
            ("write the root", &["ROFS"]),
            ("connect", &["CONNREFUSED"]),
        ],
    );
}

fn breaks_the_filter(namespaces: &str) {
    confine(&confinement(namespaces.parse().unwrap(), landlock())).unwrap();
    Sandbox::new(Mode::Enforce, &[Class::Worker], false).unwrap().apply(Class::Worker).unwrap();
    let _ = fs::File::open("/");
}

fn filtered() {
    for namespaces in namespaces() {
        let (_, status) = run(&Launcher::new(namespaces).unwrap(), &["filtered", namespaces.name()]);
        assert_eq!(status.terminating_signal(), Some(libc::SIGSYS), "{status:?}");
    }
}

fn supervises() {
    let launchers: Vec<_> = namespaces().map(|namespaces| (Launcher::new(namespaces).unwrap(), namespaces)).collect();
    Sandbox::new(Mode::Enforce, &[Class::Supervisor], false).unwrap().apply(Class::Supervisor).unwrap();
    for (launcher, namespaces) in &launchers {
        let (_, status) = run(launcher, &["filtered", namespaces.name()]);
        assert_eq!(status.terminating_signal(), Some(libc::SIGSYS), "{status:?}");
    }
}

fn supervised() {
    let status = Command::new("/proc/self/exe").arg("supervises").status().unwrap();
    assert!(status.success(), "{status}");
}

/// A process that waits to be ended.
fn waits(namespaces: &str) {
    confine(&confinement(namespaces.parse().unwrap(), landlock())).unwrap();
    loop {
        std::thread::park();
    }
}

/// A process that starts others without end.
fn starts(namespaces: &str) {
    let launcher = Launcher::new(namespaces.parse().unwrap()).unwrap();
    let mut started = Vec::new();
    loop {
        let (ours, theirs) = UnixStream::pair().unwrap();
        started.push((launcher.start(&["waits", namespaces], theirs.as_fd()).unwrap(), ours));
        println!("{}", started.len());
    }
}

fn follows() {
    for namespaces in namespaces() {
        for round in 0..12 {
            let mut child = Command::new("/proc/self/exe")
                .args(["starts", namespaces.name()])
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            (0..round % 4).for_each(|_| drop(lines.next().unwrap().unwrap()));
            child.kill().unwrap();
            child.wait().unwrap();
            // Every process that came of it holds this open.
            let mut errors = child.stderr.take().unwrap();
            assert_eq!(
                poll(&mut [PollFd::new(&errors, PollFlags::HUP)], Some(&PATIENCE)).unwrap(),
                1,
                "someone is left"
            );
            let mut said = String::new();
            errors.read_to_string(&mut said).unwrap();
            assert_eq!(said, "");
        }
    }
}

/// A process that is root in a user namespace that has no others in it, once its parent has said whose numbers count there.
fn forbidden() {
    // SAFETY: this process has one thread.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWUSER) }.unwrap();
    println!("made");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    fs::write("/proc/sys/user/max_user_namespaces", "0").unwrap();
    let launcher = Launcher::new(Fence::Enforce).unwrap();
    assert!(launcher.lacks_user_namespaces());
    let (said, status) = run(&launcher, &["probe", "enforce", "enforce", "1"]);
    assert_eq!(status.exit_status(), Some(0), "{said:#?}");
    gives_up(&said, true);
    expect(
        &said,
        &[
            ("user", &["65534"]),
            ("groups", &["0"]),
            ("read a file", &["NOENT"]),
            ("read the root", &["ACCESS"]),
            ("connect", &["CONNREFUSED"]),
        ],
    );
}

fn without_user_namespaces() {
    if !can_make_namespaces() {
        return;
    }
    if !is_root() {
        return println!("not tried: only root can do without user namespaces");
    }
    let mut child =
        Command::new("/proc/self/exe").arg("forbidden").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    for map in ["gid_map", "uid_map"] {
        fs::write(format!("/proc/{}/{map}", child.id()), "0 0 65535").unwrap();
    }
    drop(child.stdin.take());
    let status = child.wait().unwrap();
    assert!(status.success(), "{status}");
}

fn no_namespaces() {
    // As above, but with no right to be anybody else.
    // SAFETY: this process has one thread.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWUSER) }.unwrap();
    rustix::thread::set_capabilities(
        None,
        rustix::thread::CapabilitySets {
            effective: CapabilitySet::SYS_RESOURCE,
            permitted: CapabilitySet::SYS_RESOURCE,
            inheritable: CapabilitySet::empty(),
        },
    )
    .unwrap();
    fs::write("/proc/sys/user/max_user_namespaces", "0").unwrap();
    let error = Launcher::new(Fence::Enforce).unwrap_err().to_string();
    assert!(
        error.starts_with("This host lets peergated make no namespaces (make namespaces); run it as root, or"),
        "{error}"
    );
    assert!(error.ends_with("or set daemon.namespaces = \"off\""), "{error}");
    Launcher::new(Fence::Off).unwrap();
}

fn told() {
    if !can_make_namespaces() {
        return;
    }
    let status = Command::new("/proc/self/exe").arg("no-namespaces").status().unwrap();
    assert!(status.success(), "{status}");
}

fn fails_to_confine() {
    let error = confine(&confinement(Fence::Off, Fence::Off)).unwrap_err();
    assert!(matches!(error, ConfineError::ByHand), "{error}");
}

fn by_hand() {
    assert!(Command::new("/proc/self/exe").arg("fails-to-confine").status().unwrap().success());
}

fn refused() {
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let error = Launcher::new(Fence::Off).unwrap().start(&["a\0b"], theirs.as_fd()).unwrap_err();
    assert_eq!(error.to_string(), "An argument has a NUL byte");
}
