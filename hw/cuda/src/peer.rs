//! [`Peer`]: how one GPU reaches the memory of another, as CUDA has it.
//!
//! Not here: what is between the two, which NVML knows ([`Meter::link`](crate::Meter::link)).

use std::ffi::c_int;

use crate::gpu::Gpu;

/// `CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK`, `CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED`
const RANK: c_int = 1;
const ATOMICS: c_int = 3;

/// How a GPU reaches another one's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its engines and programs may read and write there without a stop.
    pub access: bool,
    /// Atomic operations of its programs are atomic there.
    pub atomics: bool,
    /// How fast the way is among those of this machine; 0 is the fastest.
    pub rank: i32,
}

impl Gpu {
    /// How it reaches another GPU's memory. The other way may differ. Of itself, and of what the driver does not say, it is nothing.
    pub fn peer(&self, other: &Self) -> Peer {
        let access = self.reaches(other);
        let knows = |which| if access { self.peer_attribute(which, other) } else { 0 };
        Peer { access, atomics: knows(ATOMICS) != 0, rank: knows(RANK) }
    }

    /// Whether it reaches the other's memory without a stop.
    pub(crate) fn reaches(&self, other: &Self) -> bool {
        let (from, to, mut can) = (self.info().ordinal, other.info().ordinal, 0);
        // SAFETY: the driver writes one number.
        let answer = unsafe { (self.driver().table.can_access_peer)(&raw mut can, from, to) };
        answer == 0 && can != 0
    }

    /// A number that the driver knows of the way; 0 if it does not know that kind of number.
    fn peer_attribute(&self, which: c_int, other: &Self) -> i32 {
        let (from, to, mut value) = (self.info().ordinal, other.info().ordinal, 0);
        // SAFETY: the driver writes one number.
        let answer = unsafe { (self.driver().table.peer_attribute)(&raw mut value, which, from, to) };
        if answer == 0 { value } else { 0 }
    }
}
