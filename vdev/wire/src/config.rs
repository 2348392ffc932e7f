//! Configuration space.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First eight bytes of configuration space; a driver refuses a device without them.
pub const CONFIG_MAGIC: [u8; 8] = *b"PEERGATE";
/// Version of the wire that this crate describes.
pub const VERSION: u16 = 1;
/// Size of configuration space in bytes. Reads beyond the fields answer zero.
pub const CONFIG_SIZE: usize = 64;

/// Configuration space. Read-only to the driver; a write changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// [`CONFIG_MAGIC`].
    pub magic: [u8; 8],
    /// Newest version the device speaks.
    pub version: U16,
    /// Oldest version the device speaks.
    pub version_min: U16,
    /// Changes whenever the device lost state.
    pub session: U32,
    /// Feature words that HELLO chooses from; none is defined in version 1.
    pub features: U64,
    /// Submission queues, numbered from [`crate::FIRST_SUBMIT_QUEUE`].
    pub submit_queues: U16,
    /// Endpoints that PROBE lists.
    pub endpoints: U16,
    /// Most work descriptors in one chain.
    pub max_batch: U16,
    /// Zero.
    pub reserved0: U16,
    /// Zero.
    pub reserved: [U64; 4],
}

const _: () = assert!(size_of::<Config>() == CONFIG_SIZE);
