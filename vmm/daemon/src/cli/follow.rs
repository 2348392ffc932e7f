//! `peergate faults --follow`: every fault from now on, one line each, until the reader or the daemon goes.
//!
//! The daemon is asked again and again for what came after the last answer. What cannot be shown is told of: records that were overwritten, could not be
//! read or were never made because too many came at once; and so are tenants that come and go, and their sessions.
//!
//! Not here: how a fault is worded.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use vmm_control::{Client, ClientError, ErrorCode, FaultInfo, FaultTotals, FaultsReply, Reply, Request};

use super::faults;

/// How long nobody looks after all has been seen.
const PAUSE: Duration = Duration::from_millis(200);
/// The same if there was more than one answer has room for.
const SHORT_PAUSE: Duration = Duration::from_millis(20);

/// Something to print.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Line {
    Fault(Box<FaultInfo>),
    Session { tenant: String, session: u32 },
    Appeared { tenant: String, session: u32 },
    Vanished { tenant: String },
    Missed { tenant: String, overwritten: u64, unreadable: u64 },
    Suppressed { tenant: String, count: u64, by_reason: BTreeMap<String, u64> },
}

impl Line {
    fn text(&self) -> String {
        match self {
            Self::Fault(fault) => faults::line(fault),
            Self::Session { tenant, session } => format!("-- {tenant}: session {session} has begun"),
            Self::Appeared { tenant, session } => format!("-- {tenant}: a new tenant, in session {session}"),
            Self::Vanished { tenant } => format!("-- {tenant}: the tenant is gone"),
            Self::Missed { tenant, overwritten, unreadable } => {
                format!(
                    "-- {tenant}: {overwritten} faults were overwritten before they could be shown, {unreadable} are unreadable"
                )
            }
            Self::Suppressed { tenant, count, by_reason } => {
                format!(
                    "-- {tenant}: {count} faults came too fast and were only counted{}",
                    faults::by_reason(by_reason)
                )
            }
        }
    }
}

/// How far a tenant has been read.
#[derive(Debug, Default)]
struct Seen {
    session: u32,
    next: u64,
    suppressed: u64,
    suppressed_by_reason: BTreeMap<String, u64>,
}

/// Turns answers into lines.
#[derive(Debug, Default)]
struct Follower {
    only: Option<String>,
    /// `None` before the first answer.
    known: Option<BTreeMap<String, Seen>>,
    has_more: bool,
}

impl Follower {
    /// What to ask next. `last` is how many records of before are wanted.
    fn request(&self, last: u32) -> Request {
        let since = |known: &BTreeMap<String, Seen>| {
            known.iter().map(|(tenant, seen)| (tenant.clone(), seen.next)).collect::<BTreeMap<_, _>>()
        };
        let since = self.known.as_ref().map(since);
        let last = since.is_none().then_some(last);
        Request::Faults { tenant: self.only.clone(), last, since }
    }

    /// Takes an answer in.
    fn take(&mut self, reply: FaultsReply) -> Vec<Line> {
        let is_first = self.known.is_none();
        let mut before = self.known.take().unwrap_or_default();
        let mut known = BTreeMap::new();
        let (mut lines, mut after) = (Vec::new(), Vec::new());
        // Tenants whose records in this answer were asked for by a number of a tenant before.
        let mut anew = BTreeSet::new();
        // Sessions that are yet to be told of.
        let mut begun = BTreeMap::new();
        for totals in &reply.tenants {
            let (tenant, session) = (totals.tenant.clone(), totals.session);
            let seen = before.remove(&tenant);
            match &seen {
                Some(seen) if session < seen.session || totals.recorded < seen.next => {
                    lines.extend([
                        Line::Vanished { tenant: tenant.clone() },
                        Line::Appeared { tenant: tenant.clone(), session },
                    ]);
                    anew.insert(tenant.clone());
                    known.insert(tenant, Seen { session, ..Seen::default() });
                    continue;
                }
                Some(seen) if session > seen.session => drop(begun.insert(tenant.clone(), session)),
                None if !is_first => lines.push(Line::Appeared { tenant: tenant.clone(), session }),
                _ => {}
            }
            if !is_first {
                lines.extend(missed(totals));
                after.extend(suppressed(totals, &seen.unwrap_or_default()));
            }
            known.insert(tenant, Seen::of(totals));
        }
        lines.extend(before.into_keys().map(|tenant| Line::Vanished { tenant }));
        for fault in reply.faults.into_iter().filter(|fault| !anew.contains(&fault.tenant)) {
            if let Some(session) = begun.get(&fault.tenant).copied().filter(|session| *session == fault.session) {
                begun.remove(&fault.tenant);
                lines.push(Line::Session { tenant: fault.tenant.clone(), session });
            }
            lines.push(Line::Fault(Box::new(fault)));
        }
        lines.extend(begun.into_iter().map(|(tenant, session)| Line::Session { tenant, session }));
        lines.extend(after);
        self.has_more = !anew.is_empty() || reply.tenants.iter().any(|totals| totals.next < totals.recorded);
        self.known = Some(known);
        lines
    }
}

impl Seen {
    fn of(totals: &FaultTotals) -> Self {
        Self {
            session: totals.session,
            next: totals.next,
            suppressed: totals.suppressed,
            suppressed_by_reason: totals.suppressed_by_reason.clone(),
        }
    }
}

fn missed(totals: &FaultTotals) -> Option<Line> {
    let (tenant, overwritten, unreadable) = (totals.tenant.clone(), totals.missed, totals.torn);
    (overwritten > 0 || unreadable > 0).then_some(Line::Missed { tenant, overwritten, unreadable })
}

/// What was suppressed since `seen`.
fn suppressed(totals: &FaultTotals, seen: &Seen) -> Option<Line> {
    let count = totals.suppressed.saturating_sub(seen.suppressed);
    let since = |(reason, count): (&String, &u64)| {
        let before = seen.suppressed_by_reason.get(reason).copied().unwrap_or(0);
        Some((reason.clone(), count.saturating_sub(before))).filter(|(_, count)| *count > 0)
    };
    let by_reason = totals.suppressed_by_reason.iter().filter_map(since).collect();
    (count > 0).then(|| Line::Suppressed { tenant: totals.tenant.clone(), count, by_reason })
}

/// Prints faults as they come, after the `last` newest of before. Returns once nobody reads any more.
pub(crate) fn run(socket: &Path, tenant: Option<&str>, last: u32, json: bool) -> anyhow::Result<()> {
    let mut client = Client::connect(socket)?;
    let mut follower = Follower { only: tenant.map(str::to_owned), ..Follower::default() };
    loop {
        let reply = match (client.ask(&follower.request(last)), &follower.known) {
            (Ok(Reply::Faults(reply)), _) => reply,
            (Ok(_), _) => bail!("peergated has answered something else"),
            // The only tenant has gone; it may come back.
            (Err(ClientError::Refused { reply }), Some(_)) if reply.code == ErrorCode::UnknownTenant => {
                FaultsReply { tenants: Vec::new(), faults: Vec::new() }
            }
            (Err(ClientError::Broken { .. }), Some(_)) => {
                bail!("peergated has gone, and what it knew of faults with it; follow again once it runs")
            }
            (Err(error), _) => return Err(error.into()),
        };
        let mut text = String::new();
        for line in follower.take(reply) {
            text += &if json { serde_json::to_string(&line).context("Cannot write JSON")? } else { line.text() };
            text.push('\n');
        }
        if !super::print(&text)? || !somebody_reads(if follower.has_more { SHORT_PAUSE } else { PAUSE })? {
            return Ok(());
        }
    }
}

/// Waits, but not longer than somebody reads what is printed.
fn somebody_reads(pause: Duration) -> anyhow::Result<bool> {
    let out = io::stdout();
    let timeout = Timespec { tv_sec: 0, tv_nsec: pause.subsec_nanos().into() };
    // No flag is asked for: what comes all the same says that the other end has gone.
    match poll(&mut [PollFd::new(&out, PollFlags::empty())], Some(&timeout)) {
        Ok(0) | Err(rustix::io::Errno::INTR) => Ok(true),
        Ok(_) => Ok(false),
        Err(error) => Err(error).context("Cannot wait"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::faults::tests::{fault, totals};
    use super::*;

    fn of(tenant: &str, recorded: u64) -> FaultTotals {
        FaultTotals { tenant: tenant.into(), recorded, next: recorded, ..totals() }
    }

    fn numbered(tenant: &str, number: u64) -> FaultInfo {
        FaultInfo { tenant: tenant.into(), number, ..fault() }
    }

    fn line(fault: FaultInfo) -> Line {
        Line::Fault(Box::new(fault))
    }

    fn reply(tenants: &[FaultTotals], faults: &[FaultInfo]) -> FaultsReply {
        FaultsReply { tenants: tenants.to_vec(), faults: faults.to_vec() }
    }

    fn since(request: &Request) -> Vec<(String, u64)> {
        match request {
            Request::Faults { since: Some(since), last: None, .. } => since.clone().into_iter().collect(),
            other => panic!("{other:?}"),
        }
    }

    /// A follower that has seen tenant `a` up to record 5, in session 1.
    fn begun() -> Follower {
        let mut follower = Follower::default();
        assert_eq!(follower.request(2), Request::Faults { tenant: None, last: Some(2), since: None });
        assert_eq!(follower.take(reply(&[of("a", 5)], &[numbered("a", 5)])), [line(numbered("a", 5))]);
        follower
    }

    #[test]
    fn each_answer_is_asked_for_from_where_the_last_one_ended() {
        let mut follower = begun();
        assert_eq!(since(&follower.request(2)), [("a".to_owned(), 5)]);
        assert!(follower.take(reply(&[of("a", 5)], &[])).is_empty(), "nothing new, no line");
        let part = FaultTotals { next: 6, ..of("a", 7) };
        assert_eq!(follower.take(reply(&[part], &[numbered("a", 6)])), [line(numbered("a", 6))]);
        assert!(follower.has_more);
        assert_eq!(since(&follower.request(2)), [("a".to_owned(), 6)]);
        assert_eq!(follower.take(reply(&[of("a", 7)], &[numbered("a", 7)])), [line(numbered("a", 7))]);
        assert!(!follower.has_more);
    }

    #[test]
    fn what_was_lost_between_two_looks_is_told_once() {
        let mut follower = begun();
        let by = |count| [("PEER".to_owned(), count)].into();
        let lost = FaultTotals { missed: 40, torn: 1, suppressed: 7, suppressed_by_reason: by(7), ..of("a", 2000) };
        let missed = Line::Missed { tenant: "a".into(), overwritten: 40, unreadable: 1 };
        let suppressed = |count| Line::Suppressed { tenant: "a".into(), count, by_reason: by(count) };
        let lines = follower.take(reply(std::slice::from_ref(&lost), &[numbered("a", 46)]));
        assert_eq!(lines, [missed, line(numbered("a", 46)), suppressed(7)]);
        assert!(follower.take(reply(&[FaultTotals { missed: 0, torn: 0, ..lost.clone() }], &[])).is_empty());
        let more = FaultTotals { missed: 0, torn: 0, suppressed: 9, suppressed_by_reason: by(9), ..lost };
        assert_eq!(follower.take(reply(&[more], &[])), [suppressed(2)]);
    }

    #[test]
    fn losses_of_before_are_not_the_followers() {
        let mut follower = Follower::default();
        let old = FaultTotals { torn: 3, suppressed: 100, overwritten: 50, ..of("a", 2000) };
        assert!(follower.take(reply(&[old], &[])).is_empty());
    }

    #[test]
    fn sessions_and_tenants_that_come_and_go_are_told() {
        let mut follower = begun();
        let session = |number| FaultTotals { session: number, ..of("a", 7) };
        let late = FaultInfo { session: 2, ..numbered("a", 7) };
        let lines =
            follower.take(reply(&[session(2), of("b", 1)], &[numbered("a", 6), late.clone(), numbered("b", 1)]));
        let expected = [
            Line::Appeared { tenant: "b".into(), session: 1 },
            line(numbered("a", 6)),
            Line::Session { tenant: "a".into(), session: 2 },
            line(late),
            line(numbered("b", 1)),
        ];
        assert_eq!(lines, expected);
        let lines = follower.take(reply(&[session(4)], &[]));
        assert_eq!(lines, [Line::Vanished { tenant: "b".into() }, Line::Session { tenant: "a".into(), session: 4 }]);
        assert!(follower.take(reply(&[session(4)], &[])).is_empty());
    }

    #[test]
    fn tenant_of_the_same_name_that_is_another_one_is_read_from_its_beginning() {
        let anew = |session| [Line::Vanished { tenant: "a".into() }, Line::Appeared { tenant: "a".into(), session }];
        // Fewer records than were seen; or a session of before.
        let mut follower = begun();
        assert_eq!(follower.take(reply(&[of("a", 3)], &[])), anew(1));
        assert!(follower.has_more);
        assert_eq!(since(&follower.request(0)), [("a".to_owned(), 0)]);
        let mut follower = begun();
        follower.take(reply(&[FaultTotals { session: 3, ..of("a", 5) }], &[]));
        assert_eq!(follower.take(reply(&[of("a", 9)], &[numbered("a", 6)])), anew(1), "6 comes again with 1 to 5");
        assert_eq!(since(&follower.request(0)), [("a".to_owned(), 0)]);
    }

    #[test]
    fn lines_are_short_and_as_json_say_what_they_are() {
        let json = |line: &Line| serde_json::to_value(line).unwrap();
        let told = json(&line(fault()));
        assert_eq!(
            (&told["event"], &told["number"], &told["mapping"]["request"]),
            (&"fault".into(), &9.into(), &4.into())
        );
        let by_reason = [("PEER".to_owned(), 2)].into();
        let suppressed = Line::Suppressed { tenant: "a".into(), count: 2, by_reason };
        assert_eq!(suppressed.text(), "-- a: 2 faults came too fast and were only counted (PEER 2)");
        let expected = serde_json::json!({"event": "suppressed", "tenant": "a", "count": 2, "by_reason": {"PEER": 2}});
        assert_eq!(json(&suppressed), expected);
        let missed = Line::Missed { tenant: "a".into(), overwritten: 4, unreadable: 0 };
        assert_eq!(json(&missed)["event"], "missed");
        assert!([missed, suppressed, line(fault())].iter().all(|line| !line.text().contains('\n')));
    }
}
