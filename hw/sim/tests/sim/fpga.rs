//! The FPGA's registers and its kernel.

use std::sync::Arc;
use std::time::Duration;

use hw_engine::conformance::{FlatMemory, Noise};
use hw_engine::{DmaEngine, EngineError, Finished, Initiated, Raised, Route, Segments, Submit, Unlimited, Work};
use hw_sim::{KERNEL_CHACHA20, SimEngine, register};
use iommu_addr::{DomainId, EndpointId, Iova, REGISTERS, Range};

use crate::common::{Desk, FPGA, GPU, Wires, copy, devices, instant, own, ram};

const IDLE: u64 = 0;
const BUSY: u64 = 1;
const DONE: u64 = 2;
const ERROR: u64 = 3;

fn desk() -> Desk {
    Desk::by_hand(&instant(), Arc::new(Unlimited))
}

fn reg(offset: u64, len: u64) -> Segments {
    own(FPGA, REGISTERS.0 + offset, len)
}

impl Desk {
    fn store(&self, domain: u32, offset: u64, value: u64) -> bool {
        let end = self.run(domain, GPU, Work::Fill { dst: reg(offset, 8), pattern: value });
        assert_eq!((end.bytes, end.result), (8, Ok(())));
        end.raised
    }

    fn load(&self, domain: u32, offset: u64) -> u64 {
        let end = self.run(domain, GPU, copy(ram(0x1008, 8), reg(offset, 8), Route::Direct));
        assert_eq!((end.bytes, end.result, end.raised), (8, Ok(()), false));
        u64::from_le_bytes(self.bytes(&ram(0x1008, 8)).try_into().unwrap())
    }

    /// Programs and starts the kernel. Source and destination are addresses in the guest's eyes and mean nothing to the engine.
    fn start(&self, domain: u32, key: [u64; 4], nonce: u64, len: u64) -> bool {
        let values = [
            (register::KERNEL, KERNEL_CHACHA20),
            (register::SRC, 0xaaaa_0000),
            (register::DST, 0xbbbb_0000),
            (register::LEN, len),
            (register::NONCE, nonce),
        ];
        values.into_iter().for_each(|(offset, value)| assert!(!self.store(domain, offset, value)));
        for (offset, word) in (register::KEY0..).step_by(8).zip(key) {
            self.store(domain, offset, word);
        }
        self.store(domain, register::CONTROL, 1)
    }

    fn state(&self, domain: u32) -> [u64; 3] {
        [register::STATUS, register::RESULT, register::COUNT].map(|offset| self.load(domain, offset))
    }
}

fn initiated(domain: u32, len: u64) -> Initiated {
    let range = |start| Range::with_len(Iova(start), len).unwrap();
    Initiated { endpoint: FPGA, domain: DomainId(domain), src: range(0xaaaa_0000), dst: range(0xbbbb_0000) }
}

fn interrupt(domain: u32) -> Raised {
    Raised::Interrupt { endpoint: FPGA, domain: DomainId(domain), vector: 0 }
}

/// The keystream of RFC 8439, 2.3, written anew.
fn keystream(key: [u64; 4], nonce: u64, len: usize) -> Vec<u8> {
    let halves = |word: u64| [word & 0xffff_ffff, word >> 32].map(|half| u32::try_from(half).unwrap());
    let block = |counter: u32| {
        let mut start = [0; 16];
        start[..4].copy_from_slice(&[0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574]);
        key.iter().enumerate().for_each(|(n, word)| start[4 + 2 * n..6 + 2 * n].copy_from_slice(&halves(*word)));
        start[12] = counter;
        start[14..].copy_from_slice(&halves(nonce));
        let mut x: [u32; 16] = start;
        for round in 0..20 {
            for column in 0..4 {
                let diagonal = |row: usize| 4 * row + (column + row * (round % 2)) % 4;
                let [a, b, c, d] = [0, 1, 2, 3].map(diagonal);
                for (p, q, r, turn) in [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)] {
                    x[p] = x[p].wrapping_add(x[q]);
                    x[r] = (x[r] ^ x[p]).rotate_left(turn);
                }
            }
        }
        x.into_iter().zip(start).flat_map(|(x, start)| x.wrapping_add(start).to_le_bytes()).collect::<Vec<u8>>()
    };
    (0..).flat_map(block).take(len).collect()
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|digit| digit.to_digit(16)).collect();
    digits.chunks(2).map(|pair| u8::try_from(pair[0] << 4 | pair[1]).unwrap()).collect()
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
}

#[test]
fn the_kernel_is_the_cipher_of_rfc_8439() {
    let desk = desk();
    // Appendix A.1, vector 1: all zero.
    desk.start(1, [0; 4], 0, 64);
    desk.raised();
    desk.run(1, FPGA, Work::Kernel { src: ram(0x2000, 64), dst: own(FPGA, 0, 64) });
    let stream = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7
                  da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586";
    assert_eq!(desk.bytes(&own(FPGA, 0, 64)), hex(stream));
    // Section 2.4.2: its text is encrypted from block 1 on.
    let key: Vec<u64> = words(&(0..32).collect::<Vec<u8>>());
    let text = b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would be it.";
    desk.memory.write(ram(0x2040, 1)[0].at, text).unwrap();
    let len = 64 + text.len() as u64;
    desk.start(1, key.try_into().unwrap(), u64::from_le_bytes([0, 0, 0, 0x4a, 0, 0, 0, 0]), len);
    desk.raised();
    desk.run(1, FPGA, Work::Kernel { src: ram(0x2000, len), dst: own(FPGA, 0x1000, len) });
    let sealed = "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0bf91b65c5524733ab8f593dabcd62b357
                  1639d624e65152ab8f530c359f0861d807ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736
                  5af90bbf74a35be6b40b8eedf2785e42874d";
    assert_eq!(desk.bytes(&own(FPGA, 0x1040, text.len() as u64)), hex(sealed));
}

#[test]
fn a_kernel_starts_runs_and_ends_with_its_interrupt() {
    let desk = desk();
    assert_eq!(desk.state(1), [IDLE, 0, 0]);
    assert!(desk.start(1, [1, 2, 3, 4], 5, 100), "START raises something");
    assert_eq!(desk.state(1), [BUSY, 0, 0]);
    assert_eq!(desk.raised(), [Raised::Initiated(initiated(1, 100))]);
    let end = desk.run(1, FPGA, Work::Kernel { src: ram(0x2000, 100), dst: ram(0x3000, 100) });
    assert_eq!((end.bytes, end.result, end.raised), (100, Ok(()), true));
    assert_eq!(desk.state(1), [DONE, 100, 1]);
    assert_eq!(desk.raised(), [interrupt(1)]);
    assert_eq!(desk.raised(), []);
}

#[test]
fn a_kernel_takes_any_segments_and_undoes_itself_in_place() {
    let desk = desk();
    let (key, nonce) = ([7, 8, 9, u64::MAX], 0x1234_5678_9abc_def0);
    let mut noise = Noise::new(3);
    let src: Segments = [ram(0x2001, 4097), own(GPU, 3, 1), own(FPGA, 0x5005, 6000)].concat().into();
    let dst: Segments = [own(GPU, 0x2000, 63), own(FPGA, 0x10000, 10001), ram(0x8003, 34)].concat().into();
    let text = noise.bytes(10098);
    desk.memory.write(src[0].at, &text[..4097]).unwrap();
    desk.memory.write(src[1].at, &text[4097..4098]).unwrap();
    desk.memory.write(src[2].at, &text[4098..]).unwrap();
    let sealed: Vec<u8> = text.iter().zip(keystream(key, nonce, 10098)).map(|(a, b)| a ^ b).collect();
    for (src, dst, want) in [(&src, &dst, &sealed), (&dst, &dst, &text)] {
        desk.start(1, key, nonce, 10098);
        desk.raised();
        let end = desk.run(1, FPGA, Work::Kernel { src: src.clone(), dst: dst.clone() });
        assert_eq!((end.bytes, end.result), (10098, Ok(())));
        assert_eq!(&desk.bytes(dst), want);
    }
}

#[test]
fn a_long_kernel_runs_on_the_engines_thread() {
    let memory = Arc::new(FlatMemory::new());
    let desk = Desk::in_real_time(&instant(), Arc::new(Unlimited), memory);
    let (wake, woken) = std::sync::mpsc::channel();
    desk.engine.on_progress(Box::new(move || wake.send(()).unwrap_or_default()));
    let len = 0x20001;
    desk.start(1, [1; 4], 2, len);
    desk.raised();
    desk.send(FPGA, Work::Kernel { src: own(FPGA, 0, len), dst: own(GPU, 1, len) });
    let mut out = Vec::new();
    while out.is_empty() {
        woken.recv().unwrap();
        desk.engine.poll(&mut out);
    }
    assert_eq!((out[0].bytes, out[0].result, out[0].raised), (len, Ok(()), true));
    assert_eq!(desk.bytes(&own(GPU, 1, len)), keystream([1; 4], 2, usize::try_from(len).unwrap()));
    assert_eq!(desk.raised(), [interrupt(1)]);
    assert_eq!(desk.state(1), [DONE, len, 1]);
}

#[test]
fn a_kernel_takes_the_time_of_its_links() {
    let desk = Desk::by_hand(&devices(Duration::from_nanos(9), 1), Wires::new(Duration::from_nanos(1)));
    desk.start(1, [1; 4], 2, 1000);
    desk.raised();
    desk.send(FPGA, Work::Kernel { src: own(GPU, 0, 1000), dst: own(FPGA, 0, 1000) });
    assert_eq!(desk.state(1), [BUSY, 0, 0]);
    let ends = desk.ends();
    assert_eq!(ends.iter().map(|end| end.1).collect::<Vec<_>>(), [1009]);
    assert_eq!(desk.state(1), [DONE, 1000, 1]);
}

#[test]
fn two_domains_do_not_share_registers() {
    let desk = desk();
    desk.start(1, [1, 2, 3, 4], 5, 64);
    for offset in (register::KERNEL..0x80).step_by(8) {
        assert_eq!(desk.load(2, offset), 0, "domain 2 sees {offset:#x} of domain 1");
    }
    desk.start(2, [9, 9, 9, 9], 6, 64);
    assert_eq!(desk.raised(), [1, 2].map(|domain| Raised::Initiated(initiated(domain, 64))));
    // Each runs with its own key, in either order.
    desk.run(2, FPGA, Work::Kernel { src: ram(0x2000, 64), dst: own(GPU, 0x100, 64) });
    assert_eq!(desk.state(1), [BUSY, 0, 0]);
    desk.run(1, FPGA, Work::Kernel { src: ram(0x2000, 64), dst: own(GPU, 0, 64) });
    assert_eq!(desk.bytes(&own(GPU, 0, 64)), keystream([1, 2, 3, 4], 5, 64));
    assert_eq!(desk.bytes(&own(GPU, 0x100, 64)), keystream([9, 9, 9, 9], 6, 64));
    assert_eq!(desk.raised(), [interrupt(2), interrupt(1)]);
}

#[test]
fn a_forgotten_domain_leaves_nothing_behind() {
    let desk = desk();
    desk.start(1, [1; 4], 5, 64);
    desk.start(2, [2; 4], 5, 64);
    desk.engine.forget(DomainId(1));
    assert_eq!(desk.raised(), [Raised::Initiated(initiated(2, 64))]);
    assert_eq!((desk.state(1), desk.load(1, register::LEN)), ([IDLE, 0, 0], 0));
    let kernel = |domain| desk.submit(domain, FPGA, Work::Kernel { src: ram(0x2000, 64), dst: own(GPU, 0, 64) });
    assert_eq!(kernel(1), Err(EngineError::Device { code: SimEngine::NO_KERNEL }));
    assert!(matches!(kernel(2), Ok(Submit::Executed(_))));
}

#[test]
fn registers_read_as_they_are_described() {
    let desk = desk();
    assert_eq!(desk.load(1, register::ID).to_le_bytes(), *b"PGFPGA1\0");
    let plain = [register::KERNEL, register::SRC, register::DST, register::LEN, register::NONCE];
    for offset in (0..0x100).chain(0xf00..0x1000).step_by(8).filter(|offset| *offset != register::CONTROL) {
        let before = desk.load(1, offset);
        desk.store(1, offset, 0x1122_3344_5566_7788);
        let want = if plain.contains(&offset) { 0x1122_3344_5566_7788 } else { before };
        assert_eq!(desk.load(1, offset), want, "{offset:#x}");
    }
    assert_eq!(desk.raised(), []);
}

#[test]
fn half_a_register_can_be_stored_and_loaded() {
    let desk = desk();
    desk.store(1, register::SRC, 0x1122_3344_5566_7788);
    desk.run(1, GPU, Work::Fill { dst: reg(register::SRC + 4, 4), pattern: 0xffff_ffff_aabb_ccdd });
    assert_eq!(desk.load(1, register::SRC), 0xaabb_ccdd_5566_7788);
    desk.memory.write(ram(0x2001, 1)[0].at, &[1, 2, 3, 4]).unwrap();
    desk.run(1, GPU, copy(reg(register::SRC, 4), ram(0x2001, 4), Route::Staged));
    assert_eq!(desk.load(1, register::SRC), 0xaabb_ccdd_0403_0201);
    desk.run(1, FPGA, copy(own(GPU, 7, 4), reg(register::SRC + 4, 4), Route::Direct));
    assert_eq!(desk.bytes(&own(GPU, 6, 6)), [0, 0xdd, 0xcc, 0xbb, 0xaa, 0]);
}

#[test]
fn registers_take_one_aligned_access_of_4_or_8_bytes() {
    let desk = desk();
    let wrong = [
        Work::Fill { dst: reg(register::SRC, 1), pattern: 7 },
        Work::Fill { dst: reg(register::SRC, 16), pattern: 7 },
        Work::Fill { dst: reg(register::SRC + 4, 8), pattern: 7 },
        Work::Fill { dst: reg(register::SRC + 2, 4), pattern: 7 },
        Work::Fill { dst: [reg(register::SRC, 4), reg(register::SRC + 4, 4)].concat().into(), pattern: 7 },
        Work::Fill { dst: [ram(0x1000, 4), reg(register::SRC, 4)].concat().into(), pattern: 7 },
        copy(reg(register::SRC, 8), reg(register::DST, 8), Route::Direct),
        copy(reg(register::SRC, 4096), ram(0x1000, 4096), Route::Direct),
        copy(ram(0x1000, 12), reg(register::SRC, 12), Route::Direct),
        copy([ram(0x1000, 4), ram(0x1004, 4)].concat().into(), reg(register::SRC, 8), Route::Direct),
        copy(reg(register::SRC, 8), [ram(0x1000, 4), ram(0x1004, 4)].concat().into(), Route::Staged),
    ];
    for work in wrong {
        assert_eq!(desk.submit(1, GPU, work.clone()), Err(EngineError::RegisterAccess), "{work:?}");
    }
    assert_eq!((desk.load(1, register::SRC), desk.bytes(&ram(0x1000, 8))), (0, vec![0; 8]));
}

#[test]
fn registers_that_do_not_exist_are_missing_memory() {
    let desk = desk();
    for dst in
        [own(GPU, REGISTERS.0, 8), reg(4096, 8), own(EndpointId::local(50), REGISTERS.0, 8), own(FPGA, u64::MAX - 7, 8)]
    {
        let outcome = desk.submit(1, GPU, Work::Fill { dst: dst.clone(), pattern: 1 });
        assert!(matches!(outcome, Err(EngineError::Memory(_))), "{dst:?}: {outcome:?}");
    }
    desk.run(1, GPU, Work::Fill { dst: reg(4088, 8), pattern: 1 });
    // The other end may be missing, too.
    let end = desk.run(1, GPU, copy(reg(register::SRC, 8), ram(0xffff_0000, 8), Route::Direct));
    assert!(matches!(end.result, Err(EngineError::Memory(_))));
    assert_eq!((end.bytes, desk.load(1, register::SRC)), (0, 0));
}

#[test]
fn a_refused_start_ends_in_error() {
    let desk = desk();
    desk.start(1, [1; 4], 5, 64);
    desk.raised();
    desk.engine.refuse(&initiated(1, 64), 7);
    assert_eq!(desk.state(1), [ERROR, 7, 1]);
    assert_eq!(desk.raised(), [interrupt(1)]);
    desk.engine.refuse(&initiated(1, 64), 9);
    assert_eq!((desk.state(1), desk.raised()), ([ERROR, 7, 1], vec![]), "a second refusal has nothing to end");
    desk.start(1, [1; 4], 5, 64);
    assert_eq!(desk.state(1), [BUSY, 0, 1]);
}

#[test]
fn a_start_that_makes_no_sense_ends_in_error() {
    let desk = desk();
    let (inval, range) = (vdev_wire::Status::Inval, vdev_wire::Status::Range);
    let cases = [
        (register::KERNEL, 0, inval),
        (register::KERNEL, 2, inval),
        (register::LEN, 0, inval),
        (register::LEN, u64::MAX, range),
        (register::LEN, (1 << 38) + 1, range),
        (register::DST, u64::MAX - 62, range),
        (register::SRC, u64::MAX, range),
    ];
    for (domain, (offset, value, status)) in (1..).zip(cases) {
        desk.start(domain, [1; 4], 5, 64);
        desk.engine.refuse(&initiated(domain, 64), 7);
        desk.raised();
        desk.store(domain, offset, value);
        assert!(desk.store(domain, register::CONTROL, 1));
        assert_eq!(desk.state(domain), [ERROR, status.to_raw().into(), 2], "{offset:#x} = {value:#x}");
        assert_eq!(desk.raised(), [interrupt(domain)]);
    }
}

#[test]
fn a_start_while_a_kernel_runs_is_dropped() {
    let desk = desk();
    desk.start(1, [1; 4], 5, 64);
    desk.raised();
    assert!(!desk.start(1, [2; 4], 6, 32), "nothing is raised");
    desk.run(1, FPGA, Work::Kernel { src: ram(0x2000, 64), dst: own(GPU, 0, 64) });
    assert_eq!(desk.bytes(&own(GPU, 0, 64)), keystream([1; 4], 5, 64), "key and nonce are those of the first START");
    assert_eq!((desk.state(1), desk.raised()), ([DONE, 64, 1], vec![interrupt(1)]));
    assert!(!desk.store(1, register::CONTROL, 2), "other bits start nothing");
}

#[test]
fn a_kernel_that_meets_missing_memory_ends_in_error() {
    let desk = desk();
    desk.start(1, [1; 4], 5, 200);
    desk.raised();
    let src = [ram(0x2000, 100), ram(0xffff_0000, 100)].concat().into();
    let end = desk.run(1, FPGA, Work::Kernel { src, dst: own(GPU, 0, 200) });
    assert!(matches!(end.result, Err(EngineError::Memory(_))));
    assert_eq!((end.bytes, end.raised), (100, true));
    assert_eq!(desk.bytes(&own(GPU, 100, 100)), [0; 100]);
    assert_eq!(desk.state(1), [ERROR, vdev_wire::Status::IoErr.to_raw().into(), 1]);
    assert_eq!(desk.raised(), [interrupt(1)]);
}

#[test]
fn a_kernel_past_its_deadline_ends_in_error() {
    let desk = Desk::by_hand(&devices(Duration::from_nanos(9), 1), Wires::new(Duration::from_nanos(1)));
    desk.start(1, [1; 4], 2, 1000);
    desk.raised();
    desk.send(FPGA, Work::Kernel { src: own(GPU, 0, 1000), dst: own(FPGA, 0, 1000) });
    desk.engine.abort(desk.last());
    let mut out: Vec<Finished> = Vec::new();
    desk.engine.poll(&mut out);
    assert_eq!((out[0].bytes, out[0].result, out[0].raised), (0, Err(EngineError::Aborted), true));
    assert_eq!(desk.state(1), [ERROR, vdev_wire::Status::Timeout.to_raw().into(), 1]);
    assert_eq!(desk.raised(), [interrupt(1)]);
}

#[test]
fn a_busy_engine_keeps_the_start() {
    let mut config = devices(Duration::from_nanos(9), 1);
    config.queue_depth = 1;
    let desk = Desk::by_hand(&config, Wires::new(Duration::from_nanos(1)));
    desk.start(1, [1; 4], 2, 64);
    desk.raised();
    desk.send(GPU, copy(own(FPGA, 0, 100), own(GPU, 0, 100), Route::Direct));
    let kernel = || Work::Kernel { src: own(FPGA, 0, 64), dst: own(FPGA, 0x1000, 64) };
    assert_eq!(desk.submit(1, FPGA, kernel()), Err(EngineError::Busy));
    desk.ends();
    desk.send(FPGA, kernel());
    desk.ends();
    assert_eq!(desk.state(1), [DONE, 64, 1]);
}
