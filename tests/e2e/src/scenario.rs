//! The demo without a VM: the self-test of `pgctl` on a real daemon, with this process as the VM, and then the operator's view of the same.
//!
//! Every refusal that the guest was told of must be in the operator's log, and every record of that log must be one that the guest was told
//! of. The daemon must end well and leave nothing behind.

use std::path::PathBuf;

use anyhow::Result;
use harness::{Binaries, Daemon, DriverOptions, InProcessDriver};
use pgctl::selftest::{self, Row};
use vmm_control::{FaultInfo, FaultsReply};

use crate::overhear::{Overhear, Refusal};

/// What to run.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The programs.
    pub binaries: Binaries,
    /// Configuration without a `[daemon]` table.
    pub config: String,
    /// Which of its tenants the guest is.
    pub tenant: String,
    /// How the self-test runs.
    pub options: selftest::Options,
}

impl Scenario {
    /// The demo's configuration.
    pub fn demo(binaries: Binaries, file: Option<PathBuf>) -> Self {
        let options = selftest::Options { file, ..selftest::Options::default() };
        Self { binaries, config: crate::DEMO.to_owned(), tenant: crate::TENANT.to_owned(), options }
    }

    /// Runs it and hands out rows as they come. True if all are as expected.
    pub fn run(&self, report: &mut dyn FnMut(&Row)) -> Result<bool> {
        let mut daemon = Daemon::start(&self.binaries, &self.config)?;
        let mut all = true;
        let mut tell = |row: &Row| {
            all &= row.ok;
            report(row);
        };
        let heard = {
            let driver = InProcessDriver::connect(&daemon.socket(&self.tenant), DriverOptions::default())?;
            let overhear = Overhear::new(&driver);
            selftest::run(&overhear, &self.options, &mut tell)?;
            overhear.heard()
        };
        daemon.wait_ready(&self.tenant)?;
        let seen: FaultsReply = daemon.peergate_json(&["faults", "--tenant", &self.tenant])?;
        for row in operator_rows(&heard, &seen.faults) {
            tell(&row);
        }
        let expected = "the daemon ends and leaves nothing behind";
        let got = daemon.stop().map_or_else(|error| format!("{error:#}"), |_| expected.to_owned());
        tell(&row("daemon-end", expected, got));
        Ok(all)
    }
}

/// Compares what the guest was told with what the operator sees.
pub fn operator_rows(heard: &[Refusal], seen: &[FaultInfo]) -> [Row; 2] {
    let missing = heard.iter().find(|refusal| !seen.iter().any(|fault| same(refusal, fault)));
    let complete = "every refusal is in the operator's log";
    let told = match (missing, heard.is_empty()) {
        (_, true) => "the guest was refused nothing".to_owned(),
        (None, false) => complete.to_owned(),
        (Some(refusal), false) => format!("the operator does not see {refusal:x?}"),
    };
    let extra = seen.iter().find(|fault| !heard.iter().any(|refusal| same(refusal, fault)));
    let exact = "the operator sees no other refusal";
    let said = extra.map_or_else(|| exact.to_owned(), |fault| format!("the guest was not told of {fault:x?}"));
    [row("operator-complete", complete, told), row("operator-exact", exact, said)]
}

fn same(refusal: &Refusal, fault: &FaultInfo) -> bool {
    let reason = vdev_wire::FaultReason::from_raw(refusal.reason).map(vdev_wire::FaultReason::name);
    fault.domain == refusal.domain
        && fault.cookie == refusal.cookie
        && fault.address == refusal.address
        && reason.is_some_and(|reason| reason.eq_ignore_ascii_case(&fault.reason))
}

fn row(name: &str, expected: &str, got: String) -> Row {
    Row { name: name.to_owned(), ok: expected == got, expected: expected.to_owned(), got, moved: None, fault: None }
}
