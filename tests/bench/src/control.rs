//! Requests on the control queue, many on their way at a time, as a driver that does not wait for each answer sends them.
//!
//! Not here: a driver that waits; that is one row of [`crate::device`].

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use harness::ram::Pages;
use harness::raw::PATIENCE;
use harness::rig::{EndpointKind, endpoint};
use harness::virtqueue::Buffer;
use harness::{RawGuest, Rig, RigOptions};
use vdev_wire::{Attach, CONTROL_QUEUE, ControlReply, MAP_READ, Map, MapSegment, Opcode, PAGE_SIZE, Status, Unmap};
use zerocopy::{FromBytes, IntoBytes};

use crate::Report;
use crate::cpu::device_time;

const NAME: &str = "map_unmap_batched";
/// Pairs on their way at a time.
const PAIRS: u64 = 64;
const DOMAIN: u32 = 1;
/// Where in its page a request's answer goes.
const ANSWER: u64 = 1024;

pub(crate) fn run(report: &mut Report) -> Result<()> {
    if !report.wants(&[NAME]) {
        return Ok(());
    }
    let rig =
        Rig::start(&RigOptions { endpoints: vec![endpoint(0, EndpointKind::Gpu, 1 << 20)], ..RigOptions::default() })?;
    let mut guest = RawGuest::connect(&rig.socket(), 256)?;
    guest.hello()?;
    guest.control(Opcode::Attach, DOMAIN, &Attach { endpoint: 0.into(), flags: 0.into() }, 0)?;
    let requests = requests(&guest)?;
    let queue = &mut guest.queues[usize::from(CONTROL_QUEUE)];
    queue.no_interrupt()?;
    report.rate(NAME, "pairs/s", device_time, || {
        for request in &requests {
            queue.add(&request.buffers)?.context("The control queue is full")?;
        }
        queue.publish()?;
        let deadline = Instant::now() + PATIENCE;
        while queue.outstanding() > 0 {
            while queue.pop()?.is_some() {}
            ensure!(Instant::now() < deadline, "The device answered too late");
        }
        Ok(PAIRS)
    })?;
    for request in &requests {
        let mut bytes = [0; size_of::<ControlReply>()];
        request.page.read(ANSWER, &mut bytes)?;
        let reply = ControlReply::read_from_bytes(&bytes).ok().context("An answer has a size")?;
        ensure!(reply.status == Status::Ok.to_raw(), "A request ended with {}", reply.status);
    }
    drop(guest);
    rig.finish()??;
    Ok(())
}

/// A request in guest memory, to be sent again and again.
struct Request {
    page: Pages,
    buffers: [Buffer; 2],
}

/// Every MAP, then every UNMAP, of one page each.
fn requests(guest: &RawGuest) -> Result<Vec<Request>> {
    let target = guest.ram.alloc(PAGE_SIZE)?.gpa();
    let iova = |n: u64| (n + 1) * PAGE_SIZE;
    let map = |n| {
        let head = Map { iova: iova(n).into(), flags: MAP_READ.into(), segment_count: 1.into() };
        let segment = MapSegment { gpa: target.into(), len: PAGE_SIZE.into() };
        request(guest, Opcode::Map, &[head.as_bytes(), segment.as_bytes()].concat())
    };
    let unmap = |n| {
        let body = Unmap { iova_start: iova(n).into(), iova_last: (iova(n) + PAGE_SIZE - 1).into() };
        request(guest, Opcode::Unmap, body.as_bytes())
    };
    (0..PAIRS).map(map).chain((0..PAIRS).map(unmap)).collect()
}

fn request(guest: &RawGuest, opcode: Opcode, body: &[u8]) -> Result<Request> {
    let bytes = harness::guest::request(opcode, DOMAIN, guest.session, body);
    let page = guest.ram.alloc(PAGE_SIZE)?;
    page.write(0, &bytes)?;
    let buffers = [
        Buffer::readable(page.gpa(), bytes.len().try_into()?),
        Buffer::writable(page.gpa() + ANSWER, size_of::<ControlReply>().try_into()?),
    ];
    Ok(Request { page, buffers })
}
