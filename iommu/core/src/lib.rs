//! The virtual IOMMU: what an address means, who may use it, and when it may mean something else.
//!
//! An [`Iommu`] is one tenant's. It has [`Domain`]s, I/O address spaces that endpoints are attached to. A domain maps addresses to guest memory and
//! to endpoints' memory, and knows which endpoint may reach which other one's memory. A job takes [`Pins`] of what it needs and holds them while it
//! runs; a thread translates through an [`Iotlb`] of its own.
//!
//! The rule everything serves: **what was withdrawn is never used again.** When UNMAP, DETACH or the withdrawal of a right return, nobody gets in any
//! more; when they answer ([`Progress`]), nobody is in. No thread has to be told, nothing is invalidated: whoever remembers a translation finds its pin
//! closed. Pins of one mapping never delay another.
//!
//! From the bottom: `word` (the pin protocol), `record` and `slab` (what is pinned), `index` (finding it without a lock), `table` (the truth), `domain` and `map`
//! (mappings), `peers` (rights), `pins` and `iotlb` (translation), `iommu` (domains).
//!
//! Not here: requests and their wire, engines, threads, clocks, memory itself.
#![forbid(unsafe_code)]
#![warn(clippy::arithmetic_side_effects)]

mod domain;
mod drain;
mod fault;
mod index;
mod iommu;
mod iotlb;
mod limits;
mod map;
mod peers;
mod pins;
mod record;
mod slab;
mod sync;
mod table;
mod tenant;
mod word;

pub use domain::{Domain, UnmapError};
pub use drain::{Drain, Progress};
pub use fault::{Fault, FaultReason, MappingKind, Provenance, Refused, Relation};
pub use iommu::{AttachError, DetachError, Detached, Iommu, LimitsError};
pub use iotlb::Iotlb;
pub use limits::{Limits, MAX_ENDPOINTS, MAX_SEGMENTS, PAGE_SIZE, Usage};
pub use map::MapError;
pub use peers::PeerError;
pub use pins::{PinnedRange, Pins, Segments};
pub use table::Origin;
