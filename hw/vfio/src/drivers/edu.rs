//! QEMU's `edu` device (QEMU 11.1, `docs/specs/edu.rst`): a buffer of 4 KiB, one transfer at a time, a tenth of a second each.
//!
//! It says nothing when the IOMMU stops it: the transfer ends as any other does.
//!
//! Not here: its factorial.

use iommu_addr::BusAddr;
use vmm_sys_util::eventfd::EventFd;

use super::{Command, Driver, Shape};
use crate::{Function, Registers, VfioError};

/// Registers.
const ID: usize = 0x00;
const INTERRUPT_STATUS: usize = 0x24;
const INTERRUPT_ACK: usize = 0x64;
const SOURCE: usize = 0x80;
const DESTINATION: usize = 0x88;
const COUNT: usize = 0x90;
const COMMAND: usize = 0x98;

/// Low half of [`ID`]; the high half is a version.
const IS_EDU: u32 = 0x00ed;
/// Bits of [`COMMAND`].
const START: u64 = 1;
const OUT: u64 = 2;
const RAISE: u64 = 4;

/// What the device calls the first byte of its buffer.
const BUFFER: u64 = 0x40000;
const BUFFER_LEN: u64 = 4096;
/// Its default mask of 28 bits.
const MASK: u64 = (1 << 28) - 1;

/// The engine.
pub struct Edu {
    registers: Registers,
    function: Function,
    running: Option<usize>,
}

impl Edu {
    /// Opens it.
    ///
    /// # Errors
    /// When the function is no `edu`.
    pub fn open(function: Function, interrupt: &EventFd) -> Result<Self, VfioError> {
        let registers = function.registers(0, 0x100)?;
        if registers.read32(ID) & 0xffff != IS_EDU {
            return Err(VfioError::Unfit { what: "is no edu" });
        }
        function.interrupt(interrupt)?;
        Ok(Self { function, registers, running: None })
    }
}

impl Driver for Edu {
    fn shape(&self) -> Shape {
        Shape {
            own_len: BUFFER_LEN,
            is_buffer: true,
            granule: 1,
            alignment: 1,
            most: BUFFER_LEN,
            depth: 1,
            mask: MASK,
            zeroes: 0,
            reports_faults: false,
        }
    }

    fn start(&mut self, slot: usize, command: Command) {
        self.running = Some(slot);
        let (source, destination, len, way) = match command {
            Command::In { own, bus: BusAddr(bus), len } => (bus, BUFFER + own, len, 0),
            Command::Out { own, bus: BusAddr(bus), len } => (BUFFER + own, bus, len, OUT),
            // It stores nothing.
            Command::Zero { .. } | Command::Flush => return,
        };
        self.registers.write64(SOURCE, source);
        self.registers.write64(DESTINATION, destination);
        self.registers.write64(COUNT, len);
        self.registers.write64(COMMAND, START | RAISE | way);
    }

    fn poll(&mut self, ended: &mut Vec<(usize, Result<(), u32>)>) {
        if self.running.is_some() && self.registers.read64(COMMAND) & START == 0 {
            let raised = self.registers.read32(INTERRUPT_STATUS);
            self.registers.write32(INTERRUPT_ACK, raised);
            ended.extend(self.running.take().map(|slot| (slot, Ok(()))));
        }
    }

    fn reset(&mut self) -> Result<(), VfioError> {
        self.function.reset();
        self.running = None;
        Ok(())
    }

    fn stop(&mut self) {
        self.function.stop();
    }
}
