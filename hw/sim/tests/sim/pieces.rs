//! Transfers that cross links piece by piece, with a clock that the tests move. A byte takes a microsecond, a piece has a hundred bytes, and
//! nobody books while a link is booked for longer than a piece.

use std::time::Duration;

use hw_engine::{DmaEngine, EngineError, JobId, Route, Segments, Work};

use crate::common::{Desk, FPGA, GPU, Wires, copy, devices, own, ram};

const MICRO: Duration = Duration::from_micros(1);

fn desk(engines: u16) -> Desk {
    Desk::by_hand(&devices(Duration::ZERO, engines), Wires::pieces(MICRO, 100 * MICRO, 100))
}

fn straight(dst: Segments, src: Segments) -> Work {
    copy(dst, src, Route::Direct)
}

/// From the GPU to the FPGA.
fn send(desk: &Desk, len: u64) {
    desk.send(GPU, straight(own(FPGA, 0, len), own(GPU, 0, len)));
}

/// Which job ended when, in microseconds.
fn ends(desk: &Desk) -> Vec<(u64, u128)> {
    desk.ends().into_iter().map(|(job, at)| (job, at / 1000)).collect()
}

#[test]
fn a_small_transfer_passes_a_large_one() {
    let desk = desk(1);
    send(&desk, 10_000);
    desk.clock.advance(550 * MICRO);
    desk.engine.poll(&mut Vec::new());
    send(&desk, 30);
    // The large one is booked until 700.
    assert_eq!(ends(&desk), [(1, 730), (0, 10_030)]);
}

#[test]
fn large_transfers_go_side_by_side() {
    let desk = desk(1);
    (0..3).for_each(|_| send(&desk, 1000));
    // The first one goes on while the others begin.
    assert_eq!(ends(&desk), [(0, 2500), (1, 2900), (2, 3000)]);
}

#[test]
fn however_many_small_ones_come_a_large_one_has_every_other_piece() {
    let desk = desk(1);
    send(&desk, 1000);
    (0..20).for_each(|_| send(&desk, 100));
    let ends = ends(&desk);
    let large = ends.iter().find(|(job, _)| *job == 0).unwrap().1;
    assert!((1700..=2000).contains(&large), "{ends:?}");
    assert_eq!(ends.last(), Some(&(20, 3000)), "in the order in which they came");
}

#[test]
fn a_link_that_is_busy_holds_up_nobody_on_another_one() {
    let desk = desk(1);
    desk.send(GPU, straight(own(GPU, 0, 5000), ram(0x1000, 5000)));
    desk.send(GPU, straight(own(GPU, 0, 5000), ram(0x1000, 5000)));
    desk.send(FPGA, straight(own(FPGA, 0, 200), ram(0x1000, 200)));
    assert_eq!(ends(&desk), [(2, 200), (0, 9800), (1, 10_000)]);
}

#[test]
fn the_second_hop_of_a_staged_copy_begins_when_the_first_is_over() {
    let desk = desk(1);
    desk.send(GPU, copy(own(FPGA, 0, 1000), own(GPU, 0, 1000), Route::Staged));
    desk.clock.advance(950 * MICRO);
    desk.engine.poll(&mut Vec::new());
    // Nothing has entered the FPGA yet.
    desk.send(FPGA, straight(own(FPGA, 0, 40), ram(0x1000, 40)));
    assert_eq!(ends(&desk), [(1, 990), (0, 2000)]);
}

#[test]
fn shares_of_a_list_add_up_whatever_the_pieces_are() {
    let desk = desk(1);
    // Of seven bytes, three come from the GPU and four from the guest; all go into the FPGA.
    let src = [own(GPU, 0, 333), ram(0x1000, 444)].concat().into();
    desk.send(GPU, straight(own(FPGA, 0, 777), src));
    assert_eq!(ends(&desk), [(0, 777)]);
    desk.send(GPU, straight(ram(0x1000, 10), own(GPU, 0, 10)));
    assert_eq!(ends(&desk), [(1, 787)]);
}

#[test]
fn a_flush_waits_for_what_is_still_on_its_way() {
    let desk = desk(1);
    send(&desk, 1000);
    desk.send(GPU, Work::Flush);
    desk.send(FPGA, straight(ram(0x1000, 30), own(FPGA, 0, 30)));
    desk.send(GPU, Work::Flush);
    assert_eq!(ends(&desk), [(2, 30), (0, 1000), (1, 1000), (3, 1000)]);
    send(&desk, 1000);
    desk.send(GPU, Work::Flush);
    desk.engine.abort(JobId(4));
    let mut out = Vec::new();
    desk.engine.poll(&mut out);
    assert_eq!(
        out.iter().map(|end| (end.job.0, end.result)).collect::<Vec<_>>(),
        [(4, Err(EngineError::Aborted)), (5, Ok(()))]
    );
}

#[test]
fn what_is_given_up_books_no_more() {
    let desk = desk(1);
    desk.memory.fill(own(GPU, 0, 1)[0].at, 10_000, u64::MAX).unwrap();
    send(&desk, 10_000);
    send(&desk, 300);
    desk.engine.abort(JobId(0));
    assert_eq!(desk.bytes(&own(FPGA, 300, 9_700)), vec![0; 9_700], "what is not due has not been moved");
    let mut out = Vec::new();
    desk.engine.poll(&mut out);
    assert_eq!((out[0].bytes, out[0].result), (0, Err(EngineError::Aborted)));
    // Two pieces of it had been booked.
    assert_eq!(ends(&desk), [(1, 500)]);
}

#[test]
fn a_quiet_engine_by_hand_gives_up_what_is_on_its_way() {
    let desk = desk(1);
    send(&desk, 10_000);
    desk.send(GPU, Work::Flush);
    let mut out = Vec::new();
    desk.engine.quiesce(&mut out);
    assert!(out.iter().all(|end| end.result == Err(EngineError::Aborted)), "{out:?}");
    assert_eq!((out.len(), ends(&desk)), (2, vec![]));
    send(&desk, 100);
    assert_eq!(ends(&desk).len(), 1, "and goes on");
}

#[test]
fn who_looks_late_is_given_the_time_that_has_passed() {
    let desk = desk(1);
    send(&desk, 1000);
    // Nobody looked for a long time.
    desk.clock.advance(5000 * MICRO);
    assert_eq!(ends(&desk), [(0, 5000)]);
    send(&desk, 100);
    assert_eq!(ends(&desk), [(1, 5100)]);
}
