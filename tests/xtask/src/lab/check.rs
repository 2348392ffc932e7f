//! Every scenario of the lab, in one boot of the host: what it printed, and what it had to.
//!
//! A [`Scenario`] is a script and the facts that it must print, a line `NAME VALUE` each; what each must be is known here, so a fact that does not come
//! is a failure too. Rows of `pgctl selftest` are lines of JSON and come as they are.
//!
//! Not here: the scenarios (`devices`, `guests`), and running a single program (`run_program`).

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result};

use super::machine::{Machine, Ran};
use super::topology::Topology;
use super::{devices, engines, guests};
use crate::demo::{Row, Rows};
use crate::kit::Kit;

/// From the host's start to its end. The translator on a busy machine is slow.
const TIME: Duration = Duration::from_secs(560);

/// Something that is tried in the host.
#[derive(Debug, Clone, Default)]
pub struct Scenario {
    /// A script of busybox's shell: what `script` defines, and `fact NAME VALUE`.
    pub script: String,
    /// What it must say: names and values.
    pub facts: Vec<(String, String)>,
    /// The guest that it has `watched`; how that went is told to people and judged by nobody.
    pub guest: Option<&'static str>,
    /// Whether it prints the rows of one `pgctl selftest`.
    pub selftest: bool,
}

/// Boots the host of a topology, runs every scenario in it and judges it. Rows are reported when all is over. Blocks.
///
/// # Errors
/// When the host did not run to its end.
pub fn check<'r>(kit: &Kit, topology: &Topology, report: &'r mut dyn FnMut(&Row)) -> Result<Rows<'r>> {
    let mut machine = Machine::new(kit, topology)?;
    let scenarios = [
        devices::scenario(topology),
        engines::scenario(&mut machine)?,
        guests::bare(&mut machine)?,
        guests::tenant(&mut machine)?,
        // The last: what the others made the kernel say counts.
        devices::kernel(),
    ];
    let host = format!("Linux {} under QEMU {}", kit.kernel_release(), kit.qemu.version);
    eprintln!("booting the lab: {host}, {} MiB, {} ports", topology.memory_mib, topology.ports.len());
    let scripts: Vec<&str> = scenarios.iter().map(|scenario| scenario.script.as_str()).collect();
    let ran = machine.run(&format!("{}\nfact done\n", scripts.join("\n")), TIME)?;
    let mut rows = Rows::new(report);
    judge(&scenarios, &ran, &mut rows).with_context(|| format!("The host's console:\n{}", ran.console.join("\n")))?;
    eprintln!("the lab's host ran {:.1} s", ran.wall.as_secs_f64());
    Ok(rows)
}

fn judge(scenarios: &[Scenario], ran: &Ran, rows: &mut Rows<'_>) -> Result<()> {
    let lines = ran.results.lines().map(str::trim_end);
    let (selftests, facts): (Vec<&str>, Vec<&str>) = lines.partition(|line| line.starts_with('{'));
    let facts: HashMap<&str, &str> = facts.iter().map(|line| line.split_once(' ').unwrap_or((line, ""))).collect();
    facts.get("done").context("The lab's host did not run to its end")?;
    let get = |name: &str| facts.get(name).copied().unwrap_or_default();
    for scenario in scenarios {
        for (name, expected) in &scenario.facts {
            rows.add(Row::new(format!("lab/{name}"), expected, get(name)));
        }
        if scenario.selftest {
            let mut ignore = |_: &Row| {};
            let mut own = Rows::new(&mut ignore);
            own.add_selftest(selftests.iter().copied())?;
            for row in own.all() {
                rows.add(Row { name: format!("lab/tenant/{}", row.name), ..row.clone() });
            }
        }
        if let Some(guest) = scenario.guest {
            let (seconds, mib) = (get(&format!("{guest}-took")), get(&format!("{guest}-left")));
            eprintln!("{guest}: {seconds} s from start to end, and no less than {mib} MiB free in the host meanwhile");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SELFTEST: &str =
        "{\"name\":\"a\",\"expected\":\"x\",\"got\":\"x\",\"ok\":true}\n{\"rows\":1,\"failed\":0,\"ok\":true}\n";

    fn rows(text: &str, selftest: bool) -> Result<(usize, usize)> {
        let facts = vec![("a".to_owned(), "1".to_owned()), ("b/c".to_owned(), "x y".to_owned())];
        let ran = Ran { results: text.to_owned(), console: Vec::new(), wall: Duration::ZERO };
        let mut ignore = |_: &Row| {};
        let mut rows = Rows::new(&mut ignore);
        judge(&[Scenario { facts, selftest, ..Scenario::default() }], &ran, &mut rows)?;
        Ok((rows.all().len(), rows.failed()))
    }

    #[test]
    fn facts_that_do_not_come_or_are_wrong_are_failures() {
        assert_eq!(rows("a 1\r\nb/c x y\r\ndone\r\n", false).unwrap(), (2, 0));
        assert_eq!(rows("done\n", false).unwrap(), (2, 2));
        assert_eq!(rows("a 2\nb/c x y\ndone\n", false).unwrap(), (2, 1));
        assert!(rows("a 1\nb/c x y\n", false).is_err(), "the end is missing");
    }

    #[test]
    fn a_self_test_that_is_not_there_is_an_error() {
        let text = "a 1\nb/c x y\ndone\n";
        assert_eq!(rows(&format!("{SELFTEST}{text}"), true).unwrap(), (3, 0));
        assert!(rows(text, true).is_err());
    }
}
