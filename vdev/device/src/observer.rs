//! What the operator sees of a device: refusals, counters and gauges.
//!
//! Counters are added up in a [`Tally`] on the thread that works and handed over once a turn.
//!
//! Not here: where they are kept or shown.

use iommu_addr::{Access, DomainId, EndpointId, Iova};
use iommu_core::Provenance;
use vdev_wire::{FaultReason, Status, TransferPath};

macro_rules! names {
    ($(#[$doc:meta])* $kind:ident { $($(#[$item_doc:meta])* $item:ident = $name:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $kind { $($(#[$item_doc])* $item),* }

        impl $kind {
            /// Every one, in a fixed order: position n is `self as usize` n.
            pub const ALL: &'static [Self] = &[$(Self::$item),*];

            /// Name for the operator, in snake case.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$item => $name),* }
            }
        }
    };
}

names! {
    /// Numbers that only grow.
    Counter {
        /// Work descriptors that ended, however.
        Ops = "ops",
        /// Bytes that went straight from device to device.
        BytesDirect = "bytes_direct",
        /// Bytes that went through host memory.
        BytesStaged = "bytes_staged",
        /// Bytes that stayed within a device, or went between a device and the guest's memory.
        BytesLocal = "bytes_local",
        /// Work descriptors that ended with another status than OK.
        Errors = "errors",
        /// Accesses refused: translations, peer rights, handles.
        Faults = "faults",
        /// Events raised, delivered or not.
        Events = "events",
        /// Events dropped for want of room.
        EventsDropped = "events_dropped",
        /// Control requests answered.
        ControlRequests = "control_requests",
        /// Control requests answered with another status than OK.
        ControlErrors = "control_errors",
        /// Chains taken from submission queues.
        Chains = "chains",
        /// Chains of any queue that were malformed.
        MalformedChains = "malformed_chains",
        /// Kernels that a device's own logic ran.
        Kernels = "kernels",
        /// Work descriptors that did not end by their deadline.
        Timeouts = "timeouts",
        /// Work descriptors of an earlier session, or that a process had in hand when it died.
        Lost = "lost",
    }
}

names! {
    /// Numbers that rise and fall.
    Gauge {
        /// Domains that exist.
        Domains = "domains",
        /// Mappings of all domains, those of buffers included.
        Mappings = "mappings",
        /// Buffers of all domains.
        Buffers = "buffers",
        /// Bytes of endpoint memory in buffers, or being scrubbed.
        BufferBytes = "buffer_bytes",
        /// Work descriptors that wait or run.
        InFlight = "in_flight",
    }
}

/// One refusal, as the operator sees it: both parties are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultRecord {
    /// Domain concerned.
    pub domain: DomainId,
    /// Endpoint that wanted access, if one was chosen.
    pub accessor: Option<EndpointId>,
    /// Endpoint whose memory it was.
    pub owner: Option<EndpointId>,
    /// First address refused.
    pub address: Iova,
    /// What was wanted.
    pub access: Access,
    /// Why it was refused.
    pub reason: FaultReason,
    /// Stream of the work concerned; 0 if none.
    pub stream: u32,
    /// Cookie of the work concerned; 0 if none.
    pub cookie: u64,
    /// What the guest was answered.
    pub status: Status,
    /// The handle of a STALE or foreign buffer; else 0.
    pub value: u64,
    /// The mapping that the refusal is about: the one that refused, or for an address that nothing holds the one that did or lies nearest.
    pub mapping: Option<Provenance>,
    /// The owner is another domain's, and the guest is not told of it.
    pub is_foreign: bool,
}

/// What the operator sees. Called from every thread of the device: implementations must be quick and never block.
pub trait Observer: Send + Sync {
    /// An access was refused.
    fn fault(&self, record: &FaultRecord);
    /// `by` more of `counter`.
    fn count(&self, counter: Counter, by: u64);
    /// `gauge` is `value` now.
    fn gauge(&self, gauge: Gauge, value: u64);
}

/// Sees nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unobserved;

impl Observer for Unobserved {
    fn fault(&self, _record: &FaultRecord) {}
    fn count(&self, _counter: Counter, _by: u64) {}
    fn gauge(&self, _gauge: Gauge, _value: u64) {}
}

/// Counts of one turn.
#[derive(Debug, Default)]
pub(crate) struct Tally([u64; Counter::ALL.len()]);

impl Tally {
    pub(crate) fn add(&mut self, counter: Counter, by: u64) {
        if let Some(count) = self.0.get_mut(counter as usize) {
            *count = count.wrapping_add(by);
        }
    }

    /// One work descriptor that ended.
    pub(crate) fn ended(&mut self, status: Status, path: TransferPath, bytes: u64) {
        self.add(Counter::Ops, 1);
        match path {
            TransferPath::Direct => self.add(Counter::BytesDirect, bytes),
            TransferPath::Staged => self.add(Counter::BytesStaged, bytes),
            TransferPath::Local => self.add(Counter::BytesLocal, bytes),
            _ => {}
        }
        if status != Status::Ok {
            self.add(Counter::Errors, 1);
        }
        if status == Status::Timeout {
            self.add(Counter::Timeouts, 1);
        }
        if status == Status::Lost {
            self.add(Counter::Lost, 1);
        }
    }

    /// Hands everything over and starts again from zero.
    pub(crate) fn flush(&mut self, observer: &dyn Observer) {
        for (counter, count) in Counter::ALL.iter().zip(&mut self.0) {
            if *count != 0 {
                observer.count(*counter, std::mem::take(count));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn positions_are_numbers_and_names_are_unique() {
        for (index, counter) in Counter::ALL.iter().enumerate() {
            assert_eq!(*counter as usize, index);
        }
        for (index, gauge) in Gauge::ALL.iter().enumerate() {
            assert_eq!(*gauge as usize, index);
        }
        let names: BTreeSet<_> =
            Counter::ALL.iter().map(|c| c.name()).chain(Gauge::ALL.iter().map(|g| g.name())).collect();
        assert_eq!(names.len(), Counter::ALL.len() + Gauge::ALL.len());
    }
}
