//! The engines on real PCI functions, in the lab: `cargo xtask lab --check` runs this program in a host that has them.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs;
use std::sync::Arc;

use common::{World, ram};
use hw_engine::conformance::{self, APERTURES, Parts};
use hw_host::DeviceArea;
use hw_vfio::{Function, Host, Kind, Slice, VfioEngine, open_container};

/// Where the lab says which devices there are: a name, an address and a group a line.
const DEVICES: &str = "/run/lab/devices";
/// The BAR of an ivshmem function that is memory.
const MEMORY_BAR: u32 = 2;
/// Where the second endpoint's memory begins in it, if both are there.
const SECOND: u64 = 1 << 20;

/// The address of the device with this name in the lab's topology.
fn address(name: &str) -> String {
    let devices = fs::read_to_string(DEVICES).unwrap();
    let line = devices.lines().find(|line| line.split(' ').next() == Some(name));
    line.and_then(|line| line.split(' ').nth(1))
        .unwrap_or_else(|| panic!("the lab has no {name}: {devices}"))
        .to_owned()
}

/// An engine of a kind, and the memory of the endpoints that are not its own behind a BAR of another function.
fn build(kind: Kind, name: &str, own: Option<Slice>) -> Parts {
    let host = Arc::new(Host::new(open_container().unwrap()));
    let engine = Function::open(&host, &address(name)).unwrap();
    let bar = Function::open(&host, &address("mem0")).unwrap();
    let memory = ram();
    let (file, offset) = bar.bar_file(MEMORY_BAR).unwrap();
    for (n, (endpoint, len)) in (0..).zip(APERTURES).skip(usize::from(own.is_some())) {
        let area = DeviceArea { start: 0, file: &file, offset: offset + n * SECOND, len };
        memory.add_device(endpoint, &[area]).unwrap();
    }
    let engine = Arc::new(VfioEngine::open(kind, engine, own, memory.clone(), None).unwrap());
    let world = World { engine: Arc::clone(&engine), has_own: own.is_some(), memory, hold: Some(Box::new(bar)) };
    Parts { engine, memory: Arc::new(world), advance: None }
}

/// Cases that would take an engine with a tenth of a second a page more than a minute each.
const TOO_SLOW: &[&str] = &["every pair", "cut nowhere", "full engine", "many threads", "random", "quiet engine"];

fn main() {
    if std::env::var_os("PEERGATE_LAB").is_none() {
        println!("SKIP: this needs PCI functions that may be driven; `cargo xtask lab --check` has them");
        return;
    }
    let nvme = Slice { endpoint: APERTURES[0].0, start: 8 << 20, len: APERTURES[0].1 };
    conformance::run(&|| build(Kind::Nvme { namespace: 1 }, "nvme0", Some(nvme)));
    println!("nvme conforms");
    conformance::run_but(&|| build(Kind::Edu, "edu0", None), TOO_SLOW);
    println!("edu conforms");
}
