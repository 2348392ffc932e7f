//! A front-end behind a keeper, whose devices come and go.

use std::io::{PipeWriter, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use anyhow::{Context, Result, ensure};
use harness::frontend::make_queues;
use harness::raw::PATIENCE;
use harness::rig::{JournalWords, journal_words};
use harness::{RawGuest, Rig, RigOptions};
use vdev_wire::{CONFIG_MAGIC, Opcode, ProbeReply, Status};
use vhost::VhostBackend;
use vmm_keeper::{Event, Keeper};

enum Command {
    Worker { stream: UnixStream, session: u32, fresh: bool },
    Stop,
}

/// A keeper on a thread of its own.
struct Kept {
    dir: tempfile::TempDir,
    commands: Sender<Command>,
    bell: PipeWriter,
    events: Receiver<Event>,
    thread: Option<JoinHandle<()>>,
    journal: JournalWords,
}

/// A device behind the keeper.
struct Worker {
    /// A way to cut it off; while it is open, nobody else's closing is seen.
    stream: UnixStream,
    rig: Rig,
}

impl Worker {
    /// Ends as if it had died: the keeper finds the stream closed.
    fn cut(self) -> Result<()> {
        self.stream.shutdown(Shutdown::Both)?;
        self.end()?
    }

    /// Waits until it has ended by itself, and says how.
    fn end(self) -> Result<Result<()>> {
        drop(self.stream);
        Ok(self.rig.finish()?.map_err(Into::into))
    }
}

impl Kept {
    fn start() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let listener = UnixListener::bind(dir.path().join("sock"))?;
        let (commands, orders) = channel();
        let (told, events) = channel();
        let (mut ring, bell) = std::io::pipe()?;
        let keep = move || {
            let mut keeper = Keeper::new(listener.into()).expect("a socket");
            loop {
                let turn = keeper.turn(Some(ring.as_fd()), None).expect("the keeper goes on");
                // A test that has ended listens no more.
                keeper.events().into_iter().for_each(|event| drop(told.send(event)));
                if turn.told {
                    ring.read_exact(&mut [0; 1]).expect("one byte a command");
                    match orders.recv().expect("a command") {
                        Command::Worker { stream, session, fresh } => keeper.add_worker(stream.into(), session, fresh),
                        Command::Stop => return,
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("keeper".into()).spawn(keep)?;
        Ok(Self { dir, commands, bell, events, thread: Some(thread), journal: journal_words() })
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("sock")
    }

    fn tell(&self, command: Command) -> Result<()> {
        self.commands.send(command)?;
        Ok((&self.bell).write_all(&[0])?)
    }

    fn add(&self, session: u32, fresh: bool) -> Result<Worker> {
        let journal = Some(Arc::clone(&self.journal));
        let rig = Rig::start(&RigOptions { session, journal, ..RigOptions::default() })?;
        let stream = UnixStream::connect(rig.socket())?;
        self.tell(Command::Worker { stream: stream.try_clone()?, session, fresh })?;
        Ok(Worker { rig, stream })
    }

    fn told(&self) -> Result<Event> {
        self.events.recv_timeout(PATIENCE).context("The keeper says nothing")
    }

    /// A guest whose queues run, at the first device.
    fn guest(&self) -> Result<(RawGuest, Worker)> {
        let worker = self.add(1, true)?;
        let guest = RawGuest::connect(&self.socket(), 64)?;
        assert_eq!(self.told()?, Event::Connected);
        Ok((guest, worker))
    }

    /// The next device in place of this one.
    fn replace(&self, worker: Worker, session: u32) -> Result<Worker> {
        worker.cut()?;
        let next = self.add(session, false)?;
        assert_eq!(self.told()?, Event::Replayed { session });
        Ok(next)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let stopped = self.tell(Command::Stop).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| stopped) {
            let _ = thread.join();
        }
    }
}

fn probe(guest: &mut RawGuest) -> Result<Status> {
    Ok(guest.control(Opcode::Probe, 0, &[0u8; 0], size_of::<ProbeReply>())?.status)
}

#[test]
fn a_front_end_goes_on_with_another_device_and_says_hello_again() -> Result<()> {
    let kept = Kept::start()?;
    let (mut guest, first) = kept.guest()?;
    guest.hello()?;
    for _ in 0..5 {
        assert_eq!(probe(&mut guest)?, Status::Ok);
    }
    let second = kept.replace(first, 2)?;
    let mut told = [0; 12];
    guest.front.request_channel().read_exact(&mut told)?;
    assert_eq!(told, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], "look at the configuration space");

    assert_eq!(probe(&mut guest)?, Status::Stale);
    guest.session = 0;
    guest.hello()?;
    assert_eq!(guest.session, 2);
    // Whatever else a VMM does goes on, too.
    assert_eq!(guest.front.config(0, 8)?, CONFIG_MAGIC);
    guest.front.set_memory(&guest.ram)?;
    for queue in 0..guest.front.queues() {
        guest.restart(queue)?;
    }
    assert_eq!(probe(&mut guest)?, Status::Ok);
    drop(guest);
    assert_eq!(kept.told()?, Event::Disconnected);
    second.end()??;
    Ok(())
}

#[test]
fn queues_that_were_stopped_or_reset_start_at_the_next_device_where_the_front_end_says() -> Result<()> {
    let kept = Kept::start()?;
    let (mut guest, worker) = kept.guest()?;
    guest.hello()?;
    let bases = (0..guest.queues.len()).map(|index| guest.front.stop_queue(index)).collect::<Result<Vec<_>>>()?;
    let worker = kept.replace(worker, 2)?;
    for (index, base) in bases.into_iter().enumerate() {
        guest.front.start_queue(&guest.ram, index, &guest.queues[index], base)?;
        guest.front.enable(index, true)?;
    }
    assert_eq!(probe(&mut guest)?, Status::Stale);

    guest.front.reset()?;
    let worker = kept.replace(worker, 3)?;
    guest.queues = make_queues(&guest.front, &guest.ram, 64)?;
    guest.front.start(&guest.ram, &guest.queues.iter().collect::<Vec<_>>())?;
    guest.session = 0;
    guest.hello()?;
    assert_eq!((probe(&mut guest)?, guest.session), (Status::Ok, 3));
    drop(guest);
    worker.end()??;
    Ok(())
}

#[test]
fn a_front_end_whose_message_ends_every_device_is_given_up_and_the_next_one_is_served() -> Result<()> {
    let kept = Kept::start()?;
    let (mut guest, worker) = kept.guest()?;
    // No queue is that long.
    assert!(guest.front.vhost.set_vring_num(0, 2048).is_err(), "it is told so");
    assert!(worker.end()?.is_err());
    let worker = kept.add(2, false)?;
    assert_eq!(kept.told()?, Event::Replayed { session: 2 }, "what was refused is not said again");
    guest.hello()?;

    guest.front.vhost.set_hdr_flags(vhost::vhost_user::message::VhostUserHeaderFlag::empty());
    guest.front.vhost.set_vring_num(0, 2048)?;
    assert!(worker.end()?.is_err());
    for session in 3..8 {
        assert!(kept.add(session, false)?.end()?.is_err());
    }
    let told = kept.told()?;
    assert!(matches!(told, Event::GaveUp { .. }), "{told:?}");
    assert_eq!(kept.told()?, Event::Disconnected);
    ensure!(guest.front.wait_hangup(std::time::Instant::now() + PATIENCE)?, "The connection is open still");
    let worker = kept.add(8, true)?;
    let mut guest = RawGuest::connect(&kept.socket(), 64)?;
    assert_eq!(kept.told()?, Event::Connected);
    guest.hello()?;
    drop(guest);
    worker.end()??;
    Ok(())
}

#[test]
fn a_guest_that_never_rests_outlives_many_devices() -> Result<()> {
    const DEVICES: u32 = 20;
    let kept = Kept::start()?;
    let (mut guest, first) = kept.guest()?;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let over = &over;
        let devices = scope.spawn(move || {
            let last = (2..=DEVICES).try_fold(first, |worker, session| kept.replace(worker, session));
            over.store(true, Ordering::Release);
            last.map(|last| (kept, last))
        });
        let mut served = 0_u64;
        let mut round = || -> Result<()> {
            guest.session = 0;
            guest.hello()?;
            while probe(&mut guest)? == Status::Ok {
                served += 1;
                guest.restart(0)?;
                if over.load(Ordering::Acquire) && guest.session == DEVICES {
                    return Ok(());
                }
            }
            anyhow::bail!("The session is over")
        };
        // HELLO itself may be lost; each device may end at most two of its tries.
        let good = (0..3 * DEVICES).any(|_| round().is_ok());
        let (_kept, last) = devices.join().expect("no panic")?;
        assert!(good, "the guest is served by the last device");
        assert!(served > 0);
        drop(guest);
        last.end()??;
        Ok(())
    })
}
