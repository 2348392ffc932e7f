//! `peergate selftest`: proves on the operator's own host what VMs with this device rely on, before there are any.
//!
//! What is proved and how is `vmm_microvm`'s. Not here: the device's own tests, which a guest runs (`pgctl selftest`).

mod daemon;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use serde::Serialize;
use vmm_control::{Client, DrainState, Reply, Request, TenantState};
use vmm_microvm::MicroVmError;
use vmm_microvm::proof::{OF_KVM, device_answers};

use super::render;
use daemon::TemporaryDaemon;

#[derive(Debug, Args)]
pub(super) struct SelftestArgs {
    /// Let the guest talk to this tenant's device of the running daemon, which no VM may have, and not to a daemon started for that alone
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
}

/// All that was tried.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    rows: Vec<Row>,
    failed: usize,
    skipped: usize,
}

#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    outcome: Outcome,
    /// Why it is not ok.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Ok,
    Fail,
    Skip,
}

/// Why a row is not ok.
enum NotOk {
    /// It is not so.
    Failed(anyhow::Error),
    /// It was not tried.
    Skipped(String),
}

impl From<MicroVmError> for NotOk {
    fn from(error: MicroVmError) -> Self {
        if error.is_missing() { Self::Skipped(error.to_string()) } else { Self::Failed(error.into()) }
    }
}

impl From<anyhow::Error> for NotOk {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

impl Row {
    fn new(name: &'static str, result: Result<(), NotOk>) -> Self {
        let (outcome, reason) = match result {
            Ok(()) => (Outcome::Ok, None),
            Err(NotOk::Failed(error)) => (Outcome::Fail, Some(format!("{error:#}"))),
            Err(NotOk::Skipped(why)) => (Outcome::Skip, Some(why)),
        };
        Self { name, outcome, reason }
    }
}

impl Report {
    fn new(rows: Vec<Row>) -> Self {
        let count = |outcome| rows.iter().filter(|row| row.outcome == outcome).count();
        let (failed, skipped) = (count(Outcome::Fail), count(Outcome::Skip));
        Self { rows, failed, skipped }
    }

    /// As it is printed.
    pub(super) fn text(&self, json: bool) -> anyhow::Result<String> {
        render(json, self, text)
    }

    /// An error if something is not as it has to be.
    pub(super) fn verdict(&self) -> anyhow::Result<()> {
        if self.failed > 0 {
            bail!(
                "{} of {} proofs failed; see why before a VM with this device runs here",
                self.failed,
                self.rows.len()
            );
        }
        Ok(())
    }
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    let mut said = None;
    for row in &report.rows {
        let outcome = match row.outcome {
            Outcome::Ok => "ok  ",
            Outcome::Fail => "FAIL",
            Outcome::Skip => "SKIP",
        };
        text += &format!("{outcome} {}\n", row.name);
        // Where there is no KVM, every row has the same to say.
        match &row.reason {
            Some(reason) if said != Some(reason) => text += &format!("     {reason}\n"),
            _ => {}
        }
        said = row.reason.as_ref();
    }
    let proved = report.rows.len() - report.failed - report.skipped;
    text + &format!("{proved} proved, {} failed, {} skipped\n", report.failed, report.skipped)
}

/// Tries everything.
pub(super) fn run(args: &SelftestArgs, control: &Path) -> Report {
    let mut rows: Vec<_> = OF_KVM.iter().map(|(name, prove)| Row::new(name, prove().map_err(NotOk::from))).collect();
    // The last one has what a guest of a device needs, and a device is not started for nothing.
    let unusable = rows.last().filter(|row| row.outcome != Outcome::Ok);
    let device = match (unusable, &args.tenant) {
        (Some(row), _) => Err(NotOk::Skipped(format!("This needs what is not proved: {}", row.name))),
        (None, Some(name)) => tenant(name, control),
        (None, None) => temporary(),
    };
    rows.push(Row::new("the device answers a guest", device));
    Report::new(rows)
}

fn temporary() -> Result<(), NotOk> {
    let daemon = TemporaryDaemon::start()?;
    device_answers(&daemon.socket())?;
    Ok(daemon.end()?)
}

fn tenant(name: &str, control: &Path) -> Result<(), NotOk> {
    device_answers(&free_socket(name, control)?)?;
    Ok(())
}

/// The socket of a tenant that no VM has.
fn free_socket(name: &str, control: &Path) -> Result<PathBuf, NotOk> {
    let ask = |request| Ok::<_, anyhow::Error>(Client::connect(control)?.ask(request)?);
    let unexpected = || anyhow::anyhow!("peergated answers something else than was asked");
    let Reply::Status(status) = ask(&Request::Status)? else { return Err(unexpected().into()) };
    let Reply::Tenants(tenants) = ask(&Request::Tenants)? else { return Err(unexpected().into()) };
    let state = status.tenants.into_iter().find(|tenant| tenant.name == name);
    let set_up = tenants.tenants.into_iter().find(|tenant| tenant.name == name);
    let (state, set_up) =
        state.zip(set_up).with_context(|| format!("There is no tenant {name:?}; see peergate tenants"))?;
    if state.state != TenantState::Waiting || state.drain != DrainState::Running {
        return Err(NotOk::Skipped(format!(
            "Tenant {name:?} does not wait for a VM; see peergate status, and name one that does"
        )));
    }
    Ok(set_up.socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report::new(vec![
            Row::new("one", Ok(())),
            Row::new("two", Err(anyhow::anyhow!("low").context("High").into())),
            Row::new("three", Err(MicroVmError::NoPermission.into())),
            Row::new("four", Err(MicroVmError::NoPermission.into())),
        ])
    }

    #[test]
    fn text_has_the_reason_below_what_is_not_ok_once() {
        let expected = "\
ok   one
FAIL two
     High: low
SKIP three
     No permission to open /dev/kvm; run this as root, or as a user of the group that owns it
SKIP four
1 proved, 1 failed, 2 skipped
";
        assert_eq!(report().text(false).unwrap(), expected);
    }

    #[test]
    fn json_says_the_same() {
        let json: serde_json::Value = serde_json::from_str(&report().text(true).unwrap()).unwrap();
        assert_eq!(json["failed"], 1);
        assert_eq!(json["skipped"], 2);
        assert_eq!(json["rows"][0], serde_json::json!({"name": "one", "outcome": "ok"}));
        assert_eq!(json["rows"][1]["reason"], "High: low");
        assert_eq!(json["rows"][2]["outcome"], "skip");
        assert_eq!(json["rows"][2]["reason"], json["rows"][3]["reason"]);
    }

    #[test]
    fn only_a_failure_is_an_error() {
        assert!(report().verdict().unwrap_err().to_string().starts_with("1 of 4 proofs failed"));
        let skipped = Report::new(vec![Row::new("three", Err(MicroVmError::NoKvm.into()))]);
        assert!(skipped.verdict().is_ok());
        assert!(skipped.text(false).unwrap().starts_with("SKIP three\n     There is no /dev/kvm; turn"));
    }

    #[test]
    fn what_a_proof_finds_wrong_is_a_failure() {
        let wrong = MicroVmError::Disproved("It is otherwise".to_owned());
        assert_eq!(Row::new("one", Err(wrong.into())).outcome, Outcome::Fail);
    }
}
