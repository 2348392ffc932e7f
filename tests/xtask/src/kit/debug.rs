//! The debug kernel: the newest one, built from Debian's source with `debug-kernel.config`, so that it tells of memory used after it was freed or
//! never freed, of locks taken in the wrong order, and of sleep where none may be.
//!
//! Compiler and source stand in a tree of their own, which goes away when it is built. What stays is the image and what modules are built against,
//! in the kit's tree. Nothing here boots it.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::Kit;
use super::mirror::Archive;
use super::tree;

/// What it is built with.
pub(super) const CONFIG: &str = include_str!("../../debug-kernel.config");
/// How its release ends.
pub(super) const SUFFIX: &str = "-peergate-debug";

const COMPILER: &str = "gcc-14";
const PACKAGES: &str = "libc6-dev,make,flex,bison,bc,libelf-dev,xz-utils,coreutils,dash,sed,grep,mawk,findutils,tar,gzip,diffutils,perl-base";
/// Steps of the compiler and its like that the build takes, about.
const STEPS: usize = 1900;
/// How often it says how far it is.
const PACE: Duration = Duration::from_secs(30);
/// How much of the compiler's words an error shows.
const TAIL: usize = 30;

/// The tree that it is built in; goes away with this value.
struct Workshop {
    dir: PathBuf,
    root: PathBuf,
    source: String,
}

impl Drop for Workshop {
    fn drop(&mut self) {
        // The next build removes what stays.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Builds it and puts it into the kit's tree; gives its release.
pub(super) fn build(kit: &Kit) -> Result<String> {
    let started = Instant::now();
    let shop = Workshop::open(kit)?;
    shop.configure()?;
    let release = shop.make(&["kernelrelease"])?.trim().to_owned();
    if !release.ends_with(SUFFIX) {
        bail!("The debug kernel calls itself {release}, not by a name that ends with {SUFFIX}");
    }
    eprintln!("kit: building Linux {release}, at low priority");
    shop.compile()?;
    shop.install(&kit.root, &release)?;
    eprintln!("kit: Linux {release}, ready in {:.0} s", started.elapsed().as_secs_f64());
    Ok(release)
}

impl Workshop {
    /// Unpacks compiler and source.
    fn open(kit: &Kit) -> Result<Self> {
        let dir = tree::cache_dir()?.join("debug-kernel.new");
        // Under the kit's lock, whatever lies here was left by a build that did not end.
        tree::remove(&dir)?;
        fs::create_dir_all(&dir).with_context(|| format!("Cannot create {}", dir.display()))?;
        let package = format!("linux-source-{}", kit.newest_line());
        let shop = Self { root: dir.join("root"), source: format!("/build/{package}"), dir };
        eprintln!("kit: unpacking {package} and a compiler (250 MB)");
        tree::unpack(&Archive::of_this_machine()?, &shop.root, &format!("{package},{COMPILER},{PACKAGES}"))?;
        tree::furnish(&shop.root)?;
        tree::link(&format!("../../bin/{COMPILER}"), &shop.root.join("usr/local/bin/gcc"))?;
        let archive = format!("/usr/src/{package}.tar.xz");
        answer(tree::inside(&shop.root).args(["tar", "-C", "/build", "-xf", &archive]))?;
        Ok(shop)
    }

    /// A make of the kernel's that is still to be told what.
    fn command(&self) -> Command {
        let mut command = tree::inside(&self.root);
        command
            .args(["nice", "-n", "10", "make", "-C", &self.source])
            .env("KBUILD_BUILD_USER", "peergate")
            .env("KBUILD_BUILD_HOST", "kit")
            .env("KBUILD_BUILD_TIMESTAMP", "Thu Jan  1 00:00:00 UTC 1970");
        command
    }

    /// Runs a short make to its end and gives what it said.
    fn make(&self, words: &[&str]) -> Result<String> {
        answer(self.command().arg("-s").args(words))
    }

    /// Turns on what [`CONFIG`] names, and checks that the kernel left it so.
    fn configure(&self) -> Result<()> {
        tree::write(&self.root, "build/debug-kernel.config", CONFIG, 0o644)?;
        self.make(&["KCONFIG_ALLCONFIG=/build/debug-kernel.config", "allnoconfig"])?;
        let path = self.host_path(&self.source).join(".config");
        let made = fs::read_to_string(&path).with_context(|| format!("Cannot read {}", path.display()))?;
        let missing = missing(&made);
        if !missing.is_empty() {
            bail!("This kernel does not take {} of debug-kernel.config", missing.join(", "));
        }
        Ok(())
    }

    fn compile(&self) -> Result<()> {
        let jobs = thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let mut command = self.command();
        command.args([format!("-j{jobs}"), "bzImage".into(), "modules".into()]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("Cannot run make")?;
        let complaints = child.stderr.take().map(|stream| thread::spawn(move || last_lines(BufReader::new(stream))));
        let (started, mut said) = (Instant::now(), Instant::now());
        let output = child.stdout.take().context("make has no output")?;
        for (step, _) in BufReader::new(output).split(b'\n').enumerate() {
            if said.elapsed() >= PACE {
                said = Instant::now();
                eprintln!("kit: {step} of about {STEPS} steps, {:.0} s", started.elapsed().as_secs_f64());
            }
        }
        let status = child.wait().context("Cannot wait for make")?;
        let complaints = complaints.and_then(|thread| thread.join().ok()).unwrap_or_default();
        if !status.success() {
            bail!("The debug kernel does not build ({status}):\n{complaints}");
        }
        Ok(())
    }

    /// Moves what is needed of it into the kit's tree.
    fn install(&self, root: &Path, release: &str) -> Result<()> {
        let at = root.join("usr/lib/modules").join(release);
        tree::remove(&at)?;
        fs::create_dir_all(&at).with_context(|| format!("Cannot create {}", at.display()))?;
        let collect = "KBUILD_RUN_COMMAND=$(srctree)/scripts/package/install-extmod-build /build/headers";
        self.make(&["run-command", collect])?;
        let made = self.host_path(&self.source);
        let parts = [
            (self.host_path("/build/headers"), "build"),
            (made.join("arch/x86/boot/bzImage"), "vmlinuz"),
            (made.join("modules.builtin"), "modules.builtin"),
            (made.join(".config"), "config"),
        ];
        for (from, name) in parts {
            fs::rename(&from, at.join(name)).with_context(|| format!("Cannot move {}", from.display()))?;
        }
        // All of it is built in.
        fs::write(at.join("modules.dep"), "").context("Cannot write modules.dep")?;
        // Debian's headers name their compiler; the kernel's own only say gcc.
        tree::link(&format!("../../bin/{COMPILER}"), &root.join("usr/local/bin/gcc"))
    }

    /// Where something of the tree is for this process.
    fn host_path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }
}

/// Runs a command to its end and gives its output.
fn answer(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("Cannot run {:?}", command.get_program()))?;
    if !output.status.success() {
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        bail!("{} failed ({}):\n{}", words.join(" "), output.status, last_lines(output.stderr.as_slice()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn last_lines(stream: impl BufRead) -> String {
    let mut tail = VecDeque::new();
    for line in stream.lines().map_while(Result::ok) {
        tail.push_back(line);
        if tail.len() > TAIL {
            tail.pop_front();
        }
    }
    tail.into_iter().collect::<Vec<_>>().join("\n")
}

/// Lines of [`CONFIG`] that are not so in `made`.
fn missing(made: &str) -> Vec<&'static str> {
    let wanted = CONFIG.lines().filter(|line| line.starts_with("CONFIG_"));
    wanted.filter(|wanted| made.lines().all(|line| line != *wanted)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_that_the_kernel_dropped_is_missed() {
        assert_eq!(missing(CONFIG), Vec::<&str>::new());
        let without = CONFIG.replace("CONFIG_KASAN=y", "# CONFIG_KASAN is not set");
        assert_eq!(missing(&without), ["CONFIG_KASAN=y"]);
    }

    #[test]
    fn the_configuration_gives_the_release_its_ending() {
        assert!(CONFIG.contains(&format!("CONFIG_LOCALVERSION=\"{SUFFIX}\"")));
    }

    #[test]
    fn of_many_lines_the_last_are_kept() {
        let text: String = (0..100).map(|number| format!("{number}\n")).collect();
        let kept = last_lines(text.as_bytes());
        assert!(kept.starts_with("70\n") && kept.ends_with("99"), "{kept}");
    }
}
