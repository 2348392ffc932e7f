//! What `peergate selftest` proves of KVM, and that it would notice if it were otherwise. Every test skips where there is no KVM, and says so.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::unix::net::UnixListener;

use vmm_microvm::{Exit, MicroVm, MicroVmError, PATIENCE, Program, proof};

/// The result of a proof, or `None` and a word why it is not tried here.
fn tried<T>(result: Result<T, MicroVmError>) -> Option<T> {
    match result {
        Err(error) if error.is_missing() => {
            eprintln!("skipped: {error}");
            None
        }
        result => Some(result.unwrap()),
    }
}

#[test]
fn store_into_a_window_lands_in_its_file() {
    tried(proof::store_lands());
}

#[test]
fn revoking_stops_the_stores_of_a_guest_that_runs() {
    tried(proof::revoking_stops_stores());
}

#[test]
fn doorbell_is_counted_without_an_exit() {
    tried(proof::doorbell_arrives());
}

#[test]
fn completion_interrupts_a_guest_that_sleeps() {
    tried(proof::completion_arrives());
}

#[test]
fn device_that_hangs_up_is_said_to() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("device.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let hangs_up = std::thread::spawn(move || drop(listener.accept()));
    let error = match proof::device_answers(&socket) {
        Err(error) if error.is_missing() => return eprintln!("skipped: {error}"),
        result => result.unwrap_err(),
    };
    hangs_up.join().unwrap();
    assert_eq!(error.to_string(), "The device does not take part: GET_FEATURES failed");
    let error = proof::device_answers(&dir.path().join("nobody.sock")).unwrap_err();
    assert_eq!(error.to_string(), "Cannot connect to the tenant's socket");
}

#[test]
fn window_that_is_not_revoked_goes_on_taking_stores() {
    let Some(vm) = tried(MicroVm::new(&Program::store_on(8, 0))) else { return };
    let running = vm.start().unwrap();
    for _ in 0..3 {
        proof::wait_for_stores(&running, 8).unwrap();
    }
    assert_eq!(running.stop().unwrap(), Exit::Stopped);
}

#[test]
fn store_into_a_window_revoked_before_the_guest_runs_lands_nowhere() {
    let Some(vm) = tried(MicroVm::new(&Program::store(0x30, 0x1234))) else { return };
    let host = vm.host().clone();
    host.revoke().unwrap();
    let exit = vm.start().unwrap().wait(PATIENCE).unwrap();
    assert_eq!(exit, Exit::Store { address: vmm_microvm::WINDOW + 0x30, value: 0x1234 });
    assert!(host.window().bytes().unwrap().iter().all(|byte| *byte == 0));
    assert!(host.revoke().is_err(), "it is gone already");
}

#[test]
fn guest_that_nobody_answers_sleeps_until_it_is_stopped() {
    let Some(vm) = tried(MicroVm::new(&Program::ring_and_wait(0x600, 1, 0x700))) else { return };
    let running = vm.start().unwrap();
    let host = running.host().clone();
    assert!(host.wait_for_doorbell(PATIENCE).unwrap());
    assert_eq!(running.stop().unwrap(), Exit::Stopped);
    assert_eq!(host.word(0x600).unwrap(), 1);
}

#[test]
fn guest_that_is_dropped_is_stopped() {
    let Some(vm) = tried(MicroVm::new(&Program::store_on(0, 0))) else { return };
    let host = vm.host().clone();
    let running = vm.start().unwrap();
    proof::wait_for_stores(&running, 0).unwrap();
    drop(running);
    let last = host.window().word(0).unwrap();
    assert_eq!(std::sync::Arc::strong_count(&host), 1, "its thread is gone");
    assert_eq!(host.window().word(0).unwrap(), last);
}
