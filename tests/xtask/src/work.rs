//! Running cargo and other programs on the checkout.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The root of the checkout.
#[must_use]
pub fn checkout() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

/// A cargo of the running toolchain, at the root of the checkout.
#[must_use]
pub fn cargo(words: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(words).current_dir(checkout());
    command
}

/// Runs a command with this process's streams; it must succeed.
///
/// # Errors
/// When it cannot be started or fails.
pub fn must(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| format!("Cannot run {:?}", command.get_program()))?;
    if !status.success() {
        bail!("The command ended with {status}");
    }
    Ok(())
}
