//! The one seam to hardware: what the device asks of an engine, and what an engine may ask of memory and links.
//!
//! - [`DmaEngine`] moves bytes between places that are already translated, checked and pinned. It never sees a guest's address.
//! - [`Memory`] is bytes at a [`Location`](iommu_addr::Location); an engine that moves bytes on the CPU is handed one.
//! - [`LinkLedger`] is the credit of the host's links, shared by every tenant's worker.
//! - [`Fleet`] is all engines of a tenant as one, among them [`Owner`]s of memory that only they reach.
//! - [`jobs`] keeps what is known of each transfer where threads seldom meet.
//! - [`queue`] is a thread that carries transfers out one after another, for engines that need one.
//! - [`proof`] finds out whether two endpoints see the same bytes.
//! - [`conformance`] is the suite that every engine passes.
//!
//! Not here: any hardware, any simulation, translation, rights.
#![forbid(unsafe_code)]

pub mod conformance;
mod engine;
mod fences;
mod fleet;
pub mod jobs;
mod ledger;
mod memory;
mod owner;
pub mod proof;
pub mod queue;
mod segments;
mod sync;

pub use engine::{
    Atomic, AtomicOp, DmaEngine, EndpointKind, EndpointSpec, EngineCaps, EngineError, Finished, Initiated, JobId,
    Raised, Route, Segments, Submit, Transfer, Work,
};
pub use fleet::{Fleet, MAX_STAGED, Member};
pub use ledger::{Booking, Crossing, Direction, LinkId, LinkLedger, Unlimited};
pub use memory::{Buffer, Memory, MemoryError, Place, RamMap, RamRegion, is_ordinary};
pub use owner::Owner;
pub use queue::ThreadHook;
pub use segments::{CopyError, Pair, Pairs, copy_segments, fill_segments, total_len};
