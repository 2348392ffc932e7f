//! Faults as the operator sees them, of a daemon whose tenants' pages the test writes as a worker would: an honest one, a flooding one, a lying one.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Instant;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::Signal;
use serde_json::Value;
use vdev_wire::{FaultReason, Status};
use vmm_broker::{FaultEntry, TenantPage};

use common::{CONFIG, Daemon, kill, stderr, stdout};

/// A daemon that this test needs no privileges to look into.
fn start() -> Daemon {
    Daemon::start_with("core_dumps = true", CONFIG)
}

/// A tenant's page, as its worker has it.
fn page(daemon: &Daemon, tenant: &str) -> TenantPage {
    let links = fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap();
    let name = format!("peergate-page-{tenant}");
    let is_it =
        |path: &std::path::PathBuf| fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains(&name));
    let path = links.map(|entry| entry.unwrap().path()).find(is_it).unwrap();
    TenantPage::open(fs::File::options().read(true).write(true).open(path).unwrap().into()).unwrap()
}

fn entry(address: u64) -> FaultEntry {
    let (reason, status) = (FaultReason::Mapping as u8, Status::Fault.to_raw());
    FaultEntry { address, reason, status, time_ns: 1, session: 1, ..FaultEntry::default() }
}

/// A `peergate faults --follow` that has had its first look.
struct Follow {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Follow {
    /// Starts it, and waits for the newest fault of before, which must be one.
    fn start(daemon: &Daemon, args: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_peergate"))
            .arg("--socket")
            .arg(daemon.control())
            .args(["faults", "--follow", "--last", "1"])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut follow = Self { child, lines };
        follow.line();
        follow
    }

    fn line(&mut self) -> String {
        self.lines.next().unwrap().unwrap()
    }

    fn json(&mut self) -> Value {
        serde_json::from_str(&self.line()).unwrap()
    }

    /// What is left of its output, what it said on standard error, and how it ended.
    fn end(mut self) -> (Vec<String>, String, ExitStatus) {
        let rest = self.lines.by_ref().map(Result::unwrap).collect();
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (rest, said, self.child.wait().unwrap())
    }
}

impl Drop for Follow {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn followed_faults_come_one_a_line_with_the_sessions_until_the_daemon_goes() {
    let mut daemon = start();
    let (vm0, vm1) = (page(&daemon, "vm0"), page(&daemon, "vm1"));
    vm0.record(entry(0x1000));
    vm1.record(entry(0x2000));
    let mut all = Follow::start(&daemon, &[]);
    let mut one = Follow::start(&daemon, &["--tenant", "vm1", "--json"]);
    vm0.record(entry(0x3000));
    assert!(all.line().contains(" vm0 #2: gpu0 none of gpu0 at 0x3000 is FAULT (MAPPING); session 1, "));
    vm1.record(entry(0x4000));
    assert!(all.line().contains(" vm1 #2: "));
    let told = one.json();
    assert_eq!((&told["event"], &told["number"], &told["address"]), (&"fault".into(), &2.into(), &0x4000.into()));

    kill(daemon.tenant(1).worker_pid.unwrap(), Signal::KILL);
    assert_eq!(all.line(), "-- vm1: session 2 has begun");
    assert_eq!(one.json(), serde_json::json!({"event": "session", "tenant": "vm1", "session": 2}));
    vm1.record(FaultEntry { session: 2, ..entry(0x5000) });
    assert!(all.line().contains(" vm1 #3: "));
    assert_eq!(one.json()["session"], 2);

    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
    for follow in [all, one] {
        let (rest, said, status) = follow.end();
        assert!(rest.iter().all(|line| !line.contains("fault")), "{rest:?}");
        let expected = "peergate: peergated has gone, and what it knew of faults with it; follow again once it runs\n";
        assert_eq!((said.as_str(), status.code()), (expected, Some(1)));
    }
}

/// Records one fault after another until `kept` have a record; answers how many that took.
fn flood(page: &TenantPage, kept: u64) -> u64 {
    let mut count = 0;
    while page.faults(0).total < kept {
        page.record(entry(count));
        count += 1;
    }
    count
}

#[test]
fn flood_is_shown_as_far_as_it_is_kept_and_the_rest_of_it_is_counted() {
    let daemon = start();
    let vm0 = page(&daemon, "vm0");
    vm0.record(entry(0));
    let mut follow = Follow::start(&daemon, &["--json"]);
    // More than are kept while nobody looks.
    kill(follow.child.id(), Signal::STOP);
    let sent = flood(&vm0, 1500);
    kill(follow.child.id(), Signal::CONT);
    let (mut shown, mut suppressed, mut overwritten) = (Vec::new(), 0, 0);
    let number = |line: &Value, key: &str| line[key].as_u64().unwrap();
    while u64::try_from(shown.len()).unwrap() + suppressed + overwritten < sent {
        let line = follow.json();
        match line["event"].as_str().unwrap() {
            "fault" => shown.push(number(&line, "number")),
            "missed" => overwritten += number(&line, "overwritten") + number(&line, "unreadable"),
            "suppressed" => {
                suppressed += number(&line, "count");
                assert_eq!(line["count"], line["by_reason"]["MAPPING"]);
            }
            event => panic!("{event}: {line}"),
        }
    }
    assert!(suppressed > 0 && overwritten > 0, "{suppressed} {overwritten}");
    assert!(shown.is_sorted_by(|a, b| a < b), "in order, each once");
    assert_eq!(shown.last(), Some(&1500));
    assert_eq!(u64::try_from(shown.len()).unwrap() + suppressed + overwritten, sent);

    let answer = daemon.peergate(&["faults", "--tenant", "vm0", "--last", "0", "--json"]);
    let totals: Value = serde_json::from_slice(&answer.stdout).unwrap();
    let totals = &totals["tenants"][0];
    let counts = ["total", "recorded", "suppressed", "overwritten"].map(|key| number(totals, key));
    assert_eq!(counts, [sent + 1, 1500, suppressed, 1500 - 1024]);
    let status = daemon.tenant(0);
    assert_eq!((status.faults, status.counters["faults_suppressed"]), (sent + 1, suppressed));
    let text = daemon.peergate(&["faults", "--tenant", "vm0", "--last", "0"]);
    let expected = format!("{suppressed} came too fast and were only counted (MAPPING {suppressed})");
    assert!(stdout(&text).contains(&expected), "{}", stdout(&text));
}

#[test]
fn liar_pushes_nobody_elses_records_out_of_an_answer() {
    let daemon = start();
    let (liar, meek) = (page(&daemon, "vm0"), page(&daemon, "vm1"));
    meek.record(entry(0x1000));
    (0..50).for_each(|_| liar.record(FaultEntry { time_ns: u64::MAX, ..entry(0) }));
    let answer = daemon.peergate(&["faults", "--last", "10", "--json"]);
    let reply: Value = serde_json::from_slice(&answer.stdout).unwrap();
    let faults = reply["faults"].as_array().unwrap();
    assert_eq!((faults.len(), &faults[0]["tenant"]), (10, &"vm1".into()));
    assert!(faults.iter().all(|fault| fault["time_ns"].as_u64().unwrap() < u64::MAX));
}

#[test]
fn follower_ends_when_nobody_reads_when_it_is_interrupted_and_when_there_is_no_such_tenant() {
    let daemon = start();
    page(&daemon, "vm0").record(entry(0x1000));
    let mut unread = Follow::start(&daemon, &[]);
    let (closed, _) = std::io::pipe().unwrap();
    unread.lines = BufReader::new(ChildStdout::from(std::os::fd::OwnedFd::from(closed))).lines();
    assert!(unread.end().2.success(), "although no fault comes");

    // Not SIGINT, which a shell has its background processes ignore, and so this one's children.
    let interrupted = Follow::start(&daemon, &[]);
    kill(interrupted.child.id(), Signal::TERM);
    assert_eq!(interrupted.end().2.signal(), Some(15));

    let unknown = daemon.peergate(&["faults", "--follow", "--tenant", "vm9"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert_eq!(stderr(&unknown), "peergate: There is no tenant \"vm9\"; there are: vm0, vm1\n");
}

#[test]
fn follower_outlives_operators_that_only_connect() {
    let daemon = start();
    let vm0 = page(&daemon, "vm0");
    vm0.record(entry(0x1000));
    let mut follow = Follow::start(&daemon, &[]);
    for round in 2..20 {
        // As many as are kept: the silent ones make room.
        let _silent: Vec<_> = (0..15).map(|_| UnixStream::connect(daemon.control()).unwrap()).collect();
        vm0.record(entry(round));
        assert!(follow.line().contains(&format!(" vm0 #{round}: ")));
    }
}

/// A vhost-user message without flags but its version.
fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap();
    [&request.to_le_bytes()[..], &1_u32.to_le_bytes(), &len.to_le_bytes(), payload].concat()
}

#[test]
fn vmm_that_comes_again_and_again_gets_no_more_log_lines_than_one_that_stays() {
    const GET_FEATURES: u32 = 1;
    const SET_OWNER: u32 = 3;
    const SET_VRING_CALL: u32 = 13;
    const ROUNDS: u32 = 6;
    let daemon = start();
    let begin = Instant::now();
    let (no_counter, call) = (fs::File::open("/dev/null").unwrap(), message(SET_VRING_CALL, &[0; 8]));
    for round in 1..=ROUNDS {
        let mut vmm = UnixStream::connect(daemon.runtime_dir().join("vm0.sock")).unwrap();
        vmm.write_all(&message(SET_OWNER, &[])).unwrap();
        for _ in 0..100 {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [no_counter.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            assert_eq!(sendmsg(&vmm, &[IoSlice::new(&call)], &mut control, SendFlags::empty()).unwrap(), call.len());
        }
        // What is answered after them came after them.
        vmm.write_all(&message(GET_FEATURES, &[])).unwrap();
        vmm.read_exact(&mut [0; 20]).unwrap();
        drop(vmm);
        daemon.wait_for(|status| status.tenants[0].session == round + 1);
    }
    // One burst, and what has come back since.
    let most = 32 + begin.elapsed().as_secs() + 1;
    let lines = daemon.log().matches("not an eventfd").count();
    assert!(lines > 0 && u64::try_from(lines).unwrap() <= most, "{lines} lines, {most} at most");
}
