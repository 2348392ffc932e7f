//! Confined threads do their work, and nothing else.
//!
//! Each case runs in a process of its own: this test binary again, told by a variable what to do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use rustix::process::{DumpableBehavior, Pid, Signal, dumpable_behavior, kill_process};
use vmm_sandbox::{Class, Mode, Sandbox, Signals, process};

const CASE: &str = "PEERGATE_SANDBOX_CASE";

/// Runs `case` of [`cases`] confined to `class` in a process of its own.
fn confined(class: Class, mode: Mode, case: &str) -> ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(CASE, format!("{} {mode} {case}", class.name()))
        .env_remove("RUST_BACKTRACE")
        .output()
        .unwrap()
        .status
}

#[test]
fn child() {
    let Ok(case) = std::env::var(CASE) else { return };
    let [class, mode, case] = *case.split(' ').collect::<Vec<_>>() else { panic!("{case}") };
    let class = Class::ALL.into_iter().find(|known| known.name() == class).unwrap();
    let sandbox = Sandbox::new(mode.parse().unwrap(), &Class::ALL, false).unwrap();
    cases(case, class, &sandbox);
}

fn cases(case: &str, class: Class, sandbox: &Sandbox) {
    match case {
        "work" => work(class, &[class], sandbox),
        "panic" => {
            sandbox.apply(class).unwrap();
            assert!(std::panic::catch_unwind(|| panic!("on purpose")).is_err());
        }
        "abort" => {
            sandbox.apply(class).unwrap();
            std::process::abort();
        }
        "tighten" => tighten(class, sandbox),
        "open" => attempt(class, sandbox, || drop(std::fs::File::open("/dev/null"))),
        "socket" => attempt(class, sandbox, || drop(UnixStream::connect("/nowhere"))),
        "inet" => attempt(class, sandbox, || drop(std::net::UdpSocket::bind("127.0.0.1:0"))),
        "process" => attempt(class, sandbox, || drop(Command::new("/bin/true").status())),
        "thread" => attempt(class, sandbox, || drop(std::thread::spawn(|| ()).join())),
        "execute" => attempt(class, sandbox, || assert!(anonymous(ProtFlags::READ | ProtFlags::EXEC).is_ok())),
        "kill" => attempt(class, sandbox, || assert!(kill_process(Pid::INIT, Signal::TERM).is_ok())),
        "abort-another" => attempt(class, sandbox, abort_another),
        "gpu" => attempt(class, sandbox, ask_gpu),
        "with-gpus" => {
            let sandbox = Sandbox::new(Mode::Enforce, &[class], true).unwrap();
            attempt(class, &sandbox, || {
                ask_gpu();
                everyday();
            });
        }
        "others" => in_another(|| sandbox.apply_to_all(class).unwrap()),
        "this-one" => in_another(|| sandbox.apply(class).unwrap()),
        other => panic!("no case {other}"),
    }
}

/// Does what a list may or may not forbid.
fn attempt(class: Class, sandbox: &Sandbox, forbidden: impl Fn()) {
    sandbox.apply(class).unwrap();
    forbidden();
}

/// A thread within a worker that is confined already.
fn tighten(class: Class, sandbox: &Sandbox) {
    work(class, &[Class::Worker, class], sandbox);
}

/// Sets up, applies `filters` in turn, and does the work of `class`.
fn work(class: Class, filters: &[Class], sandbox: &Sandbox) {
    let (one, mut other) = UnixStream::pair().unwrap();
    let counter = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    epoll::add(&epoll, &counter, epoll::EventData::new_u64(1), epoll::EventFlags::IN).unwrap();
    let listener = UnixListener::bind_addr(&abstract_address()).unwrap();
    let client = UnixStream::connect_addr(&abstract_address()).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();

    filters.iter().for_each(|class| sandbox.apply(*class).unwrap());
    everyday();
    if class == Class::Queue || class == Class::Connection {
        rustix::io::write(&counter, &1_u64.to_ne_bytes()).unwrap();
        let mut events = Vec::with_capacity(4);
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None).unwrap();
        assert_eq!(events.len(), 1);
        rustix::io::read(&counter, &mut [0; 8]).unwrap();
    }
    if class == Class::Connection {
        other.write_all(b"hello").unwrap();
        poll(&mut [PollFd::new(&one, PollFlags::IN)], None).unwrap();
        one.set_nonblocking(true).unwrap();
        (&one).read_exact(&mut [0; 5]).unwrap();
        let copy = file.try_clone().unwrap();
        assert_eq!(copy.metadata().unwrap().len(), 4096);
        let _ = rustix::fs::fcntl_get_seals(&file);
        map_shared(&file);
        epoll::delete(&epoll, &counter).unwrap();
        one.shutdown(std::net::Shutdown::Both).unwrap();
    }
    if class == Class::Worker {
        let (accepted, _) = listener.accept().unwrap();
        drop((accepted, client));
        std::thread::Builder::new().name("worker".into()).spawn(everyday).unwrap().join().unwrap();
    }
    if class == Class::Supervisor {
        std::thread::spawn(everyday).join().unwrap();
    }
}

fn abstract_address() -> std::os::unix::net::SocketAddr {
    use std::os::linux::net::SocketAddrExt;
    std::os::unix::net::SocketAddr::from_abstract_name(format!("peergate-sandbox-{}", std::process::id())).unwrap()
}

/// What any thread does: allocate, hash, lock, wait, ask for the time, write a log line.
fn everyday() {
    let mut large = vec![1_u8; 8 << 20];
    large.resize(64 << 20, 2);
    drop(large);
    let map: HashMap<_, _> = (0..10_000).map(|n| (n, vec![n; 8])).collect();
    assert_eq!(map.len(), 10_000);
    let (sender, receiver) = mpsc::channel::<()>();
    assert!(receiver.recv_timeout(Duration::from_micros(10)).is_err());
    drop(sender);
    std::thread::park_timeout(Duration::from_micros(10));
    std::thread::yield_now();
    eprintln!("{:?}", SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap());
}

/// Has a thread that is there already open a file once `confine` has been called.
fn in_another(confine: impl FnOnce()) {
    let (go, gone) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        gone.recv().unwrap();
        std::fs::File::open("/dev/null").unwrap();
    });
    confine();
    go.send(()).unwrap();
    thread.join().unwrap();
}

/// What a driver of GPUs asks of the kernel's, here of one that does not know it.
fn ask_gpu() {
    // SAFETY: standard error is no such device, so nothing is read or written.
    let outcome = unsafe { libc::ioctl(2, 0xc020_462a, std::ptr::null_mut::<u8>()) };
    assert_eq!(outcome, -1);
}

fn abort_another() {
    // SAFETY: no process has such a number.
    let outcome = unsafe { libc::syscall(libc::SYS_tgkill, i32::MAX, i32::MAX, libc::SIGABRT) };
    assert_eq!(outcome, -1);
}

fn anonymous(prot: ProtFlags) -> rustix::io::Result<()> {
    // SAFETY: a fresh mapping, at a place the kernel chooses.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), 4096, prot, MapFlags::PRIVATE) }?;
    // SAFETY: made by the line above, and not used.
    unsafe { munmap(at, 4096) }
}

fn map_shared(file: impl AsFd) {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping, at a place the kernel chooses.
    let at = unsafe { mmap(std::ptr::null_mut(), 4096, prot, MapFlags::SHARED, file, 0) }.unwrap();
    // SAFETY: made by the line above, and not used.
    unsafe { munmap(at, 4096) }.unwrap();
}

#[test]
fn every_class_can_do_its_work() {
    for class in Class::ALL {
        let status = confined(class, Mode::Enforce, "work");
        assert!(status.success(), "{class:?}: {status}");
        let status = confined(class, Mode::Enforce, "panic");
        assert!(status.success(), "{class:?} panics and goes on: {status}");
    }
}

#[test]
fn threads_of_a_confined_worker_can_confine_themselves_further() {
    for class in [Class::Connection, Class::Queue, Class::Timekeeper] {
        let status = confined(class, Mode::Enforce, "tighten");
        assert!(status.success(), "{class:?}: {status}");
    }
}

#[test]
fn an_abort_still_looks_like_one() {
    for class in Class::ALL {
        assert_eq!(confined(class, Mode::Enforce, "abort").signal(), Some(libc::SIGABRT), "{class:?}");
    }
}

#[test]
fn what_a_class_does_not_need_ends_the_process() {
    let threads = [Class::Connection, Class::Queue, Class::Timekeeper];
    for class in [Class::Worker].into_iter().chain(threads) {
        for case in ["open", "socket", "inet", "process", "execute", "kill", "abort-another"] {
            assert_eq!(confined(class, Mode::Enforce, case).signal(), Some(libc::SIGSYS), "{case} by {class:?}");
        }
    }
    for class in threads {
        assert_eq!(confined(class, Mode::Enforce, "thread").signal(), Some(libc::SIGSYS), "{class:?}");
    }
    assert_eq!(confined(Class::Supervisor, Mode::Enforce, "inet").signal(), Some(libc::SIGSYS));
}

#[test]
fn a_filter_can_be_that_of_every_thread() {
    assert_eq!(confined(Class::Worker, Mode::Enforce, "others").signal(), Some(libc::SIGSYS));
    assert!(confined(Class::Worker, Mode::Enforce, "this-one").success());
    assert!(confined(Class::Worker, Mode::Off, "others").success());
}

#[test]
fn only_with_gpus_their_driver_may_be_asked() {
    for class in [Class::Worker, Class::Connection, Class::Queue, Class::Timekeeper, Class::Engine] {
        assert_eq!(confined(class, Mode::Enforce, "gpu").signal(), Some(libc::SIGSYS), "{class:?}");
        let status = confined(class, Mode::Enforce, "with-gpus");
        assert!(status.success(), "{class:?}: {status}");
    }
}

#[test]
fn logging_and_off_forbid_nothing() {
    for mode in [Mode::Log, Mode::Off] {
        for case in ["open", "thread", "process", "work"] {
            assert!(confined(Class::Timekeeper, mode, case).success(), "{case} under {mode}");
        }
    }
}

#[test]
fn core_dumps_can_be_forbidden() {
    process::forbid_core_dumps().unwrap();
    assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
}

#[test]
fn stop_signals_are_read_by_name() {
    // Blocked in this thread only: the signal is sent to the thread, so no other one can take it.
    std::thread::spawn(|| {
        let signals = Signals::block().unwrap();
        assert_eq!(signals.take().unwrap(), None);
        for (number, name) in [(libc::SIGTERM, "SIGTERM"), (libc::SIGINT, "SIGINT"), (libc::SIGHUP, "SIGHUP")] {
            // SAFETY: always succeeds.
            let this = unsafe { libc::pthread_self() };
            // SAFETY: the thread exists, and the signal is blocked.
            assert_eq!(unsafe { libc::pthread_kill(this, number) }, 0);
            assert_eq!(signals.take().unwrap(), Some(name));
        }
        assert_eq!(signals.take().unwrap(), None);
    })
    .join()
    .unwrap();
}
