//! Bodies of the fuzz targets: bytes in, a panic out if the device broke a promise. `tests/fuzz` feeds them from libFuzzer, and a test
//! replays the seeds without it.
//!
//! - [`requests`]: well-placed chains with any bytes and any field values;
//! - [`chains`]: one descriptor table of any bytes, and any heads;
//! - [`ring`]: any writes to rings and memory between kicks, polls, stops and starts;
//! - [`frames`]: a keeper between a VMM and workers that say anything and end at any moment. It has promises of its own.
//!
//! Promises that are checked of a device everywhere: no panic, no endless turn, used entries only for chains that were taken. [`requests`] also checks
//! that every chain is answered, and well, and that nothing is left after a HELLO.

use anyhow::{Context, Result};
use vdev_device::Gauge;
use vdev_wire::{
    Attach, CONTROL_QUEUE, Cancel, ControlReply, EVENT_QUEUE, Event, EventKind, FIRST_SUBMIT_QUEUE, Flush, Free, Hello,
    Map, MapSegment, Opcode, Peer, Status, StreamReset, SubmitHeader, Unmap, VERSION, WorkDescriptor,
};
use zerocopy::{FromBytes, IntoBytes};

pub use crate::frames::frames;
use crate::guest::request;
use crate::local::LocalGuest;
use crate::virtqueue::{Buffer, Negotiated, RawDescriptor};

/// Steps of one input.
const STEPS: usize = 64;
const SUBMIT: usize = FIRST_SUBMIT_QUEUE as usize;
const CONTROL: usize = CONTROL_QUEUE as usize;
const EVENTS: usize = EVENT_QUEUE as usize;

/// Reads an input; zeroes once it is used up.
pub(crate) struct Bytes<'a>(pub(crate) &'a [u8]);

impl<'a> Bytes<'a> {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub(crate) fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub(crate) fn long(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    pub(crate) fn take(&mut self, most: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::from(self.byte()) % from.len()]
    }

    fn domain(&mut self) -> u32 {
        self.pick(&[1, 1, 1, 2, 3, 0, 4, 5, u32::MAX])
    }

    fn endpoint(&mut self) -> u32 {
        self.pick(&[0, 0, 1, 1, 2, 0xffff, 0x1_0000, u32::MAX])
    }

    fn stream(&mut self) -> u32 {
        self.pick(&[0, 0, 1, 2, 3, 4, u32::MAX])
    }

    /// A page near the start of the space, or a register in such a page, or somewhere odd.
    fn iova(&mut self) -> u64 {
        let near = u64::from(self.byte() % 64) * 4096 + 4096;
        let offset = self.pick(&[0, 0, 0, 0x8, 0x10, 0x18, 0x20, 0x50, 0x58, 0x60]);
        if self.byte().is_multiple_of(16) { self.pick(&[0, !0xfff, u64::MAX, 1 << 47]) } else { near + offset }
    }

    /// Memory that holds no ring and no chain, so that no copy changes what the checks look at; or something odd.
    fn gpa(&mut self) -> u64 {
        let near = 0x18_0000 + u64::from(self.byte() % 64) * 4096;
        self.pick(&[near, near, near, 0, 0x9_f000, 0xa_0000, !0xfff, near | 1])
    }

    fn len(&mut self) -> u64 {
        let pages = (u64::from(self.byte()) % 8 + 1) * 4096;
        self.pick(&[pages, pages, pages, 4, 8, 0, pages + 1, 1 << 40, u64::MAX])
    }

    fn rights(&mut self) -> u32 {
        self.pick(&[3, 3, 1, 2, 0, 4, 8, 9, 11])
    }
}

/// Control requests and submissions.
///
/// # Panics
/// If the device breaks a promise.
pub fn requests(data: &[u8]) {
    run_requests(&mut Bytes(data)).expect("the harness works and the device keeps its promises");
}

fn run_requests(bytes: &mut Bytes<'_>) -> Result<()> {
    let rules = Negotiated { event_idx: bytes.byte() & 1 == 0, indirect: bytes.byte() & 1 == 0 };
    let mut guest = LocalGuest::new(64, rules)?;
    let scratch = guest.ram.alloc(64 << 10)?;
    let event_pages = guest.ram.alloc(4096)?;
    for slot in 0..8 {
        guest.queues[EVENTS].add(&[Buffer::writable(event_pages.gpa() + slot * 64, 64)])?;
    }
    guest.queues[EVENTS].publish()?;
    let hello = Hello { version: VERSION.into(), reserved0: 0.into(), reserved: 0.into(), features: 0.into() };
    let hello = request(Opcode::Hello, 0, 0, &hello);
    if !bytes.byte().is_multiple_of(8) {
        converse(&mut guest, scratch.gpa(), CONTROL, &hello, 64)?;
    }
    for _ in 0..STEPS {
        if bytes.is_empty() {
            break;
        }
        let (queue, readable, room) = match bytes.byte() % 4 {
            0 => (CONTROL, raw_bytes(bytes), usize::from(bytes.byte())),
            1 => (CONTROL, control_request(bytes), usize::from(bytes.byte()) * 8),
            2 => (SUBMIT, raw_bytes(bytes), usize::from(bytes.byte())),
            _ => submission(bytes),
        };
        converse(&mut guest, scratch.gpa(), queue, &readable, room)?;
        take_events(&mut guest, event_pages.gpa())?;
    }
    // Whatever the driver did, HELLO ends it all.
    converse(&mut guest, scratch.gpa(), CONTROL, &hello, 64)?;
    for gauge in Gauge::ALL {
        assert_eq!(guest.recorder.gauged(*gauge), 0, "{} after HELLO", gauge.name());
    }
    guest.device.shutdown();
    Ok(())
}

/// One chain, which must be answered.
fn converse(guest: &mut LocalGuest, at: u64, queue: usize, readable: &[u8], room: usize) -> Result<()> {
    guest.ram.write(at, readable)?;
    let answer = at + (32 << 10);
    guest.ram.write(answer, &vec![0xa5; room])?;
    let mut buffers = Vec::new();
    if !readable.is_empty() {
        buffers.push(Buffer::readable(at, readable.len().try_into()?));
    }
    if room > 0 {
        buffers.push(Buffer::writable(answer, room.try_into()?));
    }
    if buffers.is_empty() {
        return Ok(());
    }
    guest.queues[queue].add(&buffers)?;
    guest.queues[queue].publish()?;
    guest.settle();
    let used = guest.queues[queue].pop()?.context("Every chain is answered")?;
    let written = usize::try_from(used.len)?;
    assert!(written <= room, "{written} bytes were written into room for {room}");
    if queue == CONTROL && written >= size_of::<ControlReply>() {
        let mut reply = [0; size_of::<ControlReply>()];
        guest.ram.read(answer, &mut reply)?;
        let reply = ControlReply::read_from_bytes(&reply).ok().context("A reply has a size")?;
        assert!(Status::from_raw(reply.status.get()).is_some(), "unknown status {:#x}", reply.status.get());
        assert_eq!(reply.length.get() as usize, written - size_of::<ControlReply>());
    }
    Ok(())
}

fn take_events(guest: &mut LocalGuest, at: u64) -> Result<()> {
    while let Some(used) = guest.queues[EVENTS].pop()? {
        assert_eq!(used.len as usize, size_of::<Event>());
        // Buffers were posted in order, so the head is the slot.
        let at = at + u64::from(used.head % 8) * 64;
        guest.queues[EVENTS].add(&[Buffer::writable(at, 64)])?;
        let mut event = [0; size_of::<Event>()];
        guest.ram.read(at, &mut event)?;
        let event = Event::read_from_bytes(&event).ok().context("An event has a size")?;
        assert!(EventKind::from_raw(event.kind.get()).is_some(), "unknown event {}", event.kind.get());
    }
    guest.queues[EVENTS].publish()
}

fn raw_bytes(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let len = usize::from(bytes.byte());
    bytes.take(len).to_vec()
}

fn control_request(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let opcode = bytes.pick(&Opcode::ALL);
    let domain = if matches!(opcode, Opcode::Hello | Opcode::Probe) { 0 } else { bytes.domain() };
    let session = bytes.pick(&[1, 1, 1, 1, 1, 1, 1, 2]);
    let body = match opcode {
        Opcode::Probe => Vec::new(),
        Opcode::Attach | Opcode::Detach => {
            Attach { endpoint: bytes.endpoint().into(), flags: 0.into() }.as_bytes().to_vec()
        }
        Opcode::Map => map(bytes),
        Opcode::Unmap => {
            let start = bytes.iova();
            let last = start.wrapping_add(bytes.len()).wrapping_sub(1);
            Unmap { iova_start: start.into(), iova_last: last.into() }.as_bytes().to_vec()
        }
        Opcode::Flush => Flush { reserved: 0.into() }.as_bytes().to_vec(),
        Opcode::Alloc => alloc(bytes),
        Opcode::Free => {
            let handle = u64::from(bytes.byte() % 4) << 32 | u64::from(bytes.byte() % 20);
            Free { handle: handle.into() }.as_bytes().to_vec()
        }
        Opcode::PeerEnable | Opcode::PeerDisable | Opcode::PeerQuery => {
            let rights = if opcode == Opcode::PeerQuery { 0 } else { bytes.rights() };
            let [accessor, owner] = [bytes.endpoint(), bytes.endpoint()].map(Into::into);
            Peer { accessor, owner, rights: rights.into(), reserved: 0.into() }.as_bytes().to_vec()
        }
        Opcode::StreamReset => StreamReset { stream: bytes.stream().into(), reserved: 0.into() }.as_bytes().to_vec(),
        Opcode::Cancel => {
            let [stream, flags] = [bytes.stream(), bytes.pick(&[0, 1, 2])].map(Into::into);
            Cancel { stream, flags, cookie: u64::from(bytes.byte()).into() }.as_bytes().to_vec()
        }
        _ => Hello { version: VERSION.into(), reserved0: 0.into(), reserved: 0.into(), features: 0.into() }
            .as_bytes()
            .to_vec(),
    };
    request(opcode, domain, session, body.as_slice())
}

fn map(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let count = bytes.byte() % 20;
    let said = bytes.pick(&[u32::from(count), u32::from(count), u32::from(count), 0, u32::MAX]);
    let head = Map { iova: bytes.iova().into(), flags: bytes.rights().into(), segment_count: said.into() };
    let mut body = head.as_bytes().to_vec();
    for _ in 0..count {
        body.extend_from_slice(MapSegment { gpa: bytes.gpa().into(), len: bytes.len().into() }.as_bytes());
    }
    body
}

fn alloc(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let body = vdev_wire::Alloc {
        endpoint: bytes.endpoint().into(),
        flags: bytes.rights().into(),
        iova: bytes.iova().into(),
        len: bytes.len().into(),
    };
    body.as_bytes().to_vec()
}

/// A chain of a few descriptors, with room for as many records, or not.
fn submission(bytes: &mut Bytes<'_>) -> (usize, Vec<u8>, usize) {
    let count = bytes.byte() % 10;
    let said = bytes.pick(&[u16::from(count), u16::from(count), u16::from(count), 0, u16::MAX]);
    let header = SubmitHeader {
        version: bytes.pick(&[VERSION, VERSION, VERSION, 0]).into(),
        count: said.into(),
        domain: bytes.domain().into(),
        flags: 0.into(),
        session: bytes.pick(&[1, 1, 1, 2]).into(),
    };
    let mut readable = header.as_bytes().to_vec();
    for _ in 0..count {
        let opcode = bytes.pick(&[1, 1, 1, 4, 8, 0, 9]);
        let work = WorkDescriptor {
            opcode: opcode.into(),
            ext: bytes.pick(&[0, 0, 0, 1]),
            reserved0: 0,
            flags: bytes.pick(&[0, 0, 1, 2]).into(),
            stream: bytes.stream().into(),
            initiator: bytes.pick(&[0xffff, 0, 1, 2, u32::MAX]).into(),
            cookie: u64::from(bytes.byte()).into(),
            source: if opcode == 1 { bytes.iova() } else { 0 }.into(),
            destination: if opcode == 8 { 0 } else { bytes.iova() }.into(),
            length: if opcode == 8 { 0 } else { bytes.len() }.into(),
            timeout_ms: bytes.pick(&[0, 0, 1, u32::MAX]).into(),
            reserved1: 0.into(),
            operand: if opcode == 1 { 0 } else { operand(bytes) }.into(),
        };
        readable.extend_from_slice(work.as_bytes());
    }
    (SUBMIT, readable, usize::from(count) * bytes.pick(&[32, 32, 32, 31, 0]))
}

/// A scope, a pattern, or what a register wants: a number, an address, a length.
fn operand(bytes: &mut Bytes<'_>) -> u64 {
    let address = bytes.iova();
    bytes.pick(&[1, 2, 3, 0, address, address, 64, 4096, 0x0123_4567_89ab_cdef])
}

/// One descriptor table, and heads into it.
///
/// # Panics
/// If the device breaks a promise.
pub fn chains(data: &[u8]) {
    run_chains(&mut Bytes(data)).expect("the harness works");
}

fn run_chains(bytes: &mut Bytes<'_>) -> Result<()> {
    let guest = LocalGuest::new(32, Negotiated { event_idx: true, indirect: true })?;
    let queue = usize::from(bytes.byte()) % guest.queues.len();
    let heads = bytes.byte() % 40;
    let place = guest.queues[queue].addresses()[0];
    for slot in 0..u16::from(heads) {
        guest.queues[queue].raw_avail(slot, bytes.short() % 48)?;
    }
    // What is left is the table, and after its end the rings, tables and whatever else is there.
    let table = bytes.take(32 * 16);
    guest.ram.write(place, table)?;
    let scratch = guest.ram.alloc(64 << 10)?;
    guest.ram.write(scratch.gpa(), bytes.0.get(..64 << 10).unwrap_or(bytes.0))?;
    guest.queues[queue].raw_avail_index(heads.into())?;
    guest.settle();
    let used = guest.queues[queue].raw_used_index()?;
    assert!(used <= heads.into(), "{used} chains were used of {heads}");
    guest.device.shutdown();
    Ok(())
}

/// Any driver at all.
///
/// # Panics
/// If the device breaks a promise.
pub fn ring(data: &[u8]) {
    run_ring(&mut Bytes(data)).expect("the harness works");
}

fn run_ring(bytes: &mut Bytes<'_>) -> Result<()> {
    let rules = Negotiated { event_idx: bytes.byte() & 1 == 0, indirect: true };
    let mut guest = LocalGuest::new(16, rules)?;
    let scratch = guest.ram.alloc(16 << 10)?;
    let places = [
        scratch.gpa(),
        scratch.gpa() + 256,
        guest.queues[0].addresses()[0],
        guest.queues[2].addresses()[2],
        guest.ram.end() - 8,
        0,
        0xa_0000 - 4,
        u64::MAX - 8,
    ];
    for _ in 0..STEPS * 4 {
        if bytes.is_empty() {
            break;
        }
        let queue = u16::from(bytes.byte()) % guest.device.num_queues();
        let at = usize::from(queue);
        match bytes.byte() % 8 {
            0 | 1 => {
                let descriptor = RawDescriptor {
                    addr: bytes.pick(&places),
                    len: bytes.pick(&[16, 32, 64, 96, 80, 0, 1, u32::MAX]),
                    flags: bytes.pick(&[0, 1, 2, 3, 4, 5, 6, 7]),
                    next: bytes.short() % 20,
                };
                guest.queues[at].raw_descriptor(bytes.short() % 16, descriptor)?;
            }
            2 => guest.queues[at].raw_avail(bytes.short(), bytes.short() % 20)?,
            3 => guest.queues[at].raw_avail_index(bytes.short())?,
            4 => {
                let address = bytes.pick(&places);
                let len = usize::from(bytes.byte() % 128);
                // Places at the end of memory, or outside it, take fewer bytes or none.
                let _ = guest.ram.write(address, bytes.take(len));
            }
            5 => {
                guest.device.stop_queue(queue);
                guest.start(queue, bytes.short())?;
            }
            6 => {
                let header = request(Opcode::Hello, 0, 0, &bytes.long().to_le_bytes());
                guest.ram.write(scratch.gpa(), &header)?;
            }
            _ => guest.settle(),
        }
    }
    guest.settle();
    guest.device.shutdown();
    Ok(())
}
