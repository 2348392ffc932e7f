//! The virtual P2P DMA device behind its rings: queues, parsing, checks, plans, what is in flight, events, reset.
//!
//! One [`Device`] serves one tenant. The transport gives it rings ([`Ring`]) and three kinds of thread: one per queue that calls
//! [`Device::drain`], one timekeeper that calls [`Device::poll`], and one that starts and stops queues. Every method may be called from any
//! thread; the kinds say which calls block each other.
//!
//! The way of one transfer: `submit` takes its chain and copies it once, `work` parses it, `streams` says when its turn is, `issue` translates
//! and pins it, `check` and `plan` decide whether and how, the engine carries it out (`run`), `flight` remembers what engines have in hand, and
//! `complete` writes the record. Control requests go through `control` and `request` to one handler file a family. `journal` notes which chains
//! are in hand, and `resume` answers those that a process had that is no more.
//!
//! # Locks
//! In this order; a thread that holds one takes only later ones, and none is held when an engine is called or pins are let go:
//! 1. a queue's turn, or the timekeeper's;
//! 2. a port (that its ring may be touched), then the ring itself, then the pending events;
//! 3. each of these alone: the domain table, the buffer table, a domain's streams (then the list of what is in flight, or a ready list).
//!
//! The first kind is the exception to the rule: it *is* held while engines work, and nothing that an engine or the virtual IOMMU calls back
//! takes it. Such calls may come on any thread that lets pins go; they queue work, or answer control requests. The other exception: engines are
//! asked what they raised under the domain table's lock, and forget a domain before it leaves the table.
//!
//! Not here: vhost-user, concrete engines, files, sockets, threads.
#![forbid(unsafe_code)]
#![warn(clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "no guest reaches tests")
)]

mod atomic;
mod buffer;
mod buffers;
mod check;
mod complete;
mod control;
mod device;
mod domain;
mod error;
mod events;
mod extents;
mod finally;
mod flight;
mod issue;
mod journal;
mod limiter;
mod live;
mod map;
mod observer;
mod op;
mod pace;
mod pause;
mod peer;
mod plan;
mod port;
mod queue;
mod request;
mod resume;
mod run;
mod session;
mod spec;
mod stream;
mod streams;
mod submit;
mod sync;
mod tend;
mod turn;
mod work;

pub use device::Device;
pub use error::RequestError;
pub use iommu_core::{MappingKind, Provenance, Relation};
pub use journal::{JOURNAL_WORDS, JournalWords};
pub use observer::{Counter, FaultRecord, Gauge, Observer, Unobserved};
pub use plan::Plan;
pub use queue::Ring;
pub use request::{Control, PeerChange, Request, parse_control};
pub use spec::{DeviceSpec, Limits, MAX_ENDPOINTS, MAX_SUBMIT_QUEUES, Reach, SpecError};
pub use work::{Operation, Tag, Work, parse_work};
