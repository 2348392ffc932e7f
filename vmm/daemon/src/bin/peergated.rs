//! The daemon; see [`vmm_daemon::peergated`].
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    vmm_daemon::peergated::main()
}
