//! The seam under every guest program: how to reach a device, call by call.
//!
//! A [`Driver`] opens [`Channel`]s; one channel is one open of the device: one I/O address space (domain) that ends when it is dropped. The
//! methods of a channel are the calls of the user interface with its own structures ([`peergate_uapi`]), less what belongs to a kernel:
//! there are no file descriptors, no pointers, and no `size` fields to fill (implementations ignore and set them). [`crate::KernelDriver`]
//! is the real thing; tests put a device in the same process behind the same traits.
//!
//! Not here: waiting for a particular transfer, owning buffers, typed errors of transfers. [`crate::Session`] does that, on this.

use std::time::Instant;

use peergate_uapi::{Alloc, Completion, Endpoint, Event, Info, Peer, Stream, Work};

use crate::Error;

/// Opens channels to one device.
pub trait Driver: Send + Sync {
    /// Opens one more channel, with nothing mapped. Blocks while the device creates the domain.
    ///
    /// # Errors
    /// [`Error::Refused`] with QUOTA if no more domains are to be had; [`Error::System`] if the device cannot be reached.
    fn open(&self) -> Result<Box<dyn Channel>, Error>;
}

/// One I/O address space of a device. Dropping it gives up everything in it; memory that was mapped stays readable until it is dropped too.
///
/// Every method may be called from several threads at once. A refusal is [`Error::Refused`] with the status that the device answers, or that
/// stands for the errno of the kernel driver (`peergate.h` lists them); whatever is not a refusal is [`Error::System`] or [`Error::Gone`].
pub trait Channel: Send + Sync {
    /// What the device offers, and the numbers of this channel.
    fn info(&self) -> Result<Info, Error>;

    /// Endpoint number `index`, from 0 to `Info::endpoints` - 1. `memory_free` is of now.
    fn endpoint(&self, index: u32) -> Result<Endpoint, Error>;

    /// Maps `len` bytes of fresh, zeroed host memory for the endpoints; the implementation chooses the address. `len` is a multiple of the
    /// page size, not 0; `flags` is [`peergate_uapi::READ`] and [`peergate_uapi::WRITE`]: what endpoints may do.
    fn map(&self, len: u64, flags: u32) -> Result<Box<dyn HostMemory>, Error>;

    /// Takes the mapping of `len` bytes at `iova` away. Blocks until no transfer uses it. The memory itself lives as long as its
    /// [`HostMemory`].
    fn unmap(&self, iova: u64, len: u64) -> Result<(), Error>;

    /// Allocates and maps endpoint memory, or the register page. Reads `endpoint`, `flags`, `length`; answers `handle`, `iova` and the
    /// `length` really allocated.
    fn alloc(&self, request: Alloc) -> Result<Alloc, Error>;

    /// Unmaps and frees a buffer. Blocks until no transfer uses it.
    fn free(&self, handle: u64) -> Result<(), Error>;

    /// Changes or asks for a peer right. Reads `op`, `accessor`, `owner`, `rights`; answers `rights` in force, `path` and `reason`.
    /// Withdrawing blocks until no transfer relies on the right.
    fn peer(&self, request: Peer) -> Result<Peer, Error>;

    /// Gives `work` to submission queue `queue` in order and does not wait. Answers how many were taken, at least one: each of those
    /// completes. None taken for want of room is [`Error::Refused`] with BUSY: take completions, then try again.
    fn submit(&self, queue: u32, work: &[Work]) -> Result<usize, Error>;

    /// Takes completions into the front of `into`, oldest first, and answers how many. Blocks until `at_least` of them are there, or
    /// `deadline` has passed: then fewer, or none. `at_least` above `into.len()` means `into.len()`; 0 never blocks.
    fn completions(&self, into: &mut [Completion], at_least: usize, deadline: Instant) -> Result<usize, Error>;

    /// Resets a stream or cancels work. Reads `op`, `stream`, `flags`, `cookie`; answers `cancelled` and `running`.
    fn stream(&self, request: Stream) -> Result<Stream, Error>;

    /// The next event of this channel. Blocks until there is one or `deadline` has passed, which is `None`; a deadline in the past only
    /// looks.
    fn event(&self, deadline: Instant) -> Result<Option<Event>, Error>;
}

/// Host memory that endpoints see. They may change it at any time, so bytes are only ever copied in and out, never borrowed.
///
/// Dropping it releases the memory once it is unmapped or its channel is gone; it does not unmap.
#[allow(clippy::len_without_is_empty, reason = "a mapping is never empty")]
pub trait HostMemory: Send + Sync {
    /// Where endpoints see the first byte.
    fn iova(&self) -> u64;

    /// Length in bytes: what MAP was asked for.
    fn len(&self) -> u64;

    /// Copies `into.len()` bytes out, from `offset` on.
    ///
    /// # Errors
    /// [`Error::Bounds`] if they do not all lie in the memory; nothing is copied.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), Error>;

    /// Copies `from` in, from `offset` on.
    ///
    /// # Errors
    /// [`Error::Bounds`] if they do not all lie in the memory; nothing is copied.
    fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), Error>;
}
