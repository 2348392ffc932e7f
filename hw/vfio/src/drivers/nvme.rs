//! An NVMe controller as a DMA engine (NVM Express Base 2.0 and NVM Command Set 1.0): what is read from a namespace is written where the PRPs say, be it
//! guest memory or another function's BAR.
//!
//! One queue pair, polled when the interrupt comes. A command that the IOMMU stops ends as any other does.
//!
//! Not here: more than one namespace, metadata, formats.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use iommu_addr::BusAddr;
use vmm_sys_util::eventfd::EventFd;

use super::{Command, Driver, Shape};
use crate::bus::PAGE;
use crate::dma::DmaMemory;
use crate::mover::MAX_TRANSFER;
use crate::{Function, Registers, VfioError};

/// Controller registers (Base 2.0, 3.1.3).
const CAP: usize = 0x00;
const CC: usize = 0x14;
const CSTS: usize = 0x1c;
const AQA: usize = 0x24;
const ASQ: usize = 0x28;
const ACQ: usize = 0x30;
const DOORBELLS: usize = 0x1000;

/// CC: enabled, pages of 4 KiB, NVM command set, submission entries of 64 bytes and completion entries of 16.
const CC_ENABLE: u32 = 1 | 6 << 16 | 4 << 20;
const CSTS_READY: u32 = 1;
const CSTS_FATAL: u32 = 2;

/// Admin commands (Base 2.0, figure 88) and those of the NVM command set.
const CREATE_SUBMISSION: u32 = 0x01;
const CREATE_COMPLETION: u32 = 0x05;
const IDENTIFY: u32 = 0x06;
const FLUSH: u32 = 0x00;
const WRITE: u32 = 0x01;
const READ: u32 = 0x02;
const WRITE_ZEROES: u32 = 0x08;
/// ONCS, what the controller can do beyond what each can (Base 2.0, figure 275), and the bit for writing zeroes.
const OPTIONAL: usize = 520;
const CAN_WRITE_ZEROES: u32 = 1 << 3;
/// Most blocks of a command.
const BLOCKS: u64 = 1 << 16;

/// Entries of each queue; one stays free, so there are fewer commands at a time.
const ENTRIES: usize = 32;
const DEPTH: usize = ENTRIES - 1;
const ENTRY: usize = 64;
const COMPLETION: usize = 16;
/// Most bytes of a command: a transfer's, which is less than a page of PRPs can say.
const MOST: u64 = MAX_TRANSFER;
/// A page each: the queues, what the controller says of itself, and then PRPs, one page a slot.
const PAGE_LEN: usize = 4096;
const ADMIN_SUBMISSION: usize = 0;
const ADMIN_COMPLETION: usize = PAGE_LEN;
const SUBMISSION: usize = 2 * PAGE_LEN;
const COMPLETIONS: usize = 3 * PAGE_LEN;
const ANSWER: usize = 4 * PAGE_LEN;
const LISTS: usize = 5 * PAGE_LEN;
/// How long an admin command may take.
const ADMIN_MILLIS: u64 = 10_000;

/// A queue pair.
struct Pair {
    submission: usize,
    completion: usize,
    tail: usize,
    head: usize,
    /// What a new completion's phase bit is.
    phase: bool,
    /// Number of the pair: which doorbells.
    id: usize,
}

impl Pair {
    fn new(id: usize, submission: usize, completion: usize) -> Self {
        Self { submission, completion, tail: 0, head: 0, phase: true, id }
    }
}

/// A controller and a namespace.
pub struct Nvme {
    // Before the function: when that goes, the domain may go with it.
    memory: DmaMemory,
    registers: Registers,
    function: Function,
    admin: Pair,
    io: Pair,
    /// Bytes between doorbells.
    stride: usize,
    /// How long the controller may take to come up.
    patience: Duration,
    namespace: u32,
    block: u64,
    blocks: u64,
    most: u64,
    zeroes: u64,
    /// Slots whose commands are out.
    out: [bool; DEPTH],
}

/// The sixteen words of a submission queue entry.
type Entry = [u32; ENTRY / 4];

impl Nvme {
    /// Brings the controller up, with one of its namespaces.
    ///
    /// # Errors
    /// When the function is no such controller, when it does not come up, or when the namespace is of no use.
    pub fn open(function: Function, namespace: u32, interrupt: &EventFd) -> Result<Self, VfioError> {
        let registers = function.registers(0, (DOORBELLS + PAGE_LEN) as u64)?;
        let memory = DmaMemory::new(&**function.host(), LISTS + DEPTH * PAGE_LEN, u64::MAX)?;
        let cap = registers.read64(CAP);
        if cap >> 37 & 1 == 0 || cap >> 48 & 0xf != 0 {
            return Err(VfioError::Unfit { what: "has no NVM command set, or no pages of 4 KiB" });
        }
        function.interrupt(interrupt)?;
        let mut nvme = Self {
            function,
            registers,
            memory,
            admin: Pair::new(0, ADMIN_SUBMISSION, ADMIN_COMPLETION),
            io: Pair::new(1, SUBMISSION, COMPLETIONS),
            stride: 4 << (cap >> 32 & 0xf),
            patience: Duration::from_millis(500 * (cap >> 24 & 0xff).max(1)),
            namespace,
            block: 0,
            blocks: 0,
            most: MOST,
            zeroes: 0,
            out: [false; DEPTH],
        };
        nvme.start_controller()?;
        nvme.identify()?;
        Ok(nvme)
    }

    /// From whatever state to one with both queue pairs.
    fn start_controller(&mut self) -> Result<(), VfioError> {
        self.registers.write32(CC, 0);
        self.until("stop", |status| status & CSTS_READY == 0)?;
        (0..LISTS).step_by(8).for_each(|at| self.memory.write64(at, 0));
        self.admin = Pair::new(0, ADMIN_SUBMISSION, ADMIN_COMPLETION);
        self.io = Pair::new(1, SUBMISSION, COMPLETIONS);
        self.out = [false; DEPTH];
        let size = u32::try_from(ENTRIES - 1).unwrap_or(0);
        self.registers.write32(AQA, size | size << 16);
        self.registers.write64(ASQ, self.memory.bus(ADMIN_SUBMISSION).0);
        self.registers.write64(ACQ, self.memory.bus(ADMIN_COMPLETION).0);
        self.registers.write32(CC, CC_ENABLE);
        self.until("come up", |status| status & CSTS_READY != 0)?;
        let queue = |opcode, at, flags| {
            let mut entry: Entry = [0; ENTRY / 4];
            entry[0] = opcode;
            [entry[6], entry[7]] = halves(self.memory.bus(at));
            entry[10] = 1 | size << 16;
            entry[11] = flags;
            entry
        };
        // The completion queue: contiguous, with interrupt 0. The submission queue: contiguous, with that completion queue.
        let (completion, submission) =
            (queue(CREATE_COMPLETION, COMPLETIONS, 1 | 2), queue(CREATE_SUBMISSION, SUBMISSION, 1 | 1 << 16));
        self.admin_command("make a completion queue", completion)?;
        self.admin_command("make a submission queue", submission)
    }

    fn until(&self, what: &'static str, there: impl Fn(u32) -> bool) -> Result<(), VfioError> {
        let started = Instant::now();
        loop {
            let status = self.registers.read32(CSTS);
            if status != u32::MAX && there(status) {
                return Ok(());
            }
            if status == u32::MAX || status & CSTS_FATAL != 0 || started.elapsed() > self.patience {
                let millis = u64::try_from(self.patience.as_millis()).unwrap_or(u64::MAX);
                return Err(VfioError::Stuck { what, millis });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// What the controller and the namespace are.
    fn identify(&mut self) -> Result<(), VfioError> {
        self.ask(1, 0)?;
        let mut byte = [0];
        // MDTS: the longest command, as a power of two of the smallest page; 0 is no limit.
        self.memory.read(ANSWER + 77, &mut byte);
        let limit = if byte[0] == 0 { u64::MAX } else { PAGE.checked_shl(byte[0].into()).unwrap_or(u64::MAX) };
        self.most = MOST.min(limit);
        let can_write_zeroes = self.memory.read32(ANSWER + OPTIONAL) & CAN_WRITE_ZEROES != 0;
        self.ask(0, self.namespace)?;
        // NSZE, then FLBAS and the format that it names: metadata size, and the block's as a power of two.
        let words = [self.memory.read32(ANSWER), self.memory.read32(ANSWER + 4)];
        self.blocks = u64::from(words[0]) | u64::from(words[1]) << 32;
        self.memory.read(ANSWER + 26, &mut byte);
        let format = self.memory.read32(ANSWER + 128 + 4 * usize::from(byte[0] & 0xf));
        let (metadata, shift) = (format & 0xffff, format >> 16 & 0xff);
        if self.blocks == 0 || metadata != 0 || !(9..=12).contains(&shift) {
            return Err(VfioError::Unfit {
                what: "has no such namespace, or one with metadata or blocks of no common size",
            });
        }
        self.block = 1 << shift;
        self.zeroes = if can_write_zeroes { limit.min(BLOCKS * self.block) } else { 0 };
        Ok(())
    }

    fn ask(&mut self, what: u32, namespace: u32) -> Result<(), VfioError> {
        let mut entry: Entry = [0; ENTRY / 4];
        (entry[0], entry[1], entry[10]) = (IDENTIFY, namespace, what);
        [entry[6], entry[7]] = halves(self.memory.bus(ANSWER));
        self.admin_command("say what it is", entry)
    }

    /// Runs an admin command to its end.
    fn admin_command(&mut self, what: &'static str, entry: Entry) -> Result<(), VfioError> {
        submit(&self.registers, &self.memory, self.stride, &mut self.admin, entry);
        let started = Instant::now();
        loop {
            match take(&self.registers, &self.memory, self.stride, &mut self.admin) {
                Some((_, 0)) => return Ok(()),
                Some((_, status)) => return Err(VfioError::Refused { what, status: status.into() }),
                None if started.elapsed() > Duration::from_millis(ADMIN_MILLIS) => {
                    return Err(VfioError::Stuck { what, millis: ADMIN_MILLIS });
                }
                None => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    }

    /// The pages of `len` bytes from `bus` on: two words, the second one of a list if there are more than two.
    fn pages(&self, slot: usize, bus: BusAddr, len: u64) -> [BusAddr; 2] {
        let first = PAGE - bus.0 % PAGE;
        if len <= first {
            return [bus, BusAddr(0)];
        }
        let (second, left) = (bus.0 + first, len - first);
        if left <= PAGE {
            return [bus, BusAddr(second)];
        }
        let list = LISTS + slot * PAGE_LEN;
        for (n, page) in (second..second + left).step_by(PAGE_LEN).enumerate() {
            self.memory.write64(list + 8 * n, page);
        }
        [bus, self.memory.bus(list)]
    }
}

fn halves(bus: BusAddr) -> [u32; 2] {
    [(bus.0 & 0xffff_ffff) as u32, (bus.0 >> 32) as u32]
}

/// Puts an entry into a queue and rings its doorbell.
fn submit(registers: &Registers, memory: &DmaMemory, stride: usize, pair: &mut Pair, entry: Entry) {
    let at = pair.submission + pair.tail * ENTRY;
    entry.iter().enumerate().for_each(|(n, word)| memory.write32(at + 4 * n, *word));
    pair.tail = (pair.tail + 1) % ENTRIES;
    // The device must not see the doorbell before the entry.
    fence(Ordering::SeqCst);
    registers.write32(DOORBELLS + 2 * pair.id * stride, u32::try_from(pair.tail).unwrap_or(0));
}

/// Takes a completion: whose it is, and the status, 0 if it is a success.
fn take(registers: &Registers, memory: &DmaMemory, stride: usize, pair: &mut Pair) -> Option<(u16, u16)> {
    let last = memory.read32(pair.completion + pair.head * COMPLETION + 12);
    if (last >> 16 & 1 == 1) != pair.phase {
        return None;
    }
    // What the command wrote came before.
    fence(Ordering::Acquire);
    pair.head = (pair.head + 1) % ENTRIES;
    pair.phase ^= pair.head == 0;
    registers.write32(DOORBELLS + (2 * pair.id + 1) * stride, u32::try_from(pair.head).unwrap_or(0));
    Some(((last & 0xffff) as u16, (last >> 17) as u16))
}

impl Driver for Nvme {
    fn shape(&self) -> Shape {
        Shape {
            own_len: self.blocks.saturating_mul(self.block),
            is_buffer: false,
            granule: self.block,
            alignment: 4,
            most: self.most,
            depth: DEPTH,
            mask: u64::MAX,
            zeroes: self.zeroes,
            reports_faults: false,
        }
    }

    fn start(&mut self, slot: usize, command: Command) {
        let (opcode, own, bus, len) = match command {
            Command::In { own, bus, len } => (WRITE, own, bus, len),
            Command::Out { own, bus, len } => (READ, own, bus, len),
            Command::Zero { own, len } => (WRITE_ZEROES, own, BusAddr(0), len),
            Command::Flush => (FLUSH, 0, BusAddr(0), 0),
        };
        let mut entry: Entry = [0; ENTRY / 4];
        entry[0] = opcode | u32::try_from(slot).unwrap_or(0) << 16;
        entry[1] = self.namespace;
        if len > 0 {
            if opcode != WRITE_ZEROES {
                let [first, second] = self.pages(slot, bus, len);
                [entry[6], entry[7]] = halves(first);
                [entry[8], entry[9]] = halves(second);
            }
            [entry[10], entry[11]] = halves(BusAddr(own / self.block));
            entry[12] = u32::try_from(len / self.block - 1).unwrap_or(0);
        }
        self.out[slot] = true;
        submit(&self.registers, &self.memory, self.stride, &mut self.io, entry);
    }

    fn poll(&mut self, ended: &mut Vec<(usize, Result<(), u32>)>) {
        while let Some((slot, status)) = take(&self.registers, &self.memory, self.stride, &mut self.io) {
            let slot = usize::from(slot);
            // What the controller names that is not out is its mistake, and of no use to anybody.
            if let Some(out) = self.out.get_mut(slot).filter(|out| **out) {
                *out = false;
                ended.push((slot, if status == 0 { Ok(()) } else { Err(status.into()) }));
            }
        }
    }

    fn reset(&mut self) -> Result<(), VfioError> {
        self.function.reset();
        self.start_controller()
    }

    fn stop(&mut self) {
        self.function.stop();
    }
}
