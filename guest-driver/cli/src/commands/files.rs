//! Files that commands read and write.
//!
//! Not here: what is in them.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Opens a file to read, and tells its length.
pub(super) fn open_input(path: &Path) -> Result<(File, u64)> {
    let opened = File::open(path).and_then(|file| file.metadata().map(|metadata| (file, metadata.len())));
    opened.with_context(|| format!("Could not open {}", path.display()))
}

/// A file that comes into being with its first byte: a command that fails before leaves what was there.
pub(super) struct Output {
    path: PathBuf,
    file: Option<File>,
}

impl Output {
    /// A file at `path`, which must not be the file at `input`.
    pub(super) fn new(path: &Path, input: Option<&Path>) -> Result<Self> {
        let identity = |path: &Path| path.metadata().map(|metadata| (metadata.dev(), metadata.ino())).ok();
        let same = input.is_some_and(|input| identity(input).is_some() && identity(input) == identity(path));
        ensure!(!same, "Input and output are one file, {}; name another output", path.display());
        Ok(Self { path: path.to_owned(), file: None })
    }

    fn open(&mut self) -> io::Result<&mut File> {
        let file = match self.file.take() {
            Some(file) => file,
            None => File::create(&self.path)?,
        };
        Ok(self.file.insert(file))
    }

    /// Makes sure that all of it is on disk.
    pub(super) fn finish(mut self) -> Result<()> {
        let synced = match self.open().and_then(|file| file.sync_all()) {
            // Pipes and the like cannot be synced.
            Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
            other => other,
        };
        synced.with_context(|| format!("Could not write {}", self.path.display()))
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let path = self.path.display().to_string();
        let written = self.open().and_then(|file| file.write(bytes));
        written.map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
