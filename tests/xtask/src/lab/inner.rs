//! Guests of the lab's host, on the host's own KVM: what each VMM is told of them.
//!
//! A guest finds in its environment where its results go (RESULTS, a serial port of their own); what leaves there is added to `/run/NAME.results` of the
//! host. The kernel and the root file system are the same under every VMM.
//!
//! Not here: what such a guest is for.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context, Result};

use super::machine::{KIT, Machine};
use super::quoted;
use super::vmm::{CLOUD_HYPERVISOR, Vmm};
use crate::guest::{Accel, GuestSpec};
use crate::kit::Kit;

/// Puts what a guest boots from into the host, and a command ([`Vmm::command`]) that boots it; arguments of the command are more arguments of the VMM.
/// The command's output is what the VMM says, and under QEMU the guest's console; cloud-hypervisor leaves that in `/run/NAME.console`. The guest's
/// kernel is the newest.
///
/// # Errors
/// When its root file system cannot be written.
pub fn add_guest(machine: &mut Machine<'_>, vmm: Vmm, name: &str, spec: &GuestSpec) -> Result<()> {
    let kit = machine.kit().seen_at(Path::new(KIT))?;
    let archive = machine.scratch().join(format!("{name}.gz"));
    spec.initramfs.write_to(&archive)?;
    let inside = format!("/lib/guests/{name}.gz");
    machine.root().file(&inside, archive, 0o644);
    let (words, output) = match vmm {
        Vmm::Qemu => (qemu(&kit, name, spec, &inside)?, String::new()),
        Vmm::CloudHypervisor => (cloud_hypervisor(&kit, name, spec, &inside)?, format!(" >>{}", results(name))),
    };
    let (limit, words) = (spec.timeout.as_secs(), words.join(" "));
    let script = format!("#!/bin/sh\nexec timeout -s KILL {limit} {words} \"$@\" </dev/null{output}\n");
    machine.root().bytes(&format!("/bin/{}", vmm.command(name)), script, 0o755);
    Ok(())
}

fn results(name: &str) -> String {
    format!("/run/{name}.results")
}

/// The console is standard output, and the results have the second serial port.
fn qemu(kit: &Kit, name: &str, spec: &GuestSpec, initramfs: &str) -> Result<Vec<String>> {
    let results = format!("file,id=results,path={},append=on", results(name));
    let mut spec = spec.clone().args(["-chardev", &results, "-serial", "chardev:results"]);
    spec.append.push_str(" RESULTS=/dev/ttyS1");
    let mut command = kit.qemu();
    command.args(spec.words(Accel::Kvm, &kit.kernel_image(), Path::new(initramfs), "stdio"));
    let mut words = vec!["env".to_owned()];
    for (name, value) in command.get_envs() {
        let value = value.unwrap_or_default().to_str().context("The lab's paths are text")?;
        words.push(format!("{}={}", name.to_string_lossy(), quoted(value)));
    }
    for word in std::iter::once(command.get_program()).chain(command.get_args()) {
        words.push(quoted(word.to_str().context("A guest's arguments are text")?));
    }
    Ok(words)
}

/// It has one serial port, and empties files of its consoles when the VM reboots; so the results have that port, which is its standard output.
fn cloud_hypervisor(kit: &Kit, name: &str, spec: &GuestSpec, initramfs: &str) -> Result<Vec<String>> {
    let append = format!("console=hvc0 quiet panic=-1 {} RESULTS=/dev/ttyS0", spec.append);
    let memory = format!("size={}M,shared=on", spec.memory_mib);
    let (processors, console) = (format!("boot={}", spec.smp), format!("file=/run/{name}.console"));
    let kernel = OsString::from(kit.kernel_image()).into_string();
    let kernel = kernel.ok().context("The lab's paths are text")?;
    let words = [CLOUD_HYPERVISOR, "--kernel", &kernel, "--initramfs", initramfs, "--cmdline", &append];
    let machine = ["--cpus", &processors, "--memory", &memory, "--serial", "tty", "--console", &console];
    Ok(words.into_iter().chain(machine).map(quoted).collect())
}
