//! Samples, medians, rows.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

/// One number.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// What was measured.
    pub(crate) name: &'static str,
    /// What the numbers count.
    pub(crate) unit: &'static str,
    /// Median of the samples.
    pub(crate) median: f64,
    /// Smallest sample.
    pub(crate) min: f64,
    /// Largest sample.
    pub(crate) max: f64,
    /// Median of the ratios to the CPU's own copies, where that says something.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) of_memcpy: Option<f64>,
}

/// Collects rows and prints them as they come.
pub(crate) struct Report {
    json: bool,
    samples: u32,
    sample: Duration,
    only: String,
    rows: usize,
}

impl Report {
    pub(crate) fn new(json: bool, samples: u32, millis: u64, only: String) -> Self {
        Self { json, samples, sample: Duration::from_millis(millis), only, rows: 0 }
    }

    /// Whether any of these numbers is wanted.
    pub(crate) fn wants(&self, names: &[&str]) -> bool {
        names.iter().any(|name| name.contains(&self.only))
    }

    /// Measures how often a second `work` gets something done; it answers how often it did.
    pub(crate) fn rate(
        &mut self,
        name: &'static str,
        unit: &'static str,
        mut work: impl FnMut() -> Result<u64>,
    ) -> Result<()> {
        if !self.wants(&[name]) {
            return Ok(());
        }
        let mut rates = Vec::new();
        // The first round warms caches and tables up.
        for round in 0..=self.samples {
            let rate = self.sample(&mut work)?;
            if round > 0 {
                rates.push(rate);
            }
        }
        self.row(name, unit, rates, None);
        Ok(())
    }

    /// Measures `work` and `baseline` in turns, both in bytes, and reports the bandwidth of both and their ratio.
    pub(crate) fn bandwidth(
        &mut self,
        [name, baseline_name]: [&'static str; 2],
        mut work: impl FnMut() -> Result<u64>,
        mut baseline: impl FnMut() -> Result<u64>,
    ) -> Result<()> {
        if !self.wants(&[name, baseline_name]) {
            return Ok(());
        }
        let (mut rates, mut base) = (Vec::new(), Vec::new());
        for round in 0..=self.samples {
            let (rate, copied) = (self.sample(&mut work)?, self.sample(&mut baseline)?);
            if round > 0 {
                rates.push(rate / 1e9);
                base.push(copied / 1e9);
            }
        }
        let ratios: Vec<f64> = rates.iter().zip(&base).map(|(rate, base)| rate / base).collect();
        self.row(baseline_name, "GB/s", base, None);
        self.row(name, "GB/s", rates, Some(median(ratios)));
        Ok(())
    }

    fn sample(&self, work: &mut impl FnMut() -> Result<u64>) -> Result<f64> {
        let start = Instant::now();
        let mut done = 0;
        loop {
            done += work()?;
            let passed = start.elapsed();
            if passed >= self.sample {
                return Ok(to_f64(done) / passed.as_secs_f64());
            }
        }
    }

    fn row(&mut self, name: &'static str, unit: &'static str, samples: Vec<f64>, of_memcpy: Option<f64>) {
        let min = samples.iter().copied().fold(f64::INFINITY, f64::min);
        let max = samples.iter().copied().fold(0.0, f64::max);
        let row = Row { name, unit, median: median(samples), min, max, of_memcpy };
        self.rows += 1;
        if self.json {
            // A structure of numbers and names always has a form.
            println!("{}", serde_json::to_string(&row).unwrap_or_default());
            return;
        }
        if self.rows == 1 {
            println!("{:<28} {:>12} {:>12} {:>12}  {:<14} {:>10}", "", "median", "min", "max", "unit", "of memcpy");
        }
        let ratio = row.of_memcpy.map(|ratio| format!("{:.0} %", ratio * 100.0)).unwrap_or_default();
        let [median, min, max] = [row.median, row.min, row.max].map(shown);
        println!("{name:<28} {median:>12} {min:>12} {max:>12}  {unit:<14} {ratio:>10}");
    }

    /// Says so if nothing was measured.
    pub(crate) fn finish(&self) {
        if self.rows == 0 {
            eprintln!("No number is called like \"{}\"", self.only);
        }
    }
}

fn shown(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{:.2} M", v / 1e6),
        v if v >= 1e4 => format!("{:.1} k", v / 1e3),
        v => format!("{v:.2}"),
    }
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    let middle = samples.len() / 2;
    if samples.len() % 2 == 1 { samples[middle] } else { f64::midpoint(samples[middle - 1], samples[middle]) }
}

#[allow(clippy::cast_precision_loss, reason = "counts of a second are far below 2^52")]
fn to_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_middle() {
        assert!((median(vec![3.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
        assert!((median(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < f64::EPSILON);
    }
}
