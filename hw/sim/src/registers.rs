//! An FPGA's register page: one context for each domain, so that two processes of a guest never share a register.
//!
//! A store of START makes the FPGA raise an [`Initiated`]; the kernel runs when the device answers it, and each START ends with one
//! interrupt, however it ended. Not here: the kernel's work (`kernel`), checks of who may reach the registers (the device's).

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hw_engine::{EndpointKind, EngineError, Finished, Initiated, Memory, MemoryError, Raised, Transfer, Work};
use iommu_addr::{ApertureOffset, DomainId, EndpointId, Iova, Location, REGISTERS, Range, Segment};

use crate::SimConfig;
use crate::kernel::{LONGEST, Seed};

/// Offsets in an FPGA's register page. Each register is 8 bytes, little-endian; what is not listed reads 0 and ignores stores.
pub mod register {
    /// Read only: `PGFPGA1` and a zero byte.
    pub const ID: u64 = 0x00;
    /// Which kernel START runs: 0 none, 1 ChaCha20.
    pub const KERNEL: u64 = 0x08;
    /// I/O virtual address of the bytes to read.
    pub const SRC: u64 = 0x10;
    /// I/O virtual address of the bytes to write.
    pub const DST: u64 = 0x18;
    /// Bytes to process, at least 1.
    pub const LEN: u64 = 0x20;
    /// The last 8 of the nonce's 12 bytes; the first 4 are 0.
    pub const NONCE: u64 = 0x28;
    /// The first of four registers of key; write only, they read 0.
    pub const KEY0: u64 = 0x30;
    /// Write only: bit 0 is START. A START while a kernel runs is dropped.
    pub const CONTROL: u64 = 0x50;
    /// Read only: 0 idle, 1 busy, 2 done, 3 error.
    pub const STATUS: u64 = 0x58;
    /// Read only: bytes processed, or the wire status of an error.
    pub const RESULT: u64 = 0x60;
    /// Read only: how many STARTs have ended, well or not.
    pub const COUNT: u64 = 0x68;
}

/// The value of KERNEL that selects the ChaCha20 stream of RFC 8439, from block 0 on.
pub const KERNEL_CHACHA20: u64 = 1;

const ID: u64 = u64::from_le_bytes(*b"PGFPGA1\0");
const START: u64 = 1;
const VECTOR: u32 = 0;
const KEY_LAST: u64 = register::KEY0 + 0x18;

/// Wire statuses that RESULT can show: what went wrong inside the FPGA. Others come from the device, through `refuse`.
mod wire {
    pub(super) const IOERR: u32 = 1;
    pub(super) const DEVERR: u32 = 3;
    pub(super) const INVAL: u32 = 4;
    pub(super) const RANGE: u32 = 5;
    pub(super) const TIMEOUT: u32 = 0x44;
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    #[default]
    Idle = 0,
    Busy = 1,
    Done = 2,
    Error = 3,
}

#[derive(Default)]
struct Context {
    kernel: u64,
    src: u64,
    dst: u64,
    len: u64,
    nonce: u64,
    key: [u64; 4],
    state: State,
    result: u64,
    count: u64,
    /// Key and nonce as they were at START.
    seed: Option<Seed>,
}

/// A shape that registers take: one naturally aligned access of 4 or 8 bytes.
#[derive(Clone, Copy)]
pub(crate) struct Access {
    endpoint: EndpointId,
    offset: u64,
    len: u64,
    other: Other,
}

/// The other end of a register access.
#[derive(Clone, Copy)]
enum Other {
    /// Store this.
    Value(u64),
    /// Store what is there.
    From(Location),
    /// Load to there.
    To(Location),
}

/// The registers of a tenant's FPGAs.
pub(crate) struct Registers {
    /// FPGAs with the size of their register page.
    pages: Vec<(EndpointId, u64)>,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    /// Made by a store. The device bounds the number of domains, so their number is bounded too.
    contexts: HashMap<(EndpointId, DomainId), Context>,
    /// An `Initiated` and an `Interrupt` for each START at most. Whoever submitted the START is told to ask for them.
    raised: VecDeque<Raised>,
}

impl Registers {
    pub(crate) fn new(config: &SimConfig) -> Self {
        let fpgas = config.endpoints.iter().filter(|endpoint| endpoint.spec.kind == EndpointKind::Fpga);
        let pages = fpgas.map(|fpga| (fpga.spec.id, fpga.spec.registers_len)).filter(|(_, len)| *len > 0);
        Self { pages: pages.collect(), held: Mutex::default() }
    }

    /// The register access that a transfer is; `None` if it touches no register.
    pub(crate) fn access(&self, work: &Work) -> Option<Result<Access, EngineError>> {
        let (src, dst) = match work {
            Work::Copy { src, dst, .. } => (&src[..], &dst[..]),
            Work::Fill { dst, .. } => (&[][..], &dst[..]),
            Work::Kernel { .. } | Work::Flush | Work::Atomic { .. } => return None,
        };
        let touches = |segments: &[Segment]| segments.iter().any(|segment| segment.at.is_registers());
        let (load, store) = (touches(src), touches(dst));
        if !load && !store {
            return None;
        }
        Some(match (work, src, dst) {
            (Work::Fill { pattern, .. }, _, [to]) => self.shape(*to, Other::Value(*pattern)),
            (Work::Copy { .. }, [from], [to]) if !load && from.len == to.len => self.shape(*to, Other::From(from.at)),
            (Work::Copy { .. }, [from], [to]) if !store && from.len == to.len => self.shape(*from, Other::To(to.at)),
            _ => Err(EngineError::RegisterAccess),
        })
    }

    fn shape(&self, at: Segment, other: Other) -> Result<Access, EngineError> {
        let Segment { at, len } = at;
        let missing = MemoryError { at, len };
        let Location::Aperture { endpoint, offset: ApertureOffset(offset) } = at else { return Err(missing.into()) };
        let offset = offset.checked_sub(REGISTERS.0).ok_or(missing)?;
        if !matches!(len, 4 | 8) || offset % len != 0 {
            return Err(EngineError::RegisterAccess);
        }
        let page = self.pages.iter().find(|(id, _)| *id == endpoint).map_or(0, |(_, len)| *len);
        if offset.checked_add(len).is_none_or(|end| end > page) {
            return Err(missing.into());
        }
        Ok(Access { endpoint, offset, len, other })
    }

    /// Carries out an access.
    pub(crate) fn carry_out(&self, access: Access, transfer: &Transfer, memory: &dyn Memory) -> Finished {
        let mut raised = false;
        let moved = match access.other {
            Other::Value(value) => {
                raised = self.store(access, transfer.domain, value);
                Ok(())
            }
            Other::From(src) => {
                let mut bytes = [0; 8];
                let read = memory.read(src, &mut bytes[..length(access)]);
                read.map(|()| raised = self.store(access, transfer.domain, u64::from_le_bytes(bytes)))
            }
            Other::To(dst) => {
                let value = self.load(access, transfer.domain);
                memory.write(dst, &value.to_le_bytes()[..length(access)])
            }
        };
        let bytes = if moved.is_ok() { access.len } else { 0 };
        Finished { job: transfer.job, bytes, result: moved.map_err(EngineError::Memory), raised, value: 0 }
    }

    fn load(&self, access: Access, domain: DomainId) -> u64 {
        let held = self.held();
        let fresh = Context::default();
        let context = held.contexts.get(&(access.endpoint, domain)).unwrap_or(&fresh);
        context.load(access.offset & !7) >> (access.offset % 8 * 8)
    }

    /// Whether the store made the FPGA raise something.
    fn store(&self, access: Access, domain: DomainId, value: u64) -> bool {
        let shift = access.offset % 8 * 8;
        let mask = if access.len == 8 { u64::MAX } else { u64::from(u32::MAX) << shift };
        let mut held = self.held();
        let Held { contexts, raised } = &mut *held;
        let context = contexts.entry((access.endpoint, domain)).or_default();
        if !context.store(access.offset & !7, (value << shift) & mask, mask) || context.state == State::Busy {
            return false;
        }
        match context.start() {
            Ok((src, dst)) => {
                raised.push_back(Raised::Initiated(Initiated { endpoint: access.endpoint, domain, src, dst }));
            }
            Err(status) => {
                context.end(State::Error, u64::from(status));
                raised.push_back(interrupt(access.endpoint, domain));
            }
        }
        true
    }

    /// Key and nonce of the kernel that waits for its memory.
    pub(crate) fn seed(&self, endpoint: EndpointId, domain: DomainId) -> Option<Seed> {
        self.held().contexts.get_mut(&(endpoint, domain))?.seed.take()
    }

    /// A kernel has ended so.
    pub(crate) fn finish(&self, endpoint: EndpointId, domain: DomainId, end: &Finished) {
        let (state, result) = match end.result {
            Ok(()) => (State::Done, end.bytes),
            // Nobody but the device's deadline gives up a kernel.
            Err(EngineError::Aborted) => (State::Error, wire::TIMEOUT.into()),
            Err(EngineError::Memory(_)) => (State::Error, wire::IOERR.into()),
            Err(EngineError::Busy | EngineError::RegisterAccess | EngineError::Device { .. }) => {
                (State::Error, wire::DEVERR.into())
            }
        };
        self.end(endpoint, domain, state, result);
    }

    /// The kernel was not allowed to run.
    pub(crate) fn refuse(&self, initiated: &Initiated, status: u32) {
        self.end(initiated.endpoint, initiated.domain, State::Error, status.into());
    }

    fn end(&self, endpoint: EndpointId, domain: DomainId, state: State, result: u64) {
        let mut held = self.held();
        let Held { contexts, raised } = &mut *held;
        if let Some(context) = contexts.get_mut(&(endpoint, domain)).filter(|context| context.state == State::Busy) {
            context.end(state, result);
            raised.push_back(interrupt(endpoint, domain));
        }
    }

    pub(crate) fn raised(&self, out: &mut Vec<Raised>) {
        out.extend(self.held().raised.drain(..));
    }

    pub(crate) fn forget(&self, gone: DomainId) {
        let mut held = self.held();
        held.contexts.retain(|(_, domain), _| *domain != gone);
        held.raised.retain(|raised| match raised {
            Raised::Initiated(Initiated { domain, .. }) | Raised::Interrupt { domain, .. } => *domain != gone,
        });
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Context {
    fn load(&self, offset: u64) -> u64 {
        match offset {
            register::ID => ID,
            register::KERNEL => self.kernel,
            register::SRC => self.src,
            register::DST => self.dst,
            register::LEN => self.len,
            register::NONCE => self.nonce,
            register::STATUS => self.state as u64,
            register::RESULT => self.result,
            register::COUNT => self.count,
            _ => 0,
        }
    }

    /// Changes the bits of `mask`. Answers whether the store asks for a start.
    fn store(&mut self, offset: u64, value: u64, mask: u64) -> bool {
        let held = match offset {
            register::KERNEL => &mut self.kernel,
            register::SRC => &mut self.src,
            register::DST => &mut self.dst,
            register::LEN => &mut self.len,
            register::NONCE => &mut self.nonce,
            register::KEY0..=KEY_LAST => {
                let index = usize::try_from((offset - register::KEY0) / 8).unwrap_or(0);
                &mut self.key[index.min(3)]
            }
            register::CONTROL => return value & START != 0,
            _ => return false,
        };
        *held = (*held & !mask) | value;
        false
    }

    /// Begins a kernel: what it reads and writes, or the wire status that says why not.
    fn start(&mut self) -> Result<(Range<Iova>, Range<Iova>), u32> {
        if self.kernel != KERNEL_CHACHA20 || self.len == 0 {
            return Err(wire::INVAL);
        }
        let range = |start| Range::with_len(Iova(start), self.len).ok_or(wire::RANGE);
        let (src, dst) = (range(self.src)?, range(self.dst)?);
        if self.len > LONGEST {
            return Err(wire::RANGE);
        }
        (self.state, self.result) = (State::Busy, 0);
        self.seed = Some(Seed { key: self.key, nonce: self.nonce });
        Ok((src, dst))
    }

    fn end(&mut self, state: State, result: u64) {
        (self.state, self.result, self.seed) = (state, result, None);
        self.count = self.count.wrapping_add(1);
    }
}

fn interrupt(endpoint: EndpointId, domain: DomainId) -> Raised {
    Raised::Interrupt { endpoint, domain, vector: VECTOR }
}

fn length(access: Access) -> usize {
    usize::try_from(access.len).unwrap_or(8).min(8)
}
