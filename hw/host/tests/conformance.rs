//! The suite that every engine passes, over mapped files.
#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::fs::File;
use std::sync::Arc;

use hw_engine::RamMap;
use hw_engine::conformance::{self, APERTURES, Parts};
use hw_host::{DeviceArea, HostEngine, HostMemory};

fn file(len: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(len).unwrap();
    file
}

/// `of_devices`: endpoints' memory is accessed as if it were behind BARs, in two areas each.
fn memory(of_devices: bool) -> HostMemory {
    let memory = HostMemory::new();
    for (endpoint, len) in APERTURES {
        let file = &file(len);
        if of_devices {
            let first = DeviceArea { start: 0, file, offset: len - 0x2000, len: 0x2000, buffer: None };
            let second = DeviceArea { start: 0x2000, file, offset: 0, len: len - 0x2000, buffer: None };
            memory.add_device(endpoint, &[second, first]).unwrap();
        } else {
            memory.add_aperture(endpoint, file, len).unwrap();
        }
    }
    memory.replace(&conformance::ram_regions(file)).unwrap();
    memory
}

fn run(of_devices: bool) {
    conformance::run(&|| {
        let memory = Arc::new(memory(of_devices));
        Parts { engine: Arc::new(HostEngine::new(memory.clone())), memory, advance: None }
    });
}

#[test]
fn the_host_engine_conforms() {
    run(false);
}

#[test]
fn the_host_engine_conforms_on_memory_of_devices() {
    run(true);
}
