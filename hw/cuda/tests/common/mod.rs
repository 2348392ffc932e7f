//! Libraries of NVIDIA's that need no GPU: compiled from `tests/fake`, and loaded anew for each test.

#![allow(dead_code, unreachable_pub, reason = "shared by tests, none of which uses all")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_long};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use libloading::Library;
use tempfile::TempPath;

/// A library of a test's own: it shares nothing with that of another test.
pub struct Fake {
    library: Library,
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
        Some(Self { library, path })
    }

    /// Where it is, for [`hw_cuda`] to load it: what is set here is set there.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn library(&self) -> &Library {
        &self.library
    }

    pub fn set(&self, name: &str, value: i64) {
        let name_of = CString::new(name).unwrap();
        // SAFETY: that is the function's prototype.
        let set = unsafe { self.library.get::<unsafe extern "C" fn(*const c_char, c_long) -> c_int>("fake_set") };
        // SAFETY: it reads a string.
        let answer = unsafe { set.unwrap()(name_of.as_ptr(), value) };
        assert_eq!(answer, 0, "there is a number {name}");
    }

    pub fn get(&self, name: &str) -> i64 {
        let name_of = CString::new(name).unwrap();
        // SAFETY: that is the function's prototype.
        let get = unsafe { self.library.get::<unsafe extern "C" fn(*const c_char) -> c_long>("fake_get") };
        // SAFETY: it reads a string.
        let value = unsafe { get.unwrap()(name_of.as_ptr()) };
        assert_ne!(value, -1000, "there is a number {name}");
        value
    }
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
