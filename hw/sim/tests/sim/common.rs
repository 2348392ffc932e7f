//! What the tests of the simulated engine share: endpoints, and a ledger with bandwidth.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hw_engine::conformance::{APERTURES, FlatMemory};
use hw_engine::{
    Booking, Crossing, Direction, DmaEngine, EndpointKind, EndpointSpec, EngineError, Finished, JobId, LinkId,
    LinkLedger, Memory, Raised, Route, Segments, Submit, Transfer, Work,
};
use hw_sim::{Clock, ManualClock, SimConfig, SimEndpoint, SimEngine};
use iommu_addr::{ApertureOffset, DomainId, EndpointId, Gpa, Location, Segment};

pub(crate) const GPU: EndpointId = APERTURES[0].0;
pub(crate) const FPGA: EndpointId = APERTURES[1].0;

/// A GPU and an FPGA, as large as the suite's, each on a link of its own.
pub(crate) fn devices(latency: Duration, engines: u16) -> SimConfig {
    let kinds = [EndpointKind::Gpu, EndpointKind::Fpga];
    let endpoints = APERTURES.into_iter().zip(kinds).map(|((id, memory_len), kind)| SimEndpoint {
        spec: EndpointSpec {
            id,
            kind,
            name: format!("{kind}{id}"),
            memory_len,
            registers_len: if kind == EndpointKind::Fpga { 4096 } else { 0 },
            granularity: 4096,
            engines,
        },
        link: Some(LinkId(id.id)),
        latency,
    });
    SimConfig::new(endpoints.collect())
}

/// The same without links and latency.
pub(crate) fn instant() -> SimConfig {
    let mut config = devices(Duration::ZERO, 1);
    config.endpoints.iter_mut().for_each(|endpoint| endpoint.link = None);
    config
}

/// A ledger where every byte takes `per_byte` on every link, and whoever asks first is served first. Nobody books while a link is booked for
/// longer than `ahead`.
pub(crate) struct Wires {
    per_byte: Duration,
    ahead: Duration,
    piece: u64,
    until: Mutex<HashMap<(LinkId, Direction), Duration>>,
}

impl Wires {
    /// Books everything at once.
    pub(crate) fn new(per_byte: Duration) -> Arc<Self> {
        Self::pieces(per_byte, Duration::MAX, 1 << 20)
    }

    pub(crate) fn pieces(per_byte: Duration, ahead: Duration, piece: u64) -> Arc<Self> {
        Arc::new(Self { per_byte, ahead, piece, until: Mutex::default() })
    }
}

impl LinkLedger for Wires {
    fn piece(&self, _link: LinkId) -> Option<u64> {
        Some(self.piece)
    }

    fn reserve(&self, piece: &[Crossing], ready: Duration, now: Duration) -> Booking {
        assert!(ready <= now, "nobody asks for what cannot begin");
        let mut all = self.until.lock().unwrap();
        let until = |all: &HashMap<_, Duration>, crossing: &Crossing| {
            all.get(&(crossing.link, crossing.direction)).copied().unwrap_or_default()
        };
        let last = piece.iter().map(|crossing| until(&all, crossing)).max().unwrap_or_default();
        if last > now.saturating_add(self.ahead) {
            return Booking::Later(last - self.ahead);
        }
        let mut through = ready;
        for crossing in piece {
            assert!(crossing.bytes <= self.piece);
            let end = ready.max(until(&all, crossing)) + self.per_byte * u32::try_from(crossing.bytes).unwrap();
            all.insert((crossing.link, crossing.direction), end);
            through = through.max(end);
        }
        Booking::Through(through)
    }

    fn leave(&self, _link: LinkId, _direction: Direction) {}
}

pub(crate) fn ram(gpa: u64, len: u64) -> Segments {
    [Segment { at: Location::Ram(Gpa(gpa)), len }][..].into()
}

pub(crate) fn own(endpoint: EndpointId, offset: u64, len: u64) -> Segments {
    [Segment { at: Location::Aperture { endpoint, offset: ApertureOffset(offset) }, len }][..].into()
}

/// Moves all of `src` to `dst`.
pub(crate) fn copy(dst: Segments, src: Segments, route: Route) -> Work {
    Work::Copy { src, dst, route }
}

/// An engine and what it works on; submits with a new job each time.
pub(crate) struct Desk {
    pub(crate) engine: Arc<SimEngine>,
    pub(crate) memory: Arc<dyn Memory>,
    pub(crate) clock: Arc<ManualClock>,
    jobs: AtomicU64,
}

impl Desk {
    /// An engine whose clock stands still.
    pub(crate) fn by_hand(config: &SimConfig, ledger: Arc<dyn LinkLedger>) -> Self {
        let clock = ManualClock::new();
        Self::over(config, ledger, Arc::new(FlatMemory::new()), Clock::Manual(Arc::clone(&clock)), clock)
    }

    /// An engine in real time, with a thread.
    pub(crate) fn in_real_time(config: &SimConfig, ledger: Arc<dyn LinkLedger>, memory: Arc<dyn Memory>) -> Self {
        Self::over(config, ledger, memory, Clock::Monotonic, ManualClock::new())
    }

    fn over(
        config: &SimConfig,
        ledger: Arc<dyn LinkLedger>,
        memory: Arc<dyn Memory>,
        engine_clock: Clock,
        clock: Arc<ManualClock>,
    ) -> Self {
        let engine = Arc::new(SimEngine::new(config, Arc::clone(&memory), ledger, engine_clock).unwrap());
        Self { engine, memory, clock, jobs: AtomicU64::new(0) }
    }

    /// Jobs are numbered from 0 on.
    pub(crate) fn submit(&self, domain: u32, initiator: EndpointId, work: Work) -> Result<Submit, EngineError> {
        let job = JobId(self.jobs.fetch_add(1, Ordering::Relaxed));
        self.engine.submit(&Transfer { job, domain: DomainId(domain), initiator, work })
    }

    /// The job of the last submission.
    pub(crate) fn last(&self) -> JobId {
        JobId(self.jobs.load(Ordering::Relaxed) - 1)
    }

    /// Submits work that takes time.
    pub(crate) fn send(&self, initiator: EndpointId, work: Work) {
        assert_eq!(self.submit(1, initiator, work), Ok(Submit::Submitted));
    }

    /// Submits work that is done at once.
    pub(crate) fn run(&self, domain: u32, initiator: EndpointId, work: Work) -> Finished {
        match self.submit(domain, initiator, work) {
            Ok(Submit::Executed(end)) => end,
            other => panic!("not done at once: {other:?}"),
        }
    }

    /// Moves the clock from end to end, and answers which job ended when, in nanoseconds.
    pub(crate) fn ends(&self) -> Vec<(u64, u128)> {
        let mut ends = Vec::new();
        let mut out = Vec::new();
        loop {
            let next = self.engine.poll(&mut out);
            ends.extend(out.drain(..).map(|end: Finished| (end.job.0, self.clock.now().as_nanos())));
            match next {
                Some(by) => self.clock.advance(by),
                None => return ends,
            }
        }
    }

    pub(crate) fn raised(&self) -> Vec<Raised> {
        let mut raised = Vec::new();
        self.engine.raised(&mut raised);
        raised
    }

    pub(crate) fn bytes(&self, at: &Segments) -> Vec<u8> {
        let mut all = Vec::new();
        for segment in at {
            let mut bytes = vec![0; usize::try_from(segment.len).unwrap()];
            self.memory.read(segment.at, &mut bytes).unwrap();
            all.extend(bytes);
        }
        all
    }
}
