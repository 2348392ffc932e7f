//! What runs the guest's instructions: the host's KVM if a stock Linux kernel comes up on it, else QEMU's translator.
//!
//! A `/dev/kvm` may be there and yet unable to run Linux (software KVMs emulate too few instructions), so a small guest is booted
//! once and the answer kept in the cache, keyed by everything it depends on. A wrong "no" costs time, never correctness.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::initramfs::Initramfs;
use super::qemu::{Guest, GuestSpec, Said};
use crate::kit::tree::{cache_dir, lock};
use crate::kit::{Kernel, Kit};

const KVM: &str = "/dev/kvm";
const TRIAL: Duration = Duration::from_secs(20);
const MARKER: &str = "PEERGATE-ALIVE";

/// An accelerator of QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// The host's virtualisation.
    Kvm,
    /// QEMU's translator: works everywhere, some ten times slower.
    Tcg,
}

impl Accel {
    /// The words QEMU wants for it.
    #[must_use]
    pub fn qemu_args(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Self::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max"],
        }
    }
}

/// An accelerator, and why that one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Choice {
    /// The accelerator.
    pub accel: Accel,
    /// Why, for people.
    pub reason: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Known {
    key: String,
    choice: Choice,
}

/// Says which accelerator guests use here. Quick, but for the first time with a given QEMU, kernel and KVM: then up to 20 s.
///
/// # Errors
/// When the answer cannot be kept.
pub fn choose(kit: &Kit) -> Result<Choice> {
    let opened = fs::File::options().read(true).write(true).open(KVM);
    if let Err(error) = opened {
        return Ok(Choice { accel: Accel::Tcg, reason: format!("{KVM} cannot be opened: {error}") });
    }
    // What comes up with the newest kernel does with the others.
    let kit = &kit.with_kernel(Kernel::Newest)?;
    let key = key(kit)?;
    let cache = cache_dir()?;
    let file = cache.join("accel.json");
    let known = || read_known(&file).filter(|known| known.key == key);
    if let Some(known) = known() {
        return Ok(known.choice);
    }
    let _lock = lock(&cache, "accel")?;
    if let Some(known) = known() {
        return Ok(known.choice);
    }
    eprintln!("guest: trying a Linux guest on {KVM}, once");
    let choice = match try_kvm(kit) {
        Ok(()) => Choice { accel: Accel::Kvm, reason: format!("a Linux guest came up on {KVM}") },
        Err(error) => Choice {
            accel: Accel::Tcg,
            reason: format!("{KVM} is there, but no Linux guest came up on it: {}", first_line(&error)),
        },
    };
    eprintln!("guest: {:?}, because {}", choice.accel, choice.reason);
    let known = Known { key, choice };
    keep(&file, &known)?;
    Ok(known.choice)
}

/// Everything the answer depends on.
fn key(kit: &Kit) -> Result<String> {
    let device = fs::metadata(KVM).with_context(|| format!("Cannot look at {KVM}"))?;
    let host = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find(|line| line.starts_with("model name")).unwrap_or_default();
    Ok(format!(
        "qemu {}; guest {}; kvm {:x}; host {}; {model}",
        kit.qemu.version,
        kit.kernel_release(),
        device.rdev(),
        host.trim()
    ))
}

fn read_known(file: &Path) -> Option<Known> {
    serde_json::from_slice(&fs::read(file).ok()?).ok()
}

fn keep(file: &Path, known: &Known) -> Result<()> {
    let place = || format!("Cannot write {}", file.display());
    let text = serde_json::to_vec_pretty(known).with_context(place)?;
    let partial = file.with_extension(format!("{}.part", std::process::id()));
    fs::write(&partial, text).with_context(place)?;
    fs::rename(&partial, file).with_context(place)
}

fn first_line(error: &anyhow::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

fn try_kvm(kit: &Kit) -> Result<()> {
    let mut initramfs = Initramfs::new();
    initramfs.busybox(kit)?;
    initramfs.init_script(&format!("echo {MARKER}"));
    let mut spec = GuestSpec::new(initramfs);
    spec.accel = Some(Accel::Kvm);
    spec.timeout = TRIAL;
    spec.memory_mib = 256;
    let mut guest = Guest::start(kit, &spec)?;
    let mut alive = false;
    while let Some(said) = guest.said()? {
        match said {
            Said::Guest(line) => alive |= line.contains(MARKER),
            // QEMU would now hold the guest still until the limit.
            Said::Qemu(line) if line.contains("KVM internal error") => bail!("{line}"),
            Said::Qemu(_) => (),
        }
    }
    guest.finish()?;
    if !alive {
        bail!("It ended without a word from init");
    }
    Ok(())
}
