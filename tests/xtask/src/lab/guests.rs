//! What guests of the host show: that its KVM is real, and that a tenant's guest works with a `peergated` in the host, whatever VMM boots it.
//!
//! Not here: what `pgctl selftest` tries.

use std::time::Duration;

use anyhow::Result;

use super::check::Scenario;
use super::inner::add_guest;
use super::machine::Machine;
use super::vmm::Vmm;
use crate::demo::guest::root;
use crate::demo::programs::Programs;
use crate::guest::{GuestSpec, Initramfs};
use crate::kit::Kernel;
use crate::work::checkout;

/// From a guest's start to its end.
const TIME: Duration = Duration::from_secs(240);
const MEMORY_MIB: u32 = 256;
/// The daemon's configuration in the host; its one tenant is `lab`.
const CONFIG: &str = "/etc/peergated.toml";

/// A guest of nothing but a kernel and busybox, which says what it runs on.
///
/// # Errors
/// When its files cannot be written.
pub fn bare(machine: &mut Machine<'_>) -> Result<Scenario> {
    let mut root = Initramfs::new();
    root.busybox(machine.kit())?;
    root.init_script("echo RUNS-ON $(dmesg | sed -n 's/.*Hypervisor detected: //p')");
    add_guest(machine, Vmm::Qemu, "bare", &spec(root))?;
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
/// When a file cannot be written.
pub fn tenant(machine: &mut Machine<'_>, inside: &Inside, vmm: Vmm) -> Result<Scenario> {
    let mut root = inside.root.clone();
    root.init_script(&format!("{}{TENANT_GUEST}", inside.load));
    add_guest(machine, vmm, "tenant", &spec(root))?;
    let name = match vmm {
        Vmm::Qemu => "tenant",
        Vmm::CloudHypervisor => vmm.name(),
    };
    let facts = [
        ("daemon-is-ready", "yes"),
        ("guest-kernel-complaints", "0"),
        ("daemon-ends", "0"),
        ("daemon-errors-logged", "0"),
    ];
    let scenario = played(name, vmm, "tenant", HOST, &facts);
    Ok(Scenario { guest: Some(name), selftest: Some(name), ..scenario })
}

/// A scenario whose script is told its name, what boots its guest, and the daemon's configuration; its name is in front of its facts.
pub(super) fn played(name: &str, vmm: Vmm, guest: &str, script: &str, facts: &[(&str, &str)]) -> Scenario {
    let (guest, vmm) = (vmm.command(guest), vmm.name());
    Scenario {
        script: format!("name={name} guest={guest} vmm={vmm} config={CONFIG}\n{script}"),
        facts: facts.iter().map(|(fact, value)| (format!("{name}/{fact}"), (*value).to_owned())).collect(),
        ..Scenario::default()
    }
}

/// What a tenant's guest has of itself.
#[derive(Debug, Clone)]
pub struct Inside {
    pub(super) root: Initramfs,
    /// The lines of its script that load what it needs, and open the way of its results.
    pub(super) load: String,
}

impl Inside {
    /// Builds it, and puts the daemon and its configuration into the host.
    ///
    /// # Errors
    /// When a program does not build.
    pub fn build(machine: &mut Machine<'_>) -> Result<Self> {
        let programs = Programs::build(&["vmm_daemon", "pgctl"])?;
        for name in ["peergated", "peergate"] {
            machine.root().program(&format!("/bin/{name}"), &programs.path(name))?;
        }
        machine.root().file(CONFIG, checkout().join("configs/lab.toml"), 0o644);
        // A guest's kernel is the newest, whatever the host's is.
        let kit = machine.kit().with_kernel(Kernel::Newest)?;
        let (root, load) = root(&kit, &programs, &programs.module(&kit)?)?;
        Ok(Self { root, load: format!("{load}{RESULTS}") })
    }
}

/// The machine of every guest here.
pub(super) fn spec(root: Initramfs) -> GuestSpec {
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
start_daemon $name $config
rm -f /run/tenant.results
$guest $(device_words $vmm lab) >/run/guest.log 2>&1 &
watched $name
grep '^{' /run/tenant.results | sed "s/^/$name /" >&3
grep -q '^{' /run/tenant.results || cat /run/$name.log /run/guest.log /run/tenant.console
fact $name/guest-kernel-complaints $(sed -n 's/^kernel-complaints //p' /run/tenant.results)
end_daemon $name
"#;

/// In a guest: opens the way of its results, and counts what its kernel must not have said.
const RESULTS: &str = r#"
stty -F $RESULTS raw -echo 2>/dev/null
exec 3>$RESULTS
complaints() { dmesg | grep -cE 'BUG|WARNING|Oops|Call Trace'; }
"#;

/// In the tenant's guest.
const TENANT_GUEST: &str = r#"
insmod /lib/peergate.ko || dmesg | tail -20
pgctl selftest --json >&3
rmmod peergate
echo "kernel-complaints $(complaints)" >&3
"#;
