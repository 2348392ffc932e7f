//! Kernels beside the kit's own: older ones of Debian, for the module and for guests, and the debug kernel.
//!
//! Each is put into the kit's tree under its release, where the paths of two never meet, and its stamp is written last: an unpacking that was
//! interrupted is done again. A [`Kit`] with another kernel is the same kit in everything else. Nothing here knows the device.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::Kit;
use super::apt::Apt;
use super::debug;
use super::mirror::Archive;
use super::tree;

/// Which kernel a guest runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// The kit's own.
    Newest,
    /// Debian 13's.
    V6_12,
    /// Debian 12's.
    V6_1,
    /// The newest, built here with every check that it has.
    Debug,
}

/// Where an older kernel comes from.
struct Origin {
    suite: &'static str,
    /// What its compiler needs, where the kit's own is not the one it was built with.
    compiler: &'static [&'static str],
}

/// What is in the tree of one kernel.
#[derive(Debug, Serialize, Deserialize)]
struct Stamp {
    release: String,
    /// Of the debug kernel: the configuration it was built with.
    #[serde(default)]
    config: String,
}

/// Packages that bring a kernel and its headers, whatever its release.
const META: [&str; 2] = ["linux-headers-cloud-amd64", "linux-image-cloud-amd64"];
/// Of what those need, names that begin so are fetched too; the kit has the rest.
const PARTS: [&str; 5] = ["linux-headers-", "linux-kbuild-", "linux-image-", "linux-binary-", "linux-modules-"];

impl Kernel {
    /// All of them, the newest first.
    pub const ALL: [Self; 4] = [Self::Newest, Self::V6_12, Self::V6_1, Self::Debug];

    /// Its name on a command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Newest => "newest",
            Self::V6_12 => "6.12",
            Self::V6_1 => "6.1",
            Self::Debug => "debug",
        }
    }

    fn origin(self) -> Option<Origin> {
        match self {
            Self::Newest | Self::Debug => None,
            Self::V6_12 => Some(Origin { suite: "trixie", compiler: &[] }),
            Self::V6_1 => Some(Origin { suite: "bookworm", compiler: &["gcc-12", "cpp-12", "libgcc-12-dev"] }),
        }
    }
}

impl FromStr for Kernel {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|kernel| kernel.name() == name).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|kernel| kernel.name()).collect();
            format!("there are: {}", names.join(", "))
        })
    }
}

impl Kit {
    /// The same kit with another kernel, which is brought into the tree if it is not there yet: about 10 s and 50 to 90 MB, for the debug
    /// kernel a quarter of an hour on two processors and 250 MB. Says what it does on stderr.
    ///
    /// # Errors
    /// [`super::NotToBeHad`] when the archive does not give an older kernel; else when a step fails, and the next call starts over.
    pub fn with_kernel(&self, kernel: Kernel) -> Result<Self> {
        if kernel == Kernel::Newest {
            return Ok(Self { kernel: self.stamp.kernel_release.clone(), ..self.clone() });
        }
        let config = if kernel == Kernel::Debug { debug::CONFIG } else { "" };
        let file = stamps(&self.root)?.join(format!("{}.json", kernel.name()));
        let found = || read_stamp(&file).filter(|stamp| stamp.config == config);
        let with = |stamp: Stamp| Self { kernel: stamp.release, ..self.clone() };
        if let Some(stamp) = found() {
            return Ok(with(stamp));
        }
        let _lock = tree::lock(&tree::cache_dir()?, "kit")?;
        if let Some(stamp) = found() {
            return Ok(with(stamp));
        }
        let release = match kernel.origin() {
            Some(origin) => {
                eprintln!("kit: fetching Linux {} of {}", kernel.name(), origin.suite);
                fetch(&self.root, &origin)?
            }
            None => debug::build(self)?,
        };
        let stamp = Stamp { release, config: config.to_owned() };
        write_stamp(&file, &stamp)?;
        Ok(with(stamp))
    }

    /// Whether the kernel is the debug kernel.
    #[must_use]
    pub fn is_debug(&self) -> bool {
        self.kernel.ends_with(debug::SUFFIX)
    }

    /// What the kernel is called beside others: the first two numbers of its release (`7.3`), or `debug`.
    #[must_use]
    pub fn kernel_name(&self) -> String {
        if self.is_debug() { "debug".to_owned() } else { line(&self.kernel) }
    }

    /// The first two numbers of the newest kernel's release.
    pub(super) fn newest_line(&self) -> String {
        line(&self.stamp.kernel_release)
    }
}

fn line(release: &str) -> String {
    release.splitn(3, '.').take(2).collect::<Vec<_>>().join(".")
}

/// The folder of the kernels' stamps, beside the tree.
fn stamps(root: &Path) -> Result<PathBuf> {
    let dir = root.with_file_name("kernels");
    fs::create_dir_all(&dir).with_context(|| format!("Cannot create {}", dir.display()))?;
    Ok(dir)
}

fn read_stamp(file: &Path) -> Option<Stamp> {
    serde_json::from_slice(&fs::read(file).ok()?).ok()
}

fn write_stamp(file: &Path, stamp: &Stamp) -> Result<()> {
    let text = serde_json::to_vec_pretty(stamp).context("Cannot write the stamp")?;
    let partial = file.with_extension("part");
    fs::write(&partial, text).and_then(|()| fs::rename(&partial, file)).context("Cannot write the stamp")
}

/// Puts the kernel, its headers and its compiler into the tree; gives its release.
fn fetch(root: &Path, origin: &Origin) -> Result<String> {
    let apt = Apt::of(&Archive::of_this_machine()?, origin.suite)?;
    let mut packages: Vec<String> = Vec::new();
    let mut open: VecDeque<String> = META.iter().map(|name| (*name).to_owned()).collect();
    while let Some(package) = open.pop_front() {
        let needs = apt.depends(&package)?;
        let parts = needs.into_iter().filter(|name| PARTS.iter().any(|part| name.starts_with(part)));
        open.extend(parts.filter(|name| !packages.contains(name)));
        if !META.contains(&package.as_str()) && !packages.contains(&package) {
            packages.push(package);
        }
    }
    let release = release_of(&packages)?;
    packages.extend(origin.compiler.iter().map(|name| (*name).to_owned()));
    apt.unpack(&packages, root)?;
    let image = root.join(format!("boot/vmlinuz-{release}"));
    let modules = root.join("usr/lib/modules").join(&release);
    if image.exists() {
        fs::rename(&image, modules.join("vmlinuz")).context("Cannot move the kernel's image")?;
    }
    tree::depmod(root, &release)?;
    Ok(release)
}

/// The release that the headers are for: `linux-headers-6.12.9-cloud-amd64` are for `6.12.9-cloud-amd64`.
fn release_of(packages: &[String]) -> Result<String> {
    let mut releases = packages
        .iter()
        .filter_map(|name| name.strip_prefix("linux-headers-").filter(|rest| rest.ends_with("-cloud-amd64")));
    match (releases.next(), releases.next()) {
        (Some(release), None) => Ok(release.to_owned()),
        _ => bail!("Expected the headers of one kernel in {packages:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_read_from_the_one_headers_package_of_a_machine() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let good = names(&["linux-headers-6.1.0-50-common", "linux-headers-6.1.0-50-cloud-amd64", "linux-kbuild-6.1"]);
        assert_eq!(release_of(&good).unwrap(), "6.1.0-50-cloud-amd64");
        assert!(release_of(&names(&["linux-kbuild-6.1"])).is_err());
        assert!(release_of(&names(&["linux-headers-1-cloud-amd64", "linux-headers-2-cloud-amd64"])).is_err());
    }

    #[test]
    fn every_kernel_is_found_by_its_name() {
        for kernel in Kernel::ALL {
            assert_eq!(kernel.name().parse(), Ok(kernel));
        }
        assert!("5.10".parse::<Kernel>().unwrap_err().contains("6.12"));
    }
}
