//! Parsing alone: no bytes break it, and every reserved bit counts.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use common::*;
use hw_engine::{Atomic, AtomicOp};
use proptest::prelude::*;
use vdev_device::{Operation, Request, parse_control, parse_work};
use vdev_wire::{
    Opcode, Status, WORK_ATOMIC_ADD, WORK_ATOMIC_COMPARE_SWAP, WORK_ATOMIC_SWAP, WorkDescriptor, WorkOpcode,
};
use zerocopy::IntoBytes;

fn control(opcode: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 16];
    bytes[..2].copy_from_slice(&opcode.to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

fn descriptor(work: &WorkDescriptor) -> [u8; 64] {
    work.as_bytes().try_into().unwrap()
}

#[test]
fn every_reserved_bit_of_a_descriptor_is_refused() {
    // Byte ranges that must be zero, by opcode: ext, reserved0 and reserved1 always, unknown flags, and fields that the opcode does not use.
    let cases = [
        (copy(0x1000, 0x2000, 8), vec![2..4, 52..56, 56..64]),
        (fill(0x2000, 8, 1), vec![2..4, 52..56, 24..32]),
        (fence(), vec![2..4, 52..56, 24..48]),
        (atomic(WORK_ATOMIC_ADD, 0x1000, 8, 1), vec![2..4, 52..56, 24..32]),
        (atomic(WORK_ATOMIC_SWAP, 0x1000, 8, 1), vec![2..4, 52..56, 24..32]),
        (atomic(WORK_ATOMIC_COMPARE_SWAP, 0x1000, 4, 1), vec![2..4, 52..56]),
    ];
    for (work, reserved) in cases {
        let good = descriptor(&work);
        assert!(parse_work(&good).1.is_ok());
        for bit in reserved.into_iter().flat_map(|bytes| bytes.start * 8..bytes.end * 8) {
            let mut bad = good;
            bad[bit / 8] |= 1 << (bit % 8);
            assert_eq!(parse_work(&bad).1.unwrap_err().status(), Status::Inval, "bit {bit} of {work:?}");
        }
        let is_atomic = work.opcode.get() == WorkOpcode::Atomic as u16;
        for bit in (33..64).filter(|bit| !(is_atomic && (40..44).contains(bit))) {
            let mut bad = good;
            bad[bit / 8] |= 1 << (bit % 8);
            assert_eq!(parse_work(&bad).1.unwrap_err().status(), Status::Inval, "flag bit {}", bit - 32);
        }
    }
}

#[test]
fn an_atomic_operation_is_one_of_three_on_an_aligned_word() {
    let of = |work: WorkDescriptor| parse_work(&descriptor(&work)).1;
    for (flag, source, op) in [
        (WORK_ATOMIC_ADD, 0, AtomicOp::Add),
        (WORK_ATOMIC_SWAP, 0, AtomicOp::Swap),
        (WORK_ATOMIC_COMPARE_SWAP, 7, AtomicOp::CompareSwap { compare: 7 }),
    ] {
        for (len, at) in [(4, 0x1004), (8, 0x1008), (8, u64::MAX - 7)] {
            let mut work = atomic(flag, at, len, 9);
            work.source = source.into();
            let Operation::Atomic { at: range, atomic } = of(work).unwrap().operation else { panic!("an atomic one") };
            assert_eq!((range.start().0, range.len(), atomic), (at, Some(len), Atomic { op, len, operand: 9 }));
        }
    }
    let none = [0, 4 << 8, 15 << 8].map(|flag| atomic(flag, 0x1000, 8, 1));
    let lengths = [0, 1, 2, 6, 16, u64::MAX].map(|len| atomic(WORK_ATOMIC_ADD, 0x1000, len, 1));
    let places = [(1, 4), (2, 4), (4, 8), (u64::MAX - 3, 8)].map(|(at, len)| atomic(WORK_ATOMIC_SWAP, at, len, 1));
    for work in none.into_iter().chain(lengths).chain(places) {
        assert_eq!(of(work).unwrap_err().status(), Status::Inval, "{work:?}");
    }
}

#[test]
fn last_byte_of_the_space_can_be_named() {
    let (tag, work) = parse_work(&descriptor(&fill(u64::MAX - 7, 8, 1).cookie(3).stream(4)));
    assert_eq!((tag.cookie, tag.stream.0), (3, 4));
    let Operation::Fill { dst, .. } = work.unwrap().operation else { panic!("a fill") };
    assert_eq!(dst.last().0, u64::MAX);
    assert_eq!(parse_work(&descriptor(&fill(u64::MAX - 7, 9, 1))).1.unwrap_err().status(), Status::Range);
}

#[test]
fn map_gives_its_segments_back() {
    let segments = [(0x1000, 0x2000), (0x9000, 0x1000)];
    let bytes = control(Opcode::Map as u16, &map_bytes(0x5000, RW, &segments));
    let parsed = parse_control(&bytes, 16).unwrap();
    let Request::Map { iova, count, segments: got, .. } = parsed.request else { panic!("a map") };
    assert_eq!((iova.0, count), (0x5000, 2));
    let got: Vec<_> = got.iter().map(|segment| (segment.gpa.get(), segment.len.get())).collect();
    assert_eq!(got, segments);
}

proptest! {
    #[test]
    fn no_control_bytes_break_the_parser(bytes in proptest::collection::vec(any::<u8>(), 0..200), room in 0usize..200) {
        if let Err(error) = parse_control(&bytes, room) {
            prop_assert!(matches!(error.status(), Status::Inval | Status::Unsupp));
        }
    }

    #[test]
    fn no_body_breaks_the_parser(which in 0..Opcode::ALL.len(), body in proptest::collection::vec(any::<u8>(), 0..64)) {
        let bytes = control(Opcode::ALL[which] as u16, &body);
        if let Err(error) = parse_control(&bytes, 512) {
            prop_assert!(matches!(error.status(), Status::Inval | Status::Unsupp));
        }
    }

    #[test]
    fn no_descriptor_breaks_the_parser(bytes in proptest::array::uniform32(any::<u8>()), opcode in 0u8..12) {
        let mut descriptor = [0; 64];
        descriptor[..32].copy_from_slice(&bytes);
        descriptor[32..].copy_from_slice(&bytes);
        (descriptor[0], descriptor[1]) = (opcode, 0);
        if let Err(error) = parse_work(&descriptor).1 {
            prop_assert!(matches!(error.status(), Status::Inval | Status::Unsupp | Status::Range));
        }
    }
}
