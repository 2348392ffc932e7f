//! One function a command. Each answers whether what was asked for came out well; errors are what kept it from trying.
//!
//! Not here: parsing, exit codes.

mod files;
mod inspect;
mod run;
mod transfer;

pub(crate) use inspect::{access_text, events, info, list, peer};
pub(crate) use run::run;
pub(crate) use transfer::{copy, fill};
