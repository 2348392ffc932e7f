//! Whether the host has what its topology says, isolated and in the hands of vfio-pci.
//!
//! Not here: what the devices do.

use super::check::Scenario;
use super::topology::{Device, Topology};

/// The IOMMU, and each device of the topology.
#[must_use]
pub fn scenario(topology: &Topology) -> Scenario {
    let mut facts = Vec::new();
    let mut fact = |name: String, value: &str| facts.push((name, value.to_owned()));
    fact("iommu".to_owned(), "dmar0");
    fact("interrupt-remapping".to_owned(), "on");
    for port in &topology.ports {
        let mut fact = |what: &str, value: &str| fact(format!("{}/{what}", port.name), value);
        fact("device", port.device.id());
        fact("driver", "vfio-pci");
        fact("devices-in-its-group", "1");
        fact("group-can-be-opened", "yes");
        match port.device {
            Device::Memory { size_mib: mib } | Device::Nvme { cmb_mib: mib, .. } if mib > 0 => {
                fact("memory-behind-bar-2", &format!("{mib}MiB"));
            }
            Device::Edu | Device::Memory { .. } | Device::Nvme { .. } => {}
        }
    }
    Scenario { script: DEVICES.to_owned(), facts, ..Scenario::default() }
}

/// What the host's kernel must not have said: about itself, or, where none is `provoked`, about a DMA that the IOMMU stopped.
#[must_use]
pub fn kernel(provoked: bool) -> Scenario {
    let facts = vec![("kernel-complaints".to_owned(), "0".to_owned())];
    let faults = if provoked { "" } else { r"|DMAR: \[" };
    Scenario { script: format!("complaints='{COMPLAINTS}{faults}'\n{KERNEL}"), facts, ..Scenario::default() }
}

/// The last ones come from a debug kernel.
const COMPLAINTS: &str = "BUG|WARNING|Oops|Call Trace|KASAN: |UBSAN|INFO: |turning off the locking";

const DEVICES: &str = r#"
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
"#;

const KERNEL: &str = r#"
fact kernel-complaints $(dmesg | grep -cE "$complaints")
dmesg | grep -E "$complaints"
"#;
