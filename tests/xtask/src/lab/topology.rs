//! What devices the lab's host has, and where: a file of `configs/topologies/`, checked before anything boots.
//!
//! A file names the host's memory and processors, and its PCIe root ports with one device each. Its keys:
//!
//! ```toml
//! [host]
//! memory = "1536MiB"
//! processors = 2
//!
//! [[port]]
//! name = "nvme0"            # small letters, digits and dashes
//! kind = "nvme"             # nvme, edu or memory
//! namespaces = ["64MiB"]    # of an nvme
//! cmb = "16MiB"             # of an nvme, if it has memory behind a BAR
//! ```
//!
//! Not here: what QEMU is told (`machine`).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::work::checkout;

/// Most root ports: their slots lie between those that QEMU gives away and the chipset's own.
pub const MAX_PORTS: usize = 15;
/// Most namespaces of one NVMe device here.
const MAX_NAMESPACES: usize = 16;
/// Most of one device's memory, in MiB: what fits the firmware's windows and a temporary file.
const MAX_MIB: u32 = 4096;
/// Least memory of the host, in MiB (its kernel, the programs, and a guest of its own), and most.
const MEMORY_MIB: (u32, u32) = (512, 65_536);
const MAX_NAME: usize = 16;

/// A host's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Processors.
    pub processors: u32,
    /// Root ports, in the order of their slots.
    pub ports: Vec<Port>,
}

/// A PCIe root port, and the device behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// The device's name.
    pub name: String,
    /// The device.
    pub device: Device,
}

/// A device. Sizes are in MiB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// A PCI device with a DMA engine of 4 KiB a transfer.
    Edu,
    /// Memory behind BAR 2.
    Memory {
        /// How much; a power of two.
        size_mib: u32,
    },
    /// An NVMe SSD.
    Nvme {
        /// Controller memory behind a BAR; a power of two, 0 for none.
        cmb_mib: u32,
        /// Sizes of its namespaces 1, 2, …
        namespaces_mib: Vec<u32>,
    },
}

impl Device {
    /// Vendor and device number, as `lspci -n` writes them.
    #[must_use]
    pub fn id(&self) -> &'static str {
        match self {
            Self::Edu => "1234:11e8",
            Self::Memory { .. } => "1af4:1110",
            Self::Nvme { .. } => "1b36:0010",
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    host: WrittenHost,
    #[serde(default, rename = "port")]
    ports: Vec<WrittenPort>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenHost {
    memory: String,
    processors: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenPort {
    name: String,
    kind: Kind,
    size: Option<String>,
    cmb: Option<String>,
    namespaces: Option<Vec<String>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Nvme,
    Edu,
    Memory,
}

impl Topology {
    /// Reads a file, or a shipped one by its name (`default`).
    ///
    /// # Errors
    /// When it cannot be read or says what cannot be built; the message names the file.
    pub fn load(name: &Path) -> Result<Self> {
        let shipped = shipped_dir().join(name).with_extension("toml");
        let path = if name.components().count() == 1 && name.extension().is_none() { shipped } else { name.to_owned() };
        let text = fs::read_to_string(&path).with_context(|| {
            format!("Cannot read the topology {}; name a file, or one of configs/topologies", path.display())
        })?;
        Self::parse(&text).with_context(|| format!("{} is no topology", path.display()))
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// When it says what cannot be built.
    pub fn parse(text: &str) -> Result<Self> {
        let written: Written = toml::from_str(text)?;
        let memory_mib = mib("host.memory", &written.host.memory, MEMORY_MIB)?;
        let processors = written.host.processors;
        ensure!((1..=64).contains(&processors), "host.processors is {processors}; give it 1 to 64");
        ensure!(written.ports.len() <= MAX_PORTS, "{} ports; a host has at most {MAX_PORTS}", written.ports.len());
        let mut ports: Vec<Port> = Vec::new();
        for port in written.ports {
            let name = name(port.name.clone())?;
            ensure!(ports.iter().all(|other| other.name != name), "Two ports are called {name}; names are unique");
            let device = device(port).with_context(|| format!("Port {name} cannot be built"))?;
            ports.push(Port { name, device });
        }
        Ok(Self { memory_mib, processors, ports })
    }
}

/// Where the shipped files are.
#[must_use]
pub fn shipped_dir() -> PathBuf {
    checkout().join("configs/topologies")
}

/// A name goes into QEMU's arguments and into a shell script, so it has nothing that either could take for something else.
fn name(name: String) -> Result<String> {
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let first = name.starts_with(|c: char| c.is_ascii_lowercase());
    ensure!(
        first && name.chars().all(good) && name.len() <= MAX_NAME,
        "{name:?} is no name of a port; write a small letter, then small letters, digits and dashes, at most {MAX_NAME}"
    );
    Ok(name)
}

fn device(port: WrittenPort) -> Result<Device> {
    let WrittenPort { kind, size, cmb, namespaces, .. } = port;
    let foreign = [("size", size.is_some()), ("cmb", cmb.is_some()), ("namespaces", namespaces.is_some())];
    let own: &[&str] = match kind {
        Kind::Edu => &[],
        Kind::Memory => &["size"],
        Kind::Nvme => &["cmb", "namespaces"],
    };
    if let Some((key, _)) = foreign.iter().find(|(key, given)| *given && !own.contains(key)) {
        bail!("{key} is no key of this kind of device; remove it");
    }
    match kind {
        Kind::Edu => Ok(Device::Edu),
        Kind::Memory => {
            let size = size.context("A memory needs a size, such as size = \"64MiB\"")?;
            Ok(Device::Memory { size_mib: bar("size", &size)? })
        }
        Kind::Nvme => {
            let namespaces = namespaces.context("An nvme needs namespaces, such as namespaces = [\"64MiB\"]")?;
            let count = namespaces.len();
            ensure!((1..=MAX_NAMESPACES).contains(&count), "{count} namespaces; give it 1 to {MAX_NAMESPACES}");
            let sizes: Result<_> = namespaces.iter().map(|size| mib("namespaces", size, (1, MAX_MIB))).collect();
            let cmb_mib = cmb.map_or(Ok(0), |cmb| bar("cmb", &cmb))?;
            Ok(Device::Nvme { cmb_mib, namespaces_mib: sizes? })
        }
    }
}

/// The size of memory behind a BAR.
fn bar(key: &str, text: &str) -> Result<u32> {
    let size = mib(key, text, (1, MAX_MIB))?;
    ensure!(size.is_power_of_two(), "{key} is {text}; memory behind a BAR is a power of two");
    Ok(size)
}

/// A size in MiB, between two bounds.
fn mib(key: &str, text: &str, (least, most): (u32, u32)) -> Result<u32> {
    let parse = |digits: &str, factor: u32| digits.parse::<u32>().ok()?.checked_mul(factor);
    let size = match (text.strip_suffix("MiB"), text.strip_suffix("GiB")) {
        (Some(digits), _) => parse(digits, 1),
        (_, Some(digits)) => parse(digits, 1024),
        _ => None,
    };
    let size = size.with_context(|| format!("{key} is {text:?}; write a size such as \"64MiB\" or \"1GiB\""))?;
    ensure!((least..=most).contains(&size), "{key} is {text}; give it {least} to {most} MiB");
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = r#"
[host]
memory = "1GiB"
processors = 2
[[port]]
name = "nvme0"
kind = "nvme"
cmb = "16MiB"
namespaces = ["64MiB", "3MiB"]
[[port]]
name = "edu0"
kind = "edu"
[[port]]
name = "mem0"
kind = "memory"
size = "32MiB"
"#;

    #[test]
    fn a_file_is_read_as_it_is_written() {
        let topology = Topology::parse(BASE).unwrap();
        let port = |name: &str, device| Port { name: name.to_owned(), device };
        let ports = vec![
            port("nvme0", Device::Nvme { cmb_mib: 16, namespaces_mib: vec![64, 3] }),
            port("edu0", Device::Edu),
            port("mem0", Device::Memory { size_mib: 32 }),
        ];
        assert_eq!(topology, Topology { memory_mib: 1024, processors: 2, ports });
    }

    #[test]
    fn every_shipped_file_is_a_topology() {
        let mut files = 0;
        for entry in fs::read_dir(shipped_dir()).unwrap() {
            let path = entry.unwrap().path();
            Topology::load(&path).unwrap();
            let name = path.file_stem().unwrap();
            assert_eq!(Topology::load(Path::new(name)).unwrap(), Topology::load(&path).unwrap());
            files += 1;
        }
        assert!(files >= 1);
    }

    #[test]
    fn what_cannot_be_built_is_refused_with_what_to_write_instead() {
        for (from, to, expected) in [
            ("size = \"32MiB\"", "size = \"33MiB\"", "power of two"),
            ("size = \"32MiB\"", "", "needs a size"),
            ("size = \"32MiB\"", "size = \"32\"", "such as \"64MiB\""),
            ("size = \"32MiB\"", "size = \"8GiB\"", "1 to 4096 MiB"),
            ("size = \"32MiB\"", "sise = \"32MiB\"", "unknown field `sise`"),
            ("kind = \"edu\"", "kind = \"gpu\"", "unknown variant `gpu`"),
            ("kind = \"edu\"", "kind = \"edu\"\ncmb = \"1MiB\"", "Port edu0 cannot be built: cmb is no key"),
            ("kind = \"memory\"", "kind = \"nvme\"", "size is no key"),
            ("namespaces = [\"64MiB\", \"3MiB\"]", "", "needs namespaces"),
            ("namespaces = [\"64MiB\", \"3MiB\"]", "namespaces = []", "1 to 16"),
            ("cmb = \"16MiB\"", "cmb = \"0MiB\"", "1 to 4096 MiB"),
            ("name = \"edu0\"", "name = \"mem0\"", "Two ports are called mem0"),
            ("name = \"edu0\"", "name = \"edu0,x=y\"", "no name of a port"),
            ("name = \"edu0\"", "name = \"\"", "no name of a port"),
            ("memory = \"1GiB\"", "memory = \"128MiB\"", "512 to 65536 MiB"),
            ("processors = 2", "processors = 0", "1 to 64"),
            ("processors = 2", "processors = 2\nsockets = 1", "unknown field `sockets`"),
        ] {
            assert!(BASE.contains(from), "{from:?} is in the base");
            let error = format!("{:#}", Topology::parse(&BASE.replacen(from, to, 1)).unwrap_err());
            assert!(error.contains(expected), "{to:?}: {error}");
        }
    }

    #[test]
    fn a_host_has_no_more_ports_than_slots() {
        let ports = |count: usize| {
            let ports: String = (0..count).map(|i| format!("[[port]]\nname = \"e{i}\"\nkind = \"edu\"\n")).collect();
            Topology::parse(&format!("[host]\nmemory = \"1GiB\"\nprocessors = 1\n{ports}"))
        };
        assert_eq!(ports(MAX_PORTS).unwrap().ports.len(), MAX_PORTS);
        assert!(ports(MAX_PORTS + 1).is_err());
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = format!("{:#}", Topology::load(Path::new("no-such-thing")).unwrap_err());
        assert!(error.contains("topologies/no-such-thing.toml"), "{error}");
    }
}
