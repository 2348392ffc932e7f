//! A tenant's GPUs: opened before the process gives up its files, then what they are to each other, their slices and the engine over them.
//!
//! Whoever opens a GPU runs its driver, which starts threads of its own. They are started by a thread that has given up all privileges, and get the
//! process's filter of system calls with all others.
//!
//! Not here: what an engine does, which pairs are proved.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};

use anyhow::{Context, bail};
use clap::Args;
use hw_cuda::{CudaEngine, Driver, Gpu, Nvml, Peer, Settings, Slice};
use hw_engine::{Member, Owner, RamMap, RamRegion, ThreadHook};
use hw_host::HostMemory;
use iommu_addr::{EndpointId, Gpa, Range};
use vmm_broker::{Completion, GpuPeer, Setup};
use vmm_sandbox::Fence;

/// What a worker is told of GPUs.
#[derive(Debug, Args)]
pub(crate) struct GpuArgs {
    /// PCI address or UUID of a GPU that it has slices of
    #[arg(long = "gpu")]
    pub(crate) wanted: Vec<String>,
    /// The driver's library, if another than the machine's
    #[arg(long)]
    cuda_library: Option<PathBuf>,
    /// The library that knows what is between GPUs, if another than the machine's
    #[arg(long)]
    nvml_library: Option<PathBuf>,
}

/// GPUs that are open.
#[derive(Default)]
pub(crate) struct Gpus {
    /// By the names that the supervisor has for them.
    open: Vec<(String, Arc<Gpu>)>,
    /// How each reaches each other one.
    pub(crate) peers: Vec<GpuPeer>,
}

impl Gpus {
    /// Opens them.
    pub(crate) fn open(args: &GpuArgs, namespaces: Fence) -> anyhow::Result<Self> {
        if args.wanted.is_empty() {
            return Ok(Self::default());
        }
        vmm_sandbox::see_own_processes(namespaces)?;
        let open = || {
            vmm_sandbox::drop_privileges(namespaces)?;
            let driver = args.cuda_library.as_deref().map_or_else(Driver::load, Driver::load_from)?;
            let gpus = args.wanted.iter().map(|which| Ok((which.clone(), Gpu::open(&driver, which)?)));
            let open = gpus.collect::<anyhow::Result<Vec<_>>>()?;
            differ(&open)?;
            let peers = peers(&open, args.nvml_library.as_deref());
            anyhow::Ok(Self { open, peers })
        };
        let opened = thread::scope(|scope| {
            let thread = thread::Builder::new().name("gpus".into()).spawn_scoped(scope, open);
            thread.map(ScopedJoinHandle::join)
        });
        match opened.context("Cannot start a thread")? {
            Ok(opened) => opened.context("A GPU cannot be used"),
            Err(_) => bail!("The thread that opens GPUs panicked"),
        }
    }

    /// Takes the memory of every slice of a GPU, which is zero then, and starts their engine. `None` if there is no such slice.
    pub(crate) fn engine(
        &self,
        setup: &Setup,
        memory: &Arc<HostMemory>,
        hook: &ThreadHook,
    ) -> anyhow::Result<Option<Arc<CudaEngine>>> {
        let (mut slices, mut settings) = (Vec::new(), Settings::default());
        for (endpoint, id) in setup.endpoints.iter().zip(0..) {
            let Some(of) = &endpoint.gpu else { continue };
            let failed = || format!("Slice {:?} has no memory", endpoint.name);
            let gpu = self.open.iter().find(|(name, _)| *name == of.which).map(|(_, gpu)| gpu);
            let gpu = gpu.with_context(|| format!("GPU {} was not opened", of.which)).with_context(failed)?;
            slices.push((EndpointId::local(id), Slice::new(gpu, endpoint.memory_len).with_context(failed)?));
            settings.spin |= of.completion == Completion::Spin;
        }
        if slices.is_empty() {
            return Ok(None);
        }
        let engine = CudaEngine::new(slices, memory.clone(), settings, Some(Arc::clone(hook)));
        Ok(Some(Arc::new(engine.context("The GPUs have no engine")?)))
    }
}

/// A GPU has an address and a UUID: two devices of one GPU would count its memory twice, and be told to be no peers.
fn differ(open: &[(String, Arc<Gpu>)]) -> anyhow::Result<()> {
    for (number, (name, gpu)) in open.iter().enumerate() {
        if let Some((other, _)) = open[..number].iter().find(|(_, other)| other.info().uuid == gpu.info().uuid) {
            bail!("{name} and {other} are the same one; remove one of the two devices");
        }
    }
    Ok(())
}

/// Every pair of GPUs, both ways. What is between the two is in files, and so is looked up now; nothing depends on it.
fn peers(open: &[(String, Arc<Gpu>)], library: Option<&Path>) -> Vec<GpuPeer> {
    if open.len() < 2 {
        return Vec::new();
    }
    let nvml = library.map_or_else(Nvml::load, Nvml::load_from).ok();
    let meters: Vec<_> =
        open.iter().map(|(_, gpu)| nvml.as_ref().and_then(|nvml| nvml.meter(&gpu.info().uuid).ok())).collect();
    let gpus = || (0..).zip(open.iter().map(|(_, gpu)| gpu).zip(&meters));
    let mut peers = Vec::new();
    for (accessor, (one, from)) in gpus() {
        for (owner, (other, to)) in gpus().filter(|(owner, _)| *owner != accessor) {
            let Peer { access, atomics, rank } = one.peer(other);
            let link = from.as_ref().zip(to.as_ref()).and_then(|(from, to)| from.link(to).ok());
            let link = link.map(|link| link.to_string());
            peers.push(GpuPeer { accessor, owner, access, atomics, rank, link });
        }
    }
    peers
}

/// Each endpoint that is a slice of a GPU, with their engine.
pub(crate) fn members(setup: &Setup, engine: &Arc<CudaEngine>) -> Vec<Member> {
    let ids = setup.endpoints.iter().zip(0..).filter(|(endpoint, _)| endpoint.gpu.is_some());
    let member = |(_, id)| {
        let engine = Arc::clone(engine) as Arc<dyn Owner>;
        Member { endpoint: EndpointId::local(id), engine, same_function: Vec::new() }
    };
    ids.map(member).collect()
}

/// The guest's memory, of whose changes the GPUs' engine is told: it lets go of what has gone.
pub(crate) struct Told {
    pub(crate) memory: Arc<HostMemory>,
    pub(crate) engine: Arc<CudaEngine>,
}

impl RamMap for Told {
    fn replace(&self, regions: &[RamRegion]) -> io::Result<()> {
        self.memory.replace(regions)?;
        self.engine.memory_changed();
        Ok(())
    }

    fn contains(&self, range: Range<Gpa>) -> bool {
        self.memory.contains(range)
    }
}
