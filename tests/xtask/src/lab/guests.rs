//! What guests of the host show: that its KVM is real, and that a tenant's guest works with a `peergated` in the host.
//!
//! Not here: what `pgctl selftest` tries.

use std::time::Duration;

use anyhow::Result;

use super::check::Scenario;
use super::inner::add_guest;
use super::machine::Machine;
use crate::demo::guest::root;
use crate::demo::programs::Programs;
use crate::guest::{GuestSpec, Initramfs};
use crate::kit::Kernel;
use crate::work::checkout;

/// From a guest's start to its end.
const TIME: Duration = Duration::from_secs(240);
const MEMORY_MIB: u32 = 256;

/// A guest of nothing but a kernel and busybox, which says what it runs on.
///
/// # Errors
/// When its files cannot be written.
pub fn bare(machine: &mut Machine<'_>) -> Result<Scenario> {
    let mut root = Initramfs::new();
    root.busybox(machine.kit())?;
    root.init_script("echo RUNS-ON $(dmesg | sed -n 's/.*Hypervisor detected: //p')");
    add_guest(machine, "bare", &spec(root))?;
    Ok(Scenario {
        script: BARE.to_owned(),
        facts: vec![("guest-runs-on".to_owned(), "KVM".to_owned())],
        guest: Some("guest"),
        ..Scenario::default()
    })
}

/// A `peergated` in the host, a guest on its tenant, and the self-test in the guest.
///
/// # Errors
/// When a program does not build, or a file cannot be written.
pub fn tenant(machine: &mut Machine<'_>) -> Result<Scenario> {
    let programs = Programs::build(&["vmm_daemon", "pgctl"])?;
    // A guest's kernel is the newest, whatever the host's is.
    let kit = machine.kit().with_kernel(Kernel::Newest)?;
    let (mut inner, load) = root(&kit, &programs, &programs.module(&kit)?)?;
    inner.init_script(&format!("{load}{TENANT_GUEST}"));
    let spec = spec(inner).args(["-serial", "file:/run/tenant.results"]);
    add_guest(machine, "tenant", &spec)?;
    for name in ["peergated", "peergate"] {
        machine.root().program(&format!("/bin/{name}"), &programs.path(name))?;
    }
    machine.root().file("/etc/peergated.toml", checkout().join("configs/lab.toml"), 0o644);
    let facts = [
        ("tenant/daemon-is-ready", "yes"),
        ("tenant/guest-kernel-complaints", "0"),
        ("tenant/daemon-ends", "0"),
        ("tenant/daemon-errors-logged", "0"),
    ];
    Ok(Scenario {
        script: HOST.to_owned(),
        facts: facts.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        guest: Some("tenant"),
        selftest: true,
    })
}

fn spec(root: Initramfs) -> GuestSpec {
    let mut spec = GuestSpec::new(root);
    (spec.memory_mib, spec.smp, spec.timeout) = (MEMORY_MIB, 1, TIME);
    spec
}

const BARE: &str = r#"
guest-bare >/run/guest.log 2>&1 &
watched guest
fact guest-runs-on $(sed -n 's/^RUNS-ON *//p' /run/guest.log)
grep -q ^RUNS-ON /run/guest.log || cat /run/guest.log
"#;

/// In the host.
const HOST: &str = r#"
peergated --config /etc/peergated.toml >/run/peergated.out 2>/run/peergated.log &
daemon=$!
until grep -q ready /run/peergated.out; do kill -0 $daemon || break; usleep 100000; done
fact tenant/daemon-is-ready $(grep -q ready /run/peergated.out && echo yes)
device=$(peergate attach --vmm qemu lab | sed -n 's/ *\\$//; /^-chardev/p; /^-device/p')
guest-tenant $device >/run/guest.log 2>&1 &
watched tenant
grep '^{' /run/tenant.results >&3 || cat /run/peergated.log /run/guest.log
fact tenant/guest-kernel-complaints $(sed -n 's/^kernel-complaints //p' /run/tenant.results)
kill $daemon
wait $daemon
fact tenant/daemon-ends $?
fact tenant/daemon-errors-logged $(grep -cE ' ERROR |panicked' /run/peergated.log)
grep -E ' ERROR |panicked' /run/peergated.log
"#;

/// In the guest.
const TENANT_GUEST: &str = r#"
stty -F /dev/ttyS1 raw -echo 2>/dev/null
exec 3>/dev/ttyS1
insmod /lib/peergate.ko || dmesg | tail -20
pgctl selftest --json >&3
rmmod peergate
echo "kernel-complaints $(dmesg | grep -cE 'BUG|WARNING|Oops|Call Trace')" >&3
"#;
