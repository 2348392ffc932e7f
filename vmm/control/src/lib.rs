//! The operator's socket: what may be asked, what is answered, and both sides of the connection.
//!
//! A request is one line of JSON, and so is its answer:
//!
//! ```json
//! {"version":1,"request":"faults","tenant":"demo","last":10}
//! {"version":1,"reply":"faults","tenants":[{"tenant":"demo","next":17,…}],"faults":[…]}
//! {"version":1,"request":"faults","since":{"demo":17}}
//! {"version":1,"reply":"error","code":"unknown_tenant","message":"There is no tenant \"demo\"; there are: vm0"}
//! ```
//!
//! Fields may be added within a version; a client ignores what it does not know. A request of another version is answered with an error
//! that names the version in force. A client sends one request at a time; lines are bounded both ways ([`MAX_REQUEST`], [`MAX_REPLY`]).
//!
//! - [`listen`] makes a socket file with its permissions, and [`SocketFile`] removes it again.
//! - [`Connection`] is the server's side of one client, without blocking; [`Client`] is the other side.
//!
//! Not here: where the answers come from, an event loop, vhost, engines.
#![forbid(unsafe_code)]

mod change;
mod client;
mod connection;
mod message;
mod sandbox;
mod socket;

pub use change::{ChangeInfo, ChangesReply, Consent, DrainReply, DrainState, Edit, Effect, KeyInfo, NewSlice, Scalar};
pub use client::{Client, ClientError};
pub use connection::{Connection, Interest};
pub use message::{
    DaemonStatus, EndpointInfo, EndpointsReply, ErrorCode, ErrorReply, FaultInfo, FaultTotals, FaultsReply,
    MappingInfo, Party, PeerInfo, Reply, Request, StatusReply, TenantInfo, TenantState, TenantStatus, TenantsReply,
    VERSION,
};
pub use sandbox::{
    Capabilities, ConfiguredFences, Namespace, ProcessSandbox, ResourceLimits, Role, Root, SandboxReply, ThreadSandbox,
};
pub use socket::{ListenError, SocketFile, listen};

/// Most bytes of a request, its line end included: one that names every tenant fits.
pub const MAX_REQUEST: usize = 16 << 10;
/// Most bytes of an answer, its line end included.
pub const MAX_REPLY: usize = 16 << 20;
