//! What the event loop waits for.
//!
//! A descriptor is always taken from the loop before it is closed: other processes hold copies of some, and the loop would go on hearing of a closed one.
//!
//! Not here: what is done about it.

use std::os::fd::{AsRawFd, BorrowedFd};

use event_manager::{EventOps, EventSet, Events};

use super::child::Child;

pub(super) fn listen_to(ops: &mut EventOps<'_>, child: &Child, says: u32, ends: u32) {
    add(ops, child.pidfd(), ends);
    if let Some(channel) = child.channel() {
        add(ops, channel, says);
    }
}

pub(super) fn listen_no_more(ops: &mut EventOps<'_>, child: &Child) {
    forget(ops, child.pidfd());
    if let Some(channel) = child.channel() {
        forget(ops, channel);
    }
}

pub(super) fn add(ops: &mut EventOps<'_>, fd: BorrowedFd<'_>, data: u32) {
    if let Err(error) = ops.add(Events::with_data_raw(fd.as_raw_fd(), data, EventSet::IN)) {
        tracing::error!(%error, data, "Cannot wait for a descriptor");
    }
}

pub(super) fn forget(ops: &mut EventOps<'_>, fd: BorrowedFd<'_>) {
    if let Err(error) = ops.remove(Events::empty_raw(fd.as_raw_fd())) {
        tracing::error!(%error, "Cannot forget a descriptor");
    }
}
