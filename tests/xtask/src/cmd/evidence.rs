//! What a run was made with and what came of it, as a file that can be kept: no date, no path of this machine, no speed.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use xtask::demo::{Row, Rows};

use super::checkout;

/// Writes `file`: what it is about, the commit and what else the run was made `with` (names and versions), the rows.
pub(crate) fn write(file: &Path, about: &str, with: &[(&str, String)], rows: &Rows<'_>) -> Result<()> {
    let text = text(about, &commit()?, with, rows.all());
    fs::write(file, text).with_context(|| format!("Cannot write {}", file.display()))
}

fn text(about: &str, commit: &str, with: &[(&str, String)], rows: &[Row]) -> String {
    let mut text = format!("{about}\n\n{:<16} {commit}\n", "commit");
    for (name, version) in with {
        let _ = writeln!(text, "{name:<16} {version}");
    }
    text.push('\n');
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
        let text = text("Rows.", "c0ffee", &[("kernel", "Linux 7.3".to_owned())], &rows);
        assert!(text.starts_with("Rows.\n\ncommit           c0ffee\nkernel           Linux 7.3\n\n"), "{text}");
        assert!(text.ends_with("\n1 passed, 1 failed\n"), "{text}");
        assert!(text.lines().any(|line| line.starts_with("FAIL b") && line.ends_with("3 in place of 0")), "{text}");
    }
}
