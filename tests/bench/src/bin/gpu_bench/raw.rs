//! The CUDA driver as a program without Peergate uses it: what the rivals are made of. Independent of `hw_cuda` on purpose.
//!
//! Not here: what is measured.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use libloading::Library;

type Opaque = *mut c_void;
/// How the driver's functions look; none takes more than these.
type Answer = c_uint;

macro_rules! functions {
    ($($field:ident: $symbol:literal = fn($($argument:ty),*);)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> Answer,)*
        }

        impl Functions {
            fn find(library: &Library) -> Result<Self> {
                Ok(Self {
                    // SAFETY: these are the prototypes of cuda.h.
                    $($field: *unsafe { library.get($symbol) }.context(concat!("The driver has no ", $symbol))?,)*
                })
            }
        }
    };
}

functions! {
    context_retain: "cuDevicePrimaryCtxRetain" = fn(*mut Opaque, c_int);
    context_set: "cuCtxSetCurrent" = fn(Opaque);
    stream_create: "cuStreamCreate" = fn(*mut Opaque, c_uint);
    stream_wait: "cuStreamSynchronize" = fn(Opaque);
    stream_destroy: "cuStreamDestroy_v2" = fn(Opaque);
    register: "cuMemHostRegister_v2" = fn(*mut c_void, usize, c_uint);
    unregister: "cuMemHostUnregister" = fn(*mut c_void);
    out: "cuMemcpyDtoH_v2" = fn(*mut c_void, u64, usize);
    into: "cuMemcpyHtoD_v2" = fn(u64, *const c_void, usize);
    copy: "cuMemcpyAsync" = fn(u64, u64, usize, Opaque);
    context_create: "cuCtxCreate_v2" = fn(*mut Opaque, c_uint, c_int);
    enable_peer: "cuCtxEnablePeerAccess" = fn(Opaque, c_uint);
    allocate: "cuMemAlloc_v2" = fn(*mut u64, usize);
    copy_peer: "cuMemcpyPeerAsync" = fn(u64, Opaque, u64, Opaque, usize, Opaque);
    event_create: "cuEventCreate" = fn(*mut Opaque, c_uint);
    event_record: "cuEventRecord" = fn(Opaque, Opaque);
    event_destroy: "cuEventDestroy_v2" = fn(Opaque);
    stream_await: "cuStreamWaitEvent" = fn(Opaque, Opaque, c_uint);
    load: "cuModuleLoadData" = fn(*mut Opaque, *const c_void);
    function: "cuModuleGetFunction" = fn(*mut Opaque, Opaque, *const c_char);
    launch: "cuLaunchKernel" = fn(Opaque, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Opaque, *mut *mut c_void, *mut *mut c_void);
}

/// A context of a GPU.
pub(crate) struct Cuda {
    functions: Functions,
    context: usize,
    _library: Library,
}

impl Cuda {
    /// The primary one. The driver must have been initialised.
    pub(crate) fn new(ordinal: i32) -> Result<Arc<Self>> {
        Self::with(|functions, context| {
            // SAFETY: the driver writes one pointer.
            ok("cuDevicePrimaryCtxRetain", unsafe { (functions.context_retain)(context, ordinal) })
        })
    }

    /// One of its own, which lives as long as the process. The driver must have been initialised.
    pub(crate) fn apart(ordinal: i32) -> Result<Arc<Self>> {
        Self::with(|functions, context| {
            // SAFETY: the driver writes one pointer.
            ok("cuCtxCreate", unsafe { (functions.context_create)(context, 0, ordinal) })
        })
    }

    fn with(make: impl FnOnce(&Functions, *mut Opaque) -> Result<()>) -> Result<Arc<Self>> {
        // SAFETY: it is the driver's library.
        let library = unsafe { Library::new("libcuda.so.1") }.context("There is no CUDA driver")?;
        let functions = Functions::find(&library)?;
        let mut context = ptr::null_mut();
        make(&functions, &raw mut context)?;
        let cuda = Self { functions, context: context as usize, _library: library };
        cuda.enter()?;
        Ok(Arc::new(cuda))
    }

    /// Makes the context that of the calling thread.
    pub(crate) fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as the process.
        ok("cuCtxSetCurrent", unsafe { (self.functions.context_set)(self.context as Opaque) })
    }

    /// Lets it reach the memory of another context.
    pub(crate) fn enable_peer(&self, other: &Self) -> Result<()> {
        self.enter()?;
        // SAFETY: both contexts live as long as the process.
        ok("cuCtxEnablePeerAccess", unsafe { (self.functions.enable_peer)(other.context as Opaque, 0) })
    }

    /// Takes plain memory, which is there as long as the process.
    pub(crate) fn allocate(&self, len: u64) -> Result<u64> {
        self.enter()?;
        let mut at = 0;
        // SAFETY: the driver writes one number.
        ok("cuMemAlloc", unsafe { (self.functions.allocate)(&raw mut at, usize::try_from(len)?) })?;
        Ok(at)
    }

    pub(crate) fn event(self: &Arc<Self>) -> Result<Event> {
        self.enter()?;
        let mut event = ptr::null_mut();
        // SAFETY: the driver writes one pointer. 2 is `CU_EVENT_DISABLE_TIMING`.
        ok("cuEventCreate", unsafe { (self.functions.event_create)(&raw mut event, 2) })?;
        Ok(Event { cuda: Arc::clone(self), handle: event as usize })
    }

    pub(crate) fn stream(self: &Arc<Self>) -> Result<Stream> {
        let mut stream = ptr::null_mut();
        // SAFETY: the driver writes one pointer.
        ok("cuStreamCreate", unsafe { (self.functions.stream_create)(&raw mut stream, 1) })?;
        Ok(Stream { cuda: Arc::clone(self), handle: stream as usize })
    }

    /// Lets the GPU reach memory that stays mapped as long as the process.
    pub(crate) fn register(&self, address: u64, len: u64) -> Result<()> {
        // SAFETY: it stays mapped.
        ok("cuMemHostRegister", unsafe { (self.functions.register)(address as *mut c_void, usize::try_from(len)?, 3) })
    }

    /// Copies between a GPU and memory that is not registered: the driver's own staging.
    pub(crate) fn pageable(&self, host: u64, device: u64, len: u64, way: Way) -> Result<()> {
        let len = usize::try_from(len)?;
        let answer = match way {
            // SAFETY: the callers' buffers are that long.
            Way::Out => unsafe { (self.functions.out)(host as *mut c_void, device, len) },
            // SAFETY: as above.
            Way::In => unsafe { (self.functions.into)(device, host as *const c_void, len) },
        };
        ok("cuMemcpy", answer)
    }

    pub(crate) fn kernel(&self, ptx: &str, name: &str) -> Result<Kernel> {
        let (text, name) = (CString::new(ptx)?, CString::new(name)?);
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the driver reads a string and writes one pointer.
        ok("cuModuleLoadData", unsafe { (self.functions.load)(&raw mut module, text.as_ptr().cast()) })?;
        // SAFETY: as above.
        ok("cuModuleGetFunction", unsafe { (self.functions.function)(&raw mut function, module, name.as_ptr()) })?;
        Ok(Kernel(function as usize))
    }
}

/// From or to the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Out,
    In,
}

/// A function of a module.
#[derive(Clone, Copy)]
pub(crate) struct Kernel(usize);

pub(crate) struct Stream {
    cuda: Arc<Cuda>,
    handle: usize,
}

/// What a stream has come to.
pub(crate) struct Event {
    cuda: Arc<Cuda>,
    handle: usize,
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        let _ = unsafe { (self.cuda.functions.event_destroy)(self.handle as Opaque) };
    }
}

impl Stream {
    /// Begins a copy between a GPU and registered memory.
    pub(crate) fn copy(&self, host: u64, device: u64, len: u64, way: Way) -> Result<()> {
        let (dst, src) = match way {
            Way::Out => (host, device),
            Way::In => (device, host),
        };
        // SAFETY: the callers' buffers are that long, and stay until they have waited.
        ok("cuMemcpyAsync", unsafe {
            (self.cuda.functions.copy)(dst, src, usize::try_from(len)?, self.handle as Opaque)
        })
    }

    /// Begins a copy from memory of one context to memory of another. The stream's context is the current one.
    pub(crate) fn copy_peer(&self, to: (&Cuda, u64), from: (&Cuda, u64), len: u64) -> Result<()> {
        let (len, copy) = (usize::try_from(len)?, self.cuda.functions.copy_peer);
        // SAFETY: the callers' memory is that long, and stays as long as the process.
        ok("cuMemcpyPeerAsync", unsafe {
            copy(to.1, to.0.context as Opaque, from.1, from.0.context as Opaque, len, self.handle as Opaque)
        })
    }

    /// Has an event of its own context mean all that was begun so far.
    pub(crate) fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both are the callers'.
        ok("cuEventRecord", unsafe {
            (self.cuda.functions.event_record)(event.handle as Opaque, self.handle as Opaque)
        })
    }

    /// Begins nothing more until an event has come, of whichever context.
    pub(crate) fn await_event(&self, event: &Event) -> Result<()> {
        // SAFETY: both are the callers'.
        ok("cuStreamWaitEvent", unsafe {
            (self.cuda.functions.stream_await)(self.handle as Opaque, event.handle as Opaque, 0)
        })
    }

    /// Makes its context that of the calling thread.
    pub(crate) fn enter(&self) -> Result<()> {
        self.cuda.enter()
    }

    pub(crate) fn wait(&self) -> Result<()> {
        // SAFETY: the stream is this one's.
        ok("cuStreamSynchronize", unsafe { (self.cuda.functions.stream_wait)(self.handle as Opaque) })
    }

    /// Starts a kernel in a grid of blocks. `arguments` are the addresses of its parameters.
    pub(crate) fn launch(
        &self,
        kernel: Kernel,
        grid: [u32; 2],
        block: [u32; 2],
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: the callers pass what the kernel takes.
        ok("cuLaunchKernel", unsafe {
            (self.cuda.functions.launch)(
                kernel.0 as Opaque,
                grid[0],
                grid[1],
                1,
                block[0],
                block[1],
                1,
                0,
                self.handle as Opaque,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        let _ = unsafe { (self.cuda.functions.stream_destroy)(self.handle as Opaque) };
    }
}

/// Memory of this process that the GPU may reach.
pub(crate) struct Registered<'a> {
    cuda: Arc<Cuda>,
    pub(crate) bytes: &'a mut [u8],
}

impl<'a> Registered<'a> {
    pub(crate) fn new(cuda: &Arc<Cuda>, bytes: &'a mut [u8]) -> Result<Self> {
        // SAFETY: the bytes are borrowed for as long as they are registered.
        ok("cuMemHostRegister", unsafe { (cuda.functions.register)(bytes.as_mut_ptr().cast(), bytes.len(), 3) })?;
        Ok(Self { cuda: Arc::clone(cuda), bytes })
    }

    pub(crate) fn address(&self) -> u64 {
        self.bytes.as_ptr() as u64
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        // SAFETY: it was registered.
        let _ = unsafe { (self.cuda.functions.unregister)(self.bytes.as_mut_ptr().cast()) };
    }
}

fn ok(call: &str, answer: Answer) -> Result<()> {
    ensure!(answer == 0, "{call} failed with {answer}");
    Ok(())
}

/// How the functions of NVRTC look that are used here (nvrtc.h). The program is a pointer of the library's own.
mod nvrtc {
    use super::{Answer, Opaque, c_char, c_int};

    pub(super) type Create =
        unsafe extern "C" fn(*mut Opaque, *const c_char, *const c_char, c_int, Opaque, Opaque) -> Answer;
    pub(super) type Compile = unsafe extern "C" fn(Opaque, c_int, *const *const c_char) -> Answer;
    pub(super) type Size = unsafe extern "C" fn(Opaque, *mut usize) -> Answer;
    pub(super) type Text = unsafe extern "C" fn(Opaque, *mut c_char) -> Answer;
}

/// Compiles CUDA C++ for this GPU's architecture.
pub(crate) fn compile(source: &str, architecture: &str) -> Result<String> {
    let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
    // SAFETY: it is NVIDIA's compiler.
    let library = names.into_iter().find_map(|name| unsafe { Library::new(name) }.ok());
    let library = library.context("There is no NVRTC (libnvrtc.so); install CUDA's run-time compiler")?;
    // SAFETY: that is its prototype.
    let create = unsafe { library.get::<nvrtc::Create>("nvrtcCreateProgram") }?;
    // SAFETY: as above.
    let compile = unsafe { library.get::<nvrtc::Compile>("nvrtcCompileProgram") }?;
    // SAFETY: as above.
    let size = unsafe { library.get::<nvrtc::Size>("nvrtcGetPTXSize") }?;
    // SAFETY: as above.
    let text = unsafe { library.get::<nvrtc::Text>("nvrtcGetPTX") }?;
    let (source, option) = (CString::new(source)?, CString::new(format!("--gpu-architecture={architecture}"))?);
    let mut program = ptr::null_mut();
    // SAFETY: the library reads a string and writes one pointer; there are no headers.
    let created =
        unsafe { create(&raw mut program, source.as_ptr(), ptr::null(), 0, ptr::null_mut(), ptr::null_mut()) };
    ok("nvrtcCreateProgram", created)?;
    // SAFETY: the program is the one just made, and there is one option, which is a string.
    ok("nvrtcCompileProgram", unsafe { compile(program, 1, [option.as_ptr()].as_ptr()) })?;
    let mut len = 0;
    // SAFETY: the library writes one number.
    ok("nvrtcGetPTXSize", unsafe { size(program, &raw mut len) })?;
    let mut ptx = vec![0_u8; len];
    // SAFETY: the library writes as many bytes as it has just said.
    ok("nvrtcGetPTX", unsafe { text(program, ptx.as_mut_ptr().cast()) })?;
    ptx.pop();
    Ok(String::from_utf8(ptx)?)
}
