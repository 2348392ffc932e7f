//! The self-test passes on a device that is right, and each way of being wrong fails the row that is about it.

#[path = "../../lib/tests/fake/mod.rs"]
mod fake;

use fake::{Fake, Sabotage};
use pgctl::selftest::{Options, Row, names, run};

/// Small, for the cipher is slow without optimisation.
const SIZE: u64 = 64 << 10;

fn rows(sabotage: Sabotage, only: &[&str]) -> Vec<Row> {
    let only = only.iter().map(|name| (*name).to_owned()).collect();
    let options = Options { only, size: SIZE, ..Options::default() };
    let mut rows = Vec::new();
    let summary = run(&Fake::new(sabotage), &options, &mut |row| rows.push(row.clone())).expect("the scenario runs");
    assert_eq!(summary.rows, rows.len());
    assert_eq!(summary.failed, rows.iter().filter(|row| !row.ok).count());
    rows
}

fn failed(rows: &[Row]) -> Vec<String> {
    rows.iter()
        .filter(|row| !row.ok)
        .map(|row| format!("{}: expected {}; got {}", row.name, row.expected, row.got))
        .collect()
}

#[test]
fn every_row_is_ok_on_a_device_that_is_right() {
    let rows = rows(Sabotage::None, &[]);
    assert_eq!(failed(&rows), Vec::<String>::new());
    // The device has one GPU.
    for name in names().into_iter().filter(|name| !name.starts_with("gpus/")) {
        assert!(rows.iter().any(|row| row.name == name), "{name} yields a row of its name");
    }
}

#[test]
fn each_way_of_being_wrong_fails_its_row() {
    let wrong = [
        (Sabotage::PeerUnchecked, "peer-right-missing"),
        (Sabotage::PeerBothWays, "peer-right-one-way"),
        (Sabotage::RightsForgotten, "peer-right-withdrawn"),
        (Sabotage::RightsForgotten, "peer-right-withdrawn-under-load"),
        (Sabotage::AtomicsTellTheNew, "atomic-results"),
        (Sabotage::AtomicsForget, "atomic-all-count"),
        (Sabotage::AtomicsAnywhere, "atomic-misaligned"),
        (Sabotage::PeerUnchecked, "atomic-right-missing"),
        (Sabotage::AlreadyFine, "peer-right-twice"),
        (Sabotage::AddressOfPage, "read-of-write-only"),
        (Sabotage::EventOfOtherAccess, "unmapped-write"),
        (Sabotage::DirtyMemory, "fresh-memory-zero"),
        (Sabotage::WriteBeforeFault, "past-the-end"),
        (Sabotage::CorruptCopies, "main-job"),
        (Sabotage::CorruptCopies, "both-directions"),
        (Sabotage::StagedPath, "peer-path"),
        (Sabotage::FreeOfForeign, "foreign-handle"),
        (Sabotage::StaleIsUnknown, "freed-handle"),
        (Sabotage::SharedAddresses, "foreign-address"),
        (Sabotage::AnyEndpoint, "unknown-endpoint"),
        (Sabotage::NoQuota, "mapping-quota"),
        (Sabotage::ErrorsForgotten, "stream-error"),
        (Sabotage::CompletionTwice, "credits"),
        (Sabotage::BusyUnlimited, "credits"),
        (Sabotage::KernelUnchecked, "kernel-unmapped"),
        (Sabotage::KernelUnchecked, "kernel-without-right"),
        (Sabotage::ZeroLengthFine, "zero-length"),
        (Sabotage::RegistersAnySize, "register-wrong-size"),
        (Sabotage::RegistersAnySize, "register-misaligned"),
    ];
    for (sabotage, name) in wrong {
        assert!(!failed(&rows(sabotage, &[name])).is_empty(), "{name} does not notice {sabotage:?}");
    }
}

#[test]
fn only_the_rows_asked_for_run() {
    let rows = rows(Sabotage::None, &["zero-length", "peer-path"]);
    assert_eq!(rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>(), ["peer-path", "zero-length"]);
    let options = Options { only: vec!["nonsense".to_owned()], ..Options::default() };
    let error = run(&Fake::new(Sabotage::None), &options, &mut |_| {}).expect_err("no such row").to_string();
    assert!(error.contains("nonsense") && error.contains("main-job"), "{error}");
}

#[test]
fn a_row_is_one_object_and_moved_bytes_say_how() {
    let rows = rows(Sabotage::None, &["main-job", "zero-length"]);
    let find = |name: &str| rows.iter().find(|row| row.name == name).expect("the row").to_json();
    let plain = find("zero-length");
    assert_eq!(plain["expected"], "INVAL");
    assert_eq!((&plain["got"], &plain["ok"]), (&"INVAL".into(), &true.into()));
    assert_eq!(plain.as_object().expect("an object").len(), 4);
    let moved = find("main-job/gpu-to-fpga");
    assert_eq!((&moved["bytes"], &moved["path"]), (&SIZE.into(), &"direct".into()));
    assert!(moved["gb_per_s"].is_number() && moved["seconds"].is_number());
}
