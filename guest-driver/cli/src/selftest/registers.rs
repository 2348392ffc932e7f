//! What an FPGA's registers and its kernel must refuse.
//!
//! Not here: the kernel doing its work; the main job has that.

use anyhow::Result;
use peergate_guest::{Access, FaultReason, Notice, Status};

use super::witness::{Refusal, refused};
use super::{Bench, Case, Row};
use crate::fpga::{Cipher, Ended, Fpga};

const PAGE: u64 = 4096;

pub(super) const CASES: &[(&str, Case)] = &[
    ("register-wrong-size", register_wrong_size),
    ("register-misaligned", register_misaligned),
    ("kernel-unmapped", kernel_unmapped),
    ("kernel-without-right", kernel_without_right),
];

/// A load of `len` bytes at `offset` of the register page, which must be refused.
fn bad_load(bench: &Bench<'_>, name: &str, offset: u64, len: u64) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let fpga = bench.fpga.number;
    let logic = Fpga::open(&session, &bench.fpga)?;
    let memory = session.alloc(fpga, PAGE, Access::RW)?;
    let address = logic.iova() + offset;
    let expected =
        Refusal { status: Status::Fault, reason: FaultReason::Access, address, access: Access::READ, accessor: fpga };
    let work = session.stream().by(fpga).copy_work(memory.iova(), address, len);
    Ok(vec![refused(name, &session, work, &expected)?])
}

fn register_wrong_size(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    bad_load(bench, name, 0, 16)
}

fn register_misaligned(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    bad_load(bench, name, 4, 8)
}

/// How a kernel that was refused something must end.
fn kernel_words(status: Status, reason: FaultReason, address: u64, access: Access) -> String {
    let access = crate::commands::access_text(access);
    format!("STATUS error, RESULT {}; event: {} {access} at {address:#x}", status.name(), reason.name())
}

fn ended_words(ended: &Ended) -> String {
    let status = if ended.status == 3 { "error".to_owned() } else { ended.status.to_string() };
    let result = u32::try_from(ended.result).ok().and_then(Status::from_raw);
    let result = result.map_or_else(|| ended.result.to_string(), |status| status.name().to_owned());
    let event = |fault: &Notice| {
        let reason = fault.reason.map_or("?", FaultReason::name);
        format!("{reason} {} at {:#x}", crate::commands::access_text(fault.access), fault.address)
    };
    let event = ended.faults.first().map_or_else(|| "none".to_owned(), event);
    format!("STATUS {status}, RESULT {result}; event: {event}")
}

/// The kernel reads an address that nobody mapped.
fn kernel_unmapped(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let logic = Fpga::open(&session, &bench.fpga)?;
    let memory = session.alloc(bench.fpga.number, PAGE, Access::RW)?;
    // Nothing this session maps is as long as this.
    let hole = memory.iova().max(logic.iova()) + (1 << 30);
    logic.start(hole, memory.iova(), PAGE, &Cipher::EXAMPLE)?;
    let ended = logic.wait(&mut || {})?;
    let expected = kernel_words(Status::Fault, FaultReason::Mapping, hole, Access::READ);
    Ok(vec![Row::new(name, expected, ended_words(&ended))])
}

/// The kernel writes to the GPU without the FPGA having the right to.
fn kernel_without_right(bench: &Bench<'_>, name: &str) -> Result<Vec<Row>> {
    let session = bench.session()?;
    let logic = Fpga::open(&session, &bench.fpga)?;
    let memory = session.alloc(bench.fpga.number, PAGE, Access::RW)?;
    let foreign = session.alloc(bench.gpu.number, PAGE, Access::RW)?;
    logic.start(memory.iova(), foreign.iova(), PAGE, &Cipher::EXAMPLE)?;
    let ended = logic.wait(&mut || {})?;
    let expected = kernel_words(Status::Denied, FaultReason::Peer, foreign.iova(), Access::WRITE);
    Ok(vec![Row::new(name, expected, ended_words(&ended))])
}
