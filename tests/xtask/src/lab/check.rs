//! Every scenario of the lab, in one boot of the host: what it printed, and what it had to.
//!
//! The host prints facts, a line `NAME VALUE` each; what each must be is known here, so a fact that does not come is a failure too.
//!
//! Not here: running a single program (`run_program`).

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result};

use super::inner::add_guest;
use super::machine::{Machine, Ran};
use super::topology::{Device, Topology};
use crate::demo::{Row, Rows};
use crate::guest::{GuestSpec, Initramfs};
use crate::kit::Kit;

/// From the host's start to its end. The translator on a busy machine is slow.
const TIME: Duration = Duration::from_secs(420);
/// From a guest's start in the host to its end.
const GUEST_TIME: Duration = Duration::from_secs(240);
/// What a guest in the host says of what runs it.
const GUEST_SAYS: &str = "GUEST-RUNS-ON";

/// Boots the host of a topology, runs every scenario in it and judges it. A row is reported as soon as all is over. Blocks.
///
/// # Errors
/// When the host did not run to its end.
pub fn check<'r>(kit: &Kit, topology: &Topology, report: &'r mut dyn FnMut(&Row)) -> Result<Rows<'r>> {
    let mut machine = Machine::new(kit, topology)?;
    let guest = add_guest(&mut machine, "bare", &bare_guest(kit)?)?;
    let host = format!("Linux {} under QEMU {}", kit.kernel_release(), kit.qemu.version);
    eprintln!("booting the lab: {host}, {} MiB, {} ports", topology.memory_mib, topology.ports.len());
    let ran = machine.run(&SCRIPT.replace("GUEST-COMMAND", &guest), TIME)?;
    let mut rows = Rows::new(report);
    judge(topology, &ran, &mut rows).with_context(|| format!("The host's console:\n{}", ran.console.join("\n")))?;
    Ok(rows)
}

/// A guest that says what it runs on and ends.
fn bare_guest(kit: &Kit) -> Result<GuestSpec> {
    let mut root = Initramfs::new();
    root.busybox(kit)?;
    root.init_script(&format!("echo {GUEST_SAYS} $(dmesg | sed -n 's/.*Hypervisor detected: //p')"));
    let mut spec = GuestSpec::new(root);
    (spec.memory_mib, spec.smp, spec.timeout) = (256, 1, GUEST_TIME);
    Ok(spec)
}

fn judge(topology: &Topology, ran: &Ran, rows: &mut Rows<'_>) -> Result<()> {
    let lines = ran.results.lines().map(str::trim_end);
    let facts: HashMap<&str, &str> = lines.map(|line| line.split_once(' ').unwrap_or((line, ""))).collect();
    facts.get("done").context("The lab's host did not run to its end")?;
    for (name, expected) in expected(topology) {
        let got = facts.get(name.as_str()).copied().unwrap_or_default();
        rows.add(Row::new(format!("lab/{name}"), expected, got));
    }
    let fact = |name| facts.get(name).copied().unwrap_or("?");
    eprintln!(
        "the host ran {:.1} s; in it, the guest took {} s, and {} MiB of {} were the least that was free",
        ran.wall.as_secs_f64(),
        fact("seconds-of-guest"),
        fact("mib-free"),
        topology.memory_mib,
    );
    Ok(())
}

/// Facts that the host must print.
fn expected(topology: &Topology) -> Vec<(String, String)> {
    let mut facts = vec![("iommu", "dmar0".to_owned()), ("interrupt-remapping", "on".to_owned())]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect::<Vec<_>>();
    for port in &topology.ports {
        let mut fact = |what: &str, value: String| facts.push((format!("{}/{what}", port.name), value));
        fact("device", port.device.id().to_owned());
        fact("driver", "vfio-pci".to_owned());
        fact("devices-in-its-group", "1".to_owned());
        fact("group-can-be-opened", "yes".to_owned());
        match port.device {
            Device::Memory { size_mib } => fact("memory-behind-bar-2", format!("{size_mib}MiB")),
            Device::Nvme { cmb_mib, .. } if cmb_mib > 0 => fact("memory-behind-bar-2", format!("{cmb_mib}MiB")),
            Device::Edu | Device::Nvme { .. } => {}
        }
    }
    facts.push(("guest-runs-on".to_owned(), "KVM".to_owned()));
    facts.push(("kernel-complaints".to_owned(), "0".to_owned()));
    facts
}

/// See the module. Busybox's shell, after what `script` defines.
const SCRIPT: &str = r#"
fact() { echo "$*" >&3; }
free() { sed -n 's/^MemAvailable: *\([0-9]*\).*/\1/p' /proc/meminfo; }

fact iommu $(ls /sys/class/iommu)
fact interrupt-remapping $(dmesg | grep -q 'Enabled IRQ remapping' && echo on)
while read name address group; do
    device=/sys/bus/pci/devices/$address
    fact $name/device $(sed s/0x// $device/vendor):$(sed s/0x// $device/device)
    fact $name/driver $(basename $(readlink $device/driver))
    fact $name/devices-in-its-group $(ls $device/iommu_group/devices | wc -l)
    fact $name/group-can-be-opened $([ -c /dev/vfio/$group ] && exec 4<>/dev/vfio/$group && echo yes)
    sed -n 3p $device/resource | while read start end flags; do
        fact $name/memory-behind-bar-2 $(((end - start + 1) >> 20))MiB
    done
done <$PEERGATE_LAB/devices

read before rest </proc/uptime
( GUEST-COMMAND ) >/run/guest.log 2>&1 &
guest=$!
least=$(free)
while kill -0 $guest 2>/dev/null; do
    now=$(free)
    [ $now -lt $least ] && least=$now
    usleep 200000
done
read after rest </proc/uptime
fact guest-runs-on $(sed -n 's/^GUEST-RUNS-ON *//p' /run/guest.log)
grep -q ^GUEST-RUNS-ON /run/guest.log || cat /run/guest.log
fact seconds-of-guest $((${after%.*} - ${before%.*}))
fact mib-free $((least >> 10))

fact kernel-complaints $(dmesg | grep -cE 'BUG|WARNING|Oops|Call Trace|DMAR: \[')
dmesg | grep -E 'BUG|WARNING|Oops|Call Trace|DMAR: \['
fact done
"#;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn rows(text: &str) -> Result<(usize, usize)> {
        let topology = Topology::load(Path::new("default"))?;
        let ran = Ran { results: text.to_owned(), console: Vec::new(), wall: Duration::ZERO };
        let mut ignore = |_: &Row| {};
        let mut rows = Rows::new(&mut ignore);
        judge(&topology, &ran, &mut rows)?;
        Ok((rows.all().len(), rows.failed()))
    }

    #[test]
    fn facts_that_do_not_come_or_are_wrong_are_failures() {
        let expected = expected(&Topology::load(Path::new("default")).unwrap());
        let all: String = expected.iter().map(|(name, value)| format!("{name} {value}\r\n")).collect();
        assert_eq!(rows(&format!("{all}done\n")).unwrap(), (expected.len(), 0));
        assert_eq!(rows("done\n").unwrap(), (expected.len(), expected.len()));
        let wrong = all.replacen("vfio-pci", "nvme", 1);
        assert_eq!(rows(&format!("{wrong}done\n")).unwrap(), (expected.len(), 1));
        assert!(rows(&all).is_err(), "the end is missing");
    }
}
