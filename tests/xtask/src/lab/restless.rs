//! A guest whose worker is killed while the device copies for it, which then reboots while it copies; a VMM that is killed while it copies; and the next
//! VM on the same socket. Each finds a device that works, and the daemon is as before. Under cloud-hypervisor, which makes the VM anew at a reboot and
//! connects again. Once more with real functions, whose own engines copy.
//!
//! Not here: the same under QEMU, without the lab (`demo`).

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result};

use super::check::Scenario;
use super::guests::{Inside, played, spec};
use super::inner::add_guest;
use super::machine::Machine;
use super::vmm::Vmm;
use crate::kit::Kernel;
use crate::work::checkout;

const VMM: Vmm = Vmm::CloudHypervisor;

/// Three boots of one guest, and what the daemon says between them.
///
/// # Errors
/// When a file cannot be written.
pub fn scenario(machine: &mut Machine<'_>, inside: &Inside) -> Result<Scenario> {
    add(machine, inside, "restless", GUEST)?;
    let facts = [
        ("daemon-is-ready", "yes"),
        ("first-boot/copies", "yes"),
        ("worker-loss/was-in-mid-transfer", "yes"),
        ("worker-loss/device-recovers", "yes"),
        ("worker-loss/failures", "1"),
        ("first-boot/kernel-complaints", "0"),
        ("reboot/was-in-mid-transfer", "yes"),
        ("reboot/copies", "yes"),
        ("reboot/kernel-complaints", "0"),
        ("kill/was-in-mid-transfer", "yes"),
        ("kill/tenant-is", "waiting"),
        ("kill/in-flight", "0"),
        ("next-vm/copies", "yes"),
        ("next-vm/copies-with-the-driver-loaded-anew", "yes"),
        ("next-vm/kernel-complaints", "0"),
        ("worker-failures", "1"),
        ("keeper-failures", "0"),
        ("daemon-ends", "0"),
        // The end of the worker that was killed.
        ("daemon-errors-logged", "1"),
    ];
    let words = "tenant=lab root=restless patience=120\n";
    Ok(played("cloud-hypervisor/restless", VMM, "restless", &format!("{words}{BEGIN}{LOSS}{KILL}{LOST}{END}"), &facts))
}

/// The same tenant's guest as in `transfers`, which reboots and is killed while an NVMe controller writes into another function's BAR for it.
///
/// # Errors
/// When a file cannot be read or written.
pub fn functions(machine: &mut Machine<'_>, inside: &Inside) -> Result<Scenario> {
    let path = checkout().join("configs/lab-devices.toml");
    let text = fs::read_to_string(&path).with_context(|| format!("Cannot read {}", path.display()))?;
    // The first tenant alone.
    let (first, _) = text.rsplit_once("[[tenant]]\n").context("configs/lab-devices.toml has two tenants")?;
    machine.root().bytes(OWNER_CONFIG, first, 0o644);
    add(machine, inside, "mover", MOVER)?;
    let facts = [
        ("daemon-is-ready", "yes"),
        ("first-boot/copies", "yes"),
        ("first-boot/kernel-complaints", "0"),
        ("reboot/was-in-mid-transfer", "yes"),
        ("reboot/copies", "yes"),
        ("reboot/kernel-complaints", "0"),
        ("kill/was-in-mid-transfer", "yes"),
        ("kill/tenant-is", "waiting"),
        ("kill/in-flight", "0"),
        ("next-vm/copies", "yes"),
        ("next-vm/kernel-complaints", "0"),
        ("worker-failures", "0"),
        ("keeper-failures", "0"),
        ("daemon-ends", "0"),
        ("daemon-errors-logged", "0"),
    ];
    let words = format!("config={OWNER_CONFIG} tenant=owner root=mover patience=200\n");
    Ok(played("cloud-hypervisor/restless-functions", VMM, "mover", &format!("{words}{BEGIN}{KILL}{END}"), &facts))
}

const OWNER_CONFIG: &str = "/etc/lab-owner.toml";

/// A guest with a disk, from which it learns which boot it is.
fn add(machine: &mut Machine<'_>, inside: &Inside, name: &str, body: &str) -> Result<()> {
    let Inside { mut root, mut load } = inside.clone();
    for module in machine.kit().with_kernel(Kernel::Newest)?.kernel_modules(&["virtio_blk"])? {
        let path = format!("/lib/{}.ko", module.name);
        let _ = writeln!(load, "insmod {path}");
        root.file(&path, module.path, 0o644);
    }
    root.init_script(&format!("{load}{BOOT}{body}{GOES}"));
    add_guest(machine, VMM, name, &spec(root))
}

/// In the host: the first boot. The disk tells the guest which one it is.
const BEGIN: &str = r#"
log=/run/$root.results
said() { sed -n "s|^$1 ||p" $log; }
has_said() { [ -n "$(said $1)" ]; }

mkdir -p /run/$vmm
start_daemon $name $config
echo 1 | dd of=/run/boots bs=4096 conv=sync 2>/dev/null
boot="$guest $(device_words $vmm $tenant) --disk path=/run/boots,image_type=raw"
$boot >/run/guest.log 2>&1 &
vm=$!
"#;

/// The worker goes while it copies.
const LOSS: &str = r#"
within 120 has_said boot-1/until-loss
within 10 is_tenant in_flight -gt 0 && kill -9 $(of_tenant worker_pid) && fact $name/worker-loss/was-in-mid-transfer yes
within 120 has_said boot-1/recovers
fact $name/worker-loss/failures $(of_tenant failures)
"#;

/// The VMM goes while it copies for the second boot; then comes the next VM.
const KILL: &str = r#"
within $patience has_said boot-2/in-flight
within 10 is_tenant in_flight -gt 0 && kill -9 $vm && fact $name/kill/was-in-mid-transfer yes
wait $vm
within 60 is_tenant state = waiting
fact $name/kill/tenant-is $(of_tenant state)
fact $name/kill/in-flight $(of_tenant in_flight)
$boot >>/run/guest.log 2>&1
"#;

/// What only a guest that lost its worker has said.
const LOST: &str = r#"
fact $name/worker-loss/device-recovers $(said boot-1/recovers)
fact $name/next-vm/copies-with-the-driver-loaded-anew $(said boot-3/copies-again)
"#;

/// What each has said.
const END: &str = r#"
fact $name/first-boot/copies $(said boot-1/copies)
fact $name/first-boot/kernel-complaints $(said boot-1/complaints)
fact $name/reboot/was-in-mid-transfer $(said boot-1/in-flight)
fact $name/reboot/copies $(said boot-2/copies)
fact $name/reboot/kernel-complaints $(said boot-2/complaints)
fact $name/next-vm/copies $(said boot-3/copies)
fact $name/next-vm/kernel-complaints $(said boot-3/complaints)
fact $name/worker-failures $(of_tenant failures)
fact $name/keeper-failures $(of_tenant keeper_failures)
has_said boot-3/complaints || cat /run/$name.log /run/guest.log $log /run/$root.console
end_daemon $name
"#;

/// In a guest, first of all.
const BOOT: &str = r#"
read boot </dev/vda
echo $((boot + 1)) >/dev/vda
sync
insmod /lib/peergate.ko || dmesg | tail -20
say() { echo "boot-$boot/$*" >&3; }
"#;

/// With copies in flight: the first time it reboots, the second time it is killed.
const GOES: &str = r#"
exec 3>&-
[ $boot = 1 ] && reboot -f
wait
"#;

/// The owner of real functions copies once, then again and again.
const MOVER: &str = r#"
pgctl copy --from ssd0 --to mem0 --size 1M --verify --path direct && say copies yes
say complaints $(complaints)
[ $boot = 3 ] && exit
pgctl copy --from ssd0 --to mem0 --size 8M --repeat 100000 --path direct --json >/log 2>&1 3>&- &
until grep -q direct /log; do kill -0 $! || break; usleep 100000; done
grep -q '"path":"direct"' /log && say in-flight yes
"#;

/// It copies once; the first time it loses the worker; then it copies again and again.
const GUEST: &str = r#"
copies() { pgctl copy --from gpu0 --to fpga0 --size 1M --verify; }
copies && say copies yes

if [ $boot = 1 ]; then
    mkfifo /run/remarks
    exec 6<>/run/remarks
    pgctl selftest --until-loss 2>&6 3>&- &
    read remark <&6 && say until-loss $remark
    wait $! && say recovers yes
fi
if [ $boot = 3 ]; then
    rmmod peergate
    insmod /lib/peergate.ko
    copies && say copies-again yes
fi
say complaints $(complaints)
[ $boot = 3 ] && exit

mkfifo /run/orders /run/answers
pgctl act </run/orders >/run/answers 3>&- &
exec 4>/run/orders 5</run/answers
printf 'copies start\ncopies more 8\n' >&4
read opened <&5 && read started <&5 && read more <&5
case $more in *'"ok":true'*) say in-flight yes ;; *) echo "$more" ;; esac
"#;
