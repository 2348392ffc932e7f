//! The driver without a GPU notices what the others' tests count on it to notice.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::ffi::{c_int, c_uint, c_void};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::ptr::null_mut;

use common::Fake;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

/// A function of the driver, called.
macro_rules! call {
    ($fake:expr, $name:literal($($argument:expr => $type:ty),*)) => {{
        // SAFETY: that is the function's prototype.
        let function = unsafe { $fake.loaded().get::<unsafe extern "C" fn($($type),*) -> c_uint>($name) }.unwrap();
        // SAFETY: what is passed lives as long as the call, and longer where the driver keeps it.
        unsafe { function($($argument),*) }
    }};
}

/// Memory of a file, mapped until this goes.
struct Mapped(*mut c_void, File);

impl Mapped {
    fn new() -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(MIB as u64).unwrap();
        let (both, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the kernel chooses the place.
        let at = unsafe { mmap(null_mut(), MIB, both, flags, &file, 0) }.unwrap();
        Self(at, file)
    }

    fn at(&self) -> u64 {
        self.0 as u64
    }

    fn byte(&self, at: u64) -> u8 {
        let mut byte = [0];
        self.1.read_exact_at(&mut byte, at).unwrap();
        byte[0]
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference into it.
        unsafe { munmap(self.0, MIB) }.unwrap();
    }
}

/// A driver with 2 MiB of a GPU at an address, and a stream.
struct Bed {
    fake: Fake,
    stream: *mut c_void,
    device: u64,
}

impl Bed {
    fn new() -> Option<Self> {
        let fake = Fake::cuda()?;
        let (mut context, mut stream): (*mut c_void, *mut c_void) = (null_mut(), null_mut());
        let (mut handle, mut device) = (0_u64, 0_u64);
        let properties: [c_int; 8] = [1, 1, 1, 0, 0, 0, 0, 0];
        let access: [c_int; 3] = [1, 0, 3];
        assert_eq!(call!(fake, "cuInit"(0 => c_uint)), 0);
        assert_eq!(call!(fake, "cuDevicePrimaryCtxRetain"(&raw mut context => *mut *mut c_void, 0 => c_int)), 0);
        assert_eq!(call!(fake, "cuCtxSetCurrent"(context => *mut c_void)), 0);
        assert_eq!(call!(fake, "cuStreamCreate"(&raw mut stream => *mut *mut c_void, 1 => c_uint)), 0);
        let properties = properties.as_ptr();
        assert_eq!(
            call!(fake, "cuMemCreate"(&raw mut handle => *mut u64, 2 * MIB => usize, properties => *const c_int, 0 => u64)),
            0
        );
        let reserve = call!(fake, "cuMemAddressReserve"(&raw mut device => *mut u64, 2 * MIB => usize, 0 => usize, 0 => u64, 0 => u64));
        assert_eq!(reserve, 0);
        assert_eq!(call!(fake, "cuMemMap"(device => u64, 2 * MIB => usize, 0 => usize, handle => u64, 0 => u64)), 0);
        let bed = Self { fake, stream, device };
        assert_eq!(bed.copy(device, device + 64, 4), 1, "no access yet");
        let access = access.as_ptr();
        assert_eq!(
            call!(bed.fake, "cuMemSetAccess"(device => u64, 2 * MIB => usize, access => *const c_int, 1 => usize)),
            0
        );
        Some(bed)
    }

    fn register(&self, at: u64, len: usize) -> c_uint {
        call!(self.fake, "cuMemHostRegister_v2"(at => u64, len => usize, 3 => c_uint))
    }

    fn unregister(&self, at: u64) -> c_uint {
        call!(self.fake, "cuMemHostUnregister"(at => u64))
    }

    fn copy(&self, dst: u64, src: u64, len: usize) -> c_uint {
        call!(self.fake, "cuMemcpyAsync"(dst => u64, src => u64, len => usize, self.stream => *mut c_void))
    }

    fn synchronize(&self) -> c_uint {
        call!(self.fake, "cuStreamSynchronize"(self.stream => *mut c_void))
    }

    fn violations(&self) -> i64 {
        self.fake.get("violations")
    }
}

#[test]
fn bytes_go_in_and_out_in_the_order_of_the_stream() {
    let Some(bed) = Bed::new() else { return };
    let host = Mapped::new();
    assert_eq!(bed.register(host.at(), MIB), 0);
    host.1.write_all_at(&[7], 0).unwrap();
    assert_eq!(bed.copy(bed.device + 100_001, host.at(), 4), 0);
    assert_eq!(bed.copy(host.at() + 8, bed.device + 100_001, 4), 0);
    let done = host.at() + 16;
    let write =
        call!(bed.fake, "cuStreamWriteValue32_v2"(bed.stream => *mut c_void, done => u64, 9 => u32, 0 => c_uint));
    assert_eq!((write, bed.synchronize()), (0, 0));
    assert_eq!((host.byte(8), host.byte(16)), (7, 9));
    assert_eq!((bed.violations(), bed.fake.get("pageable"), bed.fake.get("executed")), (0, 0, 3));
}

#[test]
fn memory_that_is_not_in_one_registration_is_refused_or_counted() {
    let Some(bed) = Bed::new() else { return };
    let host = Mapped::new();
    assert_eq!(bed.copy(bed.device, host.at(), 64), 0);
    assert_eq!((bed.synchronize(), bed.fake.get("pageable")), (0, 1));
    let seam = host.at() + PAGE as u64;
    assert_eq!((bed.register(host.at(), PAGE), bed.register(seam, PAGE)), (0, 0));
    assert_eq!((bed.copy(bed.device, seam - 8, 8), bed.copy(bed.device, seam - 8, 9)), (0, 1));
    assert_eq!(bed.copy(bed.device, seam + 8, PAGE), 1, "its end is nobody's");
    assert_eq!((bed.register(seam - 1, 2), bed.unregister(seam + 1)), (712, 713));
    assert_eq!(bed.copy(bed.device + (2 * MIB as u64) - 8, bed.device, 9), 1, "past the end of the slice");
    assert_eq!((bed.synchronize(), bed.violations(), bed.fake.get("pageable")), (0, 0, 1));
}

#[test]
fn memory_that_goes_too_early_is_a_violation() {
    let Some(bed) = Bed::new() else { return };
    let host = Mapped::new();
    let idle = host.at() + PAGE as u64;
    assert_eq!((bed.register(host.at(), PAGE), bed.register(idle, PAGE)), (0, 0));
    bed.fake.set("stall", 1);
    assert_eq!(bed.copy(bed.device, host.at(), 64), 0);
    assert_eq!((bed.unregister(idle), bed.violations()), (0, 0));
    assert_eq!((bed.unregister(host.at()), bed.violations()), (0, 1));
    bed.fake.set("stall", 0);
    assert_eq!(bed.synchronize(), 0);
    // Unmapped while it is registered, and something else there.
    assert_eq!(bed.register(host.at(), MIB), 0);
    let (at, other, both) = (host.0, Mapped::new(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: it replaces memory of this test that nobody refers to.
    unsafe { mmap(at, MIB, both, MapFlags::SHARED | MapFlags::FIXED, &other.1, 0) }.unwrap();
    assert_eq!((bed.copy(bed.device, host.at(), 64), bed.synchronize(), bed.violations()), (0, 0, 2));
    assert_eq!((bed.unregister(host.at()), bed.violations()), (0, 3));
    // Device memory, and ends of a copy that overlap.
    bed.fake.set("stall", 1);
    assert_eq!((bed.copy(bed.device, bed.device + 8, 9), bed.violations()), (0, 4));
    let unmap = call!(bed.fake, "cuMemUnmap"(bed.device => u64, 2 * MIB => usize));
    assert_eq!((unmap, bed.violations()), (0, 5));
}

#[test]
fn a_context_that_has_failed_does_nothing_more() {
    let Some(bed) = Bed::new() else { return };
    let host = Mapped::new();
    assert_eq!(bed.register(host.at(), MIB), 0);
    bed.fake.set("stall", 1);
    bed.fake.set("fault_after", 1);
    let copy = |n: u64| bed.copy(host.at() + 64 * n, bed.device, 64);
    assert_eq!([0, 1, 2].map(copy), [0; 3]);
    bed.fake.set("stall", 0);
    assert_eq!((bed.synchronize(), copy(3), bed.register(host.at(), 1)), (700, 700, 700));
    assert_eq!((bed.fake.get("queued"), bed.violations()), (0, 0));
    assert_eq!((host.byte(0), host.byte(128)), (0xd7, 0), "fresh memory is not zero");
}

#[test]
fn a_lost_gpu_answers_nothing_else() {
    let Some(bed) = Bed::new() else { return };
    assert_eq!(bed.synchronize(), 0);
    bed.fake.set("lost", 1);
    assert_eq!((bed.synchronize(), bed.copy(bed.device, bed.device + 64, 4)), (46, 46));
}
