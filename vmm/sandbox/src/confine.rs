//! What a started process gives up before it touches anything from outside: its root directory, its capabilities, its ways to the outside.
//!
//! Not here: filters of system calls, which come after; the namespaces, which it was started in.

use std::io;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, RestrictSelfAttr, Ruleset, RulesetAttr, RulesetCreated,
    RulesetError, RulesetStatus, Scope,
};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, Signal, getrlimit, parent_process_death_signal, setrlimit};
use rustix::thread::{
    CapabilitiesSecureBits as Bits, CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_capabilities_secure_bits, set_name, set_no_new_privs,
};

use crate::Fence;
use crate::process::forbid_core_dumps;
use crate::root::{enter_empty_root, mount_own_proc};

/// The newest version of Landlock that is known here; of an older kernel's, all that it has is used.
const NEWEST: ABI = ABI::V10;

/// No user number is special, no capability outlives a change of it, and all of this stays so.
const SECURE_BITS: Bits = Bits::NO_ROOT
    .union(Bits::NO_ROOT_LOCKED)
    .union(Bits::NO_SETUID_FIXUP)
    .union(Bits::NO_SETUID_FIXUP_LOCKED)
    .union(Bits::KEEP_CAPS_LOCKED)
    .union(Bits::NO_CAP_AMBIENT_RAISE)
    .union(Bits::NO_CAP_AMBIENT_RAISE_LOCKED);

/// What a process gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confinement {
    /// As the process was started.
    pub namespaces: Fence,
    /// Whether Landlock has to deny everything that it knows.
    pub landlock: Fence,
    /// Whether it may leave a core dump, and be attached to.
    pub core_dumps: bool,
    /// Most threads and processes of its user, 0 for a process that starts none.
    pub threads: u64,
    /// Most descriptors, if fewer than its parent may have.
    pub descriptors: Option<u64>,
}

/// A process that cannot be confined; it must end.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// It was not started by a [`Launcher`](crate::Launcher).
    #[error("This process is started by peergated only")]
    ByHand,
    /// The kernel refused.
    #[error("Cannot {step}")]
    Step {
        /// What.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The kernel has no Landlock, or it was not enabled.
    #[error(
        "This kernel has no Landlock, or does not enable it; add landlock to lsm= on its command line, or set daemon.landlock = \"off\""
    )]
    NoLandlock {
        /// How that shows.
        source: RulesetError,
    },
    /// Landlock is there, and refused.
    #[error("Cannot confine this process by Landlock; set daemon.landlock = \"off\" to go without")]
    Landlock {
        /// Why, unless it just did nothing.
        source: Option<RulesetError>,
    },
}

fn step(step: &'static str) -> impl Fn(Errno) -> ConfineError {
    move |error| ConfineError::Step { step, source: error.into() }
}

/// Confines this process. What is a thread's own is given up for the calling one, and by the others if the kernel can do that (Landlock) or if whoever
/// started them has called [`drop_privileges`] before. There is no way back.
pub fn confine(to: &Confinement) -> Result<(), ConfineError> {
    // Only `Launcher` knows that it was set in time.
    if parent_process_death_signal() != Ok(Some(Signal::KILL)) {
        return Err(ConfineError::ByHand);
    }
    // Executing /proc/self/exe made it "exe".
    set_name(c"peergated").map_err(step("take a name"))?;
    if !to.core_dumps {
        forbid_core_dumps().map_err(|source| ConfineError::Step { step: "forbid core dumps", source })?;
        limit(Resource::Core, 0)?;
    }
    limit(Resource::Nproc, to.threads)?;
    if let Some(most) = to.descriptors {
        limit(Resource::Nofile, most)?;
    }
    if to.namespaces == Fence::Enforce {
        enter_empty_root().map_err(step("make an empty root directory"))?;
    }
    drop_privileges(to.namespaces)?;
    if to.landlock == Fence::Enforce {
        deny_everything()?;
    }
    Ok(())
}

/// Lets a library that looks its own threads up in /proc do so until [`confine()`]: the host's /proc has other numbers for them.
///
/// # Errors
/// Where the kernel does not mount it, for instance in a container that hides parts of its own.
pub fn see_own_processes(namespaces: Fence) -> Result<(), ConfineError> {
    match namespaces {
        Fence::Off => Ok(()),
        Fence::Enforce => mount_own_proc().map_err(step("mount /proc for the driver of a GPU")),
    }
}

/// Gives up, for the calling thread and those that it will start, all capabilities and ways to gain some.
pub fn drop_privileges(namespaces: Fence) -> Result<(), ConfineError> {
    drop_capabilities(namespaces)?;
    set_no_new_privs(true).map_err(step("give up new privileges"))
}

/// Whether this kernel has Landlock, so that one can be told before anything is started.
pub fn check_landlock(landlock: Fence) -> Result<(), ConfineError> {
    match landlock {
        Fence::Off => Ok(()),
        Fence::Enforce => ruleset().map(drop),
    }
}

/// Lowers a limit for good.
fn limit(resource: Resource, most: u64) -> Result<(), ConfineError> {
    let most = getrlimit(resource).maximum.map_or(most, |now| now.min(most));
    setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) }).map_err(step("lower a limit"))
}

/// Empties every set, and sees to it that no user number and no program fills one again.
fn drop_capabilities(namespaces: Fence) -> Result<(), ConfineError> {
    let has = capabilities(None).map_err(step("read capabilities"))?.effective;
    // A process without this one, started as an ordinary user outside of a namespace, holds no others, and cannot gain any.
    if has.contains(CapabilitySet::SETPCAP) || namespaces == Fence::Enforce {
        for number in 0..u64::BITS {
            match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
                // That many the kernel knows.
                Err(Errno::INVAL) => break,
                result => result.map_err(step("shrink the bounding set"))?,
            }
        }
        set_capabilities_secure_bits(SECURE_BITS).map_err(step("lock the secure bits"))?;
    }
    clear_ambient_capability_set().map_err(step("clear the ambient capabilities"))?;
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, sets).map_err(step("give up capabilities"))
}

/// A ruleset that handles every right that both this program and the kernel know, and allows nothing.
fn ruleset() -> Result<RulesetCreated, ConfineError> {
    let made = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))
        .map(|ruleset| ruleset.set_compatibility(CompatLevel::BestEffort))
        .and_then(|ruleset| ruleset.handle_access(AccessFs::from_all(NEWEST)))
        .and_then(|ruleset| ruleset.handle_access(AccessNet::from_all(NEWEST)))
        .and_then(|ruleset| ruleset.scope(Scope::from_all(NEWEST)))
        .and_then(Ruleset::create);
    made.map_err(|source| ConfineError::NoLandlock { source })
}

fn deny_everything() -> Result<(), ConfineError> {
    match ruleset()?.all_threads(true).and_then(RulesetCreated::restrict_self) {
        Ok(status) if status.ruleset != RulesetStatus::NotEnforced => Ok(()),
        outcome => Err(ConfineError::Landlock { source: outcome.err() }),
    }
}
