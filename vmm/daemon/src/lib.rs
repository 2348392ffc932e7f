//! `peergated` and `peergate`: the only place where configuration, transport and concrete engines meet.
//!
//! - [`config`]: what was typed, and what it means.
//! - [`peergated`]: the daemon. A supervisor owns sockets and pages and watches a broker and, for each tenant, a keeper and a worker.
//! - [`cli`]: the operator's command.
//!
//! Not here: logic that a lower floor could hold.
#![forbid(unsafe_code)]

mod broker;
pub mod cli;
pub mod config;
mod keeper;
mod log;
pub mod peergated;
mod role;
mod supervisor;
mod worker;
