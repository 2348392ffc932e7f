//! Requests and answers. Numbers are in the unit that the field's name says; bytes otherwise.
//!
//! Not here: how they travel.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::sandbox::SandboxReply;
use crate::{ChangesReply, Consent, DrainReply, DrainState, Edit};

/// Version of the messages.
pub const VERSION: u32 = 1;

/// What an operator may ask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// How the daemon and each tenant are doing.
    Status,
    /// How each process is fenced in.
    Sandbox,
    /// How each tenant is set up.
    Tenants,
    /// The slices of devices that tenants have.
    Endpoints,
    /// Who was refused what. Records that are asked for and more than an answer has room for are shared out: no tenant gets fewer because another
    /// has many.
    Faults {
        /// Only this tenant's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tenant: Option<String>,
        /// Only so many, all chosen tenants together; as many as an answer has room for if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        last: Option<u32>,
        /// Only what came after these numbers, and of that the oldest: for each tenant [`FaultTotals::next`] of the answer before. A tenant that is not
        /// among them is read from its first record on. If absent, the newest.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        since: Option<BTreeMap<String, u64>>,
    },
    /// Edit the configuration file, and do what it says then.
    Change {
        /// The edit.
        edit: Edit,
        /// How far it may go.
        #[serde(default)]
        consent: Consent,
    },
    /// Do what the configuration file says now.
    Reload {
        /// How far it may go.
        #[serde(default)]
        consent: Consent,
    },
    /// Take no more work from a tenant's guest, now and after a restart. Answered at once; ask again to learn how far it has come.
    Drain {
        /// Whose.
        tenant: String,
    },
    /// Take work again.
    Resume {
        /// Whose.
        tenant: String,
    },
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// To [`Request::Status`].
    Status(StatusReply),
    /// To [`Request::Sandbox`].
    Sandbox(SandboxReply),
    /// To [`Request::Tenants`].
    Tenants(TenantsReply),
    /// To [`Request::Endpoints`].
    Endpoints(EndpointsReply),
    /// To [`Request::Faults`].
    Faults(FaultsReply),
    /// To [`Request::Change`] and [`Request::Reload`].
    Changes(ChangesReply),
    /// To [`Request::Drain`] and [`Request::Resume`].
    Drain(DrainReply),
    /// To any request.
    Error(ErrorReply),
}

/// Why a request was not answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorReply {
    /// For programs.
    pub code: ErrorCode,
    /// For people: what is wrong and what to do.
    pub message: String,
}

/// Kinds of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request is no request.
    Malformed,
    /// The request is of another version.
    Version,
    /// The request is too long, or the answer would be.
    TooLong,
    /// No tenant has that name.
    UnknownTenant,
    /// The edit cannot be made, or what the file says then or now is no configuration.
    Configuration,
    /// The file is not what it was when the daemon, or whoever asks, looked at it last.
    Edited,
    /// The file cannot be read or written, or what is wanted cannot be set up. Nothing has changed.
    Failed,
}

/// How everything is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusReply {
    /// The daemon.
    pub daemon: DaemonStatus,
    /// In the configuration's order.
    pub tenants: Vec<TenantStatus>,
}

/// How the daemon is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Its version.
    pub version: String,
    /// The supervisor's process.
    pub pid: u32,
    /// Time since it started, in milliseconds.
    pub uptime_ms: u64,
    /// Where its sockets are.
    pub runtime_dir: PathBuf,
    /// How system calls that are on no list are treated: `enforce`, `log` or `off`.
    pub seccomp: String,
    /// The broker's process; none while it is being replaced.
    pub broker_pid: Option<u32>,
    /// Brokers that failed.
    #[serde(default)]
    pub broker_failures: u64,
}

/// Where a tenant stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TenantState {
    /// Its worker is being set up.
    Starting,
    /// A VMM may connect.
    Waiting,
    /// A VMM is connected.
    Connected,
    /// Its worker has ended, and the next one is not started yet.
    Restarting,
    /// There will be no worker: the daemon ends.
    Stopped,
}

/// How a tenant is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantStatus {
    /// Its name.
    pub name: String,
    /// Where it stands.
    pub state: TenantState,
    /// Whether work is taken from its guest.
    #[serde(default)]
    pub drain: DrainState,
    /// How long its PCI functions reach what their commands needed: `strict` or `lazy`.
    #[serde(default)]
    pub iommu: String,
    /// Workers it has had, the present one included.
    pub session: u32,
    /// The present worker's process.
    pub worker_pid: Option<u32>,
    /// The keeper's process, which holds the VMM's connection from one worker to the next.
    pub keeper_pid: Option<u32>,
    /// How long the VMM had no worker the last time it lost one, in microseconds, from the worker's end to the next one's knowing all.
    pub last_outage_us: Option<u64>,
    /// Workers that failed.
    pub failures: u64,
    /// Why the last of them did, as it said itself.
    #[serde(default)]
    pub last_failure: Option<String>,
    /// Keepers that failed, each with a VMM's connection if there was one.
    #[serde(default)]
    pub keeper_failures: u64,
    /// Accesses refused.
    pub faults: u64,
    /// Numbers that only grow, since the daemon started.
    pub counters: BTreeMap<String, u64>,
    /// Numbers of the present worker.
    pub gauges: BTreeMap<String, u64>,
}

/// How tenants are set up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantsReply {
    /// In the configuration's order.
    pub tenants: Vec<TenantInfo>,
}

/// How a tenant is set up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantInfo {
    /// Its name.
    pub name: String,
    /// The socket that its VMM connects to.
    pub socket: PathBuf,
    /// The virtio device id that its VMM should give the device.
    pub device_id: u32,
    /// Submission queues; the device has two queues more.
    pub submit_queues: u16,
    /// Longest queue the device takes, in entries.
    pub max_queue_size: u32,
    /// Size of the device's configuration space.
    pub config_size: u32,
    /// What happens with guest memory that a VMM could truncate: `warn` or `refuse`.
    pub unsealed_memory: String,
    /// How long its PCI functions reach what their commands needed: `strict` or `lazy`.
    #[serde(default)]
    pub iommu: String,
    /// Its slices.
    pub endpoints: u32,
    /// Memory of all its slices.
    pub memory: u64,
}

/// The slices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointsReply {
    /// By tenant, in the configuration's order.
    pub endpoints: Vec<EndpointInfo>,
}

/// One slice of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointInfo {
    /// Whose.
    pub tenant: String,
    /// Number within the tenant, as its guest sees it.
    pub endpoint: u32,
    /// Name within the tenant.
    pub name: String,
    /// The device it is a slice of.
    pub device: String,
    /// What it is, as the configuration calls it.
    pub kind: String,
    /// Memory.
    pub memory: u64,
    /// Copy engines of the device.
    pub engines: u32,
    /// Bandwidth of the device's link in bytes a second each way; 0 is as fast as memory.
    pub bandwidth: u64,
    /// Latency of the device's link in nanoseconds.
    pub latency_ns: u64,
    /// Slices of the tenant that it reaches through host memory only.
    pub staged_to: Vec<String>,
    /// How its GPU reaches those of the tenant's other slices, as the present worker has found it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerInfo>,
}

/// How a slice's GPU reaches another one, of which the tenant has a slice, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerInfo {
    /// Name of the other slice.
    pub name: String,
    /// Its engines reach the memory there without a stop.
    pub access: bool,
    /// Atomic operations of its programs are atomic there.
    pub atomics: bool,
    /// How fast the way is among those of the host; 0 is the fastest.
    pub rank: i32,
    /// What is between the two, in a few words; `unknown` where nothing says it.
    pub link: String,
}

/// Refused accesses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultsReply {
    /// Totals of the tenants asked for.
    pub tenants: Vec<FaultTotals>,
    /// Records, oldest first.
    pub faults: Vec<FaultInfo>,
}

/// How many refusals a tenant had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultTotals {
    /// Who.
    pub tenant: String,
    /// Workers it has had, the present one included.
    #[serde(default)]
    pub session: u32,
    /// Since the daemon started.
    pub total: u64,
    /// Of these, the ones that were recorded.
    #[serde(default)]
    pub recorded: u64,
    /// Of these, the ones whose record has made room for later ones.
    pub overwritten: u64,
    /// Faults that were not recorded, because too many came at once.
    #[serde(default)]
    pub suppressed: u64,
    /// The same by reason.
    #[serde(default)]
    pub suppressed_by_reason: BTreeMap<String, u64>,
    /// Records that were asked for and have made room for later ones.
    #[serde(default)]
    pub missed: u64,
    /// Records that were asked for and cannot be read: being written, or their writer died half-way.
    pub torn: u64,
    /// Number of the last record that this answer covers: where to go on. Less than `recorded` if there is more.
    #[serde(default)]
    pub next: u64,
}

/// One refused access.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultInfo {
    /// Whose guest.
    pub tenant: String,
    /// Number within the tenant, from 1.
    pub number: u64,
    /// When, in nanoseconds since 1970.
    pub time_ns: u64,
    /// Session of the device.
    pub session: u32,
    /// Address space within the guest.
    pub domain: u32,
    /// Who wanted access.
    pub accessor: Option<Party>,
    /// Whose memory it was.
    pub owner: Option<Party>,
    /// First address refused.
    pub address: u64,
    /// `read`, `write`, `read-write` or `none`.
    pub access: String,
    /// Why.
    pub reason: String,
    /// What the guest was told.
    pub status: String,
    /// Stream of the work.
    pub stream: u32,
    /// Cookie of the work.
    pub cookie: u64,
    /// Handle of a stale fault; else 0.
    pub value: u64,
    /// The mapping that it is about.
    #[serde(default)]
    pub mapping: Option<MappingInfo>,
}

/// A mapping that a fault is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappingInfo {
    /// `holds` the address, `held` it and is gone, or is the `nearest` one to it.
    pub relation: String,
    /// `map`: guest memory by MAP; `buffer`: by ALLOC; `registers`.
    pub kind: String,
    /// Its first address.
    pub first: u64,
    /// Its last address.
    pub last: u64,
    /// What it allows: `read`, `write` or `read-write`.
    pub access: String,
    /// Which of the MAP and ALLOC requests that the session carried out made it, from 1.
    pub request: u64,
    /// It was being removed, and work still used it.
    pub draining: bool,
}

/// An endpoint in a fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Party {
    /// Number within the tenant.
    pub endpoint: u32,
    /// Name within the tenant, if there is such an endpoint.
    pub name: Option<String>,
}

/// A message with its version.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Versioned<T> {
    pub(crate) version: u32,
    #[serde(flatten)]
    pub(crate) body: T,
}

/// The version alone, of a message whose body may be unknown.
#[derive(Debug, Deserialize)]
pub(crate) struct VersionOnly {
    pub(crate) version: u32,
}

/// One line, with its end.
pub(crate) fn to_line<T: Serialize>(body: T) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(&Versioned { version: VERSION, body })?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_look_as_documented() {
        let faults = Request::Faults { tenant: Some("demo".into()), last: Some(10), since: None };
        let line = to_line(&faults).unwrap();
        assert_eq!(line, b"{\"version\":1,\"request\":\"faults\",\"tenant\":\"demo\",\"last\":10}\n");
        let bare: Versioned<Request> = serde_json::from_str(r#"{"version":1,"request":"faults","new":1}"#).unwrap();
        assert_eq!(bare.body, Request::Faults { tenant: None, last: None, since: None });
        let since = Request::Faults { tenant: None, last: None, since: Some([("demo".to_owned(), 7)].into()) };
        assert_eq!(to_line(since).unwrap(), b"{\"version\":1,\"request\":\"faults\",\"since\":{\"demo\":7}}\n");
        assert_eq!(to_line(Request::Status).unwrap(), b"{\"version\":1,\"request\":\"status\"}\n");
    }

    #[test]
    fn answers_survive_a_round_trip() {
        let reply = Reply::Status(StatusReply {
            daemon: DaemonStatus {
                version: "0.1.0".into(),
                pid: 7,
                uptime_ms: 5,
                runtime_dir: "/run/peergate".into(),
                seccomp: "enforce".into(),
                broker_pid: Some(8),
                broker_failures: 2,
            },
            tenants: vec![TenantStatus {
                name: "demo".into(),
                state: TenantState::Restarting,
                drain: DrainState::Draining,
                iommu: "strict".into(),
                session: 2,
                worker_pid: None,
                keeper_pid: None,
                last_outage_us: None,
                failures: 1,
                last_failure: Some("There is no GPU".into()),
                keeper_failures: 3,
                faults: u64::MAX,
                counters: [("ops".to_owned(), u64::MAX)].into(),
                gauges: BTreeMap::new(),
            }],
        });
        let read: Versioned<Reply> = serde_json::from_slice(&to_line(&reply).unwrap()).unwrap();
        assert_eq!((read.version, read.body), (VERSION, reply));
    }
}
