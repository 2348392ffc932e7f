//! How a session of the transport ends, and what ends it.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use harness::ram::memory_file;
use harness::raw::{PATIENCE, copy_work};
use harness::virtqueue::Buffer;
use harness::{FrontEnd, GuestRam, RawGuest, Rig, RigOptions};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::SealFlags;
use vdev_wire::{Attach, Opcode, ProbeReply, Status, SubmitHeader, VERSION};
use vhost::VhostBackend;
use vmm_vhost_user::{ServeError, ThreadClass, UnsealedPolicy};
use zerocopy::IntoBytes;

fn answers(guest: &mut RawGuest) -> Result<()> {
    let reply = guest.control(Opcode::Probe, 0, &[0u8; 0], size_of::<ProbeReply>())?;
    ensure!(reply.status == Status::Ok, "PROBE was refused: {}", reply.status.name());
    Ok(())
}

#[test]
fn hang_up_is_a_good_end() -> Result<()> {
    let rig = Rig::start(&RigOptions::default())?;
    drop(RawGuest::connect(&rig.socket(), 64)?);
    assert!(rig.finish()?.is_ok());
    Ok(())
}

#[test]
fn message_out_of_place_is_the_front_ends_fault() -> Result<()> {
    let rig = Rig::start(&RigOptions::default())?;
    let front = FrontEnd::connect(&rig.socket())?;
    // Nothing is mapped yet, and the queue does not exist.
    assert!(front.vhost.set_vring_num(63, 64).is_ok(), "no answer was asked for");
    assert!(front.wait_hangup(Instant::now() + PATIENCE)?);
    assert!(matches!(rig.finish()?, Err(ServeError::FrontEnd { .. })));
    Ok(())
}

#[test]
fn refused_memory_is_the_front_ends_fault_and_is_never_read() -> Result<()> {
    let rig = Rig::start(&RigOptions { unsealed_memory: UnsealedPolicy::Refuse, ..RigOptions::default() })?;
    let file = memory_file(5 << 20, SealFlags::empty())?;
    let ram = GuestRam::from_file(&file, 4 << 20)?;
    file.set_len(0)?;
    let mut front = FrontEnd::connect(&rig.socket())?;
    front.negotiate(0)?;
    // Reading one byte of it would be the end of this process.
    assert!(front.set_memory(&ram).is_err());
    assert!(matches!(rig.finish()?, Err(ServeError::FrontEnd { .. })));
    Ok(())
}

#[test]
fn new_memory_table_takes_effect_while_queues_run() -> Result<()> {
    let rig = Rig::start(&RigOptions::default())?;
    let mut guest = RawGuest::connect(&rig.socket(), 64)?;
    guest.hello()?;
    for _ in 0..20 {
        guest.front.set_memory(&guest.ram)?;
        answers(&mut guest)?;
    }
    // A table without the rings: the queues cannot go on, and nothing worse.
    let other = GuestRam::new(4 << 20)?;
    let elsewhere = vhost::VhostUserMemoryRegionInfo { guest_phys_addr: 1 << 40, ..other.regions()?[1] };
    guest.front.vhost.set_mem_table(&[elsewhere])?;
    guest.queues[0].raw_kick()?;
    guest.front.stop_queue(0)?;
    drop(guest);
    assert!(rig.finish()?.is_ok());
    Ok(())
}

#[test]
fn kick_that_was_exchanged_under_the_event_loop_ends_the_session() -> Result<()> {
    let rig = Rig::start(&RigOptions::default())?;
    let mut guest = RawGuest::connect(&rig.socket(), 64)?;
    let other = eventfd(0, EventfdFlags::CLOEXEC)?;
    // The old kick stays in the event loop, because this side keeps it open, and is never read again.
    guest.front.kick_with(2, other.as_raw_fd())?;
    guest.queues[2].raw_kick()?;
    assert!(guest.front.wait_hangup(Instant::now() + PATIENCE)?);
    assert!(matches!(rig.finish()?, Err(ServeError::FrontEnd { .. })));
    Ok(())
}

#[test]
fn interrupt_that_blocks_holds_up_no_queue() -> Result<()> {
    let rig = Rig::start(&RigOptions::default())?;
    let mut guest = RawGuest::connect(&rig.socket(), 64)?;
    guest.hello()?;
    let full = eventfd(0, EventfdFlags::CLOEXEC)?;
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes())?;
    guest.front.call_with(0, full.as_raw_fd())?;
    let page = guest.ram.alloc(4096)?;
    for _ in 0..3 {
        guest.queues[0].add(&[Buffer::writable(page.gpa(), 64)])?.context("There is room")?;
        guest.queues[0].want_interrupt()?;
        guest.queues[0].publish()?;
    }
    // An answered stop comes after the interrupts.
    guest.front.stop_queue(0)?;
    drop(guest);
    assert!(rig.finish()?.is_ok());
    Ok(())
}

#[test]
fn panic_of_the_device_costs_one_queue() -> Result<()> {
    let rig = Rig::start(&RigOptions::default())?;
    let mut guest = RawGuest::connect(&rig.socket(), 64)?;
    guest.hello()?;
    let attach = Attach { endpoint: 0.into(), flags: 0.into() };
    assert_eq!(guest.control(Opcode::Attach, 1, &attach, 0)?.status, Status::Ok);
    rig.recorder().panic_at_fault();
    let header = SubmitHeader {
        version: VERSION.into(),
        count: 1.into(),
        domain: 1.into(),
        flags: 0.into(),
        session: guest.session.into(),
    };
    let page = guest.ram.alloc(4096)?;
    page.write(0, &[header.as_bytes(), copy_work(1, 0x1000, 0x2000, 64).as_bytes()].concat())?;
    guest.queues[2].add(&[Buffer::readable(page.gpa(), 80), Buffer::writable(page.gpa() + 2048, 32)])?;
    guest.queues[2].publish()?;
    let deadline = Instant::now() + PATIENCE;
    while !rig.recorder().has_panicked() {
        assert!(Instant::now() < deadline, "the work must be refused");
        answers(&mut guest)?;
    }
    answers(&mut guest)?;
    guest.front.stop_queue(2)?;
    answers(&mut guest)?;
    drop(guest);
    assert!(rig.finish()?.is_ok());
    Ok(())
}

#[test]
fn every_thread_passes_the_hook_once_and_first() -> Result<()> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let count = Arc::new(AtomicU32::new(0));
    let hook = {
        let (seen, count) = (Arc::clone(&seen), Arc::clone(&count));
        move |class: ThreadClass| {
            count.fetch_add(1, Ordering::Relaxed);
            seen.lock().unwrap().push((std::thread::current().id(), class));
        }
    };
    let rig = Rig::start_with(&RigOptions { submit_queues: 2, ..RigOptions::default() }, Arc::new(hook))?;
    let mut guest = RawGuest::connect(&rig.socket(), 64)?;
    guest.hello()?;
    answers(&mut guest)?;
    for queue in 0..4 {
        guest.front.stop_queue(queue)?;
    }
    drop(guest);
    assert!(rig.finish()?.is_ok());
    let seen = seen.lock().unwrap();
    let threads: std::collections::HashSet<_> = seen.iter().map(|(thread, _)| thread).collect();
    assert_eq!(threads.len(), seen.len(), "a thread passed twice: {seen:?}");
    let of = |class| seen.iter().filter(|(_, seen)| *seen == class).count();
    assert_eq!((of(ThreadClass::Connection), of(ThreadClass::Timekeeper)), (1, 1));
    assert!((1..=3).contains(&of(ThreadClass::Queue)), "{seen:?}");
    Ok(())
}
