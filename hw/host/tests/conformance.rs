//! The suite that every engine passes, over mapped files.
#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::fs::File;
use std::sync::Arc;

use hw_engine::conformance::{self, APERTURES, Parts, RAM};
use hw_engine::{RamMap, RamRegion};
use hw_host::{HostEngine, HostMemory};
use iommu_addr::{Gpa, Range};

fn file(len: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(len).unwrap();
    file
}

fn memory() -> HostMemory {
    let memory = HostMemory::new();
    for (endpoint, len) in APERTURES {
        memory.add_aperture(endpoint, &file(len), len).unwrap();
    }
    // Each region begins at an odd page of its file, so that regions that touch lie apart in this process.
    let regions = RAM.map(|(start, len)| RamRegion {
        gpa: Range::with_len(Gpa(start), len).unwrap(),
        file: Arc::new(file(len + 0x5000)),
        offset: 0x3000,
    });
    memory.replace(&regions).unwrap();
    memory
}

#[test]
fn the_host_engine_conforms() {
    conformance::run(&|| {
        let memory = Arc::new(memory());
        Parts { engine: Arc::new(HostEngine::new(memory.clone())), memory, advance: None }
    });
}
