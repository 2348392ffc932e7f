//! Who acts and what is named.

use core::fmt;

/// One tenant of this host: one VM, one worker process. Chosen by the operator's configuration order, never by a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

/// One I/O address space of a tenant: one open of the guest's device file. Chosen by the guest's kernel driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(pub u32);

/// An ordered sequence of transfers within a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u32);

/// A slice of a device that was granted to a tenant; `host` 0 is this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointId {
    /// Which host the device sits in.
    pub host: u16,
    /// Which endpoint of that host, numbered per tenant.
    pub id: u16,
}

impl EndpointId {
    /// An endpoint of this host.
    pub const fn local(id: u16) -> Self {
        Self { host: 0, id }
    }

    /// The wire form: `host` in the high half.
    pub const fn to_raw(self) -> u32 {
        (self.host as u32) << 16 | self.id as u32
    }

    /// The endpoint that a wire number names.
    #[allow(clippy::cast_possible_truncation, reason = "each half is 16 bits wide")]
    pub const fn from_raw(raw: u32) -> Self {
        Self { host: (raw >> 16) as u16, id: raw as u16 }
    }
}

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host == 0 { write!(f, "{}", self.id) } else { write!(f, "{}.{}", self.host, self.id) }
    }
}

/// Device memory that a domain allocated. The generation makes a freed handle recognisable for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId {
    /// Place in the device's buffer table.
    pub index: u32,
    /// How often that place has been used before.
    pub generation: u32,
}

impl BufferId {
    /// The wire form: `generation` in the high half.
    pub const fn to_raw(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }

    /// The buffer that a wire handle names.
    #[allow(clippy::cast_possible_truncation, reason = "each half is 32 bits wide")]
    pub const fn from_raw(raw: u64) -> Self {
        Self { index: raw as u32, generation: (raw >> 32) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_forms_survive_a_round_trip() {
        let endpoint = EndpointId { host: 0x1234, id: 0xabcd };
        assert_eq!(endpoint.to_raw(), 0x1234_abcd);
        assert_eq!(EndpointId::from_raw(endpoint.to_raw()), endpoint);
        let buffer = BufferId { index: 7, generation: 0xffff_ffff };
        assert_eq!(BufferId::from_raw(buffer.to_raw()), buffer);
    }
}
