//! What can be wrong with a driver, a GPU, or a call of it.

use std::{fmt, io};

/// Why a GPU cannot be used, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// No library of that name can be loaded.
    #[error(
        "This machine has no CUDA driver ({library}); install NVIDIA's driver, or configure no device of the kind cuda"
    )]
    NoDriver {
        /// What was looked for.
        library: String,
        /// Why it was not found.
        source: libloading::Error,
    },
    /// The library lacks something.
    #[error("The CUDA driver has no {symbol}; it must be of CUDA 12.0 or newer")]
    Old {
        /// What it lacks.
        symbol: &'static str,
        /// What the loader says.
        source: libloading::Error,
    },
    /// No GPU is called that.
    #[error("There is no GPU {wanted}; this machine has {}", List(have))]
    NoGpu {
        /// What was asked for.
        wanted: String,
        /// What there is, as PCI addresses and UUIDs.
        have: Vec<String>,
    },
    /// The GPU, or its driver, cannot do what is needed.
    #[error("GPU {gpu} cannot {what}, which Peergate needs")]
    Unfit {
        /// PCI address.
        gpu: String,
        /// What it cannot do.
        what: &'static str,
    },
    /// There is less memory left than a slice needs.
    #[error("GPU {gpu} has no {len} bytes of memory left; give its slices less, or end what else uses it")]
    Memory {
        /// PCI address.
        gpu: String,
        /// Bytes wanted.
        len: u64,
    },
    /// A length that is none of a slice.
    #[error("A slice of a GPU cannot have {len} bytes")]
    Length {
        /// Bytes wanted.
        len: u64,
    },
    /// A call failed.
    #[error("{}", Call(call, *code, name))]
    Call {
        /// Which.
        call: &'static str,
        /// The driver's answer (`CUresult` of cuda.h).
        code: u32,
        /// Its name.
        name: String,
    },
    /// The host gives no memory, or no thread.
    #[error("Cannot {step}")]
    Host {
        /// What for.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// Answers of the driver (cuda.h, `CUresult`) that mean something here.
pub(crate) mod code {
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const NO_DEVICE: u32 = 100;
    pub(crate) const JIT_COMPILER_NOT_FOUND: u32 = 221;
    pub(crate) const NOT_READY: u32 = 600;
    pub(crate) const SYSTEM_DRIVER_MISMATCH: u32 = 803;
}

struct List<'a>(&'a [String]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("none") } else { f.write_str(&self.0.join(", ")) }
    }
}

struct Call<'a>(&'a str, u32, &'a str);

impl fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(call, number, name) = self;
        write!(f, "{call} failed with {name} ({number})")?;
        f.write_str(match *number {
            code::NO_DEVICE => "; no GPU is visible to this process: may its user open /dev/nvidia*?",
            code::SYSTEM_DRIVER_MISMATCH => "; the kernel's driver and the library are of different versions",
            _ => "",
        })
    }
}
