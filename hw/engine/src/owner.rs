//! Engines with memory that nobody else reaches.
//!
//! Not here: who carries a transfer out (`fleet`).

use iommu_addr::EndpointId;

use crate::{DmaEngine, EngineError};

/// An engine with memory that only it reaches.
pub trait Owner: DmaEngine {
    /// Whether the endpoint's memory is the engine's own.
    fn owns(&self, endpoint: EndpointId) -> bool;

    /// Reads the memory of an endpoint that it owns, as its owner sees it. At most [`MAX_STAGED`](crate::MAX_STAGED) bytes; blocks.
    ///
    /// # Errors
    /// When it is not there, or as the device says.
    fn read_own(&self, endpoint: EndpointId, offset: u64, into: &mut [u8]) -> Result<(), EngineError>;

    /// Writes it; as [`Owner::read_own`].
    ///
    /// # Errors
    /// As there.
    fn write_own(&self, endpoint: EndpointId, offset: u64, from: &[u8]) -> Result<(), EngineError>;
}
