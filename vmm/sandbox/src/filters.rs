//! Seccomp filters, one a class of threads.
//!
//! A class is the rules of `common.json` and of its own file; where both have a rule for a system call, its own file's counts. Files are in
//! seccompiler's format. A file may hold further filters, which are applied first. In a process that has GPUs each class may do what their driver needs, too:
//! that is library code, which runs in whatever thread calls it and in threads of its own.

use std::fmt;
use std::str::FromStr;

use seccompiler::{BpfProgram, TargetArch, apply_filter, apply_filter_all_threads, compile_from_json, sock_filter};
use serde_json::{Value, json};

/// What a thread does, and so which system calls it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// The process that starts the others; its filter is inherited by them, so it holds what theirs hold.
    Supervisor,
    /// A whole broker, once it has its threads.
    Broker,
    /// Gives memory of ended leases back.
    Scrubber,
    /// Reads the kernel's log for what the IOMMU has stopped.
    Watcher,
    /// A whole keeper.
    Keeper,
    /// A whole worker, before it starts its threads.
    Worker,
    /// Answers a VMM's messages and maps guest memory.
    Connection,
    /// Runs a queue: parses what a guest wrote and copies.
    Queue,
    /// Collects finished work and expires deadlines; also schedules simulated devices.
    Timekeeper,
    /// Drives the registers of a PCI function and programs the IOMMU for it, or carries bytes between functions.
    Engine,
}

impl Class {
    /// Every class.
    pub const ALL: [Self; 10] = [
        Self::Supervisor,
        Self::Broker,
        Self::Scrubber,
        Self::Watcher,
        Self::Keeper,
        Self::Worker,
        Self::Connection,
        Self::Queue,
        Self::Timekeeper,
        Self::Engine,
    ];

    /// Name of the filter and of its file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Supervisor => "supervisor",
            Self::Broker => "broker",
            Self::Scrubber => "scrubber",
            Self::Watcher => "watcher",
            Self::Keeper => "keeper",
            Self::Worker => "worker",
            Self::Connection => "connection",
            Self::Queue => "queue",
            Self::Timekeeper => "timekeeper",
            Self::Engine => "engine",
        }
    }

    const fn source(self) -> &'static str {
        match self {
            Self::Supervisor => include_str!("../../../configs/seccomp/supervisor.json"),
            Self::Broker => include_str!("../../../configs/seccomp/broker.json"),
            Self::Scrubber => include_str!("../../../configs/seccomp/scrubber.json"),
            Self::Watcher => include_str!("../../../configs/seccomp/watcher.json"),
            Self::Keeper => include_str!("../../../configs/seccomp/keeper.json"),
            Self::Worker => include_str!("../../../configs/seccomp/worker.json"),
            Self::Connection => include_str!("../../../configs/seccomp/connection.json"),
            Self::Queue => include_str!("../../../configs/seccomp/queue.json"),
            Self::Timekeeper => include_str!("../../../configs/seccomp/timekeeper.json"),
            Self::Engine => include_str!("../../../configs/seccomp/engine.json"),
        }
    }
}

const COMMON: &str = include_str!("../../../configs/seccomp/common.json");
const GPU: &str = include_str!("../../../configs/seccomp/gpu.json");

/// What happens to a system call that is on no list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// It ends the process.
    #[default]
    Enforce,
    /// The kernel's audit log tells, and the call goes on.
    Log,
    /// No filter is applied.
    Off,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Self; 3] = [Self::Enforce, Self::Log, Self::Off];

    /// Name in a configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Log => "log",
            Self::Off => "off",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No mode has that name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("Unknown seccomp mode {name:?}; write \"enforce\", \"log\" or \"off\"")]
pub struct UnknownMode {
    /// What was written.
    pub name: String,
}

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(name: &str) -> Result<Self, UnknownMode> {
        Self::ALL.into_iter().find(|mode| mode.name() == name).ok_or_else(|| UnknownMode { name: name.to_owned() })
    }
}

/// A filter that cannot be made or applied.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The lists name system calls of another kind of machine.
    #[error("There are no seccomp filters for {arch}; set daemon.seccomp = \"off\"")]
    Architecture {
        /// This machine.
        arch: &'static str,
    },
    /// A list is not JSON, which a test should have found.
    #[error("The seccomp list of class {class} is malformed")]
    Parse {
        /// Which one.
        class: &'static str,
        /// Why.
        source: serde_json::Error,
    },
    /// A list has another shape than a filter, or names unknown system calls.
    #[error("The seccomp filter of class {class} does not compile")]
    Compile {
        /// Which one.
        class: &'static str,
        /// Why.
        source: seccompiler::Error,
    },
    /// The class is none of those that were asked for, which is an error of this program.
    #[error("There is no seccomp filter of class {class} in this process")]
    NotCompiled {
        /// Which one.
        class: &'static str,
    },
    /// The kernel refused the filter.
    #[error(
        "The kernel refused the seccomp filter of class {class}; a kernel without seccomp needs daemon.seccomp = \"off\""
    )]
    Apply {
        /// Which one.
        class: &'static str,
        /// Why.
        source: seccompiler::Error,
    },
}

/// Compiled filters, ready to apply.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// `None` if nothing is to be applied.
    programs: Option<Vec<(Class, Vec<BpfProgram>)>>,
}

impl Sandbox {
    /// Compiles the filters of `classes` for this process (not one that it forks), and has the allocator do without files. `gpus` adds what the driver of
    /// GPUs does once it has started. With [`Mode::Off`] there is nothing to apply.
    pub fn new(mode: Mode, classes: &[Class], gpus: bool) -> Result<Self, SandboxError> {
        if mode == Mode::Off {
            return Ok(Self { programs: None });
        }
        // The lists are written for one architecture: others lack some of their system calls and need others.
        if !cfg!(target_arch = "x86_64") {
            return Err(SandboxError::Architecture { arch: std::env::consts::ARCH });
        }
        crate::process::use_one_arena();
        let compiled = |class: &Class| Ok((*class, compile(*class, mode, gpus)?));
        let programs = classes.iter().map(compiled).collect::<Result<_, _>>()?;
        Ok(Self { programs: Some(programs) })
    }

    /// Gives up, for the calling thread and for every thread and process it will start, what `class`, one of those that were compiled, does not
    /// need. Also gives up gaining privileges by running a set-user-ID program. There is no way back.
    pub fn apply(&self, class: Class) -> Result<(), SandboxError> {
        self.apply_by(class, apply_filter)
    }

    /// The same for every thread that this process has.
    pub fn apply_to_all(&self, class: Class) -> Result<(), SandboxError> {
        self.apply_by(class, apply_filter_all_threads)
    }

    fn apply_by(
        &self,
        class: Class,
        apply: impl Fn(&[sock_filter]) -> Result<(), seccompiler::Error>,
    ) -> Result<(), SandboxError> {
        let Some(filters) = &self.programs else { return Ok(()) };
        let found = filters.iter().find(|(of, _)| *of == class);
        let (_, programs) = found.ok_or(SandboxError::NotCompiled { class: class.name() })?;
        for program in programs {
            apply(program).map_err(|source| SandboxError::Apply { class: class.name(), source })?;
        }
        Ok(())
    }
}

/// The programs of a class, its main filter last: it may forbid applying more.
fn compile(class: Class, mode: Mode, gpus: bool) -> Result<Vec<BpfProgram>, SandboxError> {
    let name = class.name();
    let filters = merged(class, mode, gpus).map_err(|source| SandboxError::Parse { class: name, source })?;
    let failed = |source| SandboxError::Compile { class: name, source };
    let mut programs = compile_from_json(filters.to_string().as_bytes(), TargetArch::x86_64).map_err(failed)?;
    let main = programs.remove(name).ok_or_else(|| failed(seccompiler::Error::EmptyFilter))?;
    Ok(programs.into_values().chain([main]).collect())
}

/// The class's file with the common rules added, and perhaps those of the driver of GPUs.
fn merged(class: Class, mode: Mode, gpus: bool) -> serde_json::Result<Value> {
    let common: Value = serde_json::from_str(COMMON)?;
    let mut filters: Value = serde_json::from_str(class.source())?;
    let pid = std::process::id();
    let own = &mut filters[class.name()];
    if mode == Mode::Log {
        own["mismatch_action"] = "log".into();
    }
    if let (Some(rules), Some(more)) = (own["filter"].as_array_mut(), common["common"]["filter"].as_array()) {
        let more: Vec<_> =
            more.iter().filter(|rule| !rules.iter().any(|own| own["syscall"] == rule["syscall"])).cloned().collect();
        rules.extend(more);
        // Whom abort() signals is known only here: this process, and none of its user's others.
        let signals = rules.iter_mut().filter(|rule| rule["syscall"] == "tgkill");
        for args in signals.filter_map(|rule| rule.get_mut("args")?.as_array_mut()) {
            args.push(json!({ "index": 0, "type": "dword", "op": "eq", "val": pid }));
        }
        let driver: Value = if gpus { serde_json::from_str(GPU)? } else { Value::Null };
        for rule in driver["gpu"]["filter"].as_array().into_iter().flatten() {
            widen(rules, rule);
        }
    }
    Ok(filters)
}

/// Allows one more thing. A system call may be on a list with any arguments or with certain ones, never both.
fn widen(rules: &mut Vec<Value>, more: &Value) {
    let is_same = |rule: &Value| rule["syscall"] == more["syscall"];
    if rules.iter().any(|rule| is_same(rule) && rule.get("args").is_none()) {
        return;
    }
    if more.get("args").is_none() {
        rules.retain(|rule| !is_same(rule));
    }
    rules.push(more.clone());
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn rules(class: Class) -> BTreeMap<String, Vec<Option<Value>>> {
        rules_with(class, false)
    }

    fn rules_with(class: Class, gpus: bool) -> BTreeMap<String, Vec<Option<Value>>> {
        let mut rules = BTreeMap::<_, Vec<_>>::new();
        for rule in merged(class, Mode::Enforce, gpus).unwrap()[class.name()]["filter"].as_array().unwrap() {
            rules.entry(rule["syscall"].as_str().unwrap().to_owned()).or_default().push(rule.get("args").cloned());
        }
        rules
    }

    #[test]
    fn every_class_compiles_in_every_mode() {
        for (mode, gpus) in Mode::ALL.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
            let programs = Sandbox::new(mode, &Class::ALL, gpus).unwrap().programs.unwrap_or_default();
            assert_eq!(programs.len(), if mode == Mode::Off { 0 } else { Class::ALL.len() });
            assert!(programs.iter().all(|(_, programs)| programs.iter().all(|program| !program.is_empty())));
        }
    }

    #[test]
    fn a_class_that_was_not_asked_for_is_not_taken_for_applied() {
        let error = Sandbox::new(Mode::Enforce, &[Class::Keeper], false).unwrap().apply(Class::Broker).unwrap_err();
        assert_eq!(error.to_string(), "There is no seccomp filter of class broker in this process");
        Sandbox::new(Mode::Off, &[], false).unwrap().apply(Class::Broker).unwrap();
    }

    #[test]
    fn modes_are_known_by_name() {
        assert!(Mode::ALL.into_iter().all(|mode| mode.to_string().parse() == Ok(mode)));
        assert_eq!("on".parse::<Mode>(), Err(UnknownMode { name: "on".into() }));
    }

    /// seccompiler lets a rule with arguments win over one without, whatever the order.
    #[test]
    fn no_list_has_a_system_call_both_with_and_without_arguments() {
        for (class, gpus) in Class::ALL.into_iter().flat_map(|class| [(class, false), (class, true)]) {
            for (syscall, rules) in rules_with(class, gpus) {
                let free = rules.iter().filter(|args| args.is_none()).count();
                assert!(free == 0 || rules.len() == 1, "{syscall} of class {class:?}: {rules:?}");
            }
        }
    }

    /// A filter cannot be loosened: who starts a process or thread must be allowed all that it needs.
    #[test]
    fn supervisor_holds_what_a_worker_holds_and_a_worker_what_its_threads_hold() {
        let inherits = [
            (Class::Supervisor, Class::Worker),
            (Class::Supervisor, Class::Keeper),
            (Class::Supervisor, Class::Broker),
            (Class::Supervisor, Class::Scrubber),
            (Class::Supervisor, Class::Watcher),
            (Class::Worker, Class::Connection),
            (Class::Worker, Class::Queue),
            (Class::Worker, Class::Timekeeper),
            (Class::Worker, Class::Engine),
        ];
        for (outer, inner) in inherits {
            // A supervisor starts workers of both kinds.
            for gpus in [false, true] {
                let allowed = rules_with(outer, gpus && outer != Class::Supervisor);
                for (syscall, wanted) in rules_with(inner, gpus) {
                    let has = allowed.get(&syscall);
                    let covered =
                        |args: &Option<Value>| has.is_some_and(|has| has.contains(&None) || has.contains(args));
                    assert!(wanted.iter().all(covered), "{inner:?} needs {syscall} {wanted:?}, {outer:?} has {has:?}");
                }
            }
        }
    }

    #[test]
    fn with_gpus_a_class_has_what_it_has_without_and_what_their_driver_needs() {
        const NVIDIA: &str = "the NVIDIA devices";
        let has = |rules: &BTreeMap<String, Vec<Option<Value>>>, what: &str| {
            rules["ioctl"].iter().flatten().any(|args| args[0]["comment"] == what)
        };
        let (with, without) = (rules_with(Class::Engine, true), rules(Class::Engine));
        assert!(has(&with, NVIDIA) && has(&with, "VFIO_DEVICE_RESET") && !has(&without, NVIDIA));
        // Whoever parses a guest's bytes may still open and connect nothing, and start no process.
        for syscall in
            ["open", "openat", "openat2", "execve", "execveat", "fork", "vfork", "socket", "connect", "ptrace"]
        {
            assert!(!rules_with(Class::Queue, true).contains_key(syscall), "{syscall}");
        }
    }

    #[test]
    fn threads_that_parse_a_guests_bytes_can_open_start_and_connect_nothing() {
        for class in [Class::Keeper, Class::Worker, Class::Connection, Class::Queue, Class::Timekeeper] {
            let rules = rules(class);
            for syscall in
                ["open", "openat", "openat2", "execve", "execveat", "fork", "vfork", "socket", "connect", "ptrace"]
            {
                assert!(!rules.contains_key(syscall), "{class:?} allows {syscall}");
            }
        }
        for class in [Class::Connection, Class::Queue, Class::Timekeeper] {
            let rules = rules(class);
            for syscall in ["clone", "clone3", "accept", "accept4", "seccomp"] {
                assert!(!rules.contains_key(syscall), "{class:?} allows {syscall}");
            }
        }
        for class in [Class::Queue, Class::Timekeeper] {
            for syscall in ["recvmsg", "sendmsg", "recvfrom", "sendto", "ioctl"] {
                assert!(!rules(class).contains_key(syscall), "{class:?} allows {syscall}");
            }
        }
    }
}
