//! A queue that starts: what a process that died had in hand of it is answered, each chain exactly once.
//!
//! The used index of the ring says where chains go back to, the journal which ones are out; the available index is the sum. Work that has no
//! outcome yet completes LOST; records that were written stay, and requests are answered LOST. Both are decided before the queue's thread sees the
//! ring.
//!
//! Not here: what the marks mean (`journal`), where a driver of the old session learns that it is one (`control`, `submit`).

use std::sync::atomic::Ordering;
use std::time::Instant;

use vdev_wire::{COMPLETION_SIZE, CONTROL_QUEUE, ControlReply, EVENT_QUEUE, SUBMIT_HEADER_SIZE, Status, TransferPath};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestMemoryMmap;
use zerocopy::IntoBytes;

use crate::RequestError;
use crate::complete::{refusal, write_record};
use crate::device::Device;
use crate::journal::{Found, Journal, RingId};
use crate::observer::{Counter, Tally};
use crate::port::Port;
use crate::queue::{Popped, Records, Visit};
use crate::work::parse_work;

/// Bytes of a submission that are read for its cookies: the process before may have allowed larger ones than this one.
const LONGEST: usize = 64 << 10;

/// What came of a start.
#[derive(Default)]
struct Resumed {
    /// Chains given back.
    chains: usize,
    /// A driver may wait for an interrupt that died with the process.
    tell: bool,
    /// What is wrong with ring or journal.
    trouble: Option<&'static str>,
    tally: Tally,
}

impl Device {
    /// Takes over what the journal says about a ring that starts. The port is nobody else's yet.
    pub(crate) fn resume_queue(&self, port: &Port) {
        let Some(journal) = &port.journal else { return };
        let mut resumed = Resumed::default();
        port.access(|queue, mem| {
            self.take_over(port, journal, queue, mem, &mut resumed);
            // Not asked whether the driver wants to know: it may have been promised.
            let _ = queue.needs_notification(mem);
            false
        });
        if resumed.tell {
            port.interrupt();
        }
        resumed.tally.flush(&*self.observer);
        let Resumed { chains, trouble, .. } = resumed;
        let queue = port.index;
        if (chains == 0 && trouble.is_none()) || !self.limiter.allow(Instant::now()) {
            return;
        }
        if let Some(what) = trouble {
            tracing::warn!(queue, what, "The journal does not fit the ring; the queue goes on from its used index");
        } else {
            tracing::info!(queue, chains, "What the last process had in hand is answered as lost");
        }
    }

    fn take_over(&self, port: &Port, journal: &Journal, queue: &mut Queue, mem: &GuestMemoryMmap, into: &mut Resumed) {
        let ring = RingId::of(queue);
        let found = journal.find(ring);
        if found == Found::Nothing {
            return journal.begin(ring);
        }
        into.tell = found != Found::Stopped;
        let visit = Visit::new(queue, mem);
        let Some((used, available)) = queue.used_idx(mem, Ordering::Acquire).ok().zip(visit.available()) else {
            into.trouble = Some("the ring is not in guest memory");
            return port.stop_taking();
        };
        let heads = if found == Found::Other { Vec::new() } else { journal.in_hand(queue.size(), used.0) };
        // At most as many as the ring has heads.
        let count = u16::try_from(heads.len()).unwrap_or(u16::MAX);
        if found == Found::Other {
            into.trouble = Some("it is about another ring");
        } else if available.wrapping_sub(used.0) < count {
            into.trouble = Some("it has more chains in hand than the driver has made available");
        }
        queue.set_next_used(used.0);
        if into.trouble.is_some() {
            queue.set_next_avail(used.0);
            return journal.begin(ring);
        }
        queue.set_next_avail(used.0.wrapping_add(count));
        journal.go_on();
        let mut bytes = Vec::new();
        for head in heads {
            port.adopt();
            let len = self.answer_lost(port.index, mem, &visit.walk(head), &mut bytes, &mut into.tally);
            port.give_back(queue, mem, head, len);
            into.chains = into.chains.saturating_add(1);
        }
    }

    /// Answers a chain that an earlier process had in hand. Gives the bytes written.
    fn answer_lost(
        &self,
        queue: u16,
        mem: &GuestMemoryMmap,
        popped: &Popped,
        bytes: &mut Vec<u8>,
        tally: &mut Tally,
    ) -> usize {
        match queue {
            CONTROL_QUEUE => answer_request(mem, popped, tally),
            // An event that it was to carry is gone with its session.
            EVENT_QUEUE => 0,
            _ => self.answer_work(mem, popped, bytes, tally),
        }
    }

    /// LOST for each record without a final status: the driver must have written PENDING, and may find part of a status over it.
    fn answer_work(&self, mem: &GuestMemoryMmap, popped: &Popped, bytes: &mut Vec<u8>, tally: &mut Tally) -> usize {
        let count = match self.read_chain(mem, popped, bytes, self.max_submission.max(LONGEST)) {
            Ok((_, descriptors)) => u16::try_from(descriptors.len()).unwrap_or(u16::MAX),
            Err(bad) => bad.records,
        };
        let records = Records::new(mem, &popped.writable);
        let (descriptors, _) = bytes.get(SUBMIT_HEADER_SIZE..).unwrap_or_default().as_chunks();
        let mut cookies = descriptors.iter().map(|descriptor| parse_work(descriptor).0.cookie);
        for index in 0..count {
            let cookie = cookies.next().unwrap_or(0);
            let offset = usize::from(index).saturating_mul(COMPLETION_SIZE);
            let status = records.status::<COMPLETION_SIZE>(offset);
            if status.is_some_and(|status| Status::from_raw(status).is_none()) {
                write_record(&records, index, &refusal(cookie, &RequestError::Lost));
                tally.ended(Status::Lost, TransferPath::None, 0);
            }
        }
        usize::from(count).saturating_mul(COMPLETION_SIZE)
    }
}

fn answer_request(mem: &GuestMemoryMmap, popped: &Popped, tally: &mut Tally) -> usize {
    let reply = ControlReply { status: Status::Lost.to_raw().into(), length: 0.into(), detail: 0.into() };
    if popped.writable.len() < size_of::<ControlReply>() {
        return 0;
    }
    popped.writable.write(mem, 0, reply.as_bytes());
    tally.add(Counter::ControlRequests, 1);
    tally.add(Counter::ControlErrors, 1);
    size_of::<ControlReply>()
}
