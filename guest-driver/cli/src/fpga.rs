//! The FPGA's own logic as its registers show it: a ChaCha20 kernel that reads one range, writes another, and interrupts.
//!
//! Registers are 64 bits wide and belong to this session alone. A kernel is started by stores and ends with an INTERRUPT event.
//!
//! Not here: moving bytes to and from the FPGA's memory.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use chacha20::ChaCha20;
use chacha20::cipher::{KeyIvInit, StreamCipher};
use peergate_guest::{EndpointInfo, EventKind, Notice, Registers, Session, Status};

/// What the ID register says.
const ID_VALUE: u64 = u64::from_le_bytes(*b"PGFPGA1\0");
/// Kernel number of the cipher.
const KERNEL_CHACHA20: u64 = 1;
/// CONTROL: start.
const START: u64 = 1;
/// STATUS: the kernel ended well.
const STATUS_DONE: u64 = 2;
/// STATUS: the kernel was refused something.
const STATUS_ERROR: u64 = 3;
/// How often a waiter looks up to tell that it still waits.
const TICK: Duration = Duration::from_millis(500);

/// Offsets of the registers.
mod register {
    pub(super) const ID: u64 = 0x00;
    pub(super) const KERNEL: u64 = 0x08;
    pub(super) const SRC: u64 = 0x10;
    pub(super) const DST: u64 = 0x18;
    pub(super) const LEN: u64 = 0x20;
    pub(super) const NONCE: u64 = 0x28;
    pub(super) const KEY: [u64; 4] = [0x30, 0x38, 0x40, 0x48];
    pub(super) const CONTROL: u64 = 0x50;
    pub(super) const STATUS: u64 = 0x58;
    pub(super) const RESULT: u64 = 0x60;
}

/// ChaCha20 as in RFC 8439, counter from 0; the nonce's first four bytes are zero, `nonce` is the rest, lowest byte first.
#[derive(Clone, Copy)]
pub struct Cipher {
    /// The key.
    pub key: [u8; 32],
    /// The nonce.
    pub nonce: u64,
}

impl Cipher {
    /// A key for trying things out.
    pub const EXAMPLE: Self = Self { key: *b"for trying things out, no secret", nonce: 0 };

    /// The same cipher on the CPU, over what `from` yields.
    pub fn over<R: Read>(&self, from: R) -> Encrypted<R> {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.nonce.to_le_bytes());
        Encrypted { from, cipher: ChaCha20::new(&self.key.into(), &nonce.into()) }
    }
}

/// Bytes of a reader, encrypted.
pub struct Encrypted<R> {
    from: R,
    cipher: ChaCha20,
}

impl<R: Read> Read for Encrypted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = self.from.read(into)?;
        let fresh = into.get_mut(..len).unwrap_or_default();
        self.cipher.try_apply_keystream(fresh).map_err(io::Error::other)?;
        Ok(len)
    }
}

/// The registers of one FPGA.
pub struct Fpga {
    session: Session,
    registers: Registers,
    number: u32,
    name: String,
}

/// How a kernel ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// STATUS: 2 done, 3 error.
    pub status: u64,
    /// RESULT: bytes processed, or the status that refused it.
    pub result: u64,
    /// Fault events of the FPGA that came before its interrupt.
    pub faults: Vec<Notice>,
}

impl Ended {
    /// Bytes processed, if it ended well.
    ///
    /// # Errors
    /// Says what was refused if it did not.
    pub fn bytes(&self) -> anyhow::Result<u64> {
        match (self.status, self.faults.first()) {
            (STATUS_DONE, _) => Ok(self.result),
            (STATUS_ERROR, Some(fault)) => {
                bail!("The kernel was refused address {:#x} ({})", fault.address, self.refusal())
            }
            (STATUS_ERROR, None) => bail!("The kernel was refused ({})", self.refusal()),
            (status, _) => bail!("The FPGA interrupted, but its STATUS register says {status}"),
        }
    }

    fn refusal(&self) -> String {
        let status = u32::try_from(self.result).ok().and_then(Status::from_raw);
        status.map_or_else(|| format!("status {:#x}", self.result), |status| status.name().to_owned())
    }
}

impl Fpga {
    /// Opens the registers of `endpoint`.
    ///
    /// # Errors
    /// If it has none, or their ID is not that of the logic this type knows.
    pub fn open(session: &Session, endpoint: &EndpointInfo) -> anyhow::Result<Self> {
        let registers = session.registers(endpoint)?;
        let id = registers.load(register::ID).context("Could not read the FPGA's ID register")?;
        ensure!(id == ID_VALUE, "{} has logic {id:#018x}; this program needs {ID_VALUE:#018x}", endpoint.name);
        Ok(Self { session: session.clone(), registers, number: endpoint.number, name: endpoint.name.clone() })
    }

    /// Starts the cipher over `len` bytes from address `source` to address `destination`. Does not wait for its end.
    ///
    /// # Errors
    /// If a store is refused.
    pub fn start(&self, source: u64, destination: u64, len: u64, cipher: &Cipher) -> anyhow::Result<()> {
        let registers = &self.registers;
        for (offset, word) in register::KEY.into_iter().zip(cipher.key.as_chunks::<8>().0) {
            registers.store(offset, u64::from_le_bytes(*word))?;
        }
        registers.store(register::NONCE, cipher.nonce)?;
        registers.store(register::SRC, source)?;
        registers.store(register::DST, destination)?;
        registers.store(register::LEN, len)?;
        registers.store(register::KERNEL, KERNEL_CHACHA20)?;
        registers.store(register::CONTROL, START)?;
        Ok(())
    }

    /// Blocks until the FPGA interrupts; calls `tick` now and then. Other events that come before are dropped, but the FPGA's faults.
    ///
    /// # Errors
    /// If it has not interrupted when the device's longest deadline has passed, or the device is gone.
    pub fn wait(&self, tick: &mut dyn FnMut()) -> anyhow::Result<Ended> {
        let deadline = self.session.patience();
        let mut faults = Vec::new();
        loop {
            let event = self.session.event(deadline.min(Instant::now() + TICK))?;
            match event {
                Some(event) if event.accessor != Some(self.number) => {}
                Some(event) if event.kind == Some(EventKind::Interrupt) => break,
                Some(event) if event.kind == Some(EventKind::Fault) => faults.push(event),
                _ => ensure!(Instant::now() < deadline, "{} did not interrupt in time", self.name),
            }
            tick();
        }
        let status = self.registers.load(register::STATUS)?;
        let result = self.registers.load(register::RESULT)?;
        Ok(Ended { status, result, faults })
    }

    /// Address of the register page.
    pub fn iova(&self) -> u64 {
        self.registers.iova()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 8439, A.2, test vector 1: key, nonce and counter zero.
    #[test]
    fn the_cpu_computes_chacha20_from_counter_zero() {
        let mut bytes = [0; 16];
        let mut encrypted = Cipher { key: [0; 32], nonce: 0 }.over(io::repeat(0));
        encrypted.read_exact(&mut bytes).expect("endless");
        assert_eq!(bytes[..8], [0x76, 0xb8, 0xe0, 0xad, 0xa0, 0xf1, 0x3d, 0x90]);
    }

    #[test]
    fn encrypting_twice_gives_the_bytes_back() {
        let cipher = Cipher { nonce: 9, ..Cipher::EXAMPLE };
        let mut back = Vec::new();
        cipher.over(cipher.over(&b"some bytes"[..])).read_to_end(&mut back).expect("memory");
        assert_eq!(back, b"some bytes");
    }

    #[test]
    fn a_refused_kernel_says_what_was_refused() {
        let ended = Ended { status: 3, result: 7, faults: Vec::new() };
        assert_eq!(ended.bytes().expect_err("an error").to_string(), "The kernel was refused (FAULT)");
        assert_eq!(Ended { status: 2, result: 5, faults: Vec::new() }.bytes().expect("done"), 5);
        assert!(Ended { status: 1, result: 5, faults: Vec::new() }.bytes().is_err());
    }
}
