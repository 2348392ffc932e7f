//! Memory for what no command can move from place to place: parts of blocks, and from one's own memory to one's own.
//!
//! Not here: when it is needed.

use crate::VfioError;
use crate::bus::PAGE;
use crate::dma::DmaMemory;
use crate::host::MapSink;
use crate::mover::MAX_TRANSFER;

/// Bytes of it: as many as an engine takes in one transfer, and a block on either side.
pub(crate) const LEN: u64 = MAX_TRANSFER + 2 * PAGE;

pub(crate) struct Bounce(DmaMemory);

impl Bounce {
    pub(crate) fn new(host: &dyn MapSink, mask: u64) -> Result<Self, VfioError> {
        Ok(Self(DmaMemory::new(host, usize::try_from(LEN).unwrap_or(0), mask)?))
    }

    pub(crate) fn bus(&self, at: u64) -> iommu_addr::BusAddr {
        iommu_addr::BusAddr(self.0.bus(0).0 + at)
    }

    pub(crate) fn read(&self, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        self.0.read(usize::try_from(at).unwrap_or(usize::MAX), &mut bytes);
        bytes
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
        self.0.write(usize::try_from(at).unwrap_or(usize::MAX), bytes);
    }
}
