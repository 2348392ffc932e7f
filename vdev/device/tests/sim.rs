//! The device over simulated hardware: time, links, registers, an FPGA that acts by itself, and real threads.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::*;
use hw_engine::Unlimited;
use hw_sim::{Clock, KERNEL_CHACHA20, ManualClock, SimConfig, SimEndpoint, SimEngine, register};
use vdev_device::Counter;
use vdev_wire::{ALLOC_REGISTERS, EventKind, FaultReason, Opcode, PEER_READ, PEER_WRITE, Status};
use zerocopy::IntoBytes;

const D: u64 = IOVA + DATA;
const VA: u64 = 1 << 40;
const REGS: u64 = 1 << 42;

fn sim(latency: Duration, clock: Clock) -> Bed {
    let spec = spec();
    let endpoints = spec.endpoints.clone();
    Bed::over(spec, move |memory| {
        let endpoints =
            endpoints.into_iter().map(|spec| SimEndpoint { latency, ..SimEndpoint::instant(spec) }).collect();
        Arc::new(SimEngine::new(&SimConfig::new(endpoints), memory, Arc::new(Unlimited), clock).unwrap())
    })
}

/// A device at once, with the FPGA's registers mapped.
fn fpga() -> Bed {
    let mut bed = sim(Duration::ZERO, Clock::Manual(ManualClock::new())).prepared();
    bed.ok(Opcode::Alloc, 1, alloc(FPGA, RW | ALLOC_REGISTERS, REGS, PAGE).as_bytes());
    bed.post_events(16);
    bed
}

fn read(bed: &mut Bed, offset: u64) -> u64 {
    let scratch = DATA + 0x8_0000;
    assert_eq!(status(&bed.run_one(1, copy(REGS + offset, IOVA + scratch, 8).stream(9))), Status::Ok);
    u64::from_le_bytes(bed.ram(scratch, 8).try_into().unwrap())
}

fn start(bed: &mut Bed, src: u64, dst: u64, len: u64) {
    let values = [
        (register::KERNEL, KERNEL_CHACHA20),
        (register::SRC, src),
        (register::DST, dst),
        (register::LEN, len),
        (register::NONCE, 7),
        (register::KEY0, 0x1111),
        (register::CONTROL, 1),
    ];
    let works: Vec<_> = values.iter().map(|(at, value)| fill(REGS + at, 8, *value).stream(9)).collect();
    assert!(bed.run(1, &works).iter().all(|record| status(record) == Status::Ok));
}

#[test]
fn fpga_reads_its_registers_and_ciphers_memory_as_itself() {
    let mut bed = fpga();
    assert_eq!(read(&mut bed, register::ID).to_le_bytes(), *b"PGFPGA1\0");
    let plain: Vec<u8> = (0..10_000u32).map(|i| (i % 241) as u8).collect();
    bed.set_ram(DATA, &plain);
    start(&mut bed, D, D + 0x1_0000, 10_000);
    let event = bed.take_events()[0];
    assert_eq!((event.kind.get(), event.accessor.get()), (EventKind::Interrupt as u16, FPGA.to_raw()));
    assert_eq!((read(&mut bed, register::STATUS), read(&mut bed, register::RESULT)), (2, 10_000));
    let cipher = bed.ram(DATA + 0x1_0000, 10_000);
    assert!(cipher != plain);
    start(&mut bed, D + 0x1_0000, D + 0x2_0000, 10_000);
    assert!(bed.ram(DATA + 0x2_0000, 10_000) == plain, "the stream cipher undoes itself");
    assert_eq!(read(&mut bed, register::COUNT), 2);
    assert_eq!(bed.seen.count_of(Counter::Kernels), 2);
}

#[test]
fn fpga_reaches_a_peer_only_with_the_right() {
    let mut bed = fpga();
    bed.alloc(1, GPU, VA, 4 * PAGE);
    start(&mut bed, VA, D, 64);
    let events = bed.take_events();
    assert_eq!(events.len(), 2, "{events:?}");
    assert_eq!((events[0].reason, events[0].address.get()), (FaultReason::Peer as u8, VA));
    assert_eq!((events[0].accessor.get(), events[0].owner.get()), (FPGA.to_raw(), GPU.to_raw()));
    assert_eq!(events[1].kind.get(), EventKind::Interrupt as u16);
    assert_eq!(read(&mut bed, register::STATUS), 3);
    assert_eq!(read(&mut bed, register::RESULT), u64::from(Status::Denied.to_raw()));
    bed.enable(1, FPGA, GPU, PEER_READ);
    start(&mut bed, VA, D, 64);
    assert_eq!(bed.take_events().len(), 1);
    assert_eq!(read(&mut bed, register::STATUS), 2);
    start(&mut bed, D, VA, 64);
    assert_eq!(read(&mut bed, register::RESULT), u64::from(Status::Denied.to_raw()), "reading is not writing");
    bed.enable(1, FPGA, GPU, PEER_WRITE);
    start(&mut bed, D, VA, 64);
    assert_eq!(read(&mut bed, register::STATUS), 2);
    start(&mut bed, 0x5000, D, 64);
    assert_eq!(read(&mut bed, register::RESULT), u64::from(Status::Fault.to_raw()));
}

#[test]
fn registers_of_two_domains_are_two() {
    let mut bed = fpga();
    bed.attach(2, FPGA);
    bed.map(2, DATA, PAGE);
    bed.ok(Opcode::Alloc, 2, alloc(FPGA, RW | ALLOC_REGISTERS, REGS, PAGE).as_bytes());
    bed.run_one(1, fill(REGS + register::NONCE, 8, 0x1234));
    bed.run_one(2, copy(REGS + register::NONCE, D, 8));
    assert_eq!(bed.ram(DATA, 8), [0; 8]);
    bed.detach_all(1);
    bed.detach_all(2);
    bed.assert_empty();
}

#[test]
fn work_takes_the_time_that_the_hardware_takes() {
    let clock = ManualClock::new();
    let mut bed = sim(Duration::from_micros(10), Clock::Manual(clock.clone())).prepared();
    let batch = bed.submit(1, &[fill(D, 8, 1), fill(D + 64, 8, 2), fence(), fill(D + 128, 8, 3).stream(1)]);
    bed.drain();
    assert_eq!(bed.statuses(batch), [None; 4]);
    assert!(bed.device.poll().is_some(), "the timekeeper knows when to look");
    clock.advance(Duration::from_micros(10));
    bed.drain();
    let ok = Some(Status::Ok);
    assert_eq!(bed.statuses(batch), [ok, None, None, ok]);
    clock.advance(Duration::from_micros(10));
    bed.drain();
    assert_eq!(bed.statuses(batch)[1], ok);
    for _ in 0..3 {
        clock.advance(Duration::from_micros(10));
        bed.drain();
    }
    assert!(bed.is_used(batch));
    let handle = bed.alloc(1, GPU, VA, PAGE);
    let free = bed.start(Opcode::Free, 1, vdev_wire::Free { handle: handle.into() }.as_bytes());
    assert_eq!(bed.answer(free), None, "zeroing takes time too");
    clock.advance(Duration::from_micros(10));
    assert_eq!(bed.answer(free).unwrap().status, Status::Ok);
}

/// The threads of a transport: one for each submission queue and the timekeeper, which sleep until they are woken.
struct Threads {
    stop: Arc<AtomicBool>,
    handles: Vec<std::thread::JoinHandle<()>>,
}

impl Threads {
    fn new(bed: &Bed) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut handles = Vec::new();
        for queue in 2..4 {
            let (device, stop) = (bed.device.clone(), stop.clone());
            handles.push(std::thread::spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    if !device.drain(queue) {
                        std::thread::yield_now();
                    }
                }
            }));
        }
        let (device, stopped) = (bed.device.clone(), stop.clone());
        let timekeeper = std::thread::spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                match device.poll() {
                    Some(sleep) => std::thread::park_timeout(sleep),
                    None => std::thread::park(),
                }
            }
        });
        let waker = timekeeper.thread().clone();
        bed.device.on_progress(Arc::new(move || waker.unpark()));
        handles.push(timekeeper);
        Self { stop, handles }
    }

    fn end(self) {
        self.stop.store(true, Ordering::SeqCst);
        for handle in self.handles {
            handle.thread().unpark();
            handle.join().unwrap();
        }
    }
}

/// Waits for a request or a batch without helping the device along, but for the control queue.
fn wait(bed: &mut Bed, what: &str, mut is_so: impl FnMut(&mut Bed) -> bool) {
    let start = std::time::Instant::now();
    while !is_so(bed) {
        bed.device.drain(0);
        assert!(start.elapsed() < Duration::from_secs(60), "never came: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn threads_of_a_transport_carry_everything_to_its_end() {
    let mut bed = sim(Duration::from_micros(50), Clock::Monotonic).prepared();
    let threads = Threads::new(&bed);
    for round in 0..60_u64 {
        let at = 0x10_0000 + (round % 8) * 0x10_0000;
        let handle = bed.alloc(1, GPU, VA, 16 * PAGE);
        bed.ok(Opcode::Map, 1, &map_bytes(at, RW, &[(DATA + (1 << 20), PAGE)]));
        let works: Vec<_> = (0..12)
            .map(|i| match i % 3 {
                0 => copy(D + 64 * i, VA + 64 * i, 64),
                1 => fill(at + 64 * i, 64, round),
                _ => copy(VA + 64 * i, D + 0x8000 + 64 * i, 64),
            })
            .zip(0..)
            .map(|(work, i)| work.stream(i % 4))
            .collect();
        let batches = [bed.submit_on(2, 1, &works), bed.submit_on(3, 1, &works)];
        let in_time = round % 2 == 0;
        if in_time {
            batches
                .iter()
                .for_each(|batch| wait(&mut bed, "a batch", |bed| bed.statuses(*batch).iter().all(Option::is_some)));
        }
        // Work that is not over yet may be refused now, but it has to end.
        let unmap = bed.start(Opcode::Unmap, 1, unmap(at, at + PAGE - 1).as_bytes());
        let free = bed.start(Opcode::Free, 1, vdev_wire::Free { handle: handle.into() }.as_bytes());
        for batch in batches {
            wait(&mut bed, "a batch", |bed| bed.is_used(batch));
            let is_fine = |status: &Option<Status>| status.is_some() && (!in_time || *status == Some(Status::Ok));
            assert!(bed.statuses(batch).iter().all(is_fine));
        }
        for call in [unmap, free] {
            let mut answer = None;
            wait(&mut bed, "an answer", |bed| {
                answer = bed.answer(call);
                answer.is_some()
            });
            assert_eq!(answer.unwrap().status, Status::Ok);
        }
        for stream in 0..4 {
            bed.reset_stream(1, stream);
        }
    }
    threads.end();
    assert_eq!(bed.detach_all(1).status, Status::Ok);
    bed.assert_empty();
}

#[test]
fn shutdown_while_threads_work_leaves_nothing() {
    for _ in 0..20 {
        let mut bed = sim(Duration::from_micros(200), Clock::Monotonic).prepared();
        bed.alloc(1, GPU, VA, 16 * PAGE);
        let threads = Threads::new(&bed);
        let works: Vec<_> = (0..20).map(|i| copy(D + 64 * i, VA + 64 * i, 64).stream(i as u32 % 5)).collect();
        let batches = [bed.submit_on(2, 1, &works), bed.submit_on(3, 1, &works)];
        bed.device.shutdown();
        threads.end();
        bed.assert_empty();
        for batch in batches {
            // Taken chains are back; others were never touched.
            let statuses = bed.statuses(batch);
            assert!(bed.is_used(batch) == statuses.iter().all(Option::is_some), "{statuses:?}");
        }
    }
}
