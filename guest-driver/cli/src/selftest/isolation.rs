//! What one process of the guest must not get at: the memory and the handles of another.
//!
//! Two opens of the device stand for two processes; the device cannot tell the difference.
//!
//! Not here: other VMs, which the host's tests look after.

use anyhow::{Result, bail};
use peergate_guest::{Access, Buffer, FaultReason, Status, download, upload};

use super::witness::{Refusal, refused, refused_free, status_of};
use super::{Bench, Case, Row};
use crate::pattern::{Compare, Pattern};

const PAGE: u64 = 4096;
/// How many buffers the other process allocates until one lies where this one has nothing.
const TRIES: usize = 64;

pub(super) const CASES: &[(&str, Case)] = &[
    ("foreign-address", foreign_address),
    ("foreign-handle", foreign_handle),
    ("unknown-handle", unknown_handle),
    ("same-address", same_address),
    ("mapping-quota", mapping_quota),
];

/// An address that another process mapped faults here.
fn foreign_address(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let (mine, theirs) = (bench.session()?, bench.session()?);
    let gpu = bench.gpu.number;
    let memory = mine.alloc(gpu, PAGE, Access::RW)?;
    let own = memory.iova()..memory.iova() + memory.len();
    let mut held = Vec::new();
    let foreign = loop {
        let buffer = theirs.alloc(gpu, PAGE, Access::RW)?;
        let address = buffer.iova();
        held.push(buffer);
        if !own.contains(&address) {
            break address;
        }
        if held.len() == TRIES {
            bail!("The driver gives every buffer of the other process addresses of this one");
        }
    };
    let expected = Refusal {
        status: Status::Fault,
        reason: FaultReason::Mapping,
        address: foreign,
        access: Access::READ,
        accessor: gpu,
    };
    let work = mine.stream().by(gpu).copy_work(memory.iova(), foreign, 64);
    Ok(vec![refused(name, &mine, work, &expected)?])
}

/// The handle of another process's buffer; the event does not say whose it is.
fn foreign_handle(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let (mine, theirs) = (bench.session()?, bench.session()?);
    let buffer = theirs.alloc(bench.gpu.number, PAGE, Access::RW)?;
    let row = refused_free(name, &mine, buffer.handle(), Status::NoEnt, FaultReason::Domain)?;
    // The owner still has it.
    theirs.stream().fill(buffer.iova(), 1, PAGE)?.wait()?;
    Ok(vec![row])
}

/// A handle that never was answers as one of another process does.
fn unknown_handle(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let handle = u64::from(u32::MAX - 7);
    Ok(vec![refused_free(name, &bench.session()?, handle, Status::NoEnt, FaultReason::Domain)?])
}

/// Two processes have buffers, perhaps at one address; each reads what it wrote.
fn same_address(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let sessions = [bench.session()?, bench.session()?];
    let mut buffers: Vec<Buffer> = Vec::new();
    for (seed, session) in (21..).zip(&sessions) {
        let buffer = session.alloc(bench.gpu.number, PAGE, Access::RW)?;
        upload(&session.stream(), buffer.iova(), &mut Pattern::new(seed), PAGE, &mut |_| {})?;
        buffers.push(buffer);
    }
    let mut wrong = Vec::new();
    for (seed, (session, buffer)) in (21..).zip(sessions.iter().zip(&buffers)) {
        let mut compare = Compare::new(Pattern::new(seed));
        download(&session.stream(), buffer.iova(), &mut compare, PAGE, &mut |_| {})?;
        wrong.extend(compare.first_difference().map(|at| format!("byte {at} of buffer {seed}")));
    }
    let got = if wrong.is_empty() { "each its own bytes".to_owned() } else { format!("wrong: {}", wrong.join(", ")) };
    Ok(vec![Row::new(name, "each its own bytes", got)])
}

/// One process cannot make the device remember more than the tenant's limit, and what it gives back can be had again.
fn mapping_quota(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let limit = session.limits().max_mappings as usize;
    let mut held = Vec::new();
    let refusal = loop {
        match session.alloc(bench.gpu.number, PAGE, Access::READ) {
            Ok(buffer) if held.len() < limit => held.push(buffer),
            other => break status_of(other)?,
        }
    };
    if let Some(buffer) = held.pop() {
        buffer.free()?;
    }
    let again = status_of(session.alloc(bench.gpu.number, PAGE, Access::READ))?;
    let words = |refusal: &str, again: &str| format!("{refusal} at the limit of {limit}, {again} after a FREE");
    Ok(vec![Row::new(name, words(Status::Quota.name(), "OK"), words(refusal, again))])
}
