//! Sessions, buffers and streams do what they say, over a fake device.

mod fake;

use std::thread;
use std::time::{Duration, Instant};

use fake::{CREDITS, FPGA, Fake, GPU, PAGE, Sabotage};
use peergate_guest::{
    Access, Error, EventKind, FaultReason, Session, Status, TransferPath, copy_all, download, upload,
};

fn open() -> (Fake, Session) {
    let fake = Fake::new(Sabotage::None);
    let session = Session::open(&fake).expect("the fake device opens");
    (fake, session)
}

#[test]
fn what_is_owned_gives_itself_back() {
    let (fake, session) = open();
    let buffer = session.alloc(GPU, 3 * PAGE + 1, Access::RW).expect("memory");
    let host = session.map(1, Access::RW).expect("memory");
    assert_eq!((buffer.len(), host.len(), fake.mappings()), (4 * PAGE, PAGE, 2));
    drop(host);
    assert_eq!((fake.used(GPU), fake.mappings()), (4 * PAGE, 1));
    drop(session);
    assert_eq!(fake.domains(), 1, "a buffer keeps its session open");
    drop(buffer);
    assert_eq!((fake.used(GPU), fake.mappings(), fake.domains()), (0, 0, 0));
}

#[test]
fn freeing_or_unmapping_by_hand_happens_once() {
    let (fake, session) = open();
    session.alloc(GPU, PAGE, Access::RW).expect("memory").free().expect("freed");
    let mut host = session.map(PAGE, Access::RW).expect("memory");
    host.unmap().expect("unmapped");
    host.write_at(0, b"still mine").expect("the memory is there");
    host.unmap().expect("nothing to do");
    drop(host);
    assert_eq!(fake.mappings(), 0);
}

#[test]
fn endpoints_are_found_by_name_and_number() {
    let (_, session) = open();
    assert_eq!(session.endpoint("fpga0").expect("by name").number, FPGA);
    assert_eq!(session.endpoint("1").expect("by number").name, "gpu0");
    let error = session.endpoint("gpu9").expect_err("there is none").to_string();
    assert!(error.contains("gpu9") && error.contains("gpu0, fpga0"), "{error}");
}

#[test]
fn bytes_arrive_whole_and_progress_counts_up_to_them() {
    let (_, session) = open();
    let len = (5 << 20) + 123;
    let bytes: Vec<u8> = (0..len).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let total = u64::from(len);
    let source = session.alloc(GPU, total, Access::RW).expect("memory");
    let target = session.alloc(FPGA, total, Access::RW).expect("memory");
    session.peer_enable(GPU, FPGA, Access::WRITE).expect("granted");
    let stream = session.stream().by(GPU);
    let mut told = Vec::new();
    upload(&stream, source.iova(), &mut &bytes[..], total, &mut |done| told.push(done)).expect("uploaded");
    let moved = copy_all(&stream, target.iova(), source.iova(), total, &mut |done| told.push(done)).expect("copied");
    let mut back = Vec::new();
    session.peer_enable(GPU, FPGA, Access::READ).expect("granted");
    download(&stream, target.iova(), &mut back, total, &mut |done| told.push(done)).expect("downloaded");
    assert_eq!((moved.bytes, moved.path), (total, TransferPath::Direct));
    assert!(back == bytes, "the bytes differ");
    assert_eq!(told.iter().filter(|done| **done == total).count(), 3, "{told:?}");
}

#[test]
fn an_input_that_ends_early_is_an_error_and_leaves_the_stream_usable() {
    let (_, session) = open();
    let buffer = session.alloc(GPU, 4 << 20, Access::RW).expect("memory");
    let stream = session.stream();
    let result = upload(&stream, buffer.iova(), &mut &vec![0; 3 << 20][..], 4 << 20, &mut |_| {});
    assert!(matches!(result, Err(Error::System { .. })));
    stream.fill(buffer.iova(), 0, 8).expect("taken").wait().expect("runs");
}

#[test]
fn a_long_copy_reports_its_first_error() {
    let (_, session) = open();
    let source = session.alloc(GPU, 32 << 20, Access::RW).expect("memory");
    let target = session.alloc(GPU, 10 << 20, Access::RW).expect("memory");
    let stream = session.stream();
    let error = copy_all(&stream, target.iova(), source.iova(), 32 << 20, &mut |_| {}).expect_err("too long");
    let Error::Transfer { outcome } = error else { panic!("{error}") };
    let fault = outcome.fault.expect("a fault");
    assert_eq!(
        (outcome.status, fault.reason, fault.address),
        (Status::Fault, FaultReason::Mapping, target.iova() + target.len())
    );
    let later = stream.fill(target.iova(), 0, 8).expect("taken").wait().expect_err("the stream stays in error");
    assert_eq!(later.status(), Some(Status::Cancelled));
    stream.reset().expect("reset");
    stream.fill(target.iova(), 0, 8).expect("taken").wait().expect("runs again");
}

#[test]
fn every_waiter_gets_its_own_outcome() {
    let (_, session) = open();
    let buffer = session.alloc(GPU, PAGE, Access::RW).expect("memory");
    thread::scope(|scope| {
        for n in 0..4_u64 {
            let (session, buffer) = (&session, &buffer);
            scope.spawn(move || {
                let stream = session.stream();
                for i in 1..200 {
                    let len = n * 200 + i;
                    let outcome = stream.fill(buffer.iova(), n, len).expect("taken").wait().expect("runs");
                    assert_eq!(outcome.bytes, len);
                }
            });
        }
    });
}

#[test]
fn outcomes_can_be_asked_for_in_any_order_and_forgotten() {
    let (_, session) = open();
    let buffer = session.alloc(GPU, PAGE, Access::RW).expect("memory");
    let stream = session.stream();
    let work: Vec<_> = (1..=CREDITS as u64).map(|len| stream.fill_work(buffer.iova(), 0, len)).collect();
    let mut tickets = session.submit_all(&work).expect("taken");
    tickets.truncate(40);
    for (len, ticket) in tickets.into_iter().enumerate().rev() {
        assert_eq!(ticket.wait().expect("runs").bytes, len as u64 + 1);
    }
}

#[test]
fn a_deadline_ends_a_wait_for_what_never_comes() {
    let (_, session) = open();
    assert_eq!(session.event(Instant::now() + Duration::from_millis(5)).expect("no error"), None);
}

#[test]
fn a_fault_is_told_twice_completion_and_event() {
    let (_, session) = open();
    let stream = session.stream().by(GPU);
    let ticket = stream.fill(0x7000, 0, 8).expect("taken");
    let outcome = ticket.outcome(session.patience()).expect("it ends");
    assert_eq!(outcome.fault.map(|fault| fault.address), Some(0x7000));
    let notice = session.event(session.patience()).expect("no error").expect("an event");
    assert_eq!((notice.kind, notice.cookie, notice.access), (Some(EventKind::Fault), ticket.cookie(), Access::WRITE));
    assert_eq!((notice.accessor, notice.owner), (Some(GPU), None));
    let text = outcome.ok().expect_err("an error").to_string();
    assert_eq!(
        text,
        "The transfer ended with FAULT (MAPPING) at address 0x7000 after 0 bytes: nothing is mapped there"
    );
}

#[test]
fn registers_load_what_was_stored_and_only_an_fpga_has_them() {
    let (_, session) = open();
    let registers = session.registers(&session.endpoint("fpga0").expect("there")).expect("it has some");
    registers.store(0x28, 0x0123_4567_89ab_cdef).expect("stored");
    assert_eq!(registers.load(0x28).expect("loaded"), 0x0123_4567_89ab_cdef);
    assert!(matches!(registers.load(PAGE), Err(Error::Bounds { .. })));
    assert!(matches!(session.registers(&session.endpoint("gpu0").expect("there")), Err(Error::NoRegisters { .. })));
}
