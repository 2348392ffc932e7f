//! Wakes a queue as its driver would: by adding one to an event counter.
//!
//! The VMM chose the descriptor, and shares it: a write could wait for whoever is to empty it, and no flag that is set here would stay. So
//! only event counters are written, which the worker's side uses alone too, and only while they have room. A VMM that fills its counter in the
//! moment between has its own keeper wait, which can be killed, and holds up nobody else.
//!
//! Not here: which queues to wake.

use std::io::IoSliceMut;
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ReadWriteFlags, preadv2, write};

/// Adds one to an event counter; does nothing to a full one, which is about to wake its reader anyway, or to any other descriptor.
pub(crate) fn wake(kick: BorrowedFd<'_>) {
    // Asks what it is without waiting or consuming a count: only event counters refuse to be read by the byte as too short.
    if preadv2(kick, &mut [IoSliceMut::new(&mut [0; 1])], u64::MAX, ReadWriteFlags::NOWAIT) != Err(Errno::INVAL) {
        return;
    }
    let mut room = [PollFd::new(&kick, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if poll(&mut room, Some(&now)).is_ok() && room[0].revents().contains(PollFlags::OUT) {
        // Whatever it answers, there is nothing else to be done.
        let _ = write(kick, &1_u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::read;
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    #[test]
    fn an_event_counter_is_counted_up_in_either_mode() {
        for flags in [EventfdFlags::CLOEXEC, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK] {
            let counter = eventfd(2, flags).unwrap();
            wake(counter.as_fd());
            let mut count = [0; 8];
            assert_eq!(read(&counter, &mut count), Ok(8));
            assert_eq!(u64::from_ne_bytes(count), 3);
        }
    }

    #[test]
    fn a_full_counter_is_left_alone() {
        let counter = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        write(&counter, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        wake(counter.as_fd());
        let mut count = [0; 8];
        assert_eq!(read(&counter, &mut count), Ok(8));
        assert_eq!(u64::from_ne_bytes(count), u64::MAX - 1);
    }

    #[test]
    fn nothing_is_written_to_what_is_no_counter() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        wake(writer.as_fd());
        wake(reader.as_fd());
        assert_eq!(read(&reader, &mut [0; 8]), Err(Errno::AGAIN));
        let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        other.set_nonblocking(true).unwrap();
        wake(one.as_fd());
        assert_eq!(read(&other, &mut [0; 8]), Err(Errno::AGAIN));
    }
}
