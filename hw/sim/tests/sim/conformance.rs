//! The suite that every engine passes, for transfers that cost no time, and for those that do, by hand and in real time.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Wires, devices, instant};
use hw_engine::conformance::{self, FlatMemory, Parts};
use hw_engine::{LinkLedger, Unlimited};
use hw_sim::{Clock, ManualClock, SimConfig, SimEngine};

fn parts(config: &SimConfig, ledger: Arc<dyn LinkLedger>, manual: bool) -> Parts {
    let memory = Arc::new(FlatMemory::new());
    let clock = ManualClock::new();
    let engine_clock = if manual { Clock::Manual(Arc::clone(&clock)) } else { Clock::Monotonic };
    let engine = Arc::new(SimEngine::new(config, memory.clone(), ledger, engine_clock).unwrap());
    let advance = move |by| clock.advance(by);
    Parts { engine, memory, advance: manual.then(|| Box::new(advance) as _) }
}

#[test]
fn the_instant_engine_conforms() {
    conformance::run(&|| parts(&instant(), Arc::new(Unlimited), false));
}

#[test]
fn the_engine_with_links_as_fast_as_memory_conforms() {
    conformance::run(&|| parts(&devices(Duration::ZERO, 1), Arc::new(Unlimited), true));
}

#[test]
fn the_engine_with_latency_conforms_by_hand() {
    conformance::run(&|| parts(&devices(Duration::from_micros(5), 2), Arc::new(Unlimited), true));
}

#[test]
fn the_engine_with_bandwidth_conforms_by_hand() {
    conformance::run(&|| {
        let mut config = devices(Duration::from_nanos(700), 3);
        config.queue_depth = 7;
        parts(&config, Wires::new(Duration::from_nanos(1)), true)
    });
}

#[test]
fn the_engine_with_bandwidth_conforms_in_real_time() {
    conformance::run(&|| {
        let mut config = devices(Duration::from_micros(2), 2);
        config.queue_depth = 16;
        parts(&config, Wires::new(Duration::from_nanos(1)), false)
    });
}

#[test]
fn the_engine_with_latency_alone_conforms_in_real_time() {
    conformance::run(&|| parts(&devices(Duration::from_nanos(1), 1), Arc::new(Unlimited), false));
}
