//! What is remembered and what is repeated, as bytes, without sockets.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use crate::frame::{Direction, Frame, FrameError, HEADER, Header, request};
use crate::record::{Record, check};
use crate::session::{MAX_FAILURES, Session};

const REQUEST: u32 = 1;
const ANSWER: u32 = 1 | 4;

const VERSION_1: u64 = 1 << 32;
const PROTOCOL: u64 = 1 << 30;
const REPLY_ACK: u64 = 1 << 3;

fn whole(code: u32, flags: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Frame {
    let direction = if flags & 4 == 0 { Direction::Request } else { Direction::Answer };
    let mut header = [0; HEADER];
    for (at, number) in [(0, code), (4, flags), (8, u32::try_from(payload.len()).unwrap())] {
        header[at..at + 4].copy_from_slice(&number.to_ne_bytes());
    }
    Frame::new(Header::parse(header, direction).unwrap(), payload.to_vec(), fds)
}

fn bare(code: u32) -> Frame {
    whole(code, REQUEST, &[], Vec::new())
}

fn number(code: u32, number: u64) -> Frame {
    whole(code, REQUEST, &number.to_ne_bytes(), Vec::new())
}

/// A ring's number and another.
fn pair(index: u32, number: u32) -> [u8; 8] {
    let mut payload = [0; 8];
    payload[..4].copy_from_slice(&index.to_ne_bytes());
    payload[4..].copy_from_slice(&number.to_ne_bytes());
    payload
}

fn ring(code: u32, index: u32, number: u32) -> Frame {
    whole(code, REQUEST, &pair(index, number), Vec::new())
}

fn addr(index: u32, mark: u8) -> Frame {
    let mut payload = [mark; 40];
    payload[..4].copy_from_slice(&index.to_ne_bytes());
    whole(request::SET_VRING_ADDR, REQUEST, &payload, Vec::new())
}

fn null() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}

fn with_fd(code: u32, number: u64) -> Frame {
    whole(code, REQUEST, &number.to_ne_bytes(), vec![null()])
}

fn memory(regions: u32) -> Frame {
    let mut payload = vec![7; 8 + 32 * regions as usize];
    payload[..8].copy_from_slice(&u64::from(regions).to_ne_bytes());
    whole(request::SET_MEM_TABLE, REQUEST, &payload, (0..regions).map(|_| null()).collect())
}

fn needing_reply(frame: Frame) -> Frame {
    frame.needing_reply(true)
}

fn answer(code: u32, payload: &[u8]) -> Frame {
    whole(code, ANSWER, payload, Vec::new())
}

fn ack(code: u32) -> Frame {
    answer(code, &0_u64.to_ne_bytes())
}

fn refusal(code: u32) -> Frame {
    answer(code, &1_u64.to_ne_bytes())
}

/// A frame as it would be sent.
type Shown = (Vec<u8>, Vec<RawFd>);

fn show(frame: &Frame) -> Shown {
    let bytes = frame.header().bytes().into_iter().chain(frame.payload().iter().copied()).collect();
    (bytes, frame.fds().iter().map(AsRawFd::as_raw_fd).collect())
}

fn shown<'a>(frames: impl IntoIterator<Item = &'a Frame>) -> Vec<Shown> {
    frames.into_iter().map(show).collect()
}

fn record(frames: &[&Frame]) -> Record {
    let mut record = Record::default();
    for frame in frames {
        check(frame).unwrap();
        record.apply((*frame).clone(), None);
    }
    record
}

fn fence() -> Frame {
    bare(request::GET_PROTOCOL_FEATURES)
}

#[test]
fn a_replay_tells_the_last_of_each_in_an_order_that_a_worker_accepts() {
    let protocol = number(request::SET_PROTOCOL_FEATURES, REPLY_ACK);
    let features = number(request::SET_FEATURES, VERSION_1 | PROTOCOL);
    let (old_table, table) = (memory(1), memory(2));
    let (old_call, call) = (with_fd(request::SET_VRING_CALL, 1), with_fd(request::SET_VRING_CALL, 1));
    let kick = with_fd(request::SET_VRING_KICK, 1);
    let silent = number(request::SET_VRING_ERR, 0x101);
    let (num, base, place) = (ring(request::SET_VRING_NUM, 1, 64), ring(request::SET_VRING_BASE, 1, 5), addr(1, 9));
    let (off, on) = (ring(request::SET_VRING_ENABLE, 1, 0), ring(request::SET_VRING_ENABLE, 1, 1));
    let other = ring(request::SET_VRING_NUM, 0, 32);
    let backend = with_fd(request::SET_BACKEND_REQ_FD, 0);
    let owner = bare(request::SET_OWNER);
    let (asked, config) = (bare(request::GET_FEATURES), whole(25, REQUEST, &[1; 20], Vec::new()));
    let told = [
        &off, &kick, &old_call, &silent, &num, &on, &place, &base, &call, &backend, &old_table, &asked, &protocol,
        &config, &features, &table, &owner, &other,
    ];
    let in_order =
        [&protocol, &owner, &features, &table, &backend, &other, &num, &base, &place, &silent, &call, &kick, &on];
    let repeated = in_order.map(|frame| needing_reply(frame.clone()));
    let expected: Vec<_> = [asked.clone()].into_iter().chain(repeated).chain([fence()]).collect();
    assert_eq!(shown(&record(&told).replay()), shown(&expected));
    // Descriptors and bytes are the VMM's own.
    assert!(record(&told).kicks().map(AsRawFd::as_raw_fd).eq([kick.fds()[0].as_raw_fd()]));
    assert_eq!(record(&told).way_back().map(AsRawFd::as_raw_fd), Some(backend.fds()[0].as_raw_fd()));
}

#[test]
fn answers_are_asked_for_only_where_a_worker_gives_them() {
    let features = number(request::SET_FEATURES, VERSION_1);
    let protocol = |bits| number(request::SET_PROTOCOL_FEATURES, bits);
    let asked = bare(request::GET_FEATURES);
    let without = [
        record(&[&features]),
        record(&[&protocol(REPLY_ACK), &features]),
        record(&[&asked, &protocol(!REPLY_ACK), &features]),
    ];
    for record in without {
        assert!(record.replay().iter().all(|frame| !frame.is_answered(true) || frame.payload().is_empty()));
    }
    let with = record(&[&asked, &protocol(REPLY_ACK), &features]).replay();
    assert_eq!(with.iter().filter(|frame| frame.is_answered(true)).count(), with.len());
}

#[test]
fn a_stopped_ring_goes_on_where_the_worker_said_and_is_not_started_again() {
    let kept = [ring(request::SET_VRING_NUM, 0, 64), addr(0, 1), number(request::SET_VRING_ERR, 0x100)];
    let gone =
        [ring(request::SET_VRING_BASE, 0, 0), with_fd(request::SET_VRING_KICK, 0), with_fd(request::SET_VRING_CALL, 0)];
    let mut record = record(&kept.iter().chain(&gone).collect::<Vec<_>>());
    let stop = ring(request::GET_VRING_BASE, 0, 0);
    record.apply(stop.clone(), Some(&answer(request::GET_VRING_BASE, &pair(0, 17))));
    let base = ring(request::SET_VRING_BASE, 0, 17);
    let [num, place, err] = &kept;
    assert_eq!(shown(&record.replay()), shown(&[num.clone(), base, place.clone(), err.clone(), fence()]));
    assert_eq!(record.kicks().count(), 0);
    // The addresses may have gone with the memory they were in, but those that come later have not.
    record.apply(memory(1), None);
    assert!(!record.replay().iter().any(|frame| frame.code() == request::SET_VRING_ADDR));
    record.apply(place.clone(), None);
    record.apply(memory(1), None);
    assert!(record.replay().iter().any(|frame| frame.code() == request::SET_VRING_ADDR));
    // Nor have those of a ring that was started again where it stopped.
    record.apply(stop, Some(&answer(request::GET_VRING_BASE, &pair(0, 17))));
    record.apply(with_fd(request::SET_VRING_KICK, 0), None);
    record.apply(memory(1), None);
    assert!(record.replay().iter().any(|frame| frame.code() == request::SET_VRING_ADDR));
}

#[test]
fn a_reset_forgets_rings_and_features_but_not_the_agreement() {
    let before = [
        bare(request::GET_FEATURES),
        number(request::SET_PROTOCOL_FEATURES, REPLY_ACK),
        bare(request::SET_OWNER),
        number(request::SET_FEATURES, PROTOCOL),
        memory(1),
        with_fd(request::SET_VRING_KICK, 3),
        ring(request::SET_VRING_ENABLE, 3, 1),
    ];
    let [asked, protocol, owner, _, table, ..] = &before;
    let mut record = record(&before.iter().collect::<Vec<_>>());
    record.apply(bare(request::RESET_DEVICE), None);
    let left = [protocol, owner, table].map(|frame| needing_reply(frame.clone()));
    let expected: Vec<_> = [asked.clone()].into_iter().chain(left).chain([fence()]).collect();
    assert_eq!(shown(&record.replay()), shown(&expected));
    record.apply(bare(request::RESET_OWNER), None);
    assert!(!record.replay().iter().any(|frame| frame.code() == request::SET_OWNER));
    assert_eq!(record.kicks().count(), 0);
}

#[test]
fn rings_that_features_enabled_are_enabled_again() {
    let enabling = number(request::SET_FEATURES, VERSION_1);
    let codes =
        |record: &Record| record.replay().iter().map(|frame| (frame.code(), frame.number())).collect::<Vec<_>>();
    let off = ring(request::SET_VRING_ENABLE, 0, 0);
    let mut record = record(&[&off, &enabling]);
    let last = (request::GET_PROTOCOL_FEATURES, None);
    assert_eq!(codes(&record), [(request::SET_FEATURES, Some(VERSION_1)), last]);
    record.apply(number(request::SET_FEATURES, PROTOCOL), None);
    record.apply(off.clone(), None);
    let expected = [
        (request::SET_FEATURES, Some(VERSION_1)),
        (request::SET_FEATURES, Some(PROTOCOL)),
        (request::SET_VRING_ENABLE, off.number()),
        last,
    ];
    assert_eq!(codes(&record), expected);
    record.apply(bare(request::RESET_DEVICE), None);
    assert_eq!(codes(&record), [last]);
}

#[test]
fn frames_that_do_not_fit_their_request_are_refused() {
    let fd = || vec![null()];
    let refused = [
        whole(request::SET_OWNER, REQUEST, &[0], Vec::new()),
        whole(request::RESET_DEVICE, REQUEST, &[], fd()),
        whole(request::SET_FEATURES, REQUEST, &[0; 4], Vec::new()),
        whole(request::SET_MEM_TABLE, REQUEST, &[0; 7], Vec::new()),
        whole(request::SET_MEM_TABLE, REQUEST, &[1, 0, 0, 0, 0, 0, 0, 0], Vec::new()),
        whole(request::SET_MEM_TABLE, REQUEST, memory(2).payload(), fd()),
        whole(request::SET_MEM_TABLE, REQUEST, &memory(1).payload()[..39], fd()),
        ring(request::SET_VRING_NUM, 256, 1),
        ring(request::GET_VRING_BASE, u32::MAX, 1),
        whole(request::SET_VRING_ENABLE, REQUEST, &[0; 12], Vec::new()),
        whole(request::SET_VRING_ADDR, REQUEST, &[0; 39], Vec::new()),
        addr(256, 0),
        number(request::SET_VRING_KICK, 3),
        with_fd(request::SET_VRING_KICK, 0x103),
        whole(request::SET_VRING_CALL, REQUEST, &[0; 8], vec![null(), null()]),
        whole(request::SET_VRING_ERR, REQUEST, &[0; 4], fd()),
        bare(request::SET_BACKEND_REQ_FD),
    ];
    for frame in refused {
        assert!(matches!(check(&frame), Err(FrameError::Shape { request }) if request == frame.code()), "{frame:?}");
    }
    // Bits that say nothing are the worker's to judge.
    assert!(check(&with_fd(request::SET_VRING_KICK, 0xff00_0000_0000_f2ff)).is_ok());
    assert!(check(&whole(0xdead, REQUEST, &[1; 99], fd())).is_ok());
}

/// A session on which answers are agreed, and everything so far is answered.
fn agreed() -> Session {
    let mut session = Session::new();
    let protocol = needing_reply(number(request::SET_PROTOCOL_FEATURES, REPLY_ACK));
    session.request(bare(request::GET_FEATURES)).unwrap();
    session.request(protocol).unwrap();
    assert!(!session.answer(answer(request::GET_FEATURES, &PROTOCOL.to_ne_bytes())).unwrap());
    assert!(!session.answer(ack(request::SET_PROTOCOL_FEATURES)).unwrap());
    session
}

/// What a new worker is sent at once, after which it has answered everything. True if the session is satisfied with that.
fn take_over(session: &mut Session) -> (Vec<Frame>, bool) {
    assert!(!session.detach());
    session.attach();
    let told = session.to_worker.clear();
    let mut satisfied = false;
    for frame in told.iter().filter(|frame| frame.is_answered(true)) {
        satisfied = session.answer(ack(frame.code())).unwrap();
    }
    (told, satisfied)
}

#[test]
fn what_is_open_is_sent_again_once_and_just_as_it_came() {
    let mut session = agreed();
    let owner = needing_reply(bare(request::SET_OWNER));
    let features = number(request::SET_FEATURES, PROTOCOL);
    let queues = bare(request::GET_QUEUE_NUM);
    let answered = session.to_vmm.clear();
    for frame in [&owner, &features, &queues] {
        session.request(frame.clone()).unwrap();
    }
    let (told, satisfied) = take_over(&mut session);
    assert_eq!(answered.len(), 2);
    let codes: Vec<_> = told.iter().map(Frame::code).collect();
    assert_eq!(codes, [request::GET_FEATURES, request::SET_PROTOCOL_FEATURES, request::GET_PROTOCOL_FEATURES]);
    assert!(!satisfied && session.to_vmm.clear().is_empty(), "the VMM sees nothing of a replay");
    assert_eq!(shown(&session.to_worker.clear()), shown([&owner, &features, &queues]));

    // The first is answered, and the next worker is told it and what followed, but not what is open still.
    assert!(!session.answer(ack(request::SET_OWNER)).unwrap());
    let (told, satisfied) = take_over(&mut session);
    let codes: Vec<_> = told.iter().map(Frame::code).collect();
    assert_eq!(codes[2..], [request::SET_OWNER, request::SET_FEATURES, request::GET_PROTOCOL_FEATURES]);
    assert!(!satisfied);
    assert_eq!(shown(&session.to_worker.clear()), shown([&queues]));
    assert!(session.answer(answer(request::GET_QUEUE_NUM, &3_u64.to_ne_bytes())).unwrap());
    let seen: Vec<_> = session.to_vmm.clear().iter().map(Frame::code).collect();
    assert_eq!(seen, [request::SET_OWNER, request::GET_QUEUE_NUM]);

    let (_, satisfied) = take_over(&mut session);
    assert!(satisfied, "nothing is open");
}

#[test]
fn the_vmm_is_not_read_while_a_worker_takes_over() {
    let mut session = agreed();
    session.request(bare(request::GET_QUEUE_NUM)).unwrap();
    session.to_worker.clear();
    assert!(session.wants_request());
    assert!(!session.detach());
    assert!(!session.wants_request());
    session.attach();
    session.to_worker.clear();
    for code in [request::GET_FEATURES, request::SET_PROTOCOL_FEATURES, request::GET_PROTOCOL_FEATURES] {
        assert!(!session.wants_request());
        assert!(!session.answer(ack(code)).unwrap());
    }
    session.to_worker.clear();
    assert!(!session.wants_request());
    assert!(session.answer(ack(request::GET_QUEUE_NUM)).unwrap());
    assert!(session.wants_request());
}

#[test]
fn a_request_that_was_refused_is_not_repeated() {
    let mut session = agreed();
    session.request(needing_reply(ring(request::SET_VRING_NUM, 0, 0))).unwrap();
    session.request(ring(request::SET_VRING_BASE, 0, 4)).unwrap();
    session.answer(refusal(request::SET_VRING_NUM)).unwrap();
    let (told, satisfied) = take_over(&mut session);
    let codes: Vec<_> = told.iter().map(Frame::code).collect();
    assert!(codes.contains(&request::SET_VRING_BASE) && !codes.contains(&request::SET_VRING_NUM));
    assert!(satisfied);
}

#[test]
fn only_the_answer_that_is_due_is_taken() {
    let due = ring(request::GET_VRING_BASE, 2, 0);
    let wrong = [
        ack(request::GET_FEATURES),
        answer(request::GET_VRING_BASE, &[]),
        answer(request::GET_VRING_BASE, &[0; 12]),
        answer(request::GET_VRING_BASE, &pair(1, 0)),
    ];
    for wrong in wrong {
        let mut session = agreed();
        session.to_vmm.clear();
        assert!(matches!(session.answer(ack(due.code())), Err(FrameError::Unexpected { .. })), "nothing is due");
        session.request(due.clone()).unwrap();
        assert!(session.answer(wrong).is_err());
        assert_eq!(session.to_vmm.frames(), 0);
        assert!(session.answer(answer(request::GET_VRING_BASE, &pair(2, 9))).is_ok());
    }
    let mut session = agreed();
    session.request(needing_reply(bare(request::SET_OWNER))).unwrap();
    assert!(matches!(session.answer(answer(request::SET_OWNER, &[0; 4])), Err(FrameError::Answer { .. })));
}

#[test]
fn too_many_workers_in_a_row_that_fail_to_take_over_are_too_many() {
    let mut session = agreed();
    session.request(bare(request::SET_OWNER)).unwrap();
    assert!(!session.detach(), "this one did not take over from anybody");
    for _ in 1..MAX_FAILURES {
        session.attach();
        session.answer(ack(request::GET_FEATURES)).unwrap();
        assert!(matches!(session.answer(refusal(request::SET_PROTOCOL_FEATURES)), Err(FrameError::Refused { .. })));
        assert!(!session.detach());
    }
    session.attach();
    session.to_worker.clear();
    for code in [request::GET_FEATURES, request::SET_PROTOCOL_FEATURES, request::SET_OWNER] {
        session.answer(ack(code)).unwrap();
    }
    assert!(session.answer(ack(request::GET_PROTOCOL_FEATURES)).unwrap(), "one that takes over ends the row");
    assert!(!session.detach());
    for failures in 1..=MAX_FAILURES {
        session.attach();
        assert_eq!(session.detach(), failures == MAX_FAILURES);
    }
}

#[test]
fn a_vmm_that_waits_for_no_answer_and_one_that_reads_none_are_held_back() {
    let mut session = agreed();
    session.to_worker.clear();
    let mut sent = 0;
    while session.wants_request() {
        session.request(bare(request::GET_QUEUE_NUM)).unwrap();
        session.to_worker.clear();
        sent += 1;
        assert!(sent <= 64);
    }
    for _ in 0..sent {
        session.answer(ack(request::GET_QUEUE_NUM)).unwrap();
    }
    assert!(session.wants_request());

    let mut bytes = 0;
    while session.wants_request() {
        session.request(bare(request::GET_CONFIG)).unwrap();
        session.to_worker.clear();
        session.answer(answer(request::GET_CONFIG, &[0; 4096])).unwrap();
        bytes += 4096;
        assert!(bytes <= 128 << 10);
    }
    session.to_vmm.clear();
    assert!(session.wants_request());

    let mut fds = 0;
    while session.wants_request() {
        session.request(memory(32)).unwrap();
        fds += 32;
        assert!(fds <= 128);
    }
    session.to_worker.clear();
    assert!(session.wants_request(), "all but the last table are closed");
}
