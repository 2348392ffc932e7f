//! What the daemon's processes share: typed messages with file descriptors, and pages of memory.
//!
//! - [`Channel`] carries one serialisable message and its descriptors at a time over a `SOCK_SEQPACKET` socket pair. The messages are
//!   [`ToWorker`] and [`ToSupervisor`], [`ToKeeper`] and [`FromKeeper`], [`ToBroker`] and [`FromBroker`].
//! - [`SharedWords`] is a sealed memory file of 64-bit words, mapped into each process that was handed it. Three views give it meaning:
//!   [`LinkTable`], the credit of the host's links, [`TenantPage`], one tenant's counters and fault log, and
//!   [`JournalPage`], the chains that a tenant's worker has in hand. They live as long as the supervisor, so what a worker wrote survives it.
//! - [`Leases`] is the broker's table of who holds which bytes of which device; [`MemoryFile`] is the memory of one slice for one session.
//!
//! Every number read from a shared page may have been written by a hostile worker: the views bound what they read and never index, wait or
//! allocate by it.
//!
//! Not here: who spawns workers, what an engine is, vhost-user, a guest's bytes.

mod bucket;
mod channel;
mod faults;
mod journal_page;
mod keeper;
mod lease;
mod ledger;
mod memory_file;
mod message;
mod share;
mod tenant_page;
mod words;

pub use channel::{Channel, ChannelError, MAX_FDS, MAX_PAYLOAD, Message};
pub use faults::{FAULT_SLOTS, FaultEntry, FaultLog, FaultMapping};
pub use journal_page::{JOURNAL_WORDS, JournalPage};
pub use keeper::{FromKeeper, KeeperSetup, ToKeeper};
pub use lease::{
    Backing, BrokerDevice, BrokerFunction, FromBroker, Granted, Lease, LeaseError, LeaseSlice, Leases, ToBroker,
};
pub use ledger::{LinkTable, monotonic_now};
pub use memory_file::MemoryFile;
pub use message::{
    Completion, Endpoint, EndpointKind, Function, FunctionFds, Gpu, GpuPeer, IommuMode, Limits, Link, Setup, SetupFds,
    Staged, ToSupervisor, ToWorker, UnsealedMemory, WrongFds,
};
pub use share::PLACES;
pub use tenant_page::{COUNTERS, FAULT_BURST, FAULT_REASONS, GAUGES, LINE_BURST, LINE_KINDS, TenantPage};
pub use words::{SharedError, SharedWords};
