//! The programs that take part, built once, with the `fast` profile if nobody wants another one.
//!
//! Not here: running the daemon or a guest.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use super::daemon::Daemon;
use super::{Rows, TENANT};
use crate::kit::Kit;
use crate::work::{cargo, checkout, must};

/// How long the scenario may take without a guest.
const PATIENCE: Duration = Duration::from_secs(180);

/// Where the programs are.
#[derive(Debug, Clone)]
pub struct Programs {
    dir: PathBuf,
}

impl Programs {
    /// Builds the packages. Says so on stderr, since it can take minutes.
    ///
    /// # Errors
    /// When one does not build.
    pub fn build(packages: &[&str]) -> Result<Self> {
        eprintln!("building {}", packages.join(", "));
        Self::build_at(&checkout(), &target_dir(), "fast", packages)
    }

    /// As [`Programs::build`], quietly, of another tree, into another target directory and with any profile.
    ///
    /// # Errors
    /// As there.
    pub fn build_at(tree: &Path, target: &Path, profile: &str, packages: &[&str]) -> Result<Self> {
        let mut command = cargo(&["build", "--quiet", "--profile", profile]);
        command.current_dir(tree).env("CARGO_TARGET_DIR", target);
        for package in packages {
            command.args(["--package", package]);
        }
        must(command).context("The programs do not build")?;
        Ok(Self::at(target.join(if profile == "dev" { "debug" } else { profile })))
    }

    /// Programs that are already there, in this folder.
    #[must_use]
    pub fn at(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// A command that runs a built program.
    #[must_use]
    pub fn command(&self, name: &str) -> Command {
        Command::new(self.path(name))
    }

    /// Where the built programs are.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where a built program is.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Builds the guest's kernel module; any warning is a failure.
    ///
    /// # Errors
    /// When it does not build clean.
    pub fn module(&self, kit: &Kit) -> Result<PathBuf> {
        let drivers = checkout().join("guest-driver");
        let out = target_dir().join("guest-module").join(kit.kernel_release());
        eprintln!("building the kernel module for {}", kit.kernel_release());
        let built = kit.build_module(&drivers.join("kernel"), &[&drivers.join("uapi")], &out)?;
        built.into_iter().next().context("The kernel module was not built")
    }

    /// Runs the scenario from a front-end in a process of this host.
    ///
    /// # Errors
    /// When it does not run to its end.
    pub fn scenario(&self, daemon: &Daemon, file: Option<&Path>, rows: &mut Rows) -> Result<()> {
        let mut command = self.command("pgctl-no-vm");
        command.arg("--device").arg(daemon.tenant_socket(TENANT)).args(["--json", "selftest"]);
        if let Some(file) = file {
            command.arg("--file").arg(file);
        }
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("Cannot start the front-end")?;
        let output = child.stdout.take().context("The front-end has no output")?;
        let (sender, receiver) = channel();
        thread::spawn(move || sender.send(BufReader::new(output).lines().collect::<std::io::Result<Vec<_>>>()));
        let Ok(lines) = receiver.recv_timeout(PATIENCE) else {
            child.kill().context("Cannot end the front-end")?;
            child.wait().context("Cannot wait for the front-end")?;
            bail!("The scenario did not end in {} s", PATIENCE.as_secs());
        };
        let lines = lines.context("Cannot read the front-end")?;
        let status = child.wait().context("Cannot wait for the front-end")?;
        rows.add_selftest(lines.iter().map(String::as_str))?;
        if !status.success() && rows.failed() == 0 {
            bail!("The front-end ended with {status}");
        }
        Ok(())
    }
}

/// One change of the driver's sources: file, what stands there, what is to stand there.
pub type Change = (&'static str, &'static str, &'static str);

/// Builds the guest's kernel module from changed sources, in the folder `name` of the target directory.
///
/// # Errors
/// When it does not build clean, or its sources have moved on.
pub fn changed_module(kit: &Kit, name: &str, changes: &[Change]) -> Result<PathBuf> {
    let drivers = checkout().join("guest-driver");
    let copy = TempDir::with_prefix("peergate-driver-").context("Cannot create a temporary folder")?;
    let source = copy.path().join("kernel");
    fs::create_dir(&source).context("Cannot create a temporary folder")?;
    for entry in fs::read_dir(drivers.join("kernel")).context("Cannot read the driver's sources")? {
        let file = entry.context("Cannot read the driver's sources")?;
        fs::copy(file.path(), source.join(file.file_name())).context("Cannot copy the driver's sources")?;
    }
    for (name, from, to) in changes {
        let file = source.join(name);
        let text = fs::read_to_string(&file).with_context(|| format!("Cannot read {name}"))?;
        let places = text.matches(from).count();
        ensure!(places == 1, "{name} has {places} places that read {from:?}; one is needed");
        fs::write(&file, text.replacen(from, to, 1)).with_context(|| format!("Cannot write {name}"))?;
    }
    let built = kit.build_module(&source, &[&drivers.join("uapi")], &target_dir().join(name))?;
    built.into_iter().next().context("The kernel module was not built")
}

/// Where cargo puts what it builds.
#[must_use]
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| checkout().join("target"), PathBuf::from)
}
