//! Address spaces as types, and the ids that name who acts.
//!
//! Three kinds of number look alike and must never be mixed: an address the guest writes in a descriptor ([`Iova`]), a guest-physical
//! address ([`Gpa`]) and an offset into an endpoint's own memory ([`ApertureOffset`]). Each is a type of its own without arithmetic
//! operators: every sum is a named, checked function, and bare `+` on such numbers exists nowhere but here.
//!
//! Ranges ([`Range`]) are non-empty and have an **inclusive** last address, as on the virtio-iommu wire (virtio 1.3, 5.13.6.5), so that the
//! last page of a 64-bit space is an ordinary value.
//!
//! Not here: tables, rights of a domain, any behaviour.
#![no_std]
#![forbid(unsafe_code)]

mod access;
mod ids;
mod location;
mod range;

pub use access::Access;
pub use ids::{BufferId, DomainId, EndpointId, StreamId, TenantId};
pub use location::{ApertureOffset, BusAddr, Gpa, Iova, Location, REGISTERS, Segment};
pub use range::{Addr, Range};
