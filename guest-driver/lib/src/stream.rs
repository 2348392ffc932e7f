//! An ordered sequence of transfers.
//!
//! Work of one stream runs in the order it was submitted; work of different streams does not wait for each other. The first error stops a
//! stream: what follows ends as CANCELLED until [`Stream::reset`].
//!
//! Not here: how the device schedules streams.

use peergate_uapi::{
    CANCEL_ALL, INITIATOR_ANY, STREAM_CANCEL, STREAM_RESET, WORK_ATOMIC, WORK_ATOMIC_ADD, WORK_ATOMIC_COMPARE_SWAP,
    WORK_ATOMIC_SWAP, WORK_COPY, WORK_FENCE, WORK_FILL, Work,
};

use crate::{Error, Session, Ticket};

/// What a fence orders earlier work before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Observers on the initiator itself.
    Device,
    /// Its peers too.
    Peer,
    /// Every observer.
    System,
}

/// What an atomic operation does to a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    /// Adds to it; what does not fit is dropped.
    Add(u64),
    /// Puts another one in its place.
    Swap(u64),
    /// The same, if it is what is expected.
    CompareSwap {
        /// What has to be there.
        expected: u64,
        /// What is put there.
        new: u64,
    },
}

/// The word of an atomic operation. Of numbers that are too long for it, the lower half counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 4 bytes, at an address that is a multiple of 4.
    Four,
    /// 8 bytes, at an address that is a multiple of 8.
    Eight,
}

/// What a cancellation found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cancelled {
    /// Work that ends as CANCELLED.
    pub cancelled: u32,
    /// Work that was running and ends as it does.
    pub running: u32,
}

/// One stream of a session. Addresses are what [`crate::Buffer::at`] and [`crate::HostBuffer::at`] answer; the device checks every one.
pub struct Stream {
    session: Session,
    number: u32,
    initiator: u32,
}

impl Stream {
    pub(crate) fn new(session: Session, number: u32) -> Self {
        Self { session, number, initiator: INITIATOR_ANY }
    }

    /// The same stream with `endpoint` as the one that acts; without it the device chooses.
    #[must_use]
    pub fn by(mut self, endpoint: u32) -> Self {
        self.initiator = endpoint;
        self
    }

    /// Its number, as fault events name it.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The session it belongs to.
    pub fn session(&self) -> &Session {
        &self.session
    }

    fn work(&self, opcode: u16) -> Work {
        Work { opcode, stream: self.number, initiator: self.initiator, ..Work::default() }
    }

    /// A copy of `len` bytes, for [`Session::submit_all`].
    pub fn copy_work(&self, destination: u64, source: u64, len: u64) -> Work {
        Work { source, destination, length: len, ..self.work(WORK_COPY) }
    }

    /// A fill of `len` bytes with an 8-byte pattern, lowest byte first, for [`Session::submit_all`].
    pub fn fill_work(&self, destination: u64, pattern: u64, len: u64) -> Work {
        Work { destination, length: len, operand: pattern, ..self.work(WORK_FILL) }
    }

    /// An atomic operation, for [`Session::submit_all`].
    pub fn atomic_work(&self, address: u64, width: Width, op: AtomicOp) -> Work {
        let (flags, source, operand) = match op {
            AtomicOp::Add(operand) => (WORK_ATOMIC_ADD, 0, operand),
            AtomicOp::Swap(operand) => (WORK_ATOMIC_SWAP, 0, operand),
            AtomicOp::CompareSwap { expected, new } => (WORK_ATOMIC_COMPARE_SWAP, expected, new),
        };
        let length = match width {
            Width::Four => 4,
            Width::Eight => 8,
        };
        Work { flags, source, destination: address, length, operand, ..self.work(WORK_ATOMIC) }
    }

    /// Changes the word at `address`, which nothing else reads or writes in between: no other atomic operation of the device, nor one of whoever owns the
    /// memory, a GPU's program or the guest's processors. [`crate::Outcome::value`] is what was there. Does not wait for the end.
    ///
    /// # Errors
    /// As [`Session::submit`]. The work ends UNSUPP where the memory's owner has no atomic operations.
    pub fn atomic(&self, address: u64, width: Width, op: AtomicOp) -> Result<Ticket, Error> {
        self.session.submit(self.atomic_work(address, width, op))
    }

    /// Copies `len` bytes from `source` to `destination`. Does not wait for the end.
    ///
    /// # Errors
    /// As [`Session::submit`].
    pub fn copy(&self, destination: u64, source: u64, len: u64) -> Result<Ticket, Error> {
        self.session.submit(self.copy_work(destination, source, len))
    }

    /// Fills `len` bytes at `destination` with an 8-byte pattern, lowest byte first. Does not wait for the end.
    ///
    /// # Errors
    /// As [`Session::submit`].
    pub fn fill(&self, destination: u64, pattern: u64, len: u64) -> Result<Ticket, Error> {
        self.session.submit(self.fill_work(destination, pattern, len))
    }

    /// Completes once all earlier work of the stream has, and observers of `scope` see it.
    ///
    /// # Errors
    /// As [`Session::submit`].
    pub fn fence(&self, scope: Scope) -> Result<Ticket, Error> {
        let operand = match scope {
            Scope::Device => vdev_wire::FENCE_DEVICE,
            Scope::Peer => vdev_wire::FENCE_PEER,
            Scope::System => vdev_wire::FENCE_SYSTEM,
        };
        self.session.submit(Work { operand, ..self.work(WORK_FENCE) })
    }

    /// Clears the stream's error: work submitted from now on runs again.
    ///
    /// # Errors
    /// [`Error::Refused`] with NOENT if the device does not know the stream (it never had work, or is idle without an error).
    pub fn reset(&self) -> Result<(), Error> {
        self.request(STREAM_RESET, 0, 0).map(|_| ())
    }

    /// Cancels everything of the stream that has not started.
    ///
    /// # Errors
    /// As [`Self::reset`].
    pub fn cancel_all(&self) -> Result<Cancelled, Error> {
        self.request(STREAM_CANCEL, CANCEL_ALL, 0)
    }

    /// Cancels one piece of work if it has not started.
    ///
    /// # Errors
    /// As [`Self::reset`].
    pub fn cancel(&self, ticket: &Ticket) -> Result<Cancelled, Error> {
        self.request(STREAM_CANCEL, 0, ticket.cookie())
    }

    fn request(&self, op: u32, flags: u32, cookie: u64) -> Result<Cancelled, Error> {
        let request = peergate_uapi::Stream { op, stream: self.number, flags, cookie, ..Default::default() };
        let answer = self.session.channel().stream(request)?;
        Ok(Cancelled { cancelled: answer.cancelled, running: answer.running })
    }
}
