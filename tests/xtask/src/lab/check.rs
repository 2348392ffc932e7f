//! Every scenario of the lab, in one boot of the host: what it printed, and what it had to.
//!
//! A [`Scenario`] is a script and the facts that it must print, a line `NAME VALUE` each; what each must be is known here, so a fact that does not come
//! is a failure too. Rows of `pgctl selftest` are such lines, of a scenario's name and JSON.
//!
//! Not here: the scenarios (`devices`, `guests`), and running a single program (`run_program`).

use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::machine::{Machine, Ran};
use super::topology::Topology;
use super::vmm::{CloudHypervisor, VARIABLE, Vmm};
use super::{devices, engines, guests, restless, transfers};
use crate::demo::{Row, Rows};
use crate::kit::Kit;

/// From the host's start to its end. The translator on a busy machine is slow.
const TIME: Duration = Duration::from_secs(1500);

/// Something that is tried in the host.
#[derive(Debug, Clone, Default)]
pub struct Scenario {
    /// A script of busybox's shell: what `script` defines, and `fact NAME VALUE`.
    pub script: String,
    /// What it must say: names and values.
    pub facts: Vec<(String, String)>,
    /// The guest that it has `watched`; how that went is told to people and judged by nobody.
    pub guest: Option<&'static str>,
    /// The name under which it prints the rows of one `pgctl selftest`.
    pub selftest: Option<&'static str>,
    /// What the bytes of devices must begin with once the host has gone: a fact's name, the device's file ([`Ran::devices`]), the bytes.
    pub seen: Vec<(String, String, Vec<u8>)>,
}

/// Boots the host of a topology, runs its scenarios (those with `only` in their name) and judges them. Rows are reported when all is over. Blocks.
///
/// # Errors
/// When the host did not run to its end.
pub fn check<'r>(
    kit: &Kit,
    topology: &Topology,
    only: Option<&str>,
    report: &'r mut dyn FnMut(&Row),
) -> Result<Rows<'r>> {
    let mut machine = Machine::new(kit, topology)?;
    let is_wanted = |name: &str| only.is_none_or(|only| name.contains(only));
    let scenarios = if kit.is_debug() {
        by_iommufd(&mut machine, topology, &is_wanted)?
    } else {
        scenarios(&mut machine, topology, &is_wanted)?
    };
    let host = format!("Linux {} under QEMU {}", kit.kernel_release(), kit.qemu.version);
    eprintln!("booting the lab: {host}, {} MiB, {} ports", topology.memory_mib, topology.ports.len());
    let scripts: Vec<&str> = scenarios.iter().map(|scenario| scenario.script.as_str()).collect();
    let ran = machine.run(&format!("{}\nfact done\n", scripts.join("\n")), TIME)?;
    let mut rows = Rows::new(report);
    judge(&scenarios, &ran, &mut rows).with_context(|| format!("The host's console:\n{}", ran.console.join("\n")))?;
    eprintln!("the lab's host ran {:.1} s", ran.wall.as_secs_f64());
    if rows.failed() > 0 {
        eprintln!("The host's console:\n{}", ran.console.join("\n"));
    }
    Ok(rows)
}

fn scenarios(
    machine: &mut Machine<'_>,
    topology: &Topology,
    is_wanted: &dyn Fn(&str) -> bool,
) -> Result<Vec<Scenario>> {
    let cloud_hypervisor = CloudHypervisor::named()?;
    let inside = guests::Inside::build(machine)?;
    let mut scenarios = Vec::new();
    if is_wanted("devices") {
        scenarios.push(devices::scenario(topology));
    }
    if is_wanted("engines") {
        scenarios.push(engines::scenario(machine)?);
    }
    if is_wanted("bare-guest") {
        scenarios.push(guests::bare(machine)?);
    }
    if is_wanted("tenant") {
        scenarios.push(guests::tenant(machine, &inside, Vmm::Qemu)?);
    }
    if let Some(cloud_hypervisor) = &cloud_hypervisor {
        cloud_hypervisor.install(machine)?;
        if is_wanted("cloud-hypervisor/tenant") {
            scenarios.push(guests::tenant(machine, &inside, Vmm::CloudHypervisor)?);
        }
        if is_wanted("cloud-hypervisor/restless") {
            scenarios.push(restless::scenario(machine, &inside)?);
        }
        if is_wanted("cloud-hypervisor/restless-functions") {
            scenarios.push(restless::functions(machine, &inside)?);
        }
    } else {
        eprintln!("SKIP lab/cloud-hypervisor: {VARIABLE} does not name one");
    }
    // What the others made the kernel say counts; what follows makes it say something.
    scenarios.push(devices::kernel(false));
    if is_wanted("transfers") {
        scenarios.push(transfers::scenario(machine, &inside, Vmm::Qemu)?);
    }
    if cloud_hypervisor.is_some() && is_wanted("cloud-hypervisor/transfers") {
        scenarios.push(transfers::scenario(machine, &inside, Vmm::CloudHypervisor)?);
    }
    // The host goes while a guest of this one holds what it has moved, so it is the last.
    if is_wanted("owner-sees") {
        scenarios.push(transfers::held(machine, &inside)?);
    }
    Ok(scenarios)
}

/// What is for the debug kernel: the one that has iommufd, and too slow a host for guests.
fn by_iommufd(
    machine: &mut Machine<'_>,
    topology: &Topology,
    is_wanted: &dyn Fn(&str) -> bool,
) -> Result<Vec<Scenario>> {
    let mut scenarios = Vec::new();
    if is_wanted("devices") {
        scenarios.push(devices::scenario(topology));
    }
    if is_wanted("iommufd") {
        scenarios.push(engines::by_iommufd(machine)?);
    }
    scenarios.push(devices::kernel(true));
    Ok(scenarios)
}

fn judge(scenarios: &[Scenario], ran: &Ran, rows: &mut Rows<'_>) -> Result<()> {
    let lines = ran.results.lines().map(str::trim_end).map(|line| line.split_once(' ').unwrap_or((line, "")));
    let (selftests, facts): (Vec<_>, Vec<_>) = lines.partition(|(_, value)| value.starts_with('{'));
    let facts: HashMap<&str, &str> = facts.into_iter().collect();
    facts.get("done").context("The lab's host did not run to its end")?;
    let get = |name: &str| facts.get(name).copied().unwrap_or_default();
    for scenario in scenarios {
        for (name, expected) in &scenario.facts {
            rows.add(Row::new(format!("lab/{name}"), expected, get(name)));
        }
        if let Some(name) = scenario.selftest {
            let mut ignore = |_: &Row| {};
            let mut own = Rows::new(&mut ignore);
            let lines = selftests.iter().filter(|(of, _)| *of == name).map(|(_, line)| *line);
            own.add_selftest(lines).with_context(|| format!("The guest of lab/{name}"))?;
            for row in own.all() {
                rows.add(Row { name: format!("lab/{name}/{}", row.name), ..row.clone() });
            }
        }
        for (name, file, bytes) in &scenario.seen {
            let got = begins_with(&ran.devices.path().join(file), bytes)?;
            rows.add(Row::new(format!("lab/{name}"), "as sent", got));
        }
        if let Some(guest) = scenario.guest {
            let (seconds, mib) = (get(&format!("{guest}-took")), get(&format!("{guest}-left")));
            eprintln!("{guest}: {seconds} s from start to end, and no less than {mib} MiB free in the host meanwhile");
        }
    }
    Ok(())
}

/// Whether a file does.
fn begins_with(path: &Path, bytes: &[u8]) -> Result<&'static str> {
    let mut there = vec![0; bytes.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut there));
    read.with_context(|| format!("Cannot read {}", path.display()))?;
    Ok(if there == bytes { "as sent" } else { "something else" })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn rows(text: &str, selftest: Option<&'static str>) -> Result<(usize, usize)> {
        let facts = vec![("a".to_owned(), "1".to_owned()), ("b/c".to_owned(), "x y".to_owned())];
        let ran = Ran {
            results: text.to_owned(),
            console: Vec::new(),
            wall: Duration::ZERO,
            devices: Arc::new(tempfile::tempdir().unwrap()),
        };
        let mut ignore = |_: &Row| {};
        let mut rows = Rows::new(&mut ignore);
        judge(&[Scenario { facts, selftest, ..Scenario::default() }], &ran, &mut rows)?;
        Ok((rows.all().len(), rows.failed()))
    }

    #[test]
    fn facts_that_do_not_come_or_are_wrong_are_failures() {
        assert_eq!(rows("a 1\r\nb/c x y\r\ndone\r\n", None).unwrap(), (2, 0));
        assert_eq!(rows("done\n", None).unwrap(), (2, 2));
        assert_eq!(rows("a 2\nb/c x y\ndone\n", None).unwrap(), (2, 1));
        assert!(rows("a 1\nb/c x y\n", None).is_err(), "the end is missing");
    }

    #[test]
    fn a_self_test_that_is_not_there_is_an_error_and_so_is_another_ones() {
        let row = "{\"name\":\"a\",\"expected\":\"x\",\"got\":\"x\",\"ok\":true}";
        let selftest = |name: &str| format!("{name} {row}\n{name} {{\"rows\":1,\"failed\":0,\"ok\":true}}\n");
        let text = format!("{}a 1\nb/c x y\ndone\n{}", selftest("other"), selftest("own"));
        assert_eq!(rows(&text, Some("own")).unwrap(), (3, 0));
        assert!(rows(&text, Some("third")).is_err());
    }
}
