//! Which shared libraries a program maps, the loader itself included, as the dynamic loader says it.
//!
//! Not here: copying them anywhere.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, bail};

use super::{Kit, tree};

impl Kit {
    /// What a program of the tree maps, as paths in the tree.
    ///
    /// # Errors
    /// When the loader cannot be run, does not find a library, or finds one of this machine.
    pub fn libraries(&self, program: &str) -> Result<Vec<PathBuf>> {
        let words = tree::loader(&self.root);
        let (loader, rest) = words.split_first().context("The kit has no loader")?;
        let program = self.root.join(program);
        let output = Command::new(loader).args(rest).arg("--list").arg(&program).output();
        let libraries = listed(&program, &output.context("Cannot run the kit's loader")?)?;
        let in_tree = |library: PathBuf| {
            let place = || format!("{} needs {}, which is none of the kit's", program.display(), library.display());
            library.strip_prefix(&self.root).map(Path::to_owned).with_context(place)
        };
        libraries.into_iter().map(in_tree).collect()
    }
}

/// What a program of this machine maps; nothing for a static one.
///
/// # Errors
/// When `ldd` cannot be run or does not find a library.
pub fn of_this_machine(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).env("LC_ALL", "C").output().context("Cannot run ldd")?;
    listed(program, &output)
}

fn listed(program: &Path, output: &Output) -> Result<Vec<PathBuf>> {
    let text = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    let is_static = |text: &str| text.contains("statically linked") || text.contains("not a dynamic executable");
    if is_static(&text) || is_static(&complaint) {
        return Ok(Vec::new());
    }
    if !output.status.success() {
        bail!("The loader cannot list {}: {}", program.display(), complaint.trim());
    }
    parse(&text).with_context(|| format!("{} cannot be run elsewhere", program.display()))
}

fn parse(text: &str) -> Result<Vec<PathBuf>> {
    let mut libraries = Vec::new();
    for line in text.lines().map(str::trim) {
        let place = line.split_once("=>").map_or(line, |(_, place)| place.trim());
        if place.starts_with("not found") {
            bail!("Shared library missing on this machine: {line}");
        }
        if let Some(path) = place.split(" (").next().filter(|path| path.starts_with('/')) {
            libraries.push(PathBuf::from(path));
        }
    }
    Ok(libraries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_give_libraries_and_the_loader_but_not_the_vdso() {
        let text = "\tlinux-vdso.so.1 (0x7ff)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x7f)\n\t/lib64/ld-linux-x86-64.so.2 (0x7f)\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(parse(text).unwrap(), expected);
        assert!(parse("\tlibx.so => not found\n").is_err());
    }

    #[test]
    fn a_static_program_needs_no_library() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("script");
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        assert!(of_this_machine(&script).unwrap().is_empty());
    }
}
