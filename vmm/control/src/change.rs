//! Changes while the daemon runs: what may be asked, and what is answered.
//!
//! A change is an edit of the configuration file, which the daemon checks, compares with what runs, and writes before it acts. What is asked
//! travels as it was typed: the daemon's own checks say what is wrong with it.
//!
//! Not here: how a file is edited, what a change does.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One edit of the configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Edit {
    /// A further tenant.
    TenantAdd {
        /// Its name.
        tenant: String,
        /// Keys of `[[tenant]]` that are not to have their default.
        #[serde(default)]
        keys: BTreeMap<String, Scalar>,
        /// Keys of `[tenant.limits]`.
        #[serde(default)]
        limits: BTreeMap<String, Scalar>,
        /// Its slices, in the guest's order.
        slices: Vec<NewSlice>,
    },
    /// A tenant less.
    TenantRemove {
        /// Its name.
        tenant: String,
    },
    /// Other limits.
    TenantLimits {
        /// Whose.
        tenant: String,
        /// Keys that get a value.
        #[serde(default)]
        set: BTreeMap<String, Scalar>,
        /// Keys that get their default again.
        #[serde(default)]
        unset: Vec<String>,
    },
    /// A further slice, the guest's last one.
    SliceAdd {
        /// Whose.
        tenant: String,
        /// Which.
        slice: NewSlice,
    },
    /// A slice less; the guest's later ones move up, and what `reach` says about it goes with it.
    SliceRemove {
        /// Whose.
        tenant: String,
        /// Its name.
        slice: String,
    },
    /// A slice of the same name and size on another device.
    SliceMove {
        /// Whose.
        tenant: String,
        /// Its name.
        slice: String,
        /// The device it is to be on.
        device: String,
    },
    /// Whether work is taken from the guest.
    Drained {
        /// Whose.
        tenant: String,
        /// True if none is.
        drained: bool,
    },
}

impl Edit {
    /// The tenant that is edited; no other one changes.
    pub fn tenant(&self) -> &str {
        match self {
            Self::TenantAdd { tenant, .. }
            | Self::TenantRemove { tenant }
            | Self::TenantLimits { tenant, .. }
            | Self::SliceAdd { tenant, .. }
            | Self::SliceRemove { tenant, .. }
            | Self::SliceMove { tenant, .. }
            | Self::Drained { tenant, .. } => tenant,
        }
    }
}

/// A slice as it is typed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewSlice {
    /// The device's name.
    pub device: String,
    /// A size such as `64MiB`.
    pub memory: String,
    /// The slice's name; absent, it is the device's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A value of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Scalar {
    /// A whole number.
    Number(u32),
    /// Anything else.
    Text(String),
}

impl Scalar {
    /// What was typed: a number if it is one.
    pub fn typed(text: &str) -> Self {
        text.parse().map_or_else(|_| Self::Text(text.to_owned()), Self::Number)
    }
}

/// How far a change may go.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Consent {
    /// Only say what would change.
    pub dry_run: bool,
    /// Also if a connected guest loses something.
    pub force: bool,
    /// Also if some parts wait for a restart of the daemon.
    pub partial: bool,
    /// Only if the file is the one that an earlier answer was about, see [`ChangesReply::file`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// What changes, or would.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangesReply {
    /// Whether it has been done; false after a dry run.
    pub applied: bool,
    /// Tells this state of the file from others, within the life of the daemon.
    pub file: String,
    /// What is applied.
    pub changes: Vec<ChangeInfo>,
    /// What is not: it waits for a restart of the daemon.
    pub refused: Vec<ChangeInfo>,
    /// What connected guests lose, a sentence each: without [`Consent::force`] nothing is applied.
    pub losses: Vec<String>,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeInfo {
    /// What is changed: `daemon`, `device` or `tenant`.
    pub subject: String,
    /// Its name; empty for the daemon.
    pub name: String,
    /// `added`, `removed`, or what of it is changed.
    pub what: String,
    /// The keys that differ.
    pub keys: Vec<KeyInfo>,
    /// When it counts.
    pub effect: Effect,
}

/// One key that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyInfo {
    /// Its name.
    pub key: String,
    /// What runs; absent if there is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// What the file says; absent if there is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

/// When a change counts, and what that does to a connected guest. Later ones do more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// At once, and the guest goes on.
    Now,
    /// From the tenant's next session on; nothing begins one.
    NextSession,
    /// A new session begins: the guest loses its mappings, buffers and work, and keeps its device.
    NewSession,
    /// The VMM is disconnected: the guest loses its device.
    Disconnect,
    /// When the daemon is started anew.
    Restart,
}

/// How far a drain has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainReply {
    /// Whose.
    pub tenant: String,
    /// Where it stands.
    pub drain: DrainState,
    /// Work descriptors that still wait or run, as the worker says.
    pub in_flight: u64,
}

/// Whether work is taken from a tenant's guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DrainState {
    /// It is.
    #[default]
    Running,
    /// No more; some that was taken before is not over.
    Draining,
    /// No more, and none that was taken is left.
    Drained,
}
