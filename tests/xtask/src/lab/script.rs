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

# within SECONDS COMMAND: tries it again and again until it succeeds; fails when the time is over.
within() {
    tries=$1
    shift
    until "$@"; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || return 1
        sleep 1
    done
}

# start_daemon NAME CONFIG: a peergated, and whether it is ready; end_daemon NAME ends it and says how it went.
start_daemon() {
    peergated --config $2 >/run/$1.out 2>/run/$1.log &
    daemon=$!
    within 120 is_up $1
    fact $1/daemon-is-ready $(grep -q ready /run/$1.out && echo yes)
    grep -q ready /run/$1.out || cat /run/$1.log
}
is_up() { grep -qs ready /run/$1.out || ! kill -0 $daemon; }
end_daemon() {
    kill $daemon
    wait $daemon
    fact $1/daemon-ends $?
    fact $1/daemon-errors-logged $(grep -cE ' ERROR |panicked' /run/$1.log)
    grep -E ' ERROR |panicked' /run/$1.log
}

# device_words VMM TENANT: what the VMM is told of the tenant's device; a guest here has its memory anyway.
device_words() { peergate attach --vmm $1 $2 | tr -d "'\\\\" | grep -E '^(-chardev|-device|--generic-vhost-user) '; }

# of_tenant NAME: a number or word that the daemon has of its only tenant; is_tenant NAME TEST VALUE asks about it.
of_tenant() { peergate --json status | sed -n "s/^ *\"$1\": \"*\([a-z0-9]*\)\"*,*$/\1/p"; }
is_tenant() { [ "$(of_tenant $1)" $2 $3 ]; }

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
