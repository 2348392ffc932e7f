//! The lab: a whole host in one QEMU, with an IOMMU, PCIe root ports, DMA engines and memory behind BARs, and guests of its own under real KVM.
//!
//! A [`Topology`] says which devices there are, a [`Machine`] is that host; programs of this machine run in it ([`run_program`]) and so do guests
//! (`inner`), under either VMM (`vmm`). [`check`](check()) plays every scenario (`devices`, `engines`, `guests`, `restless`) and judges it. Nothing of this needs such hardware here: the translator emulates it where KVM does not run.
//!
//! Not here: what a device does, and what a driver of it must.

pub mod check;
pub mod devices;
pub mod engines;
pub mod guests;
pub mod inner;
pub mod machine;
pub mod restless;
mod script;
pub mod topology;
pub mod transfers;
pub mod vmm;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::kit::Kit;
pub use check::check;
pub use machine::{Machine, Ran};
pub use topology::Topology;

/// From the host's start to its end, for one program.
const PROGRAM_TIME: Duration = Duration::from_secs(300);
/// Ends the results of a program, before its exit status.
const EXIT: &str = "\nlab-exit ";

/// How a program ended in the lab.
#[derive(Debug, Clone)]
pub struct Ended {
    /// Its exit status; 128 and a signal's number if that ended it.
    pub status: i32,
    /// What it wrote, to either stream.
    pub output: String,
    /// The console of the host, for what its kernel said.
    pub console: Vec<String>,
    /// How long the host ran, from start to power-off.
    pub wall: Duration,
}

/// Boots the host, runs a program of this machine in it as root, with the shared libraries that it needs, and gives what came of it. The program
/// finds the devices in `/run/lab/devices`, a line `NAME ADDRESS GROUP` each, and PEERGATE_LAB is set. Blocks.
///
/// # Errors
/// When the host did not run to its end; the message has its console. A program that fails is no error.
pub fn run_program(kit: &Kit, topology: &Topology, program: &Path, args: &[&str]) -> Result<Ended> {
    let mut machine = Machine::new(kit, topology)?;
    machine.root().program("/lib/program", program)?;
    let words: Vec<String> = args.iter().map(|word| quoted(word)).collect();
    let body = format!("/lib/program {} >&3 2>&3\ncode=$?\necho >&3\necho \"lab-exit $code\" >&3\n", words.join(" "));
    ended(machine.run(&body, PROGRAM_TIME)?)
}

fn ended(ran: Ran) -> Result<Ended> {
    let parts = ran.results.rsplit_once(EXIT);
    let parts = parts.and_then(|(output, status)| Some((output.to_owned(), status.trim().parse().ok()?)));
    let (output, status) = parts.with_context(|| {
        let console = ran.console.join("\n");
        format!("The program did not run to its end; it said:\n{}\nThe host's console:\n{console}", ran.results)
    })?;
    Ok(Ended { status, output, console: ran.console, wall: ran.wall })
}

/// A word for a shell, whatever is in it.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(results: &str) -> Result<Ended> {
        let devices = std::sync::Arc::new(tempfile::tempdir().unwrap());
        ended(Ran { results: results.to_owned(), console: vec!["panic".to_owned()], wall: Duration::ZERO, devices })
    }

    #[test]
    fn a_program_that_did_not_end_is_an_error_with_the_console() {
        let Ended { status, output, .. } = end("a\nlab-exit 1\nb\nlab-exit 7\n").unwrap();
        assert_eq!((status, output.as_str()), (7, "a\nlab-exit 1\nb"));
        for cut in ["", "a\n", "a\nlab-exit ", "a\nlab-exit x\n"] {
            let error = end(cut).unwrap_err().to_string();
            assert!(error.contains("panic"), "{error}");
        }
    }

    #[test]
    fn a_word_reaches_the_program_as_it_is() {
        let word = "a 'b' $c \\ \"d\"";
        let output = std::process::Command::new("sh").arg("-c").arg(format!("printf %s {}", quoted(word))).output();
        assert_eq!(String::from_utf8(output.unwrap().stdout).unwrap(), word);
    }
}
