//! What GPUs draw, as a management library without GPUs says it.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::error::Error;
use std::path::Path;

use common::Fake;
use hw_cuda::{Link, Nvml, NvmlError, PciePath};

#[test]
fn a_gpu_is_measured_whatever_it_is_called_by() {
    let Some(fake) = Fake::nvml() else { return };
    let nvml = Nvml::load_from(fake.path()).unwrap();
    assert_eq!(nvml.driver_version().unwrap(), "580.159.04");
    for which in ["GPU-00112233-4455-6677-8899-aabbccddee00", "0000:1a:00.0", "00000000:1A:00.0"] {
        let meter = nvml.meter(which).unwrap();
        assert_eq!(meter.name().unwrap(), "Fake GPU 0", "{which}");
        assert_eq!((meter.power().unwrap(), meter.energy().unwrap()), (71_234, 9_876_543_210));
    }
}

#[test]
fn the_library_is_let_go_of_once_nobody_measures() {
    let Some(fake) = Fake::nvml() else { return };
    let nvml = Nvml::load_from(fake.path()).unwrap();
    let meter = nvml.meter("0000:1b:00.0").unwrap();
    drop(nvml);
    assert_eq!((fake.get("users"), meter.name().unwrap().as_str()), (1, "Fake GPU 1"));
    drop(meter);
    assert_eq!(fake.get("users"), 0);
}

#[test]
fn a_machine_without_it_gets_one_clear_line() {
    let error = Nvml::load_from(Path::new("libnvidia-ml-of-nobody.so.1")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "This machine has no NVML (libnvidia-ml-of-nobody.so.1); install NVIDIA's driver to measure GPUs"
    );
    assert!(error.source().is_some());
}

#[test]
fn what_is_wrong_is_said_with_what_to_do() {
    let Some(fake) = Fake::nvml() else { return };
    let said = |error: NvmlError| error.to_string();
    for (code, what) in [
        (9, "nvmlInit failed: Driver Not Loaded (9); load the kernel's driver (modprobe nvidia)"),
        (999, "nvmlInit failed: Unknown Error (999)"),
    ] {
        fake.set("init", code);
        assert_eq!(said(Nvml::load_from(fake.path()).unwrap_err()), what);
        assert_eq!(fake.get("users"), 0);
    }
    fake.set("init", 0);
    let nvml = Nvml::load_from(fake.path()).unwrap();
    for which in ["0000:77:00.0", "GPU-0", "", "nothing", "gpu", "GP\u{dc}-", "0000:1a\0"] {
        let error = nvml.meter(which).unwrap_err();
        assert!(matches!(&error, NvmlError::NoGpu { wanted } if wanted == which), "{error}");
    }
    let meter = nvml.meter("0000:1b:00.0").unwrap();
    assert_eq!(said(meter.power().unwrap_err()), "This GPU does not say what power it draws");
    assert_eq!(said(meter.energy().unwrap_err()), "This GPU does not say what energy it has used");
    fake.set("lost", 1);
    let lost = "nvmlDeviceGetPowerUsage failed: GPU is lost (15); it has fallen off the bus: see the kernel's log, and restart";
    assert_eq!(said(meter.power().unwrap_err()), lost);
}

#[test]
fn another_library_is_no_nvml() {
    let Some(other) = Fake::cuda() else { return };
    let error = Nvml::load_from(other.path()).unwrap_err();
    assert_eq!(error.to_string(), "NVML has no nvmlInit_v2; install a driver of version 470 or newer");
}

#[test]
fn what_is_between_two_gpus_is_said() {
    let Some(fake) = Fake::nvml() else { return };
    let nvml = Nvml::load_from(fake.path()).unwrap();
    let [one, other] = ["0000:1a:00.0", "0000:1b:00.0"].map(|which| nvml.meter(which).unwrap());
    let link = |numbers: &[(&str, i64)]| {
        numbers.iter().for_each(|(name, value)| fake.set(name, *value));
        let link = one.link(&other).unwrap();
        (link, link.to_string())
    };
    // Through switches all links lead everywhere.
    assert_eq!(link(&[]), (Link::NvLink { links: 18 }, "NVLink (18 links)".into()));
    assert_eq!(link(&[("nvlinks", 12)]).0, Link::NvLink { links: 12 });
    assert_eq!(link(&[("straight", 4)]).0, Link::NvLink { links: 4 });
    assert_eq!(link(&[("straight", 1)]).1, "NVLink (1 link)");
    let host_bridge = (Link::Pcie(PciePath::HostBridge), "PCIe through a host bridge (PHB)".into());
    assert_eq!(link(&[("nvlinks", 0)]), host_bridge);
    for (level, path) in [
        (0, PciePath::Board),
        (10, PciePath::Switch),
        (20, PciePath::Switches),
        (40, PciePath::Node),
        (50, PciePath::System),
    ] {
        assert_eq!(link(&[("ancestor", level)]).0, Link::Pcie(path));
    }
    for level in [-1, 5, 60] {
        fake.set("ancestor", level);
        let error = one.link(&other).unwrap_err();
        assert_eq!(error.to_string(), "This GPU does not say where its way to another one leads", "{level}");
    }
    fake.set("ancestor", 30);
    assert!(one.link(&one).is_err(), "it has no way to itself");
    fake.set("lost", 1);
    assert!(matches!(one.link(&other), Err(NvmlError::Call { code: 15, .. })));
}
