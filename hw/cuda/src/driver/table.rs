//! The functions of the driver's library that are used here, with the types of cuda.h (CUDA 13.0).
//!
//! Not here: what they are called for.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

use super::error::CudaError;

/// `CUresult`
pub(crate) type Answer = c_uint;
/// `CUdeviceptr`
pub(crate) type DevicePtr = u64;
/// `CUmemGenericAllocationHandle`
pub(crate) type Allocation = u64;
/// `CUcontext`, `CUstream`
pub(crate) type Opaque = *mut c_void;

/// `CUmemLocation`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemLocation {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// `CUmemAllocationProp`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocationProp {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location: MemLocation,
    pub(crate) win32: *mut c_void,
    pub(crate) compression: u8,
    pub(crate) rdma: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccessDesc {
    pub(crate) location: MemLocation,
    pub(crate) flags: c_int,
}

/// `CUmemcpyAttributes`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyAttributes {
    pub(crate) order: c_int,
    pub(crate) src_hint: MemLocation,
    pub(crate) dst_hint: MemLocation,
    pub(crate) flags: c_uint,
}

/// One side of a `CUDA_MEMCPY2D`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowsSide {
    pub(crate) x: usize,
    pub(crate) y: usize,
    pub(crate) kind: c_int,
    pub(crate) host: *mut c_void,
    pub(crate) device: DevicePtr,
    pub(crate) array: Opaque,
    pub(crate) pitch: usize,
}

/// `CUDA_MEMCPY2D`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) src: RowsSide,
    pub(crate) dst: RowsSide,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

const _: () = {
    assert!(size_of::<Rows>() == 128);
    assert!(size_of::<AllocationProp>() == 32);
    assert!(size_of::<AccessDesc>() == 12);
    assert!(size_of::<CopyAttributes>() == 24);
};

/// `cuMemcpyBatchAsync_v2`
pub(crate) type BatchCopy = unsafe extern "C" fn(
    *const DevicePtr,
    *const DevicePtr,
    *const usize,
    usize,
    *const CopyAttributes,
    *const usize,
    usize,
    Opaque,
) -> Answer;

macro_rules! table {
    ($($field:ident: $symbol:literal = fn($($argument:ty),*);)*) => {
        /// Pointers to the driver's functions. They live as long as the library that they came from.
        pub(crate) struct Table {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> Answer,)*
            /// Copies many at a time; drivers before CUDA 13 have none of this shape.
            pub(crate) batch: Option<BatchCopy>,
        }

        impl Table {
            pub(crate) fn find(library: &Library) -> Result<Self, CudaError> {
                let old = |symbol| move |source| CudaError::Old { symbol, source };
                Ok(Self {
                    // SAFETY: these are the prototypes of cuda.h under the names that it gives them for 64-bit machines.
                    $($field: *unsafe { library.get($symbol) }.map_err(old($symbol))?,)*
                    // SAFETY: as above.
                    batch: unsafe { library.get("cuMemcpyBatchAsync_v2") }.ok().map(|found| *found),
                })
            }
        }
    };
}

table! {
    init: "cuInit" = fn(c_uint);
    error_name: "cuGetErrorName" = fn(Answer, *mut *const c_char);
    device_count: "cuDeviceGetCount" = fn(*mut c_int);
    device: "cuDeviceGet" = fn(*mut c_int, c_int);
    device_name: "cuDeviceGetName" = fn(*mut c_char, c_int, c_int);
    device_uuid: "cuDeviceGetUuid_v2" = fn(*mut [u8; 16], c_int);
    device_address: "cuDeviceGetPCIBusId" = fn(*mut c_char, c_int, c_int);
    device_attribute: "cuDeviceGetAttribute" = fn(*mut c_int, c_int, c_int);
    device_memory: "cuDeviceTotalMem_v2" = fn(*mut usize, c_int);
    can_access_peer: "cuDeviceCanAccessPeer" = fn(*mut c_int, c_int, c_int);
    peer_attribute: "cuDeviceGetP2PAttribute" = fn(*mut c_int, c_int, c_int, c_int);
    context_retain: "cuDevicePrimaryCtxRetain" = fn(*mut Opaque, c_int);
    context_release: "cuDevicePrimaryCtxRelease_v2" = fn(c_int);
    context_set: "cuCtxSetCurrent" = fn(Opaque);
    stream_create: "cuStreamCreate" = fn(*mut Opaque, c_uint);
    stream_destroy: "cuStreamDestroy_v2" = fn(Opaque);
    stream_query: "cuStreamQuery" = fn(Opaque);
    module_load: "cuModuleLoadData" = fn(*mut Opaque, *const c_void);
    module_function: "cuModuleGetFunction" = fn(*mut Opaque, Opaque, *const c_char);
    launch: "cuLaunchKernel" = fn(Opaque, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Opaque, *mut Opaque, *mut Opaque);
    stream_write: "cuStreamWriteValue32_v2" = fn(Opaque, DevicePtr, u32, c_uint);
    mem_create: "cuMemCreate" = fn(*mut Allocation, usize, *const AllocationProp, u64);
    mem_release: "cuMemRelease" = fn(Allocation);
    address_reserve: "cuMemAddressReserve" = fn(*mut DevicePtr, usize, usize, DevicePtr, u64);
    address_free: "cuMemAddressFree" = fn(DevicePtr, usize);
    mem_map: "cuMemMap" = fn(DevicePtr, usize, usize, Allocation, u64);
    mem_unmap: "cuMemUnmap" = fn(DevicePtr, usize);
    mem_access: "cuMemSetAccess" = fn(DevicePtr, usize, *const AccessDesc, usize);
    mem_export: "cuMemExportToShareableHandle" = fn(*mut c_void, Allocation, c_int, u64);
    mem_import: "cuMemImportFromShareableHandle" = fn(*mut Allocation, *mut c_void, c_int);
    mem_range_handle: "cuMemGetHandleForAddressRange" = fn(*mut c_void, DevicePtr, usize, c_int, u64);
    host_register: "cuMemHostRegister_v2" = fn(*mut c_void, usize, c_uint);
    host_unregister: "cuMemHostUnregister" = fn(*mut c_void);
    copy: "cuMemcpyAsync" = fn(DevicePtr, DevicePtr, usize, Opaque);
    copy_rows: "cuMemcpy2DAsync_v2" = fn(*const Rows, Opaque);
    set: "cuMemsetD8Async" = fn(DevicePtr, u8, usize, Opaque);
    flush_writes: "cuFlushGPUDirectRDMAWrites" = fn(c_int, c_int);
}
