//! What the host runs, in busybox's shell: first always the same, then what it is asked.
//!
//! What a program there may rely on: `/run/lab/devices` has a line `NAME ADDRESS GROUP` for each device of the topology, such as
//! `nvme0 0000:01:00.0 4`; each is bound to vfio-pci; `/kit` is the kit's image; `PEERGATE_LAB` is set.
//!
//! Not here: the scenarios.

/// Defines what [`super::machine`] calls by name.
pub(super) const START: &str = r#"
stty -F /dev/ttyS1 raw -echo 2>/dev/null
exec 3>/dev/ttyS1
hostname lab
. /lib/lab.sh
"#;

/// The functions.
pub(super) const LIBRARY: &str = r#"
export PEERGATE_LAB=/run/lab
mkdir -p $PEERGATE_LAB
: >$PEERGATE_LAB/devices

fact() { echo "$*" >&3; }

# Waits for a guest that was started last, and says how long it took and how little memory the host had left meanwhile.
watched() {
    name=$1 before=$(seconds) least=$(left)
    while kill -0 $! 2>/dev/null; do
        now=$(left)
        [ $now -lt $least ] && least=$now
        sleep 1
    done
    fact $name-took $(($(seconds) - before))
    fact $name-left $((least >> 10))
}
left() { sed -n 's/^MemAvailable: *\([0-9]*\).*/\1/p' /proc/meminfo; }
seconds() { cut -d. -f1 /proc/uptime; }

# What the kernel calls the device behind the root port in a slot.
behind() {
    for device in /sys/bus/pci/devices/0000:00:$1.0/0000:*; do
        [ -e "$device/vendor" ] && basename "$device"
    done
}

# Gives the device behind a root port to vfio-pci, and notes it down.
bind_port() {
    for address in $(behind $2); do
        device=/sys/bus/pci/devices/$address
        echo vfio-pci >$device/driver_override
        [ -e $device/driver ] && echo $address >$device/driver/unbind
        echo $address >/sys/bus/pci/drivers_probe
        group=$(readlink $device/iommu_group)
        echo "$1 $address ${group##*/}" >>$PEERGATE_LAB/devices
    done
}

# The kit, from which guests of this host boot.
mount_kit() { mkdir -p /kit && mount -t ext4 -o ro /dev/vda /kit; }
"#;

/// A prompt on the console; powers off at its end.
pub(super) const SHELL: &str = r#"
cat $PEERGATE_LAB/devices
export PS1='lab# '
setsid cttyhack sh
"#;
