//! A kernel that faults in one process's context of a real GPU: that process's transfers end with an error, and nobody else notices. Says so if this
//! machine has no GPU. What has no GPU is in `failure.rs`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::ffi::{c_char, c_uint, c_void};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::{endpoint, file, own, transfer};
use hw_cuda::{CudaEngine, Driver, Gpu, Settings, Slice};
use hw_engine::{DmaEngine, EngineError, Finished, Memory, Owner, Submit};
use hw_host::HostMemory;
use libloading::Library;

const NAME: &str = "a_kernel_that_faults_is_one_process_s_trouble";
const CHILD: &str = "PEERGATE_FAULTS";
const LEN: u64 = 4 << 20;

/// Writes to an address where nothing is.
const FAULT: &str = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry fault()\n{\n.reg .u64 %at;\nmov.u64 %at, 16;\nst.global.u32 [%at], 1;\nret;\n}\n\0";

/// An engine over a slice and an aperture of the host's memory, of so many bytes each.
fn world(driver: &Arc<Driver>, len: u64) -> (CudaEngine, Arc<HostMemory>) {
    let first = driver.gpus().unwrap().first().unwrap().address.clone();
    let slice = Slice::new(&Gpu::open(driver, &first).unwrap(), len).unwrap();
    let memory = Arc::new(HostMemory::new());
    memory.add_aperture(endpoint(1), &file(len), len).unwrap();
    (CudaEngine::new(vec![(endpoint(0), slice)], memory.clone(), Settings::default(), None).unwrap(), memory)
}

fn engine(driver: &Arc<Driver>) -> CudaEngine {
    world(driver, LEN).0
}

/// One copy out of the slice, and how it ended.
fn copy(engine: &CudaEngine, job: u64) -> Result<(), EngineError> {
    let work = common::copy(own(1, 0), own(0, 0), LEN);
    assert_eq!(engine.submit(&transfer(job, 0, work))?, Submit::Submitted);
    engine.doorbell();
    let (start, mut ended) = (Instant::now(), Vec::new());
    while ended.is_empty() {
        engine.poll(&mut ended);
        assert!(start.elapsed() < Duration::from_secs(30), "a copy ends");
    }
    ended[0].result
}

/// Loads the kernel into the context that is the calling thread's, which may wait for what is under way there; what is answered runs it.
fn fault() -> impl FnOnce() {
    type Load = unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> c_uint;
    type Function = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const c_char) -> c_uint;
    type Numbers = [c_uint; 7];
    type Launch = unsafe extern "C" fn(
        *mut c_void,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        *mut c_void,
        *mut c_void,
        *mut c_void,
    ) -> c_uint;
    // SAFETY: it is the driver's library, which is loaded already.
    let library = unsafe { Library::new("libcuda.so.1") }.unwrap();
    let (mut module, mut function, none) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the prototype of cuda.h.
    let load = unsafe { library.get::<Load>("cuModuleLoadData") }.unwrap();
    // SAFETY: it reads a string and writes a pointer.
    assert_eq!(unsafe { load(&raw mut module, FAULT.as_ptr().cast()) }, 0);
    // SAFETY: the prototype of cuda.h.
    let get = unsafe { library.get::<Function>("cuModuleGetFunction") }.unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { get(&raw mut function, module, c"fault".as_ptr()) }, 0);
    move || {
        // SAFETY: the prototype of cuda.h.
        let launch = unsafe { library.get::<Launch>("cuLaunchKernel") }.unwrap();
        let [x, y, z, a, b, c, shared]: Numbers = [1, 1, 1, 1, 1, 1, 0];
        // SAFETY: the kernel takes nothing; what it breaks is this context.
        assert_eq!(unsafe { launch(function, x, y, z, a, b, c, shared, none, none, none) }, 0);
    }
}

/// What the process does whose kernel faults.
fn child() {
    let engine = engine(&Driver::load().unwrap());
    let (told, is_told) = channel();
    engine.on_lost(Box::new(move |error| told.send(error.to_string()).unwrap()));
    assert_eq!(copy(&engine, 1), Ok(()));
    fault()();
    let start = Instant::now();
    let error = loop {
        assert!(start.elapsed() < Duration::from_secs(30), "the context breaks");
        if let Err(error) = copy(&engine, 2) {
            break error;
        }
    };
    assert!(matches!(error, EngineError::Device { .. }), "{error:?}");
    assert_eq!(copy(&engine, 3), Err(EngineError::LOST));
    println!("lost: {}", is_told.recv_timeout(Duration::from_secs(30)).unwrap());
}

#[test]
fn a_kernel_that_faults_is_one_process_s_trouble() {
    if std::env::var_os(CHILD).is_some() {
        return child();
    }
    let Some(driver) = common::real() else { return };
    let engine = engine(&driver);
    assert_eq!(copy(&engine, 1), Ok(()));
    for _ in 0..2 {
        let mut faulting = Command::new(std::env::current_exe().unwrap());
        faulting.args(["--exact", NAME, "--nocapture"]).env(CHILD, "1").stdout(Stdio::piped());
        let mut faulting = faulting.spawn().unwrap();
        let mut copies = 0;
        while faulting.try_wait().unwrap().is_none() {
            copies += 1;
            assert_eq!(copy(&engine, 1 + copies), Ok(()), "another process's trouble");
        }
        let output = faulting.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("lost: "), "{text}");
        println!("{copies} copies went well meanwhile; the other process said: {text}");
        assert!(copies > 0);
    }
}

/// What the process does whose kernel faults while copies are under way for longer than it takes to notice that.
fn busy_child() {
    const LONG: u64 = 128 << 20;
    const COUNT: usize = 200;
    let (engine, memory) = world(&Driver::load().unwrap(), LONG);
    engine.write_own(endpoint(0), 0, &[0xff; 4096]).unwrap();
    let long = |job| transfer(job, 0, common::copy(own(1, 0), own(0, 0), LONG));
    let (mut ended, start) = (Vec::new(), Instant::now());
    let collect = |ended: &mut Vec<Finished>, count| {
        while ended.len() < count {
            engine.poll(ended);
            assert!(start.elapsed() < Duration::from_secs(30), "{} of {count} copies have ended", ended.len());
        }
    };
    // The memory is registered first.
    engine.submit(&long(0)).unwrap();
    collect(&mut ended, 1);
    let (told, is_told) = channel();
    engine.on_lost(Box::new(move |_| told.send(()).unwrap()));
    let fault = fault();
    for job in (1..).take(COUNT) {
        engine.submit(&long(job)).unwrap();
    }
    engine.doorbell();
    fault();
    let when_lost = loop {
        engine.poll(&mut ended);
        if is_told.try_recv().is_ok() {
            break ended.len();
        }
        assert!(start.elapsed() < Duration::from_secs(30), "the context breaks");
    };
    assert!(when_lost < 1 + COUNT, "some are under way");
    // The GPU goes on, and each of them ends when it has.
    collect(&mut ended, 1 + COUNT);
    assert!(ended.iter().all(|end| (end.bytes, end.result) == (LONG, Ok(()))), "{ended:?}");
    // Whoever was told so may use the memory for something else.
    memory.fill(own(1, 0), LONG, 0).unwrap();
    let begun = Instant::now();
    let mut bytes = [0; 4096];
    while begun.elapsed() < Duration::from_millis(500) {
        memory.read(own(1, 0), &mut bytes).unwrap();
        assert!(bytes == [0; 4096], "after the last end the GPU writes nothing");
    }
    println!(
        "{when_lost} of {} copies had ended when the context was seen to be broken, and all in the end",
        1 + COUNT
    );
}

#[test]
fn what_a_broken_context_has_begun_ends_when_the_gpu_has_done_it() {
    if std::env::var_os(CHILD).is_some() {
        return busy_child();
    }
    if common::real().is_none() {
        return;
    }
    let mut faulting = Command::new(std::env::current_exe().unwrap());
    let name = "what_a_broken_context_has_begun_ends_when_the_gpu_has_done_it";
    let output = faulting.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("all in the end"), "{out}{err}");
    println!("{out}");
}
