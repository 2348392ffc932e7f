//! VMs that come, pause, and go.

use anyhow::{Context, Result, ensure};
use e2e::bed::{ABUSED, Bed, next_completion, round_trip};
use e2e::scenario::Scenario;
use harness::{Binaries, DriverOptions, InProcessDriver, RawGuest};
use peergate_guest::uapi::{self, Alloc, Work};
use peergate_guest::{Driver, Status};
use vdev_wire::{Attach, Opcode, SubmitHeader, VERSION};
use vmm_control::TenantState;
use zerocopy::IntoBytes;

fn connect(bed: &Bed) -> Result<InProcessDriver> {
    InProcessDriver::connect(&bed.daemon.socket(ABUSED), DriverOptions { ram: 32 << 20, ..DriverOptions::default() })
}

#[test]
fn demo_runs_without_a_vm() -> Result<()> {
    let scenario = Scenario::demo(Binaries::build()?, None);
    let mut failed = Vec::new();
    let mut rows = 0;
    let all = scenario.run(&mut |row| {
        rows += 1;
        if !row.ok {
            failed.push(format!("{}: expected {}, got {}", row.name, row.expected, row.got));
        }
    })?;
    assert!(all && failed.is_empty(), "{}", failed.join("\n"));
    assert!(rows > 20, "{rows} rows are no scenario");
    Ok(())
}

#[test]
fn next_vm_finds_a_new_session_and_clean_memory() -> Result<()> {
    let mut bed = Bed::new()?;
    let mut sessions = Vec::new();
    for _ in 0..5 {
        bed.daemon.wait_ready(ABUSED)?;
        let driver = connect(&bed)?;
        sessions.push(driver.session());
        let channel = driver.open()?;
        let endpoint = channel.endpoint(0)?;
        let rights = uapi::READ | uapi::WRITE;
        let request =
            Alloc { endpoint: endpoint.endpoint, flags: rights, length: endpoint.memory_free, ..Alloc::default() };
        let all = channel.alloc(request)?;
        let host = channel.map(1 << 20, rights)?;
        host.write_at(0, &vec![0xa5; 1 << 20])?;
        e2e::bed::copy(&*channel, all.iova, host.iova(), 1 << 20)?;
        let mut bytes = vec![1; 1 << 20];
        host.read_at(0, &mut bytes)?;
        ensure!(bytes.iter().all(|byte| *byte == 0), "The last VM's bytes are still there");
        host.write_at(0, &vec![0x5a; 1 << 20])?;
        e2e::bed::copy(&*channel, host.iova(), all.iova, 1 << 20)?;
        // Gone without a word, as a VM that crashed.
        std::mem::forget(channel);
        drop(driver);
    }
    assert!(sessions.windows(2).all(|pair| pair[0] < pair[1]), "{sessions:?}");
    bed.finish()?;
    Ok(())
}

#[test]
fn pause_keeps_everything() -> Result<()> {
    let bed = Bed::new()?;
    let driver = connect(&bed)?;
    let channel = driver.open()?;
    round_trip(&*channel)?;
    let rights = uapi::READ | uapi::WRITE;
    let host = channel.map(4096, rights)?;
    let buffer = channel.alloc(Alloc { endpoint: 0, flags: rights, length: 4096, ..Alloc::default() })?;
    host.write_at(0, b"before the pause")?;
    e2e::bed::copy(&*channel, host.iova(), buffer.iova, 4096)?;
    driver.pause_and_resume()?;
    host.write_at(0, &[0; 4096])?;
    e2e::bed::copy(&*channel, buffer.iova, host.iova(), 4096)?;
    let mut bytes = [0; 16];
    host.read_at(0, &mut bytes)?;
    assert_eq!(&bytes, b"before the pause");
    round_trip(&*channel)?;
    drop((host, channel, driver));
    bed.finish()?;
    Ok(())
}

#[test]
fn guest_may_start_over_with_hello() -> Result<()> {
    let bed = Bed::new()?;
    let mut guest = RawGuest::connect(&bed.daemon.socket(ABUSED), 64)?;
    for _ in 0..20 {
        guest.hello()?;
        let attach = Attach { endpoint: 0.into(), flags: 0.into() };
        assert_eq!(guest.control(Opcode::Attach, 1, &attach, 0)?.status, Status::Ok);
        assert_eq!(guest.control(Opcode::Attach, 1, &attach, 0)?.status, Status::Already);
    }
    drop(guest);
    bed.finish()?;
    Ok(())
}

#[test]
fn reset_of_the_device_stops_its_queues_and_it_starts_again() -> Result<()> {
    let bed = Bed::new()?;
    let mut guest = RawGuest::connect(&bed.daemon.socket(ABUSED), 64)?;
    guest.hello()?;
    guest.front.reset()?;
    guest.queues = harness::frontend::make_queues(&guest.front, &guest.ram, 64)?;
    guest.front.start(&guest.ram, &guest.queues.iter().collect::<Vec<_>>())?;
    guest.hello()?;
    drop(guest);
    bed.finish()?;
    Ok(())
}

#[test]
fn forged_domain_and_session_reach_nothing() -> Result<()> {
    let bed = Bed::new()?;
    let mut guest = RawGuest::connect(&bed.daemon.socket(ABUSED), 64)?;
    guest.hello()?;
    let attach = Attach { endpoint: 0.into(), flags: 0.into() };
    assert_eq!(guest.control(Opcode::Attach, 1, &attach, 0)?.status, Status::Ok);
    let session = guest.session;
    let cases = [(7, session, Status::NoEnt), (1, session.wrapping_add(1), Status::Lost), (1, session, Status::Fault)];
    let page = guest.ram.alloc(4096)?;
    for (domain, session, expected) in cases {
        let header = SubmitHeader {
            version: VERSION.into(),
            count: 1.into(),
            domain: domain.into(),
            flags: 0.into(),
            session: session.into(),
        };
        // Nothing is mapped, so even the right domain's work is refused, but for that reason.
        let work = harness::raw::copy_work(9, 0x1000, 0x2000, 64);
        let status = guest.submit_one(&page, header.as_bytes(), &work)?;
        assert_eq!(status, expected, "domain {domain}, session {session}");
    }
    guest.session = session.wrapping_sub(1);
    assert_eq!(guest.control(Opcode::Attach, 2, &attach, 0)?.status, Status::Stale);
    drop(guest);
    bed.finish()?;
    Ok(())
}

#[test]
fn vm_that_goes_in_the_middle_of_work_leaves_the_tenant_usable() -> Result<()> {
    let mut bed = Bed::new()?;
    for _ in 0..10 {
        bed.daemon.wait_ready(ABUSED)?;
        let driver = connect(&bed)?;
        let channel = driver.open()?;
        let rights = uapi::READ | uapi::WRITE;
        let buffer = channel.alloc(Alloc { endpoint: 0, flags: rights, length: 8 << 20, ..Alloc::default() })?;
        let half = 4 << 20;
        let work: Vec<Work> = (0..64)
            .map(|n| Work {
                opcode: uapi::WORK_COPY,
                stream: n % 4,
                initiator: 0,
                source: buffer.iova,
                destination: buffer.iova + half,
                length: half,
                ..Work::default()
            })
            .collect();
        channel.submit(0, &work)?;
        // At least one has run when the VM goes.
        next_completion(&*channel)?;
        std::mem::forget(channel);
        drop(driver);
    }
    bed.finish()?;
    Ok(())
}

#[test]
fn worker_that_is_killed_is_replaced_and_the_vmm_stays_connected() -> Result<()> {
    let mut bed = Bed::new()?;
    let driver = connect(&bed)?;
    let before = bed.daemon.tenant(ABUSED)?;
    harness::daemon::kill(before.worker_pid.context("A connected tenant has a worker")?)?;
    bed.daemon.wait_for("the next worker to take over", |daemon| {
        let now = daemon.tenant(ABUSED)?;
        Ok(now.state == TenantState::Connected && now.session == before.session + 1)
    })?;
    let after = bed.daemon.tenant(ABUSED)?;
    assert_eq!((after.failures, after.keeper_pid), (1, before.keeper_pid));
    assert!(after.last_outage_us.is_some());
    drop(driver);
    bed.finish()?;
    Ok(())
}
