//! Which endpoints are peers: every pair that would go direct is proved before the device exists, so before a guest is heard.
//!
//! Not here: the proof itself (`hw_engine::proof`), what a guest is answered (`vdev_device`).

use std::time::{Duration, Instant};

use hw_engine::proof::{Pair, Prover};
use hw_engine::{DmaEngine, EndpointSpec, Memory};
use iommu_addr::{ApertureOffset, Location, Segment};
use vdev_device::Reach;
use vdev_wire::{PathReason, TransferPath};

/// Refuses, in `reach`, every direct pair whose endpoints do not see the same bytes, and says why in the log. `memory` is every slice as its owner
/// sees it; its first bytes are erased. `unit`: see [`Prover::unit`]. What takes longer than `patience` has failed. Nobody else may use the engine meanwhile.
pub(crate) fn prove(
    engine: &dyn DmaEngine,
    memory: &dyn Memory,
    endpoints: &[EndpointSpec],
    (unit, patience): (u64, Duration),
    reach: &mut Reach,
) {
    // Each with the next one, then each with the next but one: neighbours in this order have no endpoint twice, and are proved side by side.
    let others = |by| endpoints.iter().zip(endpoints.iter().cycle().skip(by));
    let pairs = (1..endpoints.len()).flat_map(others).map(|(accessor, owner)| Pair { accessor, owner });
    let pairs: Vec<_> = pairs.filter(|pair| pair.owner.memory_len > 0 && is_direct(reach, *pair)).collect();
    let (start, deadline) = (Instant::now(), Instant::now() + patience);
    let prover = Prover { engine, memory, unit, deadline, wait: &std::thread::sleep };
    let results = prover.prove(&pairs);
    for (Pair { accessor, owner }, result) in pairs.iter().zip(results) {
        let Err(error) = result else { continue };
        tracing::error!(
            accessor = accessor.name,
            owner = owner.name,
            error = &error as &dyn std::error::Error,
            "Two endpoints are not proved to be peers, so the guest gets no right between them; stage the pair, or mend the way between the devices"
        );
        reach.refuse(accessor.id, owner.id, PathReason::Unproven);
    }
    tracing::debug!(pairs = pairs.len(), us = start.elapsed().as_micros(), "Proved the endpoints to be peers");
}

/// Stages, in `reach`, the pairs whose bytes no engine carries in one hop, `unit` bytes at a time.
pub(crate) fn stage_what_takes_two_hops(
    engine: &dyn DmaEngine,
    endpoints: &[EndpointSpec],
    unit: u64,
    reach: &mut Reach,
) {
    let place = |endpoint: &EndpointSpec, offset| {
        let at = Location::Aperture { endpoint: endpoint.id, offset: ApertureOffset(offset) };
        [Segment { at, len: unit }]
    };
    for owner in endpoints.iter().filter(|owner| owner.memory_len >= 2 * unit) {
        for accessor in endpoints.iter().filter(|accessor| accessor.id != owner.id) {
            let there = place(owner, 0);
            let here = if accessor.memory_len >= unit { place(accessor, 0) } else { place(owner, unit) };
            let in_one_hop = |dst, src| engine.in_one_hop(accessor.id, dst, src);
            if !in_one_hop(&here, &there) || !in_one_hop(&there, &here) {
                reach.deny(accessor.id, owner.id, PathReason::EngineCannot);
            }
        }
    }
}

fn is_direct(reach: &Reach, pair: Pair<'_>) -> bool {
    reach.verdict(pair.accessor.id, pair.owner.id).0 == TransferPath::Direct
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hw_engine::conformance::FlatMemory;
    use hw_engine::{EndpointKind, Unlimited};
    use hw_sim::{Clock, Flaw, SimConfig, SimEndpoint, SimEngine};
    use iommu_addr::{ApertureOffset, EndpointId, Location};

    use super::*;

    const A: EndpointId = EndpointId::local(0);
    const B: EndpointId = EndpointId::local(1);
    const C: EndpointId = EndpointId::local(2);
    /// It has no memory.
    const BARE: EndpointId = EndpointId::local(3);

    /// How everybody reaches everybody, by accessor and owner, once it is proved.
    fn proved(mut reach: Reach, flaws: &[Flaw]) -> Vec<(EndpointId, EndpointId, (TransferPath, PathReason))> {
        let memory = Arc::new(FlatMemory::default());
        let specs = [A, B, C, BARE].map(|id| {
            let (kind, name) = (EndpointKind::Gpu, format!("gpu{id}"));
            let memory_len = if id == BARE { 0 } else { 4096 };
            EndpointSpec { id, kind, name, memory_len, registers_len: 0, granularity: 4096, engines: 1 }
        });
        for spec in specs.iter().filter(|spec| spec.memory_len > 0) {
            memory.add(Location::Aperture { endpoint: spec.id, offset: ApertureOffset(0) }, spec.memory_len);
        }
        let mut config = SimConfig::new(specs.iter().cloned().map(SimEndpoint::instant).collect());
        config.flaws = flaws.to_vec();
        let engine = SimEngine::new(&config, memory.clone(), Arc::new(Unlimited), Clock::Monotonic)
            .expect("devices that make sense");
        prove(&engine, &*memory, &specs, (64, Duration::from_secs(3)), &mut reach);
        for (at, bytes) in memory.runs() {
            assert!(bytes.iter().all(|byte| *byte == 0), "what a guest gets reads zero: {at:?}");
        }
        let pairs = specs.iter().flat_map(|accessor| specs.iter().map(move |owner| (accessor.id, owner.id)));
        pairs.map(|(accessor, owner)| (accessor, owner, reach.verdict(accessor, owner))).collect()
    }

    /// The same for pairs that are neither direct nor within one endpoint.
    fn others(reach: Reach, flaws: &[Flaw]) -> Vec<(EndpointId, EndpointId, (TransferPath, PathReason))> {
        let is_other = |path| ![TransferPath::Direct, TransferPath::Local].contains(&path);
        proved(reach, flaws).into_iter().filter(|(_, _, (path, _))| is_other(*path)).collect()
    }

    #[test]
    fn sound_devices_reach_each_other() {
        assert_eq!(others(Reach::all(), &[]), []);
    }

    #[test]
    fn pair_that_lies_is_refused_and_no_other() {
        let flaws = [
            Flaw::PrivateMirror { accessor: A, owner: B },
            Flaw::DroppedWrite { accessor: C, owner: A },
            Flaw::DroppedWrite { accessor: BARE, owner: C },
        ];
        let unproven = (TransferPath::None, PathReason::Unproven);
        assert_eq!(others(Reach::all(), &flaws), [(A, B, unproven), (C, A, unproven), (BARE, C, unproven)]);
    }

    #[test]
    fn staged_pair_is_taken_as_it_is() {
        let mut reach = Reach::all();
        reach.deny(A, B, PathReason::PeerUnreachable);
        let staged = (TransferPath::Staged, PathReason::PeerUnreachable);
        assert_eq!(others(reach, &[Flaw::DroppedWrite { accessor: A, owner: B }]), [(A, B, staged)]);
    }
}
