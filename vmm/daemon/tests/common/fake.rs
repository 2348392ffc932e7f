//! The driver of GPUs and its NVML, both without a GPU: those of `hw_cuda`'s tests, for processes of the daemon.
#![allow(dead_code, clippy::unwrap_used, reason = "each test binary uses a part; a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempPath;

/// When it is loaded the driver starts a thread, as the real one does when it starts.
const START: &str = r#"
#include <pthread.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

static void *wait_for_events(void *none)
{
	prctl(PR_SET_NAME, "cuda-events");
	/* It comes back here all the time, whether its library is still wanted or not. */
	for (;;)
		usleep(1000);
	return none;
}

__attribute__((constructor(101))) static void start(void)
{
	pthread_t thread;

	setenv("FAKE_CUDA", SETTINGS, 1);
	if (pthread_create(&thread, NULL, wait_for_events, NULL))
		abort();
}
"#;

/// The driver, with these settings of its (`hw/cuda/tests/fake`); `None`, which is said, where nothing can compile it.
pub(crate) fn driver(settings: &str) -> Option<TempPath> {
    let dir = tempfile::tempdir().unwrap();
    // Workers have no environment, where settings would be.
    let set = dir.path().join("settings.c");
    fs::write(&set, format!("#define SETTINGS \"{settings}\"\n{START}")).unwrap();
    compile(&["libcuda.c", "memory.c", "streams.c", "transfer.c"], Some(&set))
}

/// The library that knows what is between GPUs: here 18 links.
pub(crate) fn nvml() -> Option<TempPath> {
    compile(&["libnvidia-ml.c"], None)
}

fn compile(sources: &[&str], more: Option<&Path>) -> Option<TempPath> {
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../hw/cuda/tests/fake");
    let sources = sources.iter().map(|name| fake.join(name));
    // Where users without rights may read it, too.
    let library = tempfile::Builder::new().prefix("gpus-").suffix(".so").tempfile_in(env!("CARGO_TARGET_TMPDIR"));
    let library = library.unwrap().into_temp_path();
    fs::remove_file(&library).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-std=gnu11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-DFAKE_VERSION=13000"]);
    match compiler.arg("-o").arg(&*library).args(sources).args(more).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            println!("SKIP: there is no C compiler called cc ({error})");
            return None;
        }
    }
    Some(library)
}
