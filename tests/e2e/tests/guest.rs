//! Guests that break the rules of virtqueues and of the device: every chain goes back, the queue goes on, and nobody else notices.

use anyhow::{Context, Result};
use e2e::bed::{ABUSED, BESIDE, Bed};
use harness::RawGuest;
use harness::daemon::resident;
use harness::frontend::{EVENT_IDX, VERSION_1};
use harness::virtqueue::{INDIRECT, NEXT, RawDescriptor, WRITE};
use vdev_wire::{CONTROL_QUEUE, FIRST_SUBMIT_QUEUE, MAX_CHAIN, Opcode, ProbeReply, Status};

const SIZE: u16 = 128;
/// Descriptors that well-behaved chains do not get to.
const HEAD: u16 = 100;

type Chain = Vec<(u16, RawDescriptor)>;

fn d(addr: u64, len: u32, flags: u16, next: u16) -> RawDescriptor {
    RawDescriptor { addr, len, flags, next }
}

/// Chains of the descriptor table that are wrong, each from [`HEAD`] on. `page` is a page of memory, `end` the first address after it all.
fn wrong_chains(page: u64, end: u64) -> Vec<(&'static str, Chain)> {
    let long: Chain = (0..=u16::try_from(MAX_CHAIN).unwrap_or(0))
        .map(|n| (20 + n, d(page, 16, NEXT, 21 + n)))
        .chain([(21 + u16::try_from(MAX_CHAIN).unwrap_or(0), d(page, 16, WRITE, 0)), (HEAD, d(page, 16, NEXT, 20))])
        .collect();
    vec![
        ("a loop of one", vec![(HEAD, d(page, 16, NEXT, HEAD))]),
        ("a loop of two", vec![(HEAD, d(page, 16, NEXT, HEAD + 1)), (HEAD + 1, d(page, 16, NEXT, HEAD))]),
        ("next outside the table", vec![(HEAD, d(page, 16, NEXT, SIZE))]),
        ("next far outside the table", vec![(HEAD, d(page, 16, NEXT, u16::MAX))]),
        ("zero length", vec![(HEAD, d(page, 0, 0, 0))]),
        ("zero length to write", vec![(HEAD, d(page, 0, WRITE, 0))]),
        ("outside memory", vec![(HEAD, d(end, 64, 0, 0))]),
        ("across the end of memory", vec![(HEAD, d(end - 8, 64, 0, 0))]),
        ("past the end of the space", vec![(HEAD, d(u64::MAX - 7, 64, 0, 0))]),
        ("4 GiB of it", vec![(HEAD, d(page, u32::MAX, 0, 0))]),
        ("readable after writable", vec![(HEAD, d(page, 64, WRITE | NEXT, HEAD + 1)), (HEAD + 1, d(page, 64, 0, 0))]),
        ("writable alone", vec![(HEAD, d(page, 64, WRITE, 0))]),
        ("readable alone", vec![(HEAD, d(page, 64, 0, 0))]),
        ("unknown flags", vec![(HEAD, d(page, 64, 0xfff8, 0))]),
        ("longer than the cap", long),
    ]
}

/// Indirect tables that are wrong: the descriptor that names the table, and the table.
fn wrong_tables(page: u64, table: u64, end: u64) -> Vec<(&'static str, RawDescriptor, Vec<RawDescriptor>)> {
    let good = vec![d(page, 64, NEXT, 1), d(page + 64, 64, WRITE, 0)];
    let long: Vec<_> = (0..u16::try_from(MAX_CHAIN).unwrap_or(0) + 1).map(|n| d(page, 16, NEXT, n + 1)).collect();
    vec![
        ("length no multiple of 16", d(table, 31, INDIRECT, 0), good.clone()),
        ("no length", d(table, 0, INDIRECT, 0), good.clone()),
        ("table outside memory", d(end, 32, INDIRECT, 0), good.clone()),
        ("table across the end of memory", d(end - 16, 32, INDIRECT, 0), good.clone()),
        ("table of 4 GiB", d(table, !15, INDIRECT, 0), good.clone()),
        ("table of 65536", d(table, 16 << 16, INDIRECT, 0), long.clone()),
        ("table longer than the cap", d(table, u32::try_from(long.len() * 16).unwrap_or(0), INDIRECT, 0), long),
        ("table in a table", d(table, 32, INDIRECT, 0), vec![d(table, 32, INDIRECT, 0), d(page, 64, WRITE, 0)]),
        ("indirect and next", d(table, 32, INDIRECT | NEXT, HEAD + 1), good.clone()),
        ("indirect and writable", d(table, 32, INDIRECT | WRITE, 0), good),
        ("a loop", d(table, 32, INDIRECT, 0), vec![d(page, 64, NEXT, 1), d(page, 64, NEXT, 0)]),
        ("next outside the table", d(table, 32, INDIRECT, 0), vec![d(page, 64, NEXT, 2), d(page, 64, WRITE, 0)]),
    ]
}

/// A good request on the control queue and an empty chain's answer on the submission queue.
fn still_answers(guest: &mut RawGuest, what: &str) -> Result<()> {
    let reply = guest.control(Opcode::Probe, 0, &[0u8; 0], size_of::<ProbeReply>())?;
    assert_eq!(reply.status, Status::Ok, "PROBE after {what}");
    Ok(())
}

#[test]
fn wrong_chains_go_back_and_the_queue_goes_on() -> Result<()> {
    let bed = Bed::new()?;
    let mut guest = RawGuest::connect_with(&bed.daemon.socket(ABUSED), SIZE, VERSION_1 | EVENT_IDX)?;
    guest.hello()?;
    let page = guest.ram.alloc(4096)?;
    for queue in [CONTROL_QUEUE, FIRST_SUBMIT_QUEUE] {
        for (what, chain) in wrong_chains(page.gpa(), guest.ram.end()) {
            let driver = &mut guest.queues[usize::from(queue)];
            for (index, descriptor) in chain {
                driver.raw_descriptor(index, descriptor)?;
            }
            driver.raw_submit(HEAD)?;
            let used = guest.next_used(queue).with_context(|| format!("{what} on queue {queue}"))?;
            assert_eq!(used.head, HEAD);
            assert!(used.len <= 64, "{what}: {} bytes written", used.len);
            still_answers(&mut guest, what)?;
        }
    }
    bed.serves(BESIDE)?;
    drop(guest);
    bed.finish()?;
    Ok(())
}

#[test]
fn wrong_indirect_tables_go_back_and_the_queue_goes_on() -> Result<()> {
    let bed = Bed::new()?;
    let mut guest = RawGuest::connect(&bed.daemon.socket(ABUSED), SIZE)?;
    guest.hello()?;
    let (page, table) = (guest.ram.alloc(4096)?, guest.ram.alloc(1 << 20)?);
    for queue in [CONTROL_QUEUE, FIRST_SUBMIT_QUEUE] {
        for (what, head, entries) in wrong_tables(page.gpa(), table.gpa(), guest.ram.end()) {
            let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_bytes()).collect();
            table.write(0, &bytes)?;
            let driver = &mut guest.queues[usize::from(queue)];
            driver.raw_descriptor(HEAD, head)?;
            driver.raw_descriptor(HEAD + 1, d(page.gpa(), 64, WRITE, 0))?;
            driver.raw_submit(HEAD)?;
            let used = guest.next_used(queue).with_context(|| format!("{what} on queue {queue}"))?;
            assert_eq!(used.head, HEAD);
            still_answers(&mut guest, what)?;
        }
    }
    bed.serves(BESIDE)?;
    drop(guest);
    bed.finish()?;
    Ok(())
}

#[test]
fn worker_does_not_grow_over_a_hundred_rounds_of_wrong_chains() -> Result<()> {
    let bed = Bed::new()?;
    let mut guest = RawGuest::connect_with(&bed.daemon.socket(ABUSED), SIZE, VERSION_1 | EVENT_IDX)?;
    guest.hello()?;
    let page = guest.ram.alloc(4096)?;
    let worker = bed.daemon.tenant(ABUSED)?.worker_pid.context("A connected tenant has a worker")?;
    let chains = wrong_chains(page.gpa(), guest.ram.end());
    let mut before = 0;
    for round in 0..110 {
        for queue in [CONTROL_QUEUE, FIRST_SUBMIT_QUEUE] {
            for (what, chain) in &chains {
                for (index, descriptor) in chain {
                    guest.queues[usize::from(queue)].raw_descriptor(*index, *descriptor)?;
                }
                guest.queues[usize::from(queue)].raw_submit(HEAD)?;
                guest.next_used(queue).with_context(|| format!("{what} on queue {queue}"))?;
            }
        }
        if round == 9 {
            before = resident(worker)?;
        }
    }
    let after = resident(worker)?;
    assert!(after < before + (4 << 20), "{before} bytes resident grew to {after}");
    drop(guest);
    bed.finish()?;
    Ok(())
}

#[test]
fn runaway_index_stops_that_queue_until_it_is_started_again() -> Result<()> {
    let bed = Bed::new()?;
    let mut guest = RawGuest::connect(&bed.daemon.socket(ABUSED), SIZE)?;
    guest.hello()?;
    let submit = guest.submit_queue();
    submit.raw_avail_index(submit.published().wrapping_add(SIZE + 1))?;
    submit.raw_kick()?;
    still_answers(&mut guest, "a runaway index")?;
    assert_eq!(guest.submit_queue().raw_used_index()?, 0, "nothing is taken from such a ring");
    let base = guest.submit_queue().published();
    guest.submit_queue().raw_avail_index(base)?;
    guest.restart(FIRST_SUBMIT_QUEUE)?;
    let page = guest.ram.alloc(4096)?;
    guest.submit_queue().raw_descriptor(HEAD, d(page.gpa(), 64, WRITE, 0))?;
    guest.submit_queue().raw_submit(HEAD)?;
    assert_eq!(guest.next_used(FIRST_SUBMIT_QUEUE)?.head, HEAD);
    drop(guest);
    bed.finish()?;
    Ok(())
}

#[test]
fn heads_outside_the_table_stop_that_queue_alone() -> Result<()> {
    let bed = Bed::new()?;
    let mut guest = RawGuest::connect(&bed.daemon.socket(ABUSED), SIZE)?;
    guest.hello()?;
    let submit = guest.submit_queue();
    submit.raw_avail(0, u16::MAX)?;
    submit.raw_avail_index(1)?;
    submit.raw_kick()?;
    still_answers(&mut guest, "a head outside the table")?;
    drop(guest);
    bed.finish()?;
    Ok(())
}

#[test]
fn storm_of_kicks_holds_up_nobody() -> Result<()> {
    let bed = Bed::new()?;
    let mut guest = RawGuest::connect(&bed.daemon.socket(ABUSED), SIZE)?;
    guest.hello()?;
    for _ in 0..20_000 {
        for queue in &guest.queues {
            queue.raw_kick()?;
        }
    }
    still_answers(&mut guest, "a storm of kicks")?;
    bed.serves(BESIDE)?;
    drop(guest);
    bed.finish()?;
    Ok(())
}
