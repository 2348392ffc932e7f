//! Log lines, to standard error: those of a tenant's processes begin with whose they are, and come no faster than one reads them.
//!
//! What a VMM or guest does can make a process write a line, and however often it does so, [`LINE_BURST`] lines come at once and then one a
//! second, the next one saying how many were left out. That holds for the tenant, not for a process, of which a VMM that comes and goes has one
//! after another: a worker's lines are counted in the tenant's page, by level; the supervisor counts each kind of line that names a tenant for
//! that tenant, so that no kind hides another. Lines of the levels debug and trace are what the operator asked for, and all come.
//!
//! Not here: what is logged.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{Format, FormatEvent, FormatFields, Writer};
use tracing_subscriber::registry::LookupSpan;
use vmm_broker::{LINE_BURST, TenantPage};

/// Time after which one more line may come.
const REFILL: Duration = Duration::from_secs(1);
/// Kinds of lines and tenants that a supervisor counts at a time; the daemon has fewer.
const MOST_KINDS: usize = 4096;

/// Where a worker's lines are counted, once it is known.
static PAGE: OnceLock<Arc<TenantPage>> = OnceLock::new();

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

/// From now on this process, a worker, counts its lines in the tenant's page.
pub(crate) fn count_in(page: Arc<TenantPage>) {
    // Nobody says it twice.
    let _ = PAGE.set(page);
}

/// Starts the log of a supervisor, or of another process, which is `tenant`'s.
pub(crate) fn start(text: &str, tenant: Option<&str>) -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(filter(text)?)
        .with_writer(io::stderr)
        // It would say so on standard error, and panic if that fails, too: a full disk or a reader that is gone must end nothing.
        .log_internal_errors(false)
        .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
        .event_format(Lines {
            tag: tenant.map(|tenant| format!("[{tenant}] ")).unwrap_or_default(),
            limits: if tenant.is_some() { Limits::of_process() } else { Limits::of_supervisor() },
            format: Format::default(),
        })
        .try_init()
        .map_err(|error| anyhow::anyhow!("Cannot start the log: {error}"))
}

/// The usual format behind a tag, for as many lines as there may be.
struct Lines {
    tag: String,
    limits: Limits,
    format: Format,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        match self.limits.take(event) {
            None => return Ok(()),
            Some(0) => {}
            Some(left_out) => writeln!(writer, "{}{left_out} lines were left out, too many came", self.tag)?,
        }
        writer.write_str(&self.tag)?;
        self.format.format_event(context, writer, event)
    }
}

/// How many lines there may be.
#[derive(Debug)]
enum Limits {
    /// Of a process of one tenant, before it knows the tenant's page or if it has none.
    Process(Mutex<Limit>),
    /// Of a supervisor, for each tenant and place in the program that writes lines about one.
    Supervisor(Mutex<HashMap<(String, Identifier), Limit>>),
}

impl Limits {
    fn of_process() -> Self {
        Self::Process(Mutex::new(Limit::new(Instant::now())))
    }

    fn of_supervisor() -> Self {
        Self::Supervisor(Mutex::default())
    }

    /// `None` if this line may not come now; else how many like it were left out before it.
    fn take(&self, event: &Event<'_>) -> Option<u64> {
        let (level, now) = (*event.metadata().level(), Instant::now());
        if level > Level::INFO {
            return Some(0);
        }
        match self {
            Self::Process(limit) => match PAGE.get() {
                Some(page) => page.take_line(kind(level)),
                None => limit.lock().unwrap_or_else(PoisonError::into_inner).take(now),
            },
            Self::Supervisor(limits) => {
                let Some(tenant) = Tenant::of(event) else { return Some(0) };
                let mut limits = limits.lock().unwrap_or_else(PoisonError::into_inner);
                if limits.len() >= MOST_KINDS {
                    limits.retain(|_, limit| limit.full_at > now);
                }
                let key = (tenant, event.metadata().callsite());
                limits.entry(key).or_insert_with(|| Limit::new(now)).take(now)
            }
        }
    }
}

fn kind(level: Level) -> usize {
    match level {
        Level::ERROR => 0,
        Level::WARN => 1,
        _ => 2,
    }
}

/// Looks for the tenant that a line is about, or whose process.
#[derive(Debug, Default)]
struct Tenant(Option<String>);

impl Tenant {
    fn of(event: &Event<'_>) -> Option<String> {
        let mut tenant = Self::default();
        event.record(&mut tenant);
        tenant.0
    }
}

impl Visit for Tenant {
    fn record_str(&mut self, field: &Field, value: &str) {
        if matches!(field.name(), "tenant" | "who") {
            self.0 = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, _field: &Field, _value: &dyn fmt::Debug) {}
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
        if next > now + REFILL * u32::try_from(LINE_BURST).unwrap_or(0) {
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

    /// What a supervisor's log lets through while `log` runs.
    fn supervisor(log: impl FnOnce()) -> String {
        #[derive(Clone, Default)]
        struct Text(Arc<Mutex<Vec<u8>>>);
        impl io::Write for Text {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let text = Text::default();
        let written = text.clone();
        let lines = Lines { tag: String::new(), limits: Limits::of_supervisor(), format: Format::default() };
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || written.clone()).event_format(lines);
        tracing::subscriber::with_default(subscriber.finish(), log);
        let bytes = text.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn a_tenant_that_makes_a_supervisor_write_hides_no_other_line_and_no_other_tenant() {
        let text = supervisor(|| {
            let again = |tenant: &str| tracing::info!(tenant, "A VMM has come");
            (0..1000).for_each(|_| again("loud"));
            again("quiet");
            tracing::error!(tenant = "loud", "Another line");
            (0..100).for_each(|_| tracing::warn!("About no tenant"));
        });
        assert_eq!(text.matches("A VMM has come tenant=\"loud\"").count(), 32, "{text}");
        assert_eq!(text.matches("A VMM has come tenant=\"quiet\"").count(), 1);
        assert_eq!((text.matches("Another line").count(), text.matches("About no tenant").count()), (1, 100));
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
