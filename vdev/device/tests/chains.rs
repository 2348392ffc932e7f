//! Hostile and broken chains: every one comes back, nothing breaks, and a ring that makes no sense stops without harm.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use common::ring::{INDIRECT, NEXT, WRITE};
use common::*;
use proptest::prelude::*;
use vdev_device::Counter;
use vdev_wire::{ControlHeader, ControlReply, Opcode, Status};
use vm_memory::{Bytes, GuestAddress};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A request that answers OK, as bytes.
fn flush() -> Vec<u8> {
    let mut header = ControlHeader::new_zeroed();
    header.opcode = (Opcode::Flush as u16).into();
    header.domain = 1.into();
    header.session = SESSION.into();
    [header.as_bytes(), &[0; 8]].concat()
}

struct Chains {
    bed: Bed,
    request: u64,
    reply: u64,
}

impl Chains {
    fn new() -> Self {
        let mut bed = Bed::ready();
        let (request, reply) = (bed.put(&flush()), bed.put(&[0xee; 64]));
        Self { bed, request, reply }
    }

    fn set(&mut self, index: u16, at: u64, len: u32, flags: u16, next: u16) {
        self.bed.rings[0].set(index, at, len, flags, next);
    }

    /// Offers head 0 and gives the used length and, if it was written, the reply's status.
    fn offer(&mut self) -> (u32, Option<Status>) {
        self.bed.set_ram(self.reply, &[0xee; 64]);
        self.bed.rings[0].offer(0);
        self.bed.drain();
        let len = self.bed.used(0, 0).expect("the chain came back");
        let reply = ControlReply::read_from_bytes(&self.bed.ram(self.reply, 16)).unwrap();
        (len, Status::from_raw(reply.status.get()))
    }

    /// The device still answers.
    fn assert_alive(&mut self) {
        let (request, reply) = (self.request, self.reply);
        self.set(0, request, 24, NEXT, 1);
        self.set(1, reply, 64, WRITE, 0);
        assert_eq!(self.offer(), (16, Some(Status::Ok)));
    }
}

const REFUSED: (u32, Option<Status>) = (16, Some(Status::Inval));
const SILENT: (u32, Option<Status>) = (0, None);

#[test]
fn chain_of_any_valid_shape_is_answered() {
    let mut c = Chains::new();
    let (request, reply) = (c.request, c.reply);
    c.assert_alive();
    // Request and reply in pieces.
    c.set(0, request, 10, NEXT, 5);
    c.set(5, request + 10, 14, NEXT, 2);
    c.set(2, reply, 1, NEXT | WRITE, 3);
    c.set(3, reply + 1, 15, WRITE, 0);
    assert_eq!(c.offer(), (16, Some(Status::Ok)));
    // An indirect table.
    let table = c.bed.room(32);
    ring::DriverRing::write(&c.bed.mem, table, request, 24, NEXT, 1);
    ring::DriverRing::write(&c.bed.mem, table + 16, reply, 64, WRITE, 0);
    c.set(0, table, 32, INDIRECT, 0);
    assert_eq!(c.offer(), (16, Some(Status::Ok)));
    // Descriptors before the table; its own WRITE flag does not matter.
    c.set(0, request, 24, NEXT, 1);
    c.set(1, table + 16, 16, INDIRECT | WRITE, 0);
    assert_eq!(c.offer(), (16, Some(Status::Ok)));
}

#[test]
fn malformed_chain_is_refused_where_it_has_room_and_always_comes_back() {
    let mut c = Chains::new();
    let (request, reply) = (c.request, c.reply);
    // Readable after writable.
    c.set(0, request, 8, NEXT, 1);
    c.set(1, reply, 64, NEXT | WRITE, 2);
    c.set(2, request + 8, 16, 0, 0);
    assert_eq!(c.offer(), REFUSED);
    // Empty buffers.
    c.set(2, reply, 0, WRITE, 0);
    assert_eq!(c.offer(), REFUSED);
    c.set(0, request, 0, NEXT, 1);
    assert_eq!(c.offer(), SILENT);
    // A loop, with and without room before it.
    c.set(0, request, 24, NEXT, 1);
    c.set(1, reply, 64, NEXT | WRITE, 1);
    assert_eq!(c.offer(), REFUSED);
    c.set(0, request, 24, NEXT, 0);
    assert_eq!(c.offer(), SILENT);
    // NEXT out of the table.
    c.set(0, request, 24, NEXT, 64);
    assert_eq!(c.offer(), SILENT);
    c.set(0, request, 24, NEXT, 1);
    c.set(1, reply, 64, NEXT | WRITE, u16::MAX);
    assert_eq!(c.offer(), REFUSED);
    // Addresses out of memory.
    for (at, len) in [(RAM_LEN, 16), (RAM_LEN - 8, 16), (u64::MAX, 16), (u64::MAX - 15, 16), (request, u32::MAX)] {
        c.set(1, reply, 64, WRITE, 0);
        c.set(0, at, len, NEXT, 1);
        assert_eq!(c.offer(), REFUSED, "request at {at:#x}+{len:#x}");
        c.set(0, request, 24, NEXT, 1);
        c.set(1, at, len, WRITE, 0);
        assert_eq!(c.offer(), SILENT, "reply at {at:#x}+{len:#x}");
    }
    // No room, or too little for an answer.
    c.set(0, request, 24, 0, 0);
    assert_eq!(c.offer(), SILENT);
    c.set(0, request, 24, NEXT, 1);
    c.set(1, reply, 15, WRITE, 0);
    assert_eq!(c.offer(), SILENT);
    // No request.
    c.set(0, reply, 64, WRITE, 0);
    assert_eq!(c.offer(), REFUSED);
    assert!(c.bed.seen.count_of(Counter::MalformedChains) >= 10);
    c.assert_alive();
}

#[test]
fn indirect_tables_of_wrong_shape_are_refused() {
    let mut c = Chains::new();
    let (request, reply) = (c.request, c.reply);
    let table = c.bed.room(4096);
    let entry = |c: &Chains, index: u64, at: u64, len: u32, flags: u16, next: u16| {
        ring::DriverRing::write(&c.bed.mem, table + 16 * index, at, len, flags, next);
    };
    entry(&c, 0, request, 24, NEXT, 1);
    entry(&c, 1, reply, 64, WRITE, 0);
    for len in [0, 15, 17, 33, 65 * 16, !15] {
        c.set(0, table, len, INDIRECT, 0);
        assert_eq!(c.offer(), SILENT, "a table of {len} bytes");
    }
    c.set(0, table, 32, INDIRECT | NEXT, 1);
    assert_eq!(c.offer(), SILENT, "chained");
    c.set(0, RAM_LEN - 16, 32, INDIRECT, 0);
    assert_eq!(c.offer(), SILENT, "not in memory");
    c.set(0, table, 32, INDIRECT, 0);
    entry(&c, 1, table, 32, INDIRECT, 0);
    assert_eq!(c.offer(), SILENT, "nested");
    entry(&c, 1, reply, 64, WRITE | NEXT, 2);
    assert_eq!(c.offer(), REFUSED, "NEXT out of the table");
    entry(&c, 1, reply, 64, WRITE | NEXT, 0);
    assert_eq!(c.offer(), REFUSED, "a loop");
    c.assert_alive();
}

#[test]
fn sixty_four_descriptors_are_a_chain_and_one_more_is_not() {
    let mut c = Chains::new();
    let (request, reply) = (c.request, c.reply);
    let table = c.bed.room(65 * 16);
    for count in [64_u64, 65] {
        for index in 0..count {
            let write = if index == 0 { 0 } else { WRITE };
            let next = if index + 1 == count { 0 } else { NEXT };
            let (at, len) = if index == 0 { (request, 24) } else { (reply + index - 1, 1) };
            ring::DriverRing::write(&c.bed.mem, table + 16 * index, at, len, write | next, index as u16 + 1);
        }
        c.set(0, request, 24, NEXT, 1);
        c.set(1, table + 16, (count as u32 - 1) * 16, INDIRECT, 0);
        for index in 1..count {
            let next = if index + 1 == count { 0 } else { NEXT };
            ring::DriverRing::write(&c.bed.mem, table + 16 * index, reply + index - 1, 1, WRITE | next, index as u16);
        }
        let want = if count == 64 { (16, Some(Status::Ok)) } else { REFUSED };
        assert_eq!(c.offer(), want, "{count} descriptors");
    }
}

#[test]
fn buffers_that_add_up_past_four_gibibytes_are_refused() {
    let mut c = Chains::new();
    let (request, reply) = (c.request, c.reply);
    // The same 128 MiB over and over.
    let chain = |c: &mut Chains, count: u16| {
        c.set(0, request, 24, NEXT, 1);
        c.set(1, reply, 64, WRITE | NEXT, 2);
        for index in 2..count {
            c.set(index, 0, RAM_LEN as u32, if index + 1 == count { WRITE } else { WRITE | NEXT }, index + 1);
        }
    };
    chain(&mut c, 2 + 31);
    assert_eq!(c.offer(), (16, Some(Status::Ok)), "just below");
    chain(&mut c, 2 + 32);
    assert_eq!(c.offer(), REFUSED);
    c.assert_alive();
}

#[test]
fn index_that_runs_away_stops_the_queue_until_it_is_started_again() {
    let mut c = Chains::new();
    let index = c.bed.rings[0].avail_index();
    c.bed.rings[0].set_avail_index(index.wrapping_add(65));
    c.bed.drain();
    assert!(!c.bed.device.drain(0));
    c.bed.rings[0].set_avail_index(index);
    let (request, reply) = (c.request, c.reply);
    c.set(0, request, 24, NEXT, 1);
    c.set(1, reply, 64, WRITE, 0);
    c.bed.rings[0].offer(0);
    c.bed.drain();
    assert_eq!(c.bed.used(0, 0), None, "out of use");
    c.bed.device.stop_queue(0);
    c.bed.device.start_queue(0, c.bed.rings[0].ring.clone());
    c.bed.drain();
    assert_eq!(c.bed.used(0, 0), Some(16));
}

#[test]
fn head_out_of_the_table_stops_the_queue() {
    let mut c = Chains::new();
    c.bed.rings[0].offer(64);
    c.bed.drain();
    let (request, reply) = (c.request, c.reply);
    c.set(0, request, 24, NEXT, 1);
    c.set(1, reply, 64, WRITE, 0);
    c.bed.rings[0].offer(0);
    c.bed.drain();
    assert_eq!(c.bed.used(0, 0), None);
    assert!(c.bed.rings[0].take_used().is_empty());
}

#[test]
fn head_offered_again_and_again_while_it_drains_is_bounded() {
    let mut c = Chains::new();
    c.bed.engine.set(Mode::Hold);
    c.bed.submit(1, &[copy(IOVA + DATA, IOVA + DATA + PAGE, 8)]);
    c.bed.drain();
    // An UNMAP that waits, whose head the driver offers three thousand times.
    let mut header = ControlHeader::new_zeroed();
    header.opcode = (Opcode::Unmap as u16).into();
    header.domain = 1.into();
    header.session = SESSION.into();
    let request = c.bed.put(&[header.as_bytes(), unmap(0, u64::MAX).as_bytes()].concat());
    let reply = c.reply;
    c.set(0, request, 32, NEXT, 1);
    c.set(1, reply, 64, WRITE, 0);
    for _ in 0..3000 {
        c.bed.rings[0].offer(0);
        c.bed.device.drain(0);
    }
    c.bed.engine.release_all();
    c.bed.drain();
    let used = c.bed.rings[0].take_used();
    assert_eq!(used.len(), 64, "as many as the ring has heads");
}

#[test]
fn turn_is_bounded_whatever_the_chains_are() {
    let mut bed = Bed::ready();
    for head in 0..60 {
        bed.rings[2].set(head, 0, 0, 0, 0);
        bed.rings[2].offer(head);
    }
    assert!(bed.device.drain(2), "there is more to do");
    let first = bed.rings[2].take_used().len();
    assert!(first < 60, "{first} chains in one turn");
    bed.drain();
    assert_eq!(first + bed.rings[2].take_used().len(), 60);
}

/// What a submission of these bytes with room for so many records is answered: its used length and every record's status and cookie.
fn submission(bed: &mut Bed, bytes: &[u8], records: usize) -> (u32, Vec<(Option<Status>, u64)>) {
    let batch = bed.submit_raw(2, bytes, records);
    bed.drain();
    let len = bed.used(2, batch.head).expect("the chain came back");
    let records = bed.records(batch);
    (len, records.iter().map(|record| (Status::from_raw(record.status.get()), record.cookie.get())).collect())
}

#[test]
fn header_that_breaks_a_rule_completes_every_descriptor() {
    let mut bed = Bed::ready();
    let works = [fill(IOVA + DATA, 8, 1).cookie(5), fill(IOVA + DATA, 8, 1).cookie(6)];
    let good = [batch_header(1, 2).as_bytes(), works.as_bytes()].concat();
    let field = |offset: usize, bytes: &[u8]| {
        let mut bad = good.clone();
        bad[offset..offset + bytes.len()].copy_from_slice(bytes);
        bad
    };
    let (whole, short) = ([5, 6], [5, 0]);
    let cases = [
        (good.clone(), Status::Ok, whole, "nothing wrong"),
        (field(0, &[2]), Status::Inval, whole, "version 2"),
        (field(8, &[1]), Status::Inval, whole, "flags"),
        (field(4, &[9]), Status::NoEnt, whole, "no such domain"),
        (field(12, &[9]), Status::Lost, whole, "another session"),
        (good[..good.len() - 1].to_vec(), Status::Inval, short, "a byte short"),
        ([&good[..], &[0]].concat(), Status::Inval, whole, "a byte long"),
        ([&good[..], &[0; 64 * 200]].concat(), Status::Inval, [0, 0], "far too long"),
    ];
    for (bytes, want, cookies, what) in cases {
        let (len, records) = submission(&mut bed, &bytes, 2);
        assert_eq!(len, 64, "{what}");
        assert_eq!(records, cookies.map(|cookie| (Some(want), cookie)), "{what}");
    }
    let many = [batch_header(1, 129).as_bytes(), &[0; 64 * 129]].concat();
    let (len, records) = submission(&mut bed, &many, 129);
    assert_eq!(len, 129 * 32, "more than a batch may have");
    assert!(records.iter().all(|(status, _)| *status == Some(Status::Inval)));
    assert_eq!(bed.take_events().len(), 0);
    assert_eq!(bed.seen.count_of(Counter::Faults), 0, "a domain that is not there is no fault");
}

#[test]
fn submission_whose_room_does_not_match_comes_back_untouched() {
    let mut bed = Bed::ready();
    let works = [fill(IOVA + DATA, 8, 1); 2];
    let good = [batch_header(1, 2).as_bytes(), works.as_bytes()].concat();
    let counted = |count: u16| [batch_header(1, usize::from(count)).as_bytes(), works.as_bytes()].concat();
    for (bytes, records, what) in [
        (good.clone(), 1, "a record short"),
        (good.clone(), 3, "a record long"),
        (good[..15].to_vec(), 2, "no header"),
        (counted(0), 2, "none"),
        (counted(u16::MAX), 2, "more than fit"),
    ] {
        let (len, statuses) = submission(&mut bed, &bytes, records);
        assert_eq!((len, statuses), (0, vec![(None, 0); records]), "{what}");
    }
    assert_eq!(bed.ram(DATA, 8), [0; 8], "nothing was executed");
}

#[test]
fn work_before_hello_is_invalid() {
    let mut bed = Bed::new();
    let bytes = [batch_header(1, 1).as_bytes(), fill(IOVA + DATA, 8, 1).as_bytes()].concat();
    assert_eq!(submission(&mut bed, &bytes, 1), (32, vec![(Some(Status::Inval), 0)]));
}

#[test]
fn submission_without_room_for_a_record_comes_back_empty() {
    let mut bed = Bed::ready();
    let bytes = [batch_header(1, 1).as_bytes(), fill(IOVA + DATA, 8, 1).as_bytes()].concat();
    let at = bed.put(&bytes);
    let head = bed.rings[2].push(&[(at, bytes.len() as u32)], &[]);
    bed.drain();
    assert_eq!(bed.used(2, head), Some(0));
    assert_eq!(bed.ram(DATA, 8), [0; 8], "nothing was executed");
}

#[test]
fn records_split_over_buffers_off_every_alignment_are_whole() {
    let mut bed = Bed::ready();
    let works: Vec<_> = (0..5).map(|i| fill(IOVA + DATA + 64 * i, 8, i).cookie(100 + i)).collect();
    let bytes = [batch_header(1, 5).as_bytes(), works.as_bytes()].concat();
    let at = bed.put(&bytes);
    let room = bed.put(&[0xcc; 512]);
    let parts = [(room + 1, 3), (room + 100, 40), (room + 201, 100), (room + 311, 17)];
    let head = bed.rings[2].push(&[(at, bytes.len() as u32)], &parts);
    bed.drain();
    assert_eq!(bed.used(2, head), Some(160));
    let all: Vec<u8> = parts.iter().flat_map(|(at, len)| bed.ram(*at, *len as usize)).collect();
    for (i, record) in all.chunks_exact(32).enumerate() {
        let record = vdev_wire::Completion::read_from_bytes(record).unwrap();
        assert_eq!((record.cookie.get(), record.bytes.get(), status(&record)), (100 + i as u64, 8, Status::Ok));
    }
    assert_eq!(bed.ram(room, 1), [0xcc], "nothing beside the buffers");
    assert_eq!(bed.ram(room + 4, 1), [0xcc]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever lies in the tables, every head comes back once and the device goes on.
    #[test]
    fn random_tables_never_lose_a_head(
        descriptors in proptest::collection::vec((0u64..12, 0u32..4, 0u16..8, 0u16..70), 64),
        heads in proptest::collection::vec(0u16..64, 1..20),
        queue in 0usize..4,
    ) {
        let mut bed = Bed::ready();
        let places = [DATA, DATA + 8, RAM_LEN - 16, RAM_LEN, u64::MAX - 3, 0x20_0000];
        for (index, (at, len, flags, next)) in (0..64).zip(&descriptors) {
            let at = places.get(*at as usize).copied().unwrap_or(0x30_0000 + 64 * at);
            bed.rings[queue].set(index, at, [0, 16, 32, 64][*len as usize], *flags, *next);
        }
        for head in &heads {
            bed.rings[queue].offer(*head);
        }
        bed.drain();
        if queue == 1 {
            prop_assert!(bed.rings[1].take_used().is_empty(), "no event, no use");
        } else {
            let mut used: Vec<u16> = bed.rings[queue].take_used().into_iter().map(|(head, _)| head).collect();
            let mut wanted = heads.clone();
            used.sort_unstable();
            wanted.sort_unstable();
            prop_assert_eq!(used, wanted);
        }
        bed.mem.write_obj(0_u64, GuestAddress(DATA)).unwrap();
        let other = if queue == 2 { 3 } else { 2 };
        let batch = bed.submit_on(other, 1, &[fill(IOVA + DATA, 8, 5)]);
        bed.drain();
        prop_assert!(bed.is_used(batch));
    }
}
