//! Progress on standard error, for what takes longer than two seconds.
//!
//! On a terminal one line that rewrites itself; else a line every five seconds, so that a log says that something goes on.
//!
//! Not here: threads. Who does the work calls [`Meter::at`] now and then.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::console::amount;

const SILENT: Duration = Duration::from_secs(2);
const REDRAW: Duration = Duration::from_millis(200);
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Where progress goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meters {
    /// Nowhere.
    Quiet,
    /// To a log.
    Lines,
    /// To a person.
    Terminal,
}

impl Meters {
    /// What suits this process's standard error.
    pub fn for_stderr() -> Self {
        if std::io::stderr().is_terminal() { Self::Terminal } else { Self::Lines }
    }

    /// Begins a piece of work of `total` bytes.
    pub fn start(self, label: impl Into<String>, total: u64) -> Meter {
        let now = Instant::now();
        let first = now + SILENT;
        Meter { meters: self, label: label.into(), total, started: now, next: first, drawn: false }
    }
}

/// Progress of one piece of work. Dropping it clears the line.
pub struct Meter {
    meters: Meters,
    label: String,
    total: u64,
    started: Instant,
    next: Instant,
    drawn: bool,
}

impl Meter {
    /// `done` of the bytes are done.
    pub fn at(&mut self, done: u64) {
        let now = Instant::now();
        if self.meters == Meters::Quiet || now < self.next {
            return;
        }
        let text = describe(&self.label, done, self.total, now - self.started);
        let mut stderr = std::io::stderr().lock();
        // Nobody hears of it if standard error is closed; the work goes on.
        let _ = match self.meters {
            Meters::Terminal => write!(stderr, "\r\x1b[K{text}").and_then(|()| stderr.flush()),
            _ => writeln!(stderr, "{text}"),
        };
        self.drawn = true;
        self.next = now + if self.meters == Meters::Terminal { REDRAW } else { LINE_EVERY };
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if self.drawn && self.meters == Meters::Terminal {
            let _ = write!(std::io::stderr().lock(), "\r\x1b[K");
        }
    }
}

#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "for people to read"
)]
fn describe(label: &str, done: u64, total: u64, elapsed: Duration) -> String {
    let percent = done.saturating_mul(100) / total.max(1);
    let rate = done as f64 / elapsed.as_secs_f64().max(1e-9);
    format!("{label}: {percent}% of {} after {} s, {}/s", amount(total), elapsed.as_secs(), amount(rate as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_drawn_in_the_first_two_seconds() {
        let mut meter = Meters::Lines.start("Copying", 100);
        meter.at(50);
        assert!(!meter.drawn);
    }

    #[test]
    fn a_line_says_how_far_and_how_fast() {
        let line = describe("Copying", 32 << 20, 64 << 20, Duration::from_secs(4));
        assert_eq!(line, "Copying: 50% of 64.0 MiB after 4 s, 8.0 MiB/s");
        assert!(describe("Waiting", 0, 0, Duration::ZERO).starts_with("Waiting: 0%"));
    }
}
