//! See [`harness::fuzz::frames`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| harness::fuzz::frames(data));
