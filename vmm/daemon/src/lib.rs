//! `peergated` and `peergate`: configuration, supervisor, worker, and the operator's commands.
#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
