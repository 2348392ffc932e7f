//! One module a command of `cargo xtask`, and the step runner they share.

pub(crate) mod kit;
pub(crate) mod lint;
pub(crate) mod test;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

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

/// The root of the checkout.
pub(crate) fn checkout() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

/// A cargo of the running toolchain, at the root of the checkout.
pub(crate) fn cargo(words: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(words).current_dir(checkout());
    command
}

/// Runs a command with this process's streams; it must succeed.
pub(crate) fn must(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| format!("Cannot run {:?}", command.get_program()))?;
    if !status.success() {
        bail!("The command ended with {status}");
    }
    Ok(())
}
