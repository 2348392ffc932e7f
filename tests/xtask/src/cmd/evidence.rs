//! What a run was made with and what came of it, as a file that can be kept: no date, no path of this machine, no speed.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use xtask::demo::{Row, Rows};
use xtask::guest::accel;
use xtask::kit::Kit;

use super::checkout;

/// Writes `file` about a run of the guest's tests on `kit`'s kernel.
pub(crate) fn write(file: &Path, kit: &Kit, rows: &Rows<'_>) -> Result<()> {
    let machine = format!("QEMU {}, {:?}", kit.qemu.version, accel::choose(kit)?.accel);
    let text = text(&commit()?, kit.kernel_release(), &machine, rows.all());
    fs::write(file, text).with_context(|| format!("Cannot write {}", file.display()))
}

fn text(commit: &str, kernel: &str, machine: &str, rows: &[Row]) -> String {
    let mut text = "The guest's tests, as `cargo xtask test --kernel KERNEL --evidence FILE` saw them. A BUG, a WARNING or a report of a check in the\n\
                    kernel's log would have ended the run. A debug kernel is built with tests/xtask/debug-kernel.config.\n\n"
        .to_owned();
    let _ = writeln!(text, "commit   {commit}\nkernel   Linux {kernel}\nmachine  {machine}\n");
    for row in rows {
        let verdict = if row.ok { "ok  " } else { "FAIL" };
        let got = if row.ok { row.got.clone() } else { format!("{} in place of {}", row.got, row.expected) };
        let _ = writeln!(text, "{verdict} {:<42} {got}", row.name);
    }
    let failed = rows.iter().filter(|row| !row.ok).count();
    let _ = writeln!(text, "\n{} passed, {failed} failed", rows.len() - failed);
    text
}

/// The commit of the checkout, and whether it is all there is.
fn commit() -> Result<String> {
    let head = git(&["rev-parse", "HEAD"])?;
    let changes = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Ok(if changes.is_empty() { head } else { format!("{head} and changes that are not committed") })
}

fn git(words: &[&str]) -> Result<String> {
    let output = Command::new("git").args(words).current_dir(checkout()).output().context("Cannot run git")?;
    anyhow::ensure!(output.status.success(), "git {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_row_is_seen_and_counted() {
        let rows = [Row::new("a", "0", "0"), Row::new("b", "0", "3")];
        let text = text("c0ffee", "7.3", "QEMU", &rows);
        assert!(text.contains("commit   c0ffee\n") && text.contains("1 passed, 1 failed"), "{text}");
        assert!(text.lines().any(|line| line.starts_with("FAIL b") && line.ends_with("3 in place of 0")), "{text}");
    }
}
