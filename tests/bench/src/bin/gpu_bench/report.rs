//! Rows of figures, and the file that they make up.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// One figure: the median of some samples, and the smallest and largest of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// `latency`, `transfer`, `energy`, `pipeline` or `scatter`; `peer latency` or `peers` from GPU to GPU.
    pub(crate) part: String,
    /// `out` (GPU to aperture), `in`, `both`, `one way` (from the first GPU), `both ways`, or what else sets it apart.
    pub(crate) case: String,
    /// Bytes of a transfer.
    pub(crate) len: u64,
    /// `direct`, or which rival.
    pub(crate) who: String,
    pub(crate) unit: String,
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    pub(crate) samples: usize,
    /// How the rival worked, where it had a choice.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) how: String,
}

/// Everything of a run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Run {
    /// The command.
    pub(crate) command: String,
    /// What a transfer is.
    pub(crate) note: String,
    pub(crate) machine: BTreeMap<String, serde_json::Value>,
    pub(crate) rows: Vec<Row>,
}

/// Says that a transfer here is none between two devices over PCIe.
pub(crate) const NOTE: &str = "The aperture is memory of the host that another owner has mapped (a memory file), in place of an FPGA's BAR: each transfer is a \
     copy by the GPU's copy engine between the GPU's memory and memory of the host, not peer-to-peer over PCIe.";

impl Run {
    pub(crate) fn add(&mut self, row: Row) {
        let Row { part, case, len, who, unit, median, min, max, how, .. } = &row;
        eprintln!(
            "{part:<9} {case:<10} {:>8} {who:<14} {median:>10.3} {unit:<6} ({min:.3} to {max:.3}) {how}",
            size(*len)
        );
        self.rows.push(row);
    }

    pub(crate) fn median(&self, part: &str, case: &str, len: u64, who: &str) -> Option<f64> {
        let is_it = |row: &&Row| row.part == part && row.case == case && row.len == len && row.who == who;
        self.rows.iter().find(is_it).map(|row| row.median)
    }
}

impl Row {
    pub(crate) fn new(part: &str, case: &str, len: u64, who: &str, unit: &str, mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let middle = samples.len() / 2;
        let median =
            if samples.len() % 2 == 1 { samples[middle] } else { f64::midpoint(samples[middle - 1], samples[middle]) };
        let [part, case, who, unit] = [part, case, who, unit].map(str::to_owned);
        let (min, max, count) = (samples[0], samples[samples.len() - 1], samples.len());
        Self { part, case, len, who, unit, median, min, max, samples: count, how: String::new() }
    }
}

pub(crate) fn gb_per_s(bytes: u64, time: Duration) -> f64 {
    #[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
    let bytes = bytes as f64;
    bytes / time.as_secs_f64() / 1e9
}

pub(crate) fn size(len: u64) -> String {
    match len {
        0 => String::new(),
        len if len >= 1 << 30 => format!("{} GiB", len >> 30),
        len if len >= 1 << 20 => format!("{} MiB", len >> 20),
        len if len >= 1 << 10 => format!("{} KiB", len >> 10),
        len => format!("{len} B"),
    }
}
