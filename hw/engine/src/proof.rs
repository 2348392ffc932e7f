//! Proof that two endpoints see the same bytes: nobody takes an engine's word for it that what one of them writes is what the other has.
//!
//! For a pair, the owner writes a fresh pattern, and the accessor copies it out; the accessor writes one, and the owner looks at its own memory; the owner
//! writes once more, and the accessor must read that and nothing that it had kept. Each is compared where it arrived, as the owner of that memory sees it.
//! The copies are transfers like a guest's, with the accessor as initiator. Pairs whose places do not meet go side by side, so that all pairs of
//! some endpoints take about as long as those of one endpoint.
//!
//! Each slice lends its first [`PLACES`] places of [`Prover::unit`] bytes, and has zeros there afterwards.
//!
//! Not here: who is to be proved, what becomes of a pair that is not, rights, guests.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::{Duration, Instant};

use iommu_addr::{ApertureOffset, DomainId, EndpointId, Location, Segment};

use crate::{
    DmaEngine, EndpointSpec, EngineError, Finished, JobId, Memory, MemoryError, Route, Segments, Submit, Transfer, Work,
};

/// Places of [`Prover::unit`] bytes that each slice lends.
pub const PLACES: u64 = 3;

/// What the accessor writes and reads in the owner's memory.
const SHARED: u64 = 0;
/// Where an accessor without memory copies to and from: another place of the owner's.
const LENT: u64 = 1;
/// Where an accessor with memory copies to and from.
const OWN: u64 = 2;

/// How long an engine that does not know when it goes on is left alone between two looks.
const LOOK: Duration = Duration::from_micros(50);

/// Why two endpoints are not taken for peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProofError {
    /// The engine took no copy, or ended it with an error.
    #[error("The engine does not copy between the two")]
    Refused(#[source] EngineError),
    /// The slice's owner does not get at its memory.
    #[error("The memory cannot be reached from its own side")]
    Memory(#[source] MemoryError),
    /// What was copied out is not what the owner has.
    #[error("The accessor does not read what the owner has written; what it reads is stale, or comes from elsewhere")]
    Stale,
    /// A copy that was reported as done changed nothing at the owner.
    #[error("The accessor's write did not arrive at the owner, though the engine reported success")]
    Dropped,
    /// The accessor finds what it wrote, and the owner does not.
    #[error(
        "The accessor reads back what it wrote, but the owner does not have it: it has a private copy of the owner's memory"
    )]
    Mirror,
    /// A copy had not ended in time, or there was no time left to begin.
    #[error("The copies between the two did not end in time")]
    TimedOut,
}

/// One endpoint that reaches into the memory of another.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    /// Whose engine acts.
    pub accessor: &'a EndpointSpec,
    /// Whose memory it reaches; it has some.
    pub owner: &'a EndpointSpec,
}

/// Proves pairs, over an engine that nobody else uses meanwhile.
pub struct Prover<'a> {
    /// What carries out the copies.
    pub engine: &'a dyn DmaEngine,
    /// Every slice as its owner sees it.
    pub memory: &'a dyn Memory,
    /// Bytes of a place: a few, and as many as the engine copies in one hop.
    pub unit: u64,
    /// What does not end until then has failed.
    pub deadline: Instant,
    /// Lets time go by: about as much as the engine says, and not much more.
    pub wait: &'a dyn Fn(Duration),
}

/// A pair on its way.
struct Case<'a> {
    pair: Pair<'a>,
    result: Result<(), ProofError>,
    /// What was written last by whoever writes in this step.
    pattern: Vec<u8>,
}

/// Whether the accessor reads or writes.
#[derive(Clone, Copy)]
enum Way {
    Out,
    In,
}

impl Prover<'_> {
    /// Proves each pair, and says in their order what came out. Erases what it used.
    pub fn prove(&self, pairs: &[Pair<'_>]) -> Vec<Result<(), ProofError>> {
        let mut results = vec![Err(ProofError::TimedOut); pairs.len()];
        let mut left: Vec<usize> = (0..pairs.len()).collect();
        let mut run = Run { prover: self, next_job: u64::MAX, seed: RandomState::new().hash_one(()) };
        while !left.is_empty() {
            let (mut round, mut later) = (Vec::new(), Vec::new());
            for index in left {
                let (pair, is_free) = (pairs[index], |taken: &usize| {
                    let (one, other) = (pairs[*taken], pairs[index]);
                    one.accessor.id != other.accessor.id && one.owner.id != other.owner.id
                });
                if round.iter().map(|(taken, _)| taken).all(is_free) {
                    round.push((index, Case { pair, result: Ok(()), pattern: Vec::new() }));
                } else {
                    later.push(index);
                }
            }
            let (indices, mut cases): (Vec<_>, Vec<_>) = round.into_iter().unzip();
            run.round(&mut cases);
            indices.into_iter().zip(cases).for_each(|(index, case)| results[index] = case.result);
            left = later;
        }
        results
    }
}

/// What goes on from round to round.
struct Run<'a> {
    prover: &'a Prover<'a>,
    /// Names count down from the last one, out of the way of whoever has the engine next.
    next_job: u64,
    seed: u64,
}

impl Run<'_> {
    fn round(&mut self, cases: &mut [Case<'_>]) {
        self.read(cases);
        self.write(cases);
        // What the accessor has just read and written is what it could have kept.
        self.read(cases);
        for case in cases {
            let erased = [case.shared(), case.other()].map(|place| self.erase(place));
            case.result = case.result.and(erased[0]).and(erased[1]);
        }
    }

    /// The owner writes, the accessor reads.
    fn read(&mut self, cases: &mut [Case<'_>]) {
        for case in &mut *cases {
            case.pattern = self.pattern();
            case.result = case.result.and_then(|()| self.put(case.shared(), &case.pattern));
        }
        self.copy(cases, Way::Out);
        for case in &mut *cases {
            // Without memory of its own, it has to write what it reads to the owner's.
            let is_own = case.pair.accessor.memory_len > 0;
            case.expect(self, case.other(), if is_own { ProofError::Stale } else { ProofError::Dropped });
        }
    }

    /// The accessor writes, the owner looks.
    fn write(&mut self, cases: &mut [Case<'_>]) {
        for case in &mut *cases {
            case.pattern = self.pattern();
            case.result = case.result.and_then(|()| self.put(case.other(), &case.pattern));
        }
        self.copy(cases, Way::In);
        for case in &mut *cases {
            case.expect(self, case.shared(), ProofError::Dropped);
            if case.result == Err(ProofError::Dropped) && case.pair.accessor.memory_len > 0 {
                case.result = Err(self.what_became_of_it(case));
            }
        }
    }

    /// Whether a write that the owner does not have went to a copy that the accessor alone sees.
    fn what_became_of_it(&mut self, case: &Case<'_>) -> ProofError {
        let Case { pair, pattern, .. } = case;
        let mut again = [Case { pair: *pair, result: self.erase(case.other()), pattern: pattern.clone() }];
        self.copy(&mut again, Way::Out);
        let [mut again] = again;
        again.expect(self, again.other(), ProofError::Dropped);
        if again.result.is_ok() { ProofError::Mirror } else { ProofError::Dropped }
    }

    /// Makes the copy of every case that is well so far.
    fn copy(&mut self, cases: &mut [Case<'_>], way: Way) {
        let Prover { engine, deadline, wait, .. } = *self.prover;
        let well = cases.iter().enumerate().filter(|(_, case)| case.result.is_ok());
        let mut todo: Vec<(usize, Transfer)> = well.map(|(index, case)| (index, self.transfer(case, way))).collect();
        todo.reverse();
        let (mut out, mut ends) = (HashMap::new(), Vec::new());
        // Once time is up, nothing begins: every round would wait for what it began.
        while Instant::now() < deadline {
            while let Some((index, transfer)) = todo.last() {
                match engine.submit(transfer) {
                    Ok(Submit::Submitted) => drop(out.insert(transfer.job, *index)),
                    Ok(Submit::Executed(Finished { result, .. })) => cases[*index].end(result),
                    Err(EngineError::Busy) => break,
                    Err(error) => cases[*index].end(Err(error)),
                }
                todo.pop();
            }
            let next = engine.poll(&mut ends);
            let nothing = ends.is_empty();
            for Finished { job, result, .. } in ends.drain(..) {
                out.remove(&job).into_iter().for_each(|index: usize| cases[index].end(result));
            }
            if todo.is_empty() && out.is_empty() {
                return;
            }
            if nothing {
                wait(next.map_or(LOOK, |next| next.min(LOOK)));
            }
        }
        for index in todo.iter().map(|(index, _)| index).chain(out.values()) {
            cases[*index].result = Err(ProofError::TimedOut);
        }
        out.keys().for_each(|job| engine.abort(*job));
        // None may write once its place is erased, and in the next guest's hands.
        engine.quiesce(&mut ends);
    }

    fn transfer(&mut self, case: &Case<'_>, way: Way) -> Transfer {
        let place = |at| Segments::from_iter([Segment { at, len: self.prover.unit }]);
        let (shared, other) = (place(self.at(case.shared())), place(self.at(case.other())));
        let (src, dst) = match way {
            Way::Out => (shared, other),
            Way::In => (other, shared),
        };
        let job = JobId(self.next_job);
        self.next_job = self.next_job.wrapping_sub(1);
        let work = Work::Copy { src, dst, route: Route::Direct };
        Transfer { job, domain: DomainId(0), initiator: case.pair.accessor.id, work }
    }

    /// Bytes that were never there before (the finaliser of splitmix64 over a counter).
    fn pattern(&mut self) -> Vec<u8> {
        let len = usize::try_from(self.prover.unit).unwrap_or(0);
        let mut word = || {
            self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (self.seed ^ self.seed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            (mixed ^ mixed >> 31).to_le_bytes()
        };
        (0..len.div_ceil(8)).flat_map(|_| word()).take(len).collect()
    }

    fn at(&self, (endpoint, place): (EndpointId, u64)) -> Location {
        Location::Aperture { endpoint, offset: ApertureOffset(place.saturating_mul(self.prover.unit)) }
    }

    fn put(&self, place: (EndpointId, u64), bytes: &[u8]) -> Result<(), ProofError> {
        self.prover.memory.write(self.at(place), bytes).map_err(ProofError::Memory)
    }

    fn erase(&self, place: (EndpointId, u64)) -> Result<(), ProofError> {
        self.put(place, &vec![0; usize::try_from(self.prover.unit).unwrap_or(0)])
    }
}

impl Case<'_> {
    fn shared(&self) -> (EndpointId, u64) {
        (self.pair.owner.id, SHARED)
    }

    /// The end of the copies that the accessor does not reach out for.
    fn other(&self) -> (EndpointId, u64) {
        let Pair { accessor, owner } = self.pair;
        if accessor.memory_len > 0 { (accessor.id, OWN) } else { (owner.id, LENT) }
    }

    fn end(&mut self, result: Result<(), EngineError>) {
        self.result = result.map_err(ProofError::Refused);
    }

    /// The pattern is to be at a place, as its owner sees it.
    fn expect(&mut self, run: &Run<'_>, place: (EndpointId, u64), or: ProofError) {
        let mut found = vec![0; self.pattern.len()];
        let read = run.prover.memory.read(run.at(place), &mut found).map_err(ProofError::Memory);
        let same = if found == self.pattern { Ok(()) } else { Err(or) };
        self.result = self.result.and(read).and(same);
    }
}
