//! Guests that take orders: one vCPU, one tenant's device, and a second serial port for `pgctl act`.
//!
//! The guest of a tenant that is to lie gets a driver that was made to: the driver's own sources with one more parameter, a domain's number to
//! use in place of the file's own. No program can choose a domain, but a guest's kernel can.
//!
//! Not here: the orders.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::actor::Actor;
use super::daemon::Daemon;
use super::guest::{DEBUG_IS_SLOWER, DEBUG_MEMORY_MIB, device_args, root};
use super::programs::{Change, Programs, changed_module};
use crate::guest::{Guest, GuestSpec};
use crate::kit::Kit;

/// From a guest's start to its power-off.
const TIME: Duration = Duration::from_secs(420);
/// How long QEMU may take to connect its serial port, which it does first.
const CONNECT: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };

/// Runs in the guest; busybox's shell. The port stays open from end to end, so that nothing that is said meanwhile is lost.
const SCRIPT: &str = r#"
exec 3<>/dev/ttyS1
stty raw -echo clocal <&3
insmod /lib/peergate.ko || { echo "insmod failed" >&3; dmesg | tail -20; }
forged=/sys/module/peergate/parameters/forged_domain
[ -e $forged ] && set -- --domain-file $forged
pgctl act "$@" <&3 >&3
rmmod peergate || echo "rmmod failed" >&3
dmesg | grep -E 'BUG|WARNING|Oops|Call Trace' | head -1 >&3
echo done >&3
"#;

/// A guest that has been started, and its port.
pub struct Started {
    guest: Guest,
    port: UnixStream,
    tenant: &'static str,
}

/// Starts a guest for `tenant`; it boots while the caller goes on.
///
/// # Errors
/// When QEMU does not start.
pub fn start(kit: &Kit, programs: &Programs, module: &Path, daemon: &Daemon, tenant: &'static str) -> Result<Started> {
    let (mut root, load) = root(kit, programs, module)?;
    root.init_script(&format!("{load}{SCRIPT}"));
    let path = daemon.scratch().join(format!("{tenant}.port"));
    let listener = UnixListener::bind(&path).with_context(|| format!("Cannot listen at {}", path.display()))?;
    let port = format!("socket,id=port,path={}", path.display());
    let mut spec =
        GuestSpec::new(root).args(device_args(daemon, tenant)?).args(["-chardev", &port, "-serial", "chardev:port"]);
    spec.smp = 1;
    spec.timeout = TIME;
    if kit.is_debug() {
        spec.timeout *= DEBUG_IS_SLOWER;
        spec.memory_mib = DEBUG_MEMORY_MIB;
    }
    let mut guest = Guest::start(kit, &spec)?;
    let ready = poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&CONNECT))?;
    ensure!(ready > 0, "QEMU did not connect a serial port; it said:\n{}", guest.last_lines());
    let (port, _) = listener.accept().context("Cannot take a serial port")?;
    Ok(Started { guest, port, tenant })
}

impl Started {
    /// Waits until its actor is ready.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn actor(self) -> Result<Actor> {
        Actor::in_guest(self.tenant, self.port, self.guest)
    }
}

const LIES: &[Change] = &[
    (
        "peergate_internal.h",
        "extern unsigned int pg_control_timeout_ms;",
        "extern unsigned int pg_control_timeout_ms;\nextern unsigned int pg_forged_domain;",
    ),
    (
        "main.c",
        "struct workqueue_struct *pg_wq;",
        "unsigned int pg_forged_domain;\nmodule_param_named(forged_domain, pg_forged_domain, uint, 0600);\n\nstruct workqueue_struct *pg_wq;",
    ),
    (
        "vq.c",
        "control->domain = cpu_to_le32(domain);\n\tcontrol->session = cpu_to_le32(session);",
        "control->domain = cpu_to_le32(domain && pg_forged_domain ? pg_forged_domain : domain);\n\tcontrol->session = cpu_to_le32(session);",
    ),
    ("submit.c", ".domain = cpu_to_le32(file->domain),", ".domain = cpu_to_le32(pg_forged_domain ?: file->domain),"),
];

/// Builds the driver that lies.
///
/// # Errors
/// When it does not build clean, or its sources have moved on.
pub fn lying_module(kit: &Kit) -> Result<PathBuf> {
    changed_module(kit, "guest-liar", LIES)
}
