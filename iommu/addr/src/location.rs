//! Where bytes are: the address spaces, and where a translation ends.

use crate::{Addr, EndpointId};

macro_rules! address_space {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl Addr for $name {
            fn raw(self) -> u64 {
                self.0
            }
            fn from_raw(raw: u64) -> Self {
                Self(raw)
            }
        }
    )*};
}

address_space! {
    /// I/O virtual address: what a guest writes in a descriptor.
    Iova,
    /// Guest-physical address.
    Gpa,
    /// Offset into an endpoint's own address map: its memory from 0, its registers from [`REGISTERS`].
    ApertureOffset,
    /// What a hardware engine is told in place of a guest's address.
    BusAddr,
}

/// Where an endpoint's register page begins in its address map: far beyond any memory size.
pub const REGISTERS: ApertureOffset = ApertureOffset(1 << 52);

/// Where a translated byte really lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// In the guest's memory.
    Ram(Gpa),
    /// In an endpoint's memory or registers.
    Aperture {
        /// Who owns the memory.
        endpoint: EndpointId,
        /// Where in the owner's address map.
        offset: ApertureOffset,
    },
}

impl Location {
    /// The place `bytes` further on, or `None` past the end of its space.
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        Some(match self {
            Self::Ram(gpa) => Self::Ram(gpa.checked_add(bytes)?),
            Self::Aperture { endpoint, offset } => Self::Aperture { endpoint, offset: offset.checked_add(bytes)? },
        })
    }

    /// The endpoint that owns the place; guest memory has no owner.
    pub fn owner(self) -> Option<EndpointId> {
        match self {
            Self::Ram(_) => None,
            Self::Aperture { endpoint, .. } => Some(endpoint),
        }
    }

    /// Whether the place is in an endpoint's register page.
    pub fn is_registers(self) -> bool {
        matches!(self, Self::Aperture { offset, .. } if offset >= REGISTERS)
    }
}

/// `len` consecutive bytes at one place. `len` is never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// First byte.
    pub at: Location,
    /// Length in bytes.
    pub len: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn location_past_the_end_of_its_space_does_not_exist() {
        assert_eq!(Location::Ram(Gpa(u64::MAX)).checked_add(1), None);
        let at = Location::Aperture { endpoint: EndpointId::local(1), offset: ApertureOffset(u64::MAX) };
        assert_eq!(at.checked_add(1), None);
    }

    #[test]
    fn registers_are_told_from_memory() {
        let at = |offset| Location::Aperture { endpoint: EndpointId::local(1), offset };
        assert!(at(REGISTERS).is_registers());
        assert!(!at(ApertureOffset(REGISTERS.0 - 1)).is_registers());
        assert!(!Location::Ram(Gpa(u64::MAX)).is_registers());
    }
}
