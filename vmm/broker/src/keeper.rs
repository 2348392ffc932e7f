//! What supervisor and keeper say to each other.
//!
//! Not here: how the messages travel, what a keeper does between a VMM and a worker.

use serde::{Deserialize, Serialize};

use crate::channel::Message;

/// From the supervisor to a keeper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToKeeper {
    /// First message, with one descriptor: the tenant's listening socket.
    Setup(KeeperSetup),
    /// A worker, with one descriptor: a stream that is connected to it. A stream that the keeper held before ends.
    Worker {
        /// Which worker of the tenant.
        session: u32,
        /// Whether no VMM was connected when the worker was started, as far as the supervisor knew.
        fresh: bool,
    },
    /// Close both connections in good order and exit.
    Shutdown {},
}

/// Everything a keeper needs to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeeperSetup {
    /// The operator's name for the tenant.
    pub tenant: String,
}

/// From a keeper to the supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FromKeeper {
    /// A VMM has connected. Sent before anything of it reaches a worker.
    Connected {},
    /// The VMM has gone, and the worker's stream is closed.
    Disconnected {},
    /// A worker has been told everything that its predecessor knew, and has answered what that one still owed.
    Replayed {
        /// Which worker of the tenant.
        session: u32,
    },
    /// Too many workers in a row failed before they knew what their predecessor did, and the keeper has closed the VMM's connection.
    /// `Disconnected` follows.
    GaveUp {
        /// One line.
        reason: String,
    },
    /// The keeper cannot go on and exits; the reason, for the operator.
    Failed {
        /// One line.
        reason: String,
    },
}

impl Message for ToKeeper {
    const HAS_FDS: bool = true;

    fn fds(&self) -> usize {
        match self {
            Self::Setup(_) | Self::Worker { .. } => 1,
            Self::Shutdown {} => 0,
        }
    }
}

impl Message for FromKeeper {
    const HAS_FDS: bool = false;

    fn fds(&self) -> usize {
        0
    }
}
