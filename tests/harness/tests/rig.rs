//! The transport, a device and a guest's driver in one process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use harness::frontend::{INDIRECT_DESC, VERSION_1};
use harness::{DriverOptions, GuestRam, InProcessDriver, RawGuest, Rig, RigOptions};
use peergate_guest::uapi::{self, Alloc, Completion, Event, Peer, Work};
use peergate_guest::{Channel, Driver, Error, Status};
use vdev_device::Counter;

const RW: u32 = uapi::READ | uapi::WRITE;
const SOON: Duration = Duration::from_secs(20);

fn connect(rig: &Rig, options: DriverOptions) -> Result<InProcessDriver> {
    InProcessDriver::connect(&rig.socket(), DriverOptions { ram: 32 << 20, ..options })
}

fn copy(source: u64, destination: u64, length: u64) -> Work {
    Work { opcode: uapi::WORK_COPY, initiator: uapi::INITIATOR_ANY, source, destination, length, ..Work::default() }
}

fn run(channel: &dyn Channel, work: Work) -> Result<Completion> {
    channel.submit(0, &[work])?;
    let mut ended = [Completion::default()];
    ensure!(channel.completions(&mut ended, 1, Instant::now() + SOON)? == 1, "Nothing completed");
    Ok(ended[0])
}

fn event(channel: &dyn Channel) -> Result<Event> {
    channel.event(Instant::now() + SOON)?.context("An event must come")
}

fn alloc(channel: &dyn Channel, endpoint: u32, length: u64) -> Result<Alloc> {
    Ok(channel.alloc(Alloc { endpoint, flags: RW, length, ..Alloc::default() })?)
}

/// Bytes from the guest over both GPUs and back.
fn round_trip(channel: &dyn Channel) -> Result<()> {
    const LEN: u64 = 300_000;
    let host = channel.map(2 * 512 * 1024, RW)?;
    let (first, second) = (alloc(channel, 0, LEN)?, alloc(channel, 1, LEN)?);
    channel.peer(Peer { op: uapi::PEER_ENABLE, accessor: 0, owner: 1, rights: RW, ..Peer::default() })?;
    let bytes: Vec<u8> = (0..LEN).map(|i| (i * i % 253) as u8).collect();
    host.write_at(0, &bytes)?;
    let hops = [host.iova(), first.iova, second.iova, host.iova() + 512 * 1024];
    let paths = [uapi::PATH_LOCAL, uapi::PATH_DIRECT, uapi::PATH_LOCAL];
    for (hop, path) in hops.windows(2).zip(paths) {
        let ended = run(channel, copy(hop[0], hop[1], LEN))?;
        assert_eq!((ended.status, ended.bytes), (Status::Ok.to_raw(), LEN));
        assert_eq!(u32::from(ended.path), u32::from(path));
    }
    let mut back = vec![0; bytes.len()];
    host.read_at(512 * 1024, &mut back)?;
    assert!(back == bytes, "the bytes come back as they were");
    channel.free(first.handle)?;
    channel.free(second.handle)?;
    channel.unmap(host.iova(), host.len())?;
    Ok(())
}

#[test]
fn bytes_go_round_with_every_choice_of_features() -> Result<()> {
    let all = DriverOptions::default();
    for options in [
        all,
        DriverOptions { features: VERSION_1, ..all },
        DriverOptions { features: VERSION_1 | INDIRECT_DESC, queue_size: 16, ..all },
        DriverOptions { polling: true, ..all },
        DriverOptions { longest_run: 4096, ..all },
    ] {
        let rig = Rig::start(&RigOptions::default())?;
        let driver = connect(&rig, options)?;
        round_trip(&*driver.open()?)?;
        drop(driver);
        rig.finish()??;
    }
    Ok(())
}

#[test]
fn device_does_not_run_without_version_1() -> Result<()> {
    let rig = Rig::start(&RigOptions::default())?;
    let mut guest = RawGuest::connect_with(&rig.socket(), 64, 0)?;
    guest.queues[0].add(&[harness::virtqueue::Buffer::writable(guest.ram.alloc(4096)?.gpa(), 64)])?;
    guest.queues[0].publish()?;
    // A stop that is answered comes after any turn the queue had.
    assert_eq!(guest.front.stop_queue(0)?, 0);
    drop(guest);
    rig.finish()??;
    Ok(())
}

#[test]
fn refusal_reaches_the_channel_that_asked_and_the_operator() -> Result<()> {
    let rig = Rig::start(&RigOptions::default())?;
    let driver = connect(&rig, DriverOptions::default())?;
    let (mine, other) = (driver.open()?, driver.open()?);
    let buffer = alloc(&*mine, 0, 4096)?;
    let ended = run(&*mine, Work { cookie: 77, ..copy(buffer.iova, buffer.iova + 4096, 64) })?;
    assert_eq!((ended.status, ended.fault_address), (Status::Fault.to_raw(), buffer.iova + 4096));
    let told = event(&*mine)?;
    assert_eq!((told.kind, told.cookie, told.address), (uapi::EVENT_FAULT, 77, buffer.iova + 4096));
    assert_eq!(other.event(Instant::now())?, None, "nobody else hears of it");
    let faults = rig.recorder().faults();
    assert_eq!(faults.len(), 1);
    assert_eq!((faults[0].cookie, faults[0].address.0), (77, buffer.iova + 4096));
    Ok(())
}

#[test]
fn channels_work_side_by_side() -> Result<()> {
    let rig = Rig::start(&RigOptions { submit_queues: 2, ..RigOptions::default() })?;
    let driver = connect(&rig, DriverOptions::default())?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    for _ in 0..5 {
                        round_trip(&*driver.open()?)?;
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))
    })?;
    assert_eq!(rig.recorder().counted(Counter::Errors), 0);
    drop(driver);
    rig.finish()??;
    Ok(())
}

#[test]
fn devices_on_one_guest_memory_do_not_disturb_each_other() -> Result<()> {
    let ram = GuestRam::new(64 << 20)?;
    let one = &|work: &dyn Fn(&InProcessDriver) -> Result<()>| -> Result<()> {
        let rig = Rig::start(&RigOptions::default())?;
        let driver = InProcessDriver::connect_on(&rig.socket(), Arc::clone(&ram), DriverOptions::default())?;
        work(&driver)?;
        assert_eq!(rig.recorder().counted(Counter::Errors), 0);
        drop(driver);
        rig.finish()??;
        Ok(())
    };
    let (over, (begun, begins)) = (&AtomicBool::new(false), channel());
    std::thread::scope(|scope| -> Result<()> {
        // One device works all the time.
        let steady = scope.spawn(move || {
            one(&|driver| {
                round_trip(&*driver.open()?)?;
                begun.send(())?;
                while !over.load(Ordering::Relaxed) {
                    round_trip(&*driver.open()?)?;
                }
                Ok(())
            })
        });
        // Others come, work, are paused, and go.
        let others = || {
            begins.recv().context("The first device does not work")?;
            (0..10).try_for_each(|_| {
                one(&|driver| {
                    round_trip(&*driver.open()?)?;
                    driver.pause_and_resume()?;
                    round_trip(&*driver.open()?)
                })
            })
        };
        let worked = others();
        over.store(true, Ordering::Relaxed);
        steady.join().expect("no thread panics")?;
        worked
    })
}

#[test]
fn pauses_lose_nothing_while_work_goes_on() -> Result<()> {
    let rig = Rig::start(&RigOptions::default())?;
    let driver = connect(&rig, DriverOptions::default())?;
    let (stop, working) = (AtomicBool::new(false), Barrier::new(2));
    std::thread::scope(|scope| -> Result<()> {
        let worker = scope.spawn(|| -> Result<u32> {
            let mut rounds = 0;
            working.wait();
            loop {
                round_trip(&*driver.open()?)?;
                rounds += 1;
                if stop.load(Ordering::Relaxed) {
                    return Ok(rounds);
                }
            }
        });
        working.wait();
        let paused = (0..50).try_for_each(|_| driver.pause_and_resume());
        stop.store(true, Ordering::Relaxed);
        paused?;
        assert!(worker.join().expect("no thread panics")? > 0);
        Ok(())
    })?;
    round_trip(&*driver.open()?)?;
    drop(driver);
    rig.finish()??;
    Ok(())
}

#[test]
fn channel_finds_out_that_the_device_is_gone() -> Result<()> {
    let rig = Rig::start(&RigOptions::default())?;
    let driver = connect(&rig, DriverOptions::default())?;
    let channel = driver.open()?;
    driver.front_end().socket().shutdown(std::net::Shutdown::Both)?;
    assert!(matches!(channel.event(Instant::now() + SOON), Err(Error::Gone)));
    assert!(matches!(channel.free(1), Err(Error::Gone)));
    drop((channel, driver));
    rig.finish()??;
    Ok(())
}

#[test]
fn sessions_leave_no_descriptors_behind() -> Result<()> {
    let round = || -> Result<()> {
        let rig = Rig::start(&RigOptions::default())?;
        let driver = connect(&rig, DriverOptions::default())?;
        round_trip(&*driver.open()?)?;
        drop(driver);
        rig.finish()??;
        Ok(())
    };
    let descriptors = || harness::daemon::open_files(std::process::id());
    round()?;
    // Other tests of this program open and close descriptors meanwhile: it is the growth over many rounds that counts.
    let before = descriptors()?;
    for _ in 0..60 {
        round()?;
    }
    assert!(descriptors()? < before + 60, "descriptors are left behind by each session");
    Ok(())
}
