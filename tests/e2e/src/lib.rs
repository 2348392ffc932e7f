//! Tests of the whole thing: the daemon's processes, its sockets, a guest, an operator.
//!
//! [`bed`] is a daemon with two tenants to be tested on; [`load`] is a guest that never rests; [`scenario`] is the demo without a VM; the tests are in
//! `tests/`.
//!
//! Not here: a real guest kernel (`xtask` boots one).

pub mod bed;
pub mod load;
pub mod overhear;
pub mod scenario;

/// The configuration that the demo uses.
pub const DEMO: &str = include_str!("../../../configs/demo.toml");
/// The tenant of [`DEMO`].
pub const TENANT: &str = "demo";
