//! Kernel modules: building one out of tree with the kit's compiler, checking it with sparse, and finding the kernel's own.
//!
//! Sources are copied into a private folder of the tree, made there, and the folder is removed, so the checkout stays clean and
//! builds do not meet. Warnings are failures. Nothing here loads a module.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};

use super::Kit;
use super::tree;

/// No complaint: older kernels say it where there is no vmlinux, as beside any headers.
const NO_BTF: &str = "Skipping BTF generation for ";

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A module of the kernel, unpacked and ready to be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelModule {
    /// Its file name without `.ko`.
    pub name: String,
    /// The unpacked `.ko`.
    pub path: PathBuf,
}

/// A folder inside the tree that goes away with this value.
struct Workshop {
    path: PathBuf,
    name: String,
}

impl Workshop {
    fn new(kit: &Kit) -> Result<Self> {
        let name = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = kit.root.join("build").join(&name);
        fs::create_dir_all(&path).with_context(|| format!("Cannot create {}", path.display()))?;
        Ok(Self { path, name })
    }
}

impl Drop for Workshop {
    fn drop(&mut self) {
        // A leftover folder costs some disk and nothing else.
        let _ = fs::remove_dir_all(&self.path);
    }
}

impl Kit {
    /// Builds the module in `source` with W=1 and puts its `.ko` files into `out`; gives their paths. `beside` are folders that the
    /// module reaches by `../NAME` (headers): each is copied next to it under its own name. Blocks for about 2 s.
    ///
    /// # Errors
    /// When the compiler or modpost says anything at all, an error or a warning; the message has its words.
    pub fn build_module(&self, source: &Path, beside: &[&Path], out: &Path) -> Result<Vec<PathBuf>> {
        let shop = Workshop::new(self)?;
        self.make(&shop, source, beside, &[])?;
        fs::create_dir_all(out).with_context(|| format!("Cannot create {}", out.display()))?;
        let mut built = Vec::new();
        for file in files_of(&shop.path.join(base_name(source)?))? {
            if file.extension().is_some_and(|kind| kind == "ko") {
                let target = out.join(base_name(&file)?);
                fs::copy(&file, &target).with_context(|| format!("Cannot write {}", target.display()))?;
                built.push(target);
            }
        }
        if built.is_empty() {
            bail!("{} made no .ko; does its Kbuild name one in obj-m?", source.display());
        }
        Ok(built)
    }

    /// Runs sparse over the module in `source` (`beside` as in [`Kit::build_module`]). Blocks for about 3 s.
    ///
    /// # Errors
    /// When sparse or the compiler finds anything; the message has the findings.
    pub fn sparse(&self, source: &Path, beside: &[&Path]) -> Result<()> {
        let shop = Workshop::new(self)?;
        self.make(&shop, source, beside, &["C=2", "CHECK=kernel-sparse"])
    }

    /// The kernel's own modules `names` (either of `-` and `_` will do) and what they depend on, in the order to load them. Names that
    /// are built into the kernel are left out. Files are unpacked into the kit once.
    ///
    /// # Errors
    /// When the kernel has no such module, built in or not.
    pub fn kernel_modules(&self, names: &[&str]) -> Result<Vec<KernelModule>> {
        let dir = self.modules_dir();
        let read = |file: &str| {
            fs::read_to_string(dir.join(file)).with_context(|| format!("Cannot read {file} of {}", dir.display()))
        };
        let (depends, builtin) = (read("modules.dep")?, read("modules.builtin")?);
        let mut modules: Vec<KernelModule> = Vec::new();
        for name in names {
            let Some(line) =
                depends.lines().find(|line| line.split(':').next().is_some_and(|path| is_module(path, name)))
            else {
                if builtin.lines().any(|path| is_module(path, name)) {
                    continue;
                }
                bail!("Linux {} has no module {name}", self.kernel_release());
            };
            // modules.dep has the module, then what it needs, the deepest last.
            for path in line.split([':', ' ']).rev().filter(|path| !path.is_empty()) {
                let name = module_name(path);
                if modules.iter().all(|module| module.name != name) {
                    let path = self.unpack_module(&dir.join(path), &name)?;
                    modules.push(KernelModule { name, path });
                }
            }
        }
        Ok(modules)
    }

    fn unpack_module(&self, packed: &Path, name: &str) -> Result<PathBuf> {
        if packed.extension().is_some_and(|kind| kind == "ko") {
            return Ok(packed.to_owned());
        }
        let folder = self.root.join("ko").join(self.kernel_release());
        let target = folder.join(format!("{name}.ko"));
        if target.exists() {
            return Ok(target);
        }
        let mut command = self.program("usr/bin/xz", "xz");
        let output =
            command.args(["--decompress", "--stdout"]).arg(packed).output().context("Cannot run the kit's xz")?;
        if !output.status.success() {
            bail!("Cannot unpack {}: {}", packed.display(), String::from_utf8_lossy(&output.stderr).trim());
        }
        let place = || format!("Cannot write {}", target.display());
        fs::create_dir_all(&folder).with_context(place)?;
        let partial = target.with_extension(format!("{}.part", std::process::id()));
        fs::write(&partial, &output.stdout).with_context(place)?;
        fs::rename(&partial, &target).with_context(place)?;
        Ok(target)
    }

    fn make(&self, shop: &Workshop, source: &Path, beside: &[&Path], words: &[&str]) -> Result<()> {
        let name = base_name(source)?;
        for dir in beside.iter().chain([&source]) {
            copy_sources(dir, &shop.path.join(base_name(dir)?))?;
        }
        let mut command = tree::inside(&self.root);
        command
            .args(["make", "-s", "-C"])
            .arg(format!("/usr/lib/modules/{}/build", self.kernel_release()))
            .arg(format!("M=/build/{}/{name}", shop.name))
            .args(["W=1", "modules"])
            .args(words);
        if self.is_debug() {
            // That kernel was built without pahole, and complains of any.
            command.arg("PAHOLE=none");
        }
        let output = command.output().context("Cannot enter the kit's tree")?;
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().filter(|line| !line.starts_with(NO_BTF)).collect::<Vec<_>>().join("\n");
        let said = said.trim();
        if !output.status.success() || !said.is_empty() {
            bail!("Building {} for Linux {} ({}):\n{said}", source.display(), self.kernel_release(), output.status);
        }
        Ok(())
    }
}

/// Copies what a build reads: sources, headers and makefiles, in folders of any depth; not what a build makes.
fn copy_sources(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("Cannot create {}", to.display()))?;
    for path in files_of(from)? {
        let name = base_name(&path)?;
        let target = to.join(name);
        let kind = path.extension().and_then(|kind| kind.to_str()).unwrap_or_default();
        if path.is_dir() {
            if name != "target" {
                copy_sources(&path, &target)?;
            }
        } else if matches!(kind, "c" | "h" | "S" | "mk") || matches!(name, "Kbuild" | "Makefile" | "Kconfig") {
            fs::copy(&path, &target).with_context(|| format!("Cannot copy {}", path.display()))?;
        }
    }
    Ok(())
}

fn files_of(dir: &Path) -> Result<Vec<PathBuf>> {
    let place = || format!("Cannot list {}", dir.display());
    let entries = fs::read_dir(dir).with_context(place)?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>().with_context(place)?;
    paths.sort();
    Ok(paths)
}

fn base_name(path: &Path) -> Result<&str> {
    path.file_name().and_then(|name| name.to_str()).with_context(|| format!("{} has no file name", path.display()))
}

/// `kernel/drivers/vfio/vfio-pci.ko.xz` is `vfio-pci`.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).to_owned()
}

fn is_module(path: &str, name: &str) -> bool {
    module_name(path).replace('-', "_") == name.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dashes_and_underscores_name_the_same_module() {
        assert!(is_module("kernel/drivers/vfio/pci/vfio-pci-core.ko.xz", "vfio_pci_core"));
        assert!(is_module("kernel/drivers/virtio/virtio_pci.ko", "virtio-pci"));
        assert!(!is_module("kernel/drivers/vfio/vfio.ko.xz", "vfio_pci"));
    }

    #[test]
    fn only_sources_are_copied() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        fs::create_dir_all(from.join("sub")).unwrap();
        for file in ["a.c", "Kbuild", "old.ko", "a.o", "sub/b.h", "notes.txt"] {
            fs::write(from.join(file), "").unwrap();
        }
        let to = dir.path().join("to");
        copy_sources(&from, &to).unwrap();
        let there = |file: &str| to.join(file).exists();
        assert!(there("a.c") && there("Kbuild") && there("sub/b.h"));
        assert!(!there("old.ko") && !there("a.o") && !there("notes.txt"));
    }
}
