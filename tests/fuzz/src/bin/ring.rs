//! See [`harness::fuzz::ring`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| harness::fuzz::ring(data));
