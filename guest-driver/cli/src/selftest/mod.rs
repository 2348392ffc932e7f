//! What a Peergate device must do and must refuse, tried from a guest's side.
//!
//! A scenario is a list of cases (`cases`); each opens the device anew, so that none depends on another, and yields rows: what was
//! expected, what came. A refusal counts only if completion and fault event both say who was refused, what, where and why.
//!
//! Not here: the operator's view of the same refusals; `peergate faults` on the host has that.

mod atomics;
mod gpus;
mod isolation;
mod loss;
mod moves;
mod refusals;
mod registers;
mod streams;
pub(crate) mod witness;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use peergate_guest::{Driver, EndpointInfo, EndpointKind, FaultReason, Moved, Notice, Session, TransferPath};
use serde::Serialize;
use serde_json::json;

use crate::args::SelftestArgs;
use crate::commands::access_text;
use crate::console::{Console, moved_json, moved_text, remark, with};
use crate::{Meters, chain};

/// What to try.
#[derive(Clone, Debug)]
pub struct Options {
    /// File for the main job; a pattern of `size` bytes without it.
    pub file: Option<PathBuf>,
    /// Bytes that cases move which move many; not 0.
    pub size: u64,
    /// Names of the cases to run; none means all.
    pub only: Vec<String>,
    /// Path that copies between GPU and FPGA are to take.
    pub path: TransferPath,
    /// Where progress goes.
    pub meters: Meters,
}

impl Default for Options {
    fn default() -> Self {
        Self { file: None, size: 8 << 20, only: Vec::new(), path: TransferPath::Direct, meters: Meters::Quiet }
    }
}

/// One thing that was tried.
#[derive(Clone, Debug)]
pub struct Row {
    /// What.
    pub name: String,
    /// What had to come.
    pub expected: String,
    /// What came.
    pub got: String,
    /// Whether that is the same.
    pub ok: bool,
    /// Of a row about bytes that moved: how many, how fast, which way.
    pub moved: Option<Moved>,
    /// Of a refusal: the fault event that came with it.
    pub fault: Option<Notice>,
}

impl Row {
    fn new(name: &str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        let (expected, got) = (expected.into(), got.into());
        Self { name: name.to_owned(), ok: expected == got, expected, got, moved: None, fault: None }
    }

    /// A row about bytes that are to take `path`.
    fn moved(name: &str, path: TransferPath, moved: Moved) -> Self {
        Self { moved: Some(moved), ..Self::new(name, path.name(), moved.path.name()) }
    }

    /// A row about a refusal, with the fault event that came.
    fn refusal(name: &str, expected: impl Into<String>, got: impl Into<String>, fault: Option<Notice>) -> Self {
        Self { fault, ..Self::new(name, expected, got) }
    }

    /// The row as an object: name, expected, got, ok; of moved bytes also bytes, seconds, gb_per_s, path, reason; of a refusal also fault, as
    /// the operator's log has it.
    pub fn to_json(&self) -> serde_json::Value {
        let row = json!({"name": self.name, "expected": self.expected, "got": self.got, "ok": self.ok});
        let row = self.moved.iter().fold(row, |row, moved| with(row, moved_json(moved)));
        self.fault.iter().fold(row, |row, fault| with(row, json!({"fault": fault_json(fault)})))
    }
}

fn fault_json(fault: &Notice) -> serde_json::Value {
    json!({
        "reason": fault.reason.map(FaultReason::name),
        "address": fault.address,
        "access": access_text(fault.access),
        "accessor": fault.accessor,
        "cookie": fault.cookie,
        "value": fault.value,
    })
}

impl Serialize for Row {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.to_json().serialize(serializer)
    }
}

/// How a scenario came out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Rows in all.
    pub rows: usize,
    /// Rows that are not as expected.
    pub failed: usize,
}

impl Summary {
    fn report(&mut self, rows: &[Row], report: &mut dyn FnMut(&Row)) {
        for row in rows {
            self.rows += 1;
            self.failed += usize::from(!row.ok);
            report(row);
        }
    }
}

/// Who takes part.
struct Bench<'a> {
    driver: &'a dyn Driver,
    gpu: EndpointInfo,
    fpga: EndpointInfo,
    /// With whom the GPU exchanges bytes, and the path that those are to take.
    peer: EndpointInfo,
    path: TransferPath,
    options: &'a Options,
}

impl<'a> Bench<'a> {
    fn of(driver: &'a dyn Driver, options: &'a Options) -> Result<Self> {
        let endpoints = Session::open(driver)?.endpoints()?;
        let first = |kind: EndpointKind| endpoints.iter().find(|endpoint| endpoint.kind == Some(kind)).cloned();
        let (Some(gpu), Some(fpga)) = (first(EndpointKind::Gpu), first(EndpointKind::Fpga)) else {
            anyhow::bail!("The self-test needs a GPU and an FPGA; the device has {} endpoints", endpoints.len());
        };
        Ok(Self { driver, gpu, peer: fpga.clone(), fpga, path: options.path, options })
    }

    /// A fresh open of the device.
    fn session(&self) -> Result<Session> {
        Ok(Session::open(self.driver)?)
    }
}

type Case = fn(&Bench<'_>, &str) -> Result<Vec<Row>>;

/// Every case by name, in the order they run.
fn cases() -> Vec<(&'static str, Case)> {
    [moves::CASES, refusals::CASES, isolation::CASES, registers::CASES, streams::CASES, atomics::CASES, gpus::CASES]
        .concat()
}

/// The names of all cases, in the order they run.
pub fn names() -> Vec<&'static str> {
    cases().into_iter().map(|(name, _)| name).collect()
}

/// Runs the scenario on `driver` and hands out every row as soon as it is known. Needs a GPU and an FPGA among the endpoints.
///
/// # Errors
/// If nothing can be tried at all: the device cannot be opened, has no such endpoints, or `options` name no case. A case that fails on its
/// way is a row that is not ok.
pub fn run(driver: &dyn Driver, options: &Options, report: &mut dyn FnMut(&Row)) -> Result<Summary> {
    for name in &options.only {
        ensure!(names().contains(&name.as_str()), "There is no row \"{name}\"; there are: {}", names().join(", "));
    }
    let bench = Bench::of(driver, options)?;
    let mut summary = Summary::default();
    for (name, case) in cases() {
        if !options.only.is_empty() && !options.only.iter().any(|only| only == name) {
            continue;
        }
        let rows = case(&bench, name).unwrap_or_else(|error| {
            vec![Row::new(name, "the case runs to its end", format!("it failed: {}", chain(&error)))]
        });
        summary.report(&rows, report);
    }
    Ok(summary)
}

/// Keeps work in flight on `driver`, calls `in_flight` when it is, and waits until the device loses its state; then tries what must still work, and
/// hands out the rows. Needs a GPU and an FPGA among the endpoints.
///
/// # Errors
/// If it cannot be tried, or the device does not lose its state in two minutes.
pub fn until_loss(
    driver: &dyn Driver,
    options: &Options,
    in_flight: &mut dyn FnMut(),
    report: &mut dyn FnMut(&Row),
) -> Result<Summary> {
    let mut summary = Summary::default();
    summary.report(&loss::until_loss(&Bench::of(driver, options)?, in_flight)?, report);
    Ok(summary)
}

/// `pgctl selftest`.
pub(crate) fn command(driver: &dyn Driver, args: &SelftestArgs, console: &mut Console<'_>) -> Result<bool> {
    let (file, only) = (args.file.clone(), args.only.clone());
    let options = Options { file, only, path: args.path.into(), meters: console.meters(), ..Options::default() };
    let mut said = Ok(());
    let mut report = |row: &Row| {
        if said.is_ok() {
            said = console.say(&text(row, console), row);
        }
    };
    let summary = if args.until_loss {
        until_loss(driver, &options, &mut || remark("pgctl: work is in flight"), &mut report)?
    } else {
        run(driver, &options, &mut report)?
    };
    said?;
    let value = json!({"rows": summary.rows, "failed": summary.failed, "ok": summary.failed == 0});
    console.say(&format!("{} rows, {} failed", summary.rows, summary.failed), &value)?;
    Ok(summary.failed == 0)
}

fn text(row: &Row, console: &Console<'_>) -> String {
    let head = format!("{} {:<24}", console.verdict(row.ok), row.name);
    match (&row.moved, row.ok) {
        (Some(moved), true) => format!("{head} {}", moved_text(moved)),
        (None, true) => format!("{head} {}", row.got),
        (_, false) => format!("{head} {}\n     {:<24} expected: {}", row.got, "", row.expected),
    }
}
