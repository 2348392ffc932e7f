//! Refused accesses as text: a table with what is known of the mapping beneath each row, or a line each.
//!
//! Not here: asking for them, JSON.

use std::fmt::Write;

use vmm_control::{FaultInfo, FaultTotals, FaultsReply, MappingInfo, Party};

use super::show::{moment, table};

const HEADINGS: [&str; 13] = [
    "TIME", "TENANT", "ACCESSOR", "OWNER", "ACCESS", ">ADDRESS", "REASON", "STATUS", ">SESSION", ">DOMAIN", ">STREAM",
    ">COOKIE", ">VALUE",
];

/// `peergate faults`.
pub(crate) fn text(reply: &FaultsReply) -> String {
    let rows: Vec<_> = reply.faults.iter().map(row).collect();
    let mut text = String::new();
    if !rows.is_empty() {
        let details = std::iter::once(None).chain(reply.faults.iter().map(detail));
        for (line, detail) in table(&HEADINGS, &rows).lines().zip(details) {
            let _ = writeln!(text, "{line}");
            if let Some(detail) = detail {
                let _ = writeln!(text, "    {detail}");
            }
        }
        text.push('\n');
    }
    reply.tenants.iter().for_each(|totals| text += &total(totals));
    text
}

fn row(fault: &FaultInfo) -> Vec<String> {
    vec![
        moment(fault.time_ns),
        fault.tenant.clone(),
        party(fault.accessor.as_ref()),
        party(fault.owner.as_ref()),
        fault.access.clone(),
        format!("{:#x}", fault.address),
        fault.reason.clone(),
        fault.status.clone(),
        fault.session.to_string(),
        fault.domain.to_string(),
        fault.stream.to_string(),
        format!("{:#x}", fault.cookie),
        format!("{:#x}", fault.value),
    ]
}

fn total(totals: &FaultTotals) -> String {
    let mut text = format!("{}: {} faults in all", totals.tenant, totals.total);
    if totals.suppressed > 0 {
        let (count, reasons) = (totals.suppressed, by_reason(&totals.suppressed_by_reason));
        let _ = write!(text, ", {count} came too fast and were only counted{reasons}");
    }
    if totals.overwritten > 0 {
        let _ = write!(text, ", the oldest {} are no longer kept", totals.overwritten);
    }
    if totals.torn > 0 {
        let _ = write!(text, ", {} unreadable", totals.torn);
    }
    text.push('\n');
    text
}

/// Counts in brackets; nothing if there are none.
pub(crate) fn by_reason<'a>(counts: impl IntoIterator<Item = (&'a String, &'a u64)>) -> String {
    let counts: Vec<_> = counts.into_iter().map(|(reason, count)| format!("{reason} {count}")).collect();
    if counts.is_empty() { String::new() } else { format!(" ({})", counts.join(", ")) }
}

/// One fault in one line.
pub(crate) fn line(fault: &FaultInfo) -> String {
    let mut text = format!(
        "{} {} #{}: {} {} of {} at {:#x} is {} ({}); session {}, domain {}, stream {}, cookie {:#x}",
        moment(fault.time_ns),
        fault.tenant,
        fault.number,
        party(fault.accessor.as_ref()),
        fault.access,
        party(fault.owner.as_ref()),
        fault.address,
        fault.status,
        fault.reason,
        fault.session,
        fault.domain,
        fault.stream,
        fault.cookie,
    );
    if fault.value != 0 {
        let _ = write!(text, ", value {:#x}", fault.value);
    }
    if let Some(detail) = detail(fault) {
        let _ = write!(text, "; {detail}");
    }
    text
}

/// What is known of the mapping; nothing if no mapping is concerned.
fn detail(fault: &FaultInfo) -> Option<String> {
    let Some(mapping) = &fault.mapping else {
        return (fault.reason == "MAPPING").then(|| "nothing is mapped in the domain".to_owned());
    };
    let (what, at) = (what(mapping), fault.address);
    Some(match mapping.relation.as_str() {
        "holds" if mapping.draining => format!("in {what}, which is being removed"),
        "holds" => format!("in {what}"),
        "held" => format!("nothing is mapped there any more; it was {what}"),
        "nearest" => {
            let (below, above) = (at.checked_sub(mapping.last), mapping.first.checked_sub(at));
            let distance = match (below, above) {
                (Some(after), _) => format!("{after:#x} after the end of"),
                (None, Some(before)) => format!("{before:#x} before"),
                (None, None) => "near".to_owned(),
            };
            format!("nothing is mapped there; {distance} {what}")
        }
        relation => format!("{relation} {what}"),
    })
}

fn what(mapping: &MappingInfo) -> String {
    let kind = if mapping.kind == "map" { "guest memory" } else { mapping.kind.as_str() };
    let MappingInfo { first, last, access, request, .. } = mapping;
    format!("{kind} {first:#x}-{last:#x}, {access}, made by request {request}")
}

fn party(party: Option<&Party>) -> String {
    match party {
        None => "-".to_owned(),
        Some(Party { name: Some(name), .. }) => name.clone(),
        Some(Party { endpoint, name: None }) => format!("#{endpoint}"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn fault() -> FaultInfo {
        FaultInfo {
            tenant: "demo".into(),
            number: 9,
            time_ns: 0,
            session: 1,
            domain: 2,
            accessor: Some(Party { endpoint: 0, name: Some("gpu0".into()) }),
            owner: Some(Party { endpoint: 7, name: None }),
            address: 0x1000,
            access: "write".into(),
            reason: "PEER".into(),
            status: "DENIED".into(),
            stream: 3,
            cookie: 255,
            value: 0,
            mapping: Some(mapping("holds")),
        }
    }

    fn mapping(relation: &str) -> MappingInfo {
        MappingInfo {
            relation: relation.into(),
            kind: "buffer".into(),
            first: 0x1000,
            last: 0x1fff,
            access: "read-write".into(),
            request: 4,
            draining: false,
        }
    }

    pub(crate) fn totals() -> FaultTotals {
        FaultTotals {
            tenant: "demo".into(),
            session: 1,
            total: 0,
            recorded: 0,
            overwritten: 0,
            suppressed: 0,
            suppressed_by_reason: [].into(),
            missed: 0,
            torn: 0,
            next: 0,
        }
    }

    #[test]
    fn faults_name_both_parties_and_the_mapping_and_say_what_is_missing() {
        let suppressed_by_reason = [("MAPPING".to_owned(), 400), ("PEER".to_owned(), 100)].into();
        let flood = FaultTotals {
            total: 2500,
            recorded: 2000,
            overwritten: 976,
            suppressed: 500,
            suppressed_by_reason,
            torn: 1,
            ..totals()
        };
        let bare = FaultInfo { mapping: None, ..fault() };
        let expected = "\
TIME                      TENANT  ACCESSOR  OWNER  ACCESS  ADDRESS  REASON  STATUS  SESSION  DOMAIN  STREAM  COOKIE  VALUE
1970-01-01T00:00:00.000Z  demo    gpu0      #7     write    0x1000  PEER    DENIED        1       2       3    0xff    0x0
    in buffer 0x1000-0x1fff, read-write, made by request 4
1970-01-01T00:00:00.000Z  demo    gpu0      #7     write    0x1000  PEER    DENIED        1       2       3    0xff    0x0

demo: 2500 faults in all, 500 came too fast and were only counted (MAPPING 400, PEER 100), the oldest 976 are no longer kept, 1 unreadable
";
        assert_eq!(text(&FaultsReply { tenants: vec![flood], faults: vec![fault(), bare] }), expected);
        assert_eq!(text(&FaultsReply { tenants: vec![totals()], faults: Vec::new() }), "demo: 0 faults in all\n");
    }

    #[test]
    fn one_line_has_all_of_it() {
        let expected = "1970-01-01T00:00:00.000Z demo #9: gpu0 write of #7 at 0x1000 is DENIED (PEER); session 1, domain 2, \
                        stream 3, cookie 0xff; in buffer 0x1000-0x1fff, read-write, made by request 4";
        assert_eq!(line(&fault()), expected);
        let stale = FaultInfo { reason: "STALE".into(), value: 0x1_0000_0002, mapping: None, ..fault() };
        assert!(line(&stale).ends_with(", cookie 0xff, value 0x100000002"), "{}", line(&stale));
    }

    #[test]
    fn mapping_is_told_as_it_lies_to_the_address() {
        let about = |address, reason: &str, mapping| {
            detail(&FaultInfo { address, reason: reason.into(), mapping, ..fault() }).unwrap_or_default()
        };
        let buffer = "buffer 0x1000-0x1fff, read-write, made by request 4";
        let draining = MappingInfo { draining: true, ..mapping("holds") };
        assert_eq!(about(0x1000, "DRAINING", Some(draining)), format!("in {buffer}, which is being removed"));
        let held = about(0x1000, "MAPPING", Some(mapping("held")));
        assert_eq!(held, format!("nothing is mapped there any more; it was {buffer}"));
        let near = |address| about(address, "MAPPING", Some(mapping("nearest")));
        assert_eq!(near(0x2000), format!("nothing is mapped there; 0x1 after the end of {buffer}"));
        assert_eq!(near(0xff0), format!("nothing is mapped there; 0x10 before {buffer}"));
        assert_eq!(near(0x1800), format!("nothing is mapped there; near {buffer}"), "a false record");
        assert_eq!(about(0, "MAPPING", None), "nothing is mapped in the domain");
        assert_eq!(about(0, "DOMAIN", None), "");
        let memory = MappingInfo { kind: "map".into(), ..mapping("relation 9") };
        assert!(about(0, "MAPPING", Some(memory)).starts_with("relation 9 guest memory 0x1000-"));
    }
}
