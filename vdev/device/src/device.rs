//! The device: what it is made of, its queues, its timekeeper, its end.
//!
//! Not here: what queues carry (`control`, `submit`, `events`), carrying work out (`run`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use hw_engine::{DmaEngine, EngineCaps, RamMap};
use iommu_addr::DomainId;
use iommu_core::Iommu;
use vdev_wire::{
    CONFIG_MAGIC, CONTROL_QUEUE, Config, DESCRIPTOR_SIZE, EVENT_QUEUE, FIRST_SUBMIT_QUEUE, SUBMIT_HEADER_SIZE, VERSION,
};
use zerocopy::{FromZeros, IntoBytes};

use crate::Ring;
use crate::buffers::Buffers;
use crate::control::ControlState;
use crate::domain::Domain;
use crate::events::Events;
use crate::flight::Flights;
use crate::journal::{self, Journal, JournalWords};
use crate::limiter::Limiter;
use crate::live::LiveLimits;
use crate::observer::{Gauge, Observer};
use crate::op::Credits;
use crate::pace::Pace;
use crate::pause::Pause;
use crate::port::Port;
use crate::run::List;
use crate::spec::{DeviceSpec, Limits, SpecError};
use crate::submit::Submission;
use crate::sync::lock;
use crate::turn::Turn;

/// Longest answer to a read of configuration space.
const MAX_CONFIG_READ: u32 = 4096;

/// One virtual P2P DMA device. See the crate's documentation for how its methods are to be called.
pub struct Device {
    pub(crate) me: Weak<Self>,
    pub(crate) spec: DeviceSpec,
    pub(crate) engine: Arc<dyn DmaEngine>,
    pub(crate) ram: Arc<dyn RamMap>,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) iommu: Iommu,
    pub(crate) max_transfer: u64,
    /// The limits in force; those of `spec` are the ones that it was made with.
    pub(crate) limits: LiveLimits,
    /// Bytes of the longest valid submission.
    pub(crate) max_submission: usize,
    /// A driver has said HELLO.
    pub(crate) greeted: AtomicBool,
    down: AtomicBool,
    pub(crate) domains: Mutex<BTreeMap<DomainId, Arc<Domain>>>,
    pub(crate) serials: AtomicU64,
    pub(crate) buffers: Mutex<Buffers>,
    pub(crate) events: Events,
    pub(crate) credits: Arc<Credits>,
    /// Buffers that are being scrubbed, or wait for it.
    pub(crate) scrubs: AtomicUsize,
    pub(crate) flights: Flights,
    pub(crate) ready: List,
    pub(crate) starved: List,
    pub(crate) limiter: Limiter,
    /// Of the control queue.
    pub(crate) pace: Pace,
    pub(crate) pause: Pause,
    queues: Box<[Queue]>,
    pub(crate) timekeeper: Mutex<Turn>,
    /// Held while the observer is told the gauges, so that what it is told last is also what was found last.
    telling: Mutex<()>,
    wake: OnceLock<Arc<dyn Fn() + Send + Sync>>,
    journal: OnceLock<JournalWords>,
}

/// One queue of the device: its ring while there is one, and its thread's state.
struct Queue {
    port: Mutex<Option<Arc<Port>>>,
    state: Mutex<QueueState>,
}

pub(crate) enum QueueState {
    Control(ControlState),
    Event,
    Submission(Submission),
}

impl Device {
    /// A device without driver.
    ///
    /// # Errors
    /// See [`SpecError`].
    pub fn new(
        spec: DeviceSpec,
        engine: Arc<dyn DmaEngine>,
        ram: Arc<dyn RamMap>,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<Self>, SpecError> {
        spec.check()?;
        let limits = within(&spec.limits, engine.caps());
        let endpoints = spec.endpoints.iter().map(|endpoint| endpoint.id);
        let iommu = Iommu::new(of_iommu(&limits), endpoints).map_err(|source| SpecError::Iommu { source })?;
        let batch = usize::from(limits.max_batch).saturating_mul(DESCRIPTOR_SIZE);
        let now = Instant::now();
        let queues = (0..spec.submit_queues.saturating_add(FIRST_SUBMIT_QUEUE)).map(Queue::new).collect();
        let device = Arc::new_cyclic(|me: &Weak<Self>| Self {
            me: me.clone(),
            max_transfer: (engine.caps().max_transfer & !7).max(8),
            limits: LiveLimits::new(&limits),
            max_submission: batch.saturating_add(SUBMIT_HEADER_SIZE),
            greeted: AtomicBool::new(false),
            down: AtomicBool::new(false),
            domains: Mutex::default(),
            serials: AtomicU64::new(1),
            buffers: Mutex::new(Buffers::new(&spec.endpoints, limits.max_buffers)),
            events: Events::new(spec.session, limits.max_events),
            credits: Credits::new(limits.max_in_flight),
            scrubs: AtomicUsize::new(0),
            flights: Flights::new(now),
            ready: List::default(),
            starved: List::default(),
            limiter: Limiter::new(now),
            pace: Pace::new(now, limits.control_rate),
            pause: Pause::default(),
            queues,
            timekeeper: Mutex::new(Turn::new()),
            telling: Mutex::default(),
            wake: OnceLock::new(),
            journal: OnceLock::new(),
            spec,
            engine,
            ram,
            observer,
            iommu,
        });
        let me = device.me.clone();
        device.engine.on_progress(Box::new(move || {
            if let Some(device) = me.upgrade() {
                device.wake();
            }
        }));
        device.gauges();
        Ok(device)
    }

    /// Changes the limits of the tenant while it works. Whoever has more than a new limit keeps it and gets no more. Three stay as the device was
    /// made: `max_batch`, which a driver has read in configuration space; `iova`, in which it has chosen its addresses; and `max_total_segments`
    /// grows no further than there are records for. A driver that has sent PROBE learns of the others when it is refused.
    ///
    /// # Errors
    /// [`SpecError::Limit`] for limits that make no device; then nothing has changed.
    pub fn set_limits(&self, limits: &Limits) -> Result<(), SpecError> {
        limits.check()?;
        let limits = within(limits, self.engine.caps());
        self.iommu.set_limits(&of_iommu(&limits));
        self.limits.set(&limits);
        self.credits.set_limit(limits.max_in_flight);
        self.events.set_limit(limits.max_events);
        lock(&self.buffers).set_limit(limits.max_buffers);
        self.pace.set_rate(limits.control_rate);
        self.wake();
        Ok(())
    }

    /// Queues of the device: control, events, and the submission queues.
    pub fn num_queues(&self) -> u16 {
        self.spec.submit_queues.saturating_add(FIRST_SUBMIT_QUEUE)
    }

    /// Reads configuration space: always exactly `size` bytes (4096 at most), zero beyond the fields.
    pub fn read_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut config = Config::new_zeroed();
        config.magic = CONFIG_MAGIC;
        config.version = VERSION.into();
        config.version_min = VERSION.into();
        config.session = self.spec.session.into();
        config.submit_queues = self.spec.submit_queues.into();
        config.endpoints = u16::try_from(self.spec.endpoints.len()).unwrap_or(u16::MAX).into();
        config.max_batch = self.spec.limits.max_batch.into();
        let size = usize::try_from(size.min(MAX_CONFIG_READ)).unwrap_or(0);
        let from = config.as_bytes().get(usize::try_from(offset).unwrap_or(usize::MAX)..).unwrap_or_default();
        let mut answer: Vec<u8> = from.iter().take(size).copied().collect();
        answer.resize(size, 0);
        answer
    }

    /// Has every queue that is started from now on note in `words` which chains it has in hand, and answer first those that an earlier process
    /// noted there. Only the first words given count.
    pub fn keep_journal(&self, words: JournalWords) {
        if !journal::prepare(&words) || self.journal.set(words).is_err() {
            tracing::error!("There is no journal, or a second one; work in flight is lost if this process ends");
        }
    }

    /// Puts a queue into use, for the first time or again after [`Device::stop_queue`]. An index beyond the device's queues does nothing.
    /// The queue is to be drained once then: chains may wait that nobody will kick for.
    pub fn start_queue(&self, index: u16, ring: Arc<dyn Ring>) {
        let Some(queue) = self.queues.get(usize::from(index)) else { return };
        let old = lock(&queue.port).take();
        if let Some(old) = old {
            old.close();
        }
        let port = Port::new(index, ring, self.journal_of(index));
        // Before anybody can take a chain from it.
        self.resume_queue(&port);
        *lock(&queue.port) = Some(port);
    }

    /// Whether a queue that has not been started has something to take up: it must be started before it can be stopped.
    pub fn must_resume(&self, index: u16) -> bool {
        self.port(index).is_none() && self.journal_of(index).is_some_and(|journal| journal.is_kept())
    }

    pub(crate) fn journal_of(&self, index: u16) -> Option<Journal> {
        self.journal.get().and_then(|words| Journal::of_queue(words, index))
    }

    /// One bounded turn of a queue, on that queue's own thread: after a kick, and again at once while it answers true. Blocks on nothing but
    /// short locks; an engine that executes at once moves at most a few hundred KiB here.
    pub fn drain(&self, index: u16) -> bool {
        let Some(queue) = self.queues.get(usize::from(index)) else { return false };
        let mut state = lock(&queue.state);
        let Some(port) = self.port(index).filter(|port| port.taking()) else {
            self.rest();
            return false;
        };
        match &mut *state {
            QueueState::Control(control) => self.control_turn(&port, control),
            QueueState::Event => self.events.deliver(&port),
            QueueState::Submission(submission) => self.submit_turn(&port, submission),
        }
    }

    /// Locked during a queue's turn.
    pub(crate) fn queue_state(&self, index: u16) -> Option<&Mutex<QueueState>> {
        self.queues.get(usize::from(index)).map(|queue| &queue.state)
    }

    pub(crate) fn port(&self, index: u16) -> Option<Arc<Port>> {
        lock(&self.queues.get(usize::from(index))?.port).clone()
    }

    pub(crate) fn event_port(&self) -> Option<Arc<Port>> {
        self.port(EVENT_QUEUE)
    }

    /// Ports in use.
    pub(crate) fn ports(&self) -> Vec<Arc<Port>> {
        self.queues.iter().filter_map(|queue| lock(&queue.port).clone()).collect()
    }

    /// Takes a queue's ring out of use, once its thread is out of its turn. Who finds it taken waits for that as well.
    pub(crate) fn take_port(&self, index: u16) -> Option<Arc<Port>> {
        let queue = self.queues.get(usize::from(index))?;
        let port = lock(&queue.port).take();
        if let Some(port) = &port {
            port.stop_taking();
        }
        drop(lock(&queue.state));
        port
    }

    /// How to wake the timekeeper: called from any thread, must not block. Only the first one given counts.
    pub fn on_progress(&self, wake: Arc<dyn Fn() + Send + Sync>) {
        if self.wake.set(wake).is_err() {
            tracing::error!("The timekeeper's waker was set twice; the first one stays");
        }
    }

    pub(crate) fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }

    /// Whether the connection is over.
    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Ordering::Acquire)
    }

    pub(crate) fn go_down(&self) {
        self.down.store(true, Ordering::Release);
    }

    /// Tells the observer how many there are of what rises and falls. Turns do that themselves, each at its end.
    pub fn gauges(&self) {
        let _telling = lock(&self.telling);
        let domains = lock(&self.domains).len();
        let (buffers, bytes) = {
            let buffers = lock(&self.buffers);
            (buffers.count(), buffers.bytes())
        };
        self.observer.gauge(Gauge::Domains, u64::try_from(domains).unwrap_or(u64::MAX));
        self.observer.gauge(Gauge::Mappings, u64::from(self.iommu.usage().mappings));
        self.observer.gauge(Gauge::Buffers, u64::from(buffers));
        self.observer.gauge(Gauge::BufferBytes, bytes);
        self.observer.gauge(Gauge::InFlight, u64::from(self.credits.used()));
    }

    /// How long a stopped queue's work may go on before it is cancelled.
    pub(crate) const STOP_PATIENCE: Duration = Duration::from_secs(2);
}

/// What is allowed, but no more mappings than the engine's IOMMU holds.
fn within(limits: &Limits, caps: EngineCaps) -> Limits {
    Limits { max_mappings: limits.max_mappings.min(caps.max_mappings), ..limits.clone() }
}

/// What the virtual IOMMU counts.
fn of_iommu(limits: &Limits) -> iommu_core::Limits {
    iommu_core::Limits {
        domains: limits.max_domains,
        mappings: limits.max_mappings,
        segments: limits.max_total_segments,
        pieces: limits.max_total_segments,
        pages: limits.max_pinned_pages,
        iova: limits.iova,
    }
}

impl Queue {
    fn new(index: u16) -> Self {
        let state = match index {
            CONTROL_QUEUE => QueueState::Control(ControlState::new()),
            EVENT_QUEUE => QueueState::Event,
            _ => QueueState::Submission(Submission::new()),
        };
        Self { port: Mutex::default(), state: Mutex::new(state) }
    }
}
