//! Commands over a fake device: what they say, to people and to programs, and how they end.

#[path = "../../lib/tests/fake/mod.rs"]
mod fake;

use std::fs;
use std::process::{Command as Process, Stdio};

use clap::Parser;
use fake::{Fake, Sabotage};
use pgctl::{Cli, Console, run};
use serde_json::Value;

/// Runs a command and answers how it came out and what it said.
fn pgctl(sabotage: Sabotage, args: &[&str]) -> (anyhow::Result<bool>, String) {
    let cli = Cli::try_parse_from([&["pgctl"], args].concat()).expect("the command line makes sense");
    let mut out = Vec::new();
    let result = run(&cli, &Fake::new(sabotage), &mut Console::new(&mut out, cli.json));
    (result, String::from_utf8(out).expect("text"))
}

/// The same, which must end well and say one object a line.
fn objects(args: &[&str]) -> Vec<Value> {
    let (result, said) = pgctl(Sabotage::None, &[&["--json"], args].concat());
    assert!(result.expect("the command runs"), "{said}");
    said.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect()
}

#[test]
fn info_lists_limits_and_endpoints() {
    let said = objects(&["info"]);
    assert_eq!(said.len(), 1);
    assert_eq!(said[0]["interrupt"], "msix");
    assert_eq!(said[0]["endpoints"][1]["name"], "fpga0");
    assert_eq!(said[0]["endpoints"][1]["kind"], "FPGA");
    let engine = &said[0]["endpoints"][2];
    assert_eq!((&engine["kind"], &engine["memory"]), (&"engine".into(), &0.into()));
    let (_, text) = pgctl(Sabotage::None, &["info"]);
    assert!(text.contains("MSI-X") && text.contains("256.0 MiB"), "{text}");
}

#[test]
fn copy_moves_both_ways_and_verifies() {
    let args = ["copy", "--from", "gpu0", "--to", "fpga0", "--size", "64K", "--verify", "--repeat", "2", "--both"];
    let said = objects(&args);
    assert_eq!(said.len(), 6, "two copies each way, two verdicts: {said:#?}");
    assert_eq!((&said[0]["from"], &said[0]["bytes"]), (&"gpu0".into(), &65536.into()));
    assert_eq!((&said[1]["from"], &said[1]["path"]), (&"fpga0".into(), &"direct".into()));
    assert_eq!((&said[4]["verified"], &said[5]["verified"]), (&true.into(), &true.into()));
}

#[test]
fn copy_by_another_engine_gets_the_rights_that_it_needs_and_says_how_the_bytes_went() {
    for (from, to, by) in
        [("gpu0", "fpga0", "dma0"), ("gpu0", "gpu0", "dma0"), ("gpu0", "fpga0", "fpga0"), ("gpu0", "gpu0", "3")]
    {
        let args = ["copy", "--from", from, "--to", to, "--by", by, "--size", "64K", "--verify", "--path", "direct"];
        let said = objects(&args);
        assert_eq!(said.len(), 2);
        assert_eq!((&said[0]["path"], &said[0]["reason"]), (&"direct".into(), &"peer-reachable".into()));
        assert_eq!((&said[1]["on"], &said[1]["verified"]), (&to.into(), &true.into()));
    }
    let both = objects(&["copy", "--from", "gpu0", "--to", "fpga0", "--by", "dma0", "--both", "--size", "4K"]);
    assert_eq!((&both[0]["path"], &both[1]["path"]), (&"direct".into(), &"direct".into()));
    let own = objects(&["copy", "--from", "gpu0", "--to", "gpu0", "--size", "4K"]);
    assert_eq!(own[0]["path"], "local", "without --by the source's engine moves the bytes");
    let (result, _) = pgctl(Sabotage::None, &["copy", "--from", "gpu0", "--to", "fpga0", "--by", "x", "--size", "4K"]);
    assert!(result.expect_err("no such endpoint").to_string().starts_with("No endpoint is called \"x\""));
}

#[test]
fn copy_that_must_take_a_path_fails_when_any_piece_takes_another() {
    let copy = ["copy", "--from", "gpu0", "--to", "fpga0", "--size", "9M"];
    let insist = |sabotage, path: &str| {
        let (result, said) = pgctl(sabotage, &[&["--json"], &copy[..], &["--path", path]].concat());
        let moved: Value = serde_json::from_str(said.lines().next().expect("a line")).expect("an object");
        (result.map_err(|error| error.to_string()), moved)
    };
    let (result, moved) = insist(Sabotage::None, "direct");
    assert_eq!((result, &moved["path"], moved.get("other_path")), (Ok(true), &"direct".into(), None));
    let told = "gpu0 to fpga0: bytes took the path local (same-device) where direct was asked for";
    // The first of three pieces: the last one, whose path is told first, is as it should be.
    let (result, moved) = insist(Sabotage::FirstPieceDetours, "direct");
    assert_eq!((result, &moved["path"], &moved["other_path"]), (Err(told.into()), &"direct".into(), &"local".into()));
    assert_eq!(insist(Sabotage::StagedPath, "direct").0, Err(told.into()));
    let told = "gpu0 to fpga0: bytes took the path direct (peer-reachable) where staged was asked for";
    assert_eq!(insist(Sabotage::None, "staged").0, Err(told.into()));
    let (_, said) = pgctl(Sabotage::FirstPieceDetours, &copy);
    assert!(said.ends_with("direct (peer-reachable), some local (same-device)\n"), "{said}");
}

#[test]
fn copy_of_a_file_comes_out_in_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let (from, to) = (folder.path().join("in"), folder.path().join("out"));
    fs::write(&from, b"some bytes of a file").expect("written");
    let (from_text, to_text) = (from.to_str().expect("text"), to.to_str().expect("text"));
    objects(&["copy", "--from", "1", "--to", "2", "--file", from_text, "--out", to_text]);
    assert_eq!(fs::read(&to).expect("there"), b"some bytes of a file");
    let (result, _) = pgctl(Sabotage::None, &["copy", "--from", "1", "--to", "2", "--file", from_text, "--size", "1K"]);
    assert!(result.expect_err("the file is too short").to_string().contains("fewer than 1024"));
}

#[test]
fn wrong_bytes_fail_the_command_and_are_located() {
    let args = ["--json", "copy", "--from", "gpu0", "--to", "fpga0", "--size", "64K", "--verify"];
    let (result, said) = pgctl(Sabotage::CorruptCopies, &args);
    assert!(!result.expect("the command runs"));
    let verdict: Value = serde_json::from_str(said.lines().last().expect("a line")).expect("an object");
    assert_eq!((&verdict["verified"], &verdict["first_difference"]), (&false.into(), &4095.into()));
}

#[test]
fn fill_verifies_its_pattern() {
    let said = objects(&["fill", "--on", "gpu0", "--size", "10000", "--pattern", "0123456789abcdef", "--verify"]);
    assert_eq!((&said[0]["bytes"], &said[1]["verified"]), (&10000.into(), &true.into()));
}

#[test]
fn peer_shows_what_is_in_force() {
    let peer = |action| objects(&["peer", "--from", "gpu0", "--to", "fpga0", "--rights", "w", action]).remove(0);
    assert_eq!((&peer("query")["write"], &peer("query")["path"]), (&false.into(), &"direct".into()));
    assert_eq!((&peer("enable")["write"], &peer("enable")["read"]), (&true.into(), &false.into()));
    assert_eq!(peer("disable")["write"], false);
}

#[test]
fn run_encrypts_and_running_again_decrypts() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("text").to_owned();
    let (plain, secret, back) = (path("plain"), path("secret"), path("back"));
    let bytes: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
    fs::write(&plain, &bytes).expect("written");
    let key = "0f".repeat(32);
    for (from, to) in [(&plain, &secret), (&secret, &back)] {
        let args = ["run", "--on", "fpga0", "--via", "gpu0", "--file", from, "--out", to];
        let said = objects(&[&args[..], &["--key", &key, "--nonce", "7", "--verify"]].concat());
        assert_eq!(said.len(), 6, "five steps and a verdict");
        assert_eq!((&said[5]["verified"], &said[5]["bytes"]), (&true.into(), &100_000.into()));
    }
    assert_ne!(fs::read(&secret).expect("there"), bytes);
    assert_eq!(fs::read(&back).expect("there"), bytes);
}

#[test]
fn run_notices_a_cipher_text_that_the_cpu_does_not_get() {
    let folder = tempfile::tempdir().expect("a folder");
    let (plain, secret) = (folder.path().join("plain"), folder.path().join("secret"));
    fs::write(&plain, vec![0; 10_000]).expect("written");
    let (plain, secret) = (plain.to_str().expect("text"), secret.to_str().expect("text"));
    let args = ["run", "--on", "fpga0", "--via", "gpu0", "--file", plain, "--out", secret, "--verify"];
    let (result, said) = pgctl(Sabotage::CorruptCopies, &args);
    assert!(!result.expect("the command runs"));
    assert!(said.contains("byte 4095 differs"), "{said}");
}

#[test]
fn events_shows_the_fault_it_provokes() {
    assert_eq!(objects(&["events"]), Vec::<Value>::new());
    let said = objects(&["events", "--provoke"]);
    assert_eq!(said.len(), 1);
    assert_eq!(
        (&said[0]["kind"], &said[0]["reason"], &said[0]["access"]),
        (&"fault".into(), &"MAPPING".into(), &"read".into())
    );
    assert_eq!(objects(&["events", "--provoke", "--follow", "--count", "1"]).len(), 1);
}

#[test]
fn selftest_says_rows_and_a_sum_and_fails_with_a_row() {
    let only = ["selftest", "--only", "zero-length", "--only", "peer-right-twice"];
    let said = objects(&only);
    assert_eq!(said.len(), 3);
    assert_eq!((&said[2]["rows"], &said[2]["failed"], &said[2]["ok"]), (&2.into(), &0.into(), &true.into()));
    let (result, said) = pgctl(Sabotage::ZeroLengthFine, &only);
    assert!(!result.expect("the scenario runs"));
    assert!(said.contains("FAIL zero-length") && said.contains("expected: INVAL"), "{said}");
}

#[test]
fn errors_name_the_cause() {
    let (result, said) = pgctl(Sabotage::None, &["copy", "--from", "gpu7", "--to", "fpga0", "--size", "1K"]);
    let error = result.expect_err("no such endpoint");
    assert_eq!(error.to_string(), "No endpoint is called \"gpu7\"; there are: gpu0, fpga0, dma0");
    assert_eq!(said, "");
}

/// Runs the program itself.
fn program(args: &[&str]) -> std::process::Output {
    let mut program = Process::new(env!("CARGO_BIN_EXE_pgctl"));
    program.args(args).stdin(Stdio::null()).output().expect("the program starts")
}

#[test]
fn the_program_ends_with_0_1_or_2() {
    assert_eq!(program(&["--help"]).status.code(), Some(0));
    assert_eq!(program(&["nonsense"]).status.code(), Some(2));
    assert_eq!(program(&["copy", "--from", "a", "--to", "b", "--size", "1Q"]).status.code(), Some(2));
    let missing = program(&["--device", "/dev/peergate-none", "info"]);
    let said = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert_eq!((missing.status.code(), missing.stdout.len()), (Some(1), 0));
    assert_eq!(said.matches("No such file").count(), 1, "{said}");
    assert!(said.starts_with("pgctl: Could not open /dev/peergate-none"), "{said}");
}

#[test]
fn an_output_is_never_its_own_input_and_survives_a_failed_command() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("file");
    fs::write(&path, b"precious").expect("written");
    let text = path.to_str().expect("text");
    for args in [
        ["run", "--on", "fpga0", "--via", "gpu0", "--file", text, "--out", text],
        ["copy", "--from", "gpu0", "--to", "fpga0", "--file", text, "--out", text],
        ["run", "--on", "gpu0", "--via", "gpu0", "--file", "/proc/self/exe", "--out", text],
    ] {
        pgctl(Sabotage::None, &args).0.expect_err("it must not start");
        assert_eq!(fs::read(&path).expect("there"), b"precious");
    }
}
