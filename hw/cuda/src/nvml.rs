//! [`Nvml`]: what a GPU draws and what is between two of them, from NVIDIA's management library, loaded when it is needed: this program runs where there is none.
//!
//! Not here: anything that changes a GPU.

mod link;

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::path::Path;
use std::sync::Arc;

use libloading::Library;

pub use link::{Link, PciePath};

/// Where the library is looked for.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// Bytes of a text that the library gives (`NVML_DEVICE_NAME_V2_BUFFER_SIZE`, the longest of those asked for).
const TEXT: usize = 96;

/// Answers of the library (nvml.h, `nvmlReturn_t`) that mean something here.
mod code {
    use std::ffi::c_int;

    pub(super) const INVALID_ARGUMENT: c_int = 2;
    pub(super) const NOT_SUPPORTED: c_int = 3;
    pub(super) const NO_PERMISSION: c_int = 4;
    pub(super) const NOT_FOUND: c_int = 6;
    pub(super) const DRIVER_NOT_LOADED: c_int = 9;
    pub(super) const GPU_IS_LOST: c_int = 15;
    pub(super) const VERSION_MISMATCH: c_int = 18;
}

/// Why something of a GPU is not known.
#[derive(Debug, thiserror::Error)]
pub enum NvmlError {
    /// No library of that name can be loaded.
    #[error("This machine has no NVML ({library}); install NVIDIA's driver to measure GPUs")]
    NoLibrary {
        /// What was looked for.
        library: String,
        /// Why it was not found.
        source: libloading::Error,
    },
    /// The library lacks something.
    #[error("NVML has no {symbol}; install a driver of version 470 or newer")]
    Old {
        /// What it lacks.
        symbol: &'static str,
        /// What the loader says.
        source: libloading::Error,
    },
    /// No GPU is called that.
    #[error("NVML knows no GPU {wanted}; name it as nvidia-smi -L or lspci -D prints it")]
    NoGpu {
        /// What was asked for.
        wanted: String,
    },
    /// The GPU does not measure that.
    #[error("This GPU does not say {what}")]
    Unmeasured {
        /// What was asked for.
        what: &'static str,
    },
    /// A call failed.
    #[error("{call} failed: {said} ({code}){}", advice(*code))]
    Call {
        /// Which.
        call: &'static str,
        /// The library's answer.
        code: i32,
        /// What it says of that.
        said: String,
    },
}

/// What to do about an answer.
fn advice(code: c_int) -> &'static str {
    match code {
        code::DRIVER_NOT_LOADED => "; load the kernel's driver (modprobe nvidia)",
        code::VERSION_MISMATCH => {
            "; the kernel's driver and the library are of different versions: restart after an update"
        }
        code::NO_PERMISSION => "; let this user open /dev/nvidiactl",
        code::GPU_IS_LOST => "; it has fallen off the bus: see the kernel's log, and restart",
        _ => "",
    }
}

/// `nvmlReturn_t`
type Answer = c_int;
/// `nvmlDevice_t`
type Device = *mut c_void;

macro_rules! table {
    ($($field:ident: $symbol:literal = fn($($argument:ty),*) -> $answer:ty;)*) => {
        /// Pointers to the library's functions. They live as long as it does.
        struct Table {
            $($field: unsafe extern "C" fn($($argument),*) -> $answer,)*
        }

        impl Table {
            fn find(library: &Library) -> Result<Self, NvmlError> {
                let old = |symbol| move |source| NvmlError::Old { symbol, source };
                Ok(Self {
                    // SAFETY: these are the prototypes of nvml.h, under the names that it gives them.
                    $($field: *unsafe { library.get($symbol) }.map_err(old($symbol))?,)*
                })
            }
        }
    };
}

table! {
    init: "nvmlInit_v2" = fn() -> Answer;
    shutdown: "nvmlShutdown" = fn() -> Answer;
    error_string: "nvmlErrorString" = fn(Answer) -> *const c_char;
    driver_version: "nvmlSystemGetDriverVersion" = fn(*mut c_char, c_uint) -> Answer;
    by_uuid: "nvmlDeviceGetHandleByUUID" = fn(*const c_char, *mut Device) -> Answer;
    by_address: "nvmlDeviceGetHandleByPciBusId_v2" = fn(*const c_char, *mut Device) -> Answer;
    name: "nvmlDeviceGetName" = fn(Device, *mut c_char, c_uint) -> Answer;
    power: "nvmlDeviceGetPowerUsage" = fn(Device, *mut c_uint) -> Answer;
    energy: "nvmlDeviceGetTotalEnergyConsumption" = fn(Device, *mut c_ulonglong) -> Answer;
    peer_status: "nvmlDeviceGetP2PStatus" = fn(Device, Device, c_int, *mut c_int) -> Answer;
    ancestor: "nvmlDeviceGetTopologyCommonAncestor" = fn(Device, Device, *mut c_int) -> Answer;
    pci: "nvmlDeviceGetPciInfo_v3" = fn(Device, *mut link::PciInfo) -> Answer;
    nvlink_state: "nvmlDeviceGetNvLinkState" = fn(Device, c_uint, *mut c_int) -> Answer;
    nvlink_remote: "nvmlDeviceGetNvLinkRemotePciInfo_v2" = fn(Device, c_uint, *mut link::PciInfo) -> Answer;
}

/// The library, initialised.
pub struct Nvml {
    table: Table,
    /// The table's functions are in it.
    _library: Library,
}

impl std::fmt::Debug for Nvml {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Nvml")
    }
}

impl Nvml {
    /// Loads the library of this machine.
    ///
    /// # Errors
    /// Where there is none, or no driver that it works with.
    pub fn load() -> Result<Arc<Self>, NvmlError> {
        Self::load_from(Path::new(LIBRARY))
    }

    /// The same from a library of another name, or at a path.
    ///
    /// # Errors
    /// As for [`Nvml::load`].
    pub fn load_from(path: &Path) -> Result<Arc<Self>, NvmlError> {
        // SAFETY: whoever configures this machine says what its NVML is; that it is one cannot be known before.
        let library = unsafe { Library::new(path) };
        let library = library.map_err(|source| NvmlError::NoLibrary { library: path.display().to_string(), source })?;
        let table = Table::find(&library)?;
        // SAFETY: no pointer is passed.
        let answer = unsafe { (table.init)() };
        table.check("nvmlInit", answer)?;
        Ok(Arc::new(Self { table, _library: library }))
    }

    /// Version of the driver, such as `580.159.04`.
    ///
    /// # Errors
    /// What the library says.
    pub fn driver_version(&self) -> Result<String, NvmlError> {
        // SAFETY: the library writes at most `len` bytes, the last of which is NUL.
        self.table.text("nvmlSystemGetDriverVersion", |text, len| unsafe { (self.table.driver_version)(text, len) })
    }

    /// A GPU, named by its UUID as `nvidia-smi -L` prints it or by its PCI address.
    ///
    /// # Errors
    /// Where there is no such GPU.
    pub fn meter(self: &Arc<Self>, which: &str) -> Result<Meter, NvmlError> {
        let no_gpu = || NvmlError::NoGpu { wanted: which.into() };
        // What holds a NUL is no GPU's name.
        let name = CString::new(which).ok().ok_or_else(no_gpu)?;
        let is_uuid = which.get(..4).is_some_and(|start| start.eq_ignore_ascii_case("GPU-"));
        let (call, function) = if is_uuid {
            ("nvmlDeviceGetHandleByUUID", self.table.by_uuid)
        } else {
            ("nvmlDeviceGetHandleByPciBusId", self.table.by_address)
        };
        let mut device = std::ptr::null_mut();
        // SAFETY: the library reads a string and writes one pointer.
        match unsafe { function(name.as_ptr(), &raw mut device) } {
            code::NOT_FOUND | code::INVALID_ARGUMENT => Err(no_gpu()),
            answer => {
                self.table.check(call, answer)?;
                Ok(Meter { nvml: Arc::clone(self), device: device as usize })
            }
        }
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: no pointer is passed; every meter holds `self`, and so has gone.
        let _ = unsafe { (self.table.shutdown)() };
    }
}

impl Table {
    /// Makes an error of an answer that is one.
    fn check(&self, call: &'static str, answer: Answer) -> Result<(), NvmlError> {
        if answer == 0 {
            return Ok(());
        }
        // SAFETY: no pointer is passed.
        let said = unsafe { (self.error_string)(answer) };
        let said = if said.is_null() {
            "an error without a name".into()
        } else {
            // SAFETY: it is a string of the library's own, which lives as long as that.
            unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned()
        };
        Err(NvmlError::Call { call, code: answer, said })
    }

    fn text(&self, call: &'static str, ask: impl FnOnce(*mut c_char, c_uint) -> Answer) -> Result<String, NvmlError> {
        let mut bytes = [0_u8; TEXT];
        let len = c_uint::try_from(TEXT).unwrap_or(c_uint::MAX);
        self.check(call, ask(bytes.as_mut_ptr().cast(), len))?;
        let text = CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned());
        Ok(text.unwrap_or_default())
    }

    /// The same for what not every GPU measures.
    fn measured(&self, call: &'static str, what: &'static str, answer: Answer) -> Result<(), NvmlError> {
        if answer == code::NOT_SUPPORTED {
            return Err(NvmlError::Unmeasured { what });
        }
        self.check(call, answer)
    }
}

/// Measures one GPU.
#[derive(Debug)]
pub struct Meter {
    nvml: Arc<Nvml>,
    /// The library's handle. Any thread may use it.
    device: usize,
}

impl Meter {
    fn device(&self) -> Device {
        self.device as Device
    }

    /// What the GPU is called.
    ///
    /// # Errors
    /// What the library says.
    pub fn name(&self) -> Result<String, NvmlError> {
        let table = &self.nvml.table;
        // SAFETY: the handle is the library's own; it writes at most `len` bytes, the last of which is NUL.
        table.text("nvmlDeviceGetName", |text, len| unsafe { (table.name)(self.device(), text, len) })
    }

    /// What the GPU and its memory draw, in milliwatts, as a mean over the last second on most (nvml.h, `nvmlDeviceGetPowerUsage`).
    ///
    /// # Errors
    /// Where the GPU does not say.
    pub fn power(&self) -> Result<u32, NvmlError> {
        let (table, mut milliwatts) = (&self.nvml.table, 0);
        // SAFETY: the handle is the library's own; it writes one number.
        let answer = unsafe { (table.power)(self.device(), &raw mut milliwatts) };
        table.measured("nvmlDeviceGetPowerUsage", "what power it draws", answer)?;
        Ok(milliwatts)
    }

    /// What it has used since its driver was loaded, in millijoules (nvml.h, `nvmlDeviceGetTotalEnergyConsumption`).
    ///
    /// # Errors
    /// Where the GPU does not say, as those before Volta.
    pub fn energy(&self) -> Result<u64, NvmlError> {
        let (table, mut millijoules) = (&self.nvml.table, 0);
        // SAFETY: the handle is the library's own; it writes one number.
        let answer = unsafe { (table.energy)(self.device(), &raw mut millijoules) };
        table.measured("nvmlDeviceGetTotalEnergyConsumption", "what energy it has used", answer)?;
        Ok(millijoules)
    }
}
