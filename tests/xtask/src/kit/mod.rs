//! The kit: a QEMU that has the generic vhost-user device, a guest kernel with its headers, and the tools that build a module for it.
//!
//! It is a Debian tree of a newer release than the machine may have, unpacked once into the user's cache (never into the checkout)
//! and used from there. [`Kit::ensure`] gives it, building it first where needed; [`Kit::open`] gives it only if it is there.
//! QEMU runs through the tree's own dynamic loader, without chroot, so it sees the host's files and sockets by their paths; the
//! compiler runs inside the tree (`module`). The kit is not a distribution: no maintainer script ever ran in it.

pub mod apt;
pub mod debug;
pub mod host;
pub mod image;
pub mod kernel;
pub mod libraries;
pub mod mirror;
pub mod module;
pub mod pack;
pub mod tree;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Serialize;

pub use apt::NotToBeHad;
pub use kernel::Kernel;
pub use tree::Stamp;

/// The oldest QEMU whose generic vhost-user device a user may create, with shared-memory regions.
pub const OLDEST_QEMU: (u32, u32) = (11, 1);

const QEMU: &str = "qemu-system-x86_64";

/// A QEMU, and how to run it.
#[derive(Debug, Clone, Serialize)]
pub struct Qemu {
    /// Its version, as it says it.
    pub version: String,
    /// True if it is the machine's own, found on PATH.
    pub from_path: bool,
    /// The program and its first arguments.
    pub command: Vec<PathBuf>,
}

/// A kit that is ready for use.
#[derive(Debug, Clone, Serialize)]
pub struct Kit {
    /// The root of the tree.
    pub root: PathBuf,
    /// What was put into the tree.
    pub stamp: Stamp,
    /// The release of the kernel that guests run and modules are built for: the tree's own, or another one ([`Kit::with_kernel`]).
    pub kernel: String,
    /// The QEMU that guests run under: the machine's own if it is new enough, else the tree's.
    pub qemu: Qemu,
}

impl Kit {
    /// Gives the kit, after installing host packages and building the tree where they are missing. Blocks: about 15 s to build and
    /// the download before it; a run that finds another one building waits for it. Says what it does on stderr.
    ///
    /// # Errors
    /// When packages are missing and this is not root, when no Debian archive is known, or when a step fails.
    pub fn ensure() -> Result<Self> {
        host::ensure_programs()?;
        let (root, stamp) = tree::ensure()?;
        Self::with_tree(root, stamp)
    }

    /// Gives the kit if an earlier run has built it. Quick.
    ///
    /// # Errors
    /// When the tree is there but unreadable.
    pub fn open() -> Result<Option<Self>> {
        match tree::open()? {
            Some((root, stamp)) => Self::with_tree(root, stamp).map(Some),
            None => Ok(None),
        }
    }

    fn with_tree(root: PathBuf, stamp: Stamp) -> Result<Self> {
        match qemu_on_path() {
            Some(qemu) => Ok(Self { root, kernel: stamp.kernel_release.clone(), stamp, qemu }),
            None => Self::of_tree(root, stamp),
        }
    }

    /// A kit of a tree, with the tree's QEMU and its own kernel.
    fn of_tree(root: PathBuf, stamp: Stamp) -> Result<Self> {
        let qemu = qemu_of_tree(&root, &stamp)?;
        Ok(Self { root, kernel: stamp.kernel_release.clone(), stamp, qemu })
    }

    /// A command that starts QEMU; its arguments are still to be added. Sees the host's files.
    #[must_use]
    pub fn qemu(&self) -> Command {
        let mut words = self.qemu.command.iter();
        let mut command = Command::new(words.next().map_or_else(|| PathBuf::from(QEMU), Clone::clone));
        command.args(words);
        if !self.qemu.from_path {
            command.env("QEMU_MODULE_DIR", self.root.join("usr/lib/x86_64-linux-gnu/qemu"));
        }
        command
    }

    /// A command that runs `program` (a path in the tree, such as `usr/bin/xz`) outside the tree, on the host's files, through the
    /// tree's loader. `name` is what the program is told it is called.
    #[must_use]
    pub fn program(&self, program: &str, name: &str) -> Command {
        tree::program(&self.root, program, name)
    }

    /// The guest kernel's image.
    #[must_use]
    pub fn kernel_image(&self) -> PathBuf {
        self.modules_dir().join("vmlinuz")
    }

    /// The guest kernel's release, as `uname -r` says it in the guest.
    #[must_use]
    pub fn kernel_release(&self) -> &str {
        &self.kernel
    }

    /// A static busybox.
    #[must_use]
    pub fn busybox(&self) -> PathBuf {
        self.root.join("usr/bin/busybox")
    }

    /// The guest kernel's `/lib/modules/RELEASE`.
    #[must_use]
    pub fn modules_dir(&self) -> PathBuf {
        self.root.join("usr/lib/modules").join(self.kernel_release())
    }
}

fn qemu_on_path() -> Option<Qemu> {
    let version = qemu_version(&mut Command::new(QEMU)).ok()?;
    is_new_enough(&version).then(|| Qemu { version, from_path: true, command: vec![PathBuf::from(QEMU)] })
}

fn qemu_of_tree(root: &Path, stamp: &Stamp) -> Result<Qemu> {
    if !is_new_enough(&stamp.qemu_version) {
        let (major, minor) = OLDEST_QEMU;
        bail!(
            "QEMU {} in {} is too old: {major}.{minor} is needed; the archive's backports suite has no newer one",
            stamp.qemu_version,
            root.display()
        );
    }
    let mut command = tree::loader(root);
    command.push(root.join("usr/bin").join(QEMU));
    for share in ["usr/share/qemu", "usr/share/seabios"] {
        command.extend([PathBuf::from("-L"), root.join(share)]);
    }
    Ok(Qemu { version: stamp.qemu_version.clone(), from_path: false, command })
}

/// Asks a QEMU for its version.
fn qemu_version(command: &mut Command) -> Result<String> {
    let output = command.arg("--version").output().context("Cannot run QEMU")?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.split_whitespace()
        .skip_while(|word| *word != "version")
        .nth(1)
        .map(str::to_owned)
        .with_context(|| format!("QEMU said no version: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

fn is_new_enough(version: &str) -> bool {
    let mut parts = version.split('.').map(str::parse::<u32>);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= OLDEST_QEMU,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_qemu_with_the_generic_device_is_new_enough() {
        for (version, expected) in
            [("11.1.3", true), ("12.0.0", true), ("11.0.9", false), ("7.2.17", false), ("?", false)]
        {
            assert_eq!(is_new_enough(version), expected, "{version}");
        }
    }
}
