//! A guest without manners: queues that one thread drives by hand, below any driver.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use vdev_wire::{
    COMPLETION_SIZE, CONTROL_QUEUE, Completion, FIRST_SUBMIT_QUEUE, Hello, HelloReply, INITIATOR_ANY, Opcode, Status,
    VERSION, WorkDescriptor, WorkOpcode,
};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::frontend::{EVENT_IDX, FrontEnd, INDIRECT_DESC, VERSION_1, make_queues};
use crate::guest::{Reply, exchange, request};
use crate::ram::{GuestRam, Pages};
use crate::virtqueue::{Buffer, Used, Virtqueue};

/// How long the device may take for anything.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Connection, memory and queues, all of them to be abused.
#[derive(Debug)]
pub struct RawGuest {
    /// The guest's memory.
    pub ram: Arc<GuestRam>,
    /// Its queues, by number.
    pub queues: Vec<Virtqueue>,
    /// The VMM's side.
    pub front: FrontEnd,
    /// The session of the last HELLO.
    pub session: u32,
}

impl RawGuest {
    /// Connects and starts every queue of `size` entries; says nothing to the device.
    pub fn connect(socket: &Path, size: u16) -> Result<Self> {
        Self::connect_with(socket, size, VERSION_1 | EVENT_IDX | INDIRECT_DESC)
    }

    /// The same with a choice of features. Chains are laid out in the descriptor table or, with INDIRECT_DESC, outside.
    pub fn connect_with(socket: &Path, size: u16, features: u64) -> Result<Self> {
        Self::connect_on(socket, GuestRam::new(16 << 20)?, size, features)
    }

    /// The same on memory of the caller's.
    pub fn connect_on(socket: &Path, ram: Arc<GuestRam>, size: u16, features: u64) -> Result<Self> {
        let mut front = FrontEnd::connect(socket)?;
        front.negotiate(features)?;
        let queues = make_queues(&front, &ram, size)?;
        front.start(&ram, &queues.iter().collect::<Vec<_>>())?;
        Ok(Self { ram, queues, front, session: 0 })
    }

    /// HELLO.
    pub fn hello(&mut self) -> Result<()> {
        let body = Hello { version: VERSION.into(), reserved0: 0.into(), reserved: 0.into(), features: 0.into() };
        let reply = self.control(Opcode::Hello, 0, &body, size_of::<HelloReply>())?;
        ensure!(reply.status == Status::Ok, "HELLO was refused: {}", reply.status.name());
        self.session = reply.parse::<HelloReply>()?.session.get();
        Ok(())
    }

    /// One control request.
    pub fn control(
        &mut self,
        opcode: Opcode,
        domain: u32,
        body: &(impl IntoBytes + Immutable + ?Sized),
        room: usize,
    ) -> Result<Reply> {
        let bytes = request(opcode, domain, self.session, body);
        exchange(&self.ram, &mut self.queues[usize::from(CONTROL_QUEUE)], &bytes, room)
    }

    /// The first submission queue.
    pub fn submit_queue(&mut self) -> &mut Virtqueue {
        &mut self.queues[usize::from(FIRST_SUBMIT_QUEUE)]
    }

    /// The next used chain of a queue, which must come.
    pub fn next_used(&mut self, queue: u16) -> Result<Used> {
        let used = self.queues[usize::from(queue)].wait(Instant::now() + PATIENCE)?;
        used.with_context(|| format!("The device used no chain of queue {queue}"))
    }

    /// Submits one descriptor behind any header, laid out in `page`, and answers the status of its completion record.
    pub fn submit_one(&mut self, page: &Pages, header: &[u8], work: &WorkDescriptor) -> Result<Status> {
        let readable = [header, work.as_bytes()].concat();
        let record = page.gpa() + 2048;
        page.write(0, &readable)?;
        page.write(2048, &[0xff; COMPLETION_SIZE])?;
        let buffers = [
            Buffer::readable(page.gpa(), readable.len().try_into()?),
            Buffer::writable(record, COMPLETION_SIZE.try_into()?),
        ];
        let queue = self.submit_queue();
        queue.add(&buffers)?.context("The submission queue is full")?;
        queue.publish()?;
        let used = self.next_used(FIRST_SUBMIT_QUEUE)?;
        ensure!(used.len as usize == COMPLETION_SIZE, "The device wrote {} bytes", used.len);
        let mut bytes = [0; COMPLETION_SIZE];
        page.read(2048, &mut bytes)?;
        let record = Completion::read_from_bytes(&bytes).ok().context("A record has a size")?;
        ensure!(record.cookie == work.cookie, "The record is another descriptor's");
        Status::from_raw(record.status.get()).context("The record has an unknown status")
    }

    /// Stops one queue and starts it where it stopped.
    pub fn restart(&mut self, queue: u16) -> Result<()> {
        let index = usize::from(queue);
        let base = self.front.stop_queue(index)?;
        self.front.start_queue(&self.ram, index, &self.queues[index], base)?;
        self.front.enable(index, true)
    }
}

/// A copy on stream 0, by whom the device chooses.
pub fn copy_work(cookie: u64, source: u64, destination: u64, length: u64) -> WorkDescriptor {
    WorkDescriptor {
        opcode: (WorkOpcode::Copy as u16).into(),
        initiator: INITIATOR_ANY.into(),
        cookie: cookie.into(),
        source: source.into(),
        destination: destination.into(),
        length: length.into(),
        ..WorkDescriptor::new_zeroed()
    }
}
