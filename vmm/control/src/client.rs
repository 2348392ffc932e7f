//! The operator's side.
//!
//! Not here: how answers are shown.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::MAX_REPLY;
use crate::message::{ErrorReply, Reply, Request, VERSION, VersionOnly, Versioned, to_line};

/// How long a daemon may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// No answer, or a refusal.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens there.
    #[error("Cannot reach peergated at {}; check that it runs and that this is its control socket", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The connection broke.
    #[error("peergated did not answer")]
    Broken {
        /// Why.
        source: io::Error,
    },
    /// The answer makes no sense.
    #[error("The answer is malformed; is that peergated's control socket?")]
    Malformed {
        /// Where.
        source: serde_json::Error,
    },
    /// The answer is of another version.
    #[error(
        "peergated answers in version {theirs}, this program speaks version {VERSION}; use the peergate that came with it"
    )]
    Version {
        /// The daemon's.
        theirs: u32,
    },
    /// The daemon says no.
    #[error("{}", reply.message)]
    Refused {
        /// Why.
        reply: ErrorReply,
    },
}

/// A connection to a daemon.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to the daemon that listens at `path`.
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        let stream = UnixStream::connect(path)
            .and_then(|stream| {
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_write_timeout(Some(PATIENCE))?;
                Ok(stream)
            })
            .map_err(|source| ClientError::Connect { path: path.to_owned(), source })?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Asks and waits for the answer, 10 seconds at most. An answer that is an error is [`ClientError::Refused`].
    pub fn ask(&mut self, request: &Request) -> Result<Reply, ClientError> {
        let broken = |source| ClientError::Broken { source };
        let malformed = |source| ClientError::Malformed { source };
        let line = to_line(request).map_err(malformed)?;
        self.stream.get_mut().write_all(&line).map_err(broken)?;
        let mut answer = Vec::new();
        (&mut self.stream).take(MAX_REPLY as u64).read_until(b'\n', &mut answer).map_err(broken)?;
        if answer.last() != Some(&b'\n') {
            return Err(broken(io::ErrorKind::UnexpectedEof.into()));
        }
        let VersionOnly { version } = serde_json::from_slice(&answer).map_err(malformed)?;
        if version != VERSION {
            return Err(ClientError::Version { theirs: version });
        }
        let answer: Versioned<Reply> = serde_json::from_slice(&answer).map_err(malformed)?;
        match answer.body {
            Reply::Error(reply) => Err(ClientError::Refused { reply }),
            reply => Ok(reply),
        }
    }
}
