//! `cargo xtask mutate`: break the protection on purpose, and see the demo fail.
//!
//! Each [`Mutation`] replaces one piece of source in a copy of the tree; the scenario then runs without a VM and must have a row that is not as
//! expected. A mutation that goes unnoticed is a hole in the scenario. A piece of source that is not found means that the code has moved on, and so
//! must the list.
//!
//! Not here: the list.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use tempfile::TempDir;
use xtask::demo::programs::{Programs, target_dir};
use xtask::demo::{self, Acts, WITHOUT_VM};

use super::mutations::{MUTATIONS, Mutation};
use super::{Steps, checkout};

/// Builds soonest, again and again.
const PROFILE: &str = "dev";

/// Break the protection in some thirty ways, one at a time, and demand that `demo --no-vm` fails for each
#[derive(Debug, Args)]
pub(crate) struct MutateArgs {
    /// Try only mutations with this in their name
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
    /// List the mutations and do no more
    #[arg(long)]
    list: bool,
}

pub(crate) fn run(args: &MutateArgs) -> Result<()> {
    if args.list {
        for mutation in MUTATIONS {
            println!("{:<60} {}", mutation.name, mutation.file);
        }
        return Ok(());
    }
    let tree = TempDir::with_prefix("peergate-mutate-").context("Cannot create a temporary folder")?;
    copy_tree(tree.path())?;
    let target = target_dir().join("mutate");
    eprintln!("building the tree as it is");
    let programs = Programs::build_at(tree.path(), &target, PROFILE, WITHOUT_VM)?;
    let sound = demo::play(&programs, Acts::Both, None, &mut |_| {})?.failed();
    ensure!(sound == 0, "The scenario fails without any mutation: {sound} rows; see cargo xtask demo --no-vm");
    let mut steps = Steps::only(args.only.clone());
    for mutation in MUTATIONS {
        steps.run(mutation.name, || mutation.apply(tree.path(), &target));
    }
    steps.finish()
}

impl Mutation {
    /// Runs the scenario on the mutated tree, and puts the tree back as it was.
    fn apply(&self, tree: &Path, target: &Path) -> Result<()> {
        let file = tree.join(self.file);
        let original = fs::read_to_string(&file).with_context(|| format!("Cannot read {}", self.file))?;
        fs::write(&file, self.applied(&original)?).context("Cannot write the mutation")?;
        let verdict =
            Programs::build_at(tree, target, PROFILE, &["vmm_daemon"]).map(|programs| Self::verdict(&programs));
        fs::write(&file, original).context("Cannot take the mutation back")?;
        match verdict? {
            Some(noticed) => {
                eprintln!("    noticed: {noticed}");
                Ok(())
            }
            None => bail!("Every row is as expected: the scenario does not notice"),
        }
    }

    /// The first sign that something is wrong, in the first act or else in the second.
    fn verdict(programs: &Programs) -> Option<String> {
        [Acts::First, Acts::Second].into_iter().find_map(|act| match demo::play(programs, act, None, &mut |_| {}) {
            Ok(rows) => {
                let failed = rows.failed();
                let row = rows.all().iter().find(|row| !row.ok)?;
                Some(format!("{}, {failed} rows in all", row.name))
            }
            Err(error) => error.root_cause().to_string().lines().next().map(str::to_owned),
        })
    }
}

/// Copies what git knows or would know of the checkout.
fn copy_tree(to: &Path) -> Result<()> {
    let from = checkout();
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(&from)
        .output()
        .context("Cannot run git")?;
    ensure!(output.status.success(), "git ls-files failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    for name in output.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let name = PathBuf::from(String::from_utf8_lossy(name).into_owned());
        let (source, copy) = (from.join(&name), to.join(&name));
        if !source.is_file() {
            continue;
        }
        if let Some(parent) = copy.parent() {
            fs::create_dir_all(parent).with_context(|| format!("Cannot create {}", parent.display()))?;
        }
        fs::copy(&source, &copy).with_context(|| format!("Cannot copy {}", name.display()))?;
    }
    Ok(())
}
