//! Single packages of one suite, unpacked into a tree: an apt of our own in a folder of its own, which knows nothing of what the machine has installed.
//!
//! apt checks the signatures. Which packages a package needs is told ([`Apt::depends`]), not followed: the caller knows what its tree has.
//! No maintainer script runs.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::mirror::Archive;

/// What the archive does not give, now or ever; the machine is not to blame, and what needs it may be skipped.
#[derive(Debug)]
pub struct NotToBeHad(String);

impl fmt::Display for NotToBeHad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotToBeHad {}

/// An apt that knows one suite.
#[derive(Debug)]
pub struct Apt {
    dir: TempDir,
    suite: String,
}

impl Apt {
    /// Fetches the index of `suite`. Blocks while it is on its way (9 MB).
    ///
    /// # Errors
    /// [`NotToBeHad`] when the archive does not give it.
    pub fn of(archive: &Archive, suite: &str) -> Result<Self> {
        let dir = TempDir::with_prefix("peergate-apt-").context("Cannot create a temporary folder")?;
        let apt = Self { dir, suite: suite.to_owned() };
        for sub in ["lists/partial", "cache/archives/partial", "parts", "packages"] {
            fs::create_dir_all(apt.dir.path().join(sub)).context("Cannot create a temporary folder")?;
        }
        apt.write("status", "")?;
        apt.write("sources.list", &(archive.line(suite) + "\n"))?;
        apt.write("apt.conf", &apt.settings(archive))?;
        apt.run(apt.command("apt-get").args(["update", "-qq"]))?;
        Ok(apt)
    }

    /// What `package` needs: of each choice the first.
    ///
    /// # Errors
    /// [`NotToBeHad`] when the suite has no such package.
    pub fn depends(&self, package: &str) -> Result<Vec<String>> {
        let text = self.run(self.command("apt-cache").args(["show", "--no-all-versions", package]))?;
        Ok(parse_depends(&text))
    }

    /// Downloads `packages` and unpacks them into the tree at `root`, where they replace files of the same names.
    ///
    /// # Errors
    /// [`NotToBeHad`] when the archive does not give one.
    pub fn unpack(&self, packages: &[String], root: &Path) -> Result<()> {
        self.run(self.command("apt-get").args(["download", "-qq"]).args(packages))?;
        let place = || format!("Cannot list {}", self.dir.path().display());
        for entry in fs::read_dir(self.dir.path().join("packages")).with_context(place)? {
            unpack(&entry.with_context(place)?.path(), root)?;
        }
        Ok(())
    }

    fn settings(&self, archive: &Archive) -> String {
        let dir = self.dir.path().display();
        let mut lines = vec![
            format!("Dir::State \"{dir}\";"),
            format!("Dir::State::status \"{dir}/status\";"),
            format!("Dir::Cache \"{dir}/cache\";"),
            format!("Dir::Etc \"{dir}\";"),
            format!("Dir::Etc::parts \"{dir}/parts\";"),
            format!("Dir::Etc::sourceparts \"{dir}/parts\";"),
            format!("Dir::Etc::preferencesparts \"{dir}/parts\";"),
            "APT::Architecture \"amd64\";".to_owned(),
            "APT::Architectures { \"amd64\"; };".to_owned(),
            // Another user may not enter the folder.
            "APT::Sandbox::User \"\";".to_owned(),
            "APT::Update::Error-Mode \"any\";".to_owned(),
            "Acquire::Languages \"none\";".to_owned(),
        ];
        lines.extend(archive.settings.iter().cloned());
        lines.join("\n") + "\n"
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(self.dir.path().join("packages"))
            .env("APT_CONFIG", self.dir.path().join("apt.conf"))
            .env("LC_ALL", "C")
            .stdin(Stdio::null());
        command
    }

    /// Runs a command of apt and gives what it says.
    fn run(&self, command: &mut Command) -> Result<String> {
        let output = command.output().context("Cannot run apt; the kit needs Debian 12 or 13")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
            bail!(NotToBeHad(format!(
                "The archive's suite {}: {} failed: {}",
                self.suite,
                words.join(" "),
                said.trim()
            )));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        fs::write(self.dir.path().join(name), text).context("Cannot write a setting of apt")
    }
}

/// Unpacks one package. The tree's folders may be links (`lib` to `usr/lib`), which stay.
fn unpack(package: &Path, root: &Path) -> Result<()> {
    let place = || format!("Cannot unpack {}", package.display());
    let mut archive = Command::new("dpkg-deb");
    archive.arg("--fsys-tarfile").arg(package).stdout(Stdio::piped());
    let mut archive = archive.spawn().with_context(place)?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--keep-directory-symlink", "--no-same-owner", "--exclude=./usr/share", "--directory"]);
    let unpacked = tar.arg(root).stdin(archive.stdout.take().context("dpkg-deb has no output")?).status();
    let read = archive.wait().with_context(place)?;
    if !read.success() || !unpacked.with_context(place)?.success() {
        bail!("{} into {}", place(), root.display());
    }
    Ok(())
}

/// The names in the first `Depends:` of a package's description.
fn parse_depends(text: &str) -> Vec<String> {
    let line = text.lines().find_map(|line| line.strip_prefix("Depends:")).unwrap_or_default();
    line.split(',').filter_map(|choice| choice.split_whitespace().next()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_each_choice_the_first_name_counts_and_versions_do_not() {
        let text = "Package: linux-headers\nPre-Depends: no\nDepends: linux-base (>= 4.12~), image (= 6.12-1) | image-unsigned, gcc-14\nSize: 1\n";
        assert_eq!(parse_depends(text), ["linux-base", "image", "gcc-14"]);
        assert_eq!(parse_depends("Package: lonely\n"), Vec::<String>::new());
    }
}
