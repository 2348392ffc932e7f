//! The directory of a daemon's sockets, which one daemon has at a time.
//!
//! The lock is on the directory itself, so it leaves no file behind and ends with the process, however that ends: at once, or, if that was just
//! starting another one, when that has followed it.
//!
//! Not here: sockets.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;

/// How long a process that was being started may take to follow a daemon that was killed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// A directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RuntimeDirError {
    #[error("Another peergated uses {}; end it, or set daemon.runtime_dir to another directory", path.display())]
    InUse { path: PathBuf },
    #[error("Cannot {operation} the runtime directory {}; make it, or set daemon.runtime_dir to another directory", path.display())]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
}

/// The directory, locked. Removed with the value if this daemon made it and it is empty by then.
#[derive(Debug)]
pub(crate) struct RuntimeDir {
    path: PathBuf,
    made: bool,
    _lock: OwnedFd,
}

impl RuntimeDir {
    /// Locks it. `wait` is asked whether to try again while another daemon has it.
    pub(crate) fn acquire(path: &Path, mut wait: impl FnMut() -> bool) -> Result<Self, RuntimeDirError> {
        let failed =
            |operation| move |source: io::Error| RuntimeDirError::Io { operation, path: path.to_owned(), source };
        let made = !path.exists();
        fs::create_dir_all(path).map_err(failed("make"))?;
        let lock = open(path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| failed("open")(error.into()))?;
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { path: path.to_owned(), made, _lock: lock }),
                Err(Errno::WOULDBLOCK) if wait() => {}
                Err(Errno::WOULDBLOCK) => return Err(RuntimeDirError::InUse { path: path.to_owned() }),
                Err(error) => return Err(failed("lock")(error.into())),
            }
        }
    }
}

impl Drop for RuntimeDir {
    fn drop(&mut self) {
        if self.made {
            // Somebody's file keeps it, which is as well.
            let _ = fs::remove_dir(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acquire(path: &Path) -> Result<RuntimeDir, RuntimeDirError> {
        RuntimeDir::acquire(path, || false)
    }

    #[test]
    fn a_directory_has_one_owner_and_goes_with_the_one_that_made_it() {
        let outer = tempfile::tempdir().unwrap();
        let path = outer.path().join("a/b");
        let first = acquire(&path).unwrap();
        let error = acquire(&path).unwrap_err();
        assert!(matches!(error, RuntimeDirError::InUse { .. }), "{error}");
        drop(first);
        assert!(!path.exists());
    }

    #[test]
    fn a_directory_that_was_there_stays_and_can_be_taken_again() {
        let path = tempfile::tempdir().unwrap();
        drop(acquire(path.path()).unwrap());
        drop(acquire(path.path()).unwrap());
        assert!(path.path().exists());
    }

    #[test]
    fn a_directory_with_a_file_stays() {
        let outer = tempfile::tempdir().unwrap();
        let path = outer.path().join("d");
        let dir = acquire(&path).unwrap();
        fs::write(path.join("file"), "").unwrap();
        drop(dir);
        assert!(path.join("file").exists());
    }

    #[test]
    fn what_is_no_directory_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(acquire(file.path()), Err(RuntimeDirError::Io { operation: "make", .. })));
    }

    #[test]
    fn a_directory_is_waited_for() {
        let path = tempfile::tempdir().unwrap();
        let mut first = Some(acquire(path.path()).unwrap());
        let wait = || {
            first = None;
            true
        };
        RuntimeDir::acquire(path.path(), wait).unwrap();
    }
}
