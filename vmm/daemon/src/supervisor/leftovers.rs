//! What is left of a daemon that was killed: its processes end with it, but not in the same moment, and until they have they hold its sockets.
//!
//! A daemon that starts waits for that, and no longer than [`PATIENCE`]: whatever holds a socket then is somebody else's. Pauses double, since to look
//! is to connect, which somebody else would notice.
//!
//! Not here: changes while a daemon runs, which wait for nobody.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::Context;
use vmm_control::{ListenError, SocketFile};

/// How long sockets may be held, all of them together.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// First and longest pause between two looks.
const FIRST: Duration = Duration::from_millis(5);
const LONGEST: Duration = Duration::from_millis(500);

/// Pauses, until a certain time.
#[derive(Debug)]
pub(crate) struct Patience {
    until: Instant,
    pause: Duration,
}

impl Patience {
    pub(crate) fn new(most: Duration) -> Self {
        Self { until: Instant::now() + most, pause: FIRST }
    }

    /// Waits a while. False if it is time to give up.
    pub(crate) fn wait(&mut self) -> bool {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        thread::sleep(self.pause.min(left));
        self.pause = (self.pause * 2).min(LONGEST);
        true
    }
}

/// Listens as [`vmm_control::listen`] does, once nobody else does there any more. `wait` is asked whether to look again.
pub(crate) fn listen(path: &Path, mode: u32, mut wait: impl FnMut() -> bool) -> anyhow::Result<SocketFile> {
    let mut told = false;
    loop {
        match vmm_control::listen(path, mode) {
            Err(ListenError::InUse { .. }) if wait() => {
                if !std::mem::replace(&mut told, true) {
                    tracing::info!(path = %path.display(), "Waiting for what may be left of an earlier daemon to end");
                }
            }
            Err(error @ ListenError::InUse { .. }) => {
                let waited = || format!("Waited {} s for what may be left of an earlier daemon", PATIENCE.as_secs());
                return Err(error).with_context(waited);
            }
            result => return Ok(result?),
        }
    }
}

/// Removes a socket whose name only the daemon that has the directory uses, whoever may hold it still.
pub(crate) fn remove_socket(path: &Path) {
    if fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()) {
        // If it cannot go, whoever listens there next says so.
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_is_waited_for_as_long_as_there_is_patience() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let mut holder = Some(UnixListener::bind(&path).unwrap());
        let error = listen(&path, 0o600, || false).unwrap_err();
        let expected = format!(
            "Waited 5 s for what may be left of an earlier daemon: Another process listens at {}; end it, or choose another path",
            path.display()
        );
        assert_eq!(format!("{error:#}"), expected);
        let mut looks = 0;
        let wait = || {
            looks += 1;
            holder = holder.take().filter(|_| looks < 3);
            true
        };
        listen(&path, 0o600, wait).unwrap();
        assert_eq!(looks, 3);
    }

    #[test]
    fn nobody_waits_for_what_will_not_go() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        fs::write(&path, "data").unwrap();
        let error = listen(&path, 0o600, || panic!("it is no socket")).unwrap_err();
        assert!(error.to_string().contains("is not a socket"), "{error}");
        remove_socket(&path);
        assert!(path.exists());
    }

    #[test]
    fn patience_ends() {
        assert!(!Patience::new(Duration::ZERO).wait());
        let mut patience = Patience::new(Duration::from_millis(20));
        assert!(patience.wait());
        while patience.wait() {}
    }
}
