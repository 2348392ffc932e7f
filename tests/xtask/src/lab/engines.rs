//! The engines of `hw_vfio` on the host's NVMe controller and its edu: the suite that every engine passes, as a program.
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
    let facts = [("engines/nvme-conforms", "yes"), ("engines/edu-conforms", "yes"), ("engines/ended-with", "0")];
    Ok(Scenario {
        script: SCRIPT.to_owned(),
        facts: facts.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        ..Scenario::default()
    })
}

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
for engine in nvme edu; do
    fact engines/$engine-conforms $(grep -q "^$engine conforms" /run/engines.log && echo yes)
done
fact engines/ended-with $code
grep SKIP /run/engines.log
[ $code = 0 ] || cat /run/engines.log
"#;
