//! A guest without an operating system drives the daemon's device by its doorbell and its interrupt, and the operator's self-test.
//!
//! Where there is no KVM, a test says so and checks that the self-test does, too.

use anyhow::{Context, Result, ensure};
use e2e::bed::{ABUSED, BESIDE, Bed};
use harness::RawGuest;
use serde_json::Value;
use vmm_control::{TenantState, TenantStatus};
use vmm_microvm::proof;

/// Why nothing can be proved here, if so.
fn no_kvm() -> Result<Option<String>> {
    match proof::completion_arrives() {
        Err(error) if error.is_missing() => {
            eprintln!("skipped: {error}");
            Ok(Some(error.to_string()))
        }
        result => Ok(result.map(|()| None)?),
    }
}

/// Outcome and reason of a row of the self-test.
type Row = (String, String);

/// The rows of the self-test, and the exit status.
fn selftest(bed: &Bed, args: &[&str]) -> Result<(Vec<Row>, Option<i32>)> {
    let output = bed.daemon.peergate(&[&["selftest", "--json"], args].concat())?;
    let json: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("The self-test said: {}", String::from_utf8_lossy(&output.stderr)))?;
    let text = |row: &Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    let rows = json["rows"].as_array().context("There are rows")?;
    Ok((rows.iter().map(|row| (text(row, "outcome"), text(row, "reason"))).collect(), output.status.code()))
}

/// The outcome of the last row, the one about the device.
fn of_device(bed: &Bed, args: &[&str]) -> Result<(String, String, Option<i32>)> {
    let (rows, status) = selftest(bed, args)?;
    ensure!(rows.len() == 5, "{rows:?}");
    ensure!(rows[..4].iter().all(|(outcome, _)| outcome == "ok"), "{rows:?}");
    Ok((rows[4].0.clone(), rows[4].1.clone(), status))
}

/// Waits until a guest that was there after session `before` has gone; the tenant then.
fn wait_gone(bed: &mut Bed, before: u32) -> Result<TenantStatus> {
    bed.daemon.wait_for("the guest to be gone", |daemon| {
        let tenant = daemon.tenant(ABUSED)?;
        Ok(tenant.state == TenantState::Waiting && tenant.session > before)
    })?;
    bed.daemon.tenant(ABUSED)
}

#[test]
fn guest_wakes_the_device_and_the_device_wakes_the_guest() -> Result<()> {
    if no_kvm()?.is_some() {
        return Ok(());
    }
    let mut bed = Bed::new()?;
    let before = bed.daemon.wait_ready(ABUSED)?;
    let session = proof::device_answers(&bed.daemon.socket(ABUSED))?;
    let after = wait_gone(&mut bed, before.session)?;
    assert_eq!(after.failures, before.failures, "the worker ended well");
    assert_ne!(session, proof::device_answers(&bed.daemon.socket(ABUSED))?, "HELLO's answer is of its own session");
    bed.finish()?;
    Ok(())
}

#[test]
fn selftest_proves_everything_and_leaves_the_daemon_alone() -> Result<()> {
    let mut bed = Bed::new()?;
    let before = bed.daemon.wait_ready(ABUSED)?;
    if let Some(why) = no_kvm()? {
        let (rows, status) = selftest(&bed, &[])?;
        assert_eq!((rows[0].clone(), status), (("skip".to_owned(), why), Some(0)));
        return Ok(());
    }
    assert_eq!(of_device(&bed, &[])?, ("ok".to_owned(), String::new(), Some(0)));
    assert_eq!(bed.daemon.tenant(ABUSED)?.session, before.session, "it had a daemon of its own");
    assert_eq!(of_device(&bed, &["--tenant", ABUSED])?, ("ok".to_owned(), String::new(), Some(0)));
    wait_gone(&mut bed, before.session).context("It did not ask this daemon's device")?;
    bed.finish()?;
    Ok(())
}

#[test]
fn selftest_keeps_off_a_tenant_that_a_vm_has_and_fails_for_one_that_is_not_there() -> Result<()> {
    if no_kvm()?.is_some() {
        return Ok(());
    }
    let bed = Bed::new()?;
    let mut guest = RawGuest::connect(&bed.daemon.socket(BESIDE), 64)?;
    guest.hello()?;
    let (outcome, why, status) = of_device(&bed, &["--tenant", BESIDE])?;
    assert_eq!((outcome.as_str(), status), ("skip", Some(0)));
    assert!(why.contains("does not wait for a VM"), "{why}");
    guest.hello()?;
    drop(guest);
    let (outcome, why, status) = of_device(&bed, &["--tenant", "nobody"])?;
    assert_eq!((outcome.as_str(), status), ("fail", Some(1)));
    assert!(why.starts_with("There is no tenant \"nobody\""), "{why}");
    bed.finish()?;
    Ok(())
}
