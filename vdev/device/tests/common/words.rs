//! Requests and work as a driver writes them, in short names.

use iommu_addr::EndpointId;
use vdev_wire::{
    Alloc, Attach, Completion, INITIATOR_ANY, Map, MapSegment, Peer, Status, SubmitHeader, Unmap, WorkDescriptor,
    WorkOpcode,
};
use zerocopy::{FromZeros, IntoBytes};

use super::SESSION;

pub fn status(record: &Completion) -> Status {
    Status::from_raw(record.status.get()).expect("a final status")
}

pub fn attach(endpoint: EndpointId) -> Attach {
    Attach { endpoint: endpoint.to_raw().into(), flags: 0.into() }
}

pub fn map_bytes(iova: u64, flags: u32, segments: &[(u64, u64)]) -> Vec<u8> {
    let map = Map { iova: iova.into(), flags: flags.into(), segment_count: (segments.len() as u32).into() };
    let mut bytes = map.as_bytes().to_vec();
    for (gpa, len) in segments {
        bytes.extend_from_slice(MapSegment { gpa: (*gpa).into(), len: (*len).into() }.as_bytes());
    }
    bytes
}

pub fn unmap(start: u64, last: u64) -> Unmap {
    Unmap { iova_start: start.into(), iova_last: last.into() }
}

pub fn alloc(endpoint: EndpointId, flags: u32, iova: u64, len: u64) -> Alloc {
    Alloc { endpoint: endpoint.to_raw().into(), flags: flags.into(), iova: iova.into(), len: len.into() }
}

pub fn peer(accessor: EndpointId, owner: EndpointId, rights: u32) -> Peer {
    Peer { accessor: accessor.to_raw().into(), owner: owner.to_raw().into(), rights: rights.into(), reserved: 0.into() }
}

pub fn batch_header(domain: u32, count: usize) -> SubmitHeader {
    SubmitHeader {
        version: 1.into(),
        count: (count as u16).into(),
        domain: domain.into(),
        flags: 0.into(),
        session: SESSION.into(),
    }
}

pub fn copy(source: u64, destination: u64, length: u64) -> WorkDescriptor {
    WorkDescriptor {
        opcode: (WorkOpcode::Copy as u16).into(),
        initiator: INITIATOR_ANY.into(),
        source: source.into(),
        destination: destination.into(),
        length: length.into(),
        ..WorkDescriptor::new_zeroed()
    }
}

pub fn fill(destination: u64, length: u64, pattern: u64) -> WorkDescriptor {
    WorkDescriptor {
        opcode: (WorkOpcode::Fill as u16).into(),
        initiator: INITIATOR_ANY.into(),
        destination: destination.into(),
        length: length.into(),
        operand: pattern.into(),
        ..WorkDescriptor::new_zeroed()
    }
}

/// `how` is one of the flags of ATOMIC; for a comparison set the source.
pub fn atomic(how: u32, at: u64, length: u64, operand: u64) -> WorkDescriptor {
    WorkDescriptor {
        opcode: (WorkOpcode::Atomic as u16).into(),
        flags: how.into(),
        operand: operand.into(),
        ..copy(0, at, length)
    }
}

pub fn fence() -> WorkDescriptor {
    WorkDescriptor {
        opcode: (WorkOpcode::Fence as u16).into(),
        initiator: INITIATOR_ANY.into(),
        operand: vdev_wire::FENCE_SYSTEM.into(),
        ..WorkDescriptor::new_zeroed()
    }
}

/// Work with more of its fields set.
pub trait With: Sized {
    fn stream(self, stream: u32) -> Self;
    fn cookie(self, cookie: u64) -> Self;
    fn by(self, endpoint: EndpointId) -> Self;
    fn timeout(self, ms: u32) -> Self;
}

impl With for WorkDescriptor {
    fn stream(mut self, stream: u32) -> Self {
        self.stream = stream.into();
        self
    }
    fn cookie(mut self, cookie: u64) -> Self {
        self.cookie = cookie.into();
        self
    }
    fn by(mut self, endpoint: EndpointId) -> Self {
        self.initiator = endpoint.to_raw().into();
        self
    }
    fn timeout(mut self, ms: u32) -> Self {
        self.timeout_ms = ms.into();
        self
    }
}
