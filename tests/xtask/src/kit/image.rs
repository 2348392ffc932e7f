//! The kit's QEMU for a guest that boots guests of its own: an ext4 image of what QEMU needs, and of the newest kernel.
//!
//! Made once a tree, beside it, from links to the tree's own files, by the tree's own mke2fs; no mount and no root is needed. Guests get it read-only,
//! so many may have it at once. [`Kit::seen_at`] is the kit as such a guest sees it. Not here: attaching it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::Kit;
use super::tree;

/// Counts what the image is made of: raise it when that changes.
const CONTENTS: u32 = 1;
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// Files of the tree; of a folder, all that is in it.
const PARTS: [&str; 5] =
    ["usr/bin/qemu-system-x86_64", "usr/lib64", "usr/lib/x86_64-linux-gnu/qemu", "usr/share/qemu", "usr/share/seabios"];
/// Room beside the files: inodes, tables, and each file's last block.
const SPARE: u64 = 32 << 20;

impl Kit {
    /// The image; made first if it is not there. Blocks: a few seconds and 200 MB, once. Says so on stderr.
    ///
    /// # Errors
    /// When it cannot be made; the next call starts over.
    pub fn image(&self) -> Result<PathBuf> {
        let image = self.root.with_file_name(format!("qemu-{CONTENTS}.ext4"));
        if image.exists() {
            return Ok(image);
        }
        let _lock = tree::lock(&tree::cache_dir()?, "kit")?;
        if image.exists() {
            return Ok(image);
        }
        eprintln!("kit: making an image of QEMU, for guests in guests");
        let stage = image.with_extension("stage");
        let partial = image.with_extension("part");
        // Under the lock, whatever lies here was left by a run that did not end.
        tree::remove(&stage)?;
        let size = self.stage(&stage)?;
        let made = self.make_image(&stage, &partial, size + size / 8 + SPARE);
        tree::remove(&stage)?;
        made?;
        fs::rename(&partial, &image).with_context(|| format!("Cannot rename to {}", image.display()))?;
        Ok(image)
    }

    /// The same kit where a guest has mounted the image at `root`: with the newest kernel, and the tree's QEMU.
    ///
    /// # Errors
    /// When the tree's QEMU is too old.
    pub fn seen_at(&self, root: &Path) -> Result<Self> {
        Self::of_tree(root.to_owned(), self.stamp.clone())
    }

    /// Links what goes into the image into `stage`; gives its size in bytes.
    fn stage(&self, stage: &Path) -> Result<u64> {
        let mut size = 0;
        for part in PARTS {
            size += link_all(&self.root.join(part), &stage.join(part))?;
        }
        let libraries = self.root.join(LIBRARIES);
        for entry in fs::read_dir(&libraries).with_context(|| format!("Cannot list {}", libraries.display()))? {
            let name = entry.context("Cannot list the kit's libraries")?.file_name();
            if !libraries.join(&name).is_dir() {
                size += link_all(&libraries.join(&name), &stage.join(LIBRARIES).join(&name))?;
            }
        }
        let kernel = Path::new("usr/lib/modules").join(&self.stamp.kernel_release).join("vmlinuz");
        Ok(size + link_all(&self.root.join(&kernel), &stage.join(&kernel))?)
    }

    fn make_image(&self, from: &Path, image: &Path, size: u64) -> Result<()> {
        let mut command = self.program("usr/sbin/mke2fs", "mke2fs");
        command.env("MKE2FS_CONFIG", self.root.join("etc/mke2fs.conf"));
        command.args(["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-L", "kit", "-d"]);
        let output = command.arg(from).arg(image).arg(format!("{}k", size / 1024)).output();
        let output = output.context("Cannot run the kit's mke2fs")?;
        if !output.status.success() {
            bail!(
                "mke2fs could not make {} ({}): {}",
                image.display(),
                output.status,
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(())
    }
}

/// Links a file, or all that is in a folder; gives the sum of sizes.
fn link_all(from: &Path, to: &Path) -> Result<u64> {
    let place = || format!("Cannot link {}", from.display());
    let facts = from.symlink_metadata().with_context(place)?;
    if !facts.is_dir() {
        let parent = to.parent().with_context(place)?;
        fs::create_dir_all(parent).with_context(place)?;
        fs::hard_link(from, to).with_context(place)?;
        return Ok(facts.len());
    }
    let mut size = 0;
    for entry in fs::read_dir(from).with_context(place)? {
        let name = entry.with_context(place)?.file_name();
        size += link_all(&from.join(&name), &to.join(&name))?;
    }
    Ok(size)
}
