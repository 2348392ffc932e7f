//! Why something is not proved: it is wrong, it failed, or the host has nothing to prove it with.

use std::io;

/// No proof.
#[derive(Debug, thiserror::Error)]
pub enum MicroVmError {
    /// No KVM at all.
    #[error(
        "There is no /dev/kvm; turn virtualization on in the firmware (on a host that is a VM: nested virtualization, where that host runs) and load kvm_intel or kvm_amd"
    )]
    NoKvm,
    /// KVM is for others.
    #[error("No permission to open /dev/kvm; run this as root, or as a user of the group that owns it")]
    NoPermission,
    /// KVM without something that a VM with this device needs.
    #[error("This host's KVM has no {what}; VMs that use this device need it, so run them on a kernel that has it")]
    Lacking {
        /// What is not there.
        what: &'static str,
    },
    /// A request that KVM refused.
    #[error("KVM refuses to {what}")]
    Kvm {
        /// The request.
        what: &'static str,
        /// Why.
        source: kvm_ioctls::Error,
    },
    /// Memory, event counters, threads or signals could not be had.
    #[error("Cannot {what}")]
    Host {
        /// What was tried.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// An access of ours to the guest's memory.
    #[error("Cannot reach the guest's memory")]
    Memory(#[from] vm_memory::GuestMemoryError),
    /// The conversation with the device.
    #[error("The device does not take part: {step} failed")]
    Device {
        /// Which step.
        step: &'static str,
        /// Why.
        source: vhost::Error,
    },
    /// It is not so.
    #[error("{0}")]
    Disproved(String),
}

impl MicroVmError {
    /// Whether the host lacks what a proof needs, so that nothing was proved or disproved.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::NoKvm | Self::NoPermission | Self::Lacking { .. })
    }

    pub(crate) fn kvm(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |source| Self::Kvm { what, source }
    }

    pub(crate) fn host<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Host { what, source: source.into() }
    }
}

/// An error unless it is so.
pub(crate) fn ensure(is_so: bool, otherwise: impl FnOnce() -> String) -> Result<(), MicroVmError> {
    if is_so { Ok(()) } else { Err(MicroVmError::Disproved(otherwise())) }
}
