//! Figures from inside a guest: `guest_bench` beside a virtio block device whose back-end does nothing, in the same VM.
//!
//! Not here: what is measured, and how.

use std::ffi::OsString;
use std::fs;
use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::daemon::Daemon;
use super::guest::device_args;
use super::programs::Programs;
use super::{CONFIG, TENANT};
use crate::guest::{GuestSpec, Initramfs, boot};
use crate::kit::Kit;

/// The block device: reads end at once, and nothing is copied.
const NULL_BLOCK: [&str; 4] = [
    "-blockdev",
    "driver=null-co,node-name=null,size=1073741824,read-zeroes=off",
    "-device",
    "virtio-blk-pci,drive=null",
];
/// Time for everything.
const PATIENCE: Duration = Duration::from_secs(300);

/// Boots a guest on a daemon and prints what `guest_bench` measures in it, one JSON object a line. `args` are its arguments. Blocks.
///
/// # Errors
/// When it does not run to its end; the message has the guest's console.
pub fn in_guest(kit: &Kit, args: &[OsString]) -> Result<()> {
    let programs = Programs::build(&["vmm_daemon", "bench"])?;
    let module = programs.module(kit)?;
    let daemon = Daemon::start_with(&programs, CONFIG)?;
    let results = daemon.scratch().join("results");
    let words: Vec<_> = args.iter().map(|word| word.to_string_lossy()).collect();
    ensure!(words.iter().all(|word| !word.contains('\'')), "Arguments of the guest's program have no quotes");
    let script = SCRIPT.replace("ARGS", &words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" "));
    let mut root = Initramfs::new();
    root.busybox(kit)?;
    root.program("/bin/guest_bench", &programs.path("guest_bench"))?;
    root.file("/lib/peergate.ko", module, 0o644);
    root.file("/lib/virtio_blk.ko.xz", kit.modules_dir().join("kernel/drivers/block/virtio_blk.ko.xz"), 0o644);
    root.init_script(&script);
    let serial = format!("file:{}", results.display());
    let mut spec = GuestSpec::new(root).args(device_args(&daemon, TENANT)?).args(NULL_BLOCK).args(["-serial", &serial]);
    spec.timeout = PATIENCE;
    let mut console = Vec::new();
    eprintln!("measuring in Linux {} under QEMU {}", kit.kernel_release(), kit.qemu.version);
    boot(kit, &spec, |line| {
        console.push(line.to_owned());
        ControlFlow::Continue(())
    })?;
    let text = fs::read_to_string(&results).context("Cannot read what the guest measured")?;
    let (lines, rest): (Vec<_>, Vec<_>) = text.lines().map(str::trim).partition(|line| line.starts_with('{'));
    if lines.is_empty() || !rest.contains(&"done") {
        bail!("The guest measured nothing; its console:\n{}\n{text}", console.join("\n"));
    }
    lines.iter().for_each(|line| println!("{line}"));
    match daemon.stop()?.iter().find(|row| !row.ok) {
        Some(row) => bail!("{}", row.text()),
        None => Ok(()),
    }
}

/// Runs in the guest; busybox's shell.
const SCRIPT: &str = r#"
stty -F /dev/ttyS1 raw -echo 2>/dev/null
exec 3>/dev/ttyS1
insmod /lib/virtio_blk.ko.xz || { xz -dc /lib/virtio_blk.ko.xz > /tmp/virtio_blk.ko && insmod /tmp/virtio_blk.ko; }
insmod /lib/peergate.ko
guest_bench ARGS >&3 2>&3 && echo done >&3
"#;
