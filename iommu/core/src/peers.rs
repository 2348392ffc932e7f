//! Who may act in a domain, and who may reach whose memory. Default: nobody, nothing.
//!
//! One **gate** for each thing that can be allowed: for each endpoint that it is attached, and for each pair of an accessor and an owner, one for
//! reading and one for writing. A gate is a pin word: jobs that rely on it pin it, and withdrawing it drains it, just as mappings do. Reading and
//! writing have gates of their own so that jobs that only write cannot hold up the end of a right to read.
//!
//! Not here: rights of mappings, rights between domains or tenants, the path that a transfer takes.

use crate::domain::Domain;
use crate::drain::{Latch, Progress};
use crate::sync::{MutexGuard, lock};
use crate::table::{Draining, Table};
use crate::word::{Pin, Word};
use iommu_addr::{Access, EndpointId};
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// Why a right was not changed or told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PeerError {
    /// One of the two is not attached to the domain.
    #[error("Endpoint {endpoint} is not attached to the domain: attach it first")]
    NotAttached {
        /// Which one.
        endpoint: EndpointId,
    },
    /// Accessor and owner are the same.
    #[error("An endpoint needs no right to its own memory")]
    SameEndpoint,
    /// All those rights are there already.
    #[error("Accessor {accessor} has these rights to the memory of {owner} already")]
    Already {
        /// Who reaches out.
        accessor: EndpointId,
        /// Whose memory it is.
        owner: EndpointId,
    },
    /// One of those rights is being withdrawn, and jobs still rely on it.
    #[error("A right is still being withdrawn: wait for the answer to that request")]
    Draining,
}

/// One gate, on a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
struct Gate(Word);

/// The gates of a domain, by number.
#[derive(Debug)]
pub(crate) struct Gates {
    gates: Box<[Gate]>,
    /// Endpoints of the tenant.
    endpoints: usize,
    never: Gate,
}

impl Gates {
    pub(crate) fn new(endpoints: usize) -> Self {
        let row = endpoints.saturating_mul(2).saturating_add(1);
        let count = endpoints.saturating_mul(row);
        let gates = (0..count).map(|_| Gate(Word::new())).collect();
        Self { gates, endpoints, never: Gate(Word::new()) }
    }

    fn row(&self, endpoint: usize) -> usize {
        endpoint.saturating_mul(self.endpoints.saturating_mul(2).saturating_add(1))
    }

    /// The gate that says that an endpoint is attached.
    fn attached(&self, endpoint: usize) -> usize {
        self.row(endpoint)
    }

    /// The gates to read and to write `owner`'s memory.
    fn peer(&self, accessor: usize, owner: usize) -> [usize; 2] {
        let read = self.row(accessor).saturating_add(owner.saturating_mul(2)).saturating_add(1);
        [read, read.saturating_add(1)]
    }

    pub(crate) fn all(&self) -> Range<usize> {
        0..self.gates.len()
    }

    pub(crate) fn word(&self, number: usize) -> &Word {
        &self.gates.get(number).unwrap_or(&self.never).0
    }
}

impl Domain {
    /// An endpoint's number, if it is one of the tenant's.
    fn number(&self, endpoint: EndpointId) -> Option<usize> {
        self.tenant.endpoints.iter().position(|known| *known == endpoint)
    }

    /// Whether an endpoint is attached to the domain.
    pub fn is_attached(&self, endpoint: EndpointId) -> bool {
        let gate = self.number(endpoint).map(|number| self.gates.attached(number));
        gate.is_some_and(|gate| self.gates.word(gate).is_open())
    }

    /// The endpoints attached to the domain, in order.
    pub fn endpoints(&self) -> impl Iterator<Item = EndpointId> + '_ {
        self.tenant.endpoints.iter().copied().filter(|endpoint| self.is_attached(*endpoint))
    }

    /// Lets `accessor` reach `owner`'s memory with `rights` besides those it has; gives all it has now. Never blocks on jobs.
    ///
    /// # Errors
    /// See [`PeerError`].
    pub fn peer_enable(&self, accessor: EndpointId, owner: EndpointId, rights: Access) -> Result<Access, PeerError> {
        let (table, gates) = self.pair(accessor, owner)?;
        let wanted = || chosen(gates, rights);
        if wanted().any(|gate| table.drains(Draining::Gate(gate))) {
            return Err(PeerError::Draining);
        }
        if wanted().all(|gate| self.gates.word(gate).is_open()) {
            return Err(PeerError::Already { accessor, owner });
        }
        wanted().map(|gate| self.gates.word(gate)).filter(|word| !word.is_open()).for_each(Word::open);
        Ok(self.rights(gates))
    }

    /// Withdraws `rights`; gives those that are left, and whether jobs that rely on the withdrawn ones still run. No job gets them any more.
    ///
    /// # Errors
    /// [`PeerError::NotAttached`], [`PeerError::SameEndpoint`].
    pub fn peer_disable(
        &self,
        accessor: EndpointId,
        owner: EndpointId,
        rights: Access,
    ) -> Result<(Access, Progress), PeerError> {
        let (mut table, gates) = self.pair(accessor, owner)?;
        let latch = Latch::new();
        self.close_gates(&mut table, chosen(gates, rights), &latch);
        let left = self.rights(gates);
        drop(table);
        Ok((left, latch.release()))
    }

    /// The rights that `accessor` has to `owner`'s memory.
    ///
    /// # Errors
    /// [`PeerError::NotAttached`], [`PeerError::SameEndpoint`].
    pub fn peer_query(&self, accessor: EndpointId, owner: EndpointId) -> Result<Access, PeerError> {
        let (_table, gates) = self.pair(accessor, owner)?;
        Ok(self.rights(gates))
    }

    /// The gates between two different attached endpoints, and the lock under which they stay attached.
    fn pair(&self, accessor: EndpointId, owner: EndpointId) -> Result<(MutexGuard<'_, Table>, [usize; 2]), PeerError> {
        let table = lock(&self.table);
        let attached = |endpoint: EndpointId| {
            let number = self.number(endpoint).filter(|_| self.is_attached(endpoint));
            number.ok_or(PeerError::NotAttached { endpoint })
        };
        let gates = self.gates.peer(attached(accessor)?, attached(owner)?);
        if accessor == owner { Err(PeerError::SameEndpoint) } else { Ok((table, gates)) }
    }

    fn rights(&self, [read, write]: [usize; 2]) -> Access {
        Access { read: self.gates.word(read).is_open(), write: self.gates.word(write).is_open() }
    }

    /// Attaches an endpoint; false if it is attached or still being detached, or the domain is closing.
    pub(crate) fn attach(&self, endpoint: EndpointId) -> Attach {
        let table = lock(&self.table);
        let Some(gate) = self.number(endpoint).map(|number| self.gates.attached(number)) else {
            return Attach::Unknown;
        };
        if self.is_closing() || table.drains(Draining::Gate(gate)) {
            Attach::Draining
        } else if self.gates.word(gate).is_open() {
            Attach::Already
        } else {
            self.gates.word(gate).open();
            Attach::Done
        }
    }

    /// Detaches an endpoint and withdraws every right that it has or gives. `latch` waits for jobs that rely on any of it.
    pub(crate) fn detach(&self, endpoint: EndpointId, latch: &Arc<Latch>) {
        let mut table = lock(&self.table);
        let Some(number) = self.number(endpoint) else { return };
        self.close_gates(&mut table, [self.gates.attached(number)], latch);
        for other in 0..self.tenant.endpoints.len() {
            self.close_gates(&mut table, self.gates.peer(number, other), latch);
            self.close_gates(&mut table, self.gates.peer(other, number), latch);
        }
    }

    /// Closes gates; `latch` waits for those that are pinned, also by an earlier closing.
    pub(crate) fn close_gates(&self, table: &mut Table, gates: impl IntoIterator<Item = usize>, latch: &Arc<Latch>) {
        for gate in gates {
            let word = self.gates.word(gate);
            let drains = table.drains(Draining::Gate(gate));
            if drains || (word.is_open() && !word.close()) {
                table.wait_for(Draining::Gate(gate), latch);
            }
        }
    }

    /// Pins the gate that says that `accessor` is attached; `None` if it is not.
    pub(crate) fn pin_attached(&self, accessor: EndpointId) -> Option<usize> {
        let gate = self.gates.attached(self.number(accessor)?);
        self.pin_gate(gate).then_some(gate)
    }

    /// The gates that `accessor` needs to reach `owner`'s memory with `want`, not pinned; `None` if one of the two is unknown.
    pub(crate) fn peer_gates(
        &self,
        accessor: EndpointId,
        owner: EndpointId,
        want: Access,
    ) -> Option<impl Iterator<Item = usize>> {
        let gates = self.gates.peer(self.number(accessor)?, self.number(owner)?);
        Some(chosen(gates, want))
    }

    /// Pins a gate if it is open. May end a drain, so no lock of this crate may be held.
    pub(crate) fn pin_gate(&self, gate: usize) -> bool {
        match self.gates.word(gate).pin_any() {
            Pin::Held => true,
            Pin::Refused => false,
            Pin::RefusedAndClaimed => {
                self.end_gate_drain(gate);
                false
            }
        }
    }

    /// Lets a pin of a gate go. No lock of this crate may be held.
    pub(crate) fn unpin_gate(&self, gate: usize) {
        if self.gates.word(gate).unpin() {
            self.end_gate_drain(gate);
        }
    }

    #[cold]
    fn end_gate_drain(&self, gate: usize) {
        let waiters = lock(&self.table).take_waiters(Draining::Gate(gate));
        waiters.iter().for_each(|latch| latch.arrive());
    }
}

/// What became of attaching an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attach {
    Done,
    Already,
    Draining,
    Unknown,
}

fn chosen([read, write]: [usize; 2], rights: Access) -> impl Iterator<Item = usize> {
    [(read, rights.read), (write, rights.write)].into_iter().filter_map(|(gate, is_chosen)| is_chosen.then_some(gate))
}
