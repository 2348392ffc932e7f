//! Refusals of a real guest, as it is told of them and as the operator is.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::bed::{ABUSED, BESIDE, Bed, next_completion};
use harness::{DriverOptions, InProcessDriver};
use peergate_guest::uapi::{self, Alloc, Event, Stream, Work};
use peergate_guest::{Channel, Driver, Error, Status};
use serde_json::Value;
use vdev_wire::OWNER_HIDDEN;
use vmm_control::{FaultInfo, MappingInfo};

const PATIENCE: Duration = Duration::from_secs(20);
const GPU: u32 = 0;
const FPGA: u32 = 1;

fn connect(bed: &Bed) -> Result<InProcessDriver> {
    InProcessDriver::connect(&bed.daemon.socket(ABUSED), DriverOptions { ram: 16 << 20, ..DriverOptions::default() })
}

/// A write of 8 bytes that `initiator` is to make.
fn fill(destination: u64, initiator: u32, stream: u32) -> Work {
    Work { opcode: uapi::WORK_FILL, initiator, destination, length: 8, stream, cookie: 0x77, ..Work::default() }
}

/// What the guest and the operator are told of the newest refusal.
fn both(bed: &Bed, channel: &dyn Channel) -> Result<(Event, FaultInfo)> {
    let event = channel.event(Instant::now() + PATIENCE)?.context("A refusal is an event")?;
    Ok((event, bed.daemon.faults(ABUSED)?.pop().context("The operator sees it")?))
}

fn refused(bed: &Bed, channel: &dyn Channel, work: Work) -> Result<(Event, FaultInfo)> {
    channel.submit(0, &[work])?;
    next_completion(channel)?;
    channel.stream(Stream { op: uapi::STREAM_RESET, stream: work.stream, ..Stream::default() })?;
    both(bed, channel)
}

fn owner(fault: &FaultInfo) -> Option<&str> {
    fault.owner.as_ref()?.name.as_deref()
}

#[test]
fn operator_sees_both_sides_and_the_mapping_and_the_guest_what_is_its_own() -> Result<()> {
    let bed = Bed::new()?;
    let driver = connect(&bed)?;
    let (channel, other) = (driver.open()?, driver.open()?);
    let memory = channel.map(4096, uapi::READ)?;
    let flags = uapi::READ | uapi::WRITE;
    let buffer = channel.alloc(Alloc { endpoint: FPGA, flags, length: 8192, ..Alloc::default() })?;
    let mapping = |relation: &str, kind: &str, first, len: u64, access: &str, request| {
        let (relation, kind, access) = (relation.to_owned(), kind.to_owned(), access.to_owned());
        Some(MappingInfo { relation, kind, first, last: first + len - 1, access, request, draining: false })
    };

    let (event, seen) = refused(&bed, &*channel, fill(buffer.iova + 64, GPU, 1))?;
    assert_eq!((event.accessor, event.owner, event.address), (GPU, FPGA, buffer.iova + 64));
    assert_eq!((owner(&seen), seen.reason.as_str(), seen.status.as_str()), (Some("fpga0"), "PEER", "DENIED"));
    assert_eq!(seen.mapping, mapping("holds", "buffer", buffer.iova, buffer.length, "read-write", 2));

    let (_, seen) = refused(&bed, &*channel, fill(memory.iova(), GPU, 1))?;
    assert_eq!((owner(&seen), seen.reason.as_str(), seen.stream, seen.cookie), (None, "PERMISSION", 1, 0x77));
    assert_eq!(seen.mapping, mapping("holds", "map", memory.iova(), 4096, "read", 1));

    // Another program of the same guest, that has guessed the handle.
    let error = other.free(buffer.handle);
    assert!(matches!(error, Err(Error::Refused { status: Status::NoEnt, .. })), "{error:?}");
    let (event, seen) = both(&bed, &*other)?;
    assert_eq!((event.owner, event.value), (OWNER_HIDDEN, buffer.handle), "not the guest's program's to know");
    assert_eq!((owner(&seen), seen.value, seen.reason.as_str()), (Some("fpga0"), buffer.handle, "DOMAIN"));

    channel.free(buffer.handle)?;
    let (event, seen) = refused(&bed, &*channel, fill(buffer.iova, FPGA, 1))?;
    assert_eq!((event.owner, owner(&seen), seen.reason.as_str()), (OWNER_HIDDEN, None, "MAPPING"));
    assert_eq!(seen.mapping, mapping("held", "buffer", buffer.iova, buffer.length, "read-write", 2));
    let text = String::from_utf8(bed.daemon.peergate(&["faults", "--tenant", ABUSED])?.stdout)?;
    let detail = format!(
        "\n    nothing is mapped there any more; it was buffer {:#x}-{:#x}, read-write, made by request 2\n",
        buffer.iova,
        buffer.iova + buffer.length - 1
    );
    assert!(text.contains(&detail), "{text}");
    drop((memory, channel, other, driver));
    bed.finish()?;
    Ok(())
}

/// A `peergate faults --follow` of the abused tenant, ended with the test.
struct Follow {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Follow {
    fn start(bed: &Bed) -> Result<Self> {
        let args = ["faults", "--follow", "--last", "1", "--tenant", ABUSED, "--json"];
        let mut child = bed.daemon.peergate_command(&args).stdout(Stdio::piped()).spawn()?;
        let lines = BufReader::new(child.stdout.take().context("Its output is a pipe")?).lines();
        Ok(Self { child, lines })
    }

    fn next(&mut self) -> Result<Value> {
        Ok(serde_json::from_str(&self.lines.next().context("It goes on")??)?)
    }
}

impl Drop for Follow {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn guest_that_faults_without_end_is_followed_without_loss_and_holds_up_nobody() -> Result<()> {
    const STREAMS: u32 = 32;
    const ROUNDS: u32 = 30;
    let bed = Bed::new()?;
    let driver = connect(&bed)?;
    let channel = driver.open()?;
    refused(&bed, &*channel, fill(0x5000, GPU, 0))?;
    let mut follow = Follow::start(&bed)?;
    assert_eq!(follow.next()?["number"], 1, "the one of before");
    for _ in 0..ROUNDS {
        let work: Vec<_> = (0..STREAMS).map(|stream| fill(0x5000, GPU, stream)).collect();
        ensure!(channel.submit(0, &work)? == work.len(), "The device takes a batch at once");
        for _ in 0..STREAMS {
            next_completion(&*channel)?;
        }
        for stream in 0..STREAMS {
            channel.stream(Stream { op: uapi::STREAM_RESET, stream, ..Stream::default() })?;
        }
    }
    bed.serves(BESIDE)?;
    let (mut told, mut number) = (0, 1);
    while told < u64::from(STREAMS * ROUNDS) {
        let line = follow.next()?;
        match line["event"].as_str() {
            Some("fault") => {
                number += 1;
                assert_eq!(line["number"], number, "each once, in order");
                told += 1;
            }
            Some("suppressed") => told += line["count"].as_u64().unwrap_or(0),
            _ => anyhow::bail!("Nothing else happens: {line}"),
        }
    }
    assert_eq!(told, u64::from(STREAMS * ROUNDS));
    let status = bed.daemon.tenant(ABUSED)?;
    assert_eq!((status.faults, status.counters["faults"]), (told + 1, told + 1));
    drop((channel, driver));
    drop(follow);
    bed.finish()?;
    Ok(())
}
