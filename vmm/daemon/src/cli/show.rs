//! Answers of the daemon as text: aligned columns, quantities in units.
//!
//! Not here: faults, JSON, which is the answer itself.

use vmm_broker::IommuMode;
use vmm_control::{
    DrainState, EndpointInfo, EndpointsReply, PeerInfo, StatusReply, TenantState, TenantStatus, TenantsReply,
};

use crate::config::quantity::{rate, size, time};
use crate::supervisor::answers::{SUPPRESSED, SUPPRESSED_LINES};

/// Rows under a heading, columns aligned; a column whose heading begins with `>` is aligned to the right.
pub(super) fn table(headings: &[&str], rows: &[Vec<String>]) -> String {
    let (names, right): (Vec<_>, Vec<_>) =
        headings.iter().map(|heading| (heading.trim_start_matches('>'), heading.starts_with('>'))).unzip();
    let heading: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let widths: Vec<usize> = (0..names.len())
        .map(|column| {
            let cells = [&heading].into_iter().chain(rows).filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for row in [&heading].into_iter().chain(rows) {
        let cells =
            row.iter().zip(&widths).zip(&right).map(|((cell, width), right)| {
                if *right { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
            });
        let line = cells.collect::<Vec<_>>().join("  ");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Bytes, about.
#[allow(clippy::cast_precision_loss, reason = "shown with one digit after the point")]
fn about(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} PiB")
}

fn duration(millis: u64) -> String {
    let seconds = millis / 1000;
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60) {
        (0, 0, 0, s) => format!("{s} s"),
        (0, 0, m, s) => format!("{m} min {s} s"),
        (0, h, m, _) => format!("{h} h {m} min"),
        (d, h, ..) => format!("{d} d {h} h"),
    }
}

/// A moment in UTC, as of RFC 3339.
pub(super) fn moment(nanoseconds: u64) -> String {
    let (seconds, millis) = (nanoseconds / 1_000_000_000, nanoseconds / 1_000_000 % 1000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years counted from March, in eras of 400 years, so that the leap day is the last of its year.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + carry;
    format!(
        "{year:04}-{month:02}-{date:02}T{:02}:{:02}:{:02}.{millis:03}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

/// `peergate status`.
pub(crate) fn status(reply: &StatusReply) -> String {
    let daemon = &reply.daemon;
    let mut text = format!(
        "peergated {}, pid {}, up {}, seccomp {}, sockets in {}\n\n",
        daemon.version,
        daemon.pid,
        duration(daemon.uptime_ms),
        daemon.seccomp,
        daemon.runtime_dir.display()
    );
    let rows: Vec<_> = reply
        .tenants
        .iter()
        .map(|tenant| {
            let counter = |name: &str| tenant.counters.get(name).copied().unwrap_or(0);
            vec![
                tenant.name.clone(),
                state(tenant.state, tenant.drain),
                tenant.session.to_string(),
                tenant.worker_pid.map_or("-".to_owned(), |pid| pid.to_string()),
                tenant.failures.to_string(),
                counter("ops").to_string(),
                about(counter("bytes_direct")),
                about(counter("bytes_staged")),
                about(counter("bytes_local")),
                counter("errors").to_string(),
                tenant.faults.to_string(),
            ]
        })
        .collect();
    text += &table(
        &[
            "TENANT",
            "STATE",
            ">SESSION",
            ">PID",
            ">FAILURES",
            ">OPS",
            ">DIRECT",
            ">STAGED",
            ">LOCAL",
            ">ERRORS",
            ">FAULTS",
        ],
        &rows,
    );
    let notes = notes(reply);
    if !notes.is_empty() {
        text += &format!("\n{}\n", notes.join("\n"));
    }
    text
}

/// What is seldom so: protection that was given up, why there is no worker, failures of other processes, and what was left out of logs because too much
/// came.
fn notes(reply: &StatusReply) -> Vec<String> {
    let broker = reply.daemon.broker_failures;
    let broker = (broker > 0).then(|| format!("broker: failed {broker} times"));
    let tenant = |tenant: &TenantStatus| {
        let counter = |name: &str| tenant.counters.get(name).copied().unwrap_or(0);
        let told = [
            (tenant.keeper_failures, "failures of the keeper"),
            (counter(SUPPRESSED), "faults without a record, too many came"),
            (counter(SUPPRESSED_LINES), "log lines left out, too many came"),
        ];
        let told = told.iter().filter(|(count, _)| *count > 0).map(|(n, what)| format!("{n} {what}"));
        let lazy = (tenant.iommu == IommuMode::Lazy.name()).then(|| "iommu lazy".to_owned());
        // Quoted: whoever has taken a worker over chooses its words.
        let failed = tenant.last_failure.as_ref().filter(|_| is_without_worker(tenant.state));
        let failed = failed.map(|reason| format!("the last worker failed, because {reason:?}"));
        let told: Vec<_> = lazy.into_iter().chain(failed).chain(told).collect();
        (!told.is_empty()).then(|| format!("{}: {}", tenant.name, told.join("; ")))
    };
    broker.into_iter().chain(reply.tenants.iter().filter_map(tenant)).collect()
}

fn is_without_worker(state: TenantState) -> bool {
    matches!(state, TenantState::Starting | TenantState::Restarting)
}

fn state(state: TenantState, drain: DrainState) -> String {
    let state = match state {
        TenantState::Starting => "starting",
        TenantState::Waiting => "waiting",
        TenantState::Connected => "connected",
        TenantState::Restarting => "restarting",
        TenantState::Stopped => "stopped",
    };
    match drain {
        DrainState::Running => state.to_owned(),
        DrainState::Draining => format!("{state}, draining"),
        DrainState::Drained => format!("{state}, drained"),
    }
}

/// `peergate tenants`.
pub(crate) fn tenants(reply: &TenantsReply) -> String {
    let rows: Vec<_> = reply
        .tenants
        .iter()
        .map(|tenant| {
            vec![
                tenant.name.clone(),
                tenant.device_id.to_string(),
                tenant.submit_queues.to_string(),
                tenant.endpoints.to_string(),
                size(tenant.memory),
                tenant.unsealed_memory.clone(),
                tenant.iommu.clone(),
                tenant.socket.display().to_string(),
            ]
        })
        .collect();
    let columns =
        ["TENANT", ">DEVICE ID", ">SUBMIT QUEUES", ">ENDPOINTS", ">MEMORY", "UNSEALED MEMORY", "IOMMU", "SOCKET"];
    table(&columns, &rows)
}

/// `peergate endpoints`.
pub(crate) fn endpoints(reply: &EndpointsReply) -> String {
    let rows: Vec<_> = reply
        .endpoints
        .iter()
        .map(|endpoint| {
            vec![
                endpoint.tenant.clone(),
                endpoint.endpoint.to_string(),
                endpoint.name.clone(),
                endpoint.kind.clone(),
                endpoint.device.clone(),
                size(endpoint.memory),
                endpoint.engines.to_string(),
                rate(endpoint.bandwidth),
                time(endpoint.latency_ns),
                if endpoint.staged_to.is_empty() { "-".to_owned() } else { endpoint.staged_to.join(",") },
            ]
        })
        .collect();
    let mut text = table(
        &["TENANT", ">ID", "NAME", "KIND", "DEVICE", ">MEMORY", ">ENGINES", ">BANDWIDTH", ">LATENCY", "STAGED TO"],
        &rows,
    );
    let peers = peers(reply);
    if !peers.is_empty() {
        text += "\n";
        text += &table(&["TENANT", "NAME", "PEER", "ACCESS", "ATOMICS", ">RANK", "LINK"], &peers);
    }
    text
}

/// How slices of GPUs reach those of others.
fn peers(reply: &EndpointsReply) -> Vec<Vec<String>> {
    let yes_or_no = |is_so| if is_so { "yes" } else { "no" }.to_owned();
    let peers = reply.endpoints.iter().flat_map(|endpoint| endpoint.peers.iter().map(move |peer| (endpoint, peer)));
    let row = |(endpoint, peer): (&EndpointInfo, &PeerInfo)| {
        vec![
            endpoint.tenant.clone(),
            endpoint.name.clone(),
            peer.name.clone(),
            yes_or_no(peer.access),
            yes_or_no(peer.atomics),
            peer.rank.to_string(),
            peer.link.clone(),
        ]
    };
    peers.map(row).collect()
}

#[cfg(test)]
mod tests {
    use vmm_control::DaemonStatus;

    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_have_no_trailing_space() {
        let rows = [
            vec!["a".to_owned(), "1".to_owned(), "x".to_owned()],
            vec!["long".to_owned(), "100".to_owned(), String::new()],
        ];
        assert_eq!(table(&["NAME", ">N", "END"], &rows), "NAME    N  END\na       1  x\nlong  100\n");
    }

    #[test]
    fn moments_are_right_at_the_borders_of_the_calendar() {
        let at = |seconds: u64| moment(seconds * 1_000_000_000);
        assert_eq!(at(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59.000Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(951_868_800), "2000-03-01T00:00:00.000Z");
        assert_eq!(at(1_704_067_199), "2023-12-31T23:59:59.000Z");
        assert_eq!(moment(4_107_542_400_123_456_789), "2100-03-01T00:00:00.123Z");
        assert!(moment(u64::MAX).starts_with("2554-"));
    }

    #[test]
    fn quantities_are_short() {
        assert_eq!((about(0), about(1023), about(1536)), ("0 B".into(), "1023 B".into(), "1.5 KiB".into()));
        assert_eq!(about(u64::MAX), "16384.0 PiB");
        let shown = [5_000, 65_000, 7_260_000, 90_000_000_000].map(duration);
        assert_eq!(shown, ["5 s", "1 min 5 s", "2 h 1 min", "1041 d 16 h"]);
    }

    #[test]
    fn status_is_one_line_a_tenant() {
        let mut reply = StatusReply {
            daemon: DaemonStatus {
                version: "0.1.0".into(),
                pid: 42,
                uptime_ms: 61_000,
                runtime_dir: "/run/peergate".into(),
                seccomp: "enforce".into(),
                broker_pid: Some(41),
                broker_failures: 0,
            },
            tenants: vec![TenantStatus {
                name: "demo".into(),
                state: TenantState::Connected,
                drain: DrainState::Running,
                iommu: "strict".into(),
                session: 2,
                worker_pid: Some(43),
                keeper_pid: Some(42),
                last_outage_us: Some(8_400),
                failures: 1,
                last_failure: None,
                keeper_failures: 0,
                faults: 3,
                counters: [("ops".to_owned(), 7), ("bytes_direct".to_owned(), 64 << 20)].into(),
                gauges: [].into(),
            }],
        };
        let expected = "\
peergated 0.1.0, pid 42, up 1 min 1 s, seccomp enforce, sockets in /run/peergate

TENANT  STATE      SESSION  PID  FAILURES  OPS    DIRECT  STAGED  LOCAL  ERRORS  FAULTS
demo    connected        2   43         1    7  64.0 MiB     0 B    0 B       0       3
";
        assert_eq!(status(&reply), expected);

        reply.daemon.broker_failures = 2;
        reply.tenants[0].keeper_failures = 1;
        reply.tenants[0].iommu = "lazy".into();
        reply.tenants[0].counters.extend([(SUPPRESSED.to_owned(), 744), (SUPPRESSED_LINES.to_owned(), 9)]);
        let notes = "
broker: failed 2 times
demo: iommu lazy; 1 failures of the keeper; 744 faults without a record, too many came; 9 log lines left out, too many came
";
        assert_eq!(status(&reply), expected.to_owned() + notes);

        let failed = "; the last worker failed, because \"no\\nGPU\"";
        reply.tenants[0].last_failure = Some("no\nGPU".into());
        assert!(!status(&reply).contains(failed), "there is another one");
        reply.tenants[0].state = TenantState::Restarting;
        assert!(status(&reply).contains(failed), "{}", status(&reply));
    }

    #[test]
    fn endpoints_show_their_link() {
        let mut endpoint = EndpointInfo {
            tenant: "demo".into(),
            endpoint: 1,
            name: "fpga0".into(),
            device: "f".into(),
            kind: "fpga".into(),
            memory: 64 << 20,
            engines: 1,
            bandwidth: 0,
            latency_ns: 1500,
            staged_to: vec!["gpu0".into()],
            peers: Vec::new(),
        };
        let expected = "\
TENANT  ID  NAME   KIND  DEVICE  MEMORY  ENGINES  BANDWIDTH  LATENCY  STAGED TO
demo     1  fpga0  fpga  f       64 MiB        1  unlimited  1500 ns  gpu0
";
        assert_eq!(endpoints(&EndpointsReply { endpoints: vec![endpoint.clone()] }), expected);

        let peer = |name: &str, access, link: &str| PeerInfo {
            name: name.into(),
            access,
            atomics: access,
            rank: 0,
            link: link.into(),
        };
        endpoint.peers = vec![peer("a", true, "NVLink (18 links)"), peer("b", false, "unknown")];
        let peers = "
TENANT  NAME   PEER  ACCESS  ATOMICS  RANK  LINK
demo    fpga0  a     yes     yes         0  NVLink (18 links)
demo    fpga0  b     no      no          0  unknown
";
        assert_eq!(endpoints(&EndpointsReply { endpoints: vec![endpoint] }), expected.to_owned() + peers);
    }
}
