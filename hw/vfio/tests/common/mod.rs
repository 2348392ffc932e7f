//! The conformance suite's world over an engine whose own memory is one endpoint's.

#![allow(unreachable_pub, clippy::map_err_ignore, reason = "shared by tests")]

use std::fs::File;
use std::sync::Arc;

use hw_engine::conformance::ram_regions;
use hw_engine::{Memory, MemoryError, Owner, Place, RamMap};
use hw_host::HostMemory;
use hw_vfio::VfioEngine;
use iommu_addr::{EndpointId, Location};

pub fn file(len: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(len).unwrap();
    file
}

/// The suite's guest memory, and no endpoint's.
pub fn ram() -> Arc<HostMemory> {
    let memory = HostMemory::new();
    memory.replace(&ram_regions(file)).unwrap();
    Arc::new(memory)
}

/// What the suite looks at: the engine's own memory as its owner sees it, and all else.
pub struct World {
    pub engine: Arc<VfioEngine>,
    pub memory: Arc<HostMemory>,
    /// What holds the memory.
    #[allow(dead_code, reason = "held, not read")]
    pub hold: Option<Box<dyn std::any::Any + Send + Sync>>,
}

impl World {
    fn own(&self, at: Location) -> Option<(EndpointId, u64)> {
        match at {
            Location::Aperture { endpoint, offset } if self.engine.owns(endpoint) => Some((endpoint, offset.0)),
            _ => None,
        }
    }
}

impl Memory for World {
    fn copy(&self, dst: Location, src: Location, len: u64) -> Result<(), MemoryError> {
        self.memory.copy(dst, src, len)
    }

    fn fill(&self, dst: Location, len: u64, pattern: u64) -> Result<(), MemoryError> {
        self.memory.fill(dst, len, pattern)
    }

    fn read(&self, src: Location, into: &mut [u8]) -> Result<(), MemoryError> {
        let Some((endpoint, offset)) = self.own(src) else { return self.memory.read(src, into) };
        self.engine.read_own(endpoint, offset, into).map_err(|_| MemoryError { at: src, len: into.len() as u64 })
    }

    fn write(&self, dst: Location, from: &[u8]) -> Result<(), MemoryError> {
        let Some((endpoint, offset)) = self.own(dst) else { return self.memory.write(dst, from) };
        self.engine.write_own(endpoint, offset, from).map_err(|_| MemoryError { at: dst, len: from.len() as u64 })
    }

    fn place(&self, at: Location, most: u64) -> Option<Place> {
        self.memory.place(at, most)
    }
}
