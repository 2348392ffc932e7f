//! One module a command of `cargo xtask`, and the step runner they share.

pub(crate) mod demo;
pub(crate) mod kit;
pub(crate) mod lint;
pub(crate) mod test;

use std::time::Instant;

use anyhow::{Result, bail};
pub(crate) use xtask::work::{cargo, checkout, must};

/// Named steps, all of which run; what failed is said again at the end.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    failed: Vec<String>,
}

impl Steps {
    /// Runs one step between a heading and its time; gives its value if it succeeded.
    pub(crate) fn run<T>(&mut self, name: &str, step: impl FnOnce() -> Result<T>) -> Option<T> {
        eprintln!("==> {name}");
        let started = Instant::now();
        let result = step();
        let seconds = started.elapsed().as_secs_f64();
        match result {
            Ok(value) => {
                eprintln!("    {name}: ok, {seconds:.1} s");
                Some(value)
            }
            Err(error) => {
                eprintln!("    {name}: FAILED, {seconds:.1} s: {error:#}");
                self.failed.push(name.to_owned());
                None
            }
        }
    }

    /// Ends the list.
    pub(crate) fn finish(self) -> Result<()> {
        if !self.failed.is_empty() {
            bail!("Failed: {}", self.failed.join(", "));
        }
        Ok(())
    }
}
