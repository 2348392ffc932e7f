//! Long transfers: cut into pieces so that progress can be told and no piece meets its deadline, several pieces in flight at a time.
//!
//! Not here: a deadline for the whole; each piece has the device's.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::time::Instant;

use iommu_addr::Access;
use peergate_uapi::Work;
use vdev_wire::{PathReason, TransferPath};

use crate::{Error, HostBuffer, Moved, Outcome, Stream, Ticket};

/// Bytes of one piece of a long copy.
const PIECE: u64 = 4 << 20;
/// Bytes of one piece that goes through host memory; two of those are pinned at a time.
const STAGE: u64 = 1 << 20;
/// Most pieces in flight, if the device gives as many credits.
const WINDOW: usize = 8;

/// Called with the bytes done so far, after every piece.
pub type Progress<'a> = &'a mut dyn FnMut(u64);

/// Copies `len` bytes from `source` to `destination`, however many. Blocks until all are there. The stream must be free of other work.
///
/// # Errors
/// The first piece's error, once every piece has ended. The stream stays in error then: [`Stream::reset`] it.
pub fn copy_all(
    stream: &Stream,
    destination: u64,
    source: u64,
    len: u64,
    progress: Progress<'_>,
) -> Result<Moved, Error> {
    in_pieces(stream, len, progress, |at, piece| stream.copy_work(offset(destination, at), offset(source, at), piece))
}

/// Fills `len` bytes at `destination` with an 8-byte pattern, however many; else as [`copy_all`].
///
/// # Errors
/// As [`copy_all`].
pub fn fill_all(
    stream: &Stream,
    destination: u64,
    pattern: u64,
    len: u64,
    progress: Progress<'_>,
) -> Result<Moved, Error> {
    in_pieces(stream, len, progress, |at, piece| stream.fill_work(offset(destination, at), pattern, piece))
}

/// An address past the end of the space is the device's to refuse: it refuses the piece that would pass it.
fn offset(address: u64, by: u64) -> u64 {
    address.saturating_add(by)
}

fn in_pieces(
    stream: &Stream,
    len: u64,
    progress: Progress<'_>,
    work: impl Fn(u64, u64) -> Work,
) -> Result<Moved, Error> {
    let started = Instant::now();
    let credits = usize::try_from(stream.session().limits().stream_credits).unwrap_or(WINDOW);
    let mut flight = Flight::new(credits.clamp(1, WINDOW));
    let mut at = 0;
    while at < len {
        let piece = PIECE.min(len - at);
        while flight.is_full() {
            progress(flight.land()?);
        }
        flight.launch(stream.session().submit(work(at, piece)))?;
        at += piece;
    }
    while !flight.is_empty() {
        progress(flight.land()?);
    }
    Ok(flight.moved(started))
}

/// Pieces in flight, oldest first.
struct Flight {
    tickets: VecDeque<Ticket>,
    window: usize,
    done: u64,
    /// How the last one went, and how one went that went another way.
    last: Option<(TransferPath, PathReason)>,
    other: Option<(TransferPath, PathReason)>,
}

impl Flight {
    fn new(window: usize) -> Self {
        Self { tickets: VecDeque::new(), window, done: 0, last: None, other: None }
    }

    fn is_full(&self) -> bool {
        self.tickets.len() >= self.window
    }

    fn is_empty(&self) -> bool {
        self.tickets.is_empty()
    }

    fn launch(&mut self, ticket: Result<Ticket, Error>) -> Result<(), Error> {
        match ticket {
            Ok(ticket) => self.tickets.push_back(ticket),
            Err(error) => return Err(self.settle(error)),
        }
        Ok(())
    }

    /// Waits for the oldest and answers the bytes done so far.
    fn land(&mut self) -> Result<u64, Error> {
        let Some(ticket) = self.tickets.pop_front() else { return Ok(self.done) };
        match ticket.wait() {
            Ok(Outcome { bytes, path, reason, .. }) => {
                self.done = self.done.saturating_add(bytes);
                let before = self.last.replace((path, reason));
                self.other = before.filter(|before| *before != (path, reason)).or(self.other);
                Ok(self.done)
            }
            Err(error) => Err(self.settle(error)),
        }
    }

    /// Waits for everything that still runs, for the caller may free the memory next.
    fn settle(&mut self, error: Error) -> Error {
        for ticket in self.tickets.drain(..) {
            // Cancelled behind the first error, which is the one to report.
            let _ = ticket.wait();
        }
        error
    }

    fn moved(&self, started: Instant) -> Moved {
        let (path, reason) = self.last.unwrap_or((TransferPath::None, PathReason::None));
        Moved { bytes: self.done, elapsed: started.elapsed(), path, reason, other: self.other }
    }
}

/// Reads `len` bytes from `from` to address `destination` through host memory. Blocks until all are there.
///
/// # Errors
/// [`Error::System`] if `from` fails or ends early, else as [`copy_all`].
pub fn upload(
    stream: &Stream,
    destination: u64,
    from: &mut dyn Read,
    len: u64,
    progress: Progress<'_>,
) -> Result<Moved, Error> {
    let started = Instant::now();
    let stages = stages(stream, len, Access::READ)?;
    let mut bytes = vec![0; usize::try_from(STAGE).unwrap_or(usize::MAX)];
    let mut flight = Flight::new(stages.len());
    let mut at = 0;
    for stage in stages.iter().cycle() {
        if at >= len {
            break;
        }
        // The copy out of this stage, submitted a round ago, has ended before its bytes change.
        while flight.is_full() {
            progress(flight.land()?);
        }
        let piece = piece_of(&mut bytes, len - at);
        let read =
            from.read_exact(piece).map_err(|source| Error::System { call: "Reading the bytes to upload", source });
        read.and_then(|()| stage.write_at(0, piece)).map_err(|error| flight.settle(error))?;
        flight.launch(stream.copy(offset(destination, at), stage.iova(), piece.len() as u64))?;
        at += piece.len() as u64;
    }
    while !flight.is_empty() {
        progress(flight.land()?);
    }
    Ok(flight.moved(started))
}

/// Writes `len` bytes from address `source` on to `to`, through host memory. Blocks until all are written.
///
/// # Errors
/// [`Error::System`] if `to` fails, else as [`copy_all`].
pub fn download(
    stream: &Stream,
    source: u64,
    to: &mut dyn Write,
    len: u64,
    progress: Progress<'_>,
) -> Result<Moved, Error> {
    let started = Instant::now();
    let stages = stages(stream, len, Access::WRITE)?;
    let mut bytes = vec![0; usize::try_from(STAGE).unwrap_or(usize::MAX)];
    let mut flight = Flight::new(stages.len());
    let (mut asked, mut written) = (0, 0);
    let mut next = stages.iter().cycle();
    let mut filled = stages.iter().cycle();
    while written < len {
        while asked < len && !flight.is_full() {
            let Some(stage) = next.next() else { break };
            let piece = STAGE.min(len - asked);
            flight.launch(stream.copy(stage.iova(), offset(source, asked), piece))?;
            asked += piece;
        }
        flight.land()?;
        let Some(stage) = filled.next() else { break };
        let piece = piece_of(&mut bytes, len - written);
        let stored = stage.read_at(0, piece).and_then(|()| {
            to.write_all(piece).map_err(|source| Error::System { call: "Writing the downloaded bytes", source })
        });
        stored.map_err(|error| flight.settle(error))?;
        written += piece.len() as u64;
        progress(written);
    }
    Ok(flight.moved(started))
}

/// Host memory for the pieces, two of them if one does not hold everything.
fn stages(stream: &Stream, len: u64, access: Access) -> Result<Vec<HostBuffer>, Error> {
    let count = if len > STAGE { 2 } else { 1 };
    (0..count).map(|_| stream.session().map(STAGE.min(len.max(1)), access)).collect()
}

fn piece_of(bytes: &mut [u8], left: u64) -> &mut [u8] {
    let len = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
    &mut bytes[..len]
}
