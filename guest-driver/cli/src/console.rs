//! What a command says: text for people or JSON for programs on standard output, each line once.
//!
//! A reader that goes away is no error: the console remembers that it did, and the command ends as if all had been read.
//!
//! Not here: progress ([`crate::Meters`]), which goes to standard error.

use std::io::{self, ErrorKind, IsTerminal, Write};

use peergate_guest::Moved;
use serde::Serialize;
use serde_json::{Value, json};

use crate::Meters;

/// Where a command's lines go.
pub struct Console<'a> {
    out: &'a mut dyn Write,
    json: bool,
    colour: bool,
    broken: bool,
    meters: Meters,
}

impl<'a> Console<'a> {
    /// Lines to `out`, without colour or progress.
    pub fn new(out: &'a mut dyn Write, json: bool) -> Self {
        Self { out, json, colour: false, broken: false, meters: Meters::Quiet }
    }

    /// Adds what this process's standard streams are good for.
    #[must_use]
    pub fn for_process(mut self) -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        self.colour = wanted && !self.json && io::stdout().is_terminal();
        self.meters = Meters::for_stderr();
        self
    }

    /// Where progress goes.
    pub fn meters(&self) -> Meters {
        self.meters
    }

    /// Whether the reader went away.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Says one thing: `text` to people, `value` to programs.
    ///
    /// # Errors
    /// What writing answers.
    pub fn say(&mut self, text: &str, value: &impl Serialize) -> io::Result<()> {
        let line = if self.json { serde_json::to_string(value)? } else { text.to_owned() };
        let written = writeln!(self.out, "{line}").and_then(|()| self.out.flush());
        self.broken |= written.as_ref().is_err_and(|error| error.kind() == ErrorKind::BrokenPipe);
        written
    }

    /// A word in green or red, on a terminal.
    pub fn verdict(&self, ok: bool) -> &'static str {
        match (ok, self.colour) {
            (true, true) => "\x1b[32mok\x1b[0m  ",
            (true, false) => "ok  ",
            (false, true) => "\x1b[31mFAIL\x1b[0m",
            (false, false) => "FAIL",
        }
    }
}

/// A remark on standard error, where no program reads it.
pub fn remark(text: &str) {
    // Nobody hears of it if standard error is closed, and nothing depends on it.
    let _ = writeln!(io::stderr(), "{text}");
}

/// Bytes with a binary unit and one digit.
#[allow(clippy::cast_precision_loss, reason = "for people to read")]
pub fn amount(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    if value < 1024.0 {
        return format!("{bytes} B");
    }
    let mut chosen = units[0];
    for unit in units {
        value /= 1024.0;
        chosen = unit;
        if value < 1024.0 {
            break;
        }
    }
    format!("{value:.1} {chosen}")
}

/// A transfer for people.
pub fn moved_text(moved: &Moved) -> String {
    let other = moved.other.map(|(path, reason)| format!(", some {} ({})", path.name(), reason.name()));
    format!(
        "{} bytes in {:.4} s, {:.2} GB/s, {} ({}){}",
        moved.bytes,
        moved.elapsed.as_secs_f64(),
        moved.gb_per_s(),
        moved.path.name(),
        moved.reason.name(),
        other.unwrap_or_default()
    )
}

/// A transfer for programs.
pub fn moved_json(moved: &Moved) -> Value {
    let value = json!({
        "bytes": moved.bytes,
        "seconds": moved.elapsed.as_secs_f64(),
        "gb_per_s": moved.gb_per_s(),
        "path": moved.path.name(),
        "reason": moved.reason.name(),
    });
    match moved.other {
        Some((path, reason)) => with(value, json!({"other_path": path.name(), "other_reason": reason.name()})),
        None => value,
    }
}

/// `value` with the members of `more` added.
pub fn with(mut value: Value, more: Value) -> Value {
    if let (Value::Object(object), Value::Object(more)) = (&mut value, more) {
        object.extend(more);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Gone;

    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_went_away_is_remembered() {
        let mut gone = Gone;
        let mut console = Console::new(&mut gone, false);
        assert!(console.say("text", &json!({})).is_err());
        assert!(console.is_broken());
    }

    #[test]
    fn json_replaces_text() {
        let mut out = Vec::new();
        Console::new(&mut out, true).say("text", &json!({"a": 1})).expect("a vector takes everything");
        assert_eq!(out, b"{\"a\":1}\n");
    }

    #[test]
    fn amounts_are_short() {
        assert_eq!(amount(0), "0 B");
        assert_eq!(amount(1023), "1023 B");
        assert_eq!(amount(1536), "1.5 KiB");
        assert_eq!(amount(64 << 20), "64.0 MiB");
        assert_eq!(amount(u64::MAX), "16777216.0 TiB");
    }
}
