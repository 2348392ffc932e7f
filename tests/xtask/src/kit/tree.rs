//! The kit's tree on disk: built once a recipe, in one step that either happened or did not.
//!
//! `CACHE/kit-N/` holds `root/` and `kit.json`, N being [`RECIPE`]. A build fills `CACHE/kit-N.new/` and renames it at the end, under
//! a lock that other runs wait for; what an interrupted build left behind is swept by the next. mmdebstrap only unpacks the packages
//! (no maintainer script runs, so neither root nor mounts are needed); `finish` then adds the few links and files that the
//! scripts would have made and that the tools here want.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::{FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};

use super::host::is_root;
use super::mirror::Archive;

/// Counts the recipes: raise it when the packages or `finish` change, and every machine builds anew.
pub const RECIPE: u32 = 1;

const SUITE: &str = "trixie";
const PACKAGES: &str = "qemu-system-x86,linux-image-cloud-amd64,linux-headers-cloud-amd64,make,sparse,busybox-static,pciutils,\
                        coreutils,dash,sed,grep,mawk,findutils,xz-utils,kmod,e2fsprogs";
/// Never read here, and a sixth of the tree.
const TRIMMED: [&str; 8] = [
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/cache",
    "var/lib/apt",
    "var/lib/dpkg",
    "var/log",
];

/// objtool looks up its own stack here and refuses to work without; no proc is mounted in the tree.
const PROC_SELF_MAPS: &str = "7ffc00000000-7fffff000000 rw-p 00000000 00:00 0                          [stack]\n";
/// Debian's header packages leave this file out, and kbuild runs no checker without it.
const CHECKER_VALID: &str = "#!/bin/sh\n# Prints 1 when the checker named by the arguments accepts a trivial source.\n\
    echo 'extern int peergate_probe; int peergate_probe;' | \"$@\" - >/dev/null 2>&1 && echo 1 || echo 0\n";
/// This sparse does not know two builtins that the kernel's headers use; the words are close enough for its checks.
const KERNEL_SPARSE: &str = "#!/bin/sh\n\
    exec sparse -D__typeof_unqual__=__typeof__ '-D__builtin_strlen(x)=(sizeof(x)-1)' \"$@\"\n";

/// What is in a tree.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Stamp {
    /// The recipe it was built by.
    pub recipe: u32,
    /// Its QEMU's version.
    pub qemu_version: String,
    /// Its kernel's release.
    pub kernel_release: String,
}

/// The folder for everything that outlives a build and belongs to no checkout: `PEERGATE_CACHE`, else `XDG_CACHE_HOME/peergate`,
/// else `HOME/.cache/peergate`.
///
/// # Errors
/// When none of the three variables is set.
pub fn cache_dir() -> Result<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("PEERGATE_CACHE")
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("peergate")))
        .or_else(|| Some(variable("HOME")?.join(".cache/peergate")))
        .context("No place for the cache; set PEERGATE_CACHE to a folder")
}

/// Gives the tree's root if it is built.
///
/// # Errors
/// When the stamp is unreadable.
pub fn open() -> Result<Option<(PathBuf, Stamp)>> {
    open_in(&cache_dir()?)
}

/// Gives the tree's root, building it first if it is not there. Blocks while another run builds it.
///
/// # Errors
/// When a step of the build fails; the next call starts over.
pub fn ensure() -> Result<(PathBuf, Stamp)> {
    let cache = cache_dir()?;
    if let Some(found) = open_in(&cache)? {
        return Ok(found);
    }
    let lock = lock(&cache, "kit")?;
    // The programs started below hold it too: one that outlives this run keeps the next from sweeping under its feet.
    fcntl_setfd(&lock, FdFlags::empty()).context("Cannot share the kit's lock")?;
    if let Some(found) = open_in(&cache)? {
        return Ok(found);
    }
    build(&cache)
}

/// The words that start a program of the tree at `root` outside it: its loader and library path.
#[must_use]
pub fn loader(root: &Path) -> Vec<PathBuf> {
    vec![
        root.join("usr/lib64/ld-linux-x86-64.so.2"),
        PathBuf::from("--library-path"),
        root.join("usr/lib/x86_64-linux-gnu"),
    ]
}

/// A command that runs `program` of the tree on the host's files, under `name`.
#[must_use]
pub fn program(root: &Path, program: &str, name: &str) -> Command {
    let [ld, flag, libraries] = [0, 1, 2].map(|i| loader(root).swap_remove(i));
    let mut command = Command::new(ld);
    command.arg(flag).arg(libraries).args(["--argv0", name]).arg(root.join(program));
    command
}

fn kit_dir(cache: &Path) -> PathBuf {
    cache.join(format!("kit-{RECIPE}"))
}

fn open_in(cache: &Path) -> Result<Option<(PathBuf, Stamp)>> {
    open_at(&kit_dir(cache))
}

/// As [`open`], of the tree in a folder.
pub(super) fn open_at(dir: &Path) -> Result<Option<(PathBuf, Stamp)>> {
    let file = dir.join("kit.json");
    if !file.exists() {
        return Ok(None);
    }
    let text = fs::read(&file).with_context(|| format!("Cannot read {}", file.display()))?;
    let stamp: Stamp = serde_json::from_slice(&text)
        .with_context(|| format!("{} is damaged; remove {}", file.display(), dir.display()))?;
    Ok(Some((dir.join("root"), stamp)))
}

/// Says what is in the tree of a folder; last of all, since it makes the tree one.
pub(super) fn write_stamp(dir: &Path, stamp: &Stamp) -> Result<()> {
    let text = serde_json::to_vec_pretty(stamp).context("Cannot write the stamp")?;
    fs::write(dir.join("kit.json"), text).context("Cannot write the stamp")
}

/// Lets one run at a time make `what`, until the file is dropped; the kernel drops it for a process that dies.
pub(crate) fn lock(cache: &Path, what: &str) -> Result<File> {
    fs::create_dir_all(cache).with_context(|| format!("Cannot create {}", cache.display()))?;
    let path = cache.join(format!("{what}.lock"));
    let file = File::create(&path).with_context(|| format!("Cannot create {}", path.display()))?;
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        eprintln!("{what}: another run is at it; waiting");
        flock(&file, FlockOperation::LockExclusive).with_context(|| format!("Cannot lock {}", path.display()))?;
    }
    Ok(file)
}

fn build(cache: &Path) -> Result<(PathBuf, Stamp)> {
    let started = Instant::now();
    let archive = Archive::of_this_machine()?;
    let dir = kit_dir(cache);
    let new = dir.with_extension("new");
    // Under the lock, whatever lies here was left by a build that did not end.
    remove(&new)?;
    let root = new.join("root");
    fs::create_dir_all(&new).with_context(|| format!("Cannot create {}", new.display()))?;
    eprintln!("kit: unpacking {SUITE} packages (560 MB) into {}", dir.display());
    unpack(&archive, &root, PACKAGES)?;
    eprintln!("kit: finishing the tree");
    let stamp = finish(&root)?;
    write_stamp(&new, &stamp)?;
    remove(&dir)?;
    fs::rename(&new, &dir).with_context(|| format!("Cannot rename to {}", dir.display()))?;
    eprintln!(
        "kit: QEMU {}, Linux {}, ready in {:.0} s",
        stamp.qemu_version,
        stamp.kernel_release,
        started.elapsed().as_secs_f64()
    );
    Ok((dir.join("root"), stamp))
}

/// Fills a new tree with `packages` and what they need, newer releases first.
pub(super) fn unpack(archive: &Archive, root: &Path, packages: &str) -> Result<()> {
    let backports = format!("{SUITE}-backports");
    let mut command = Command::new("mmdebstrap");
    command
        .args(["--variant=extract", "--architectures=amd64"])
        .arg(if is_root() { "--mode=root" } else { "--mode=chrootless" })
        .arg(format!("--include={packages}"))
        // Without this a dependency of QEMU may come from the older suite.
        .arg(format!("--aptopt=APT::Default-Release \"{backports}\""))
        .args(["--aptopt=APT::Install-Recommends \"false\"", "--aptopt=Acquire::Languages \"none\""]);
    for setting in &archive.settings {
        command.arg(format!("--aptopt={}", setting.trim_end_matches(';')));
    }
    let status = command
        .arg(SUITE)
        .arg(root)
        .args([archive.line(SUITE), archive.line(&backports)])
        .stdin(std::process::Stdio::null())
        .stdout(std::io::stderr())
        .status()
        .context("Cannot run mmdebstrap")?;
    if !status.success() {
        bail!("mmdebstrap could not unpack {SUITE} from {} ({status})", archive.uri);
    }
    Ok(())
}

/// Makes of an unpacked tree one that programs run in: the links and files that maintainer scripts would have made.
pub(super) fn furnish(root: &Path) -> Result<()> {
    for dir in TRIMMED {
        remove(&root.join(dir))?;
    }
    for name in ["bin", "sbin", "lib", "lib64"] {
        link(&format!("usr/{name}"), &root.join(name))?;
    }
    link("mawk", &root.join("usr/bin/awk"))?;
    for dir in ["dev", "sys", "run", "build"] {
        fs::create_dir_all(root.join(dir)).with_context(|| format!("Cannot create {dir} in the tree"))?;
    }
    write(root, "proc/self/maps", PROC_SELF_MAPS, 0o644)
}

fn finish(root: &Path) -> Result<Stamp> {
    furnish(root)?;
    let kernel_release = only_entry(&root.join("usr/lib/modules"), |_| true)?;
    let headers = only_entry(&root.join("usr/src"), |name| name.ends_with("-common"))?;
    write(root, "usr/local/bin/kernel-sparse", KERNEL_SPARSE, 0o755)?;
    write(root, &format!("usr/src/{headers}/scripts/checker-valid.sh"), CHECKER_VALID, 0o755)?;
    depmod(root, &kernel_release)?;
    let qemu_version = super::qemu_version(&mut program(root, "usr/bin/qemu-system-x86_64", "qemu"))?;
    Ok(Stamp { recipe: RECIPE, qemu_version, kernel_release })
}

/// Lists the modules of a kernel in the tree, and what each needs.
pub(super) fn depmod(root: &Path, release: &str) -> Result<()> {
    let mut depmod = program(root, "usr/bin/kmod", "depmod");
    let status = depmod.arg("--basedir").arg(root).arg(release).status().context("Cannot run depmod")?;
    if !status.success() {
        bail!("depmod failed for {release} ({status})");
    }
    Ok(())
}

/// A command that runs what is added to it inside the tree at `root`, with none of the host's variables: TMPDIR, MAKEFLAGS and CFLAGS mean
/// other things there. Root enters by chroot alone, anyone else by a user namespace that also lends the tree the host's `/dev`.
pub(super) fn inside(root: &Path) -> Command {
    let mut command = if is_root() {
        let mut command = Command::new("chroot");
        command.arg(root);
        command
    } else {
        let mut command = Command::new("unshare");
        let enter = "mount --rbind /dev \"$0/dev\" && exec chroot \"$0\" \"$@\"";
        command.args(["--map-root-user", "--mount", "sh", "-c", enter]).arg(root);
        command
    };
    command.env_clear().env("PATH", "/usr/local/bin:/usr/bin:/usr/sbin").env("LC_ALL", "C");
    command.stdin(std::process::Stdio::null());
    command
}

pub(super) fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("Cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

pub(super) fn link(target: &str, at: &Path) -> Result<()> {
    if at.symlink_metadata().is_ok() {
        return Ok(());
    }
    let place = || format!("Cannot link {}", at.display());
    if let Some(parent) = at.parent() {
        fs::create_dir_all(parent).with_context(place)?;
    }
    symlink(target, at).with_context(place)
}

pub(super) fn write(root: &Path, at: &str, text: &str, mode: u32) -> Result<()> {
    let path = root.join(at);
    let place = || format!("Cannot write {}", path.display());
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(place)?;
    }
    fs::write(&path, text).with_context(place)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).with_context(place)
}

fn only_entry(dir: &Path, wanted: fn(&str) -> bool) -> Result<String> {
    let place = || format!("Cannot list {}", dir.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).with_context(place)? {
        let name = entry.with_context(place)?.file_name().to_string_lossy().into_owned();
        if wanted(&name) {
            names.push(name);
        }
    }
    match <[String; 1]>::try_from(names) {
        Ok([name]) => Ok(name),
        Err(names) => bail!("Expected one kernel in {}, found {names:?}", dir.display()),
    }
}
