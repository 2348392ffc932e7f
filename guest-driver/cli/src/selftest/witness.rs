//! What a refusal looks like, expected and observed, in the same words.
//!
//! A completion says the status, the reason and the first refused address; the fault event of the same work says it again, with what the
//! accessor wanted and who it was. Both become one sentence, so that a row compares sentences.
//!
//! Not here: which refusals there are.

use std::time::{Duration, Instant};

use anyhow::Result;
use peergate_guest::uapi::Work;
use peergate_guest::{Access, Error, EventKind, FaultReason, Notice, Session, Status};

use super::Row;
use crate::commands::access_text;

/// How long an event that must come may take.
const SOON: Duration = Duration::from_secs(10);

/// A refused transfer.
pub(super) struct Refusal {
    pub(super) status: Status,
    pub(super) reason: FaultReason,
    pub(super) address: u64,
    pub(super) access: Access,
    pub(super) accessor: u32,
}

impl Refusal {
    fn words(&self, session: &Session) -> String {
        words(
            &completion_words(self.status, Some((self.reason, self.address))),
            &event_words(session, Some(self.reason), self.address, self.access, Some(self.accessor)),
        )
    }
}

/// An endpoint by its name.
fn name_of(session: &Session, endpoint: Option<u32>) -> String {
    let named =
        endpoint.map(|number| session.endpoint(&number.to_string()).map_or(number.to_string(), |found| found.name));
    named.unwrap_or_else(|| "unknown".to_owned())
}

fn words(completion: &str, event: &str) -> String {
    format!("{completion}; event: {event}")
}

fn completion_words(status: Status, fault: Option<(FaultReason, u64)>) -> String {
    match fault {
        Some((reason, address)) => format!("{} {} at {address:#x}", status.name(), reason.name()),
        None => status.name().to_owned(),
    }
}

fn event_words(
    session: &Session,
    reason: Option<FaultReason>,
    address: u64,
    access: Access,
    accessor: Option<u32>,
) -> String {
    let accessor = name_of(session, accessor);
    format!("{} {} at {address:#x} by {accessor}", reason.map_or("?", FaultReason::name), access_text(access))
}

fn notice_words(session: &Session, notice: Option<&Notice>) -> String {
    notice.map_or_else(
        || "none".to_owned(),
        |notice| event_words(session, notice.reason, notice.address, notice.access, notice.accessor),
    )
}

/// Waits for a fault event that `wanted` picks; other events are dropped.
pub(crate) fn fault(session: &Session, wanted: impl Fn(&Notice) -> bool) -> Result<Option<Notice>> {
    let deadline = Instant::now() + SOON;
    while let Some(notice) = session.event(deadline)? {
        if notice.kind == Some(EventKind::Fault) && wanted(&notice) {
            return Ok(Some(notice));
        }
    }
    Ok(None)
}

/// Submits `work`, which must be refused as `expected`.
pub(super) fn refused(name: &str, session: &Session, work: Work, expected: &Refusal) -> Result<Row> {
    let ticket = session.submit(work)?;
    let outcome = ticket.outcome(session.patience())?;
    if outcome.status == Status::Ok {
        return Ok(Row::new(name, expected.words(session), format!("OK, {} bytes moved", outcome.bytes)));
    }
    let event = fault(session, |notice| notice.cookie == ticket.cookie())?;
    let completion = completion_words(outcome.status, outcome.fault.map(|fault| (fault.reason, fault.address)));
    let got = words(&completion, &notice_words(session, event.as_ref()));
    Ok(Row::refusal(name, expected.words(session), got, event))
}

/// Submits `work`, which must end with `status`; no event is asked for.
pub(super) fn ends_with(name: &str, session: &Session, work: Work, status: Status) -> Result<Row> {
    let outcome = session.submit(work)?.outcome(session.patience())?;
    Ok(Row::new(name, status.name(), outcome.status.name()))
}

/// FREE of a handle that must be refused, and of the fault event that comes with it reason and owner.
pub(super) fn refused_free(
    name: &str,
    session: &Session,
    handle: u64,
    status: Status,
    reason: FaultReason,
) -> Result<Row> {
    let answer = status_of(session.channel().free(handle))?;
    let event = if answer == Status::Ok.name() { None } else { fault(session, |notice| notice.value == handle)? };
    let words = |answer: &str, reason: Option<FaultReason>, owner: Option<u32>| {
        let owner = owner.map_or_else(|| "nobody".to_owned(), |owner| owner.to_string());
        format!(
            "FREE answers {answer}; event: {} with the handle, owner {owner}",
            reason.map_or("none", FaultReason::name)
        )
    };
    let got = words(answer, event.and_then(|event| event.reason), event.and_then(|event| event.owner));
    Ok(Row::refusal(name, words(status.name(), Some(reason), None), got, event))
}

/// The status of a call that must be refused.
///
/// # Errors
/// What is not a refusal.
pub(crate) fn status_of<T>(result: std::result::Result<T, Error>) -> Result<&'static str> {
    match result {
        Ok(_) => Ok("OK"),
        Err(error) => error.status().map(Status::name).ok_or_else(|| error.into()),
    }
}
