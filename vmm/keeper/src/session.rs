//! One VMM's connection, without its sockets: frames in, frames out.
//!
//! A frame from the VMM goes to the worker at once. If neither it nor any before it waits for an answer, it is part of the record from then
//! on; otherwise it stays **open** until those answers have come, and so do all that follow it. When a worker ends, the next one is told the
//! record, which is swallowed whatever it answers, and then is sent the open frames once more, just as they came. So it sees each frame
//! exactly where the VMM put it, and the VMM sees each answer once: an answer reaches it whole or not at all.
//!
//! A request that was refused has changed nothing, and is not recorded.
//!
//! Not here: sockets; what is recorded, and how.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use crate::frame::{Frame, FrameError};
use crate::record::{Acks, Record, check};
use crate::stream::Outbox;

/// So many workers in a row may fail before the VMM is given up.
pub const MAX_FAILURES: u32 = 5;

/// Frames that are open, or not yet sent, before the VMM is not read any more.
const MAX_FRAMES: usize = 64;
/// Their descriptors, likewise. One more frame may come.
pub(crate) const MAX_FRAME_FDS: usize = 96;
/// Bytes that the VMM has not read, likewise. The answers to open frames may come.
const MAX_UNREAD: usize = 64 << 10;

#[derive(Debug)]
struct Open {
    frame: Frame,
    answered: bool,
}

#[derive(Debug)]
enum Phase {
    /// There is no worker.
    Waiting,
    /// A worker is told the record; these are answered.
    Replaying(VecDeque<Frame>),
    /// It was sent the open frames again.
    Resending,
    /// Frames pass.
    Live,
}

#[derive(Debug)]
pub(crate) struct Session {
    record: Record,
    /// The oldest one waits for its answer.
    open: VecDeque<Open>,
    /// As of the last frame that was forwarded.
    acks: Acks,
    phase: Phase,
    failures: u32,
    pub(crate) to_worker: Outbox,
    pub(crate) to_vmm: Outbox,
}

impl Session {
    /// A VMM that has said nothing, with a worker that has heard nothing.
    pub(crate) fn new() -> Self {
        Self {
            record: Record::default(),
            open: VecDeque::new(),
            acks: Acks::default(),
            phase: Phase::Live,
            failures: 0,
            to_worker: Outbox::default(),
            to_vmm: Outbox::default(),
        }
    }

    /// Whether there is room for one more frame of the VMM.
    pub(crate) fn wants_request(&self) -> bool {
        let fds: usize = self.open.iter().map(|open| open.frame.fds().len()).sum();
        matches!(self.phase, Phase::Live)
            && self.open.len() < MAX_FRAMES
            && self.to_worker.frames() < MAX_FRAMES
            && fds.saturating_add(self.to_worker.fds()) <= MAX_FRAME_FDS
            && self.to_vmm.bytes() <= MAX_UNREAD
    }

    /// Forwards a frame of the VMM.
    pub(crate) fn request(&mut self, frame: Frame) -> Result<(), FrameError> {
        check(&frame)?;
        self.to_worker.push(frame.clone());
        self.acks.see(&frame);
        let answered = frame.is_answered(self.acks.on());
        if self.open.is_empty() && !answered {
            self.record.apply(frame, None);
        } else {
            self.open.push_back(Open { frame, answered });
        }
        Ok(())
    }

    /// Takes a frame of the worker. True if this worker now knows all that an earlier one did, and has answered what that one still owed.
    pub(crate) fn answer(&mut self, answer: Frame) -> Result<bool, FrameError> {
        if let Phase::Replaying(due) = &mut self.phase {
            let Some(request) = due.pop_front() else {
                return Err(FrameError::Unexpected { request: answer.code() });
            };
            answer.check_answer_to(&request)?;
            if answer.is_refusal_of(&request) {
                return Err(FrameError::Refused { request: request.code() });
            }
            if due.is_empty() {
                self.resend();
            }
        } else {
            self.settle(answer)?;
        }
        let replayed = matches!(self.phase, Phase::Resending) && self.open.is_empty();
        if replayed {
            self.phase = Phase::Live;
            self.failures = 0;
        }
        Ok(replayed)
    }

    /// The worker has heard the record: now what is open.
    fn resend(&mut self) {
        for open in &self.open {
            self.to_worker.push(open.frame.clone());
        }
        self.phase = Phase::Resending;
    }

    /// An answer to the oldest open frame: it and those behind it, up to the next that waits, are part of the record.
    fn settle(&mut self, answer: Frame) -> Result<(), FrameError> {
        let Some(oldest) = self.open.front() else {
            return Err(FrameError::Unexpected { request: answer.code() });
        };
        answer.check_answer_to(&oldest.frame)?;
        if let Some(Open { frame, .. }) = self.open.pop_front()
            && !answer.is_refusal_of(&frame)
        {
            self.record.apply(frame, Some(&answer));
        }
        while let Some(Open { frame, .. }) = self.open.pop_front_if(|open| !open.answered) {
            self.record.apply(frame, None);
        }
        self.to_vmm.push(answer);
        Ok(())
    }

    /// A worker takes over.
    pub(crate) fn attach(&mut self) {
        let acks = self.record.acks().on();
        let replay = self.record.replay();
        let due = replay.iter().filter(|frame| frame.is_answered(acks)).cloned().collect();
        replay.into_iter().for_each(|frame| self.to_worker.push(frame));
        self.phase = Phase::Replaying(due);
    }

    /// The worker has gone. True if that happened too often for another one to be tried.
    #[must_use]
    pub(crate) fn detach(&mut self) -> bool {
        if matches!(self.phase, Phase::Replaying(_) | Phase::Resending) {
            self.failures = self.failures.saturating_add(1);
        }
        self.phase = Phase::Waiting;
        self.to_worker = Outbox::default();
        self.failures >= MAX_FAILURES
    }

    /// See [`Record::kicks`].
    pub(crate) fn kicks(&self) -> impl Iterator<Item = &OwnedFd> {
        self.record.kicks()
    }

    /// See [`Record::way_back`].
    pub(crate) fn way_back(&self) -> Option<&OwnedFd> {
        self.record.way_back()
    }
}
