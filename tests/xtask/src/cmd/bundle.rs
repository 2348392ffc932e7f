//! `cargo xtask bundle`: the demo's first act, for a machine that has nothing of ours.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use xtask::demo::bundle::Bundle;
use xtask::kit::Kit;

/// Pack what the demo's first act needs for a machine without cargo, kit and network; there, `DIR/xtask demo --bundle DIR --act 1` plays it
///
/// The machine must be an x86-64 whose C library is not older than this one's; a guest runs there under KVM if it can, else under QEMU's translator.
#[derive(Debug, Args)]
pub(crate) struct BundleArgs {
    /// A new folder, or a file to write if its name ends in .tar.xz
    #[arg(long, value_name = "DIR_OR_FILE")]
    out: PathBuf,
}

pub(crate) fn run(args: &BundleArgs) -> Result<()> {
    let out = &args.out;
    let is_archive = out.to_string_lossy().ends_with(".tar.xz");
    let bundle = Bundle::build(&Kit::ensure()?)?;
    if !is_archive {
        bundle.pack(out)?;
        println!("{}: {:.1} MB", out.display(), megabytes(size(out)?));
        return Ok(());
    }
    let dir = tempfile::tempdir().context("Cannot create a temporary folder")?;
    bundle.pack(dir.path())?;
    let whole = megabytes(size(dir.path())?);
    eprintln!("compressing {whole:.1} MB");
    bundle.kit.compress(dir.path(), out)?;
    println!("{}: {:.1} MB, unpacked {whole:.1} MB", out.display(), megabytes(size(out)?));
    Ok(())
}

/// Bytes of a file, or of all files in a folder.
fn size(path: &Path) -> Result<u64> {
    let place = || format!("Cannot look at {}", path.display());
    if !path.is_dir() {
        return Ok(path.metadata().with_context(place)?.len());
    }
    fs::read_dir(path).with_context(place)?.map(|entry| size(&entry.with_context(place)?.path())).sum()
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
