//! What `cargo xtask mutate` breaks.
//!
//! Not here: how it is noticed.

mod engines;

use anyhow::{Result, ensure};

pub(super) use engines::{CUDA, FUNCTIONS};

/// One thing done wrong.
pub(super) struct Mutation {
    /// What is protected, and how it no longer is.
    pub(super) name: &'static str,
    /// Where.
    pub(super) file: &'static str,
    /// What stands there once.
    pub(super) from: &'static str,
    /// What is to stand there.
    pub(super) to: &'static str,
}

impl Mutation {
    /// The source with the mutation in it.
    pub(super) fn applied(&self, original: &str) -> Result<String> {
        let places = original.matches(self.from).count();
        ensure!(places == 1, "{} has {places} places that read {:?}; one is needed", self.file, self.from);
        Ok(original.replacen(self.from, self.to, 1))
    }
}

pub(super) const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "rights: a mapping allows everything",
        file: "iommu/addr/src/access.rs",
        from: "(self.read || !want.read) && (self.write || !want.write)",
        to: "(self.read || !want.read) && (self.write || !want.write) || !want.is_none()",
    },
    Mutation {
        name: "bounds: a mapping reaches a page too far",
        file: "iommu/core/src/map.rs",
        from: "let Some(range) = Range::with_len(at, run.len) else { break };",
        to: "let Some(range) = Range::with_len(at, run.len.saturating_add(PAGE_SIZE)) else { break };",
    },
    Mutation {
        name: "peer: no right is needed",
        file: "iommu/core/src/pins.rs",
        from: "if owner == self.accessor {",
        to: "if owner == self.accessor || want != Access::NONE {",
    },
    Mutation {
        name: "peer: a right one way is one both ways",
        file: "iommu/core/src/peers.rs",
        from: "let read = self.row(accessor)",
        to: "let (accessor, owner) = (accessor.min(owner), accessor.max(owner));\n        let read = self.row(accessor)",
    },
    Mutation {
        name: "endpoint: an unknown one counts as the first",
        file: "iommu/core/src/peers.rs",
        from: "self.tenant.endpoints.iter().position(|known| *known == endpoint)",
        to: "self.tenant.endpoints.iter().position(|known| *known == endpoint).or(Some(0))",
    },
    Mutation {
        name: "generation: a freed handle can be that of the next buffer",
        file: "vdev/device/src/buffers.rs",
        from: "place.generation = next;",
        to: "place.generation = next.min(place.generation);",
    },
    Mutation {
        name: "domain: any process may free any buffer",
        file: "vdev/device/src/buffers.rs",
        from: ".filter(|place| place.owner == domain).ok_or(missing)?;",
        to: ".filter(|place| place.owner == domain || domain != 0).ok_or(missing)?;",
    },
    Mutation {
        name: "domain: all processes share one address space",
        file: "iommu/core/src/domain.rs",
        from: "            serial,\n",
        to: "            serial: serial.min(1),\n",
    },
    Mutation {
        name: "pin: UNMAP does not wait",
        file: "iommu/core/src/word.rs",
        from: "before & PINS == 0 && self.claim(before | CLOSED | DRAINING)",
        to: "self.claim(before | CLOSED | DRAINING)",
    },
    Mutation {
        name: "pin: UNMAP does not refuse new use",
        file: "iommu/core/src/word.rs",
        from: "if before & !COUNTED == u64::from(generation) << GENERATION_SHIFT { Pin::Held } else { self.take_back() }",
        to: "if before & !COUNTED != u64::MAX || generation == 0 { Pin::Held } else { self.take_back() }",
    },
    Mutation {
        name: "quota: nothing is too much",
        file: "iommu/core/src/limits.rs",
        from: ".filter(|sum| *sum <= self.limit())",
        to: "",
    },
    Mutation {
        name: "registers: any access goes",
        file: "vdev/device/src/check.rs",
        from: "(!is_access).then_some(at)",
        to: "(!is_access && at.0 == u64::MAX).then_some(at)",
    },
    Mutation {
        name: "scrub: freed memory keeps its bytes",
        file: "vdev/device/src/issue.rs",
        from: "let work = EngineWork::Fill { dst, pattern: 0 };",
        to: "let work = EngineWork::Fill { dst, pattern: 0x55 };",
    },
    Mutation {
        name: "streams: an error stops nothing",
        file: "vdev/device/src/streams.rs",
        from: "stream.failed = true;",
        to: "stream.failed = false;",
    },
    Mutation {
        name: "faults: the operator is told nothing",
        file: "vdev/device/src/tend.rs",
        from: "self.observer.fault(record);",
        to: "",
    },
    Mutation {
        name: "path: a direct transfer is planned as staged",
        file: "vdev/device/src/plan.rs",
        from: "(_, reason) => plan = Self::Direct { reason },",
        to: "(_, reason) => plan = Self::Staged { reason },",
    },
    // From here on: between processes and tenants, and from one session to the next.
    Mutation {
        name: "broker: what others hold counts for nothing",
        file: "vmm/broker/src/lease.rs",
        from: "if held.saturating_add(wanted) > memory {",
        to: "if held.saturating_add(wanted) > memory && wanted > memory {",
    },
    Mutation {
        name: "broker: a device that nobody has has memory",
        file: "vmm/broker/src/lease.rs",
        from: "let memory = self.devices.get(device).ok_or_else(unknown)?.memory;",
        to: "let memory = self.devices.get(device).ok_or_else(unknown).map_or(u64::MAX, |device| device.memory);",
    },
    Mutation {
        name: "broker: a session may come again",
        file: "vmm/broker/src/lease.rs",
        from: "&& lease.session <= held.lease.session",
        to: "&& lease.session < held.lease.session",
    },
    Mutation {
        name: "broker: the next session has the memory of the last",
        file: "vmm/broker/src/lease.rs",
        from: "let old = self.release(&lease.tenant);",
        to: "let old = self.release(&lease.tenant);\n        let (files, old) = if old.len() == files.len() { (old, files) } else { (files, old) };",
    },
    Mutation {
        name: "worker: every tenant has the first one's memory",
        file: "vmm/daemon/src/supervisor/tenant/start.rs",
        from: "fds.extend(slices.iter().map(AsFd::as_fd));",
        to: "static FIRST: std::sync::OnceLock<Vec<OwnedFd>> = std::sync::OnceLock::new();\n        \
             let copy = || slices.iter().filter_map(|slice| slice.try_clone().ok()).collect();\n        \
             fds.extend(FIRST.get_or_init(copy).iter().take(slices.len()).map(AsFd::as_fd));",
    },
    Mutation {
        name: "session: the next one has the same number",
        file: "vmm/daemon/src/worker/build.rs",
        from: "session: setup.session,",
        to: "session: setup.session.min(1),",
    },
    Mutation {
        name: "session: a request of the last one is carried out",
        file: "vdev/device/src/control.rs",
        from: "return Err(RequestError::Session { session });",
        to: "{}",
    },
    Mutation {
        name: "keeper: the next worker is not told of the memory",
        file: "vmm/keeper/src/record.rs",
        from: "self.memory = Some(frame);",
        to: "self.memory = None;",
    },
    Mutation {
        name: "keeper: the next worker is not told of the rings",
        file: "vmm/keeper/src/record.rs",
        from: "let told = whole.into_iter().chain(rings)",
        to: "let told = whole.into_iter().chain(rings.filter(|_| false))",
    },
    Mutation {
        name: "keeper: the VMM's connection ends with the worker",
        file: "vmm/keeper/src/session.rs",
        from: "self.failures >= MAX_FAILURES",
        to: "self.failures >= MAX_FAILURES || self.failures == 0",
    },
    Mutation {
        name: "supervisor: one worker's end is every worker's",
        file: "vmm/daemon/src/supervisor/mod.rs",
        from: "        tenant.report(&worker, status);\n",
        to: "        tenant.report(&worker, status);\n        if !status.success() {\n            \
             self.everybody_mut().for_each(|other| other.renew());\n        }\n",
    },
    Mutation {
        name: "rate: control requests cost nothing",
        file: "vdev/device/src/pace.rs",
        from: "let Some(token) = self.token() else { return Ok(()) };",
        to: "let Some(token) = self.token().filter(|_| false) else { return Ok(()) };",
    },
    Mutation {
        name: "link: a large copy goes in one piece",
        file: "vmm/broker/src/share.rs",
        from: ".clamp(LEAST_PIECE, MOST_PIECE);",
        to: ".clamp(u64::MAX, u64::MAX);",
    },
    Mutation {
        name: "faults: a guest is told of an owner where there is none",
        file: "vdev/device/src/events.rs",
        from: "raw(record.owner.filter(|_| !record.is_foreign)).into();",
        to: "record.owner.map_or(record.domain.0, EndpointId::to_raw).into();",
    },
];

/// What becomes of work that a dead worker had in hand. A guest's driver gives such work up by itself, so the scenario does not see it: the kill test
/// does, which counts what comes back.
pub(super) const LOSSES: &[Mutation] = &[
    Mutation {
        name: "journal: what was lost is not answered",
        file: "vdev/device/src/resume.rs",
        from: "into.chains = into.chains.saturating_add(1);",
        to: "into.chains = into.chains.saturating_add(1);\n            break;",
    },
    Mutation {
        name: "journal: a chain is marked too late",
        file: "vdev/device/src/journal.rs",
        from: "word.store(order << ORDER_SHIFT | MARKED, Ordering::Relaxed);",
        to: "word.store(order << ORDER_SHIFT, Ordering::Relaxed);",
    },
    Mutation {
        name: "journal: a dead worker's is thrown away",
        file: "vmm/daemon/src/supervisor/tenant/start.rs",
        from: "        if fresh {\n            self.journal.clear();",
        to: "        if fresh || self.session > 0 {\n            self.journal.clear();",
    },
];

/// What keeps two endpoints that do not see the same bytes from being taken for peers. The simulated devices of the scenario are sound, so that it does
/// not see it: the tests do that break them.
pub(super) const PROOFS: &[Mutation] = &[
    Mutation {
        name: "proof: nothing is proved",
        file: "vmm/daemon/src/worker/build.rs",
        from: "prove(&*engine, &*view, &specs, proof, &mut reach);",
        to: "let _ = (prove, view, proof, &mut reach);",
    },
    Mutation {
        name: "proof: what comes out counts for nothing",
        file: "vmm/daemon/src/worker/prove.rs",
        from: "reach.refuse(accessor.id, owner.id, PathReason::Unproven);",
        to: "",
    },
    Mutation {
        name: "proof: a pair that fails is staged",
        file: "vmm/daemon/src/worker/prove.rs",
        from: "reach.refuse(accessor.id, owner.id, PathReason::Unproven);",
        to: "reach.deny(accessor.id, owner.id, PathReason::Unproven);",
    },
    Mutation {
        name: "proof: the owner does not look at what was written",
        file: "hw/engine/src/proof.rs",
        from: "case.expect(self, case.shared(), ProofError::Dropped);",
        to: "",
    },
    Mutation {
        name: "proof: what was read is not compared",
        file: "hw/engine/src/proof.rs",
        from: "let same = if found == self.pattern { Ok(()) } else { Err(or) };",
        to: "let same = if found == self.pattern || or == ProofError::Stale { Ok(()) } else { Err(or) };",
    },
    Mutation {
        name: "proof: what was read once is not read again",
        file: "hw/engine/src/proof.rs",
        from: "        // What the accessor has just read and written is what it could have kept.\n        self.read(cases);\n",
        to: "",
    },
    Mutation {
        name: "proof: a mirror is taken for nothing",
        file: "hw/engine/src/proof.rs",
        from: "if again.result.is_ok() { ProofError::Mirror }",
        to: "if again.result.is_ok() { ProofError::Dropped }",
    },
    Mutation {
        name: "proof: its bytes stay for the guest",
        file: "hw/engine/src/proof.rs",
        from: "self.put(place, &vec![0; usize::try_from(self.prover.unit).unwrap_or(0)])",
        to: "self.put(place, &[])",
    },
    Mutation {
        name: "proof: a refused pair gets a right",
        file: "vdev/device/src/peer.rs",
        from: "PeerChange::Enable if path == TransferPath::None => {",
        to: "PeerChange::Enable if path == TransferPath::None && rights.is_none() => {",
    },
];

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cmd::checkout;

    #[test]
    fn every_mutation_fits_the_source_as_it_is() {
        for mutation in [MUTATIONS, LOSSES, PROOFS, FUNCTIONS, CUDA].into_iter().flatten() {
            let source = fs::read_to_string(checkout().join(mutation.file)).expect(mutation.file);
            let applied = mutation.applied(&source).expect(mutation.name);
            assert_ne!(applied, source, "{}", mutation.name);
        }
    }
}
