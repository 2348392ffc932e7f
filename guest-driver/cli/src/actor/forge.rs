//! What is somebody else's, named as if it were one's own.
//!
//! Each attempt is told in words that do not hold the number itself, so that the answers for an object of somebody else and for one that does not
//! exist can be compared.
//!
//! Not here: the numbers. Whoever gives the orders knows what others have.

use anyhow::{Context, Result};
use peergate_guest::uapi::Work;
use peergate_guest::{Access, FaultReason, Notice, Session, Status};
use serde_json::{Value, json};

use super::{Foreign, Open, PAGE, Stage};
use crate::selftest::witness::{fault, status_of};

/// Tries to use `number`, in an open that has nothing else.
pub(super) fn forge(stage: Stage<'_>, open: &Open, kind: Foreign, number: u64) -> Result<Value> {
    let session = Session::open(stage.driver)?;
    let answer = match kind {
        Foreign::Endpoint => endpoint(&session, open, u32::try_from(number).context("An endpoint has 32 bits")?)?,
        Foreign::Handle => {
            let status = status_of(session.channel().free(number))?;
            // One that was freed raises no event to wait for.
            let event = if status == Status::Ok.name() {
                "no event".into()
            } else {
                event(&session, |notice| notice.value == number)?
            };
            format!("FREE {status}, {event}")
        }
        Foreign::Address => {
            let work = session.stream().by(open.gpu.number).fill_work(number, 0, 8);
            format!("FILL {}", refused(&session, work, number)?)
        }
        Foreign::Domain => {
            let act_as = stage.act_as.context("This driver lets nobody choose a domain")?;
            act_as(Some(u32::try_from(number).context("A domain has 32 bits")?)).context("Could not act as another")?;
            let done = domain(&session, open);
            act_as(None).context("Could not act as oneself again")?;
            done?
        }
    };
    Ok(json!({"answer": answer}))
}

/// Acts by, allocates of and asks for rights to an endpoint.
fn endpoint(session: &Session, open: &Open, number: u32) -> Result<String> {
    let page = session.map(PAGE, Access::RW)?;
    let alloc = status_of(session.alloc(number, PAGE, Access::RW))?;
    let peer = status_of(session.peer_query(open.gpu.number, number))?;
    let work = session.stream().by(number).fill_work(page.iova(), 0, 8);
    Ok(format!("ALLOC {alloc}, PEER_QUERY {peer}, FILL {}", refused(session, work, page.iova())?))
}

/// Requests and work for a domain; the driver has been told to lie.
fn domain(session: &Session, open: &Open) -> Result<String> {
    let alloc = status_of(session.alloc(open.gpu.number, PAGE, Access::RW))?;
    let peer = status_of(session.peer_query(open.gpu.number, open.fpga.number))?;
    let work = session.stream().by(open.gpu.number).fill_work(0, 0, 8);
    let outcome = session.submit(work)?.outcome(session.patience())?;
    Ok(format!("ALLOC {alloc}, PEER_QUERY {peer}, FILL {}", outcome.status.name()))
}

/// How work ended, and what its event says. Addresses are told relative to `at`.
fn refused(session: &Session, work: Work, at: u64) -> Result<String> {
    let ticket = session.submit(work)?;
    let outcome = ticket.outcome(session.patience())?;
    let Some(place) = outcome.fault else { return Ok(outcome.status.name().to_owned()) };
    let place = match place.address {
        0 => format!("{} at no address", place.reason.name()),
        address if address == at => format!("{} at that address", place.reason.name()),
        address => format!("{} at {address:#x}", place.reason.name()),
    };
    let event = event(session, |notice| notice.cookie == ticket.cookie())?;
    Ok(format!("{} {place}, {event}", outcome.status.name()))
}

fn event(session: &Session, wanted: impl Fn(&Notice) -> bool) -> Result<String> {
    let Some(notice) = fault(session, wanted)? else { return Ok("no event".to_owned()) };
    let owner = notice.owner.map_or_else(|| "nobody".to_owned(), |owner| owner.to_string());
    Ok(format!("event {} owner {owner}", notice.reason.map_or("?", FaultReason::name)))
}
