//! [`Gpu`]: a device with this process's context on it, and the calls that are made there.
//!
//! Every call first makes the context that of the calling thread, which costs some tens of nanoseconds and no system call. A call that fails because
//! the context is broken makes all later ones fail.
//!
//! Not here: what is copied where, and when it has ended.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::thread::yield_now;

use crate::atomic::Kernel;
use crate::driver::{Answer, CopyAttributes, CudaError, Driver, GpuInfo, MemLocation, Opaque, Rows, RowsSide, code};

/// `CU_STREAM_NON_BLOCKING`: it waits for no other stream.
const NON_BLOCKING: u32 = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`: good for every context of the process, and at the address that it has there.
const PORTABLE: u32 = 1 | 2;
/// `CU_MEMHOSTREGISTER_IOMEMORY`
const IO_MEMORY: u32 = 4;
/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`
const STREAM_ORDER: c_int = 1;
/// Copies into a GPU that are shorter the driver leaves to no copy engine, unless they are in rows. They would wait for other programs of the GPU (H200, driver
/// 580: beside another process that computes 4 KiB take 2.4 ms, a time slice, and in two rows 10 us), or the processor would make them while the caller waits.
const SHORT: u64 = 32 << 10;
/// `CU_MEMORYTYPE_UNIFIED`: the address says what it is.
const UNIFIED: c_int = 4;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`, `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES`
const FLUSH: (c_int, c_int) = (0, 200);

/// Of `CUdevice_attribute`.
mod attribute {
    use std::ffi::c_int;

    pub(super) const VIRTUAL_MEMORY: c_int = 102;
    pub(super) const EXPORT_FD: c_int = 103;
    pub(super) const HOST_REGISTER: c_int = 99;
    pub(super) const HOST_ADDRESS: c_int = 91;
    pub(super) const RDMA: c_int = 110;
    pub(super) const FLUSH_OPTIONS: c_int = 117;
    pub(super) const WRITES_ORDERING: c_int = 118;
}

/// A GPU of this process.
pub struct Gpu {
    driver: Arc<Driver>,
    info: GpuInfo,
    context: Handle,
    /// Others' writes into its memory are visible to it only once they are flushed.
    flushes: bool,
    rdma: bool,
    /// What makes atomic operations, if anything does.
    kernel: OnceLock<Kernel>,
}

/// What the driver calls a thing of its own. Any thread may use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle(usize);

impl Handle {
    pub(crate) fn new(opaque: Opaque) -> Self {
        Self(opaque as usize)
    }

    pub(crate) fn get(self) -> Opaque {
        self.0 as Opaque
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Gpu").field(&self.info.address).finish()
    }
}

impl Gpu {
    /// Takes a GPU, named by its UUID as `nvidia-smi -L` prints it or by its PCI address, and makes a context on it, which takes some 0.1 s and
    /// 0.5 GiB of its memory. Opens files: a process does it before it gives that up.
    ///
    /// # Errors
    /// Where there is no such GPU, or it cannot do what is needed.
    pub fn open(driver: &Arc<Driver>, which: &str) -> Result<Arc<Self>, CudaError> {
        let all = driver.gpus()?;
        let is_it = |gpu: &&GpuInfo| gpu.uuid.eq_ignore_ascii_case(which) || same_address(&gpu.address, which);
        let Some(info) = all.iter().find(is_it).cloned() else {
            let have = all.into_iter().map(|gpu| format!("{} ({})", gpu.address, gpu.uuid)).collect();
            return Err(CudaError::NoGpu { wanted: which.into(), have });
        };
        let knows = |which| driver.attribute(info.ordinal, which);
        for (which, what) in [
            (attribute::VIRTUAL_MEMORY, "map memory where it is told to"),
            (attribute::EXPORT_FD, "share memory as a file descriptor"),
            (attribute::HOST_REGISTER, "use memory of other owners"),
            (attribute::HOST_ADDRESS, "use memory at the address that it has in this process"),
        ] {
            if knows(which) == 0 {
                return Err(CudaError::Unfit { gpu: info.address, what });
            }
        }
        let flushes = knows(attribute::FLUSH_OPTIONS) & 1 != 0 && knows(attribute::WRITES_ORDERING) < FLUSH.1;
        let rdma = knows(attribute::RDMA) != 0;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes one pointer.
        driver.check("cuDevicePrimaryCtxRetain", unsafe {
            (driver.table.context_retain)(&raw mut context, info.ordinal)
        })?;
        let (driver, context, kernel) = (Arc::clone(driver), Handle::new(context), OnceLock::new());
        let gpu = Arc::new(Self { driver, info, context, flushes, rdma, kernel });
        match Kernel::load(&gpu) {
            Ok(kernel) => drop(gpu.kernel.set(kernel)),
            Err(error) => {
                let is_bare = matches!(error, CudaError::Call { code: code::JIT_COMPILER_NOT_FOUND, .. });
                let advice =
                    if is_bare { "; install the driver's PTX compiler (libnvidia-ptxjitcompiler)" } else { "" };
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "GPU {} makes no atomic operations{advice}", gpu.info.address);
            }
        }
        Ok(gpu)
    }

    /// What it is.
    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// The library that it is used through, with this GPU's context as that of the calling thread.
    pub(crate) fn current(&self) -> Result<&Driver, CudaError> {
        // SAFETY: the context is this process's for as long as `self` lives.
        let answer = unsafe { (self.driver.table.context_set)(self.context.get()) };
        self.driver.check("cuCtxSetCurrent", answer)?;
        Ok(&self.driver)
    }

    /// The library alone, for what needs no context.
    pub(crate) fn driver(&self) -> &Driver {
        &self.driver
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.info.ordinal == other.info.ordinal
    }

    /// What makes atomic operations, if anything does.
    pub(crate) fn kernel(&self) -> Option<Kernel> {
        self.kernel.get().copied()
    }

    /// Whether other devices may be given its memory.
    pub(crate) fn allows_rdma(&self) -> bool {
        self.rdma
    }

    /// Registers memory of this process, for every GPU of it.
    ///
    /// # Safety
    /// The addresses stay mapped until [`Gpu::unregister`].
    pub(crate) unsafe fn register(&self, at: Range<u64>, is_device: bool) -> Result<(), CudaError> {
        let flags = PORTABLE | if is_device { IO_MEMORY } else { 0 };
        let len = usize::try_from(at.end - at.start).unwrap_or(usize::MAX);
        let driver = self.current()?;
        // SAFETY: the caller keeps the memory mapped.
        let answer = unsafe { (driver.table.host_register)(at.start as *mut c_void, len, flags) };
        driver.check("cuMemHostRegister", answer)
    }

    /// Undoes [`Gpu::register`].
    pub(crate) fn unregister(&self, start: u64) -> Result<(), CudaError> {
        let driver = self.current()?;
        // SAFETY: the driver looks the address up, and does nothing if it is none that was registered.
        driver.check("cuMemHostUnregister", unsafe { (driver.table.host_unregister)(start as *mut c_void) })
    }

    /// Makes what other devices have written into its memory visible to it (CUDA driver API, `cuFlushGPUDirectRDMAWrites`).
    pub(crate) fn flush_writes(&self) -> Result<(), CudaError> {
        if !self.flushes {
            return Ok(());
        }
        let driver = self.current()?;
        // SAFETY: no pointer is passed.
        driver.check("cuFlushGPUDirectRDMAWrites", unsafe { (driver.table.flush_writes)(FLUSH.0, FLUSH.1) })
    }
}

/// Whether two PCI addresses are the same. NVML writes domains of eight digits.
fn same_address(one: &str, other: &str) -> bool {
    let parts = |address: &str| {
        let numbers = address.split([':', '.']).map(|part| u32::from_str_radix(part, 16));
        numbers.collect::<Result<Vec<_>, _>>().ok().filter(|parts| parts.len() == 4)
    };
    parts(one).is_some_and(|one| Some(one) == parts(other))
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: everything that was made in the context holds `self`, and so has gone. An error changes nothing: the process ends soon.
        let _ = unsafe { (self.driver.table.context_release)(self.info.ordinal) };
    }
}

/// One copy that the driver is to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) dst: u64,
    pub(crate) src: u64,
    pub(crate) len: u64,
}

impl Piece {
    /// Whether it goes into a GPU in rows: see [`SHORT`]. A single byte cannot.
    pub(crate) fn is_short(&self) -> bool {
        (2..SHORT).contains(&self.len)
    }

    /// What it is copied into a GPU as, each with how many of its bytes that adds. Two rows are an even number of bytes, so an odd one's last but one is copied
    /// twice.
    pub(crate) fn parts(self) -> impl Iterator<Item = (Self, u64)> {
        let odd = if self.is_short() { self.len % 2 } else { 0 };
        let even = self.len - odd;
        let last = (odd > 0).then(|| Self { dst: self.dst + even - 1, src: self.src + even - 1, len: 2 });
        [(Self { len: even, ..self }, even)].into_iter().chain(last.map(|last| (last, 1)))
    }
}

/// A stream of a GPU: what is put into it is done one after another.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) gpu: Arc<Gpu>,
    handle: Handle,
}

impl Stream {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let driver = gpu.current()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: the driver writes one pointer.
        let answer = unsafe { (driver.table.stream_create)(&raw mut stream, NON_BLOCKING) };
        driver.check("cuStreamCreate", answer)?;
        Ok(Self { gpu: Arc::clone(gpu), handle: Handle::new(stream) })
    }

    pub(crate) fn handle(&self) -> Opaque {
        self.handle.get()
    }

    /// Begins a copy.
    ///
    /// # Safety
    /// Until the stream has passed it, both ends are memory of GPUs that this stream's one reaches, or registered memory of this process, each within
    /// one registration; both stay as they are.
    pub(crate) unsafe fn copy(&self, piece: Piece) -> Result<(), CudaError> {
        let driver = self.gpu.current()?;
        let len = usize::try_from(piece.len).unwrap_or(usize::MAX);
        // SAFETY: as the caller promises.
        let answer = unsafe { (driver.table.copy)(piece.dst, piece.src, len, self.handle.get()) };
        driver.check("cuMemcpyAsync", answer)
    }

    /// Begins a copy from this process's memory into this GPU, of one of [`Piece::parts`].
    ///
    /// # Safety
    /// As for [`Stream::copy`].
    pub(crate) unsafe fn copy_in(&self, part: Piece) -> Result<(), CudaError> {
        if !part.is_short() {
            // SAFETY: as the caller promises.
            return unsafe { self.copy(part) };
        }
        let driver = self.gpu.current()?;
        let width = usize::try_from(part.len / 2).unwrap_or(usize::MAX);
        let (host, array) = (std::ptr::null_mut(), std::ptr::null_mut());
        let side = |device| RowsSide { x: 0, y: 0, kind: UNIFIED, host, device, array, pitch: width };
        let rows = Rows { src: side(part.src), dst: side(part.dst), width, height: 2 };
        // SAFETY: the driver reads the description before it returns; the rest as the caller promises.
        let answer = unsafe { (driver.table.copy_rows)(&raw const rows, self.handle.get()) };
        driver.check("cuMemcpy2DAsync", answer)
    }

    /// Begins many copies at once, in no order among each other. `None` if the driver has no call for that.
    ///
    /// # Safety
    /// As for [`Stream::copy`], for each.
    pub(crate) unsafe fn copy_all(&self, pieces: &[Piece]) -> Option<Result<(), CudaError>> {
        let driver = match self.gpu.current() {
            Ok(driver) => driver,
            Err(error) => return Some(Err(error)),
        };
        let batch = driver.table.batch?;
        let of = |field: fn(&Piece) -> u64| pieces.iter().map(field).collect::<Vec<_>>();
        let (dst, src) = (of(|piece| piece.dst), of(|piece| piece.src));
        let len: Vec<_> = pieces.iter().map(|piece| usize::try_from(piece.len).unwrap_or(usize::MAX)).collect();
        let none = MemLocation::default();
        let attributes = CopyAttributes { order: STREAM_ORDER, src_hint: none, dst_hint: none, flags: 0 };
        let (first, count) = (0_usize, pieces.len());
        // SAFETY: the arrays have `count` members each, of which the first and all behind it have the one set of attributes; the rest as the
        // caller promises.
        let answer = unsafe {
            batch(
                dst.as_ptr(),
                src.as_ptr(),
                len.as_ptr(),
                count,
                &raw const attributes,
                &raw const first,
                1,
                self.handle.get(),
            )
        };
        Some(driver.check("cuMemcpyBatchAsync", answer))
    }

    /// Begins to set bytes.
    ///
    /// # Safety
    /// As for [`Stream::copy`], for the destination.
    pub(crate) unsafe fn set(&self, dst: u64, byte: u8, len: u64) -> Result<(), CudaError> {
        let driver = self.gpu.current()?;
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        // SAFETY: as the caller promises.
        let answer = unsafe { (driver.table.set)(dst, byte, len, self.handle.get()) };
        driver.check("cuMemsetD8Async", answer)
    }

    /// Has `word` become `value` once everything before it has ended and is visible (`CU_STREAM_WRITE_VALUE_DEFAULT`: with a fence of the system).
    ///
    /// # Safety
    /// The word is in registered memory, until then.
    pub(crate) unsafe fn write(&self, word: *const AtomicU32, value: u32) -> Result<(), CudaError> {
        let driver = self.gpu.current()?;
        // SAFETY: as the caller promises.
        let answer = unsafe { (driver.table.stream_write)(self.handle.get(), word as u64, value, 0) };
        driver.check("cuStreamWriteValue32", answer)
    }

    /// Waits until everything has ended. An error is that of a context that does nothing any more.
    pub(crate) fn finish(&self) -> Result<(), CudaError> {
        while !self.query()? {
            yield_now();
        }
        Ok(())
    }

    /// Whether everything has ended. An error is one of the whole context.
    pub(crate) fn query(&self) -> Result<bool, CudaError> {
        let driver = self.gpu.current()?;
        // SAFETY: the stream is this process's.
        let answer: Answer = unsafe { (driver.table.stream_query)(self.handle.get()) };
        match answer {
            code::NOT_READY => Ok(false),
            answer => driver.check("cuStreamQuery", answer).map(|()| true),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(driver) = self.gpu.current() {
            // SAFETY: nothing else has the handle.
            let _ = unsafe { (driver.table.stream_destroy)(self.handle.get()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::same_address;

    #[test]
    fn addresses_of_any_spelling_are_compared() {
        for (one, other) in [("0000:0a:06.0", "00000000:0A:06.0"), ("0:a:6.0", "0000:0a:06.0")] {
            assert!(same_address(one, other), "{one} {other}");
        }
        for (one, other) in [("0000:00:06.0", "0000:00:06.1"), ("00:06.0", "00:06.0"), ("", ""), ("x:0:0.0", "x:0:0.0")]
        {
            assert!(!same_address(one, other), "{one} {other}");
        }
    }
}
