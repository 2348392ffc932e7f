//! The `pgctl` program; see the library of the same name.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    pgctl::main()
}
