//! The configuration file: the one truth about what the daemon is to do, changed as a whole or not at all.
//!
//! A new text goes into a file beside the old one, is brought to the disk, gets the old one's owner and permissions and takes its name: at
//! every moment, also if the daemon or the host dies, the name leads to the old text or to the new one. A symbolic link stays and what it
//! leads to is replaced. What somebody else has written since the daemon read the file is never overwritten.
//!
//! Extended attributes and further hard links stay with the old file. Not here: what the text means, who may change it.

use std::fs::{self, File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::{Config, ConfigError, DaemonConfig};

/// Most bytes of a file: far more than every tenant and device with every key needs.
const MAX_LEN: u64 = 4 << 20;

/// A file that cannot be read again or replaced. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Somebody has edited it.
    #[error("{} has been edited since peergated read it; run peergate reload first", path.display())]
    Edited {
        /// Which.
        path: PathBuf,
    },
    /// A pipe, a device, a folder.
    #[error("{} is not a regular file, so it cannot be read again; nothing was changed", path.display())]
    NotAFile {
        /// Which.
        path: PathBuf,
    },
    /// No configuration is that large.
    #[error("{} has more than {MAX_LEN} bytes; nothing was changed", path.display())]
    TooLarge {
        /// Which.
        path: PathBuf,
    },
    /// It cannot be read.
    #[error("Cannot read {}; nothing was changed", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It cannot be replaced.
    #[error(
        "Cannot {operation} {}, so nothing was changed; let peergated write there, or edit the file by hand and run peergate reload",
        path.display()
    )]
    Write {
        /// What failed.
        operation: &'static str,
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The file of a daemon that runs.
#[derive(Debug)]
pub struct Store {
    /// Absolute.
    path: PathBuf,
    /// The text that the daemon has read or written last.
    text: String,
    /// What the command line says in place of `daemon.log`.
    log: Option<String>,
}

/// A moment in a replacement, at which a test may let it fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Make,
    Write,
    Own,
    Sync,
    Rename,
    SyncFolder,
}

impl Store {
    /// Reads the configuration for the first time; `log` is what the command line says in place of `daemon.log`.
    ///
    /// # Errors
    /// A file that cannot be read or is none.
    pub fn open(path: &Path, log: Option<String>) -> Result<(Self, Config), ConfigError> {
        let failed = |source| ConfigError::Read { path: path.to_owned(), source };
        // From here on it is the same file whatever becomes of the working directory.
        let absolute = std::path::absolute(path).map_err(failed)?;
        let text = fs::read_to_string(path).map_err(failed)?;
        let mut config = Config::parse(path, &text)?;
        config.daemon.log = log.clone().unwrap_or(config.daemon.log);
        Ok((Self { path: absolute, text, log }, config))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The text that the daemon has read or written last.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What is on disk now.
    ///
    /// # Errors
    /// See [`StoreError`]. Does not wait for a pipe or read without end.
    pub fn read(&self) -> Result<String, StoreError> {
        let failed = |source| StoreError::Read { path: self.path.clone(), source };
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut file = OpenOptions::new().read(true).custom_flags(flags).open(&self.path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(StoreError::NotAFile { path: self.path.clone() });
        }
        let mut text = String::new();
        (&mut file).take(MAX_LEN + 1).read_to_string(&mut text).map_err(failed)?;
        if u64::try_from(text.len()).is_ok_and(|len| len > MAX_LEN) {
            return Err(StoreError::TooLarge { path: self.path.clone() });
        }
        Ok(text)
    }

    /// What a text means beside the daemon that runs, and what it says about the daemon itself.
    ///
    /// # Errors
    /// A text that is no configuration.
    pub fn parse(&self, text: &str, running: &DaemonConfig) -> Result<(Config, DaemonConfig), ConfigError> {
        let (config, mut daemon) = Config::parse_beside(&self.path, text, running)?;
        daemon.log = self.log.clone().unwrap_or(daemon.log);
        Ok((config, daemon))
    }

    /// Refuses if the file is not what the daemon has read or written last.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn check_unedited(&self) -> Result<(), StoreError> {
        if self.read()? == self.text { Ok(()) } else { Err(StoreError::Edited { path: self.path.clone() }) }
    }

    /// What is on disk is what runs.
    pub fn accept(&mut self, text: String) {
        self.text = text;
    }

    /// Puts a new text in the file's place, if it still is what the daemon has read or written last.
    ///
    /// # Errors
    /// See [`StoreError`]; the file is as it was.
    pub fn replace(&mut self, text: String) -> Result<(), StoreError> {
        self.replace_by_steps(text, |_| Ok(()))
    }

    fn replace_by_steps(&mut self, text: String, mut at: impl FnMut(Step) -> io::Result<()>) -> Result<(), StoreError> {
        self.check_unedited()?;
        let failed = |operation, path: &Path| {
            let path = path.to_owned();
            move |source| StoreError::Write { operation, path, source }
        };
        let target = fs::canonicalize(&self.path).map_err(failed("find", &self.path))?;
        // Who may not write the file shall not replace it either.
        let old = OpenOptions::new().write(true).open(&target).map_err(failed("write", &target))?;
        let fresh = beside(&target);
        at(Step::Make).and_then(|()| remove_leftover(&fresh)).map_err(failed("make", &fresh))?;
        let written = write_like(&old, &fresh, &text, &mut at).map_err(failed("write", &fresh));
        let renamed = written.and_then(|()| {
            // Looked at again: the disk may have been slow.
            self.check_unedited()?;
            at(Step::Rename).and_then(|()| fs::rename(&fresh, &target)).map_err(failed("replace", &target))
        });
        if let Err(error) = renamed {
            // It may not even exist.
            let _ = fs::remove_file(&fresh);
            return Err(error);
        }
        self.text = text;
        let folder = target.parent().unwrap_or(Path::new("/"));
        if let Err(error) = at(Step::SyncFolder).and_then(|()| File::open(folder)?.sync_all()) {
            // The new text is in force; only a power failure in this moment could bring the old one back.
            tracing::warn!(folder = %folder.display(), %error, "Cannot bring the configuration's folder to the disk");
        }
        Ok(())
    }
}

/// Tells a text from others, within one process.
pub fn fingerprint(text: &str) -> String {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Always the same name, so that daemons that die leave one file at most.
fn beside(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.peergated-new"))
}

fn remove_leftover(fresh: &Path) -> io::Result<()> {
    match fs::remove_file(fresh) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Writes a file that did not exist, with the owner and permissions of `old`. Nobody else can open it before it has them.
fn write_like(old: &File, fresh: &Path, text: &str, at: &mut impl FnMut(Step) -> io::Result<()>) -> io::Result<()> {
    let like = old.metadata()?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(fresh)?;
    at(Step::Write)?;
    file.write_all(text.as_bytes())?;
    at(Step::Own)?;
    let own = file.metadata()?;
    if (own.uid(), own.gid()) != (like.uid(), like.gid()) {
        fchown(&file, Some(like.uid()), Some(like.gid()))?;
    }
    file.set_permissions(fs::Permissions::from_mode(like.mode() & 0o7777))?;
    at(Step::Sync)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    const OLD: &str = include_str!("../../../../configs/demo.toml");

    fn new() -> String {
        OLD.replace("512", "256")
    }

    /// A file with unusual permissions, open as the daemon has it.
    fn store() -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        fs::write(&path, OLD).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let (store, _) = Store::open(&path, None).unwrap();
        (dir, store)
    }

    fn files(dir: &Path) -> Vec<String> {
        let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_with_its_owner_and_permissions() {
        let (dir, mut store) = store();
        let path = dir.path().join("c.toml");
        let own = fs::metadata(&path).unwrap().uid() == 0;
        if own {
            std::os::unix::fs::chown(&path, Some(12), Some(34)).unwrap();
        }
        let before = fs::metadata(&path).unwrap();
        store.replace(new()).unwrap();
        let after = fs::metadata(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), new());
        assert_eq!((after.mode(), after.uid(), after.gid()), (before.mode(), before.uid(), before.gid()));
        assert_ne!(after.ino(), before.ino(), "replaced, not overwritten");
        assert_eq!((store.text(), files(dir.path())), (new().as_str(), vec!["c.toml".to_owned()]));
        store.replace(OLD.to_owned()).unwrap();
    }

    #[test]
    fn a_link_stays_and_what_it_leads_to_is_replaced() {
        let (dir, _) = store();
        let (link, elsewhere) = (dir.path().join("link"), tempfile::tempdir().unwrap());
        fs::rename(dir.path().join("c.toml"), elsewhere.path().join("real.toml")).unwrap();
        symlink(elsewhere.path().join("real.toml"), &link).unwrap();
        let (mut store, _) = Store::open(&link, None).unwrap();
        store.replace(new()).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(elsewhere.path().join("real.toml")).unwrap(), new());
        assert_eq!(files(elsewhere.path()), ["real.toml"]);
    }

    #[test]
    fn what_somebody_else_wrote_is_not_overwritten() {
        let (dir, mut store) = store();
        let path = dir.path().join("c.toml");
        let theirs = OLD.replace("512", "64");
        fs::write(&path, &theirs).unwrap();
        assert!(matches!(store.replace(new()), Err(StoreError::Edited { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), theirs);
        store.accept(theirs);
        // In the middle of a replacement, too.
        let late = OLD.replace("512", "32");
        let meanwhile = |step| if step == Step::Sync { fs::write(&path, &late) } else { Ok(()) };
        assert!(matches!(store.replace_by_steps(new(), meanwhile), Err(StoreError::Edited { .. })));
        assert_eq!((fs::read_to_string(&path).unwrap(), files(dir.path())), (late, vec!["c.toml".to_owned()]));
    }

    #[test]
    fn whatever_fails_the_file_is_the_old_one_or_the_new_one() {
        let steps = [Step::Make, Step::Write, Step::Own, Step::Sync, Step::Rename, Step::SyncFolder];
        for step in steps {
            let (dir, mut store) = store();
            let path = dir.path().join("c.toml");
            let fail = |at| if at == step { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) };
            let result = store.replace_by_steps(new(), fail);
            let expected = if step == Step::SyncFolder { new() } else { OLD.to_owned() };
            assert_eq!(result.is_ok(), step == Step::SyncFolder);
            assert_eq!((fs::read_to_string(&path).unwrap(), store.text()), (expected.clone(), expected.as_str()));
            assert_eq!(files(dir.path()), ["c.toml"], "{step:?}");

            // And if the daemon dies there, without a chance to tidy up.
            let die = |at| if at == step { panic!("killed at {step:?}") } else { Ok(()) };
            let wanted = if step == Step::SyncFolder { OLD } else { &new() };
            assert!(catch_unwind(AssertUnwindSafe(|| store.replace_by_steps(wanted.to_owned(), die))).is_err());
            let (mut next, _) = Store::open(&path, None).unwrap();
            assert!([OLD, &new()].contains(&next.text()));
            next.replace("# third\n".to_owned() + OLD).unwrap();
            assert_eq!(files(dir.path()), ["c.toml"], "the next one tidies up after {step:?}");
        }
    }

    #[test]
    fn what_is_no_regular_file_is_neither_read_again_nor_replaced() {
        let (dir, mut store) = store();
        let path = dir.path().join("c.toml");
        fs::remove_file(&path).unwrap();
        assert!(matches!(store.replace(new()), Err(StoreError::Read { .. })));
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        assert!(matches!(store.replace(new()), Err(StoreError::NotAFile { .. })), "without waiting for a writer");
        fs::remove_file(&path).unwrap();
        File::create(&path).unwrap().set_len(MAX_LEN + 1).unwrap();
        assert!(matches!(store.read(), Err(StoreError::TooLarge { .. })));
    }

    #[test]
    fn the_command_lines_log_stands_in_for_the_files() {
        let (dir, _) = store();
        let (store, config) = Store::open(&dir.path().join("c.toml"), Some("warn".into())).unwrap();
        assert_eq!(config.daemon.log, "warn");
        let (_, daemon) = store
            .parse(
                "[daemon]\nlog = \"debug\"\n[[device]]\nname = \"g\"\nkind = \"gpu\"\nmemory = 4096\n",
                &config.daemon,
            )
            .unwrap();
        assert_eq!(daemon.log, "warn");
    }
}
