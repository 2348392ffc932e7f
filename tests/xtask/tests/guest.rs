//! A guest boots, speaks and ends. Skipped with a printed reason where no kit is built (`cargo xtask kit` builds it).

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use xtask::guest::{Accel, Guest, GuestSpec, Initramfs, Said, boot};
use xtask::kit::Kit;

fn kit() -> Option<Kit> {
    let kit = Kit::open().expect("a kit that is there opens");
    if kit.is_none() {
        println!("skipped: there is no kit; run `cargo xtask kit`");
    }
    kit
}

fn root(kit: &Kit, body: &str) -> Initramfs {
    let mut root = Initramfs::new();
    root.busybox(kit).expect("the kit's busybox runs");
    root.init_script(body);
    root
}

#[test]
fn a_guest_runs_a_program_of_the_host_and_powers_off() {
    let Some(kit) = kit() else { return };
    let mut root = root(&kit, "echo kernel $(uname -r); /opt/ls /etc/said; cat /etc/said");
    root.program("/opt/ls", Path::new("/bin/ls")).unwrap();
    root.bytes("/etc/said", "from the host\n", 0o600);
    let mut lines = Vec::new();
    let outcome = boot(&kit, &GuestSpec::new(root), |line| {
        lines.push(line.to_owned());
        ControlFlow::Continue(())
    })
    .unwrap();
    println!("{:?} in {:.1} s", outcome.status, outcome.wall.as_secs_f64());
    for expected in [format!("kernel {}", kit.kernel_release()), "/etc/said".into(), "from the host".into()] {
        assert!(lines.contains(&expected), "{expected} is not in {lines:#?}");
    }
}

#[test]
fn a_packed_kit_has_all_that_a_guest_needs_and_nothing_of_this_machine() {
    let Some(kit) = kit() else { return };
    let dir = tempfile::tempdir().unwrap();
    assert!(Kit::packed_in(dir.path()).unwrap().is_none());
    // Built in, on its own and with others that it needs.
    let modules = ["virtio_pci", "vfio_pci"];
    kit.pack(&modules, dir.path()).unwrap();
    let packed = Kit::packed_in(dir.path()).unwrap().expect("what was packed is a kit");
    packed.libraries("usr/bin/qemu-system-x86_64").expect("every library is packed");
    let names = |kit: &Kit| kit.kernel_modules(&modules).unwrap().into_iter().map(|m| m.name).collect::<Vec<_>>();
    assert_eq!(names(&packed), names(&kit));
    assert!(packed.kernel_modules(&modules).unwrap().iter().all(|module| module.path.starts_with(dir.path())));

    let mut spec = GuestSpec::new(root(&packed, "echo kernel $(uname -r)"));
    // What no machine lacks.
    spec.accel = Some(Accel::Tcg);
    let mut guest = Guest::start(&packed, &spec).unwrap();
    let mut lines = Vec::new();
    while let Some(said) = guest.said().unwrap() {
        lines.push(said);
    }
    guest.finish().unwrap();
    assert!(lines.contains(&Said::Guest(format!("kernel {}", kit.kernel_release()))), "{lines:#?}");
    assert!(lines.iter().all(|line| matches!(line, Said::Guest(_))), "QEMU misses something: {lines:#?}");
}

#[test]
fn a_guest_that_does_not_end_is_ended_at_its_limit() {
    let Some(kit) = kit() else { return };
    let mut spec = GuestSpec::new(root(&kit, "sleep 1000"));
    spec.timeout = Duration::from_secs(1);
    let error = boot(&kit, &spec, |_| ControlFlow::Continue(())).unwrap_err().to_string();
    assert!(error.contains("did not power off"), "{error}");
}

#[test]
fn a_caller_may_stop_a_guest_by_what_it_says() {
    let Some(kit) = kit() else { return };
    let spec = GuestSpec::new(root(&kit, "echo enough; sleep 1000"));
    let outcome = boot(&kit, &spec, |line| match line {
        "enough" => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    })
    .unwrap();
    assert!(outcome.status.is_none());
}

#[test]
fn a_word_that_qemu_does_not_know_is_reported_in_its_own_words() {
    let Some(kit) = kit() else { return };
    let spec = GuestSpec::new(root(&kit, "true")).args(["-device", "no-such-device"]);
    let error = boot(&kit, &spec, |_| ControlFlow::Continue(())).unwrap_err().to_string();
    assert!(error.contains("no-such-device"), "{error}");
}
