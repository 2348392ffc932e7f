//! What can go wrong, from a call to the driver up to a transfer.
//!
//! One refusal, one status: the kernel driver's errnos are turned into the wire's statuses at its edge, so that a caller asks "was it
//! DENIED" the same way whatever carries the call.
//!
//! Not here: what to do about it; only the messages say that.

use std::io;
use std::path::PathBuf;

use vdev_wire::{FaultReason, Status};

use crate::Outcome;

/// Why a call or a transfer did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver or the device refused a call; nothing changed.
    #[error("{call} was refused with {}: {}", status.name(), meaning(*status))]
    Refused {
        /// The call, as SPEC.md names it.
        call: &'static str,
        /// Why.
        status: Status,
    },
    /// A transfer ended with an error.
    #[error("{}", describe_transfer(outcome))]
    Transfer {
        /// How it ended.
        outcome: Outcome,
    },
    /// The device file cannot be opened.
    #[error("Could not open {}; is the driver loaded, and may this user open it?", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The operating system failed a call for a reason that is not the device's.
    #[error("{call} failed")]
    System {
        /// The call.
        call: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Bytes outside a mapping or buffer were named.
    #[error("{len} bytes at offset {offset} do not fit into {size} bytes")]
    Bounds {
        /// First byte named.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// How many there are.
        size: u64,
    },
    /// A deadline passed first. What was asked for may still happen.
    #[error("{what} was not finished in time")]
    Deadline {
        /// What was waited for.
        what: &'static str,
    },
    /// No endpoint has this name or number.
    #[error("No endpoint is called \"{name}\"; there are: {known}")]
    NoEndpoint {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// The endpoint has no register page.
    #[error("Endpoint \"{name}\" has no registers; use one that does, such as an FPGA")]
    NoRegisters {
        /// The endpoint.
        name: String,
    },
    /// The device was removed or its connection ended: open it again.
    #[error("The device is gone; open it again once it is back")]
    Gone,
}

impl Error {
    /// The wire status, if the device or the driver gave one.
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            Self::Transfer { outcome } => Some(outcome.status),
            _ => None,
        }
    }
}

/// What a status means to a program, and what it can do.
fn meaning(status: Status) -> &'static str {
    match status {
        Status::Ok => "nothing was wrong",
        Status::IoErr => "the device could not do it",
        Status::Unsupp => "this device does not do that",
        Status::DevErr => "the device has an internal error",
        Status::Inval => "a value can never be valid, or the state forbids it",
        Status::Range => "an address or length lies outside what the device offers",
        Status::NoEnt => "there is no such endpoint, buffer, stream or mapping here",
        Status::Fault => "an address could not be translated",
        Status::NoMem => "there is no memory left for it; free some first",
        Status::Quota => "a limit of the tenant is reached; free something first",
        Status::Stale => "it names something that was freed, or the device lost its state",
        Status::Revoked => "the right was withdrawn",
        Status::Cancelled => "it was cancelled, or stood behind an error in its stream; reset the stream",
        Status::Timeout => "it was not finished by its deadline",
        Status::Deadlock => "it waits on itself",
        Status::Poisoned => "the memory has an uncorrectable error",
        Status::Lost => "the device lost its state; whether it took effect is unknown",
        Status::NoAperture => "no aperture is left to reach the memory through",
        Status::Busy => "no credit is left; take completions, then try again",
        Status::Already => "it is already so; nothing changed",
        Status::Denied => "a right is missing; enable the peer right first",
        _ => "this library does not know the status",
    }
}

fn describe_transfer(outcome: &Outcome) -> String {
    let (status, moved) = (outcome.status, outcome.bytes);
    match outcome.fault {
        Some(fault) => format!(
            "The transfer ended with {} ({}) at address {:#x} after {moved} bytes: {}",
            status.name(),
            fault.reason.name(),
            fault.address,
            fault_meaning(fault.reason)
        ),
        None => format!("The transfer ended with {} after {moved} bytes: {}", status.name(), meaning(status)),
    }
}

fn fault_meaning(reason: FaultReason) -> &'static str {
    match reason {
        FaultReason::Domain => "the endpoint does not belong to this address space",
        FaultReason::Mapping => "nothing is mapped there",
        FaultReason::Permission => "the mapping does not allow the access",
        FaultReason::Peer => "the accessor has no peer right to that memory",
        FaultReason::Stale => "the buffer was freed",
        FaultReason::Draining => "the mapping is going away",
        FaultReason::Access => "registers need one aligned access of 4 or 8 bytes",
        _ => "this library does not know the reason",
    }
}
