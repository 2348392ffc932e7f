//! Log lines, to standard error: a worker's begin with whose it is, and come no faster than one reads them.
//!
//! What a VMM or guest does can make a worker write a line; however often it does so, [`BURST`] lines come at once and then one each
//! [`REFILL`], the next one saying how many were left out. Lines of the levels debug and trace are what the operator asked for, and all come.
//!
//! Not here: what is logged.

use std::fmt;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{Format, FormatEvent, FormatFields, Writer};
use tracing_subscriber::registry::LookupSpan;

/// Lines of a worker that may come at once.
const BURST: u32 = 32;
/// Time after which one more may.
const REFILL: Duration = Duration::from_secs(1);

/// Reads a filter. A lone word must be a level: a misspelt one would be the name of a module, and silence everything else.
pub(crate) fn filter(text: &str) -> anyhow::Result<EnvFilter> {
    let lone = |part: &str| !part.contains(['=', '[']) && part.parse::<LevelFilter>().is_err();
    if text.split(',').map(str::trim).all(lone) {
        bail!(
            "{text:?} is no level; write error, warn, info, debug or trace, or a filter such as warn,vmm_daemon=debug"
        );
    }
    EnvFilter::try_new(text).with_context(|| format!("{text:?} is no log filter; write a level such as \"info\""))
}

/// Starts the log of a supervisor, or of a tenant's worker.
pub(crate) fn start(text: &str, tenant: Option<&str>) -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(filter(text)?)
        .with_writer(io::stderr)
        // It would say so on standard error, and panic if that fails, too: a full disk or a reader that is gone must end nothing.
        .log_internal_errors(false)
        .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
        .event_format(Lines {
            tag: tenant.map(|tenant| format!("[{tenant}] ")).unwrap_or_default(),
            limit: tenant.map(|_| Mutex::new(Limit::new(Instant::now()))),
            format: Format::default(),
        })
        .try_init()
        .map_err(|error| anyhow::anyhow!("Cannot start the log: {error}"))
}

/// The usual format behind a tag, for as many lines as there may be.
struct Lines {
    tag: String,
    limit: Option<Mutex<Limit>>,
    format: Format,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        if let Some(limit) = self.limit.as_ref().filter(|_| *event.metadata().level() <= Level::INFO) {
            match limit.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now()) {
                None => return Ok(()),
                Some(0) => {}
                Some(left_out) => writeln!(writer, "{}{left_out} lines were left out, too many came", self.tag)?,
            }
        }
        writer.write_str(&self.tag)?;
        self.format.format_event(context, writer, event)
    }
}

/// A bucket of lines.
#[derive(Debug)]
struct Limit {
    /// When the bucket is full.
    full_at: Instant,
    left_out: u64,
}

impl Limit {
    fn new(now: Instant) -> Self {
        Self { full_at: now, left_out: 0 }
    }

    /// `None` if no line may come now; else how many were left out before it.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let next = self.full_at.max(now) + REFILL;
        if next > now + REFILL * BURST {
            self.left_out = self.left_out.saturating_add(1);
            return None;
        }
        self.full_at = next;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_comes_and_then_a_line_a_second_that_says_how_many_did_not() {
        let start = Instant::now();
        let mut limit = Limit::new(start);
        assert_eq!((0..1000).filter(|_| limit.take(start) == Some(0)).count(), 32);
        assert_eq!(limit.take(start + Duration::from_millis(999)), None);
        assert_eq!(limit.take(start + Duration::from_millis(1000)), Some(969));
        assert_eq!(limit.take(start + Duration::from_millis(1001)), None);
        let later = start + Duration::from_secs(3600);
        assert_eq!(limit.take(later), Some(1));
        assert_eq!((0..1000).filter(|_| limit.take(later).is_some()).count(), 31, "no more than a burst is saved up");
    }

    #[test]
    fn a_misspelt_level_is_not_taken_for_a_module() {
        for good in ["info", "WARN", "off", "warn,vmm_daemon=debug", "vmm_daemon=debug", "error,vmm_vhost_user"] {
            assert!(filter(good).is_ok(), "{good}");
        }
        for bad in ["loud", "inof", "vmm_daemon", "=x="] {
            assert!(filter(bad).is_err(), "{bad}");
        }
    }
}
