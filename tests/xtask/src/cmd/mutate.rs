//! `cargo xtask mutate`: break the protection on purpose, and see the demo fail.
//!
//! Each [`Mutation`] replaces one piece of source in a copy of the tree; the scenario then runs without a VM and must have a row that is not as
//! expected. A mutation that goes unnoticed is a hole in the scenario. A piece of source that is not found means that the code has moved on, and so
//! must the list.
//!
//! Not here: mutations of code that protects nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use tempfile::TempDir;
use xtask::demo::programs::{Programs, target_dir};
use xtask::demo::{self, Acts, WITHOUT_VM};

use super::{Steps, checkout};

/// Break the protection in a dozen ways, one at a time, and demand that `demo --no-vm` fails for each
#[derive(Debug, Args)]
pub(crate) struct MutateArgs {
    /// Try only mutations with this in their name
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
    /// List the mutations and do no more
    #[arg(long)]
    list: bool,
}

/// One thing done wrong.
struct Mutation {
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
}

const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "rights: a mapping allows everything",
        file: "iommu/addr/src/access.rs",
        from: "(self.read || !want.read) && (self.write || !want.write)",
        to: "(self.read || !want.read) && (self.write || !want.write) || !want.is_none()",
    },
    Mutation {
        name: "bounds: a mapping reaches a page too far",
        file: "iommu/core/src/map.rs",
        from: "let Some(range) = Range::with_len(at, run.len) else { break };",
        to: "let Some(range) = Range::with_len(at, run.len.saturating_add(PAGE_SIZE)) else { break };",
    },
    Mutation {
        name: "peer: no right is needed",
        file: "iommu/core/src/pins.rs",
        from: "if owner == self.accessor {",
        to: "if owner == self.accessor || want != Access::NONE {",
    },
    Mutation {
        name: "peer: a right one way is one both ways",
        file: "iommu/core/src/peers.rs",
        from: "let read = self.row(accessor)",
        to: "let (accessor, owner) = (accessor.min(owner), accessor.max(owner));\n        let read = self.row(accessor)",
    },
    Mutation {
        name: "endpoint: an unknown one counts as the first",
        file: "iommu/core/src/peers.rs",
        from: "self.tenant.endpoints.iter().position(|known| *known == endpoint)",
        to: "self.tenant.endpoints.iter().position(|known| *known == endpoint).or(Some(0))",
    },
    Mutation {
        name: "generation: a freed handle can be that of the next buffer",
        file: "vdev/device/src/buffers.rs",
        from: "place.generation = next;",
        to: "place.generation = next.min(place.generation);",
    },
    Mutation {
        name: "domain: any process may free any buffer",
        file: "vdev/device/src/buffers.rs",
        from: ".filter(|place| place.owner == domain).ok_or(missing)?;",
        to: ".filter(|place| place.owner == domain || domain != 0).ok_or(missing)?;",
    },
    Mutation {
        name: "domain: all processes share one address space",
        file: "iommu/core/src/domain.rs",
        from: "            serial,\n",
        to: "            serial: serial.min(1),\n",
    },
    Mutation {
        name: "pin: UNMAP does not wait",
        file: "iommu/core/src/word.rs",
        from: "before & PINS == 0 && self.claim(before | CLOSED | DRAINING)",
        to: "self.claim(before | CLOSED | DRAINING)",
    },
    Mutation {
        name: "pin: UNMAP does not refuse new use",
        file: "iommu/core/src/word.rs",
        from: "if before & !COUNTED == u64::from(generation) << GENERATION_SHIFT { Pin::Held } else { self.take_back() }",
        to: "if before & !COUNTED != u64::MAX || generation == 0 { Pin::Held } else { self.take_back() }",
    },
    Mutation {
        name: "quota: nothing is too much",
        file: "iommu/core/src/limits.rs",
        from: ".filter(|sum| *sum <= self.limit)",
        to: "",
    },
    Mutation {
        name: "registers: any access goes",
        file: "vdev/device/src/check.rs",
        from: "(!is_access).then_some(at)",
        to: "(!is_access && at.0 == u64::MAX).then_some(at)",
    },
    Mutation {
        name: "scrub: freed memory keeps its bytes",
        file: "vdev/device/src/issue.rs",
        from: "let work = EngineWork::Fill { dst, pattern: 0 };",
        to: "let work = EngineWork::Fill { dst, pattern: 0x55 };",
    },
    Mutation {
        name: "streams: an error stops nothing",
        file: "vdev/device/src/streams.rs",
        from: "stream.failed = true;",
        to: "stream.failed = false;",
    },
    Mutation {
        name: "faults: the operator is told nothing",
        file: "vdev/device/src/tend.rs",
        from: "self.observer.fault(record);",
        to: "",
    },
    Mutation {
        name: "path: a direct transfer is planned as staged",
        file: "vdev/device/src/plan.rs",
        from: "(_, reason) => plan = Self::Direct { reason },",
        to: "(_, reason) => plan = Self::Staged { reason },",
    },
];

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
    let programs = Programs::build_at(tree.path(), &target, WITHOUT_VM)?;
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
        let places = original.matches(self.from).count();
        ensure!(places == 1, "{} has {places} places that read {:?}; one is needed", self.file, self.from);
        fs::write(&file, original.replacen(self.from, self.to, 1)).context("Cannot write the mutation")?;
        let verdict = Programs::build_at(tree, target, &["vmm_daemon"]).map(|programs| Self::verdict(&programs));
        fs::write(&file, original).context("Cannot take the mutation back")?;
        match verdict? {
            Some(noticed) => {
                eprintln!("    noticed: {noticed}");
                Ok(())
            }
            None => bail!("Every row is as expected: the scenario does not notice"),
        }
    }

    /// The first sign that something is wrong.
    fn verdict(programs: &Programs) -> Option<String> {
        match demo::play(programs, Acts::Both, None, &mut |_| {}) {
            Ok(rows) => {
                let failed = rows.failed();
                let row = rows.all().iter().find(|row| !row.ok)?;
                Some(format!("{}, {failed} rows in all", row.name))
            }
            Err(error) => error.to_string().lines().next().map(str::to_owned),
        }
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
