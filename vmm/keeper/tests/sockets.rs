//! A keeper between sockets, with friendly and with hostile ends.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use common::{
    ANSWER, Bed, Came, End, GET_CONFIG, GET_FEATURES, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_VRING_BASE, NEED_REPLY,
    REQUEST, SET_BACKEND_REQ_FD, SET_FEATURES, SET_MEM_TABLE, SET_OWNER, SET_PROTOCOL_FEATURES, SET_VRING_BASE,
    SET_VRING_CALL, SET_VRING_ENABLE, SET_VRING_KICK, SET_VRING_NUM, as_fds, frame, obey, pair, send,
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, FdFlags, fcntl_getfd, read, write};
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use vmm_keeper::{Event, MAX_FAILURES};

fn codes(frames: &[Came]) -> Vec<u32> {
    frames.iter().map(|came| came.code).collect()
}

fn inode(fd: impl AsFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_ino
}

fn file() -> OwnedFd {
    tempfile::tempfile().unwrap().into()
}

fn counter() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn count(counter: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    match read(counter, &mut count) {
        Ok(8) => u64::from_ne_bytes(count),
        Err(Errno::AGAIN) => 0,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_vmm_is_accepted_only_while_there_is_a_fresh_worker_and_one_at_a_time() {
    let mut bed = Bed::new();
    let first = bed.connect();
    first.send(GET_QUEUE_NUM, REQUEST, &[], &[]);
    bed.settle();
    assert_eq!(bed.events(), []);
    let stale = bed.add_worker(1, false);
    bed.settle();
    assert!(stale.is_closed());
    assert_eq!(bed.events(), []);

    let mut worker = bed.add_worker(2, true);
    bed.turn();
    assert_eq!(bed.events(), [Event::Connected]);
    assert!(worker.receive().is_none(), "nothing is forwarded before that was told");
    bed.settle();
    assert_eq!(codes(&worker.receive_all()), [GET_QUEUE_NUM]);

    let second = bed.connect();
    second.send(GET_CONFIG, REQUEST, &[], &[]);
    bed.settle();
    assert_eq!(bed.events(), []);
    drop(first);
    bed.settle();
    assert_eq!(bed.events(), [Event::Disconnected]);
    assert!(worker.is_closed(), "a worker serves one VMM");
    let mut worker = bed.add_worker(3, true);
    bed.settle();
    assert_eq!(bed.events(), [Event::Connected]);
    assert_eq!(codes(&worker.receive_all()), [GET_CONFIG]);
}

#[test]
fn a_fresh_worker_that_ends_before_a_vmm_comes_is_no_news() {
    let mut bed = Bed::new();
    drop(bed.add_worker(1, true));
    bed.settle();
    let worker = bed.add_worker(2, true);
    worker.send(GET_FEATURES, ANSWER, &[0; 8], &[]);
    bed.settle();
    assert!(worker.is_closed(), "nobody asked it");
    let _vmm = bed.connect();
    bed.settle();
    assert_eq!(bed.events(), []);
}

#[test]
fn frames_pass_whole_with_their_descriptors_however_they_come() {
    let (mut bed, mut vmm, mut worker) = Bed::agreed();
    let files = [file(), file()];
    let mut payload = vec![0; 8 + 64];
    payload[0] = 2;
    let bytes = frame(SET_MEM_TABLE, REQUEST | NEED_REPLY, &payload);
    send(&vmm.socket, &bytes[..1], &as_fds(&files)).unwrap();
    for byte in &bytes[1..] {
        bed.settle();
        assert!(worker.receive().is_none());
        vmm.send_bytes(&[*byte]);
    }
    bed.settle();
    let came = worker.receive().unwrap();
    assert_eq!((came.code, came.flags, &came.payload), (SET_MEM_TABLE, REQUEST | NEED_REPLY, &payload));
    assert_eq!(came.fds.iter().map(inode).collect::<Vec<_>>(), files.iter().map(inode).collect::<Vec<_>>());

    let answer = frame(SET_MEM_TABLE, ANSWER, &[0; 8]);
    for byte in &answer {
        bed.settle();
        assert!(vmm.receive().is_none());
        worker.send_bytes(&[*byte]);
    }
    bed.settle();
    assert_eq!(codes(&vmm.receive_all()), [SET_MEM_TABLE]);

    // What nobody knows passes too, and several frames at once stay apart.
    let several = [frame(0xbeef, REQUEST, &[7; 4096]), frame(SET_OWNER, REQUEST, &[])].concat();
    vmm.send_bytes(&several);
    bed.settle();
    let came = worker.receive_all();
    assert_eq!(codes(&came), [0xbeef, SET_OWNER]);
    assert_eq!(came[0].payload, [7; 4096]);
    assert_eq!(bed.events(), []);
}

#[test]
fn descriptors_stay_with_their_frame_and_out_of_other_programs() {
    let (mut bed, vmm, mut worker) = Bed::connected();
    let (kick, call) = (file(), file());
    vmm.send(SET_OWNER, REQUEST, &[], &[]);
    vmm.send(SET_VRING_KICK, REQUEST, &0_u64.to_ne_bytes(), &[kick.as_fd()]);
    vmm.send(SET_VRING_NUM, REQUEST, &pair(0, 8), &[]);
    vmm.send(SET_VRING_CALL, REQUEST, &0_u64.to_ne_bytes(), &[call.as_fd()]);
    bed.settle();
    let came = worker.receive_all();
    let fds: Vec<Vec<u64>> = came.iter().map(|came| came.fds.iter().map(inode).collect()).collect();
    assert_eq!(fds, [vec![], vec![inode(&kick)], vec![], vec![inode(&call)]]);
    // The keeper's own copies are among this process's descriptors.
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let number: i32 = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
        let path = std::fs::read_link(format!("/proc/self/fd/{number}")).unwrap_or_default();
        if path.to_string_lossy().contains("deleted") {
            let flags = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
            let flags = flags.lines().find_map(|line| line.strip_prefix("flags:")).unwrap_or("02000000").trim();
            assert_ne!(u32::from_str_radix(flags, 8).unwrap() & 0o2_000_000, 0, "{path:?} is not close-on-exec");
        }
    }
    assert!(fcntl_getfd(&kick).unwrap().contains(FdFlags::CLOEXEC));
}

#[test]
fn a_half_answer_of_a_worker_that_ended_is_given_whole_by_the_next() {
    let (mut bed, mut vmm, worker) = Bed::agreed();
    vmm.send(GET_CONFIG, REQUEST, &[1; 40], &[]);
    bed.settle();
    worker.send_bytes(&frame(GET_CONFIG, ANSWER, &[1; 40])[..30]);
    bed.settle();
    drop(worker);
    bed.settle();
    assert_eq!(bed.events(), [], "the VMM is none the wiser");
    vmm.send(GET_QUEUE_NUM, REQUEST, &[], &[]);
    bed.settle();
    let mut worker = bed.add_worker(2, false);
    let told = obey(&mut bed, &mut worker, true);
    let expected = [GET_FEATURES, SET_PROTOCOL_FEATURES, GET_PROTOCOL_FEATURES, GET_CONFIG, GET_QUEUE_NUM];
    assert_eq!(codes(&told), expected);
    assert_eq!(bed.events(), [Event::Replayed { session: 2 }]);
    let seen = vmm.receive_all();
    assert_eq!(codes(&seen), [GET_CONFIG, GET_QUEUE_NUM]);
    assert_eq!(seen[0].payload, [1; 40]);
}

#[test]
fn answers_that_a_worker_gave_before_it_ended_are_not_asked_for_again() {
    let (mut bed, mut vmm, worker) = Bed::agreed();
    vmm.send(GET_QUEUE_NUM, REQUEST, &[], &[]);
    bed.settle();
    // It never reads that one, so the kernel says that its stream was reset.
    worker.send(GET_QUEUE_NUM, ANSWER, &[3; 8], &[]);
    drop(worker);
    bed.settle();
    assert_eq!(codes(&vmm.receive_all()), [GET_QUEUE_NUM]);
    let mut worker = bed.add_worker(2, false);
    assert!(!codes(&obey(&mut bed, &mut worker, true)).contains(&GET_QUEUE_NUM));
}

#[test]
fn a_fresh_worker_too_is_told_what_a_vmm_has_said_that_came_before_it() {
    let (mut bed, vmm, worker) = Bed::connected();
    drop(worker);
    vmm.send(SET_OWNER, REQUEST, &[], &[]);
    bed.settle();
    let mut worker = bed.add_worker(2, true);
    assert_eq!(codes(&obey(&mut bed, &mut worker, false)), [GET_PROTOCOL_FEATURES, SET_OWNER]);
    assert_eq!(bed.events(), [Event::Replayed { session: 2 }]);
}

#[test]
fn another_worker_takes_the_place_of_the_one_before() {
    let (mut bed, vmm, first) = Bed::connected();
    vmm.send(SET_OWNER, REQUEST, &[], &[]);
    bed.settle();
    let mut second = bed.add_worker(2, false);
    assert!(first.read_to_end());
    assert_eq!(codes(&obey(&mut bed, &mut second, false)), [SET_OWNER, GET_PROTOCOL_FEATURES]);
}

#[test]
fn a_vmm_that_goes_takes_its_worker_along_at_any_moment() {
    let cases: [fn(&mut Bed, &End); 4] = [
        |_, _| {},
        |_, vmm| vmm.send_bytes(&frame(SET_OWNER, REQUEST, &[])[..7]),
        |_, vmm| vmm.send_bytes(&frame(SET_FEATURES, REQUEST, &[0; 8])[..15]),
        |bed, vmm| {
            vmm.send(GET_QUEUE_NUM, REQUEST, &[], &[]);
            bed.settle();
        },
    ];
    for case in cases {
        let (mut bed, vmm, worker) = Bed::connected();
        case(&mut bed, &vmm);
        drop(vmm);
        bed.settle();
        assert_eq!(bed.events(), [Event::Disconnected]);
        assert!(worker.read_to_end());
    }
    // Also while there is no worker, and while one takes over.
    for taking_over in [false, true] {
        let (mut bed, vmm, worker) = Bed::agreed();
        drop(worker);
        bed.settle();
        let next = taking_over.then(|| bed.add_worker(2, false));
        vmm.send(SET_OWNER, REQUEST, &[], &[]);
        drop(vmm);
        bed.settle();
        assert_eq!(bed.events(), [Event::Disconnected]);
        assert!(next.is_none_or(End::read_to_end));
        assert!(bed.add_worker(3, false).is_closed(), "it has nobody to take over");
    }
}

#[test]
fn a_vmm_that_breaks_the_protocol_loses_its_connection_and_nobody_else_anything() {
    let fds: Vec<OwnedFd> = (0..33).map(|_| file()).collect();
    let good = frame(SET_OWNER, REQUEST, &[]);
    let mut long = good.clone();
    long[8..12].copy_from_slice(&4097_u32.to_ne_bytes());
    let mut endless = good.clone();
    endless[8..12].copy_from_slice(&u32::MAX.to_ne_bytes());
    type Case<'a> = (&'a str, Vec<u8>, usize);
    let cases: [Case<'_>; 9] = [
        ("long", long, 0),
        ("endless", endless, 0),
        ("answer", frame(SET_OWNER, ANSWER, &[]), 0),
        ("version", frame(SET_OWNER, 2, &[]), 0),
        ("reserved", frame(SET_OWNER, REQUEST | 16, &[]), 0),
        ("shape", frame(SET_OWNER, REQUEST, &[0]), 0),
        ("ring", frame(SET_VRING_NUM, REQUEST, &pair(256, 1)), 0),
        ("unwanted", frame(SET_OWNER, REQUEST, &[]), 1),
        ("many", frame(0xbeef, REQUEST, &[]), 33),
    ];
    for (name, bytes, with) in cases {
        let (mut bed, vmm, worker) = Bed::connected();
        send(&vmm.socket, &bytes, &as_fds(&fds[..with])).unwrap();
        bed.settle();
        assert_eq!(bed.events(), [Event::Disconnected], "{name}");
        assert!(vmm.is_closed() && worker.is_closed(), "{name}");
        let mut worker = bed.add_worker(2, true);
        let vmm = bed.connect();
        vmm.send(GET_QUEUE_NUM, REQUEST, &[], &[]);
        bed.settle();
        assert_eq!(codes(&worker.receive_all()), [GET_QUEUE_NUM], "{name}");
    }
    // Descriptors that come with the payload belong to nothing, and so do too many that come in pieces.
    let pieces: [(&[u8], usize); 2] = [(&[0; 8], 1), (&good[6..], 20)];
    for (rest, with) in pieces {
        let (mut bed, vmm, _worker) = Bed::connected();
        let head =
            if rest.len() == 8 { frame(SET_FEATURES, REQUEST, &[0; 8])[..12].to_vec() } else { good[..6].to_vec() };
        send(&vmm.socket, &head, &as_fds(&fds[..if rest.len() == 8 { 0 } else { 20 }])).unwrap();
        bed.settle();
        send(&vmm.socket, rest, &as_fds(&fds[..with])).unwrap();
        bed.settle();
        assert_eq!(bed.events(), [Event::Disconnected]);
    }
}

#[test]
fn a_worker_that_sends_junk_is_replaced_and_the_vmm_sees_none_of_it() {
    let fd = file();
    let fds: [OwnedFd; 1] = [fd];
    let good = frame(GET_QUEUE_NUM, ANSWER, &[0; 8]);
    let mut long = good.clone();
    long[8..12].copy_from_slice(&4097_u32.to_ne_bytes());
    let cases = [
        ("unasked", frame(GET_FEATURES, ANSWER, &[0; 8]), 0),
        ("request", frame(GET_QUEUE_NUM, REQUEST, &[0; 8]), 0),
        ("long", long, 0),
        ("descriptors", good.clone(), 1),
        ("twice", [good.clone(), good].concat(), 0),
    ];
    for (name, bytes, with) in cases {
        let (mut bed, mut vmm, mut worker) = Bed::agreed();
        vmm.send(GET_QUEUE_NUM, REQUEST, &[], &[]);
        bed.settle();
        assert_eq!(worker.receive_all().len(), 1);
        send(&worker.socket, &bytes, &as_fds(&fds[..with])).unwrap();
        bed.settle();
        assert!(worker.is_closed(), "{name}");
        assert_eq!(bed.events(), [], "{name}");
        let mut worker = bed.add_worker(2, false);
        obey(&mut bed, &mut worker, true);
        assert_eq!(codes(&vmm.receive_all()), [GET_QUEUE_NUM], "{name}: one answer, from one of the two");
    }
}

#[test]
fn a_vmm_is_given_up_when_no_worker_can_take_over() {
    let (mut bed, vmm, worker) = Bed::agreed();
    vmm.send(SET_VRING_NUM, REQUEST, &pair(200, 8), &[]);
    bed.settle();
    drop(worker);
    for session in 2..2 + MAX_FAILURES {
        bed.settle();
        assert_eq!(bed.events(), []);
        let mut worker = bed.add_worker(session, false);
        bed.settle();
        for came in worker.receive_all() {
            let refused = u64::from(came.code == SET_VRING_NUM);
            worker.send(came.code, ANSWER, &refused.to_ne_bytes(), &[]);
        }
        bed.settle();
        assert!(worker.is_closed());
    }
    let events = bed.events();
    let [Event::GaveUp { reason }, Event::Disconnected] = &events[..] else { panic!("{events:?}") };
    assert!(reason.contains("5 workers") && reason.contains("Request 8 was refused"), "{reason}");
    assert!(vmm.is_closed());
}

#[test]
fn what_happens_while_a_worker_is_added_is_told_before_anything_else() {
    let (mut bed, _vmm, worker) = Bed::connected();
    drop(worker);
    bed.settle();
    for session in 2..2 + MAX_FAILURES {
        let (theirs, ours) = UnixStream::pair().unwrap();
        drop(ours);
        bed.keeper.add_worker(theirs.into(), session, false);
    }
    // Nothing will ever be ready.
    assert!(bed.keeper.turn(None, None).unwrap().busy);
    assert!(matches!(bed.keeper.events()[..], [Event::GaveUp { .. }, Event::Disconnected]));
}

#[test]
fn a_vmm_that_does_not_read_is_not_read_for_ever() {
    let (mut bed, mut vmm, mut worker) = Bed::connected();
    set_socket_send_buffer_size(&worker.socket, 8192).unwrap();
    let (mut asked, mut answered) = (0_u32, 0_u32);
    let payload = |number: u32| [number.to_ne_bytes().to_vec(), vec![5; 4092]].concat();
    loop {
        let room = send(&vmm.socket, &frame(GET_CONFIG, REQUEST, &asked.to_ne_bytes()), &[]);
        asked += u32::from(room.is_ok());
        bed.settle();
        let came = worker.receive_all();
        for came in &came {
            assert_eq!(came.index(), answered);
            worker.send(GET_CONFIG, ANSWER, &payload(answered), &[]);
            bed.settle();
            answered += 1;
        }
        if came.is_empty() && room.is_err() {
            break;
        }
        assert!(answered < 1000, "a VMM that reads nothing gets some 400 KiB of answers at most");
    }
    assert!(asked > answered, "the rest waits in the VMM's own socket");
    // It reads after all, and misses nothing.
    let mut seen = 0;
    while seen < asked {
        for came in vmm.receive_all() {
            assert_eq!((came.index(), came.payload.len()), (seen, 4096));
            seen += 1;
        }
        bed.settle();
        for _ in worker.receive_all() {
            worker.send(GET_CONFIG, ANSWER, &payload(answered), &[]);
            bed.settle();
            answered += 1;
        }
    }
    assert_eq!(answered, asked);
}

#[test]
fn a_vmm_whose_worker_does_not_read_is_not_read_for_ever() {
    let (mut bed, vmm, mut worker) = Bed::connected();
    let mut sent = 0_u64;
    while send(&vmm.socket, &frame(0xbeef, REQUEST, &[3; 4096]), &[]).is_ok() {
        bed.settle();
        sent += 1;
        assert!(sent < 1000, "a worker that reads nothing gets some 700 KiB at most");
    }
    let mut got = 0;
    while got < sent {
        let came = worker.receive_all();
        assert!(came.iter().all(|came| came.payload == [3; 4096]));
        got += came.len() as u64;
        bed.settle();
    }
}

#[test]
fn rings_are_kicked_and_the_vmm_is_told_once_a_worker_has_taken_over() {
    let (mut bed, vmm, worker) = Bed::agreed();
    let kicks = [counter(), counter(), counter()];
    let (way_back, mut requests) = UnixStream::pair().map(|(ours, theirs)| (ours, End::new(theirs))).unwrap();
    vmm.send(SET_BACKEND_REQ_FD, REQUEST, &[], &[way_back.as_fd()]);
    drop(way_back);
    for (ring, kick) in (0..).zip(&kicks) {
        vmm.send(SET_VRING_KICK, REQUEST, &u64::to_ne_bytes(ring), &[kick.as_fd()]);
    }
    vmm.send(GET_VRING_BASE, REQUEST, &pair(1, 0), &[]);
    bed.settle();
    worker.send(GET_VRING_BASE, ANSWER, &pair(1, 30), &[]);
    bed.settle();
    // Its start is open when the worker ends.
    vmm.send(SET_OWNER, REQUEST | NEED_REPLY, &[], &[]);
    let late = counter();
    vmm.send(SET_VRING_KICK, REQUEST, &9_u64.to_ne_bytes(), &[late.as_fd()]);
    bed.settle();
    drop(worker);
    bed.settle();
    assert_eq!(kicks.each_ref().map(count), [0; 3]);
    let mut worker = bed.add_worker(2, false);
    let told = obey(&mut bed, &mut worker, true);
    assert_eq!(kicks.each_ref().map(count), [1, 0, 1], "the one that was stopped is not kicked");
    assert_eq!(count(&late), 1);
    let base = told.iter().find(|came| came.code == SET_VRING_BASE).unwrap();
    assert_eq!(base.payload, pair(1, 30));
    let told = requests.receive_all();
    assert_eq!(told.iter().map(|came| (came.code, came.flags, came.payload.len())).collect::<Vec<_>>(), [(2, 1, 0)]);
    assert_eq!(bed.events(), [Event::Replayed { session: 2 }]);
}

#[test]
fn hostile_kicks_and_ways_back_hold_nothing_up() {
    let (reader, pipe) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    fcntl_setpipe_size(&pipe, 4096).unwrap();
    assert_eq!(write(&pipe, &[0; 4096]), Ok(4096), "the next write would wait");
    let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let (stuffed, _unread) = UnixStream::pair().unwrap();
    while send(&stuffed, &[0; 512], &[]).is_ok() {}
    let (closed, _) = UnixStream::pair().unwrap();
    for way_back in [stuffed.as_fd(), closed.as_fd(), pipe.as_fd(), full.as_fd()] {
        let (mut bed, vmm, worker) = Bed::agreed();
        for (ring, kick) in (0..).zip([pipe.as_fd(), reader.as_fd(), full.as_fd(), stuffed.as_fd(), closed.as_fd()]) {
            vmm.send(SET_VRING_KICK, REQUEST, &u64::to_ne_bytes(ring), &[kick]);
        }
        vmm.send(SET_BACKEND_REQ_FD, REQUEST, &[], &[way_back]);
        drop(worker);
        bed.settle();
        let mut worker = bed.add_worker(2, false);
        obey(&mut bed, &mut worker, true);
        assert_eq!(bed.events(), [Event::Replayed { session: 2 }]);
    }
}

#[test]
fn a_worker_that_is_slow_to_learn_learns_everything() {
    let (mut bed, vmm, mut worker) = Bed::agreed();
    for ring in 0..60_u32 {
        let kick = counter();
        vmm.send(SET_VRING_NUM, REQUEST, &pair(ring, 64), &[]);
        vmm.send(SET_VRING_KICK, REQUEST, &u64::from(ring).to_ne_bytes(), &[kick.as_fd()]);
        vmm.send(SET_VRING_CALL, REQUEST, &u64::from(ring).to_ne_bytes(), &[kick.as_fd()]);
        vmm.send(SET_VRING_ENABLE, REQUEST, &pair(ring, 1), &[]);
        bed.settle();
        worker.receive_all();
    }
    drop(worker);
    bed.settle();
    let (keeper, ours) = UnixStream::pair().unwrap();
    set_socket_send_buffer_size(&keeper, 4096).unwrap();
    bed.keeper.add_worker(keeper.into(), 2, false);
    let mut worker = End::new(ours);
    let mut told = Vec::new();
    for _ in 0..1000 {
        bed.settle();
        let Some(came) = worker.receive() else { break };
        worker.send(came.code, ANSWER, &[0; 8], &[]);
        told.push(came);
    }
    assert_eq!(told.len(), 3 + 60 * 4);
    assert_eq!(told.iter().map(|came| came.fds.len()).sum::<usize>(), 120);
    assert_eq!(bed.events(), [Event::Replayed { session: 2 }]);
}
