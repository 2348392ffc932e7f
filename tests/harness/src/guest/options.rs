//! How a guest of this process is set up.

use crate::frontend::{EVENT_IDX, INDIRECT_DESC, VERSION_1};

/// How the guest behaves.
#[derive(Clone, Copy, Debug)]
pub struct DriverOptions {
    /// Bytes of guest memory, where it is not given.
    pub ram: u64,
    /// Entries of each queue.
    pub queue_size: u16,
    /// Feature bits to accept.
    pub features: u64,
    /// Look for completions instead of being interrupted.
    pub polling: bool,
    /// Longest run of guest pages behind a mapping, in bytes: shorter runs make MAP carry more segments.
    pub longest_run: u64,
}

impl Default for DriverOptions {
    fn default() -> Self {
        Self {
            ram: 256 << 20,
            queue_size: 256,
            features: VERSION_1 | EVENT_IDX | INDIRECT_DESC,
            polling: false,
            longest_run: 8 << 20,
        }
    }
}
