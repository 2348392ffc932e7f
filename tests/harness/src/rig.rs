//! A device served in the test's own process: no daemon, no sandbox, one connection.
//!
//! For what needs speed or a look inside: benchmarks, fuzzing, and tests of the transport itself. [`crate::daemon`] has the real thing.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};
pub use hw_engine::EndpointKind;
use hw_engine::{DmaEngine, EndpointSpec, Memory, RamMap};
use hw_host::{HostEngine, HostMemory};
use iommu_addr::EndpointId;
use rustix::fs::SealFlags;
use tempfile::TempDir;
pub use vdev_device::JournalWords;
use vdev_device::{Counter, Device, DeviceSpec, FaultRecord, Gauge, JOURNAL_WORDS, Limits, Observer, Reach};
use vmm_vhost_user::{Options, ServeError, ThreadClass, UnsealedPolicy};

use crate::ram::memory_file;

/// Faults that a [`Recorder`] keeps.
const FAULTS: usize = 1 << 16;

/// How the device is made.
#[derive(Clone)]
pub struct RigOptions {
    /// Its endpoints.
    pub endpoints: Vec<EndpointSpec>,
    /// Limits of its one tenant.
    pub limits: Limits,
    /// Who reaches whom.
    pub reach: Reach,
    /// Submission queues.
    pub submit_queues: u16,
    /// What becomes of guest memory that is not sealed.
    pub unsealed_memory: UnsealedPolicy,
    /// Number of the session that HELLO begins.
    pub session: u32,
    /// What an earlier device may have left, and this one leaves; words of its own if there is none.
    pub journal: Option<JournalWords>,
}

impl std::fmt::Debug for RigOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RigOptions")
            .field("endpoints", &self.endpoints)
            .field("session", &self.session)
            .finish_non_exhaustive()
    }
}

impl Default for RigOptions {
    /// Two GPUs of 64 MiB and one submission queue.
    fn default() -> Self {
        Self {
            endpoints: vec![endpoint(0, EndpointKind::Gpu, 64 << 20), endpoint(1, EndpointKind::Gpu, 64 << 20)],
            limits: Limits::default(),
            reach: Reach::all(),
            submit_queues: 1,
            unsealed_memory: UnsealedPolicy::Refuse,
            session: 1,
            journal: None,
        }
    }
}

/// A journal that says nothing.
pub fn journal_words() -> JournalWords {
    Arc::new((0..JOURNAL_WORDS).map(|_| AtomicU64::new(0)).collect::<Vec<_>>())
}

/// A slice without registers.
pub fn endpoint(id: u16, kind: EndpointKind, memory_len: u64) -> EndpointSpec {
    EndpointSpec {
        id: EndpointId::local(id),
        kind,
        name: format!("{kind}{id}"),
        memory_len,
        registers_len: 0,
        granularity: 4096,
        engines: 1,
    }
}

/// What the device told its operator.
#[derive(Debug, Default)]
pub struct Recorder {
    faults: Mutex<Vec<FaultRecord>>,
    counts: [AtomicU64; Counter::ALL.len()],
    gauges: [AtomicU64; Gauge::ALL.len()],
    panics: AtomicBool,
}

impl Recorder {
    /// Refusals so far, oldest first; the first 65536 of them.
    pub fn faults(&self) -> Vec<FaultRecord> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Panics at the next refusal, on the device's thread, as a bug of the device would.
    pub fn panic_at_fault(&self) {
        self.panics.store(true, Ordering::Relaxed);
    }

    /// Whether [`Recorder::panic_at_fault`] has had its way.
    pub fn has_panicked(&self) -> bool {
        !self.panics.load(Ordering::Relaxed)
    }

    /// A counter.
    pub fn counted(&self, counter: Counter) -> u64 {
        self.counts[counter as usize].load(Ordering::Relaxed)
    }

    /// A gauge.
    pub fn gauged(&self, gauge: Gauge) -> u64 {
        self.gauges[gauge as usize].load(Ordering::Relaxed)
    }
}

impl Observer for Recorder {
    fn fault(&self, record: &FaultRecord) {
        assert!(!self.panics.swap(false, Ordering::Relaxed), "a panic on request");
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        if faults.len() < FAULTS {
            faults.push(*record);
        }
    }

    fn count(&self, counter: Counter, by: u64) {
        self.counts[counter as usize].fetch_add(by, Ordering::Relaxed);
    }

    fn gauge(&self, gauge: Gauge, value: u64) {
        self.gauges[gauge as usize].store(value, Ordering::Relaxed);
    }
}

/// A device over slices of memory, with the CPU as its engine.
pub fn host_device(options: &RigOptions, observer: Arc<dyn Observer>) -> Result<(Arc<Device>, Arc<HostMemory>)> {
    let memory = Arc::new(HostMemory::new());
    for endpoint in &options.endpoints {
        let file = memory_file(endpoint.memory_len, SealFlags::SHRINK)?;
        memory.add_aperture(endpoint.id, &file, endpoint.memory_len)?;
    }
    let engine: Arc<dyn DmaEngine> = Arc::new(HostEngine::new(Arc::clone(&memory) as Arc<dyn Memory>));
    let spec = DeviceSpec {
        linger: DeviceSpec::LINGER,
        endpoints: options.endpoints.clone(),
        limits: options.limits.clone(),
        reach: options.reach.clone(),
        session: options.session,
        submit_queues: options.submit_queues,
    };
    let device = Device::new(spec, engine, Arc::clone(&memory) as Arc<dyn RamMap>, observer)?;
    Ok((device, memory))
}

/// A socket with a device behind it.
#[derive(Debug)]
pub struct Rig {
    dir: TempDir,
    session: Option<JoinHandle<Result<(), ServeError>>>,
    recorder: Arc<Recorder>,
}

impl Rig {
    /// Starts serving one connection.
    pub fn start(options: &RigOptions) -> Result<Self> {
        Self::start_with(options, Options::default().thread_hook)
    }

    /// The same with a hook for the threads of the session.
    pub fn start_with(options: &RigOptions, thread_hook: Arc<dyn Fn(ThreadClass) + Send + Sync>) -> Result<Self> {
        let recorder = Arc::new(Recorder::default());
        let (device, memory) = host_device(options, Arc::clone(&recorder) as Arc<dyn Observer>)?;
        let journal = Some(options.journal.clone().unwrap_or_else(journal_words));
        let serve = Options { unsealed_memory: options.unsealed_memory, thread_hook, journal };
        Self::over(device, memory, recorder, serve)
    }

    /// Serves a device that the caller has made, over memory that it is to be told of.
    pub fn over(device: Arc<Device>, memory: Arc<dyn RamMap>, recorder: Arc<Recorder>, serve: Options) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("peergate-rig-").tempdir()?;
        let listener = UnixListener::bind(dir.path().join("sock"))?;
        let session = std::thread::Builder::new()
            .name("rig".into())
            .spawn(move || vmm_vhost_user::serve(listener.into(), device, memory, &serve, || {}))?;
        Ok(Self { dir, session: Some(session), recorder })
    }

    /// Where to connect.
    pub fn socket(&self) -> PathBuf {
        socket(self.dir.path())
    }

    /// What the device told its operator.
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Waits until the session has ended, after the connection was closed, and says how.
    pub fn finish(mut self) -> Result<Result<(), ServeError>> {
        let session = self.session.take().context("A session ends once")?;
        session.join().or_else(|_| bail!("The session panicked"))
    }
}

fn socket(dir: &Path) -> PathBuf {
    dir.join("sock")
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            // Whoever was to connect did not: nobody waits for this one's answer.
            drop(UnixStream::connect(self.socket()));
            let _ = session.join();
        }
    }
}
