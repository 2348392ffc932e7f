//! `pgctl copy` and `pgctl fill`: move bytes, look at them, say how fast.
//!
//! Not here: how long copies are cut up (the library does that).

use std::io::{self, Read, Write};
use std::path::Path;
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use peergate_guest::{
    Access, Buffer, Driver, EndpointInfo, Moved, Session, Stream, TransferPath, copy_all, download, fill_all, upload,
};
use serde_json::json;

use super::files::{Output, open_input};
use crate::Meters;
use crate::args::{CopyArgs, FillArgs, PeerPath};
use crate::console::{Console, moved_json, moved_text, with};
use crate::pattern::{Compare, Pattern, Tee};

/// One direction of a copy.
struct Way {
    from: EndpointInfo,
    to: EndpointInfo,
    source: Buffer,
    destination: Buffer,
    /// By whose engine the bytes move.
    stream: Stream,
}

impl Way {
    fn new(session: &Session, from: &EndpointInfo, to: &EndpointInfo, by: &EndpointInfo, len: u64) -> Result<Self> {
        let at = |endpoint: &EndpointInfo| {
            let buffer = session.alloc(endpoint.number, len, Access::RW);
            buffer.with_context(|| format!("Could not allocate {len} bytes of {}", endpoint.name))
        };
        for (owner, access, what) in [(from, Access::READ, "read from"), (to, Access::WRITE, "write to")] {
            if owner.number != by.number {
                let right = session.peer_enable(by.number, owner.number, access);
                right.with_context(|| format!("Could not let {} {what} {}", by.name, owner.name))?;
            }
        }
        let (source, destination) = (at(from)?, at(to)?);
        let stream = session.stream().by(by.number);
        Ok(Self { from: from.clone(), to: to.clone(), source, destination, stream })
    }

    fn label(&self) -> String {
        format!("{} to {}", self.from.name, self.to.name)
    }

    fn copy(&self, len: u64, meters: Meters) -> Result<Moved> {
        let mut meter = meters.start(self.label(), len);
        let moved =
            copy_all(&self.stream, self.destination.iova(), self.source.iova(), len, &mut |done| meter.at(done));
        moved.with_context(|| format!("Copying from {} failed", self.label()))
    }

    /// Fails unless every piece went as `wanted`.
    fn insist(&self, wanted: Option<PeerPath>, moved: &Moved) -> Result<()> {
        let Some(wanted) = wanted.map(TransferPath::from) else { return Ok(()) };
        let mut ways = moved.other.into_iter().chain([(moved.path, moved.reason)]);
        if let Some((path, reason)) = ways.find(|(path, _)| *path != wanted) {
            let (label, path, reason, wanted) = (self.label(), path.name(), reason.name(), wanted.name());
            bail!("{label}: bytes took the path {path} ({reason}) where {wanted} was asked for");
        }
        Ok(())
    }
}

/// Where the bytes of a copy come from.
enum Bytes<'a> {
    File(&'a Path),
    Pattern(u64),
}

impl Bytes<'_> {
    fn open(&self) -> Result<Box<dyn Read>> {
        Ok(match self {
            Self::File(path) => Box::new(open_input(path)?.0),
            Self::Pattern(seed) => Box::new(Pattern::new(*seed)),
        })
    }
}

/// Copies between two endpoints.
pub(crate) fn copy(driver: &dyn Driver, args: &CopyArgs, console: &mut Console<'_>) -> Result<bool> {
    let file = args.file.as_deref();
    let file_len = file.map(open_input).transpose()?.map(|(_, len)| len);
    let len = args.size.or(file_len).unwrap_or(0);
    ensure!(len > 0, "There are no bytes to copy");
    ensure!(file_len.is_none_or(|file| file >= len), "The file has fewer than {len} bytes; leave --size out");
    let mut out = args.out.as_deref().map(|out| Output::new(out, file)).transpose()?;
    let session = Session::open(driver)?;
    let (from, to) = (session.endpoint(&args.from)?, session.endpoint(&args.to)?);
    let by = args.by.as_deref().map(|by| session.endpoint(by)).transpose()?;
    ensure!(!args.both || from.number != to.number, "--both needs two endpoints");

    let meters = console.meters();
    let there_bytes = file.map_or(Bytes::Pattern(1), Bytes::File);
    let mut ways = vec![(Way::new(&session, &from, &to, by.as_ref().unwrap_or(&from), len)?, there_bytes)];
    if args.both {
        ways.push((Way::new(&session, &to, &from, by.as_ref().unwrap_or(&to), len)?, Bytes::Pattern(2)));
    }
    for (way, bytes) in &ways {
        let mut meter = meters.start(format!("Loading {}", way.from.name), len);
        upload(&session.stream(), way.source.iova(), &mut *bytes.open()?, len, &mut |done| meter.at(done))?;
    }
    for _ in 0..args.repeat {
        for ((way, _), moved) in ways.iter().zip(at_once(&ways, len, meters)) {
            let moved = moved?;
            let text = format!("{}: {}", way.label(), moved_text(&moved));
            console.say(&text, &with(json!({"from": way.from.name, "to": way.to.name}), moved_json(&moved)))?;
            way.insist(args.path, &moved)?;
        }
    }
    let mut well = true;
    for (way, bytes) in &ways {
        // The first way is the one that was asked for.
        let out = out.take();
        if args.verify || out.is_some() {
            let expected = args.verify.then(|| bytes.open()).transpose()?;
            well &= read_back(&session.stream(), &way.destination, &way.to.name, len, expected, out, console)?;
        }
    }
    Ok(well)
}

/// Copies every way at the same time.
fn at_once(ways: &[(Way, Bytes<'_>)], len: u64, meters: Meters) -> Vec<Result<Moved>> {
    // Two lines that rewrite themselves would write over each other: the first way speaks for all.
    let meters_of = |i: usize| if i == 0 { meters } else { Meters::Quiet };
    thread::scope(|scope| {
        let running: Vec<_> =
            ways.iter().enumerate().map(|(i, (way, _))| scope.spawn(move || way.copy(len, meters_of(i)))).collect();
        let ended =
            running.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ended.collect()
    })
}

/// Reads a buffer back into `out` and compares it with `expected`; answers whether it is as it should be.
fn read_back(
    stream: &Stream,
    buffer: &Buffer,
    name: &str,
    len: u64,
    expected: Option<Box<dyn Read>>,
    mut out: Option<Output>,
    console: &mut Console<'_>,
) -> Result<bool> {
    let mut meter = console.meters().start(format!("Reading {name} back"), len);
    let verified = expected.is_some();
    let mut compare = expected.map(Compare::new);
    let mut sink: Box<dyn Write> = match (out.as_mut(), compare.as_mut()) {
        (Some(file), Some(compare)) => Box::new(Tee(file, compare)),
        (Some(file), None) => Box::new(file),
        (None, Some(compare)) => Box::new(compare),
        (None, None) => Box::new(io::sink()),
    };
    download(stream, buffer.iova(), &mut *sink, len, &mut |done| meter.at(done))?;
    drop(sink);
    drop(meter);
    out.map_or(Ok(()), Output::finish)?;
    let wrong = compare.and_then(|compare| compare.first_difference());
    if verified {
        let text = match wrong {
            Some(offset) => format!("{name} is WRONG: byte {offset} is not what was sent"),
            None => format!("{name}: {len} bytes, all as sent"),
        };
        console
            .say(&text, &json!({"on": name, "bytes": len, "verified": wrong.is_none(), "first_difference": wrong}))?;
    }
    Ok(wrong.is_none())
}

/// Fills an endpoint's memory.
pub(crate) fn fill(driver: &dyn Driver, args: &FillArgs, console: &mut Console<'_>) -> Result<bool> {
    let session = Session::open(driver)?;
    let on = session.endpoint(&args.on)?;
    let buffer = session.alloc(on.number, args.size, Access::RW);
    let buffer = buffer.with_context(|| format!("Could not allocate {} bytes of {}", args.size, on.name))?;
    let stream = session.stream().by(on.number);
    for _ in 0..args.repeat {
        let mut meter = console.meters().start(format!("Filling {}", on.name), args.size);
        let moved = fill_all(&stream, buffer.iova(), args.pattern, args.size, &mut |done| meter.at(done))?;
        drop(meter);
        let text = format!("{}: {}", on.name, moved_text(&moved));
        console.say(&text, &with(json!({"on": on.name}), moved_json(&moved)))?;
    }
    if !args.verify {
        return Ok(true);
    }
    let expected = Box::new(Repeat { pattern: args.pattern.to_le_bytes(), at: 0 });
    read_back(&stream, &buffer, &on.name, args.size, Some(expected), None, console)
}

/// The bytes that a fill leaves.
struct Repeat {
    pattern: [u8; 8],
    at: usize,
}

impl Read for Repeat {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        for byte in into.iter_mut() {
            *byte = self.pattern[self.at % 8];
            self.at = (self.at + 1) % 8;
        }
        Ok(into.len())
    }
}
