//! What was tried, what had to come, what came.
//!
//! Not here: who tries it.

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// One thing that was tried. The JSON form is what `pgctl selftest --json` prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What.
    pub name: String,
    /// What had to come.
    pub expected: String,
    /// What came.
    pub got: String,
    /// Whether that is as it had to be.
    pub ok: bool,
    /// Of a row about bytes: how many moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// In how many seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// How fast.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gb_per_s: Option<f64>,
    /// By which path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Why that path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Of a refusal: the fault event that went with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<Fault>,
}

/// A fault event as the guest saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Why.
    pub reason: String,
    /// First address refused.
    pub address: u64,
    /// `read`, `write`, `read and write` or `none`.
    pub access: String,
    /// Who acted; nobody for a request.
    pub accessor: Option<u32>,
    /// The work's cookie, 0 for a request.
    pub cookie: u64,
    /// Handle of a refused FREE, else 0.
    pub value: u64,
}

impl Row {
    /// A row that is ok if what came is what had to.
    #[must_use]
    pub fn new(name: impl Into<String>, expected: impl Into<String>, got: impl Into<String>) -> Self {
        let (expected, got) = (expected.into(), got.into());
        let ok = expected == got;
        Self::judged(name, expected, got, ok)
    }

    /// A row that somebody has judged: what came need not read as what had to.
    #[must_use]
    pub fn judged(name: impl Into<String>, expected: impl Into<String>, got: impl Into<String>, ok: bool) -> Self {
        let (expected, got) = (expected.into(), got.into());
        Self {
            name: name.into(),
            ok,
            expected,
            got,
            bytes: None,
            seconds: None,
            gb_per_s: None,
            path: None,
            reason: None,
            fault: None,
        }
    }

    /// The row for people, one line, two if it failed.
    #[must_use]
    pub fn text(&self) -> String {
        let verdict = if self.ok { "ok  " } else { "FAIL" };
        let mut text = format!("{verdict} {:<34} ", self.name);
        match (self.bytes, self.gb_per_s, &self.path) {
            (Some(bytes), Some(speed), Some(path)) => {
                let _ = write!(text, "{bytes:>10} bytes  {path:<7} {speed:>7.2} GB/s");
            }
            _ => text.push_str(&self.got),
        }
        if !self.ok {
            let _ = write!(text, "\n     {:<34} expected: {}", "", self.expected);
        }
        text
    }
}

/// Rows as they come, each reported once.
pub struct Rows<'a> {
    rows: Vec<Row>,
    report: &'a mut dyn FnMut(&Row),
}

impl<'a> Rows<'a> {
    /// No rows yet.
    pub fn new(report: &'a mut dyn FnMut(&Row)) -> Self {
        Self { rows: Vec::new(), report }
    }

    /// Adds one.
    pub fn add(&mut self, row: Row) {
        (self.report)(&row);
        self.rows.push(row);
    }

    /// All so far.
    #[must_use]
    pub fn all(&self) -> &[Row] {
        &self.rows
    }

    /// Adds what `pgctl selftest --json` printed: a row a line, then a summary that must agree with them.
    ///
    /// # Errors
    /// When a line is neither, or the summary is missing or counts other rows.
    pub fn add_selftest<'l>(&mut self, lines: impl Iterator<Item = &'l str>) -> Result<()> {
        let before = self.rows.len();
        for line in lines {
            if let Ok(row) = serde_json::from_str::<Row>(line) {
                self.add(row);
                continue;
            }
            let summary: Summary =
                serde_json::from_str(line).with_context(|| format!("The self-test printed no row: {line}"))?;
            let rows = &self.rows[before..];
            if rows.len() != summary.rows || rows.iter().filter(|row| !row.ok).count() != summary.failed {
                bail!("The self-test counts {} rows, {} arrived", summary.rows, rows.len());
            }
            return Ok(());
        }
        bail!("The self-test did not run to its end; {} rows arrived", self.rows.len() - before)
    }

    /// Rows that are not ok.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.rows.iter().filter(|row| !row.ok).count()
    }
}

#[derive(Deserialize)]
struct Summary {
    rows: usize,
    failed: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"name":"a","expected":"x","got":"x","ok":true}"#;

    #[test]
    fn selftest_output_without_its_summary_is_an_error() {
        let mut ignore = |_: &Row| {};
        assert!(Rows::new(&mut ignore).add_selftest([GOOD].into_iter()).is_err());
        assert!(Rows::new(&mut ignore).add_selftest([GOOD, r#"{"rows":2,"failed":0}"#].into_iter()).is_err());
        assert!(Rows::new(&mut ignore).add_selftest([GOOD, "error: no device"].into_iter()).is_err());
        let mut rows = Rows::new(&mut ignore);
        rows.add_selftest([GOOD, r#"{"rows":1,"failed":0,"ok":true}"#].into_iter()).expect("complete");
        assert_eq!((rows.all().len(), rows.failed()), (1, 0));
    }

    #[test]
    fn failed_row_says_what_was_expected() {
        let text = Row::new("copy", "OK", "FAULT").text();
        assert!(text.starts_with("FAIL copy") && text.contains("FAULT") && text.contains("expected: OK"), "{text}");
    }
}
