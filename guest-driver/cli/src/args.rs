//! The command line: what can be asked, and how sizes, rights and keys are written.
//!
//! Not here: doing it.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use peergate_guest::{Access, TransferPath};

use crate::fpga::Cipher;

/// Moves bytes between the endpoints of a Peergate device.
#[derive(Debug, Parser)]
#[command(name = "pgctl", version, max_term_width = 110)]
pub struct Cli {
    /// Device file
    #[arg(long, global = true, value_name = "FILE", default_value = "/dev/peergate0")]
    pub device: PathBuf,
    /// One JSON object a line in place of text
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the devices of this machine and their endpoints
    List,
    /// Show limits and endpoints of the device
    Info,
    /// Copy between two endpoints' memory, verify it, measure it
    Copy(CopyArgs),
    /// Fill an endpoint's memory with a pattern, verify it, measure it
    Fill(FillArgs),
    /// Ask for, grant or withdraw a peer right; it lasts as long as this command runs
    Peer(PeerArgs),
    /// Encrypt a file on an FPGA: file, GPU memory, FPGA memory, ChaCha20, and the way back
    Run(RunArgs),
    /// Show events; a program sees those of its own open of the device alone
    Events(EventsArgs),
    /// Try what the device must do and what it must refuse
    Selftest(SelftestArgs),
    /// Take orders from standard input and carry them out; meant for tests and demos
    #[command(after_help = crate::actor::ORDERS)]
    Act(ActArgs),
}

/// Arguments of `copy`.
#[derive(Debug, Args)]
pub struct CopyArgs {
    /// Endpoint to copy from, by name or number
    #[arg(long, value_name = "ENDPOINT")]
    pub from: String,
    /// Endpoint to copy to, by name or number
    #[arg(long, value_name = "ENDPOINT")]
    pub to: String,
    /// Bytes to copy, such as 4096, 64K, 64M, 1G (binary); the file's length if there is a file
    #[arg(long, value_parser = size, required_unless_present = "file")]
    pub size: Option<u64>,
    /// Copy the bytes of this file; a pattern without it
    #[arg(long, value_name = "IN")]
    pub file: Option<PathBuf>,
    /// Write the bytes that arrived into this file
    #[arg(long, value_name = "OUT")]
    pub out: Option<PathBuf>,
    /// Read the bytes back and compare them
    #[arg(long)]
    pub verify: bool,
    /// Copy so many times
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// Copy the other way at the same time
    #[arg(long)]
    pub both: bool,
    /// Endpoint whose engine moves the bytes, by name or number; the one to copy from without it
    #[arg(long, value_name = "ENDPOINT")]
    pub by: Option<String>,
    /// Fail unless every byte takes this path
    #[arg(long, value_name = "PATH", value_enum)]
    pub path: Option<PeerPath>,
}

/// Arguments of `fill`.
#[derive(Debug, Args)]
pub struct FillArgs {
    /// Endpoint whose memory to fill, by name or number
    #[arg(long, value_name = "ENDPOINT")]
    pub on: String,
    /// Bytes to fill, such as 4096, 64K, 64M, 1G (binary)
    #[arg(long, value_parser = size)]
    pub size: u64,
    /// The 8-byte pattern, in hexadecimal; its lowest byte goes first
    #[arg(long, value_parser = hex_u64, default_value = "a5a5a5a5a5a5a5a5")]
    pub pattern: u64,
    /// Read the bytes back and compare them
    #[arg(long)]
    pub verify: bool,
    /// Fill so many times
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
}

/// Arguments of `peer`.
#[derive(Debug, Args)]
pub struct PeerArgs {
    /// Endpoint that reaches out, by name or number
    #[arg(long, value_name = "ENDPOINT")]
    pub from: String,
    /// Endpoint whose memory it reaches, by name or number
    #[arg(long, value_name = "ENDPOINT")]
    pub to: String,
    /// Which rights
    #[arg(long, value_enum, default_value = "rw")]
    pub rights: Rights,
    /// What to do with them
    #[arg(value_enum)]
    pub action: PeerAction,
}

/// What to do with a peer right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PeerAction {
    /// Show it and the path that a copy would take
    Query,
    /// Grant it
    Enable,
    /// Withdraw it
    Disable,
}

/// Rights as typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Rights {
    /// Read
    R,
    /// Write
    W,
    /// Both
    Rw,
}

impl Rights {
    /// The rights meant.
    pub fn access(self) -> Access {
        match self {
            Self::R => Access::READ,
            Self::W => Access::WRITE,
            Self::Rw => Access::RW,
        }
    }
}

/// Arguments of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// FPGA that encrypts, by name or number
    #[arg(long, value_name = "ENDPOINT")]
    pub on: String,
    /// GPU that the bytes start from and return to, by name or number
    #[arg(long, value_name = "ENDPOINT")]
    pub via: String,
    /// File to encrypt
    #[arg(long, value_name = "IN")]
    pub file: PathBuf,
    /// File to write; the same command with the same key decrypts it
    #[arg(long, value_name = "OUT")]
    pub out: PathBuf,
    /// Key: 64 hexadecimal digits; a fixed one without it, for trying things out only
    #[arg(long, value_name = "HEX", value_parser = key)]
    pub key: Option<Key>,
    /// Nonce; never use one twice with one key
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub nonce: u64,
    /// Encrypt on the CPU too and compare
    #[arg(long)]
    pub verify: bool,
}

impl RunArgs {
    /// The cipher meant.
    pub fn cipher(&self) -> Cipher {
        Cipher { key: self.key.as_ref().map_or(Cipher::EXAMPLE.key, |key| key.0), nonce: self.nonce }
    }
}

/// A key; not shown when its command line is printed.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Arguments of `events`.
#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Wait for more
    #[arg(long)]
    pub follow: bool,
    /// Stop after so many
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// First do what the device must refuse (read an address that nobody mapped), so that there is an event
    #[arg(long)]
    pub provoke: bool,
}

/// Arguments of `selftest`.
#[derive(Debug, Args)]
pub struct SelftestArgs {
    /// File for the main job, best 8 MiB or more; a pattern of 8 MiB without it
    #[arg(long)]
    pub file: Option<PathBuf>,
    /// Only the row of this name; may be given several times
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Path that copies between GPU and FPGA are to take
    #[arg(long, value_name = "PATH", value_enum, default_value = "direct")]
    pub path: PeerPath,
    /// Only this: keep work in flight, say so on standard error, and wait until the device loses its state; then try what must still work
    #[arg(long, conflicts_with_all = ["file", "only"])]
    pub until_loss: bool,
}

/// Arguments of `act`.
#[derive(Debug, Args)]
pub struct ActArgs {
    /// File of a driver made for tests: it acts in the domain whose number is written there, 0 for its own
    #[arg(long, value_name = "FILE")]
    pub domain_file: Option<PathBuf>,
}

/// Paths that a copy between two endpoints can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PeerPath {
    /// From device to device
    Direct,
    /// Through host memory
    Staged,
}

impl From<PeerPath> for TransferPath {
    fn from(path: PeerPath) -> Self {
        match path {
            PeerPath::Direct => Self::Direct,
            PeerPath::Staged => Self::Staged,
        }
    }
}

/// Reads a size: a number, then K, M, G or T for powers of 1024 (also KiB, MiB, ...).
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = text[digits.len()..].to_ascii_lowercase();
    let unit = unit.strip_suffix("ib").unwrap_or(&unit);
    let shift = match unit {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(format!("unit \"{unit}\" is not K, M, G or T")),
    };
    let number: u64 = digits.parse().map_err(|error| format!("\"{digits}\" is not a number: {error}"))?;
    match number.checked_mul(1 << shift) {
        Some(0) => Err("it must not be 0".to_owned()),
        Some(bytes) => Ok(bytes),
        None => Err("it does not fit into 64 bits".to_owned()),
    }
}

fn hex_u64(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    u64::from_str_radix(digits, 16).map_err(|error| format!("up to 16 hexadecimal digits are needed: {error}"))
}

fn key(text: &str) -> Result<Key, String> {
    let mut key = [0; 32];
    if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err("a key has 64 hexadecimal digits".to_owned());
    }
    for (byte, pair) in key.iter_mut().zip(text.as_bytes().chunks(2)) {
        let pair = std::str::from_utf8(pair).map_err(|error| error.to_string())?;
        *byte = u8::from_str_radix(pair, 16).map_err(|error| error.to_string())?;
    }
    Ok(Key(key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_are_binary_and_never_zero() {
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("64K"), Ok(64 << 10));
        assert_eq!(size("64m"), Ok(64 << 20));
        assert_eq!(size("1GiB"), Ok(1 << 30));
        for bad in ["", "0", "M", "1X", "-1", "1.5M", "99999999999T", "1KK"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_key_has_exactly_64_digits() {
        let text = "00".repeat(31) + "fF";
        assert_eq!(key(&text).expect("64 digits").0[31], 0xff);
        for bad in ["", &text[1..], &(text.clone() + "0"), &text.replace("fF", "+1"), &text.replace("fF", "xy")] {
            assert!(key(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_copy_needs_a_size_or_a_file() {
        let parse =
            |args: &[&str]| Cli::try_parse_from([&["pgctl", "copy", "--from", "a", "--to", "b"], args].concat());
        assert!(parse(&[]).is_err());
        assert!(parse(&["--size", "1M"]).is_ok());
        assert!(parse(&["--file", "x"]).is_ok());
        assert!(parse(&["--size", "1M", "--repeat", "0"]).is_err());
    }
}
