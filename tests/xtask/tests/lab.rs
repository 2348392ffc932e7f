//! The lab's host comes up and runs what it is given. Skipped with a printed reason where no kit is built (`cargo xtask kit` builds it). That its
//! devices are as the topology says is `cargo xtask lab --check`.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use xtask::kit::Kit;
use xtask::lab::{Topology, run_program};

fn kit() -> Option<Kit> {
    let kit = Kit::open().expect("a kit that is there opens");
    if kit.is_none() {
        println!("skipped: there is no kit; run `cargo xtask kit`");
    }
    kit
}

#[test]
fn a_program_of_this_machine_runs_in_the_lab_and_its_words_output_and_status_come_back() {
    let Some(kit) = kit() else { return };
    let topology = Topology::load(Path::new("default")).unwrap();
    let script = "cut -d' ' -f1 $PEERGATE_LAB/devices; echo \"$1\" >&2; printf unfinished; exit 7";
    let ended = run_program(&kit, &topology, Path::new("/bin/sh"), &["-c", script, "sh", "it's $HOME"]).unwrap();
    let names: String = topology.ports.iter().map(|port| format!("{}\n", port.name)).collect();
    assert_eq!((ended.status, ended.output), (7, format!("{names}it's $HOME\nunfinished")), "{:#?}", ended.console);
}

/// A lab that goes with this value, and its QEMU with it.
struct Lab(Child);

impl Drop for Lab {
    fn drop(&mut self) {
        // Both fail only for a process that has already been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_shell_in_the_lab_takes_what_is_typed_and_its_end_is_the_lab_s() {
    if kit().is_none() {
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(["lab", "--shell"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut lab = Lab(command.spawn().unwrap());
    let (mut typed, mut shown) = (lab.0.stdin.take().unwrap(), lab.0.stdout.take().unwrap());
    let mut text = String::new();
    let mut until = |end: &str| {
        let mut byte = [0];
        while !text.ends_with(end) {
            assert_eq!(shown.read(&mut byte).unwrap(), 1, "the lab ended before {end:?}:\n{text}");
            text.push(char::from(byte[0]));
        }
    };
    until("lab# ");
    typed.write_all(b"echo $((6 * 7)) devices\n").unwrap();
    until("\n42 devices");
    until("lab# ");
    typed.write_all(b"exit\n").unwrap();
    assert!(lab.0.wait().unwrap().success());
}
