//! The simulated engine from outside.
#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod common;
mod conformance;
mod fpga;
mod oracle;
mod pieces;
mod proof;
mod threads;
mod timing;
