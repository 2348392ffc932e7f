//! GPUs and FPGAs that are not there: their copy engines, links, registers and one FPGA kernel, over memory that it is handed.
//!
//! [`SimEngine`] is a [`hw_engine::DmaEngine`] for the endpoints of one tenant ([`SimConfig`]).
//!
//! - What costs no time (no latency, links as fast as memory) is done on the caller's thread, as a real copy.
//! - What costs time is booked piece by piece on the host's [`hw_engine::LinkLedger`], when the tenant's turn comes, and then on a copy engine of
//!   the initiator. A thread of the engine moves the bytes; the end is reported when it is due, and never before the bytes have stopped moving.
//! - With a [`ManualClock`] there is no thread: bytes move and ends come in `poll`, when the clock has reached them.
//! - An FPGA has a register page for each domain that uses it, and a ChaCha20 kernel that reads and writes memory as the FPGA itself.
//!
//! Modules: `config` and `clock` are what the caller gives; `fabric` says which links a transfer crosses and `traffic` when; `agenda` holds
//! transfers until they are due; `registers` and `kernel` are the FPGA; `flaw` breaks the way between two
//! endpoints, for tests of who has to notice; `engine` ties them together.
//!
//! Not here: memory itself, rights, translation, other processes, errors of hardware.
#![forbid(unsafe_code)]

mod agenda;
mod clock;
mod config;
mod engine;
mod fabric;
mod flaw;
mod kernel;
mod registers;
mod traffic;
mod worker;

pub use clock::{Clock, ManualClock};
pub use config::{ConfigError, SimConfig, SimEndpoint};
pub use engine::SimEngine;
pub use flaw::Flaw;
pub use registers::{KERNEL_CHACHA20, register};
