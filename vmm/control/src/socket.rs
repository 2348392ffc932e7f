//! Socket files: made with their permissions, told apart from somebody else's, removed when they are no longer served.
//!
//! Not here: what is said over them.

use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Longest path of a socket in bytes.
const MAX_PATH: usize = 107;
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 16;

/// A socket that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The kernel has no room for such a path.
    #[error("The socket path {} has {len} bytes; at most {MAX_PATH} are possible, so choose a shorter runtime_dir", path.display())]
    TooLong {
        /// Where.
        path: PathBuf,
        /// Its length in bytes.
        len: usize,
    },
    /// Somebody serves it.
    #[error("Another process listens at {}; end it, or choose another path", path.display())]
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// Something else is in the way.
    #[error("{} exists and is not a socket; remove it, or choose another path", path.display())]
    NotASocket {
        /// Where.
        path: PathBuf,
    },
    /// The system refused.
    #[error("Cannot listen at {}", path.display())]
    Bind {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A listening socket and its file, which is removed when this value goes, unless another has taken its place.
#[derive(Debug)]
pub struct SocketFile {
    listener: UnixListener,
    path: PathBuf,
    identity: (u64, u64),
}

/// Listens at `path`, with the permissions `mode` (as of chmod), and never more than those. A file that a dead process left there is
/// replaced.
pub fn listen(path: &Path, mode: u32) -> Result<SocketFile, ListenError> {
    let len = path.as_os_str().len();
    if len > MAX_PATH {
        return Err(ListenError::TooLong { path: path.to_owned(), len });
    }
    remove_stale(path)?;
    let failed = |source| ListenError::Bind { path: path.to_owned(), source };
    let listener = bind(path, mode).map_err(failed)?;
    let identity = identity(&fs::symlink_metadata(path).map_err(failed)?);
    Ok(SocketFile { listener, path: path.to_owned(), identity })
}

/// The file is made with `mode` less the process's umask, and gets the rest before anybody can connect.
fn bind(path: &Path, mode: u32) -> io::Result<UnixListener> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    fchmod(&socket, Mode::from_raw_mode(mode))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

impl SocketFile {
    /// The listening socket.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for SocketFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_ours = fs::symlink_metadata(&self.path).is_ok_and(|metadata| identity(&metadata) == self.identity);
        if is_ours {
            // If the directory has become read-only there is nothing left to do; the next start sees a stale file.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Removes a socket that nobody serves; refuses anything else.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let failed = |source| ListenError::Bind { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(ListenError::NotASocket { path: path.to_owned() });
        }
        Ok(_) => {}
    }
    match probe(path) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(failed),
        // A listener whose queue is full is one, too.
        Ok(()) | Err(Errno::AGAIN) => Err(ListenError::InUse { path: path.to_owned() }),
        Err(error) => Err(failed(error.into())),
    }
}

/// Connects and hangs up, without waiting.
fn probe(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_has_its_permissions_and_goes_with_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let socket = listen(&path, 0o640).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o640);
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_a_served_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        drop(UnixListener::bind(&path).unwrap());
        let served = listen(&path, 0o600).unwrap();
        // More connections than may wait: the last probe finds the queue full.
        for _ in 0..BACKLOG + 4 {
            assert!(matches!(listen(&path, 0o600), Err(ListenError::InUse { .. })));
        }
        drop(served);
    }

    #[test]
    fn what_is_not_a_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        fs::write(&path, "data").unwrap();
        assert!(matches!(listen(&path, 0o600), Err(ListenError::NotASocket { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), "data");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(matches!(listen(&link, 0o600), Err(ListenError::NotASocket { .. })));
    }

    #[test]
    fn somebody_elses_socket_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let ours = listen(&path, 0o600).unwrap();
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(ours);
        assert!(path.exists());
    }

    #[test]
    fn a_path_too_long_is_refused_with_its_length() {
        let path = Path::new("/tmp").join("x".repeat(200));
        let error = listen(&path, 0o600).unwrap_err();
        assert!(matches!(error, ListenError::TooLong { len: 205, .. }), "{error}");
    }
}
