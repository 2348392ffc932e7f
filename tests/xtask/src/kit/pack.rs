//! A small kit, for machines that cannot make one: what QEMU and a guest without modules to build need, in the kit's own layout.
//!
//! `DIR/root/` and `DIR/kit.json` are as in the cache, so [`Kit::packed_in`] is a kit like any other, but for the compiler. The kernel's own modules
//! are there unpacked. Not here: what runs beside QEMU.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::{Kit, Stamp, tree};

const PROGRAM: &str = "usr/bin/qemu-system-x86_64";
/// What QEMU opens for a q35 machine without display, network and disks that boots a Linux image.
const FIRMWARE: [&str; 3] =
    ["usr/share/seabios/bios-256k.bin", "usr/share/qemu/kvmvapic.bin", "usr/share/qemu/linuxboot_dma.bin"];

impl Kit {
    /// Copies what is needed of this kit, with the kernel that it has, into a folder. `modules` are those of the kernel's own that guests load.
    ///
    /// # Errors
    /// When a file is missing or cannot be copied, or the tree's QEMU is too old.
    pub fn pack(&self, modules: &[&str], dir: &Path) -> Result<()> {
        let root = dir.join("root");
        for part in self.parts(modules)? {
            copy(&self.root.join(&part), &root.join(&part))?;
        }
        let stamp = Stamp { kernel_release: self.kernel.clone(), ..self.stamp.clone() };
        Self::of_tree(root, stamp.clone())?;
        tree::write_stamp(dir, &stamp)
    }

    /// The kit that [`Kit::pack`] put into a folder, if there is one.
    ///
    /// # Errors
    /// When it is damaged.
    pub fn packed_in(dir: &Path) -> Result<Option<Self>> {
        tree::open_at(dir)?.map(|(root, stamp)| Self::of_tree(root, stamp)).transpose()
    }

    /// Writes everything in a folder into a `.tar.xz` file, with the tree's xz. Blocks: half a minute for 100 MB on two processors.
    ///
    /// # Errors
    /// When tar or xz fails.
    pub fn compress(&self, dir: &Path, file: &Path) -> Result<()> {
        let place = || format!("Cannot write {}", file.display());
        let out = File::create(file).with_context(place)?;
        let mut tar = Command::new("tar");
        tar.args(["--create", "--owner=0", "--group=0", "--sort=name", "--directory"]).arg(dir).arg(".");
        let mut tar = tar.stdout(Stdio::piped()).spawn().context("Cannot run tar")?;
        let mut xz = self.program("usr/bin/xz", "xz");
        xz.args(["--threads=0", "-6"]).stdin(tar.stdout.take().context("tar has no output")?).stdout(out);
        let written = xz.status().context("Cannot run the kit's xz")?;
        let read = tar.wait().with_context(place)?;
        ensure!(read.success() && written.success(), "{}: tar ended with {read}, xz with {written}", place());
        Ok(())
    }

    /// The files, as paths in the tree.
    fn parts(&self, modules: &[&str]) -> Result<Vec<PathBuf>> {
        let mut parts = self.libraries(PROGRAM)?;
        parts.extend([PROGRAM, "usr/bin/busybox"].into_iter().chain(FIRMWARE).map(PathBuf::from));
        let modules = self.kernel_modules(modules)?.into_iter().map(|module| module.path);
        let lists = ["modules.dep", "modules.builtin"].map(|name| self.modules_dir().join(name));
        for path in modules.chain(lists).chain([self.kernel_image()]) {
            let part = path.strip_prefix(&self.root);
            parts.push(part.with_context(|| format!("{} is none of the kit's files", path.display()))?.to_owned());
        }
        Ok(parts)
    }
}

/// Copies a file, or what a link leads to, and makes the folders above it.
///
/// # Errors
/// When it is not there or cannot be copied.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    let place = || format!("Cannot copy {} to {}", from.display(), to.display());
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).with_context(place)?;
    }
    fs::copy(from, to).map(drop).with_context(place)
}
