//! `cargo xtask lint`: what reading the sources alone can tell.

use anyhow::Result;

use super::{Steps, cargo, must};

pub(crate) fn run() -> Result<()> {
    let mut steps = Steps::default();
    add(&mut steps);
    steps.finish()
}

/// The lint steps, for the commands that include them.
pub(crate) fn add(steps: &mut Steps) {
    steps.run("fmt", || must(cargo(&["fmt", "--all", "--check"])));
    steps.run("clippy", || must(cargo(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"])));
    steps.run("doc", || {
        let mut doc = cargo(&["doc", "--quiet", "--workspace", "--no-deps"]);
        doc.env("RUSTDOCFLAGS", "-D warnings");
        must(doc)
    });
}
