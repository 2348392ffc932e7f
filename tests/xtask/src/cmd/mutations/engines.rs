//! What `cargo xtask mutate` breaks in engines: those of PCI functions, and those of GPUs with what the device does for their sake.
//!
//! Not here: how it is noticed.

use super::Mutation;

/// Of what drives PCI functions, without one.
pub(crate) const FUNCTIONS: &[Mutation] = &[
    Mutation {
        name: "function: nobody asks whether the IOMMU stopped it",
        file: "hw/vfio/src/mover.rs",
        from: "let stopped = if is_on_bus { self.stopped() } else { Ok(()) };",
        to: "let stopped: Result<(), EngineError> = if is_on_bus { Ok(()) } else { Ok(()) };",
    },
    Mutation {
        name: "function: a stop more is none",
        file: "hw/vfio/src/mover.rs",
        from: "Ok(count) if count == watch.count => Ok(()),",
        to: "Ok(count) if count >= watch.count => Ok(()),",
    },
    Mutation {
        name: "function: what nobody watches is a success",
        file: "hw/vfio/src/mover.rs",
        from: "Err(_) => Err(EngineError::Device { code: code::UNWATCHED }),",
        to: "Err(_) => Ok(()),",
    },
    Mutation {
        name: "function: it may write what it is to read",
        file: "hw/vfio/src/mover.rs",
        from: "let access = if is_in { Access::READ } else { Access::WRITE };",
        to: "let access = if is_in { Access::RW } else { Access::WRITE };",
    },
    Mutation {
        name: "function: everything is one hop",
        file: "hw/vfio/src/engine.rs",
        from: "self.reach.in_one_hop(dst, src)",
        to: "self.reach.in_one_hop(dst, src) || !dst.is_empty()",
    },
    Mutation {
        name: "function: whoever starts a copy makes it",
        file: "hw/engine/src/fleet.rs",
        from: "Work::Copy { src, dst, route } => self.copier(transfer.initiator, dst, src, *route),",
        to: "Work::Copy { .. } => self.members.of(transfer.initiator).map_or(Who::Rest, Who::Member),",
    },
    Mutation {
        name: "function: what somebody else fills is said to be filled by the initiator",
        file: "hw/engine/src/fleet.rs",
        from: "Who::Stager => false,\n            Who::Rest => self.rest.fills",
        to: "Who::Stager => true,\n            Who::Rest => self.rest.fills",
    },
    Mutation {
        name: "function: a flush waits for no other engine",
        file: "hw/engine/src/fences.rs",
        from: "let waits = self.first(flush.initiator) < since;",
        to: "let waits = self.first(flush.initiator) == since;",
    },
    Mutation {
        name: "function: a flush that waited for nothing is forgotten",
        file: "hw/engine/src/fences.rs",
        from: "!self.due(&lock(&self.held)).is_empty()",
        to: "self.due(&lock(&self.held)).len() == usize::MAX",
    },
    Mutation {
        name: "function: a full engine is asked without a pause",
        file: "hw/engine/src/fleet.rs",
        from: "handed_over.get() || taken != Err(EngineError::Busy)",
        to: "handed_over.get() || taken != Ok(Submit::Submitted)",
    },
    Mutation {
        name: "function: the last block is not erased",
        file: "hw/vfio/src/mover.rs",
        from: "self.zero(own.start + done, len, &|| true)",
        to: "self.zero(own.start + done, len - self.reach.shape.granule, &|| true)",
    },
    Mutation {
        name: "function: a hole is mapped",
        file: "hw/vfio/src/hole.rs",
        from: "self.host.reserve(place, mask)",
        to: "self.host.map(place, access, mask)",
    },
    Mutation {
        name: "function: a group is anybody's",
        file: "vmm/broker/src/lease.rs",
        from: "function.group == *group)",
        to: "function.group == *group && function.address.is_empty())",
    },
    Mutation {
        name: "function: two tenants may have parts of one",
        file: "vmm/daemon/src/config/functions.rs",
        from: "if *owner != user.name {",
        to: "if *owner != user.name && owner.is_empty() {",
    },
    Mutation {
        name: "function: its registers are anybody's memory",
        file: "vmm/daemon/src/config/functions.rs",
        from: "if function.part == 0 {",
        to: "if function.part == u32::MAX {",
    },
    Mutation {
        name: "function: one that is stuck is not reset",
        file: "hw/vfio/src/mover.rs",
        from: "match self.driver.reset() {",
        to: "match Ok::<(), VfioError>(()) {",
    },
    Mutation {
        name: "log: what it keeps quiet about has not been",
        file: "vmm/daemon/src/broker/watch.rs",
        from: "Err(Errno::AGAIN) if self.quiet.look(Instant::now()) =>",
        to: "Err(Errno::AGAIN) if self.quiet.look(Instant::now()) && self.watched.is_empty() =>",
    },
    Mutation {
        name: "log: whoever asks without one hears that nothing was",
        file: "vmm/daemon/src/broker/watch.rs",
        from: "else { return self.watched.clear() };",
        to: "else { return };",
    },
    Mutation {
        name: "log: what a program writes is the kernel's",
        file: "vmm/daemon/src/broker/watch.rs",
        from: "priority < 8",
        to: "priority < 800",
    },
];

/// Of what drives GPUs, without one.
pub(crate) const CUDA: &[Mutation] = &[
    Mutation {
        name: "cuda: what a transfer uses does not stay registered",
        file: "hw/cuda/src/shared.rs",
        from: "let ride = Ride::new(job, len, holds);",
        to: "let ride = Ride::new(job, len, { drop(holds); Default::default() });",
    },
    Mutation {
        name: "cuda: what nobody has mapped any more stays registered",
        file: "hw/cuda/src/registry.rs",
        from: "Arc::strong_count(&mapping.hold.0) == 1",
        to: "Arc::strong_count(&mapping.hold.0) == 0",
    },
    Mutation {
        name: "cuda: any number of chunks is registered",
        file: "hw/cuda/src/registry.rs",
        from: "if state.count < self.limit {",
        to: "if state.count < self.limit.max(usize::MAX) {",
    },
    Mutation {
        name: "cuda: what a transfer uses goes for want of room",
        file: "hw/cuda/src/registry.rs",
        from: "Arc::strong_count(&chunk.registration) == 1",
        to: "Arc::strong_count(&chunk.registration) > 0",
    },
    Mutation {
        name: "cuda: a copy is not cut where a chunk ends",
        file: "hw/cuda/src/registry.rs",
        from: "place.len.min(at.end - place.address)",
        to: "place.len.min(u64::MAX - at.end)",
    },
    Mutation {
        name: "cuda: a slice has what its memory had before",
        file: "hw/cuda/src/slice.rs",
        from: "slice.zero()?;",
        to: "",
    },
    Mutation {
        name: "cuda: a slice is as long as what the driver gives",
        file: "hw/cuda/src/shared.rs",
        from: "if end > own.slice.len() {",
        to: "if end > own.slice.len().next_multiple_of(2 << 20) {",
    },
    Mutation {
        name: "cuda: ends that overlap are copied as others are",
        file: "hw/cuda/src/reach.rs",
        from: "piece.dst.abs_diff(piece.src) < piece.len",
        to: "piece.dst.abs_diff(piece.src) < piece.len.min(1)",
    },
    Mutation {
        name: "cuda: everything is one hop",
        file: "hw/cuda/src/engine.rs",
        from: "self.shared.reach.in_one_hop(initiator, dst, src)",
        to: "self.shared.reach.in_one_hop(initiator, dst, src) || !dst.is_empty()",
    },
    Mutation {
        name: "cuda: a transfer has ended before it has",
        file: "hw/cuda/src/lane.rs",
        from: "|entry| has_come(passed, entry.ticket)",
        to: "|entry| has_come(passed, entry.ticket) || !entry.rides.is_empty()",
    },
    Mutation {
        name: "cuda: a flush waits for nothing",
        file: "hw/cuda/src/shared.rs",
        from: "ways.have_passed(marks)",
        to: "ways.have_passed(marks) || !marks.is_empty()",
    },
    Mutation {
        name: "cuda: a flush does not wait for what the engine's own thread has",
        file: "hw/cuda/src/book.rs",
        from: "self.busy.is_some() || !self.waiting.is_empty()",
        to: "self.over",
    },
    Mutation {
        name: "cuda: the last byte of a short copy into a GPU is left out",
        file: "hw/cuda/src/gpu.rs",
        from: "if self.is_short() { self.len % 2 } else { 0 }",
        to: "if self.is_short() { 0 } else { 0 }",
    },
    Mutation {
        name: "cuda: a flush does not show the GPU what others wrote",
        file: "hw/cuda/src/gpu.rs",
        from: "if !self.flushes {",
        to: "if !self.flushes || self.rdma {",
    },
    Mutation {
        name: "cuda: nobody is told that a context is broken",
        file: "hw/cuda/src/shared.rs",
        from: "self.tell_lost();\n        self.wake();",
        to: "self.wake();",
    },
    Mutation {
        name: "cuda: what a broken context carries out has ended",
        file: "hw/cuda/src/lane.rs",
        from: "out.extend(rides.extract_if(.., |ride| !ride.has_begun));",
        to: "out.append(rides);",
    },
    Mutation {
        name: "cuda: what somebody else still used stays registered",
        file: "hw/cuda/src/registry.rs",
        from: ".is_ok() {\n            self.sweep();",
        to: ".is_err() {\n            self.sweep();",
    },
    Mutation {
        name: "cuda: what is given up registers memory all the same",
        file: "hw/cuda/src/reach.rs",
        from: "None if may_block && self.given_up.load(Ordering::Relaxed) =>",
        to: "None if !may_block && self.given_up.load(Ordering::Relaxed) =>",
    },
    Mutation {
        name: "cuda: the doorbell is not heard by a tenant's own engines",
        file: "hw/engine/src/fleet.rs",
        from: "self.engines().for_each(DmaEngine::doorbell);",
        to: "self.rest.doorbell();",
    },
    Mutation {
        name: "cuda: what goes through the host is as long as anything",
        file: "hw/engine/src/fleet.rs",
        from: "Who::Stager => MAX_STAGED,",
        to: "Who::Stager => u64::MAX,",
    },
    Mutation {
        name: "cuda: what a thread has in its hands is not cancelled",
        file: "vdev/device/src/run.rs",
        from: "if domain.cancels.load(Ordering::Relaxed) && lock",
        to: "if !domain.cancels.load(Ordering::Relaxed) && lock",
    },
    Mutation {
        name: "cuda: what was cancelled meanwhile goes on when it is put back",
        file: "vdev/device/src/streams.rs",
        from: "is_some_and(|hand| hand.cancelled) {",
        to: "is_none() {",
    },
    Mutation {
        name: "cuda: a device that scrubs says it is quiet",
        file: "vdev/device/src/pause.rs",
        from: "queues.all(rests) && !scrubs &&",
        to: "queues.all(rests) &&",
    },
    Mutation {
        name: "cuda: the doorbell is not rung",
        file: "vdev/device/src/tend.rs",
        from: "self.engine.doorbell();",
        to: "",
    },
    Mutation {
        name: "cuda: whoever begins more while he collects does not look again",
        file: "vdev/device/src/tend.rs",
        from: "let is_stale = turn.submitted;",
        to: "let is_stale = turn.submitted && turn.glances;",
    },
    Mutation {
        name: "cuda: a queue that rests leaves its work to nobody",
        file: "vdev/device/src/tend.rs",
        from: "|| self.glances() && !self.flights.is_idle()",
        to: "|| self.glances() && self.flights.is_idle()",
    },
    Mutation {
        name: "cuda: a queue that never looks leaves its work to nobody",
        file: "vdev/device/src/run.rs",
        from: "turn.wake |= !turn.glances;",
        to: "",
    },
    Mutation {
        name: "cuda: what is gathered waits for the doorbell, however much it is",
        file: "hw/cuda/src/ways.rs",
        from: "if gathered.len() >= FULL || self.lanes[0].is_long(bytes) {",
        to: "if gathered.len() >= 100 * FULL && self.lanes[0].is_long(bytes) {",
    },
    Mutation {
        name: "cuda: a turn takes no more than it could move itself",
        file: "vdev/device/src/submit.rs",
        from: "let most = if state.moves { BYTES } else { u64::MAX };",
        to: "let most = if state.moves { BYTES } else { BYTES / 1 };",
    },
    Mutation {
        name: "cuda: whoever reaches a GPU's memory is atomic there",
        file: "hw/cuda/src/reach.rs",
        from: "from.is_same(to) || from.peer(to).atomics;",
        to: "from.is_same(to) || from.peer(to).access;",
    },
    Mutation {
        name: "cuda: an initiator that does not reach a word changes it",
        file: "vdev/device/src/atomic.rs",
        from: "let mut able = [reaches.then_some(accessor), word.at.owner()].into_iter().flatten();",
        to: "let mut able = [(reaches || !is_any).then_some(accessor), word.at.owner()].into_iter().flatten();",
    },
    Mutation {
        name: "cuda: an atomic operation tells nobody what was there",
        file: "vdev/device/src/issue.rs",
        from: "self.value = finished.value;",
        to: "",
    },
    Mutation {
        name: "cuda: an atomic operation finds what another one found",
        file: "hw/cuda/src/lane.rs",
        from: "ride.number = Some(state.programs % DEPTH);",
        to: "ride.number = Some(state.programs % 2);",
    },
    Mutation {
        name: "cuda: the right to write does for an atomic operation",
        file: "vdev/device/src/atomic.rs",
        from: "let side = Side::new(at, to, Access::RW);",
        to: "let side = Side::new(at, to, Access::WRITE);",
    },
];
