//! The engines on real PCI functions, in the lab: `cargo xtask lab --check` runs this program in a host that has them. With the word `iommufd` it takes
//! that for its IOMMU domain, and then shows what becomes of mappings that are held (`held`).
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod held;

use std::fs;
use std::sync::Arc;

use common::{World, ram};
use hw_engine::Buffer;
use hw_engine::conformance::{self, APERTURES, Parts};
use hw_host::{DeviceArea, HostMemory};
use hw_vfio::{Area, Function, Host, Kind, Lazy, MapSink, Slice, VfioEngine, open_container, open_iommufd};

/// Where the lab says which devices there are: a name, an address and a group a line.
const DEVICES: &str = "/run/lab/devices";
/// The BAR of an ivshmem function that is memory.
const MEMORY_BAR: u32 = 2;
/// Where the second endpoint's memory begins in it, if both are there.
const SECOND: u64 = 1 << 20;

/// Where the memory of the first endpoint is in the NVMe controller's namespace.
fn nvme() -> Slice {
    Slice { endpoint: APERTURES[0].0, start: 8 << 20, len: APERTURES[0].1 }
}

/// What the engines' functions are behind.
#[derive(Clone, Copy)]
enum Domain {
    Container,
    Iommufd,
}

impl Domain {
    fn host(self) -> Arc<Host> {
        Arc::new(match self {
            Self::Container => Host::new(open_container().unwrap()),
            Self::Iommufd => Host::of_iommufd(open_iommufd().unwrap()).unwrap(),
        })
    }

    /// Memory behind a BAR as a dma-buf, where the domain wants that.
    fn buffer(self, bar: &Function, area: Area) -> Option<Buffer> {
        match self {
            Self::Container => None,
            Self::Iommufd => {
                let file = Arc::new(bar.bar_buffer(MEMORY_BAR, area).unwrap());
                Some(Buffer { file, offset: 0 })
            }
        }
    }
}

/// The address of the device with this name in the lab's topology.
fn address(name: &str) -> String {
    let devices = fs::read_to_string(DEVICES).unwrap();
    let line = devices.lines().find(|line| line.split(' ').next() == Some(name));
    line.and_then(|line| line.split(' ').nth(1))
        .unwrap_or_else(|| panic!("the lab has no {name}: {devices}"))
        .to_owned()
}

/// The suite's guest memory, and the memory of its endpoints from number `first` on behind a BAR.
fn memory(domain: Domain, bar: &Function, first: usize) -> Arc<HostMemory> {
    let memory = ram();
    let (file, offset) = bar.bar_file(MEMORY_BAR).unwrap();
    for (n, (endpoint, len)) in (0..).zip(APERTURES).skip(first) {
        let start = n * SECOND;
        let buffer = domain.buffer(bar, Area { start, len });
        let area = DeviceArea { start: 0, file: &file, offset: offset + start, len, buffer: buffer.as_ref() };
        memory.add_device(endpoint, &[area]).unwrap();
    }
    memory
}

/// An engine of a kind, whose mappings are kept if it is lazy, and the memory of the endpoints that are not its own behind a BAR of another function.
fn build(domain: Domain, kind: Kind, name: &str, own: Option<Slice>, is_lazy: bool) -> Parts {
    let host = domain.host();
    let engine = Function::open(&host, &address(name)).unwrap();
    let bar = Function::open(&host, &address("mem0")).unwrap();
    let memory = memory(domain, &bar, usize::from(own.is_some()));
    let sink: Arc<dyn MapSink> = if is_lazy { Arc::new(Lazy::new(host, Lazy::LINGER)) } else { host };
    let engine = Arc::new(VfioEngine::open(kind, engine, sink, own, memory.clone(), None, None).unwrap());
    let world = World { engine: Arc::clone(&engine), memory, hold: Some(Box::new(bar)) };
    Parts { engine, memory: Arc::new(world), advance: None }
}

/// Cases that would take an engine with a tenth of a second a page more than a minute each.
const TOO_SLOW: &[&str] = &["every pair", "cut nowhere", "full engine", "many threads", "random", "quiet engine"];

fn main() {
    if std::env::var_os("PEERGATE_LAB").is_none() {
        println!("SKIP: this needs PCI functions that may be driven; `cargo xtask lab --check` has them");
        return;
    }
    let by_iommufd = std::env::args().nth(1).is_some_and(|word| word == "iommufd");
    let domain = if by_iommufd { Domain::Iommufd } else { Domain::Container };
    conformance::run(&|| build(domain, Kind::Nvme { namespace: 1 }, "nvme0", Some(nvme()), false));
    println!("nvme conforms");
    if by_iommufd {
        return held::run();
    }
    conformance::run(&|| build(domain, Kind::Nvme { namespace: 1 }, "nvme0", Some(nvme()), true));
    println!("nvme-lazy conforms");
    conformance::run_but(&|| build(domain, Kind::Edu, "edu0", None, false), TOO_SLOW);
    println!("edu conforms");
}
