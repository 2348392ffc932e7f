//! `cargo xtask mutate`: break the protection on purpose, and see the demo fail.
//!
//! Each [`Mutation`] replaces one piece of source in a copy of the tree; the scenario then runs without a VM and must have a row that is not as
//! expected, or the kill test must fail, or one that breaks simulated devices, models of PCI functions or a driver without a GPU. A mutation that
//! goes unnoticed is a hole in them. A piece of source that is not found means that the code has moved on, and so must the list.
//!
//! Not here: the list.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use tempfile::TempDir;
use xtask::demo::programs::{Programs, target_dir};
use xtask::demo::{self, Acts, Setting, WITHOUT_VM};

use super::mutations::{CUDA, FUNCTIONS, LOSSES, MUTATIONS, Mutation, PROOFS};
use super::{Steps, cargo, checkout};

/// Builds soonest, again and again.
const PROFILE: &str = "dev";
/// Stays as it is: it is the guest's side.
const FRONT_END: &str = "e2e";
/// The test that kills workers at random, and how often it does.
const KILL_TEST: &str = "a_worker_may_die_at_any_moment";
const KILLS: &str = "12";

/// Break the protection in some eighty ways, one at a time, and demand that `demo --no-vm`, the kill test or the tests of proofs, of PCI functions or of GPUs notice each
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
        for mutation in [MUTATIONS, LOSSES, PROOFS, FUNCTIONS, CUDA].into_iter().flatten() {
            println!("{:<60} {}", mutation.name, mutation.file);
        }
        return Ok(());
    }
    let tree = TempDir::with_prefix("peergate-mutate-").context("Cannot create a temporary folder")?;
    copy_tree(tree.path())?;
    let target = target_dir().join("mutate");
    let mut steps = Steps::only(args.only.clone());
    let lists: [(&[Mutation], Judge, &[&str]); 5] = [
        (MUTATIONS, scenario, WITHOUT_VM),
        (LOSSES, kill_test, WITHOUT_VM),
        (PROOFS, proof_tests, &["vmm_daemon"]),
        (FUNCTIONS, function_tests, &["vmm_daemon"]),
        (CUDA, gpu_tests, &["hw_cuda", "vdev_device"]),
    ];
    for (mutations, judge, packages) in lists {
        if !mutations.iter().any(|mutation| mutation.name.contains(&args.only)) {
            continue;
        }
        eprintln!("building {} as they are", packages.join(", "));
        let programs = Programs::build_at(tree.path(), &target, PROFILE, packages)?;
        let sound = judge(&programs, tree.path(), &target);
        ensure!(sound.is_none(), "Something is wrong without any mutation: {}", sound.unwrap_or_default());
        let broken: Vec<_> = packages.iter().copied().filter(|package| *package != FRONT_END).collect();
        for mutation in mutations {
            steps.run(mutation.name, || mutation.apply(tree.path(), &target, &broken, judge));
        }
    }
    steps.finish()
}

impl Mutation {
    /// Judges the mutated tree, and puts the tree back as it was.
    fn apply(&self, tree: &Path, target: &Path, packages: &[&str], judge: Judge) -> Result<()> {
        let file = tree.join(self.file);
        let original = fs::read_to_string(&file).with_context(|| format!("Cannot read {}", self.file))?;
        fs::write(&file, self.applied(&original)?).context("Cannot write the mutation")?;
        let verdict =
            Programs::build_at(tree, target, PROFILE, packages).map(|programs| judge(&programs, tree, target));
        fs::write(&file, original).context("Cannot take the mutation back")?;
        match verdict? {
            Some(noticed) => {
                eprintln!("    noticed: {noticed}");
                Ok(())
            }
            None => bail!("Nothing is wrong: the mutation is not noticed"),
        }
    }
}

/// The first sign that something is wrong, if there is one: with these programs, of this tree and in this target directory.
type Judge = fn(&Programs, &Path, &Path) -> Option<String>;

/// The demo without a VM: its first act or else its second.
fn scenario(programs: &Programs, _tree: &Path, _target: &Path) -> Option<String> {
    let setting = Setting::default();
    [Acts::First, Acts::Second].into_iter().find_map(|act| match demo::play(programs, act, &setting, &mut |_| {}) {
        Ok(rows) => {
            let failed = rows.failed();
            let row = rows.all().iter().find(|row| !row.ok)?;
            Some(format!("{}, {failed} rows in all", row.name))
        }
        Err(error) => error.root_cause().to_string().lines().next().map(str::to_owned),
    })
}

/// A few rounds of the kill test.
fn kill_test(programs: &Programs, tree: &Path, target: &Path) -> Option<String> {
    let mut command = cargo(&["test", "--quiet", "--package", "e2e", "--test", "kill", KILL_TEST]);
    command.current_dir(tree).env("CARGO_TARGET_DIR", target);
    command.env("PEERGATE_BIN_DIR", programs.dir()).env("PEERGATE_KILL_ROUNDS", KILLS);
    let output = match command.output() {
        Ok(output) if output.status.success() => return None,
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        Err(error) => return Some(format!("Cannot run the kill test: {error}")),
    };
    let told = output.lines().find(|line| line.starts_with("Error: "));
    Some(told.map_or_else(|| "the kill test fails".to_owned(), |line| line.trim_start_matches("Error: ").to_owned()))
}

/// The tests of what proves two endpoints to be peers, and of what becomes of those that are none.
fn proof_tests(_programs: &Programs, tree: &Path, target: &Path) -> Option<String> {
    let tests: [&[&str]; 5] = [
        &["hw_engine", "--test", "proof"],
        &["hw_sim", "--test", "sim", "proof"],
        &["vdev_device", "--test", "control", "proof"],
        &["vmm_daemon", "--lib", "prove"],
        &["vmm_daemon", "--test", "process", "proof"],
    ];
    first_failure(&tests, tree, target)
}

/// The tests of what drives PCI functions and gives them away, none of which has one.
fn function_tests(_programs: &Programs, tree: &Path, target: &Path) -> Option<String> {
    let tests: [&[&str]; 6] = [
        &["hw_engine", "--lib"],
        &["vmm_broker", "--lib"],
        &["vmm_daemon", "--lib", "broker::"],
        &["vmm_daemon", "--test", "config"],
        &["hw_vfio", "--lib"],
        &["hw_vfio", "--test", "model"],
    ];
    first_failure(&tests, tree, target)
}

/// The tests of what drives GPUs, none of which has one, and of the device with engines that gather what they get.
fn gpu_tests(_programs: &Programs, tree: &Path, target: &Path) -> Option<String> {
    let tests: [&[&str]; 3] = [
        &["hw_engine", "--lib"],
        &[
            "vdev_device",
            "--test",
            "turns",
            "--test",
            "work",
            "--test",
            "atomics",
            "--test",
            "streams",
            "--test",
            "pause",
        ],
        &["hw_cuda", "--test", "transfers", "--test", "slices", "--test", "registration", "--test", "failure"],
    ];
    first_failure(&tests, tree, target)
}

/// The first test that fails among those of these packages.
fn first_failure(tests: &[&[&str]], tree: &Path, target: &Path) -> Option<String> {
    tests.iter().find_map(|test| {
        let mut command = cargo(&["test", "--quiet", "--package"]);
        command.args(*test).current_dir(tree).env("CARGO_TARGET_DIR", target);
        match command.output() {
            Ok(output) if output.status.success() => None,
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stdout).into_owned();
                let failed = said.lines().find_map(|line| line.strip_suffix(" stdout ----")?.strip_prefix("---- "));
                Some(failed.map_or_else(|| format!("the tests of {} fail", test[0]), str::to_owned))
            }
            Err(error) => Some(format!("Cannot run the tests: {error}")),
        }
    })
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
