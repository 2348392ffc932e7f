//! Guests of the lab's host: QEMU of the kit's image, on the host's own KVM.
//!
//! Not here: what such a guest is for.

use std::path::Path;

use anyhow::{Context, Result};

use super::machine::{KIT, Machine};
use super::quoted;
use crate::guest::{Accel, GuestSpec};

/// Puts what a guest boots from into the host, and a command `guest-NAME` that boots it: its console is the command's output, and arguments of the
/// command are more arguments of QEMU. The guest's kernel is the newest.
///
/// # Errors
/// When its root file system cannot be written.
pub fn add_guest(machine: &mut Machine<'_>, name: &str, spec: &GuestSpec) -> Result<()> {
    let kit = machine.kit().seen_at(Path::new(KIT))?;
    let archive = machine.scratch().join(format!("{name}.gz"));
    spec.initramfs.write_to(&archive)?;
    let inside = format!("/lib/guests/{name}.gz");
    machine.root().file(&inside, archive, 0o644);
    let mut command = kit.qemu();
    command.args(spec.words(Accel::Kvm, &kit.kernel_image(), Path::new(&inside), "stdio"));
    let mut words = Vec::new();
    for (name, value) in command.get_envs() {
        let value = value.unwrap_or_default().to_str().context("The lab's paths are text")?;
        words.push(format!("{}={}", name.to_string_lossy(), quoted(value)));
    }
    for word in std::iter::once(command.get_program()).chain(command.get_args()) {
        words.push(quoted(word.to_str().context("A guest's arguments are text")?));
    }
    let limit = spec.timeout.as_secs();
    let script = format!("#!/bin/sh\nexec timeout {limit} env {} \"$@\" </dev/null\n", words.join(" "));
    machine.root().bytes(&format!("/bin/guest-{name}"), script, 0o755);
    Ok(())
}
