//! A tenant's guest that moves bytes between real PCI functions: NVMe namespaces, memory behind BARs, by their own engines; and the guest of a tenant
//! that has none of them.
//!
//! Whatever is said to be direct, each completion has said so (`pgctl copy --path direct`). Not here: the functions without a guest (`engines`).

use anyhow::Result;

use super::check::Scenario;
use super::guests::{Inside, spec};
use super::inner::add_guest;
use super::machine::Machine;
use super::vmm::Vmm;
use crate::work::checkout;

const CONFIG: &str = "/etc/lab-devices.toml";

/// Both guests, one after the other, beside one daemon.
///
/// # Errors
/// When a file cannot be written.
pub fn scenario(machine: &mut Machine<'_>, inside: &Inside, vmm: Vmm) -> Result<Scenario> {
    machine.root().file(CONFIG, checkout().join("configs/lab-devices.toml"), 0o644);
    for (name, body) in [("owner", OWNER), ("other", OTHER)] {
        let mut root = inside.root.clone();
        root.init_script(&format!("{}{GUEST}{body}", inside.load));
        add_guest(machine, vmm, name, &spec(root))?;
    }
    let moved = "as sent, exit 0";
    let facts = [
        ("daemon-is-ready", "yes"),
        ("proofs-that-failed", "0"),
        ("broker's-death/owner-has-a-new-session", "yes"),
        ("owner/ssd0-to-mem0", moved),
        ("owner/mem0-to-ssd1", moved),
        ("owner/ssd1-to-mem0", moved),
        ("owner/mem0-to-ssd0", moved),
        ("owner/ssd1-to-cmb0", moved),
        ("owner/mem0-to-mem0-by-edu0", moved),
        ("owner/ssd0-to-ssd1-staged", moved),
        ("owner/into-what-is-not-mapped", "exit 1"),
        ("owner/again-after-the-fault", moved),
        ("owner/kernel-complaints", "0"),
        ("iommu-faults-in-the-kernel's-log", "yes"),
        ("iommu-faults-in-the-daemon's-log", "yes"),
        ("other/endpoints", "gpu0 fpga0"),
        ("other/of-the-owner", "as of nobody"),
        ("other/kernel-complaints", "0"),
        ("a-function-for-two-tenants", "refused"),
        ("kernel-complaints", "0"),
        ("daemon-ends", "0"),
        // The broker's death.
        ("daemon-errors-logged", "1"),
    ];
    let name = match vmm {
        Vmm::Qemu => "transfers".to_owned(),
        Vmm::CloudHypervisor => format!("{}/transfers", vmm.name()),
    };
    let (owner, other) = (vmm.command("owner"), vmm.command("other"));
    let words = format!("name={name} owner={owner} other={other} vmm={} config={CONFIG}\n", vmm.name());
    Ok(Scenario {
        script: format!("{words}{HOST}"),
        facts: facts.map(|(fact, value)| (format!("{name}/{fact}"), value.to_owned())).to_vec(),
        ..Scenario::default()
    })
}

/// A guest that holds what it has moved until the host goes: then the bytes of the devices are looked at from where the devices are made.
///
/// # Errors
/// When a file cannot be written.
pub fn held(machine: &mut Machine<'_>, inside: &Inside) -> Result<Scenario> {
    machine.root().file(CONFIG, checkout().join("configs/lab-devices.toml"), 0o644);
    let mut root = inside.root.clone();
    root.init_script(&format!("{}{GUEST}{HOLDER}", inside.load));
    add_guest(machine, Vmm::Qemu, "holder", &spec(root))?;
    let seen = [("mem0", "mem0"), ("ssd1", "nvme1-1")];
    Ok(Scenario {
        script: format!("config={CONFIG}\n{HOLDING}"),
        facts: vec![
            ("owner-sees/daemon-is-ready".to_owned(), "yes".to_owned()),
            ("owner-sees/moved".to_owned(), "yes".to_owned()),
        ],
        seen: seen.map(|(name, file)| (format!("owner-sees/{name}"), file.to_owned(), sent())).to_vec(),
        ..Scenario::default()
    })
}

/// The file that guests move.
fn sent() -> Vec<u8> {
    let mut bytes: Vec<u8> = (1..=1_200_000_u32).flat_map(|number| format!("{number}\n").into_bytes()).collect();
    bytes.truncate(8 << 20);
    bytes
}

/// In the host. Nothing ends here.
const HOLDING: &str = r#"
start_daemon owner-sees $config
guest-holder $(device_words qemu owner) >/run/guest.log 2>&1 &
holds() { grep -q holds /run/holder.results; }
within 120 holds && fact owner-sees/moved yes
holds || cat /run/owner-sees.log /run/guest.log
"#;

/// In its guest: nobody reads what is read back, so the buffers stay.
const HOLDER: &str = r#"
mkfifo /nobody
pgctl copy --from mem0 --to ssd1 --by ssd1 --file /file --path direct --json --out /nobody >/log 2>&1 &
until grep -q '"path":"direct"' /log; do kill -0 $! || break; usleep 100000; done
grep -q '"path":"direct"' /log && say holds
cat /log
wait
"#;

/// In the host.
const HOST: &str = r#"
said() { sed -n "s|^$1 ||p" /run/owner.results /run/other.results; }
faults='DMAR: \[DMA'
rm -f /run/owner.results /run/other.results
touch /run/owner.results /run/other.results
mkdir -p /run/$(dirname $name)
dmesg -c >/dev/null
start_daemon $name $config
fact $name/proofs-that-failed $(grep -c 'not proved' /run/$name.log)
# Both tenants are as the daemon tells of them, the owner first.
owners() { of_tenant $1 | head -1; }
is_new() { [ "$(owners session)" -gt $session ] && [ "$(owners state)" = waiting ]; }
session=$(owners session)
kill -9 $(of_tenant broker_pid)
within 60 is_new && fact "$name/broker's-death/owner-has-a-new-session" yes
$owner $(device_words $vmm owner) >/run/guest.log 2>&1
for what in ssd0-to-mem0 mem0-to-ssd1 ssd1-to-mem0 mem0-to-ssd0 ssd1-to-cmb0 mem0-to-mem0-by-edu0 ssd0-to-ssd1-staged \
    into-what-is-not-mapped again-after-the-fault kernel-complaints; do
    fact $name/owner/$what "$(said owner/$what)"
done
fact "$name/iommu-faults-in-the-kernel's-log" $(dmesg | grep -q "$faults" && echo yes)
fact "$name/iommu-faults-in-the-daemon's-log" $(grep -q 'The IOMMU stopped it' /run/$name.log && echo yes)
$other $(device_words $vmm other) >>/run/guest.log 2>&1
for what in endpoints of-the-owner kernel-complaints; do fact $name/other/$what "$(said other/$what)"; done
peergate slice add other --device mem0 --memory 4KiB >/run/refusal 2>&1 || fact $name/a-function-for-two-tenants refused
fact $name/kernel-complaints $(dmesg | grep -cE 'BUG|WARNING|Oops|Call Trace')
grep -hE '^(owner|other)/.*/log' /run/owner.results /run/other.results
cat /run/refusal
end_daemon $name
"#;

/// In a guest.
const GUEST: &str = r#"
say() { echo "$*" >&3; }
hash() { sha256sum "$1" | cut -d' ' -f1; }
seq 1 1200000 | head -c 8388608 >/file
insmod /lib/peergate.ko || dmesg | tail -20
"#;

/// In the owner's guest. The file is the same every time, so whoever looks at a device knows what is there.
const OWNER: &str = r#"
# moved WHAT FILE WORDS: copies a file with the words, and says whether it is where it should be.
moved() {
    what=$1 file=$2
    shift 2
    rm -f /out
    pgctl copy --file $file --out /out --json "$@" >/log 2>&1
    code=$?
    sed "s|^|owner/$what/log |" /log >&3
    say owner/$what $([ -f /out ] && [ "$(hash $file)" = "$(hash /out)" ] && echo as sent,) exit $code
}
head -c 65536 /file >/small
head -c 262144 /file >/middle
moved ssd0-to-mem0 /file --from ssd0 --to mem0 --path direct
moved mem0-to-ssd1 /file --from mem0 --to ssd1 --by ssd1 --path direct
moved ssd1-to-mem0 /file --from ssd1 --to mem0 --path direct
moved mem0-to-ssd0 /file --from mem0 --to ssd0 --by ssd0 --path direct
moved ssd1-to-cmb0 /middle --from ssd1 --to cmb0 --path direct
moved mem0-to-mem0-by-edu0 /small --from mem0 --to mem0 --by edu0 --path direct
moved ssd0-to-ssd1-staged /middle --from ssd0 --to ssd1 --path staged
head -c 524288 /file >/whole
moved into-what-is-not-mapped /whole --from ssd1 --to cmb0
# As long as the kernel may keep quiet about more faults, nothing counts as moved.
tries=0
until pgctl copy --file /middle --out /out --from ssd1 --to cmb0 >/log 2>&1 || [ $((tries += 1)) = 30 ]; do sleep 1; done
moved again-after-the-fault /middle --from ssd1 --to cmb0 --path direct
rmmod peergate
say owner/kernel-complaints $(complaints)
"#;

/// In the other tenant's guest. What is the owner's has numbers there that nothing of its own has.
const OTHER: &str = r#"
say other/endpoints $(pgctl list --json | grep -o '"name":"[a-z0-9]*"' | cut -d'"' -f4)
printf 'hold 4096 1\nforge endpoint 2\nforge endpoint 60000\nend\n' | pgctl act >/log 2>&1
sed "s|^|other/act/log |" /log >&3
answer() { sed -n "${1}s/.*\"answer\":\"\([^\"]*\)\".*/\1/p" /log; }
[ -n "$(answer 3)" ] && [ "$(answer 3)" = "$(answer 4)" ] && say other/of-the-owner as of nobody
rmmod peergate
say other/kernel-complaints $(complaints)
"#;
