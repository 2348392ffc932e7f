//! The engines of `hw_vfio` on the host's NVMe controller and its edu: the suite that every engine passes, as a program. With iommufd, which few kernels
//! have, it also shows what is left of a mapping when the memory behind it goes.
//!
//! Not here: what the suite asks of an engine.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::check::Scenario;
use super::machine::Machine;
use crate::work::cargo;

/// The program, and how often it says that an engine conforms.
const PACKAGE: &str = "hw_vfio";
const PROGRAM: &str = "lab";

/// The program in the host, and what it must come to.
///
/// # Errors
/// When it does not build.
pub fn scenario(machine: &mut Machine<'_>) -> Result<Scenario> {
    machine.root().program("/bin/engines", &build()?)?;
    let facts = [
        ("engines/nvme-conforms", "yes"),
        ("engines/nvme-lazy-conforms", "yes"),
        ("engines/edu-conforms", "yes"),
        ("engines/ended-with", "0"),
    ];
    Ok(Scenario {
        script: SCRIPT.to_owned(),
        facts: facts.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        ..Scenario::default()
    })
}

/// The program with iommufd, and what it must come to.
///
/// # Errors
/// When it does not build.
pub fn by_iommufd(machine: &mut Machine<'_>) -> Result<Scenario> {
    machine.root().program("/bin/engines", &build()?)?;
    Ok(Scenario {
        script: BY_IOMMUFD.to_owned(),
        facts: IOMMUFD.map(|(name, value)| (format!("iommufd/{name}"), value.to_owned())).to_vec(),
        ..Scenario::default()
    })
}

/// What is tried with iommufd, and what must come of it.
const IOMMUFD: [(&str, &str); 32] = [
    ("nvme-conforms", "yes"),
    // Memory behind a BAR is mapped by a dma-buf of it only.
    ("bar-by-its-address", "EFAULT"),
    ("nvme-to-bar", "arrives"),
    ("bar-to-nvme", "arrives"),
    // What is mapped to be read cannot be written, nor the other way.
    ("ram-to-be-read/write", "stopped"),
    ("ram-to-be-read/kernel", "fault"),
    ("ram-to-be-written/read", "stopped"),
    ("ram-to-be-written/kernel", "fault"),
    ("bar-to-be-read/write", "stopped"),
    ("bar-to-be-read/kernel", "fault"),
    ("bar-to-be-written/read", "stopped"),
    ("bar-to-be-written/kernel", "fault"),
    // A mapping is held while the memory behind it does not answer, and after that; another one is made beside it; then it is made anew.
    ("decoding/held", "arrives"),
    ("decoding-off/held", "stopped"),
    ("decoding-off/kernel", "fault"),
    ("decoding-off/mapped", "ENODEV"),
    ("decoding-on-again/held", "stopped"),
    ("decoding-on-again/kernel", "fault"),
    ("decoding-on-again/mapped-beside", "arrives"),
    ("decoding-on-again/still-held", "stopped"),
    ("decoding-on-again/mapped-anew", "arrives"),
    ("reset/held-before", "arrives"),
    ("reset/held", "stopped"),
    ("reset/kernel", "fault"),
    ("reset/mapped-beside", "arrives"),
    ("reset/still-held", "stopped"),
    ("reset/mapped-anew", "arrives"),
    // The engine maps for each command.
    ("engine/before", "done, as sent"),
    ("engine/decoding-off", "the IOMMU cannot be programmed"),
    ("engine/decoding-on-again", "done, as sent"),
    ("engine/after-a-reset", "done, as sent"),
    ("ended-with", "0"),
];

/// Builds the program, fast enough for a processor that is itself translated.
fn build() -> Result<PathBuf> {
    eprintln!("building {PACKAGE}'s program for the lab");
    let words = ["test", "--quiet", "--profile", "fast", "--package", PACKAGE, "--test", PROGRAM, "--no-run"];
    let output = cargo(&words).arg("--message-format=json").output().context("Cannot run cargo")?;
    ensure!(output.status.success(), "{PACKAGE} does not build:\n{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut programs = messages.filter(|message| message["target"]["name"] == PROGRAM);
    let path = programs.find_map(|message| message["executable"].as_str().map(PathBuf::from));
    path.with_context(|| format!("cargo built no program {PROGRAM} of {PACKAGE}"))
}

const SCRIPT: &str = r#"
engines >/run/engines.log 2>&1
code=$?
for engine in nvme nvme-lazy edu; do
    fact engines/$engine-conforms $(grep -q "^$engine conforms" /run/engines.log && echo yes)
done
fact engines/ended-with $code
grep SKIP /run/engines.log
[ $code = 0 ] || cat /run/engines.log
"#;

const BY_IOMMUFD: &str = r#"
engines iommufd >/run/engines.log 2>&1
code=$?
fact iommufd/nvme-conforms $(grep -q '^nvme conforms' /run/engines.log && echo yes)
sed -n 's,^fact ,iommufd/,p' /run/engines.log >&3
fact iommufd/ended-with $code
[ $code = 0 ] || cat /run/engines.log
"#;
