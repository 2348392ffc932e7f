//! [`Kernel`]: the one program that is run on a GPU, a thread that changes a word and says what was there. Copy engines have no such operation.
//!
//! It is in PTX, which the driver compiles for whatever GPU it is. That takes some milliseconds and opens files, so it is done when the GPU is opened,
//! and the program is run once there: what the driver does only for the first run it has done by then.
//!
//! Not here: who may.

use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use hw_engine::{Atomic, AtomicOp, EngineError, Transfer};
use iommu_addr::Location;
use smallvec::SmallVec;

use crate::driver::{CudaError, Opaque};
use crate::gpu::{Gpu, Handle, Stream};
use crate::lane::{Load, Ride};
use crate::pinned::Pinned;
use crate::reach::{Unready, Way};
use crate::shared::Shared;

/// `which` counts operations in pairs, of 4 and of 8 bytes. `.sys`: atomic for every GPU that has native atomics there, and for the processor as far as it is
/// (PTX ISA 8.0, 9.7.12.13, `atom`).
const PTX: &str = concat!(
    ".version 7.0\n.target sm_75\n.address_size 64\n",
    ".visible .entry atomic(.param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3, .param .u32 p4)\n{\n",
    ".reg .u64 %at, %into, %operand, %compare, %was;\n.reg .u32 %which, %operand4, %compare4, %was4;\n.reg .pred %p;\n",
    "ld.param.u64 %at, [p0];\nld.param.u64 %into, [p1];\nld.param.u64 %operand, [p2];\nld.param.u64 %compare, [p3];\n",
    "ld.param.u32 %which, [p4];\ncvt.u32.u64 %operand4, %operand;\ncvt.u32.u64 %compare4, %compare;\n",
    "setp.eq.u32 %p, %which, 0;\n@%p bra ADD4;\nsetp.eq.u32 %p, %which, 1;\n@%p bra ADD8;\n",
    "setp.eq.u32 %p, %which, 2;\n@%p bra SWAP4;\nsetp.eq.u32 %p, %which, 3;\n@%p bra SWAP8;\n",
    "setp.eq.u32 %p, %which, 4;\n@%p bra COMPARE4;\n",
    "atom.sys.cas.b64 %was, [%at], %compare, %operand;\nbra DONE;\n",
    "ADD4: atom.sys.add.u32 %was4, [%at], %operand4;\nbra WIDEN;\n",
    "ADD8: atom.sys.add.u64 %was, [%at], %operand;\nbra DONE;\n",
    "SWAP4: atom.sys.exch.b32 %was4, [%at], %operand4;\nbra WIDEN;\n",
    "SWAP8: atom.sys.exch.b64 %was, [%at], %operand;\nbra DONE;\n",
    "COMPARE4: atom.sys.cas.b32 %was4, [%at], %compare4, %operand4;\n",
    "WIDEN: cvt.u64.u32 %was, %was4;\n",
    "DONE: st.volatile.u64 [%into], %was;\nret;\n}\n\0",
);

/// The program, as the driver knows it. Goes with the GPU's context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel(Handle);

impl Kernel {
    /// Has the driver compile it, and runs it once. Blocks.
    pub(crate) fn load(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let driver = gpu.current()?;
        let (mut module, mut function) = (null_mut(), null_mut());
        // SAFETY: the driver reads a string that ends with a zero, and writes a pointer.
        let answer = unsafe { (driver.table.module_load)(&raw mut module, PTX.as_ptr().cast()) };
        driver.check("cuModuleLoadData", answer)?;
        // SAFETY: the module was just loaded; the driver reads a string and writes a pointer.
        let answer = unsafe { (driver.table.module_function)(&raw mut function, module, c"atomic".as_ptr()) };
        driver.check("cuModuleGetFunction", answer)?;
        let kernel = Self(Handle::new(function));
        let (stream, mut words) = (Stream::new(gpu)?, Pinned::new(gpu, 4096)?);
        let first = Atomic { op: AtomicOp::Add, len: 8, operand: 1 };
        // SAFETY: both places are in memory that stays until the stream has passed the kernel: see below.
        unsafe { kernel.launch(&stream, words.address(), words.address() + 8, first) }?;
        stream.finish()?;
        let (made, was) = words.bytes()[..16].split_at(8);
        if made == first.operand.to_le_bytes() && was == [0; 8] {
            return Ok(kernel);
        }
        let source = std::io::Error::other("it leaves another number than it must");
        Err(CudaError::Host { step: "use an atomic operation", source })
    }

    /// Begins an atomic operation on the word at `at`; what was there is written to the 8 bytes at `into`.
    ///
    /// # Safety
    /// Until the stream has passed it, both are memory of GPUs that this stream's one reaches, or registered memory of this process; both are aligned.
    pub(crate) unsafe fn launch(self, stream: &Stream, at: u64, into: u64, atomic: Atomic) -> Result<(), CudaError> {
        let (which, compare) = match atomic.op {
            AtomicOp::Add => (0, 0),
            AtomicOp::Swap => (2, 0),
            AtomicOp::CompareSwap { compare } => (4, compare),
        };
        let which: c_uint = which + c_uint::from(atomic.len == 8);
        let pointer = |number: &u64| std::ptr::from_ref(number).cast_mut().cast::<c_void>();
        let mut arguments: [Opaque; 5] = [
            pointer(&at),
            pointer(&into),
            pointer(&atomic.operand),
            pointer(&compare),
            std::ptr::from_ref(&which).cast_mut().cast(),
        ];
        let driver = stream.gpu.current()?;
        // SAFETY: the kernel takes these five, which the driver copies before it returns; the rest as the caller promises.
        let answer = unsafe {
            (driver.table.launch)(
                self.0.get(),
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                stream.handle(),
                arguments.as_mut_ptr(),
                null_mut(),
            )
        };
        driver.check("cuLaunchKernel", answer)
    }
}

impl Shared {
    /// Begins an atomic operation.
    pub(crate) fn begin_atomic(&self, transfer: &Transfer, at: Location, atomic: Atomic) -> Result<(), Unready> {
        let none = Unready::Error(EngineError::NO_ATOMICS);
        let (gpu, kernel, at) = self.reach.atomic(transfer.initiator, at, atomic.len).ok_or(none)?;
        let (ride, load) = (Ride::new(transfer.job, atomic.len, SmallVec::new()), Load::Atomic { kernel, at, atomic });
        // SAFETY: the word is a slice's that the GPU reaches, which lives as long as the engine; it is aligned.
        if let Err(error) = unsafe { self.ways[gpu].begin(Way::Local, ride, load) } {
            self.lose(gpu, error);
        }
        Ok(())
    }
}
