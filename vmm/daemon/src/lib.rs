//! `peergated` and `peergate`: the only place where configuration, transport and concrete engines meet.
//!
//! - [`config`]: what was typed, and what it means.
//! - [`peergated`]: the daemon. A supervisor owns sockets, slices and pages and watches one worker process a tenant.
//! - [`cli`]: the operator's command.
//!
//! Not here: logic that a lower floor could hold.
#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
mod log;
pub mod peergated;
mod supervisor;
mod worker;
