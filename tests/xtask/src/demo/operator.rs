//! The operator's side: each refusal that the guest saw stands in `peergate faults` too, and the counters agree. And an operator who changes the
//! tenant's slices while the guest runs.
//!
//! Not here: the guest's side.

use anyhow::{Context, Result};
use serde_json::Value;

use super::TENANT;
use super::daemon::Daemon;
use super::rows::{Fault, Row, Rows};

/// A device that no tenant has a slice of at first, for the configuration.
pub const SPARE: &str = "[[device]]\nname = \"gpu1\"\nkind = \"gpu\"\nmemory = \"16MiB\"\n";

const ADD: &[&str] = &["slice", "add", TENANT, "--device", "gpu1", "--memory", "16MiB", "--force"];
const ADD_LAST: &[&str] =
    &["slice", "add", TENANT, "--device", "gpu1", "--memory", "16MiB", "--name", "last", "--force"];
const REMOVE: &[&str] = &["slice", "remove", TENANT, "gpu1", "--force"];

/// What the driver's tests say on the guest's console, and what the operator does then. The last two come while the guest begins a session.
const CUES: &[(&str, &[&str])] = &[
    ("operator: add a slice", ADD),
    ("operator: take it away", REMOVE),
    ("operator: no, take it away", REMOVE),
    ("operator: no, another one", ADD_LAST),
];

/// Does what a line of the guest's console asks the operator to do, if it asks anything.
///
/// # Errors
/// When the daemon refuses.
pub fn heed(daemon: &Daemon, line: &str) -> Result<()> {
    let asked = CUES.iter().find(|(cue, _)| line.contains(cue));
    asked.map_or(Ok(()), |(_, command)| daemon.ask(command).map(drop))
}

/// Adds a row for each refusal, and one for the tenant's state.
///
/// # Errors
/// When the daemon does not answer.
pub fn judge(daemon: &Daemon, rows: &mut Rows) -> Result<()> {
    let answer = daemon.ask(&["faults", "--tenant", TENANT])?;
    let mut records: Vec<&Value> = answer["faults"].as_array().context("peergate faults has no list")?.iter().collect();
    let seen: Vec<(String, Fault)> =
        rows.all().iter().filter_map(|row| Some((row.name.clone(), row.fault.clone()?))).collect();
    for (name, fault) in &seen {
        let expected = words(fault);
        let found = records.iter().position(|record| record_words(record) == expected);
        let got = found.map_or_else(|| "no such record".to_owned(), |place| record_words(records.remove(place)));
        rows.add(Row::new(format!("operator/{name}"), expected, got));
    }
    if seen.is_empty() {
        rows.add(Row::new("operator/refusals", "some", "none"));
    }
    Ok(())
}

fn words(fault: &Fault) -> String {
    let accessor = fault.accessor.map_or_else(|| "nobody".to_owned(), |accessor| accessor.to_string());
    format!(
        "{} {} at {:#x} by {accessor}, cookie {:#x}, value {:#x}",
        fault.reason, fault.access, fault.address, fault.cookie, fault.value
    )
}

fn record_words(record: &Value) -> String {
    let text = |key: &str| record[key].as_str().unwrap_or("?").to_owned();
    let number = |key: &str| record[key].as_u64().unwrap_or(u64::MAX);
    words(&Fault {
        reason: text("reason"),
        address: number("address"),
        access: text("access").replace("read-write", "read and write"),
        accessor: record["accessor"]["endpoint"].as_u64().and_then(|endpoint| u32::try_from(endpoint).ok()),
        cookie: number("cookie"),
        value: number("value"),
    })
}
