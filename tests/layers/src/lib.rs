//! The law of the floors: a crate imports only crates on lower floors. The test beside this file reads `cargo metadata`.
//!
//! Not here: anything that runs.
#![forbid(unsafe_code)]
