//! Control requests: bytes to [`Request`], purely.
//!
//! Everything that can be told from the bytes alone is told here: chain shape, byte counts, reserved bits, flags. What depends on the
//! device's state (session, domains, limits) is the handlers' business.

use iommu_addr::{Access, DomainId, EndpointId, Iova, Range, StreamId};
use vdev_wire::{
    ALLOC_REGISTERS, ALLOC_WINDOWABLE, Alloc, AllocReply, Attach, Cancel, CancelReply, ControlHeader, ControlReply,
    ENDPOINT_ALL, Flush, Free, Hello, HelloReply, MAP_READ, MAP_WRITE, Map, MapSegment, Opcode, PEER_READ, PEER_WRITE,
    Peer, PeerReply, ProbeReply, StreamReset, Unmap,
};
use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::RequestError;

/// A control request whose bytes are in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control<'a> {
    /// Domain it acts on; 0 for HELLO and PROBE.
    pub domain: DomainId,
    /// Session that the driver believes in.
    pub session: u32,
    /// What is asked for.
    pub request: Request<'a>,
}

/// What a control request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Begin anew.
    Hello {
        /// Version the driver will speak.
        version: u16,
        /// Features it will use.
        features: u64,
    },
    /// Tell limits and endpoints.
    Probe,
    /// Give an endpoint the domain.
    Attach {
        /// Which.
        endpoint: EndpointId,
    },
    /// Take it away.
    Detach {
        /// Which; `None` is every one.
        endpoint: Option<EndpointId>,
    },
    /// Map guest memory.
    Map {
        /// Where.
        iova: Iova,
        /// Who may do what.
        access: Access,
        /// How many segments the request has.
        count: u32,
        /// The segments; empty if the request was too long to be read.
        segments: &'a [MapSegment],
    },
    /// Unmap whole mappings.
    Unmap {
        /// Where.
        range: Range<Iova>,
    },
    /// Wait for earlier unmaps.
    Flush,
    /// Allocate endpoint memory.
    Alloc {
        /// Whose.
        endpoint: EndpointId,
        /// Who may do what.
        access: Access,
        /// The register page in place of memory.
        registers: bool,
        /// Where to map it.
        iova: Iova,
        /// How much.
        len: u64,
    },
    /// Free a buffer.
    Free {
        /// Which.
        handle: u64,
    },
    /// Change or ask for a peer right.
    Peer {
        /// What to do.
        change: PeerChange,
        /// Who reaches out.
        accessor: EndpointId,
        /// Whose memory.
        owner: EndpointId,
        /// Rights concerned.
        rights: Access,
    },
    /// Clear a stream's error.
    StreamReset {
        /// Which.
        stream: StreamId,
    },
    /// Cancel queued work.
    Cancel {
        /// In which stream.
        stream: StreamId,
        /// Which descriptor; `None` is every one.
        cookie: Option<u64>,
    },
}

/// What happens to a peer right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerChange {
    /// Granted.
    Enable,
    /// Withdrawn.
    Disable,
    /// Nothing.
    Query,
}

/// Parses a whole request. `readable` is what the driver wrote, `writable_len` the room for the answer in bytes.
///
/// # Errors
/// INVAL and UNSUPP ones only.
pub fn parse_control(readable: &[u8], writable_len: usize) -> Result<Control<'_>, RequestError> {
    parse(readable, readable.len(), writable_len)
}

/// As [`parse_control`], of a request of `len` bytes of which only the front was read because it is longer than any valid one.
pub(crate) fn parse(front: &[u8], len: usize, writable_len: usize) -> Result<Control<'_>, RequestError> {
    let (header, body) =
        ControlHeader::ref_from_prefix(front).ok().ok_or(malformed("it is shorter than its header"))?;
    zero("flags", u64::from(header.flags.get()))?;
    zero("reserved", u64::from(header.reserved.get()))?;
    let raw = header.opcode.get();
    let opcode = Opcode::from_raw(raw).ok_or(RequestError::Unknown { what: "opcode", value: u64::from(raw) })?;
    let reply = size_of::<ControlReply>().saturating_add(reply_body(opcode));
    if writable_len < reply {
        return Err(malformed("it has no room for its answer"));
    }
    let body_len = len.saturating_sub(size_of::<ControlHeader>());
    let request = parse_body(opcode, body, body_len)?;
    if matches!(opcode, Opcode::Hello | Opcode::Probe) {
        zero("domain", u64::from(header.domain.get()))?;
    }
    Ok(Control { domain: DomainId(header.domain.get()), session: header.session.get(), request })
}

/// Least bytes of the answer's body.
fn reply_body(opcode: Opcode) -> usize {
    match opcode {
        Opcode::Hello => size_of::<HelloReply>(),
        Opcode::Probe => size_of::<ProbeReply>(),
        Opcode::Alloc => size_of::<AllocReply>(),
        Opcode::PeerEnable | Opcode::PeerDisable | Opcode::PeerQuery => size_of::<PeerReply>(),
        Opcode::Cancel => size_of::<CancelReply>(),
        _ => 0,
    }
}

fn parse_body(opcode: Opcode, body: &[u8], len: usize) -> Result<Request<'_>, RequestError> {
    match opcode {
        Opcode::Hello => hello(exact(body, len)?),
        Opcode::Probe if len == 0 => Ok(Request::Probe),
        Opcode::Probe => Err(malformed("PROBE has no body")),
        Opcode::Attach => attach(exact(body, len)?),
        Opcode::Detach => detach(exact(body, len)?),
        Opcode::Map => map(body, len),
        Opcode::Unmap => unmap(exact(body, len)?),
        Opcode::Flush => {
            zero("reserved", exact::<Flush>(body, len)?.reserved.get())?;
            Ok(Request::Flush)
        }
        Opcode::Alloc => alloc(exact(body, len)?),
        Opcode::Free => Ok(Request::Free { handle: exact::<Free>(body, len)?.handle.get() }),
        Opcode::PeerEnable => peer(exact(body, len)?, PeerChange::Enable),
        Opcode::PeerDisable => peer(exact(body, len)?, PeerChange::Disable),
        Opcode::PeerQuery => peer(exact(body, len)?, PeerChange::Query),
        Opcode::StreamReset => {
            let reset = exact::<StreamReset>(body, len)?;
            zero("reserved", u64::from(reset.reserved.get()))?;
            Ok(Request::StreamReset { stream: StreamId(reset.stream.get()) })
        }
        Opcode::Cancel => cancel(exact(body, len)?),
        _ => Err(RequestError::Unknown { what: "opcode", value: u64::from(opcode as u16) }),
    }
}

fn hello(body: &Hello) -> Result<Request<'static>, RequestError> {
    zero("reserved0", u64::from(body.reserved0.get()))?;
    zero("reserved", u64::from(body.reserved.get()))?;
    Ok(Request::Hello { version: body.version.get(), features: body.features.get() })
}

fn attach(body: &Attach) -> Result<Request<'static>, RequestError> {
    zero("flags", u64::from(body.flags.get()))?;
    let raw = body.endpoint.get();
    if raw == ENDPOINT_ALL {
        return Err(field("endpoint", u64::from(raw)));
    }
    Ok(Request::Attach { endpoint: EndpointId::from_raw(raw) })
}

fn detach(body: &Attach) -> Result<Request<'static>, RequestError> {
    zero("flags", u64::from(body.flags.get()))?;
    let raw = body.endpoint.get();
    Ok(Request::Detach { endpoint: (raw != ENDPOINT_ALL).then(|| EndpointId::from_raw(raw)) })
}

fn map(body: &[u8], len: usize) -> Result<Request<'_>, RequestError> {
    let (map, rest) = Map::ref_from_prefix(body).ok().ok_or(malformed("MAP is shorter than its body"))?;
    let count = map.segment_count.get();
    let want = usize::try_from(count).ok().and_then(|count| count.checked_mul(size_of::<MapSegment>()));
    if count == 0 || want.is_none() || want != len.checked_sub(size_of::<Map>()) {
        return Err(malformed("MAP's segments do not match their count"));
    }
    let access = access(map.flags.get(), 0)?;
    let segments = <[MapSegment]>::ref_from_bytes(rest).unwrap_or_default();
    Ok(Request::Map { iova: Iova(map.iova.get()), access, count, segments })
}

fn unmap(body: &Unmap) -> Result<Request<'static>, RequestError> {
    let (start, last) = (body.iova_start.get(), body.iova_last.get());
    let range = Range::new(Iova(start), Iova(last)).ok_or(field("iova_last", last))?;
    Ok(Request::Unmap { range })
}

fn alloc(body: &Alloc) -> Result<Request<'static>, RequestError> {
    let flags = body.flags.get();
    let access = access(flags, ALLOC_REGISTERS | ALLOC_WINDOWABLE)?;
    if flags & ALLOC_WINDOWABLE != 0 {
        return Err(RequestError::Unknown { what: "ALLOC flag", value: u64::from(ALLOC_WINDOWABLE) });
    }
    if body.len.get() == 0 {
        return Err(field("len", 0));
    }
    Ok(Request::Alloc {
        endpoint: EndpointId::from_raw(body.endpoint.get()),
        access,
        registers: flags & ALLOC_REGISTERS != 0,
        iova: Iova(body.iova.get()),
        len: body.len.get(),
    })
}

fn peer(body: &Peer, change: PeerChange) -> Result<Request<'static>, RequestError> {
    zero("reserved", u64::from(body.reserved.get()))?;
    let raw = body.rights.get();
    let known = raw & !(PEER_READ | PEER_WRITE) == 0;
    if !known || (raw == 0) != (change == PeerChange::Query) {
        return Err(field("rights", u64::from(raw)));
    }
    if body.accessor == body.owner {
        return Err(field("owner", u64::from(body.owner.get())));
    }
    let rights = Access { read: raw & PEER_READ != 0, write: raw & PEER_WRITE != 0 };
    let (accessor, owner) = (EndpointId::from_raw(body.accessor.get()), EndpointId::from_raw(body.owner.get()));
    Ok(Request::Peer { change, accessor, owner, rights })
}

fn cancel(body: &Cancel) -> Result<Request<'static>, RequestError> {
    let (flags, cookie) = (body.flags.get(), body.cookie.get());
    if flags > 1 {
        return Err(field("flags", u64::from(flags)));
    }
    if flags == 1 {
        zero("cookie", cookie)?;
    }
    Ok(Request::Cancel { stream: StreamId(body.stream.get()), cookie: (flags == 0).then_some(cookie) })
}

fn access(flags: u32, also: u32) -> Result<Access, RequestError> {
    let access = Access { read: flags & MAP_READ != 0, write: flags & MAP_WRITE != 0 };
    if access.is_none() || flags & !(MAP_READ | MAP_WRITE | also) != 0 {
        return Err(field("flags", u64::from(flags)));
    }
    Ok(access)
}

fn exact<T: FromBytes + KnownLayout + Immutable>(body: &[u8], len: usize) -> Result<&T, RequestError> {
    if len != size_of::<T>() {
        return Err(malformed("its body has the wrong length"));
    }
    T::ref_from_prefix(body).map(|(body, _)| body).ok().ok_or(malformed("its body has the wrong length"))
}

pub(crate) fn zero(name: &'static str, value: u64) -> Result<(), RequestError> {
    if value == 0 { Ok(()) } else { Err(field(name, value)) }
}

pub(crate) fn field(field: &'static str, value: u64) -> RequestError {
    RequestError::Field { field, value }
}

fn malformed(what: &'static str) -> RequestError {
    RequestError::Malformed { what }
}
