//! One module a command of `cargo xtask`, and the step runner they share.

pub(crate) mod bench;
pub(crate) mod bundle;
pub(crate) mod demo;
pub(crate) mod evidence;
pub(crate) mod fuzz;
pub(crate) mod kit;
pub(crate) mod lab;
pub(crate) mod lint;
pub(crate) mod mutate;
mod mutations;
pub(crate) mod test;

use std::time::Instant;

use anyhow::{Result, bail};
use xtask::kit::NotToBeHad;
pub(crate) use xtask::work::{cargo, checkout, must};

/// Named steps, all of which run; what failed is said again at the end.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    /// Only steps whose name contains this; all if empty.
    only: String,
    ran: usize,
    skipped: Vec<String>,
    failed: Vec<String>,
}

impl Steps {
    /// Steps of which only those count whose name contains `only`.
    pub(crate) fn only(only: String) -> Self {
        Self { only, ..Self::default() }
    }

    /// Runs one step, if it is wanted, between a heading and its time; gives its value if it succeeded. A step that needs what the archive does
    /// not give ([`NotToBeHad`]) is skipped, with the reason.
    pub(crate) fn run<T>(&mut self, name: &str, step: impl FnOnce() -> Result<T>) -> Option<T> {
        if !name.contains(&self.only) {
            return None;
        }
        self.ran += 1;
        eprintln!("==> {name}");
        let started = Instant::now();
        let result = step();
        let seconds = started.elapsed().as_secs_f64();
        match result {
            Ok(value) => {
                eprintln!("    {name}: ok, {seconds:.1} s");
                Some(value)
            }
            Err(error) if error.is::<NotToBeHad>() => {
                eprintln!("    {name}: SKIP: {error}");
                self.skipped.push(name.to_owned());
                None
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
        if self.ran == 0 {
            bail!("No step has {:?} in its name", self.only);
        }
        if !self.skipped.is_empty() {
            eprintln!("Skipped: {}", self.skipped.join(", "));
        }
        if !self.failed.is_empty() {
            bail!("Failed: {}", self.failed.join(", "));
        }
        Ok(())
    }
}
