//! The proof of peers finds each flaw that a simulated device can have, whatever its transfers cost, and blames nobody else.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hw_engine::conformance::FlatMemory;
use hw_engine::proof::{Pair, ProofError, Prover};
use hw_engine::{EndpointSpec, LinkLedger, Unlimited};
use hw_sim::{Clock, Flaw, ManualClock, SimConfig, SimEngine};

use crate::common::{FPGA, GPU, Wires, devices, instant};

/// What the proof says of GPU to FPGA, FPGA to GPU, and an accessor without memory to the FPGA.
fn prove(
    mut config: SimConfig,
    ledger: Arc<dyn LinkLedger>,
    manual: bool,
    flaws: &[Flaw],
) -> [Result<(), ProofError>; 3] {
    config.flaws = flaws.to_vec();
    let specs: Vec<_> = config.endpoints.iter().map(|endpoint| endpoint.spec.clone()).collect();
    let bare = EndpointSpec { memory_len: 0, ..specs[0].clone() };
    let (memory, clock) = (Arc::new(FlatMemory::new()), ManualClock::new());
    let engine_clock = if manual { Clock::Manual(Arc::clone(&clock)) } else { Clock::Monotonic };
    let engine = SimEngine::new(&config, memory.clone(), ledger, engine_clock).unwrap();
    let wait = |by| if manual { clock.advance(by) } else { std::thread::yield_now() };
    let deadline = Instant::now() + Duration::from_secs(60);
    let prover = Prover { engine: &engine, memory: &*memory, unit: 64, deadline, wait: &wait };
    let pair = |accessor, owner| Pair { accessor, owner };
    let results = prover.prove(&[pair(&specs[0], &specs[1]), pair(&specs[1], &specs[0]), pair(&bare, &specs[1])]);
    results.try_into().unwrap()
}

/// The same in every configuration of the conformance suite.
fn everywhere(flaws: &[Flaw]) -> [Result<(), ProofError>; 3] {
    let wires = || Wires::new(Duration::from_nanos(1));
    let micros = Duration::from_micros;
    let said = [
        prove(instant(), Arc::new(Unlimited), false, flaws),
        prove(devices(Duration::ZERO, 1), Arc::new(Unlimited), true, flaws),
        prove(devices(micros(5), 2), Arc::new(Unlimited), true, flaws),
        prove(devices(micros(1), 3), wires(), true, flaws),
        prove(devices(micros(2), 2), wires(), false, flaws),
    ];
    assert!(said.iter().all(|other| *other == said[0]), "what transfers cost makes no difference: {said:?}");
    said[0]
}

#[test]
fn sound_devices_are_peers() {
    assert_eq!(everywhere(&[]), [Ok(()); 3]);
}

#[test]
fn private_mirror_is_found_one_way_only() {
    let mirror = Flaw::PrivateMirror { accessor: GPU, owner: FPGA };
    // Whoever cannot read back into memory of its own cannot tell a mirror from nothing.
    assert_eq!(everywhere(&[mirror]), [Err(ProofError::Mirror), Ok(()), Err(ProofError::Dropped)]);
}

#[test]
fn dropped_write_is_found_one_way_only() {
    let dropped = Flaw::DroppedWrite { accessor: FPGA, owner: GPU };
    assert_eq!(everywhere(&[dropped]), [Ok(()), Err(ProofError::Dropped), Ok(())]);
}
