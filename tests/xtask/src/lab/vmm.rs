//! What boots guests of the lab's host: QEMU of the kit, and cloud-hypervisor where somebody has built one.
//!
//! Not here: what either is told of a guest (`inner`).

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::machine::Machine;

/// The environment variable that names a cloud-hypervisor of this machine.
pub const VARIABLE: &str = "CLOUD_HYPERVISOR";
/// The first release whose generic vhost-user device is as `peergate attach` says.
const OLDEST: u32 = 53;
/// Where the host has it.
pub(super) const CLOUD_HYPERVISOR: &str = "/bin/cloud-hypervisor";

/// What boots a guest of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vmm {
    /// The kit's, always there.
    Qemu,
    /// There if [`CloudHypervisor::named`].
    CloudHypervisor,
}

impl Vmm {
    /// As `peergate attach --vmm` takes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::CloudHypervisor => "cloud-hypervisor",
        }
    }

    /// The command of the host that boots a guest.
    #[must_use]
    pub fn command(self, guest: &str) -> String {
        match self {
            Self::Qemu => format!("guest-{guest}"),
            Self::CloudHypervisor => format!("guest-{guest}-cloud-hypervisor"),
        }
    }
}

/// A cloud-hypervisor of this machine that will do.
#[derive(Debug, Clone)]
pub struct CloudHypervisor {
    path: PathBuf,
    version: String,
}

impl CloudHypervisor {
    /// The one that [`VARIABLE`] names; none if it is not set.
    ///
    /// # Errors
    /// When what it names is none, or too old.
    pub fn named() -> Result<Option<Self>> {
        let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
        path.map(Self::at).transpose()
    }

    fn at(path: PathBuf) -> Result<Self> {
        let output = Command::new(&path).arg("--version").output();
        let output = output.with_context(|| format!("{VARIABLE} names {}, which cannot be run", path.display()))?;
        let version = version(&path, &String::from_utf8_lossy(&output.stdout))?;
        Ok(Self { path, version })
    }

    /// What it says of itself, such as `v53.0`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Puts it into the host, for guests of [`Vmm::CloudHypervisor`].
    ///
    /// # Errors
    /// When a shared library that it needs is not on this machine.
    pub fn install(&self, machine: &mut Machine<'_>) -> Result<()> {
        machine.root().program(CLOUD_HYPERVISOR, &self.path)
    }
}

fn version(path: &Path, said: &str) -> Result<String> {
    let first = said.lines().next().unwrap_or_default();
    let version = first.strip_prefix("cloud-hypervisor ").unwrap_or_default();
    let digits: String = version.trim_start_matches('v').chars().take_while(char::is_ascii_digit).collect();
    let Ok(release) = digits.parse::<u32>() else {
        bail!(
            "{VARIABLE} names {}, which is no cloud-hypervisor: asked for its version, it says {first:?}",
            path.display()
        );
    };
    ensure!(
        release >= OLDEST,
        "{VARIABLE} names cloud-hypervisor {version}, and the lab needs v{OLDEST} or newer. Build a newer one, or unset the variable to leave its rows out"
    );
    Ok(version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_and_an_old_one_or_another_program_refused() {
        let read = |said: &str| version(Path::new("/x"), said);
        assert_eq!(read("cloud-hypervisor v53.0.0\nMigration Protocol Versions: 0\n").unwrap(), "v53.0.0");
        assert_eq!(read("cloud-hypervisor v54.0-3-gabc\n").unwrap(), "v54.0-3-gabc");
        let old = read("cloud-hypervisor v52.1\n").unwrap_err().to_string();
        assert!(old.contains("v52.1") && old.contains("v53 or newer"), "{old}");
        for other in ["", "QEMU emulator version 11.1.3\n", "cloud-hypervisor main\n"] {
            let error = read(other).unwrap_err().to_string();
            assert!(error.contains("is no cloud-hypervisor"), "{error}");
        }
    }
}
