//! The guest's first and only file system: a list of files, written as a gzip'd newc cpio archive without outside tools.
//!
//! Parents are made as needed; everything belongs to root and is dated 1970, so equal lists give equal archives. Device nodes are
//! not written: the kernel brings `/dev/console`, and devtmpfs the rest.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::write::GzEncoder;

use crate::kit::{Kit, libraries};

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

/// Mounts what programs expect, so that a script can follow.
const PREAMBLE: &str = "#!/bin/sh
export PATH=/bin:/sbin:/usr/bin:/usr/sbin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t tmpfs shm /dev/shm
";

#[derive(Debug, Clone)]
enum Content {
    Directory,
    Bytes(Vec<u8>),
    Host(PathBuf),
    Link(String),
}

#[derive(Debug, Clone)]
struct Node {
    content: Content,
    mode: u32,
}

/// A list of files for a guest. Paths are absolute guest paths; a later entry replaces an earlier one of the same path.
#[derive(Debug, Clone)]
pub struct Initramfs {
    nodes: BTreeMap<String, Node>,
}

impl Default for Initramfs {
    fn default() -> Self {
        Self::new()
    }
}

impl Initramfs {
    /// A list with the empty folders that an init mounts on.
    #[must_use]
    pub fn new() -> Self {
        let mut new = Self { nodes: BTreeMap::new() };
        for path in ["/dev", "/proc", "/sys", "/tmp", "/run", "/root", "/bin"] {
            new.dir(path, 0o755);
        }
        new
    }

    /// Adds a folder.
    pub fn dir(&mut self, path: &str, mode: u32) {
        self.insert(path, Content::Directory, mode | DIRECTORY);
    }

    /// Adds a file with these bytes.
    pub fn bytes(&mut self, path: &str, bytes: impl Into<Vec<u8>>, mode: u32) {
        self.insert(path, Content::Bytes(bytes.into()), mode | REGULAR);
    }

    /// Adds a copy of a host file; it is read when the archive is written.
    pub fn file(&mut self, path: &str, host: impl Into<PathBuf>, mode: u32) {
        self.insert(path, Content::Host(host.into()), mode | REGULAR);
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.insert(path, Content::Link(target.to_owned()), 0o777 | SYMLINK);
    }

    /// Adds the kit's busybox as `/bin/busybox` and a link in `/bin` for each of its commands that is not there yet.
    ///
    /// # Errors
    /// When busybox cannot be run.
    pub fn busybox(&mut self, kit: &Kit) -> Result<()> {
        let busybox = kit.busybox();
        let output = Command::new(&busybox)
            .arg("--list")
            .output()
            .with_context(|| format!("Cannot run {}", busybox.display()))?;
        self.file("/bin/busybox", busybox, 0o755);
        for name in String::from_utf8_lossy(&output.stdout).lines().filter(|name| *name != "busybox") {
            let path = format!("/bin/{name}");
            if !self.nodes.contains_key(&path) {
                self.link(&path, "busybox");
            }
        }
        Ok(())
    }

    /// Adds a host program and the shared libraries that `ldd` names for it, each at the path it has on the host.
    ///
    /// # Errors
    /// When `ldd` cannot be run or does not find a library.
    pub fn program(&mut self, path: &str, host: &Path) -> Result<()> {
        for library in libraries::of_this_machine(host)? {
            let name = library.to_string_lossy().into_owned();
            self.file(&name, library, 0o755);
        }
        self.file(path, host, 0o755);
        Ok(())
    }

    /// Adds `/init`: a shell script (busybox must be there) that mounts proc, sysfs, devtmpfs and a few tmpfs, runs `body`, and
    /// powers the machine off whatever `body` did.
    pub fn init_script(&mut self, body: &str) {
        let script = format!("{PREAMBLE}(\n{body}\n)\npoweroff -f\n");
        self.bytes("/init", script, 0o755);
    }

    /// Writes the archive to `path`.
    ///
    /// # Errors
    /// When a host file cannot be read, is 4 GiB or longer, or `path` cannot be written.
    pub fn write_to(&self, path: &Path) -> Result<()> {
        let place = || format!("Cannot write {}", path.display());
        let file = File::create(path).with_context(place)?;
        let mut zip = GzEncoder::new(BufWriter::new(file), Compression::fast());
        self.write_cpio(&mut zip)?;
        let mut file = zip.finish().with_context(place)?;
        file.flush().with_context(place)
    }

    fn insert(&mut self, path: &str, content: Content, mode: u32) {
        let path = format!("/{}", path.trim_matches('/'));
        for (end, _) in path.match_indices('/').skip(1) {
            self.nodes
                .entry(path[..end].to_owned())
                .or_insert(Node { content: Content::Directory, mode: DIRECTORY | 0o755 });
        }
        self.nodes.insert(path, Node { content, mode });
    }

    /// A map sorted by path has every folder before what is in it, which is what the kernel needs.
    fn write_cpio(&self, out: &mut impl Write) -> Result<()> {
        for (number, (path, node)) in (1u32..).zip(&self.nodes) {
            let bytes = match &node.content {
                Content::Directory => Vec::new(),
                Content::Bytes(bytes) => bytes.clone(),
                Content::Link(target) => target.clone().into_bytes(),
                Content::Host(host) => fs::read(host).with_context(|| format!("Cannot read {}", host.display()))?,
            };
            write_entry(out, number, path.trim_start_matches('/'), node.mode, &bytes)?;
        }
        write_entry(out, 0, "TRAILER!!!", 0, &[])
    }
}

/// One newc entry: thirteen numbers in hexadecimal, the name, the bytes; name and bytes padded to four.
fn write_entry(out: &mut impl Write, inode: u32, name: &str, mode: u32, bytes: &[u8]) -> Result<()> {
    let size = u32::try_from(bytes.len()).with_context(|| format!("{name} is too long for an initramfs"))?;
    let name_size = u32::try_from(name.len() + 1).context("A guest path is too long")?;
    let links = if mode & DIRECTORY == 0 { 1 } else { 2 };
    let mut header = String::from("070701");
    for number in [inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0] {
        header.push_str(&format!("{number:08x}"));
    }
    let mut head = header.into_bytes();
    head.extend_from_slice(name.as_bytes());
    head.push(0);
    head.resize(head.len().next_multiple_of(4), 0);
    let padding = bytes.len().next_multiple_of(4) - bytes.len();
    out.write_all(&head)
        .and_then(|()| out.write_all(bytes))
        .and_then(|()| out.write_all(&[0; 4][..padding]))
        .context("Cannot write the initramfs")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_the_newc_layout_byte_for_byte() {
        let mut list = Initramfs { nodes: BTreeMap::new() };
        list.bytes("/a/f", "hello", 0o644);
        let mut out = Vec::new();
        list.write_cpio(&mut out).unwrap();
        let text = String::from_utf8_lossy(&out).into_owned();
        let fields = |inode: u32, mode: u32, links: u32, size: u32, name: u32| {
            format!(
                "070701{inode:08x}{mode:08x}{0:08x}{0:08x}{links:08x}{0:08x}{size:08x}{0:08x}{0:08x}{0:08x}{0:08x}{name:08x}{0:08x}",
                0
            )
        };
        let mut expected = fields(1, 0o040_755, 2, 0, 2) + "a\0";
        expected += &(fields(2, 0o100_644, 1, 5, 4) + "a/f\0\0\0" + "hello\0\0\0");
        expected += &(fields(0, 0, 1, 0, 11) + "TRAILER!!!\0\0\0\0");
        assert_eq!(text, expected);
    }

    #[test]
    fn folders_come_before_what_is_in_them() {
        let mut list = Initramfs::new();
        list.bytes("/usr/lib/x86/deep", "", 0o600);
        list.link("/bin/sh", "busybox");
        let paths: Vec<_> = list.nodes.keys().collect();
        for (i, path) in paths.iter().enumerate() {
            if let Some((parent, _)) = path.rsplit_once('/').filter(|(parent, _)| !parent.is_empty()) {
                assert!(paths[..i].iter().any(|p| *p == parent), "{path} before {parent}");
            }
        }
    }
}
