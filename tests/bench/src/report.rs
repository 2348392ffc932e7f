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
    /// Median for a second of CPU time of the threads at work: what one core does, also on a busy machine. Absent where that says nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) per_core: Option<f64>,
    /// Median of the ratios to the CPU's own copies, for the same CPU time, where that says something.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) of_memcpy: Option<f64>,
}

/// What a sample came to.
struct Sample {
    rate: f64,
    per_core: f64,
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

    /// How many samples of each number there are to be.
    pub(crate) fn samples(&self) -> u32 {
        self.samples
    }

    /// How long a sample is to last.
    pub(crate) fn length(&self) -> Duration {
        self.sample
    }

    /// Measures how often a second `work` gets something done; it answers how often it did. `cpu` is the time that the threads which do it
    /// have had a CPU so far.
    pub(crate) fn rate(
        &mut self,
        name: &'static str,
        unit: &'static str,
        cpu: fn() -> Result<Duration>,
        mut work: impl FnMut() -> Result<u64>,
    ) -> Result<()> {
        if !self.wants(&[name]) {
            return Ok(());
        }
        let mut samples = Vec::new();
        // The first round warms caches and tables up.
        for round in 0..=self.samples {
            let sample = self.sample(cpu, &mut work)?;
            if round > 0 {
                samples.push(sample);
            }
        }
        self.row(name, unit, &samples, 1.0, None);
        Ok(())
    }

    /// Measures a device's copies and the CPU's own in turns, both in bytes, and reports the bandwidth of both. Their ratio is that of what
    /// each moves in a second of CPU time.
    pub(crate) fn bandwidth(
        &mut self,
        [name, baseline_name]: [&'static str; 2],
        [cpu, baseline_cpu]: [fn() -> Result<Duration>; 2],
        mut work: impl FnMut() -> Result<u64>,
        mut baseline: impl FnMut() -> Result<u64>,
    ) -> Result<()> {
        if !self.wants(&[name, baseline_name]) {
            return Ok(());
        }
        let (mut device, mut plain) = (Vec::new(), Vec::new());
        for round in 0..=self.samples {
            let pair = (self.sample(cpu, &mut work)?, self.sample(baseline_cpu, &mut baseline)?);
            if round > 0 {
                device.push(pair.0);
                plain.push(pair.1);
            }
        }
        let ratios = device.iter().zip(&plain).map(|(device, plain)| device.per_core / plain.per_core).collect();
        self.row(baseline_name, "GB/s", &plain, 1e-9, None);
        self.row(name, "GB/s", &device, 1e-9, Some(median(ratios)));
        Ok(())
    }

    fn sample(&self, cpu: fn() -> Result<Duration>, work: &mut impl FnMut() -> Result<u64>) -> Result<Sample> {
        let (start, before) = (Instant::now(), cpu()?);
        let mut done = 0;
        loop {
            done += work()?;
            let passed = start.elapsed();
            if passed >= self.sample {
                let busy = cpu()?.saturating_sub(before);
                let done = to_f64(done);
                return Ok(Sample { rate: done / passed.as_secs_f64(), per_core: done / busy.as_secs_f64() });
            }
        }
    }

    /// Reports numbers that are measured already, one a sample.
    pub(crate) fn numbers(&mut self, name: &'static str, unit: &'static str, samples: Vec<f64>) {
        let min = samples.iter().copied().fold(f64::INFINITY, f64::min);
        let max = samples.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        self.print(&Row { name, unit, median: median(samples), min, max, per_core: None, of_memcpy: None });
    }

    fn row(&mut self, name: &'static str, unit: &'static str, samples: &[Sample], scale: f64, of_memcpy: Option<f64>) {
        let rates: Vec<f64> = samples.iter().map(|sample| sample.rate * scale).collect();
        let min = rates.iter().copied().fold(f64::INFINITY, f64::min);
        let max = rates.iter().copied().fold(0.0, f64::max);
        let per_core = median(samples.iter().map(|sample| sample.per_core * scale).collect());
        self.print(&Row { name, unit, median: median(rates), min, max, per_core: Some(per_core), of_memcpy });
    }

    fn print(&mut self, row: &Row) {
        self.rows += 1;
        if self.json {
            // A structure of numbers and names always has a form.
            println!("{}", serde_json::to_string(row).unwrap_or_default());
            return;
        }
        if self.rows == 1 {
            let [median, min, max, core] = ["median", "min", "max", "per core"].map(|head| format!("{head:>12}"));
            println!("{:<28} {median} {min} {max} {core}  {:<14}  {:>9}", "", "unit", "of memcpy");
        }
        let ratio = row.of_memcpy.map(|ratio| format!("{:.0} %", ratio * 100.0)).unwrap_or_default();
        let [median, min, max] = [row.median, row.min, row.max].map(shown);
        let (name, unit, core) = (row.name, row.unit, row.per_core.map(shown).unwrap_or_default());
        println!("{name:<28} {median:>12} {min:>12} {max:>12} {core:>12}  {unit:<14}  {ratio:>9}");
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
