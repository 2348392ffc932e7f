//! A process dies with chains in hand: the next one answers each of them, once.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use std::sync::atomic::Ordering;

use common::crash::survives;
use common::*;
use proptest::prelude::*;
use vdev_device::Counter;
use vdev_wire::{Opcode, Status, WorkDescriptor};
use vm_memory::{Bytes, GuestAddress};

const LOST: Option<Status> = Some(Status::Lost);
const OK: Option<Status> = Some(Status::Ok);

/// A device with a journal, with GPU and FPGA attached to domain 1 and data memory mapped.
fn ready() -> Bed {
    Bed::strict(spec()).prepared()
}

fn fills(first: u64, count: u64) -> Vec<WorkDescriptor> {
    (first..first + count).map(|n| fill(IOVA + DATA + 64 * n, 8, 1000 + n).cookie(n).stream(n as u32 % 3)).collect()
}

/// A new driver works with the device.
fn works(bed: &mut Bed) {
    bed.hello();
    bed.attach(1, GPU);
    bed.map(1, DATA, 1 << 20);
    assert_eq!(status(&bed.run_one(1, fill(IOVA + DATA, 8, 77))), Status::Ok);
    assert_eq!(bed.ram(DATA, 8), 77_u64.to_le_bytes());
}

#[test]
fn work_in_hand_is_lost_once_and_what_had_ended_stays() {
    let mut bed = ready();
    bed.engine.set(Mode::Hold);
    let (first, second) = (bed.submit(1, &fills(0, 3)), bed.submit_on(3, 1, &fills(3, 2)));
    bed.drain();
    bed.engine.release(1);
    bed.drain();
    assert_eq!(bed.statuses(first), [None, OK, None]);

    assert!(bed.succeed(None));
    assert_eq!(bed.statuses(first), [LOST, OK, LOST]);
    assert_eq!(bed.statuses(second), [LOST, LOST]);
    let cookies: Vec<_> = bed.records(first).iter().map(|record| record.cookie.get()).collect();
    assert_eq!(cookies, [0, 1, 2]);
    assert_eq!(bed.rings[2].signals(), 1, "nobody else would wake the driver");
    assert!(bed.is_used(first) && bed.is_used(second));
    assert_eq!(bed.seen.count_of(Counter::Lost), 4);

    assert!(bed.succeed(None));
    bed.drain();
    assert_eq!(bed.rings[2].outstanding() + bed.rings[3].outstanding(), 0);
    works(&mut bed);
}

#[test]
fn answers_come_in_the_order_in_which_chains_were_taken() {
    let mut bed = ready();
    bed.engine.set(Mode::Hold);
    let batches: Vec<_> = (0..4).map(|n| bed.submit(1, &[fill(IOVA + DATA, 8, n).stream(n as u32)])).collect();
    bed.drain();
    // Heads that come back make the later order another one than that of the heads.
    bed.engine.release(0);
    bed.engine.release(1);
    bed.drain();
    assert!(bed.is_used(batches[0]) && bed.is_used(batches[2]));
    let late: Vec<_> = (0..2).map(|n| bed.submit(1, &[fill(IOVA + DATA, 8, n).stream(9)])).collect();
    bed.drain();
    assert!(bed.succeed(None));
    let order: Vec<_> = bed.rings[2].take_used().into_iter().map(|(head, _)| head).collect();
    assert_eq!(order, [batches[1].head, batches[3].head, late[0].head, late[1].head]);
}

#[test]
fn request_in_hand_is_answered_lost() {
    let mut bed = ready();
    bed.engine.set(Mode::Hold);
    bed.submit(1, &fills(0, 1));
    bed.drain();
    let unmap = bed.start(Opcode::Unmap, 1, zerocopy::IntoBytes::as_bytes(&unmap(IOVA + DATA, IOVA + DATA + 0xf_ffff)));
    assert_eq!(bed.answer(unmap), None, "it drains");
    assert!(bed.succeed(None));
    let answer = bed.answer(unmap).unwrap();
    assert_eq!((answer.status, answer.detail, answer.body.len()), (Status::Lost, 0, 0));
    works(&mut bed);
}

#[test]
fn chain_without_room_for_an_answer_comes_back_empty() {
    let mut bed = ready();
    let hold = |bed: &mut Bed, queue: usize, head: u16| {
        // As if it had been taken and not answered.
        bed.process.die_in(2);
        assert!(!survives(|| assert!(bed.device.drain(queue as u16))));
        assert!(bed.succeed(None));
        bed.used(queue, head)
    };
    let at = bed.put(&[0; 64]);
    let head = bed.rings[0].push(&[(at, 20)], &[(at + 32, 15)]);
    assert_eq!(hold(&mut bed, 0, head), Some(0));
    let head = bed.rings[2].push(&[(at, 20)], &[(at + 32, 15)]);
    assert_eq!(hold(&mut bed, 2, head), Some(0));
}

#[test]
fn driver_of_the_old_session_learns_it_before_any_hello() {
    let mut bed = ready();
    let old = bed.session;
    assert!(bed.succeed(None));
    let new = std::mem::replace(&mut bed.session, old);
    assert_eq!(status(&bed.run_one(1, fill(IOVA + DATA, 8, 1))), Status::Lost);
    let answer = bed.call(Opcode::Probe, 0, &[]);
    assert_eq!((answer.status, answer.detail), (Status::Stale, u64::from(new)));
    bed.session = new;
    works(&mut bed);
}

#[test]
fn queue_that_stopped_goes_on_where_it_stopped_whatever_the_transport_says() {
    let mut bed = ready();
    assert_eq!(bed.run(1, &fills(0, 3)).len(), 3);
    bed.device.stop_queue(2);
    assert!(bed.succeed(None));
    bed.drain();
    assert_eq!((bed.rings[2].outstanding(), bed.rings[2].signals()), (0, 0), "nothing was to be done again");
    works(&mut bed);
}

#[test]
fn ring_that_is_laid_out_anew_begins_anew() {
    let mut bed = ready();
    bed.engine.set(Mode::Hold);
    bed.submit(1, &fills(0, 1));
    bed.drain();
    bed.device.stop_queue(2);
    bed.rings[2] = DriverRing::new(&bed.mem, 0x10_0000 + 0x4000 * 2, 64);
    assert!(bed.succeed(None));
    works(&mut bed);
}

#[test]
fn void_journal_says_nothing() {
    let mut bed = ready();
    bed.engine.set(Mode::Hold);
    bed.submit(1, &fills(0, 2));
    bed.drain();
    bed.journal[0].store(0, Ordering::Relaxed);
    for queue in 0..4 {
        bed.rings[queue] = DriverRing::new(&bed.mem, 0x10_0000 + 0x4000 * queue as u64, 64);
    }
    assert!(bed.succeed(None));
    assert_eq!((0..4).map(|queue| bed.rings[queue].signals()).sum::<usize>(), 0);
    works(&mut bed);
}

#[test]
fn queue_that_was_in_use_must_be_started_before_it_stops() {
    let bed = ready();
    assert!(!bed.device.must_resume(2), "it runs");
    bed.device.stop_queue(2);
    assert!(bed.device.must_resume(2));
    // Whoever stops it all the same has nobody answered.
    bed.device.stop_queue(2);
    assert!(!bed.device.must_resume(2));
}

/// What the driver waits for.
#[derive(Default)]
struct Owed {
    batches: Vec<Batch>,
    calls: Vec<Call>,
    buffers: usize,
    /// Events and empty buffers that came.
    events: [usize; 2],
}

impl Owed {
    fn submit(&mut self, bed: &mut Bed, queue: usize, works: &[WorkDescriptor]) {
        self.batches.push(bed.submit_on(queue, 1, works));
    }

    fn post(&mut self, bed: &mut Bed, count: usize) {
        bed.post_events(count);
        self.buffers += count;
    }

    /// Takes what came, and checks it.
    fn collect(&mut self, bed: &mut Bed) {
        let batches = std::mem::take(&mut self.batches);
        self.batches = batches.into_iter().filter(|batch| !bed.is_used(*batch) || check(bed, *batch)).collect();
        self.calls.retain(|call| bed.answered(*call).is_none());
        for (_, len) in bed.rings[1].take_used() {
            assert!(len == 64 || len == 0, "{len} bytes of an event");
            self.events[usize::from(len == 0)] += 1;
            self.buffers -= 1;
        }
    }

    /// Everything comes, except for buffers without events.
    fn settle(&mut self, bed: &mut Bed) {
        bed.drain();
        bed.engine.set(Mode::Inline);
        bed.engine.release_all();
        bed.drain();
        self.collect(bed);
        assert_eq!((self.batches.len(), self.calls.len()), (0, 0), "every chain came back");
        assert_eq!(bed.rings[1].outstanding(), self.buffers);
        assert_eq!([0, 2, 3].map(|queue| bed.rings[queue].outstanding()), [0; 3]);
    }
}

/// Every record of a batch that came back is final, and what it says is true. False, for the filter above.
fn check(bed: &Bed, batch: Batch) -> bool {
    for record in bed.records(batch) {
        let cookie = record.cookie.get();
        match Status::from_raw(record.status.get()) {
            Some(Status::Ok) => assert_eq!(bed.ram(DATA + 64 * cookie, 8), (1000 + cookie).to_le_bytes()),
            Some(_) => {}
            None => panic!("work {cookie} has no outcome"),
        }
    }
    false
}

/// Work on two queues that ends at once, waits, and is refused with an event; a request; heads that are used again.
fn scenario(bed: &mut Bed, owed: &mut Owed) -> bool {
    owed.post(bed, 3);
    for round in 0..3 {
        let first = 20 * round;
        owed.submit(bed, 2, &fills(first, 3));
        bed.engine.set(if round == 1 { Mode::Hold } else { Mode::Inline });
        owed.submit(bed, 3, &fills(first + 10, 2));
        owed.submit(bed, 2, &[fill(0x5000, 8, 1).cookie(900).stream(7)]);
        owed.calls.push(bed.start(Opcode::Probe, 0, &[]));
        if !survives(|| bed.drain()) {
            return false;
        }
        owed.collect(bed);
        while bed.engine.held() > 0 {
            bed.engine.release(bed.engine.held() - 1);
            if !survives(|| bed.drain()) {
                return false;
            }
        }
        owed.collect(bed);
    }
    true
}

/// The scenario with a death at a step, and one while the next process resumes. Says whether there was time for either.
fn dies(step: u64, resuming: u64) -> (bool, bool) {
    let mut bed = ready();
    let mut owed = Owed::default();
    bed.process.die_in(step);
    let ended = scenario(&mut bed, &mut owed);
    let resumed = bed.succeed(Some(resuming));
    if !resumed {
        assert!(bed.succeed(None));
    }
    owed.settle(&mut bed);
    works(&mut bed);
    (!ended, !resumed)
}

#[test]
fn death_at_any_step_loses_nothing_and_repeats_nothing() {
    let steps = (0..).take_while(|step| dies(*step, step * 7 % 40).0).count();
    assert!(steps > 100, "{steps} steps are not all");
}

#[test]
fn death_while_resuming_loses_nothing_and_repeats_nothing() {
    for step in [60, 133, 180] {
        let steps = (0..).take_while(|resuming| dies(step, *resuming).1).count();
        assert!(steps > 20, "{steps} steps are not all");
    }
}

// What no process of ours leaves behind.

/// Words about queue 2: state, size, table, used ring.
const HEADER: usize = 8 + 8 * 2;
const MARKS: usize = 1024 + 1024 * 2;

fn tamper(bed: &Bed, word: usize, value: u64) {
    bed.journal[word].store(value, Ordering::Relaxed);
}

#[test]
fn marks_beyond_the_ring_are_never_looked_at() {
    let mut bed = ready();
    for head in 64..1024 {
        tamper(&bed, MARKS + head, 1);
    }
    assert!(bed.succeed(None));
    works(&mut bed);
}

#[test]
fn more_marks_than_available_chains_are_not_believed() {
    let mut bed = ready();
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &fills(0, 1));
    bed.drain();
    for head in 0..64 {
        tamper(&bed, MARKS + head, 1);
    }
    assert!(bed.succeed(None));
    // It goes on from the used index: the chain is taken again, and its session is another one.
    bed.drain();
    assert!(bed.is_used(batch));
    assert_eq!(bed.statuses(batch), [LOST]);
    works(&mut bed);
}

#[test]
fn journal_of_another_ring_is_not_believed() {
    for word in 1..4 {
        let mut bed = ready();
        bed.engine.set(Mode::Hold);
        let batch = bed.submit(1, &fills(0, 1));
        bed.drain();
        tamper(&bed, HEADER + word, 5);
        assert!(bed.succeed(None));
        bed.drain();
        assert!(bed.is_used(batch));
        assert_eq!(bed.statuses(batch), [LOST]);
        works(&mut bed);
    }
}

#[test]
fn chain_going_back_is_in_hand_until_the_used_index_has_moved() {
    for used in [0, 5, 65535] {
        let mut bed = ready();
        bed.engine.set(Mode::Hold);
        let batch = bed.submit(1, &fills(0, 1));
        bed.drain();
        tamper(&bed, MARKS + usize::from(batch.head), used << 2 | 3);
        assert!(bed.succeed(None));
        assert_eq!(bed.rings[2].take_used().len(), usize::from(used != 65535), "65535 + 1 is where the index stands");
        assert_eq!(bed.statuses(batch), if used == 65535 { [None] } else { [LOST] });
    }
}

#[test]
fn ring_outside_guest_memory_rests() {
    let mut bed = ready();
    bed.engine.set(Mode::Hold);
    bed.submit(1, &fills(0, 1));
    bed.drain();
    tamper(&bed, HEADER + 3, RAM_LEN);
    bed.rings[2].break_used_ring(RAM_LEN);
    bed.process.die();
    assert!(bed.succeed(None));
    bed.drain();
    bed.hello();
}

#[test]
fn torn_status_counts_as_pending() {
    let mut bed = ready();
    bed.engine.set(Mode::Hold);
    let batch = bed.submit(1, &fills(0, 1));
    bed.drain();
    bed.mem.write_obj(0xffff_0000_u32.to_le(), GuestAddress(bed.record_at(batch, 0) + 28)).unwrap();
    assert!(bed.succeed(None));
    assert_eq!(bed.statuses(batch), [LOST]);
}

/// What a guest, an engine or time may do.
#[derive(Clone, Debug)]
enum Step {
    Submit(usize, u64),
    Refused(usize),
    Call,
    Post(usize),
    Hold(bool),
    Release(usize),
    Drain,
    Collect,
    Restart(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (2usize..4, 1u64..6).prop_map(|(queue, count)| Step::Submit(queue, count)),
        1 => (2usize..4).prop_map(Step::Refused),
        2 => Just(Step::Call),
        1 => (1usize..4).prop_map(Step::Post),
        2 => any::<bool>().prop_map(Step::Hold),
        3 => (0usize..8).prop_map(Step::Release),
        6 => Just(Step::Drain),
        3 => Just(Step::Collect),
        1 => (0u16..4).prop_map(Step::Restart),
    ]
}

/// False if the process died.
fn perform(bed: &mut Bed, owed: &mut Owed, next: &mut u64, step: &Step) -> bool {
    match *step {
        Step::Submit(queue, count) if bed.rings[queue].room() >= 2 => {
            owed.submit(bed, queue, &fills(*next, count));
            *next = (*next + count) % 8000;
        }
        Step::Refused(queue) if bed.rings[queue].room() >= 2 => {
            owed.submit(bed, queue, &[fill(0x5000, 8, 1).cookie(9000).stream(7)]);
        }
        Step::Call if bed.rings[0].room() >= 2 => owed.calls.push(bed.start(Opcode::Probe, 0, &[])),
        Step::Post(count) if bed.rings[1].room() >= count => owed.post(bed, count),
        Step::Hold(hold) => bed.engine.set(if hold { Mode::Hold } else { Mode::Inline }),
        Step::Release(index) if index < bed.engine.held() => bed.engine.release(index),
        Step::Drain => return survives(|| bed.drain()),
        Step::Collect => owed.collect(bed),
        Step::Restart(queue) if bed.engine.held() == 0 => {
            return survives(|| {
                bed.drain();
                bed.device.stop_queue(queue);
                bed.rings[usize::from(queue)].serve(&bed.process);
                bed.device.start_queue(queue, bed.rings[usize::from(queue)].ring.clone());
            });
        }
        _ => {}
    }
    true
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// Whatever is under way when processes die one after another, everything gets exactly one outcome.
    #[test]
    fn random_work_and_random_deaths_lose_nothing_and_repeat_nothing(
        lives in proptest::collection::vec((proptest::collection::vec(step(), 1..40), 0u64..300, 0u64..60), 1..5),
    ) {
        let mut bed = ready();
        let (mut owed, mut next) = (Owed::default(), 0);
        for (steps, life, birth) in &lives {
            bed.process.die_in(*life);
            let alive = steps.iter().all(|step| perform(&mut bed, &mut owed, &mut next, step));
            if alive {
                bed.process.die();
            }
            if !bed.succeed(Some(*birth)) {
                prop_assert!(bed.succeed(None));
            }
            // The driver notices, and begins anew.
            bed.drain();
            owed.collect(&mut bed);
            bed = bed.prepared();
        }
        owed.settle(&mut bed);
        works(&mut bed);
    }

    /// Whatever a hostile process wrote, the next one neither panics nor hangs, and serves a driver that begins anew.
    #[test]
    fn garbage_in_the_journal_harms_nobody(
        words in proptest::collection::vec((0usize..6000, prop_oneof![0u64..8, any::<u64>()]), 0..200),
        states in proptest::array::uniform4(0u64..4),
    ) {
        let mut bed = ready();
        bed.engine.set(Mode::Hold);
        for queue in [2, 3] {
            bed.submit_on(queue, 1, &fills(0, 3));
        }
        bed.post_events(4);
        bed.drain();
        for (word, value) in words {
            tamper(&bed, word, value);
        }
        for (queue, state) in (0..).zip(states) {
            tamper(&bed, 8 + 8 * queue, state);
        }
        for ring in &mut bed.rings {
            ring.serve(&bed.process);
        }
        prop_assert!(bed.succeed(None));
        bed.drain();
        for (queue, ring) in (0..).zip(&mut bed.rings) {
            bed.device.stop_queue(queue);
            *ring = DriverRing::new(&bed.mem, 0x10_0000 + 0x4000 * u64::from(queue), 32);
            ring.serve(&bed.process);
            bed.device.start_queue(queue, ring.ring.clone());
        }
        works(&mut bed);
    }
}
