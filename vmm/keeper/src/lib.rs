//! What stands between a VMM and the workers that come and go: frames of the vhost-user protocol pass through, and what they set is
//! remembered, so that a worker that takes another's place learns all of it and the VMM notices nothing.
//!
//! [`Keeper`] is one thread's work: a listening socket, one VMM at a time, one worker at a time. Inside:
//! - `frame` is the shape of a frame, and which requests are answered;
//! - `record` is what a worker has been told, frame by frame, and how to tell it to the next;
//! - `session` is one VMM's connection: what was forwarded, what is not answered yet, where a replay stands. It knows no socket;
//! - `stream` moves whole frames through sockets that never block;
//! - `kick` wakes a queue, without ever waiting for whoever made the descriptor.
//!
//! Neither side is trusted. A VMM that breaks the protocol loses its connection; a worker that answers what nobody asked loses its own, and
//! the next one takes over. Every buffer has a bound: a side whose peer is behind is not read. At most [`MAX_DESCRIPTORS`] are held.
//!
//! A frame that asks no answer and sets nothing that is remembered is sent once: it is lost with a worker that ends before it has read it.
//!
//! Not here: what a feature, a queue or a request means; guest memory; who starts workers, and how the supervisor is told.
#![forbid(unsafe_code)]

mod frame;
mod keeper;
mod kick;
mod record;
mod session;
mod stream;

use frame::MAX_FDS;
pub use keeper::{Event, Keeper, Turn};
pub use session::MAX_FAILURES;

/// Most descriptors that a [`Keeper`] holds: what is remembered (a memory table, three for each of 256 rings, the way back), frames that are under way, the
/// frame that is being received, and three sockets. It follows from what is enforced frame by frame.
pub const MAX_DESCRIPTORS: usize = (MAX_FDS + 3 * 256 + 1) + (session::MAX_FRAME_FDS + MAX_FDS) + MAX_FDS + 3;

#[cfg(test)]
mod tests;
