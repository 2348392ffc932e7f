//! The operator's command; see [`vmm_daemon::cli`].
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    vmm_daemon::cli::main()
}
