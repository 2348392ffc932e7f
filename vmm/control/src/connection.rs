//! The server's side of one client.
//!
//! A state machine without blocking: bytes come in until a line is whole, its answer goes out, and only then does the next line count. What
//! is held for a client is bounded by one request and one answer. A client may close, stop reading or send nonsense at any point; the
//! worst it gets is the end of its own connection.
//!
//! Not here: waiting for the descriptor, the answers.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use crate::message::{ErrorCode, ErrorReply, Reply, Request, VERSION, VersionOnly, Versioned, to_line};
use crate::{MAX_REPLY, MAX_REQUEST};

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Bytes from the client.
    Read,
    /// Room for more of the answer, or its turn.
    Write,
    /// Nothing: it is over.
    Close,
}

/// One client.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    input: Vec<u8>,
    output: Vec<u8>,
    sent: usize,
    /// No request counts any more; close once the output is out.
    ending: bool,
}

impl Connection {
    /// Takes a client that was just accepted.
    pub fn new(stream: UnixStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, input: Vec::new(), output: Vec::new(), sent: 0, ending: false })
    }

    /// Goes as far as it can without blocking, and answers one request at most. Call it whenever the descriptor is ready for what it said
    /// it waits for.
    pub fn advance(&mut self, answer: impl FnOnce(Request) -> Reply) -> Interest {
        if !self.flush() {
            return Interest::Close;
        }
        if self.pending() {
            return Interest::Write;
        }
        if !self.ending && !self.has_line() && !self.fill() {
            return Interest::Close;
        }
        if let Some(line) = self.take_line() {
            let reply = self.reply(&line, answer);
            self.queue(&reply);
            if !self.flush() {
                return Interest::Close;
            }
        }
        match (self.pending() || self.has_line(), self.ending) {
            (true, _) => Interest::Write,
            (false, true) => Interest::Close,
            (false, false) => Interest::Read,
        }
    }

    fn pending(&self) -> bool {
        self.sent < self.output.len()
    }

    fn has_line(&self) -> bool {
        !self.ending && (self.input.contains(&b'\n') || self.input.len() >= MAX_REQUEST)
    }

    /// Reads what there is, up to the bound. False once nothing more can come.
    fn fill(&mut self) -> bool {
        let mut buffer = [0; MAX_REQUEST];
        let room = MAX_REQUEST.saturating_sub(self.input.len());
        match self.stream.read(&mut buffer[..room]) {
            Ok(0) => false,
            Ok(count) => {
                self.input.extend_from_slice(&buffer[..count]);
                true
            }
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    /// The next line without its end; all there is if that is too much for a line.
    fn take_line(&mut self) -> Option<Vec<u8>> {
        if !self.has_line() {
            return None;
        }
        let Some(end) = self.input.iter().position(|byte| *byte == b'\n') else {
            self.ending = true;
            return Some(std::mem::take(&mut self.input));
        };
        let rest = self.input.split_off(end + 1);
        let mut line = std::mem::replace(&mut self.input, rest);
        line.truncate(end);
        Some(line)
    }

    fn reply(&mut self, line: &[u8], answer: impl FnOnce(Request) -> Reply) -> Reply {
        match parse(line, self.ending) {
            Ok(request) => answer(request),
            Err(error) => {
                self.ending = true;
                Reply::Error(error)
            }
        }
    }

    fn queue(&mut self, reply: &Reply) {
        let line = to_line(reply).ok().filter(|line| line.len() <= MAX_REPLY);
        self.output = line.unwrap_or_else(|| {
            self.ending = true;
            let message = format!("The answer is longer than {MAX_REPLY} bytes; ask for less");
            to_line(Reply::Error(ErrorReply { code: ErrorCode::TooLong, message })).unwrap_or_default()
        });
        self.sent = 0;
    }

    /// Sends what fits. False if the client is gone.
    fn flush(&mut self) -> bool {
        while self.pending() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(0) => return false,
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
        self.output = Vec::new();
        self.sent = 0;
        true
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn parse(line: &[u8], too_long: bool) -> Result<Request, ErrorReply> {
    let error = |code, message| ErrorReply { code, message };
    if too_long {
        let message = format!("A request has {MAX_REQUEST} bytes at most, its line end included");
        return Err(error(ErrorCode::TooLong, message));
    }
    let malformed = |source: serde_json::Error| {
        error(ErrorCode::Malformed, format!("Not a request of version {VERSION}: {source}"))
    };
    let VersionOnly { version } = serde_json::from_slice(line).map_err(malformed)?;
    if version != VERSION {
        let message = format!(
            "This daemon speaks version {VERSION}, the request is of version {version}; use the peergate that came with it"
        );
        return Err(error(ErrorCode::Version, message));
    }
    let request: Versioned<Request> = serde_json::from_slice(line).map_err(malformed)?;
    Ok(request.body)
}
