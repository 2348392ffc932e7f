//! VMMs that break the rules of vhost-user: each loses its connection at worst, and the next one finds the tenant as new.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use anyhow::Result;
use e2e::bed::{ABUSED, BESIDE, Bed};
use harness::frontend::{EVENT_IDX, INDIRECT_DESC, VERSION_1, make_queues};
use harness::ram::{PAGE, memory_file};
use harness::raw::PATIENCE;
use harness::{FrontEnd, GuestRam, RawGuest};
use rustix::fs::SealFlags;
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VringConfigData};

const FEATURES: u64 = VERSION_1 | EVENT_IDX | INDIRECT_DESC;
const RAM: u64 = 4 << 20;

fn negotiated(bed: &Bed) -> Result<FrontEnd> {
    let mut front = FrontEnd::connect(&bed.daemon.socket(ABUSED))?;
    front.negotiate(FEATURES)?;
    front.vhost.set_features(FEATURES | 1 << 30)?;
    Ok(front)
}

/// Connects, negotiates, starts every queue and stops them again, as far as the budget goes. Answers what is left of it.
fn converse(bed: &Bed, budget: usize) -> Result<usize> {
    let ram = GuestRam::new(RAM)?;
    let mut front = FrontEnd::connect(&bed.daemon.socket(ABUSED))?.with_budget(budget);
    let whole = (|| -> Result<()> {
        front.negotiate(FEATURES)?;
        front.config(0, 64)?;
        let queues = make_queues(&front, &ram, 64)?;
        front.start(&ram, &queues.iter().collect::<Vec<_>>())?;
        for index in 0..queues.len() {
            front.stop_queue(index)?;
        }
        Ok(())
    })();
    let left = front.budget();
    if left > 0 { whole.map(|()| left) } else { Ok(0) }
}

#[test]
fn connection_may_end_after_any_message() -> Result<()> {
    let mut bed = Bed::new()?;
    let messages = usize::MAX - converse(&bed, usize::MAX)?;
    assert!(messages > 30, "{messages} messages are no conversation");
    for budget in 0..messages {
        bed.daemon.wait_ready(ABUSED)?;
        converse(&bed, budget)?;
    }
    let tenant = bed.daemon.wait_ready(ABUSED)?;
    assert_eq!(tenant.failures, 0, "a hang-up is no failure of the worker");
    bed.finish()?;
    Ok(())
}

#[test]
fn region_longer_than_its_file_is_refused() -> Result<()> {
    let bed = Bed::new()?;
    let front = negotiated(&bed)?;
    let file = memory_file((1 << 20) + RAM, SealFlags::empty())?;
    let ram = GuestRam::from_file(&file, RAM)?;
    file.set_len((1 << 20) + RAM - PAGE)?;
    assert!(front.vhost.set_mem_table(&ram.regions()?).is_err());
    assert!(front.vhost.get_features().is_ok(), "a worker that knows nothing of it goes on");
    drop(front);
    bed.finish()?;
    Ok(())
}

#[test]
fn unsealed_memory_is_refused_where_the_operator_says_so() -> Result<()> {
    let bed = Bed::with("unsealed_memory = \"refuse\"")?;
    let front = negotiated(&bed)?;
    let ram = GuestRam::from_file(&memory_file((1 << 20) + RAM, SealFlags::GROW)?, RAM)?;
    assert!(front.vhost.set_mem_table(&ram.regions()?).is_err());
    drop(front);
    // Sealed memory is what the check at the end uses.
    bed.finish()?;
    Ok(())
}

#[test]
fn memory_that_is_cut_off_kills_that_worker_alone() -> Result<()> {
    let mut bed = Bed::new()?;
    let file = memory_file((1 << 20) + RAM, SealFlags::GROW)?;
    let ram = GuestRam::from_file(&file, RAM)?;
    let mut front = FrontEnd::connect(&bed.daemon.socket(ABUSED))?;
    front.negotiate(FEATURES)?;
    let queues = make_queues(&front, &ram, 64)?;
    front.start(&ram, &queues.iter().collect::<Vec<_>>())?;
    bed.serves(BESIDE)?;
    let before = bed.daemon.tenant(ABUSED)?;
    file.set_len(1 << 20)?;
    queues[0].raw_kick()?;
    assert!(front.wait_hangup(Instant::now() + PATIENCE)?, "no worker can take over");
    let after = bed.daemon.wait_ready(ABUSED)?;
    assert!(after.failures > before.failures);
    assert!(after.session > before.session);
    bed.finish()?;
    Ok(())
}

#[test]
fn kick_that_is_no_event_counter_is_not_waited_for() -> Result<()> {
    let mut bed = Bed::new()?;
    let (reader, writer) = std::io::pipe()?;
    let (socket, _peer) = UnixStream::pair()?;
    let null = File::open("/dev/null")?;
    let regular = tempfile::tempfile()?;
    (&writer).write_all(&[1])?;
    for fd in [reader.as_raw_fd(), writer.as_raw_fd(), socket.as_raw_fd(), null.as_raw_fd(), regular.as_raw_fd()] {
        bed.daemon.wait_ready(ABUSED)?;
        let mut guest = RawGuest::connect(&bed.daemon.socket(ABUSED), 64)?;
        guest.hello()?;
        // Whether this is an answer or the end, nobody may wait on the descriptor afterwards.
        let _ = guest.front.kick_with(2, fd).and_then(|()| guest.front.call_with(0, fd));
        let _ = guest.front.stop_queue(2);
        drop(guest);
        bed.check()?;
    }
    bed.finish()?;
    Ok(())
}

#[test]
fn rings_outside_memory_never_run() -> Result<()> {
    let mut bed = Bed::new()?;
    let ram = GuestRam::new(RAM)?;
    let inside = ram.host_address(1 << 20)?;
    let end = ram.host_address(ram.end() - 64)?;
    let places = [
        [0, inside, inside],
        [inside, !1, inside],
        [inside, inside, 8],
        [end, inside, inside],
        [inside, end, inside],
        [inside, inside, end],
        [inside + 1, inside, inside],
    ];
    for [desc_table_addr, avail_ring_addr, used_ring_addr] in places {
        bed.daemon.wait_ready(ABUSED)?;
        let mut front = negotiated(&bed)?;
        front.set_memory(&ram)?;
        let queue = harness::Virtqueue::new(&ram, 64, front.rules())?;
        let addresses = VringConfigData {
            queue_max_size: 64,
            queue_size: 64,
            flags: 0,
            desc_table_addr,
            used_ring_addr,
            avail_ring_addr,
            log_addr: None,
        };
        front.vhost.set_vring_num(0, 64)?;
        let taken = front.vhost.set_vring_addr(0, &addresses).is_ok()
            && front.vhost.set_vring_base(0, 0).is_ok()
            && front.vhost.set_vring_kick(0, queue.kick_fd()).is_ok()
            && front.vhost.set_vring_enable(0, true).is_ok();
        queue.raw_kick()?;
        if taken {
            // The connection lives, so an answer comes; the queue has not moved.
            assert_eq!(front.stop_queue(0)?, 0);
        }
        drop(front);
    }
    bed.finish()?;
    Ok(())
}

#[test]
fn queue_sizes_that_cannot_be_are_refused_or_ignored() -> Result<()> {
    let mut bed = Bed::new()?;
    for size in [0, 3, 1000, 1025, 32768, 65535] {
        bed.daemon.wait_ready(ABUSED)?;
        let ram = GuestRam::new(RAM)?;
        let mut front = negotiated(&bed)?;
        front.set_memory(&ram)?;
        if front.vhost.set_vring_num(0, size).is_ok() {
            let queue = harness::Virtqueue::new(&ram, 64, front.rules())?;
            let started = front.start_queue(&ram, 0, &queue, 0).and_then(|()| front.enable(0, true));
            started.and_then(|()| front.stop_queue(0).map(drop))?;
        }
    }
    bed.finish()?;
    Ok(())
}

#[test]
fn queues_that_do_not_exist_are_refused() -> Result<()> {
    let mut bed = Bed::new()?;
    for index in [4, 63] {
        bed.daemon.wait_ready(ABUSED)?;
        let front = negotiated(&bed)?;
        assert!(front.vhost.set_vring_num(index, 64).is_err());
    }
    bed.finish()?;
    Ok(())
}

#[test]
fn bytes_that_are_no_message_end_the_connection() -> Result<()> {
    let mut bed = Bed::new()?;
    let header = |request: u32, flags: u32, size: u32| [request, flags, size].map(u32::to_le_bytes).concat();
    let inputs = [
        vec![0xff; 12],
        vec![0; 4096],
        header(1, 1, u32::MAX),
        header(5, 1, 8),
        [header(5, 1, 8), u32::MAX.to_le_bytes().to_vec(), vec![0; 4]].concat(),
        header(9999, 1, 0),
        header(24, 1, 0x1000),
        header(1, 0xffff_fff1, 0),
    ];
    for input in inputs {
        bed.daemon.wait_ready(ABUSED)?;
        let mut socket = UnixStream::connect(bed.daemon.socket(ABUSED))?;
        socket.write_all(&input)?;
        // The half-closed connection is the end of a message that is too short.
        socket.shutdown(std::net::Shutdown::Write)?;
        std::io::copy(&mut socket, &mut std::io::sink()).or_else(|error| match error.kind() {
            std::io::ErrorKind::ConnectionReset => Ok(0),
            _ => Err(error),
        })?;
    }
    bed.finish()?;
    Ok(())
}

#[test]
fn silent_front_end_holds_up_nobody_else() -> Result<()> {
    let bed = Bed::new()?;
    let silent = UnixStream::connect(bed.daemon.socket(ABUSED))?;
    bed.serves(BESIDE)?;
    drop(silent);
    bed.finish()?;
    Ok(())
}

#[test]
fn features_that_were_not_offered_are_refused() -> Result<()> {
    let bed = Bed::new()?;
    let mut front = FrontEnd::connect(&bed.daemon.socket(ABUSED))?;
    front.negotiate(FEATURES)?;
    assert!(front.vhost.set_features(u64::MAX).is_err());
    drop(front);
    bed.finish()?;
    Ok(())
}

#[test]
fn daemon_does_not_grow_over_a_hundred_bad_connections() -> Result<()> {
    let mut bed = Bed::new()?;
    let round = |bed: &mut Bed, n: usize| -> Result<()> {
        bed.daemon.wait_ready(ABUSED)?;
        converse(bed, 5 + n % 30)?;
        bed.daemon.wait_ready(ABUSED)?;
        Ok(())
    };
    for n in 0..10 {
        round(&mut bed, n)?;
    }
    let (files, resident) = bed.footprint()?;
    for n in 0..100 {
        round(&mut bed, n)?;
    }
    let (files_after, resident_after) = bed.footprint()?;
    // The operator's last connection may be open or closed at either moment; a leak would be one a round.
    assert!(files_after < files + 10, "{files} open files grew to {files_after}");
    assert!(resident_after < resident + (4 << 20), "{resident} bytes resident grew to {resident_after}");
    bed.finish()?;
    Ok(())
}
