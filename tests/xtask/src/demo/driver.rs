//! The guest driver's own tests: what load, unload, reload, unbind, killed processes and a device that loses its state leave behind, and which
//! endpoints there are after that.
//!
//! [`SCRIPT`] runs in the guest, in busybox's shell, and prints one line a test: `test NAME EXPECTED GOT`. Memory that the driver pins or allocates is
//! counted by the kernel itself (`/proc/vmstat`, `/proc/meminfo`), before and after.
//!
//! Not here: transfers.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::programs::{Change, changed_module};
use super::rows::Row;
use crate::kit::Kit;

/// Reads a line of [`SCRIPT`] that is no row of `pgctl`.
///
/// # Errors
/// When it is none of its own.
pub fn read_result(line: &str) -> Result<Row> {
    let mut words = line.splitn(4, ' ');
    let row = (|| {
        words.next().filter(|word| *word == "test")?;
        Some(Row::new(format!("driver/{}", words.next()?), words.next()?, words.next()?))
    })();
    row.with_context(|| format!("The driver's tests printed {line:?}"))
}

/// Builds the driver that waits between HELLO and PROBE, as often as it is told to, until the session is over.
///
/// # Errors
/// When it does not build clean, or its sources have moved on.
pub fn dawdling_module(kit: &Kit) -> Result<PathBuf> {
    changed_module(kit, "guest-dawdler", DAWDLE)
}

const DAWDLE: &[Change] = &[
    (
        "session.c",
        "#include <linux/log2.h>",
        "#include <linux/delay.h>\n#include <linux/log2.h>\n#include <linux/module.h>",
    ),
    (
        "session.c",
        "#define PG_SESSION_TRIES\t16",
        "#define PG_SESSION_TRIES\t16\n\nstatic unsigned int pg_dawdles;\nmodule_param_named(dawdles, pg_dawdles, uint, 0600);",
    ),
    (
        "session.c",
        "\tret = pg_probe_endpoints(dev, le32_to_cpu(hello.session), PG_MAX_ENDPOINTS, &msg);",
        r#"	if (pg_dawdles) {
		u32 now;

		dev_crit(&dev->dev, "operator: no, %s\n",
			 pg_dawdles == 2 ? "take it away" : "another one");
		do {
			msleep(10);
			virtio_cread_le(dev->vdev, struct virtio_peergate_config, session, &now);
		} while (now == le32_to_cpu(hello.session));
		pg_dawdles--;
	}
	ret = pg_probe_endpoints(dev, le32_to_cpu(hello.session), PG_MAX_ENDPOINTS, &msg);"#,
    ),
];

/// See the module. The file descriptor 3 takes results.
pub const SCRIPT: &str = r#"
say() { echo "test $1 $2 $3" >&3; }
pinned() { a=$(grep nr_foll_pin_acquired /proc/vmstat | cut -d' ' -f2); r=$(grep nr_foll_pin_released /proc/vmstat | cut -d' ' -f2); echo $((a - r)); }
# Waits until a command says what is wanted; a bounded number of looks, a tenth of a second apart.
until_is() { want=$1; shift; n=0; got=$("$@" 2>/dev/null); while [ "$got" != "$want" ] && [ $n -lt $((100 * SLOW)) ]; do usleep 100000; n=$((n+1)); got=$("$@" 2>/dev/null); done; echo "$got"; }
users() { grep '^peergate ' /proc/modules | cut -d' ' -f3; }
loaded() { grep -c '^peergate ' /proc/modules; }
device() { for d in /sys/bus/virtio/drivers/peergate/virtio*; do [ -e "$d" ] && basename $d; done; }
nodes() { ls /dev | grep -c '^peergate'; }
# Copies that go on until something ends them; says whether they do go on.
copying() { [ -s /tmp/copies ] && kill -0 $victim && echo yes; }
busy() { pgctl copy --from gpu0 --to fpga0 --size 32M --repeat 100000 >/tmp/copies 2>&1 & victim=$!; say copying-before-$1 yes "$([ "$(until_is yes copying)" = yes ] && echo yes || tail -1 /tmp/copies)"; }

say pinned-after-selftest 0 $(until_is 0 pinned)
say module-users-after-selftest 0 $(until_is 0 users)

# The device loses its state under work in flight: the host ends the worker when pgctl says, on the console, that there is some.
losses=0
while [ $losses -lt $LOSSES ]; do
    pgctl selftest --until-loss --json >&3
    losses=$((losses + 1))
    say users-after-loss-$losses 0 $(until_is 0 users)
    say pinned-after-loss-$losses 0 $(until_is 0 pinned)
done

# The operator, asked on the console, changes the tenant's slices: the endpoints are those of the new session, with the same module.
names() { pgctl list --json | tr ',' '\n' | grep '"name":' | cut -d'"' -f4 | tr '\n' ' ' | sed 's/ $//; s/ /,/g'; }
say endpoints-at-first gpu0,fpga0 $(names)
busy slice-add
echo "operator: add a slice"
wait $victim; say copy-ends-with-the-session 1 $?
say endpoints-after-slice-add gpu0,fpga0,gpu1 $(until_is gpu0,fpga0,gpu1 names)
pgctl copy --from gpu1 --to fpga0 --size 1M --verify >/dev/null 2>&1; say new-endpoint-works 0 $?
echo "operator: take it away"
say endpoints-after-slice-remove gpu0,fpga0 $(until_is gpu0,fpga0 names)
# The session ends between HELLO and PROBE, twice in a row.
begun() { dmesg | grep -c 'device lost its state: session'; }
rmmod peergate; insmod /lib/dawdling.ko; echo 2 >/sys/module/peergate/parameters/dawdles
before=$(begun)
echo "operator: add a slice"
say endpoints-after-lost-sessions gpu0,fpga0,last $(until_is gpu0,fpga0,last names)
say sessions-that-were-lost 2 $((2 - $(cat /sys/module/peergate/parameters/dawdles)))
say sessions-that-began 1 $(($(begun) - before))
say sessions-that-did-not-begin 0 $(dmesg | grep -c 'cannot begin a session')
pgctl copy --from last --to fpga0 --size 1M --verify >/dev/null 2>&1; say works-after-lost-sessions 0 $?
rmmod peergate; insmod /lib/peergate.ko
say users-after-slice-changes 0 $(until_is 0 users)
say pinned-after-slice-changes 0 $(until_is 0 pinned)

# A process killed in mid-copy.
busy kill
kill -9 $victim; wait $victim 2>/dev/null
say users-after-kill 0 $(until_is 0 users)
say pinned-after-kill 0 $(until_is 0 pinned)
pgctl copy --from gpu0 --to fpga0 --size 1M --verify >/dev/null 2>&1; say works-after-kill 0 $?

# Unload right behind a killed process: its DETACH may still be on its way.
busy unload
kill -9 $victim; wait $victim 2>/dev/null
until_is 0 users >/dev/null
rmmod peergate; say unload-behind-a-kill 0 $?
say nodes-after-unload 0 $(nodes)
say pinned-after-unload 0 $(until_is 0 pinned)
insmod /lib/peergate.ko; say reload 0 $?
pgctl copy --from gpu0 --to fpga0 --size 1M --verify >/dev/null 2>&1; say works-after-reload 0 $?

# With a file open the module stays, but the device can be taken away in mid-copy.
busy unbind
rmmod peergate 2>/dev/null; say unload-while-open-is-refused 1 $(loaded)
name=$(device)
echo $name > /sys/bus/virtio/drivers/peergate/unbind; say unbind-in-mid-copy 0 $?
wait $victim; say copy-ends-with-an-error 1 $?
say users-after-unbind 0 $(until_is 0 users)
say pinned-after-unbind 0 $(until_is 0 pinned)
say nodes-after-unbind 0 $(nodes)
say domains-ended-before-unbind 0 $(dmesg | grep -c 'did not end its domains')
echo $name > /sys/bus/virtio/drivers/peergate/bind; say bind-again 0 $?
pgctl copy --from gpu0 --to fpga0 --size 1M --verify >/dev/null 2>&1; say works-after-bind 0 $?

# Many loads leave no memory behind. What caches keep for themselves is given back first, and so is what KASAN keeps from being used again.
slab() { for cache in /sys/kernel/slab/*/shrink; do echo 1 > $cache; done 2>/dev/null; grep -E '^(SUnreclaim|VmallocUsed)' /proc/meminfo | tr -s ' ' | cut -d' ' -f2 | awk '{s+=$1} END {print s}'; }
n=0; while [ $n -lt 3 ]; do rmmod peergate; insmod /lib/peergate.ko; n=$((n+1)); done
before=$(slab)
n=0; while [ $n -lt 20 ]; do rmmod peergate; insmod /lib/peergate.ko; n=$((n+1)); done
after=$(slab)
say memory-after-20-loads kept $([ $((after - before)) -lt 1024 ] && echo kept || echo grew-by-$((after - before))-KiB)
"#;
