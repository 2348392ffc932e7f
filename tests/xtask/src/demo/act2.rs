//! The second act: two tenants on one daemon, of which one does its worst, and then each loses its worker.
//!
//! Tenant A holds data. Tenant B maps its own memory at A's addresses, names what is A's, and floods the device; A's data and the time of A's small
//! copies are looked at meanwhile. Then B's worker is killed, and A's, each in mid-copy: who lost it begins anew, the other one goes on.
//!
//! The actors ([`Actor`]) are processes or guests: the play is the same.
//!
//! Not here: how the actors do it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::actor::{Actor, text};
use super::daemon::Daemon;
use super::place;
use super::rows::{Row, Rows};

/// The configuration.
pub const CONFIG: &str = include_str!("../../../../configs/two-tenants.toml");
/// Its tenants.
pub const TENANTS: [&str; 2] = ["a", "b"];

/// Bytes that A holds of each endpoint: few enough that B soon maps a page at each of A's addresses.
const HELD: u64 = 512 << 10;
/// How often A opens the device, so that its domain has a number that is none of B's.
const OPENS: usize = 8;
/// Rounds of measuring, each alone and then under the flood: whatever drifts meets both.
const ROUNDS: usize = 5;
/// Copies timed in one go.
const COPIES: u32 = 400;
/// How much longer A's small copies may take while B does its worst.
const FACTOR: u64 = 3;
/// Control requests that B may make in a second, as [`CONFIG`] says.
pub const CONTROL_RATE: u64 = 2000;
/// Copies that must end OK to show that they go on.
const MORE: u32 = 50;

/// Plays it; rows are added as soon as they are known.
///
/// # Errors
/// When it cannot be played to its end.
pub fn play(daemon: &mut Daemon, a: &mut Actor, b: &mut Actor, rows: &mut Rows<'_>) -> Result<()> {
    let held = hold(a, rows)?;
    forge(daemon, &held, a, b, rows)?;
    flood(daemon, a, b, rows)?;
    unchanged("tenants/data-after-flood", &held, a, rows)?;
    b.order(&format!("hold {HELD} 2"))?;
    kill(daemon, b, a, rows)?;
    unchanged("tenants/data-after-the-other-died", &held, a, rows)?;
    kill(daemon, a, b, rows)
}

/// What A holds, and in which domain.
fn hold(a: &mut Actor, rows: &mut Rows<'_>) -> Result<Value> {
    let mut held = Value::Null;
    for _ in 0..OPENS {
        held = a.order(&format!("hold {HELD} 1"))?;
    }
    unchanged("tenants/data-held", &held, a, rows)?;
    Ok(held)
}

/// A's data, as it was written.
fn unchanged(name: &str, held: &Value, a: &mut Actor, rows: &mut Rows<'_>) -> Result<()> {
    let hashes = |of: [&Value; 2]| of.map(text).join(" ");
    let now = a.order("hash")?;
    rows.add(Row::new(
        name,
        hashes([&held["gpu"]["hash"], &held["fpga"]["hash"]]),
        hashes([&now["gpu"], &now["fpga"]]),
    ));
    Ok(())
}

/// B at A's addresses, and with A's numbers.
fn forge(daemon: &Daemon, held: &Value, a: &mut Actor, b: &mut Actor, rows: &mut Rows<'_>) -> Result<()> {
    for endpoint in ["gpu", "fpga"] {
        let shadow = b.order(&format!("shadow {}", held[endpoint]["address"]))?;
        rows.add(Row::new(
            format!("tenants/own-page-at-foreign-{endpoint}-address"),
            "own bytes",
            text(&shadow["read"]),
        ));
    }
    let foreign = a.ready["endpoints"].as_array().and_then(|all| all.last()).context("Tenant a has no endpoints")?;
    ensure!(
        !b.ready["endpoints"].as_array().is_some_and(|own| own.contains(foreign)),
        "Tenant b has endpoint {foreign} too"
    );
    let answers = [
        ("domain", &held["domain"], 0x7fff_0000_u64, "ALLOC NOENT, PEER_QUERY NOENT, FILL NOENT"),
        (
            "endpoint",
            foreign,
            4000,
            "ALLOC NOENT, PEER_QUERY NOENT, FILL FAULT DOMAIN at no address, event DOMAIN owner nobody",
        ),
        ("handle", &held["gpu"]["handle"], 0x7fff_0000, "FREE NOENT, event DOMAIN owner nobody"),
        (
            "address",
            &held["fpga"]["address"],
            0x7fff_0000_0000,
            "FILL FAULT MAPPING at that address, event MAPPING owner nobody",
        ),
    ];
    for (kind, foreign, nobodys, expected) in answers {
        for (whose, number) in [("foreign", foreign.clone()), ("unknown", Value::from(nobodys))] {
            let answer = b.order(&format!("forge {kind} {number}"))?;
            rows.add(Row::new(format!("tenants/{whose}-{kind}"), expected, text(&answer["answer"])));
        }
    }
    unchanged("tenants/data-after-forgery", held, a, rows)?;
    // Each of B's attempts but the ones at domains, which fault nothing, and none of A's.
    let faults = |tenant: &str| anyhow::Ok(daemon.tenant(tenant)?["faults"].to_string());
    rows.add(Row::new("tenants/faults-told-of-b", "6", faults("b")?));
    rows.add(Row::new("tenants/faults-told-of-a", "0", faults("a")?));
    Ok(())
}

/// A's small copies, alone and while B does its worst.
fn flood(daemon: &Daemon, a: &mut Actor, b: &mut Actor, rows: &mut Rows<'_>) -> Result<()> {
    let (mut alone, mut flooded) = (Vec::new(), Vec::new());
    let mut served: Vec<String> = Vec::new();
    let requests = || {
        let made = daemon.tenant("b")?["counters"]["control_requests"].as_u64();
        made.context("peergate status does not count control requests")
    };
    let (mut made, mut allowed, mut time) = (0, 0, Duration::ZERO);
    let apart = place::apart(daemon, [&*a, &*b])?;
    for _ in 0..ROUNDS {
        alone.push(p99(a)?);
        let (before, started) = (requests()?, Instant::now());
        b.order("flood start")?;
        flooded.push(p99(a)?);
        let counts = b.order("flood stop")?;
        made += requests()?.saturating_sub(before);
        time += started.elapsed();
        // A burst of a tenth of a second comes on top, each time.
        allowed += CONTROL_RATE / 10;
        served.extend([("requests", "OK"), ("faults", "FAULT"), ("copies", "OK")].iter().filter_map(
            |(kind, status)| {
                counts[kind][status].as_u64().filter(|count| *count > 0).map(|_| format!("{kind} {status}"))
            },
        ));
    }
    served.sort();
    served.dedup();
    rows.add(Row::new("tenants/flood-was-a-flood", "copies OK, faults FAULT, requests OK", served.join(", ")));
    allowed += u64::try_from(time.as_millis())?.saturating_mul(CONTROL_RATE) / 1000;
    let got = format!("{made} in {:.1} s", time.as_secs_f64());
    let expected = format!("at most {CONTROL_RATE} control requests a second");
    rows.add(Row::judged("tenants/flood-kept-to-its-rate", expected, got, made <= allowed));
    if apart {
        rows.add(prompt(&alone, &flooded));
    } else {
        eprintln!("SKIP tenants/p99-under-flood: there are fewer processors than tenants");
    }
    Ok(())
}

/// Of several rounds the best one counts, alone and under the flood: what B does it does in each, what else the host does is not B's doing.
fn prompt(alone: &[u64], flooded: &[u64]) -> Row {
    let best = |rounds: &[u64]| rounds.iter().copied().min().unwrap_or(0);
    let (alone, flooded) = (best(alone), best(flooded));
    let expected = format!("at most {FACTOR} x {:.1} us", micros(alone));
    let got = format!("{:.1} us ({:.1} x)", micros(flooded), flooded as f64 / alone.max(1) as f64);
    Row::judged("tenants/p99-under-flood", expected, got, flooded <= alone.saturating_mul(FACTOR))
}

fn p99(a: &mut Actor) -> Result<u64> {
    let times = a.order(&format!("latency {COPIES}"))?;
    times["p99"].as_u64().context("No p99 was answered")
}

/// Kills the worker of `victim` while both copy. Who lost it begins anew; `other` does not notice.
fn kill(daemon: &mut Daemon, victim: &mut Actor, other: &mut Actor, rows: &mut Rows<'_>) -> Result<()> {
    let whose = format!("tenants/{}-killed", victim.tenant);
    let mut row =
        |what: &str, expected: &str, got: String| rows.add(Row::new(format!("{whose}/{what}"), expected, got));
    for actor in [&mut *victim, &mut *other] {
        actor.order("copies start")?;
        actor.order(&format!("copies more {MORE}"))?;
    }
    let before = [daemon.tenant(&victim.tenant)?, daemon.tenant(&other.tenant)?];
    daemon.kill_worker(&victim.tenant)?;

    let lost = victim.order("copies lost")?;
    let some = lost["lost"].as_u64().is_some_and(|count| count > 0);
    row(
        "in-flight",
        "some LOST, 0 other, 0 wrong",
        if some { format!("some LOST, {}", endings(&lost)) } else { lost.to_string() },
    );
    let anew = victim.order("recover")?;
    for (what, key, expected) in [
        ("old-handle", "old_handle", "STALE"),
        ("old-file", "old_file", "STALE"),
        ("old-work", "old_work", "LOST"),
        ("new-memory", "new_memory", "zero"),
        ("new-open-works", "verified", "true"),
    ] {
        row(what, expected, text(&anew[key]));
    }
    let session = |of: &Value| of["session"].as_u64().unwrap_or(0);
    let expected = format!("session {} after {}", session(&before[0]) + 1, session(&before[0]));
    row("new-session", &expected, format!("session {} after {}", anew["session"], anew["before"]));
    let process = |of: &Value| format!("process {}", of["process"]);
    row("same-program", &process(&victim.ready), process(&anew));
    let after = daemon.tenant(&victim.tenant)?;
    let failures = before[0]["failures"].as_u64().unwrap_or(0) + 1;
    let expected = format!("connected, session {}, {failures} failures", session(&before[0]) + 1);
    row("operator", &expected, standing(&after));

    other.order(&format!("copies more {MORE}"))?;
    let went_on = other.order("copies stop")?;
    row("other-copies", "0 LOST, 0 other, 0 wrong", format!("{} LOST, {}", went_on["lost"], endings(&went_on)));
    row("other-operator", &standing(&before[1]), standing(&daemon.tenant(&other.tenant)?));
    victim.order(&format!("hold {HELD} 3"))?;
    Ok(())
}

/// How copies ended that did not end OK or LOST.
fn endings(counts: &Value) -> String {
    format!("{} other, {} wrong", counts["other"], counts["wrong"])
}

/// Where a tenant stands.
fn standing(tenant: &Value) -> String {
    format!("{}, session {}, {} failures", text(&tenant["state"]), tenant["session"], tenant["failures"])
}

#[allow(clippy::cast_precision_loss, reason = "for people to read")]
fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1000.0
}
