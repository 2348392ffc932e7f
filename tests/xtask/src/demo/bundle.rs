//! What guests of a play need: the kit, the programs and the driver. Built here, or packed here for a machine without cargo and network.
//!
//! A packed bundle is one folder: the programs, `xtask` among them, `peergate.ko`, and a small kit ([`Kit::pack`]). `xtask demo --bundle DIR` plays
//! from it. Not here: the second act's driver that lies, which only the whole kit can build.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::guest;
use super::programs::Programs;
use crate::kit::Kit;
use crate::kit::pack::copy;

const MODULE: &str = "peergate.ko";
/// Programs of a packed bundle.
const PROGRAMS: [&str; 5] = ["xtask", "peergated", "peergate", "pgctl", "pgctl-no-vm"];

/// What guests need.
#[derive(Debug, Clone)]
pub struct Bundle {
    /// QEMU, and the guest's kernel.
    pub kit: Kit,
    /// The daemon, and what runs in the guest.
    pub programs: Programs,
    /// The driver.
    pub module: PathBuf,
}

impl Bundle {
    /// Builds what is built from the checkout.
    ///
    /// # Errors
    /// When something does not build.
    pub fn build(kit: &Kit) -> Result<Self> {
        let programs = Programs::build(&["vmm_daemon", "pgctl"])?;
        let module = programs.module(kit)?;
        Ok(Self { kit: kit.clone(), programs, module })
    }

    /// Takes it from a folder that [`Bundle::pack`] filled.
    ///
    /// # Errors
    /// When there is none.
    pub fn open(dir: &Path) -> Result<Self> {
        let place = || format!("There is no bundle in {}; `cargo xtask bundle` makes one", dir.display());
        let dir = dir.canonicalize().with_context(place)?;
        let kit = Kit::packed_in(&dir)?.with_context(place)?;
        let module = dir.join(MODULE);
        Ok(Self { kit, programs: Programs::at(dir), module })
    }

    /// Copies it, and the programs that play it, into a folder, which is made or must be empty.
    ///
    /// # Errors
    /// When the folder has something in it, a program does not build or a file cannot be copied.
    pub fn pack(&self, dir: &Path) -> Result<()> {
        let place = || format!("Cannot make {}", dir.display());
        fs::create_dir_all(dir).with_context(place)?;
        ensure!(
            fs::read_dir(dir).with_context(place)?.next().is_none(),
            "{} is not empty; name a new folder",
            dir.display()
        );
        let programs = Programs::build(&["xtask", "e2e"])?;
        for name in PROGRAMS {
            copy(&programs.path(name), &dir.join(name))?;
        }
        copy(&self.module, &dir.join(MODULE))?;
        self.kit.pack(&guest::MODULES, dir)
    }
}
