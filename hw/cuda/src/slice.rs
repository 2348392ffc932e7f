//! [`Slice`]: memory of a GPU that is one tenant's.
//!
//! It is made by the driver's virtual memory calls, so it can be handed to another process as a descriptor and to another device as a dma-buf. The
//! kernel maps that dma-buf into no processor's address space (`mmap` answers ENOTSUPP), and the iommufd of Linux 7.3 takes dma-bufs of VFIO alone: what
//! imports it is a driver that knows dma-bufs, as those of RDMA adapters do.
//!
//! Not here: who may reach it.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use crate::driver::{AccessDesc, Allocation, AllocationProp, CudaError, DevicePtr, Driver, MemLocation, code};
use crate::gpu::{Gpu, Stream};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, `CU_MEM_LOCATION_TYPE_DEVICE`
const PINNED: c_int = 1;
const FILE_DESCRIPTOR: c_int = 1;
const DEVICE: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
const READ_WRITE: c_int = 3;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
const DMA_BUF: c_int = 1;

/// Memory of a GPU, in this process's address space of it.
#[derive(Debug)]
pub struct Slice {
    gpu: Arc<Gpu>,
    /// Its address.
    base: DevicePtr,
    len: u64,
    allocation: Allocation,
}

impl Slice {
    /// The GPU's memory is given out in multiples of this (`cuMemGetAllocationGranularity` of every GPU with virtual memory calls).
    pub const GRANULE: u64 = 2 << 20;

    /// Takes memory and zeroes it. Blocks meanwhile: about a millisecond for 4 GiB.
    ///
    /// # Errors
    /// Where there is none left, or `len` is 0.
    pub fn new(gpu: &Arc<Gpu>, len: u64) -> Result<Self, CudaError> {
        let bytes = sized(len)?;
        let kind = MemLocation { kind: DEVICE, id: gpu.info().ordinal };
        let prop = AllocationProp {
            kind: PINNED,
            handle_types: FILE_DESCRIPTOR,
            location: kind,
            win32: std::ptr::null_mut(),
            compression: 0,
            rdma: u8::from(gpu.allows_rdma()),
            usage: 0,
            reserved: [0; 4],
        };
        let driver = gpu.current()?;
        let mut allocation = 0;
        // SAFETY: the driver reads the properties and writes one number.
        let answer = unsafe { (driver.table.mem_create)(&raw mut allocation, bytes, &raw const prop, 0) };
        if answer == code::OUT_OF_MEMORY {
            return Err(CudaError::Memory { gpu: gpu.info().address.clone(), len });
        }
        driver.check("cuMemCreate", answer)?;
        let slice = Self::map(gpu, allocation, len)?;
        slice.zero()?;
        Ok(slice)
    }

    /// Memory that another process has exported. Both have it from then on.
    ///
    /// # Errors
    /// Where the descriptor is of no such memory, or `len` is not its length.
    pub fn import(gpu: &Arc<Gpu>, fd: BorrowedFd<'_>, len: u64) -> Result<Self, CudaError> {
        sized(len)?;
        let driver = gpu.current()?;
        let mut allocation = 0;
        let number = fd.as_raw_fd() as isize as *mut c_void;
        // SAFETY: for this type of handle the driver takes the descriptor's number in place of a pointer; it writes one number.
        let answer = unsafe { (driver.table.mem_import)(&raw mut allocation, number, FILE_DESCRIPTOR) };
        driver.check("cuMemImportFromShareableHandle", answer)?;
        Self::map(gpu, allocation, len)
    }

    fn map(gpu: &Arc<Gpu>, allocation: Allocation, len: u64) -> Result<Self, CudaError> {
        let (driver, bytes) = (gpu.current()?, sized(len)?);
        let mut base = 0;
        let granule = usize::try_from(Self::GRANULE).unwrap_or(usize::MAX);
        // SAFETY: the driver writes one number; address 0 lets it choose a place.
        let answer = unsafe { (driver.table.address_reserve)(&raw mut base, bytes, granule, 0, 0) };
        if let Err(error) = driver.check("cuMemAddressReserve", answer) {
            release(driver, allocation);
            return Err(error);
        }
        // SAFETY: the addresses were just reserved, and nothing is mapped there.
        let answer = unsafe { (driver.table.mem_map)(base, bytes, 0, allocation, 0) };
        if let Err(error) = driver.check("cuMemMap", answer) {
            free(driver, base, bytes);
            release(driver, allocation);
            return Err(error);
        }
        // From here on, an error undoes it all.
        let slice = Self { gpu: Arc::clone(gpu), base, len, allocation };
        slice.allow(&[gpu])?;
        Ok(slice)
    }

    /// Lets GPUs of this process reach it, and no others.
    pub(crate) fn allow(&self, gpus: &[&Arc<Gpu>]) -> Result<(), CudaError> {
        let access = |gpu: &&Arc<Gpu>| AccessDesc {
            location: MemLocation { kind: DEVICE, id: gpu.info().ordinal },
            flags: READ_WRITE,
        };
        let all: Vec<_> = gpus.iter().map(access).collect();
        let driver = self.gpu.current()?;
        // SAFETY: the driver reads as many descriptions as there are.
        driver.check("cuMemSetAccess", unsafe {
            (driver.table.mem_access)(self.base, self.bytes(), all.as_ptr(), all.len())
        })
    }

    /// A descriptor of it for another process. Opens /dev/nvidiactl, so a process that has given up its files cannot.
    ///
    /// # Errors
    /// What the driver says.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        let driver = self.gpu.current()?;
        let mut fd: RawFd = -1;
        // SAFETY: for this type of handle the driver writes a descriptor's number.
        let answer = unsafe { (driver.table.mem_export)((&raw mut fd).cast(), self.allocation, FILE_DESCRIPTOR, 0) };
        driver.check("cuMemExportToShareableHandle", answer)?;
        // SAFETY: the driver has made it for its caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// A dma-buf of it for another device's driver.
    ///
    /// # Errors
    /// What the driver says.
    pub fn dma_buf(&self) -> Result<OwnedFd, CudaError> {
        let driver = self.gpu.current()?;
        let mut fd: RawFd = -1;
        // SAFETY: for this type of handle the driver writes a descriptor's number.
        let answer =
            unsafe { (driver.table.mem_range_handle)((&raw mut fd).cast(), self.base, self.bytes(), DMA_BUF, 0) };
        driver.check("cuMemGetHandleForAddressRange", answer)?;
        // SAFETY: the driver has made it for its caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Zeroes it. Blocks.
    ///
    /// # Errors
    /// What the driver says.
    pub fn zero(&self) -> Result<(), CudaError> {
        let stream = Stream::new(&self.gpu)?;
        // SAFETY: the memory is this slice's, which lives until the stream has passed the work: see below.
        unsafe { stream.set(self.base, 0, self.bytes() as u64) }?;
        stream.finish()
    }

    /// Whose memory it is.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty, reason = "no slice is empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Its address, for programs of this process that run on the GPU.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes that are mapped.
    fn bytes(&self) -> usize {
        sized(self.len).unwrap_or(usize::MAX)
    }
}

/// Bytes that a slice of so many takes.
fn sized(len: u64) -> Result<usize, CudaError> {
    let whole = len.checked_next_multiple_of(Slice::GRANULE).filter(|_| len > 0);
    whole.and_then(|whole| usize::try_from(whole).ok()).ok_or(CudaError::Length { len })
}

fn free(driver: &Driver, base: DevicePtr, bytes: usize) {
    // SAFETY: the addresses were reserved, and nothing is mapped there (any more).
    let _ = unsafe { (driver.table.address_free)(base, bytes) };
}

fn release(driver: &Driver, allocation: Allocation) {
    // SAFETY: whoever made the allocation gives it up.
    let _ = unsafe { (driver.table.mem_release)(allocation) };
}

impl Drop for Slice {
    fn drop(&mut self) {
        // Where the context is broken, the driver frees everything when the process ends.
        let Ok(driver) = self.gpu.current() else { return };
        // SAFETY: whoever uses the memory holds the slice.
        let _ = unsafe { (driver.table.mem_unmap)(self.base, self.bytes()) };
        free(driver, self.base, self.bytes());
        release(driver, self.allocation);
    }
}
