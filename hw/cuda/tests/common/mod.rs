//! Libraries of NVIDIA's that need no GPU, compiled from `tests/fake` and loaded anew for each test; and an engine over them.

#![allow(dead_code, unreachable_pub, reason = "shared by tests, none of which uses all")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_long};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use hw_cuda::{CudaEngine, Driver, Gpu, Settings, Slice};
use hw_engine::conformance::{APERTURES, Parts, ram_regions};
use hw_engine::{DmaEngine, Finished, Fleet, JobId, Member, Memory, RamMap, RamRegion, Route, Submit, Transfer, Work};
use hw_host::{HostEngine, HostMemory};
use iommu_addr::{ApertureOffset, DomainId, EndpointId, Gpa, Location, Range, Segment};
use libloading::Library;
use tempfile::TempPath;

/// How long anything here may take. Reached only by what hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes that are registered together, which begin at a multiple of that.
pub const CHUNK: u64 = 64 << 20;

/// A library of a test's own: it shares nothing with that of another test.
pub struct Fake {
    loaded: Library,
    path: TempPath,
}

impl Fake {
    /// The newest driver; `None`, which is said, where there is no C compiler.
    pub fn cuda() -> Option<Self> {
        Self::cuda_of(13000)
    }

    /// A driver with what that version of CUDA has (1000 for a major number, 10 for a minor one).
    pub fn cuda_of(version: u32) -> Option<Self> {
        Self::load(&["libcuda.c", "memory.c", "streams.c", "transfer.c"], version)
    }

    /// The management library.
    pub fn nvml() -> Option<Self> {
        Self::load(&["libnvidia-ml.c"], 0)
    }

    fn load(sources: &[&'static str], version: u32) -> Option<Self> {
        let built = build(sources, version)?;
        // The loader knows a library by its inode.
        let path = tempfile::Builder::new().prefix("fake-").suffix(".so").tempfile().unwrap().into_temp_path();
        std::fs::copy(built, &path).unwrap();
        // SAFETY: the library does nothing when it is loaded but read the environment.
        let library = unsafe { Library::new(&*path) }.unwrap();
        Some(Self { loaded: library, path })
    }

    /// Where it is, for [`hw_cuda`] to load it: what is set here is set there.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn loaded(&self) -> &Library {
        &self.loaded
    }

    pub fn set(&self, name: &str, value: i64) {
        let name_of = CString::new(name).unwrap();
        // SAFETY: that is the function's prototype.
        let set = unsafe { self.loaded.get::<unsafe extern "C" fn(*const c_char, c_long) -> c_int>("fake_set") };
        // SAFETY: it reads a string.
        let answer = unsafe { set.unwrap()(name_of.as_ptr(), value) };
        assert_eq!(answer, 0, "there is a number {name}");
    }

    pub fn get(&self, name: &str) -> i64 {
        let name_of = CString::new(name).unwrap();
        // SAFETY: that is the function's prototype.
        let get = unsafe { self.loaded.get::<unsafe extern "C" fn(*const c_char) -> c_long>("fake_get") };
        // SAFETY: it reads a string.
        let value = unsafe { get.unwrap()(name_of.as_ptr()) };
        assert_ne!(value, -1000, "there is a number {name}");
        value
    }
}

impl Fake {
    pub fn driver(&self) -> Arc<Driver> {
        Driver::load_from(self.path()).unwrap()
    }

    /// All GPUs that there are.
    pub fn gpus(&self) -> Vec<Arc<Gpu>> {
        let driver = self.driver();
        driver.gpus().unwrap().iter().map(|gpu| Gpu::open(&driver, &gpu.address).unwrap()).collect()
    }

    /// Nothing has happened that must never happen.
    pub fn is_obeyed(&self) {
        for name in ["violations", "pageable"] {
            assert_eq!(self.get(name), 0, "{name}");
        }
    }

    /// Nor is anything left.
    pub fn is_left_clean(&self) {
        self.is_obeyed();
        for name in ["registrations", "registered", "streams", "queued", "maps", "reservations", "allocations"] {
            assert_eq!(self.get(name), 0, "{name}");
        }
        assert_eq!((self.get("contexts"), self.get("abandoned")), (0, 0));
    }
}

/// Waits until something is so.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        yield_now();
    }
}

/// The driver of this machine; `None`, which is said, where there is none.
pub fn real() -> Option<Arc<Driver>> {
    Driver::load().inspect_err(|error| println!("SKIP: {error}")).ok()
}

/// Of memory: the kernel pins no pages of a disk's files for good.
pub fn file(len: u64) -> File {
    let file = File::from(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(len).unwrap();
    file
}

/// The conformance suite's world: those of its endpoints that have no slice are apertures of other owners.
pub fn parts(slices: Vec<(EndpointId, Slice)>, settings: Settings) -> Parts {
    let memory = Arc::new(HostMemory::new());
    memory.replace(&ram_regions(file)).unwrap();
    let ids: Vec<_> = slices.iter().map(|(id, _)| *id).collect();
    for (endpoint, len) in APERTURES.into_iter().filter(|(id, _)| !ids.contains(id)) {
        memory.add_aperture(endpoint, &file(len), len).unwrap();
    }
    let engine = Arc::new(CudaEngine::new(slices, memory.clone(), settings, None).unwrap());
    let fleet = fleet(&engine, &ids, &memory);
    let memory = fleet.memory();
    Parts { engine: Arc::new(fleet), memory, advance: None }
}

/// An engine's endpoints, and the processor for everything else.
pub fn fleet(engine: &Arc<CudaEngine>, ids: &[EndpointId], memory: &Arc<HostMemory>) -> Fleet {
    let member = |id: &EndpointId| Member { endpoint: *id, engine: engine.clone(), same_function: Vec::new() };
    let rest = Arc::new(HostEngine::new(memory.clone()));
    Fleet::new(ids.iter().map(member).collect(), Vec::new(), rest, memory.clone(), None).unwrap()
}

/// Guest memory of these lengths at these addresses, each in a file of its own.
pub fn regions(all: &[(u64, u64)]) -> Vec<RamRegion> {
    let region = |&(start, len): &(u64, u64)| RamRegion {
        gpa: Range::with_len(Gpa(start), len).unwrap(),
        file: Arc::new(file(len)),
        offset: 0,
    };
    all.iter().map(region).collect()
}

/// The `n`th endpoint, and a place in its memory.
pub fn endpoint(n: usize) -> EndpointId {
    EndpointId::local(u16::try_from(n).unwrap())
}

pub fn own(n: usize, offset: u64) -> Location {
    Location::Aperture { endpoint: endpoint(n), offset: ApertureOffset(offset) }
}

pub fn ram(at: u64) -> Location {
    Location::Ram(Gpa(at))
}

pub fn copy(dst: Location, src: Location, len: u64) -> Work {
    copy_all(&[(dst, len)], &[(src, len)])
}

pub fn copy_all(dst: &[(Location, u64)], src: &[(Location, u64)]) -> Work {
    let segments = |all: &[(Location, u64)]| all.iter().map(|&(at, len)| Segment { at, len }).collect();
    Work::Copy { dst: segments(dst), src: segments(src), route: Route::Direct }
}

/// Lets streams go on that stand still.
struct Release(Arc<Fake>);

impl Drop for Release {
    fn drop(&mut self) {
        self.0.set("stall", 0);
        self.0.set("stall_programs", 0);
    }
}

/// An engine with a slice of each GPU, whose endpoints have the GPUs' numbers, beside guest memory.
pub struct World {
    /// First gone: then a test that fails while streams stand still does not hang.
    release: Release,
    pub engine: Arc<CudaEngine>,
    pub memory: Arc<HostMemory>,
    pub fake: Arc<Fake>,
}

impl World {
    /// Of `len` bytes each. Of guest memory, each region is in one chunk, if one is long enough: then it is registered at once, and no copy is cut.
    pub fn new(fake: Fake, len: u64, regions: &[RamRegion], settings: Settings) -> Self {
        let slice = |(n, gpu): (usize, &Arc<Gpu>)| (endpoint(n), Slice::new(gpu, len).unwrap());
        let slices = fake.gpus().iter().enumerate().map(slice).collect();
        let is_in_one = |memory: &HostMemory, region: &RamRegion| {
            let (start, len) = (region.gpa.start(), region.gpa.len().unwrap());
            let address = memory.place(Location::Ram(start), 1).unwrap().address;
            len > CHUNK || address / CHUNK == (address + len - 1) / CHUNK
        };
        let mut tried = Vec::new();
        let memory = loop {
            let memory = Arc::new(HostMemory::new());
            memory.replace(regions).unwrap();
            if regions.iter().all(|region| is_in_one(&memory, region)) {
                break memory;
            }
            // It stays until the end, so that the next one is elsewhere.
            tried.push(memory);
        };
        drop(tried);
        let engine = Arc::new(CudaEngine::new(slices, memory.clone(), settings, None).unwrap());
        let fake = Arc::new(fake);
        Self { release: Release(Arc::clone(&fake)), engine, memory, fake }
    }

    /// Has the first endpoint begin a transfer.
    pub fn submit(&self, job: u64, work: Work) {
        let submitted = self.engine.submit(&transfer(job, 0, work)).unwrap();
        assert_eq!(submitted, Submit::Submitted);
    }

    /// The next `count` ends, in their order.
    pub fn ends(&self, count: usize) -> Vec<Finished> {
        ends_of(&*self.engine, count)
    }

    /// One transfer, which ends well.
    pub fn run(&self, work: Work) {
        let len = match &work {
            Work::Copy { dst, .. } | Work::Fill { dst, .. } => dst.iter().map(|segment| segment.len).sum(),
            _ => 0,
        };
        self.submit(7, work);
        assert_eq!(self.ends(1), [Finished { job: JobId(7), bytes: len, result: Ok(()), raised: false, value: 0 }]);
    }

    /// Everything ends, and nothing is left of it.
    pub fn end(self) {
        let Self { release, engine, memory, fake } = self;
        drop(release);
        drop(engine);
        drop(memory);
        fake.is_left_clean();
    }
}

/// The next `count` ends of an engine, in their order.
pub fn ends_of(engine: &dyn DmaEngine, count: usize) -> Vec<Finished> {
    let (begun, mut ends) = (Instant::now(), Vec::new());
    engine.doorbell();
    while ends.len() < count {
        assert!(begun.elapsed() < PATIENCE, "there are {count} ends, and not only {ends:?}");
        engine.poll(&mut ends);
        yield_now();
    }
    assert_eq!(ends.len(), count, "{ends:?}");
    ends
}

pub fn transfer(job: u64, initiator: usize, work: Work) -> Transfer {
    Transfer { job: JobId(job), domain: DomainId(1), initiator: endpoint(initiator), work }
}

/// Compiles a library, once in this process; `None` where nothing can.
fn build(sources: &[&'static str], version: u32) -> Option<PathBuf> {
    static BUILT: Mutex<BTreeMap<(&str, u32), Option<PathBuf>>> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    built.entry((sources[0], version)).or_insert_with(|| compile(sources, version)).clone()
}

fn compile(sources: &[&str], version: u32) -> Option<PathBuf> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake");
    let name = format!("{}-{version}.so", sources[0]);
    let out = Path::new(env!("CARGO_TARGET_TMPDIR"));
    // Another test's program may be at it, too.
    let fresh = tempfile::Builder::new().prefix(&name).tempfile_in(out).unwrap().into_temp_path();
    let mut compiler = Command::new("cc");
    compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]);
    // Threads of its own may be in it when it would go.
    compiler.args(["-pthread", "-Wl,-z,nodelete"]).arg(format!("-DFAKE_VERSION={version}"));
    compiler.arg("-o").arg(&*fresh).args(sources.iter().map(|source| from.join(source)));
    let output = match compiler.output() {
        Ok(output) => output,
        Err(error) => {
            println!("SKIP: there is no C compiler called cc ({error})");
            return None;
        }
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let path = out.join(name);
    fresh.persist(&path).unwrap();
    Some(path)
}
