//! The lab's host as a virtual machine: what QEMU is told of a topology, and what the host finds when it comes up.
//!
//! It has VT-d with interrupt remapping; the kit's image, from which it can boot guests of its own; and the topology's devices, each behind its
//! root port and bound to vfio-pci before anything else runs (`script`). What is to come back leaves through a second serial port, so that no kernel
//! message can tear a line. Disks are temporary files: they go with the [`Machine`].
//!
//! Not here: what is done in the host.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tempfile::TempDir;

use super::script;
use super::topology::{Device, Port, Topology};
use crate::guest::accel::{self, Accel};
use crate::guest::qemu::attend;
use crate::guest::{GuestSpec, Initramfs, boot};
use crate::kit::Kit;
use crate::kit::module::KernelModule;

/// Slot of the first root port: before it, QEMU places what has no slot of its own.
const FIRST_SLOT: usize = 0x10;
/// The environment variable that has the console of the host shown as it comes.
const SHOW: &str = "PEERGATE_LAB_CONSOLE";
/// Where the host has the kit's image.
pub const KIT: &str = "/kit";
/// Modules that the host cannot do without.
const MODULES: [&str; 5] = ["virtio_pci", "virtio_blk", "ext4", "vfio_pci", "vfio_iommu_type1"];
/// Modules for one kind of processor, of which it needs one, and the flag that such a processor has.
const EITHER: [(&str, &str); 2] = [("kvm-amd", "svm"), ("kvm-intel", "vmx")];

/// A host that can be booted once.
#[derive(Debug)]
pub struct Machine<'k> {
    kit: &'k Kit,
    spec: GuestSpec,
    /// The script's lines that come before what the caller asks.
    start: String,
    dir: TempDir,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Ran {
    /// What left through the second serial port.
    pub results: String,
    /// The lines of the console.
    pub console: Vec<String>,
    /// From start to end.
    pub wall: Duration,
    /// Where the devices' bytes are: a file `NAME` for memory, `NAME-NUMBER` for a namespace.
    pub devices: Arc<TempDir>,
}

impl<'k> Machine<'k> {
    /// Puts a host together. Quick, but for the kit's image where it is not made yet.
    ///
    /// # Errors
    /// When the kit's kernel cannot be such a host, or a file cannot be made.
    pub fn new(kit: &'k Kit, topology: &Topology) -> Result<Self> {
        let dir = TempDir::with_prefix("peergate-lab-").context("Cannot create a temporary folder")?;
        let mut root = Initramfs::new();
        root.busybox(kit)?;
        let mut start = String::new();
        for module in modules(kit)? {
            let path = format!("/lib/{}.ko", module.name);
            let flag = EITHER.iter().find(|(name, _)| *name == module.name).map(|(_, flag)| flag);
            let only = flag.map_or_else(String::new, |flag| format!("grep -qw {flag} /proc/cpuinfo && "));
            let _ = writeln!(start, "{only}insmod {path}");
            root.file(&path, module.path, 0o644);
        }
        for (index, port) in topology.ports.iter().enumerate() {
            let _ = writeln!(start, "bind_port {} {:02x}", port.name, FIRST_SLOT + index);
        }
        start.push_str("mount_kit\n");
        root.bytes("/lib/lab.sh", script::LIBRARY, 0o644);
        let mut spec = GuestSpec::new(root).args(devices(topology, dir.path())?).args(image(&kit.image()?));
        spec.memory_mib = topology.memory_mib;
        spec.smp = topology.processors;
        // Whether ticks come, the kernel tests against the clock: on a busy machine that translates, it fails.
        spec.append = "intel_iommu=on no_timer_check".to_owned();
        spec.accel = Some(accel(kit)?);
        Ok(Self { kit, spec, start, dir })
    }

    /// The host's root file system, for what else it is to find there.
    pub fn root(&mut self) -> &mut Initramfs {
        &mut self.spec.initramfs
    }

    /// The kit that it boots from.
    #[must_use]
    pub fn kit(&self) -> &'k Kit {
        self.kit
    }

    /// A folder that lives as long as the machine.
    #[must_use]
    pub fn scratch(&self) -> &Path {
        self.dir.path()
    }

    /// Boots, binds the devices and runs `body`, a script of busybox's shell in which the file descriptor 3 takes results. Blocks until the
    /// host has powered off.
    ///
    /// # Errors
    /// When it does not in `timeout`; the message has the console's last lines.
    pub fn run(mut self, body: &str, timeout: Duration) -> Result<Ran> {
        let results = self.dir.path().join("results");
        self.spec.initramfs.init_script(&format!("{}{}{body}", script::START, self.start));
        self.spec.qemu_args.extend(["-serial".into(), format!("file:{}", results.display()).into()]);
        self.spec.timeout = timeout;
        let mut console = Vec::new();
        let outcome = boot(self.kit, &self.spec, |line| {
            if std::env::var_os(SHOW).is_some() {
                eprintln!("| {line}");
            }
            console.push(line.to_owned());
            ControlFlow::Continue(())
        })?;
        let results = fs::read(&results).context("Cannot read what the lab's host answered")?;
        Ok(Ran {
            results: String::from_utf8_lossy(&results).into_owned(),
            console,
            wall: outcome.wall,
            devices: Arc::new(self.dir),
        })
    }

    /// Boots and gives this process's terminal a prompt in the host. Blocks until it has powered off: at the end of the shell.
    ///
    /// # Errors
    /// When QEMU fails.
    pub fn shell(mut self) -> Result<()> {
        self.spec.initramfs.init_script(&format!("{}{}{}", script::START, self.start, script::SHELL));
        self.spec.qemu_args.extend(["-serial", "null"].map(Into::into));
        attend(self.kit, &self.spec)
    }
}

/// The modules that the host loads, in order.
fn modules(kit: &Kit) -> Result<Vec<KernelModule>> {
    let unfit = || format!("Linux {} cannot be the lab's host", kit.kernel_release());
    let of_processors = EITHER.map(|(name, _)| name).into_iter().filter(|name| kit.kernel_modules(&[name]).is_ok());
    let names: Vec<&str> = MODULES.into_iter().chain(of_processors).collect();
    let modules = kit.kernel_modules(&names).with_context(unfit)?;
    ensure!(names.len() > MODULES.len(), "{}: it has KVM for no processor", unfit());
    Ok(modules)
}

/// What runs the host: KVM only if it can do in a guest what guests of the guest need.
///
/// # Errors
/// When it cannot be found out.
pub fn accel(kit: &Kit) -> Result<Accel> {
    let is_nested = ["amd", "intel"].iter().any(|vendor| {
        let setting = fs::read_to_string(format!("/sys/module/kvm_{vendor}/parameters/nested"));
        setting.is_ok_and(|setting| matches!(setting.trim(), "1" | "Y"))
    });
    if is_nested { Ok(accel::choose(kit)?.accel) } else { Ok(Accel::Tcg) }
}

/// The IOMMU, and the topology's ports and devices.
fn devices(topology: &Topology, dir: &Path) -> Result<Vec<String>> {
    // QEMU's own interrupt controller: the kernel's cannot remap.
    let mut args = words(&["-machine", "kernel-irqchip=split", "-device", "intel-iommu,intremap=on"]);
    for (index, Port { name, device }) in topology.ports.iter().enumerate() {
        let (slot, number) = (FIRST_SLOT + index, index + 1);
        let port = format!("pcie-root-port,id=port-{name},bus=pcie.0,addr={slot:#x},chassis={number},slot={number}");
        args.extend(words(&["-device", &port]));
        match device {
            Device::Edu => args.extend(words(&["-device", &format!("edu,bus=port-{name}")])),
            Device::Memory { size_mib } => {
                let file = dir.join(name);
                let file = file
                    .to_str()
                    .filter(|file| !file.contains(','))
                    .context("The folder for temporary files has a name that QEMU does not take")?;
                let memory = format!("memory-backend-file,id=mem-{name},size={size_mib}M,share=on,mem-path={file}");
                let device = format!("ivshmem-plain,memdev=mem-{name},bus=port-{name}");
                args.extend(words(&["-object", &memory, "-device", &device]));
            }
            Device::Nvme { cmb_mib, namespaces_mib } => {
                let controller = format!("nvme,id={name},bus=port-{name},serial={name},cmb_size_mb={cmb_mib}");
                args.extend(words(&["-device", &controller]));
                for (number, mib) in (1..).zip(namespaces_mib) {
                    let id = format!("{name}-{number}");
                    let file = dir.join(&id);
                    disk(&file, *mib)?;
                    args.extend(["-blockdev".to_owned(), block(&id, &file, false)]);
                    args.extend(words(&["-device", &format!("nvme-ns,drive={id},bus={name},nsid={number}")]));
                }
            }
        }
    }
    Ok(args)
}

/// The kit's image as a disk.
fn image(path: &Path) -> Vec<String> {
    vec!["-blockdev".to_owned(), block("kit", path, true), "-device".to_owned(), "virtio-blk-pci,drive=kit".to_owned()]
}

/// A raw disk in QEMU's words; JSON, so that a path may have a comma.
fn block(name: &str, file: &Path, read_only: bool) -> String {
    let file = json!({ "driver": "file", "filename": file, "read-only": read_only });
    json!({ "driver": "raw", "node-name": name, "read-only": read_only, "file": file }).to_string()
}

/// An empty disk of so many MiB, which takes no room until it is written.
fn disk(path: &Path, mib: u32) -> Result<()> {
    let place = || format!("Cannot make a disk at {}", path.display());
    File::create(path).with_context(place)?.set_len(u64::from(mib) << 20).with_context(place)
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_is_told_of_every_device_and_its_port() {
        let nvme = Device::Nvme { cmb_mib: 16, namespaces_mib: vec![2, 3] };
        let ports = [("n", nvme), ("e", Device::Edu), ("m", Device::Memory { size_mib: 64 })];
        let ports = ports.map(|(name, device)| Port { name: name.to_owned(), device }).to_vec();
        let dir = tempfile::tempdir().unwrap();
        let args = devices(&Topology { memory_mib: 512, processors: 1, ports }, dir.path()).unwrap();
        let file = |number| dir.path().join(format!("n-{number}"));
        let expected = [
            "-machine",
            "kernel-irqchip=split",
            "-device",
            "intel-iommu,intremap=on",
            "-device",
            "pcie-root-port,id=port-n,bus=pcie.0,addr=0x10,chassis=1,slot=1",
            "-device",
            "nvme,id=n,bus=port-n,serial=n,cmb_size_mb=16",
            "-blockdev",
            &block("n-1", &file(1), false),
            "-device",
            "nvme-ns,drive=n-1,bus=n,nsid=1",
            "-blockdev",
            &block("n-2", &file(2), false),
            "-device",
            "nvme-ns,drive=n-2,bus=n,nsid=2",
            "-device",
            "pcie-root-port,id=port-e,bus=pcie.0,addr=0x11,chassis=2,slot=2",
            "-device",
            "edu,bus=port-e",
            "-device",
            "pcie-root-port,id=port-m,bus=pcie.0,addr=0x12,chassis=3,slot=3",
            "-object",
            &format!("memory-backend-file,id=mem-m,size=64M,share=on,mem-path={}", dir.path().join("m").display()),
            "-device",
            "ivshmem-plain,memdev=mem-m,bus=port-m",
        ];
        assert_eq!(args, expected);
        assert_eq!((file(1).metadata().unwrap().len(), file(2).metadata().unwrap().len()), (2 << 20, 3 << 20));
    }
}
