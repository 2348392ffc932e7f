//! What the machine itself must have before the kit can be built: a few packages, installed with apt-get by root.
//!
//! Only missing ones are installed. Anyone but root is told the one command that installs them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// A thing that must be there, and the package that brings it.
struct Need {
    package: &'static str,
    present: fn() -> bool,
}

const NEEDS: [Need; 4] = [
    Need { package: "mmdebstrap", present: || on_path("mmdebstrap") },
    Need { package: "gcc", present: || on_path("cc") },
    Need { package: "libc6-dev", present: || Path::new("/usr/include/stdio.h").exists() },
    // An early Debian 12 has a keyring from before the kit's release was signed.
    Need {
        package: "debian-archive-keyring",
        present: || {
            ["gpg", "pgp", "asc"]
                .iter()
                .any(|kind| Path::new(&format!("/usr/share/keyrings/debian-archive-trixie-stable.{kind}")).exists())
        },
    },
];

/// Installs what is missing. Needs root and the network only if something is.
///
/// # Errors
/// When something is missing and this is not root, or apt-get fails.
pub fn ensure_programs() -> Result<()> {
    let missing: Vec<&str> = NEEDS.iter().filter(|need| !(need.present)()).map(|need| need.package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.join(" ");
    if !is_root() {
        bail!(
            "This machine lacks {names}; run this as root, or have root run: apt-get update && apt-get install -y --no-install-recommends {names}"
        );
    }
    eprintln!("kit: installing {names}");
    apt_get(&["update", "-qq"])?;
    let mut install = vec!["install", "-y", "-qq", "--no-install-recommends"];
    install.extend(missing);
    apt_get(&install)
}

/// Whether this process is root (in its user namespace).
#[must_use]
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether a program of this name is on PATH.
#[must_use]
pub fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

fn apt_get(arguments: &[&str]) -> Result<()> {
    let status = Command::new("apt-get")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdout(std::io::stderr())
        .status()
        .context("Cannot run apt-get; the kit needs Debian 12 or 13")?;
    if !status.success() {
        bail!("apt-get {} failed ({status})", arguments.join(" "));
    }
    Ok(())
}
