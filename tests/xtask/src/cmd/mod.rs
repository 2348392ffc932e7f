//! One module a command of `cargo xtask`.

pub(crate) mod kit;
