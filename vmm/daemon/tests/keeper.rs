//! A keeper as a process, with the test as its supervisor, its VMM and its workers.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Signal, set_parent_process_death_signal};
use tempfile::TempDir;
use vmm_broker::{Channel, FromKeeper, KeeperSetup, ToKeeper};
use vmm_keeper::MAX_DESCRIPTORS;

const GET_FEATURES: u32 = 1;
const GET_PROTOCOL_FEATURES: u32 = 15;
const GET_QUEUE_NUM: u32 = 17;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const SET_BACKEND_REQ_FD: u32 = 21;
const REQUEST: u32 = 1;
const ANSWER: u32 = 5;

struct Process {
    dir: TempDir,
    child: Child,
    channel: Channel,
}

impl Process {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (channel, theirs) = Channel::pair().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_peergated"));
        command
            .args(["keeper", "--tenant", "vm0", "--seccomp", "enforce", "--log", "debug"])
            .args(["--namespaces", "off", "--landlock", "enforce"])
            .stdin(theirs.into_fd())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let follow = || Ok(set_parent_process_death_signal(Some(Signal::KILL))?);
        // SAFETY: a system call only.
        unsafe { command.pre_exec(follow) };
        Self { dir, child: command.spawn().unwrap(), channel }
    }

    fn set_up(&self) {
        let listener = UnixListener::bind(self.dir.path().join("sock")).unwrap();
        let setup = ToKeeper::Setup(KeeperSetup { tenant: "vm0".into() });
        self.channel.send(&setup, &[listener.as_fd()]).unwrap();
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.dir.path().join("sock")).unwrap()
    }

    fn add_worker(&self, session: u32, fresh: bool) -> UnixStream {
        let (worker, theirs) = UnixStream::pair().unwrap();
        self.channel.send(&ToKeeper::Worker { session, fresh }, &[theirs.as_fd()]).unwrap();
        worker
    }

    fn told(&self) -> FromKeeper {
        self.channel.receive().unwrap().unwrap().0
    }

    /// Waits for the end; whether it was a good one, and the log.
    fn end(mut self) -> (bool, String) {
        drop(self.channel);
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        (self.child.wait().unwrap().success(), log)
    }
}

fn frame(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).unwrap();
    [[code, flags, size].map(u32::to_ne_bytes).concat(), payload.to_vec()].concat()
}

/// The next frame's request and size.
fn receive(mut stream: &UnixStream) -> (u32, usize) {
    let mut header = [0; 12];
    stream.read_exact(&mut header).unwrap();
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
    let mut payload = vec![0; word(8) as usize];
    stream.read_exact(&mut payload).unwrap();
    (word(0), payload.len())
}

fn send_with(stream: &UnixStream, bytes: &[u8], fd: &OwnedFd) {
    send_with_many(stream, bytes, fd, 1);
}

/// Sends bytes with `count` copies of a descriptor.
fn send_with_many(stream: &UnixStream, bytes: &[u8], fd: &OwnedFd, count: usize) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let fds = vec![fd.as_fd(); count];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(stream, &[std::io::IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[test]
fn a_confined_keeper_holds_a_vmm_over_a_change_of_workers() {
    let keeper = Process::start();
    keeper.set_up();
    let worker = keeper.add_worker(1, true);
    let mut vmm = keeper.connect();
    assert_eq!(keeper.told(), FromKeeper::Connected {});
    let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    send_with(&vmm, &frame(SET_VRING_KICK, REQUEST, &[0; 8]), &kick);
    vmm.write_all(&frame(GET_QUEUE_NUM, REQUEST, &[])).unwrap();
    assert_eq!([receive(&worker), receive(&worker)], [(SET_VRING_KICK, 8), (GET_QUEUE_NUM, 0)]);
    drop(worker);

    let mut worker = keeper.add_worker(2, false);
    assert_eq!([receive(&worker), receive(&worker)], [(SET_VRING_KICK, 8), (GET_PROTOCOL_FEATURES, 0)]);
    worker.write_all(&frame(GET_PROTOCOL_FEATURES, ANSWER, &[0; 8])).unwrap();
    assert_eq!(receive(&worker), (GET_QUEUE_NUM, 0));
    worker.write_all(&frame(GET_QUEUE_NUM, ANSWER, &[0; 8])).unwrap();
    assert_eq!(receive(&vmm), (GET_QUEUE_NUM, 8));
    assert_eq!(keeper.told(), FromKeeper::Replayed { session: 2 });
    let mut count = [0; 8];
    rustix::io::read(&kick, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);

    drop(vmm);
    assert_eq!(keeper.told(), FromKeeper::Disconnected {});
    assert_eq!((&worker).read(&mut [0; 1]).unwrap(), 0, "the worker's stream has ended");
    keeper.channel.send(&ToKeeper::Shutdown {}, &[]).unwrap();
    let (good, log) = keeper.end();
    assert!(good && log.contains("[vm0]"), "{log}");
    assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");
}

#[test]
fn a_keeper_holds_as_many_descriptors_as_it_says_and_no_more() {
    const FDS: u32 = 32;
    const UNKNOWN: u32 = 99;
    let keeper = Process::start();
    keeper.set_up();
    let pid = keeper.child.id();
    let worker = keeper.add_worker(1, true);
    let mut vmm = keeper.connect();
    assert_eq!(keeper.told(), FromKeeper::Connected {});
    let own = open_files(pid);
    // Whatever comes is read, and nothing is answered.
    let reader = std::thread::spawn(move || std::io::copy(&mut &worker, &mut std::io::sink()));
    let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let table = [&FDS.to_ne_bytes()[..], &[0; 4], &[0; 32 * FDS as usize]].concat();
    send_with_many(&vmm, &frame(SET_MEM_TABLE, REQUEST, &table), &fd, 32);
    send_with(&vmm, &frame(SET_BACKEND_REQ_FD, REQUEST, &[]), &fd);
    for ring in 0..256_u64 {
        for code in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
            send_with(&vmm, &frame(code, REQUEST, &ring.to_ne_bytes()), &fd);
        }
    }
    // From here on everything waits for this answer.
    vmm.write_all(&frame(GET_QUEUE_NUM, REQUEST, &[])).unwrap();
    for _ in 0..8 {
        send_with_many(&vmm, &frame(UNKNOWN, REQUEST, &[]), &fd, 32);
    }
    let remembered = 32 + 1 + 3 * 256;
    let under_way = 96 + 32;
    while open_files(pid) < own + remembered + under_way {
        std::thread::yield_now();
    }
    // Another turn of it, in which it could have read more.
    keeper
        .channel
        .send(&ToKeeper::Worker { session: 2, fresh: false }, &[UnixStream::pair().unwrap().0.as_fd()])
        .unwrap();
    reader.join().unwrap().unwrap();
    let most = open_files(pid);
    // Not counted by it: its three standard descriptors.
    assert!((900..=MAX_DESCRIPTORS + 3).contains(&most), "{most}");
    drop(keeper.end());
}

#[test]
fn a_keeper_gives_a_vmm_up_in_the_open_and_keeps_the_socket() {
    let keeper = Process::start();
    keeper.set_up();
    drop(keeper.add_worker(1, true));
    let worker = keeper.add_worker(2, true);
    let vmm = keeper.connect();
    assert_eq!(keeper.told(), FromKeeper::Connected {});
    drop(worker);
    for session in 3..8 {
        // Wants to be told what the one before knew, and ends instead.
        let worker = keeper.add_worker(session, false);
        assert_eq!(receive(&worker), (GET_PROTOCOL_FEATURES, 0));
    }
    let told = keeper.told();
    assert!(matches!(&told, FromKeeper::GaveUp { reason } if reason.contains("5 workers in a row")), "{told:?}");
    assert_eq!(keeper.told(), FromKeeper::Disconnected {});
    assert_eq!((&vmm).read(&mut [0; 1]).unwrap(), 0);
    let mut worker = keeper.add_worker(8, true);
    let mut vmm = keeper.connect();
    assert_eq!(keeper.told(), FromKeeper::Connected {});
    vmm.write_all(&frame(GET_FEATURES, REQUEST, &[])).unwrap();
    assert_eq!(receive(&worker), (GET_FEATURES, 0));
    worker.write_all(&frame(GET_FEATURES, ANSWER, &[0; 8])).unwrap();
    assert_eq!(receive(&vmm), (GET_FEATURES, 8));
    let (good, log) = keeper.end();
    assert!(good, "a supervisor that has gone ends it, too: {log}");
}

#[test]
fn a_keeper_that_is_told_nonsense_says_so_and_fails() {
    let keeper = Process::start();
    drop(keeper.add_worker(1, true));
    let (good, log) = keeper.end();
    assert!(!good && log.contains("a worker before the set-up"), "{log}");

    let keeper = Process::start();
    keeper.set_up();
    let null = std::fs::File::open("/dev/null").unwrap();
    let again = ToKeeper::Setup(KeeperSetup { tenant: "vm0".into() });
    keeper.channel.send(&again, &[null.as_fd()]).unwrap();
    assert!(matches!(keeper.told(), FromKeeper::Failed { reason } if reason.contains("second set-up")));
    let (good, log) = keeper.end();
    assert!(!good, "{log}");
}
