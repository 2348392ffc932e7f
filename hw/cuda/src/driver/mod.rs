//! The CUDA driver, loaded when it is needed: this program runs where there is none.
//!
//! Not here: what its functions are called for.

mod error;
mod table;

use std::ffi::{CStr, c_char, c_int};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::Arc;

use libloading::Library;

pub use error::CudaError;
pub(crate) use error::code;
use table::Table;
pub(crate) use table::{
    AccessDesc, Allocation, AllocationProp, Answer, CopyAttributes, DevicePtr, MemLocation, Opaque, Rows, RowsSide,
};

/// Where a GPU's driver is looked for.
const LIBRARY: &str = "libcuda.so.1";

/// Bytes of names that the driver gives.
const NAME: usize = 128;

/// The driver's library, initialised.
pub struct Driver {
    pub(crate) table: Table,
    /// The table's functions are in it, and so are threads that it has started: it stays as long as the process.
    _library: ManuallyDrop<Library>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Driver")
    }
}

/// A GPU, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// The driver's number of it, in this process.
    pub ordinal: i32,
    /// What it is called.
    pub name: String,
    /// As `nvidia-smi -L` prints it.
    pub uuid: String,
    /// PCI address, as Linux writes it.
    pub address: String,
    /// Bytes of memory.
    pub memory_len: u64,
}

impl Driver {
    /// Loads the driver of this machine, and starts it. Opens /dev/nvidiactl and starts no thread that touches anything else's memory.
    ///
    /// # Errors
    /// Where there is none, it is too old, or it finds no GPU.
    pub fn load() -> Result<Arc<Self>, CudaError> {
        Self::load_from(Path::new(LIBRARY))
    }

    /// The same from a library of another name, or at a path.
    ///
    /// # Errors
    /// As for [`Driver::load`].
    pub fn load_from(path: &Path) -> Result<Arc<Self>, CudaError> {
        // SAFETY: whoever configures this machine says what its CUDA driver is; that it is one cannot be known before.
        let library = unsafe { Library::new(path) };
        let library = library.map_err(|source| CudaError::NoDriver { library: path.display().to_string(), source })?;
        let table = Table::find(&library)?;
        let driver = Self { table, _library: ManuallyDrop::new(library) };
        // SAFETY: no pointer is passed.
        driver.check("cuInit", unsafe { (driver.table.init)(0) })?;
        Ok(Arc::new(driver))
    }

    /// The GPUs that this process may use.
    ///
    /// # Errors
    /// What the driver says.
    pub fn gpus(&self) -> Result<Vec<GpuInfo>, CudaError> {
        let mut count = 0;
        // SAFETY: the driver writes one number.
        self.check("cuDeviceGetCount", unsafe { (self.table.device_count)(&raw mut count) })?;
        (0..count).map(|ordinal| self.info(ordinal)).collect()
    }

    fn info(&self, ordinal: i32) -> Result<GpuInfo, CudaError> {
        let (mut device, mut uuid, mut memory) = (0, [0; 16], 0);
        // SAFETY: the driver writes one number.
        self.check("cuDeviceGet", unsafe { (self.table.device)(&raw mut device, ordinal) })?;
        // SAFETY: the driver writes 16 bytes.
        self.check("cuDeviceGetUuid", unsafe { (self.table.device_uuid)(&raw mut uuid, device) })?;
        // SAFETY: the driver writes one number.
        self.check("cuDeviceTotalMem", unsafe { (self.table.device_memory)(&raw mut memory, device) })?;
        let name = self.text("cuDeviceGetName", self.table.device_name, device)?;
        let address = self.text("cuDeviceGetPCIBusId", self.table.device_address, device)?.to_lowercase();
        Ok(GpuInfo { ordinal: device, name, uuid: shown(uuid), address, memory_len: memory as u64 })
    }

    fn text(
        &self,
        call: &'static str,
        function: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Answer,
        device: c_int,
    ) -> Result<String, CudaError> {
        let mut bytes = [0; NAME];
        let len = c_int::try_from(NAME).unwrap_or(c_int::MAX);
        // SAFETY: the driver writes at most `len` bytes, the last of which is NUL.
        self.check(call, unsafe { function(bytes.as_mut_ptr().cast(), len, device) })?;
        let text = CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned());
        Ok(text.unwrap_or_default())
    }

    /// A number that the driver knows of a GPU; 0 if it does not know that kind of number.
    pub(crate) fn attribute(&self, device: c_int, which: c_int) -> c_int {
        let mut value = 0;
        // SAFETY: the driver writes one number.
        let answer = unsafe { (self.table.device_attribute)(&raw mut value, which, device) };
        if answer == 0 { value } else { 0 }
    }

    /// Makes an error of an answer that is one.
    pub(crate) fn check(&self, call: &'static str, answer: Answer) -> Result<(), CudaError> {
        if answer == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: the driver writes one pointer, to a string of its own or null.
        let known = unsafe { (self.table.error_name)(answer, &raw mut name) } == 0 && !name.is_null();
        let name = if known {
            // SAFETY: the driver says that it is a string, and it lives as long as the library.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "an error without a name".into()
        };
        Err(CudaError::Call { call, code: answer, name })
    }
}

/// As `nvidia-smi -L` writes it.
fn shown(uuid: [u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_elsewhere() {
        let uuid = *b"\x01\x23\x45\x67\x89\xab\xcd\xef\x00\x11\x22\x33\x44\x55\x66\x77";
        assert_eq!(shown(uuid), "GPU-01234567-89ab-cdef-0011-223344556677");
    }

    #[test]
    fn a_machine_without_a_driver_gets_one_clear_line() {
        let error = Driver::load_from(Path::new("libcuda-of-nobody.so.1")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "This machine has no CUDA driver (libcuda-of-nobody.so.1); install NVIDIA's driver, or configure no device of the kind cuda"
        );
    }
}
